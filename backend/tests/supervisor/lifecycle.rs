//! A device's way through its states, with every kind of frontend the survey knows.

use xenblk_xenstore::Tx;

use crate::guest::{Guest, PAGE};
use crate::script;
use crate::world::{World, backend, error_node, eventually, frontend};

const MIB: u64 = 1 << 20;
const XVDA: u32 = 51712;
const XVDB: u32 = 51728;

#[tokio::test]
async fn attach_connect_close_reconnect_detach() {
    let world = World::started().await;
    let image = world.image("disk", 4 * MIB);
    world.attach(1, XVDA, &format!("raw:{image}"), "w").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    guest.connect(&world, 1, 0).await;

    for (key, value) in [
        ("sectors", "8192"),
        ("sector-size", "512"),
        ("info", "0"),
        ("feature-flush-cache", "1"),
        ("feature-persistent", "1"),
    ] {
        assert_eq!(
            world.backend_key(1, XVDA, key).await.as_deref(),
            Some(value),
            "{key}"
        );
    }
    guest.check_data(0, 0x11).await;

    // The disk is the image.
    let mut file = vec![0; PAGE];
    std::os::unix::fs::FileExt::read_exact_at(&std::fs::File::open(&image).unwrap(), &mut file, 0)
        .unwrap();
    assert!(file.iter().all(|byte| *byte == 0x11));

    guest.close(&world).await;
    world.assert_nothing_held(1);
    guest.set_state("1").await;
    guest.connect(&world, 4, 2).await;
    assert!(
        guest.read(0, 0).await.unwrap() == [0x11; PAGE],
        "data of the first connection"
    );
    guest.check_data(16, 0x51).await;

    world.ask_to_detach(1, XVDA).await;
    guest.close(&world).await;
    world.assert_nothing_held(1);
    assert_eq!(
        open_files(&image),
        0,
        "the toolstack may reuse the image now"
    );
    world.remove(1, XVDA).await;
    eventually("the device is forgotten", async || {
        world.status(1, XVDA).await.is_none().then_some(())
    })
    .await;
    assert_eq!(world.read(&error_node(1, XVDA)).await, None);
}

/// Descriptors of this process that lead to `path`.
fn open_files(path: &str) -> usize {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    fds.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|target| target.as_os_str() == path))
        .count()
}

#[tokio::test]
async fn frontends_that_do_not_wait_are_served() {
    // mini-os and Unikraft go straight to 4, old Linux and resumed ones to 3; either may be there before the
    // backend has looked at the device at all.
    for state in ["3", "4"] {
        let mut world = World::new().await;
        world.attach(1, XVDA, "memory:1M", "w").await;
        let mut guest = Guest::new(&world, 1, XVDA).await;
        let keys = guest.make_rings(1, 0);
        guest.publish(&keys, state).await;
        world.start().await;
        guest.connected(&world).await;
        guest.check_data(3, 0x20).await;
        guest.close(&world).await;
    }
}

#[tokio::test]
async fn a_frontend_may_begin_by_closing() {
    // Windows' first action, and it spins until it is answered.
    let world = World::started().await;
    world.attach(1, XVDA, "memory:1M", "w").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    world.reaches(1, XVDA, "2").await;
    guest.close(&world).await;
    guest.set_state("1").await;
    guest.connect(&world, 2, 0).await;
    guest.check_data(0, 0x30).await;
    // GRUB closes without Closing, empties its keys and leaves state 1 to the next system.
    guest.set_state("6").await;
    world.reaches(1, XVDA, "6").await;
    guest.free_rings();
    for key in [
        "queue-0/ring-ref",
        "queue-0/event-channel",
        "multi-queue-num-queues",
    ] {
        guest.write_key(key, "").await;
    }
    guest.set_state("1").await;
    guest.connect(&world, 1, 0).await;
    guest.check_data(8, 0x40).await;
    guest.close(&world).await;
}

#[tokio::test]
async fn a_frontend_that_starts_over_without_closing_gets_fresh_rings() {
    let world = World::started().await;
    world.attach(1, XVDA, "memory:1M", "w").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    guest.connect(&world, 1, 0).await;
    guest.set_state("1").await;
    world.reaches(1, XVDA, "2").await;
    world.assert_nothing_held(1);
    guest.free_rings();
    guest.connect(&world, 1, 0).await;
    guest.check_data(0, 0x31).await;
}

#[tokio::test]
async fn two_guests_are_served_at_once() {
    let world = World::started().await;
    let image = world.image("one", MIB);
    world.attach(1, XVDA, &image, "w").await;
    world.attach(2, XVDA, "memory:1M", "w").await;
    world.attach(2, XVDB, &image, "r").await;
    let mut one = Guest::new(&world, 1, XVDA).await;
    let mut two = Guest::new(&world, 2, XVDA).await;
    let mut shared = Guest::in_domain(&world, two.domain.clone(), XVDB);
    tokio::join!(
        one.connect(&world, 4, 1),
        two.connect(&world, 3, 0),
        shared.connect(&world, 1, 4)
    );
    one.check_data(0, 0x01).await;
    two.check_data(0, 0x02).await;
    assert!(shared.read(0, 0).await.unwrap() == [0x01; PAGE]);
    assert_eq!(shared.write(0, 0, &[9; PAGE]).await, Err(-1), "read-only");
    assert_eq!(
        world.backend_key(2, XVDB, "info").await.as_deref(),
        Some("4")
    );

    one.close(&world).await;
    two.check_data(8, 0x03).await;
    two.close(&world).await;
    shared.close(&world).await;
    world.assert_nothing_held(2);
}

#[tokio::test]
async fn a_late_target_holds_up_only_its_device() {
    let world = World::started().await;
    let greet = script::listen(&world.path("script"));
    world
        .attach(
            1,
            XVDA,
            &format!("script:{}", world.path("script").display()),
            "w",
        )
        .await;
    world.attach(1, XVDB, "memory:1M", "w").await;
    let mut late = Guest::new(&world, 1, XVDA).await;
    let mut other = Guest::in_domain(&world, late.domain.clone(), XVDB);
    // InitWait comes all the same: libxl waits for it and for nothing else.
    world.reaches(1, XVDA, "2").await;
    let keys = late.make_rings(1, 0);
    late.publish(&keys, "3").await;
    other.connect(&world, 1, 0).await;
    other.check_data(0, 0x70).await;
    assert_eq!(
        world.backend_key(1, XVDA, "state").await.as_deref(),
        Some("2")
    );
    drop(greet);
    late.connected(&world).await;
    assert_eq!(
        world.backend_key(1, XVDA, "sectors").await.as_deref(),
        Some("2048")
    );
    late.close(&world).await;
}

#[tokio::test]
async fn a_bad_target_is_reported_and_can_be_mended() {
    let world = World::started().await;
    let missing = world.path("missing");
    let params = format!("raw:{}", missing.display());
    for (devid, params, named) in [
        (XVDA, params.as_str(), params.trim_start_matches("raw:")),
        (XVDB, "qcow2:/x", "qcow2:/x"),
    ] {
        world.attach(1, devid, params, "w").await;
        let error = world.error(1, devid).await;
        assert!(error.contains(named), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }
    let mut guest = Guest::new(&world, 1, XVDA).await;
    world.reaches(1, XVDA, "6").await;

    // The frontend's next life is another try.
    world.image("missing", MIB);
    guest.set_state("6").await;
    guest.set_state("1").await;
    guest.connect(&world, 1, 0).await;
    guest.check_data(0, 0x18).await;
    assert_eq!(
        world.read(&error_node(1, XVDA)).await,
        None,
        "nothing is wrong any more"
    );
    guest.close(&world).await;
}

#[tokio::test]
async fn flapping_states_leak_nothing() {
    let world = World::started().await;
    world.attach(1, XVDA, "memory:1M", "w").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    world.reaches(1, XVDA, "2").await;
    let keys = guest.make_rings(2, 0);
    guest.publish(&keys, "3").await;
    for _ in 0..50 {
        for state in [
            "1", "3", "4", "5", "6", "1", "3", "9", "x", "", "4", "0", "6",
        ] {
            guest.set_state(state).await;
        }
        guest.remove_key("state").await;
    }
    guest.set_state("6").await;
    world.reaches(1, XVDA, "6").await;
    world.nothing_held(1).await;
    guest.free_rings();
    guest.set_state("1").await;
    guest.connect(&world, 2, 1).await;
    guest.check_data(0, 0x60).await;
    guest.close(&world).await;
    world.assert_nothing_held(1);
}

#[tokio::test]
async fn keys_rewritten_while_connected_are_ignored() {
    let world = World::started().await;
    world.attach(1, XVDA, "memory:1M", "w").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    guest.connect(&world, 1, 0).await;
    for (key, value) in [
        ("ring-ref", "999"),
        ("event-channel", "999"),
        ("protocol", "x"),
        ("multi-queue-num-queues", "7"),
    ] {
        guest.write_key(key, value).await;
    }
    guest.set_state("4").await;
    guest.check_data(0, 0x61).await;
    assert_eq!(
        world.backend_key(1, XVDA, "state").await.as_deref(),
        Some("4")
    );
}

#[tokio::test]
async fn a_vanished_frontend_directory_frees_everything() {
    let world = World::started().await;
    world.attach(1, XVDA, "memory:1M", "w").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    guest.connect(&world, 2, 0).await;
    world.store.rm(Tx::NONE, &frontend(1, XVDA)).await.unwrap();
    world.reaches(1, XVDA, "6").await;
    world.assert_nothing_held(1);
    guest.free_rings();
}

#[tokio::test]
async fn a_vanished_backend_directory_frees_everything() {
    let world = World::started().await;
    world.attach(1, XVDA, "memory:1M", "w").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    guest.connect(&world, 2, 0).await;
    world.store.rm(Tx::NONE, &backend(1, XVDA)).await.unwrap();
    world.nothing_held(1).await;
    guest.free_rings();
    eventually("the device is forgotten", async || {
        world.status(1, XVDA).await.is_none().then_some(())
    })
    .await;
    assert_eq!(
        world.backend_key(1, XVDA, "state").await,
        None,
        "not made anew by a late write"
    );
    // The same place can be used again.
    world.remove(1, XVDA).await;
    world.attach(1, XVDA, "memory:2M", "w").await;
    guest.connect(&world, 1, 0).await;
    assert_eq!(
        world.backend_key(1, XVDA, "sectors").await.as_deref(),
        Some("4096")
    );
    guest.check_data(0, 0x62).await;
}

#[tokio::test]
async fn a_dead_domain_is_let_go() {
    let world = World::started().await;
    world.attach(1, XVDA, "memory:1M", "w").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    guest.connect(&world, 2, 1).await;
    world.xen.kill_domain(xenblk_grants::DomId(1));
    world.server.release(1).unwrap();
    // Its directories are still there, state 4 and all.
    world.reaches(1, XVDA, "6").await;
    let snapshot = world.xen.snapshot();
    assert!(snapshot.zombies.is_empty(), "{snapshot:?}");
    assert!(snapshot.mappings.is_empty(), "{snapshot:?}");
}
