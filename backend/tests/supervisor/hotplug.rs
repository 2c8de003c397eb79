//! Disks with a hotplug script: ours, which leaves everything to the daemon, and others, which set up a
//! block device first. The toolstack runs either only after InitWait.

use xenblk_xenstore::Tx;

use crate::guest::Guest;
use crate::world::{World, eventually};

const MIB: u64 = 1 << 20;
const XVDA: u32 = 51712;
const OURS: (&str, &str) = ("script", "/etc/xen/scripts/block-xenblkd");
const FOREIGN: (&str, &str) = ("script", "/etc/xen/scripts/block");

#[tokio::test]
async fn our_script_is_not_waited_for() {
    let world = World::started().await;
    let image = world.image("disk", MIB);
    world.attach_with(1, XVDA, &image, "w", &[OURS]).await;
    world.reaches(1, XVDA, "2").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    guest.connect(&world, 1, 0).await;
    // The script's report, for QEMU's eyes, comes at any time and disturbs nothing.
    let report = [
        ("physical-device-path", image.as_str()),
        ("hotplug-status", "connected"),
    ];
    world.write_backend_keys(1, XVDA, &report).await;
    guest.check_data(0, 0x22).await;
}

/// libxl shows what the script says, and runs it only at InitWait.
#[tokio::test]
async fn a_target_that_cannot_be_had_is_for_our_script_to_tell() {
    let world = World::started().await;
    world
        .attach_with(1, XVDA, "/nonexistent/disk", "w", &[OURS])
        .await;
    world.reaches(1, XVDA, "2").await;
    let told = eventually("hotplug-error", async || {
        world.backend_key(1, XVDA, "hotplug-error").await
    })
    .await;
    assert!(
        told.starts_with("/nonexistent/disk: can't find it"),
        "{told}"
    );
    assert_eq!(world.error(1, XVDA).await, told);

    // The script fails, and the toolstack takes the device away.
    world
        .write_backend_keys(1, XVDA, &[("hotplug-status", "error")])
        .await;
    world.ask_to_detach(1, XVDA).await;
    world.reaches(1, XVDA, "6").await;
    world.remove(1, XVDA).await;
    eventually("the device is forgotten", async || {
        world.status(1, XVDA).await.is_none().then_some(())
    })
    .await;
    let gone = "/local/domain/0/backend/vbd/1/51712";
    assert_eq!(world.store.read_optional(Tx::NONE, gone).await, Ok(None));
}

#[tokio::test]
async fn a_foreign_script_sets_the_target_up_after_init_wait() {
    let world = World::started().await;
    let image = world.image("disk", MIB);
    // Not what is to be opened: the script makes something of it.
    world
        .attach_with(1, XVDA, "iscsi:target", "w", &[FOREIGN])
        .await;
    world.reaches(1, XVDA, "2").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    let keys = guest.make_rings(1, 0);
    guest.publish(&keys, "3").await;
    world
        .write_backend_keys(1, XVDA, &[("physical-device-path", &image)])
        .await;
    let status = world.status(1, XVDA).await.unwrap();
    assert_eq!((status.state.as_str(), status.error), ("InitWait", None));

    world
        .write_backend_keys(1, XVDA, &[("hotplug-status", "connected")])
        .await;
    guest.connected(&world).await;
    guest.check_data(0, 0x33).await;
}

#[tokio::test]
async fn another_device_than_the_scripts_is_refused() {
    let world = World::started().await;
    let image = world.image("disk", MIB);
    world.attach_with(1, XVDA, "x", "w", &[FOREIGN]).await;
    world.reaches(1, XVDA, "2").await;
    let keys = [
        ("physical-device", "7:3"),
        ("physical-device-path", image.as_str()),
        ("hotplug-status", "connected"),
    ];
    world.write_backend_keys(1, XVDA, &keys).await;
    let error = world.error(1, XVDA).await;
    assert_eq!(
        error,
        format!(
            "raw:{image}: is no block device, expected 7:3, which the hotplug script wrote to \
             physical-device"
        )
    );
    // Past Closing, which it may have left before anybody looked.
    world.reaches(1, XVDA, "6").await;
}
