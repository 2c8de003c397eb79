//! The supervisor ends, and another takes over; XenStore goes away, and comes back.

use tokio::io::copy_bidirectional;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinHandle;

use crate::guest::{Guest, PAGE};
use crate::world::World;

const XVDA: u32 = 51712;
const XVDB: u32 = 51728;

#[tokio::test]
async fn a_stopped_supervisor_leaves_nothing_and_its_successor_serves() {
    let mut world = World::started().await;
    let image = world.image("disk", 1 << 20);
    world.attach(1, XVDA, &image, "w").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    guest.connect(&world, 2, 0).await;
    guest.check_data(0, 0x10).await;
    world.stop().await;
    world.assert_nothing_held(1);
    assert!(
        !world.path("control").exists(),
        "the socket goes with its daemon"
    );
    assert_eq!(
        world.backend_key(1, XVDA, "state").await.as_deref(),
        Some("4"),
        "the guest's state is left"
    );

    world.start().await;
    reconnect(&world, &mut guest).await;
    assert!(guest.read(0, 0).await.unwrap() == [0x10; PAGE]);
}

#[tokio::test]
async fn a_killed_supervisor_is_succeeded() {
    let mut world = World::started().await;
    let image = world.image("disk", 1 << 20);
    world.attach(1, XVDA, &image, "w").await;
    world.attach(1, XVDB, "memory:1M", "w").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    let mut waiting = Guest::in_domain(&world, guest.domain.clone(), XVDB);
    guest.connect(&world, 2, 0).await;
    guest.check_data(0, 0x10).await;
    world.reaches(1, XVDB, "2").await;
    world.crash().await;
    // Its workers see the end of their channels and let go of everything.
    world.nothing_held(1).await;

    // This one had only been offered its disk: it connects as if nothing had been.
    let keys = waiting.make_rings(1, 0);
    waiting.publish(&keys, "3").await;
    world.start().await;
    waiting.connected(&world).await;
    waiting.check_data(0, 0x20).await;
    reconnect(&world, &mut guest).await;
    assert!(guest.read(0, 0).await.unwrap() == [0x10; PAGE]);
}

/// The new supervisor can't serve rings it knows nothing about: it says so and asks for a new connection.
async fn reconnect(world: &World, guest: &mut Guest) {
    world.reaches(1, XVDA, "5").await;
    let error = world.error(1, XVDA).await;
    assert!(error.contains("connect anew"), "{error}");
    guest.set_state("5").await;
    guest.finish_closing(world).await;
    guest.set_state("1").await;
    guest.connect(world, 2, 0).await;
    guest.check_data(8, 0x30).await;
}

/// Stands between the supervisor and the store, so that their connection can be cut.
struct Cable(Vec<JoinHandle<()>>);

impl Cable {
    fn plug(world: &World) -> Self {
        let _ = std::fs::remove_file(world.path("cable"));
        let listener = UnixListener::bind(world.path("cable")).unwrap();
        let store = world.path("xenstored");
        let accepting = async move {
            let mut pairs = tokio::task::JoinSet::new();
            while let Ok((mut near, _)) = listener.accept().await {
                let mut far = UnixStream::connect(&store).await.unwrap();
                pairs.spawn(async move { copy_bidirectional(&mut near, &mut far).await.is_ok() });
            }
        };
        Self(vec![tokio::spawn(accepting)])
    }

    async fn pull(self) {
        for task in self.0 {
            task.abort();
            let _ = task.await;
        }
    }
}

#[tokio::test]
async fn rings_go_on_while_xenstore_is_away() {
    let mut world = World::new().await;
    let cable = Cable::plug(&world);
    world.options.store = world.path("cable");
    world.start().await;
    world.attach(1, XVDA, "memory:1M", "w").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    guest.connect(&world, 2, 0).await;
    cable.pull().await;
    guest.check_data(0, 0x50).await;

    // What happens meanwhile is found afterwards: a new disk, and a frontend that wants to close.
    world.attach(1, XVDB, "memory:1M", "w").await;
    guest.set_state("5").await;
    let _cable = Cable::plug(&world);
    world.reaches(1, XVDA, "5").await;
    guest.finish_closing(&world).await;
    let mut second = Guest::in_domain(&world, guest.domain.clone(), XVDB);
    second.connect(&world, 1, 0).await;
    second.check_data(0, 0x51).await;
    guest.set_state("1").await;
    guest.connect(&world, 1, 0).await;
    guest.check_data(0, 0x52).await;
}

#[tokio::test]
async fn without_a_store_or_hypervisor_nothing_starts() {
    let world = World::new().await;
    for spoil in [
        |options: &mut xenblkd::supervisor::Options| options.store.set_file_name("no-store"),
        |options: &mut xenblkd::supervisor::Options| {
            let mut path = options.store.clone();
            path.set_file_name("no-xen");
            options.host = xenblkd::supervisor::HostSource::Fake(path);
        },
    ] {
        let mut options = world.options.clone();
        spoil(&mut options);
        let error = xenblkd::supervisor::run(options, std::future::pending())
            .await
            .unwrap_err()
            .to_string();
        assert!(error.contains("/no-") && !error.contains('\n'), "{error}");
        assert!(!world.path("control").exists(), "nothing is left behind");
    }
    let mut options = world.options.clone();
    options.workers = 0;
    let error = xenblkd::supervisor::run(options, std::future::pending())
        .await
        .unwrap_err()
        .to_string();
    assert_eq!(error, "workers is 0, expected 1 to 256");
}
