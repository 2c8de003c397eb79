//! Disks with a hotplug script: ours, which leaves everything to the daemon, and others, which set up a
//! block device first. The toolstack runs either only after InitWait.

use xenblk_xenstore::Tx;
use xenblk_xenstore::vbd::Kind;

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
    // It waits for this, if the target takes longer than InitWait may.
    let target = eventually("target-status", async || {
        world.backend_key(1, XVDA, "target-status").await
    })
    .await;
    assert_eq!(target, "open");
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

/// libxl waits ten seconds for InitWait, so a target that takes long to fail fails after it.
#[tokio::test]
async fn a_target_that_fails_after_init_wait_is_for_our_script_to_tell() {
    let world = World::started().await;
    let path = world.path("script");
    let gate = crate::script::hang_up(&path);
    let path = path.to_str().unwrap();
    let params = format!("script:{path}");
    world.attach_with(1, XVDA, &params, "w", &[OURS]).await;
    world.reaches(1, XVDA, "2").await;
    assert_eq!(world.backend_key(1, XVDA, "target-status").await, None);
    drop(gate);
    let told = eventually("hotplug-error", async || {
        world.backend_key(1, XVDA, "hotplug-error").await
    })
    .await;
    assert!(told.starts_with(path), "{told}");
    // It stays where the script looks until that has seen it.
    assert_eq!(
        world.backend_key(1, XVDA, "state").await.as_deref(),
        Some("2")
    );
    assert_eq!(world.backend_key(1, XVDA, "target-status").await, None);
    world
        .write_backend_keys(1, XVDA, &[("hotplug-status", "error")])
        .await;
    world.reaches(1, XVDA, "6").await;
    assert_eq!(world.error(1, XVDA).await, told);
}

/// The toolstack has given the disk up, whose entry it leaves: nothing is left of it but that, and the guest
/// is not left waiting for it.
#[tokio::test]
async fn a_disk_whose_script_failed_is_closed() {
    for script in [OURS, FOREIGN] {
        let world = World::started().await;
        let image = world.image("disk", MIB);
        world.attach_with(1, XVDA, &image, "w", &[script]).await;
        world.reaches(1, XVDA, "2").await;
        let mut guest = Guest::new(&world, 1, XVDA).await;
        let failed = [
            ("hotplug-error", "the device is in use"),
            ("hotplug-status", "error"),
        ];
        world.write_backend_keys(1, XVDA, &failed).await;
        // The frontend is told before it connects, or is not connected.
        world.reaches(1, XVDA, "6").await;
        assert_eq!(world.error(1, XVDA).await, "the device is in use");
        guest.set_state("6").await;
        // What the administrator does then works at once.
        world.ask_to_detach(1, XVDA).await;
        world.reaches(1, XVDA, "6").await;
        world.remove(1, XVDA).await;
        eventually("the device is forgotten", async || {
            world.status(1, XVDA).await.is_none().then_some(())
        })
        .await;
        guest.free_rings();
    }
}

#[tokio::test]
async fn xapis_disks_wait_for_xapis_scripts() {
    let mut world = World::new().await;
    world.options.kind = Kind::Vbd3;
    // What belongs to the kernel is no concern of theirs.
    std::fs::write(world.path("blkback"), "").unwrap();
    world.start().await;
    let image = world.image("disk", MIB);
    // A disk of the other kind, which somebody else serves.
    world.attach(1, XVDA, &image, "w").await;
    let back = "/local/domain/0/backend/vbd3/2/51712";
    let front = "/local/domain/2/device/vbd/51712";
    let keys = [
        ("frontend", front),
        ("frontend-id", "2"),
        ("online", "1"),
        ("params", &image),
        ("mode", "w"),
        ("state", "1"),
    ];
    for (key, value) in keys {
        let node = format!("{back}/{key}");
        world.store.write(Tx::NONE, &node, value).await.unwrap();
    }
    let state = format!("{back}/state");
    for _ in 0..20 {
        // Time enough for one that doesn't wait.
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        assert_eq!(world.read(&state).await.as_deref(), Some("1"));
    }
    let connected = format!("{back}/hotplug-status");
    world
        .store
        .write(Tx::NONE, &connected, "connected")
        .await
        .unwrap();
    eventually("InitWait", async || {
        (world.read(&state).await.as_deref() == Some("2")).then_some(())
    })
    .await;
    assert_eq!(
        world.backend_key(1, XVDA, "state").await.as_deref(),
        Some("1")
    );
}

#[tokio::test]
async fn beside_the_kernels_backend_a_disk_is_left_alone() {
    let mut world = World::started().await;
    world.attach(1, XVDA, "memory:1M", "w").await;
    let mut served = Guest::new(&world, 1, XVDA).await;
    served.connect(&world, 1, 0).await;
    std::fs::write(world.path("blkback"), "").unwrap();
    world.attach(2, XVDA, "memory:1M", "w").await;
    let error = world.error(2, XVDA).await;
    assert!(
        error.contains("xen-blkback serves this disk") && error.contains("rmmod xen-blkback"),
        "{error}"
    );
    eventually("the toolstack and the status say so", async || {
        let told = world.backend_key(2, XVDA, "hotplug-error").await;
        let shown = world.status(2, XVDA).await?.error;
        (told.as_ref() == Some(&error) && shown == told).then_some(())
    })
    .await;
    assert_eq!(
        world.backend_key(2, XVDA, "state").await.as_deref(),
        Some("1"),
        "it is the other's to write"
    );
    // What is connected goes on, and so does the daemon.
    served.check_data(0, 0x20).await;

    std::fs::remove_file(world.path("blkback")).unwrap();
    world.reaches(2, XVDA, "2").await;
    assert_eq!(world.backend_key(2, XVDA, "hotplug-error").await, None);

    world.stop().await;
    std::fs::write(world.path("blkback"), "").unwrap();
    let refused = xenblkd::supervisor::run(world.options.clone(), std::future::pending()).await;
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("rmmod xen-blkback"), "{refused}");
    assert!(!world.path("control").exists(), "nothing is left behind");
}
