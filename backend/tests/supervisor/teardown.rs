//! Ends that can't come at once: a frontend lets go, or is no more, while the storage has its requests.

use std::time::Duration;

use xenblk_grants::{DomId, GrantRef};
use xenblk_ring::{DirectSegments, Request, RwOp, RwRequest, Segment};
use xenblkd::channel::{Channel, Message, SendError, WorkerEnd};
use xenblkd::control::DiskStatus;
use xenblkd::message::{Command, Left, Report, VERSION};
use xenblkd::supervisor::WorkerProgram;
use xenblkd::target::script::disk::{PendingOp, ScriptedDisk};

use crate::guest::Guest;
use crate::workers::kill;
use crate::world::{World, error_node, eventually};

const XVDA: u32 = 51712;

/// A guest whose disk does what the test says, and the operation on it that its one write is waiting for.
async fn with_a_stuck_write(world: &World, disk: &ScriptedDisk) -> (Guest, PendingOp) {
    let script = format!("script:{}", world.path("script").display());
    world.attach(1, XVDA, &script, "w").await;
    let mut guest = Guest::new(world, 1, XVDA).await;
    guest.connect(world, 2, 0).await;
    let op = stick(&mut guest, disk).await;
    (guest, op)
}

/// Writes a page, without waiting for the answer.
async fn stick(guest: &mut Guest, disk: &ScriptedDisk) -> PendingOp {
    write_page(guest);
    let next = async || disk.next(Duration::ZERO);
    eventually("the write reaches the storage", next).await
}

fn write_page(guest: &mut Guest) -> GrantRef {
    let memory = guest.domain.alloc_page().unwrap();
    let gref = guest.domain.grant(memory, DomId(0), true).unwrap();
    let segments = DirectSegments::new(&[Segment::new(gref.0, 0, 7).unwrap()]).unwrap();
    let write = RwRequest {
        id: 77,
        op: RwOp::Write,
        sector: 0,
        segments,
    };
    guest.submit(0, &Request::Rw(write));
    gref
}

/// The disk, once it is shown to wait for its storage.
async fn waiting(world: &World) -> DiskStatus {
    eventually("the status says that it waits", async || {
        let disk = world.status(1, XVDA).await?;
        disk.waiting_seconds.is_some().then_some(disk)
    })
    .await
}

/// Time enough for a supervisor that doesn't wait; one that does can't fail this.
async fn stays(world: &World, state: Option<&str>) {
    for _ in 0..50 {
        tokio::time::sleep(Duration::from_millis(2)).await;
        let found = world.backend_key(1, XVDA, "state").await;
        assert_eq!(found.as_deref(), state);
    }
}

async fn forgotten(world: &World) {
    eventually("the device is forgotten", async || {
        world.status(1, XVDA).await.is_none().then_some(())
    })
    .await;
}

#[tokio::test]
async fn closing_takes_as_long_as_the_storage() {
    let world = World::started().await;
    let disk = ScriptedDisk::listen(&world.path("script"), 1 << 20).unwrap();
    let (mut guest, op) = with_a_stuck_write(&world, &disk).await;
    guest.set_state("5").await;
    world.reaches(1, XVDA, "5").await;
    guest.set_state("6").await;
    let one = async || {
        let shown = world.status(1, XVDA).await?;
        (shown.rings.len() == 1).then_some(shown)
    };
    let shown = eventually("the ring without requests ends", one).await;
    assert_eq!(shown.state, "Closing");
    assert!(shown.waiting_seconds.is_some());
    assert_eq!(shown.rings[0].counters.in_flight, 1);
    stays(&world, Some("5")).await;
    // A frontend that starts over meanwhile has to wait, too.
    guest.set_state("1").await;
    stays(&world, Some("5")).await;

    op.go().unwrap();
    world.reaches(1, XVDA, "2").await;
    world.assert_nothing_held(1);
    guest.free_rings();
    guest.connect(&world, 1, 0).await;
    assert_eq!(world.status(1, XVDA).await.unwrap().waiting_seconds, None);
}

/// An administrator looks into the error node first.
#[tokio::test]
async fn a_long_wait_is_told_until_it_is_over() {
    let world = World::started().await;
    let disk = ScriptedDisk::listen(&world.path("script"), 1 << 20).unwrap();
    let (mut guest, op) = with_a_stuck_write(&world, &disk).await;
    guest.set_state("5").await;
    world.reaches(1, XVDA, "5").await;
    guest.set_state("6").await;
    let told = world.error(1, XVDA).await;
    assert!(
        told.starts_with("waiting for I/O of 1 requests, for "),
        "{told}"
    );
    op.go().unwrap();
    world.reaches(1, XVDA, "6").await;
    assert_eq!(world.read(&error_node(1, XVDA)).await, None);
    guest.free_rings();
}

#[tokio::test]
async fn a_detach_during_the_wait_is_not_forgotten() {
    let world = World::started().await;
    let disk = ScriptedDisk::listen(&world.path("script"), 1 << 20).unwrap();
    let (mut guest, op) = with_a_stuck_write(&world, &disk).await;
    // It starts over, for which the device would go on to InitWait.
    guest.set_state("1").await;
    waiting(&world).await;
    world.ask_to_detach(1, XVDA).await;
    op.go().unwrap();
    world.reaches(1, XVDA, "6").await;
    world.assert_nothing_held(1);
    guest.free_rings();
    world.remove(1, XVDA).await;
    forgotten(&world).await;
}

#[tokio::test]
async fn a_destroyed_domain_is_held_until_its_io_ends() {
    let world = World::started().await;
    let disk = ScriptedDisk::listen(&world.path("script"), 1 << 20).unwrap();
    let (_guest, op) = with_a_stuck_write(&world, &disk).await;
    world.xen.kill_domain(DomId(1));
    world.server.release(1).unwrap();
    world.remove(1, XVDA).await;
    eventually("the disk is shown as removed", async || {
        (waiting(&world).await.state == "Removed").then_some(())
    })
    .await;
    // What the storage may still read is the guest's no more, but its domain is there until then.
    assert!(!world.xen.snapshot().zombies.is_empty());
    stays(&world, None).await;

    op.go().unwrap();
    forgotten(&world).await;
    let snapshot = world.xen.snapshot();
    assert!(snapshot.zombies.is_empty(), "{snapshot:?}");
    assert!(snapshot.mappings.is_empty(), "{snapshot:?}");
    assert_eq!(world.read(&error_node(1, XVDA)).await, None);
}

/// xl gives up a detach after ten seconds, removes the directories, and lets the administrator attach anew.
#[tokio::test]
async fn a_disk_made_anew_waits_for_its_predecessor() {
    let world = World::started().await;
    let disk = ScriptedDisk::listen(&world.path("script"), 1 << 20).unwrap();
    let (mut guest, op) = with_a_stuck_write(&world, &disk).await;
    world.remove(1, XVDA).await;
    waiting(&world).await;
    world.attach(1, XVDA, "memory:1M", "w").await;
    let told = world.error(1, XVDA).await;
    assert!(
        told.starts_with("not served before its predecessor: waiting for I/O of 1 requests, for "),
        "{told}"
    );
    stays(&world, Some("1")).await;

    op.go().unwrap();
    world.reaches(1, XVDA, "2").await;
    world.assert_nothing_held(1);
    assert_eq!(world.backend_key(1, XVDA, "hotplug-error").await, None);
    guest.free_rings();
    guest.connect(&world, 1, 0).await;
    guest.check_data(0, 0x20).await;
}

#[tokio::test]
async fn a_stop_waits_for_the_storage() {
    let mut world = World::started().await;
    let disk = ScriptedDisk::listen(&world.path("script"), 1 << 20).unwrap();
    let (_guest, op) = with_a_stuck_write(&world, &disk).await;
    let answering = std::thread::spawn(move || {
        // Long enough for a supervisor that doesn't wait.
        std::thread::sleep(Duration::from_millis(50));
        op.go().unwrap();
    });
    world.stop().await;
    assert!(
        answering.is_finished(),
        "stopped before the storage was done"
    );
    world.assert_nothing_held(1);
}

const LEAKY: &str = "--leaky";

/// Not a test of its own: a worker that can't prove what it has to when a ring ends.
#[test]
fn leaky_process() {
    if !std::env::args().any(|arg| arg == LEAKY) {
        return;
    }
    let channel: WorkerEnd = Channel::from_socket(xenblkd::channel::inherited().unwrap());
    let mut kept = Vec::new();
    loop {
        let Ok(message) = channel.try_recv() else {
            return;
        };
        let Some(Message { body, fds }) = message else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        kept.push(fds);
        let report = match body {
            Command::Hello { .. } => Report::Ready { version: VERSION },
            Command::Attach(attach) => Report::Attached { ring: attach.ring },
            Command::Detach { ring } => Report::Detached {
                ring,
                left: Left {
                    pages: 3,
                    ..Left::default()
                },
            },
            _ => continue,
        };
        assert!(!matches!(channel.send(report), Err(SendError::Full(_))));
    }
}

#[tokio::test]
async fn closed_is_not_written_on_the_word_of_a_worker_that_kept_something() {
    let mut world = World::new().await;
    let args = [
        "teardown::leaky_process",
        "--exact",
        "--nocapture",
        "--",
        LEAKY,
    ];
    world.options.program = WorkerProgram::Process {
        path: "/proc/self/exe".into(),
        args: args.map(Into::into).to_vec(),
    };
    world.start().await;
    world.attach(1, XVDA, "memory:1M", "w").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    guest.connect(&world, 1, 0).await;
    let pid = world.status(1, XVDA).await.unwrap().rings[0].pid.unwrap();
    guest.set_state("5").await;
    world.reaches(1, XVDA, "5").await;
    guest.set_state("6").await;
    let told = world.error(1, XVDA).await;
    assert!(
        told.contains("3 mapped pages") && told.contains("closed once that worker is gone"),
        "{told}"
    );
    stays(&world, Some("5")).await;
    assert!(waiting(&world).await.waiting_seconds.is_some());
    kill(pid);
    world.reaches(1, XVDA, "6").await;
    guest.free_rings();
}

/// Grants the guest takes back while its requests are under way cost it those requests and nobody anything.
#[tokio::test]
async fn revoked_grants_end_their_requests_and_not_the_close() {
    let world = World::started().await;
    let disk = ScriptedDisk::listen(&world.path("script"), 1 << 20).unwrap();
    let (mut guest, op) = with_a_stuck_write(&world, &disk).await;
    let second = write_page(&mut guest);
    guest.domain.revoke(second);
    guest.set_state("5").await;
    world.reaches(1, XVDA, "5").await;
    guest.set_state("6").await;
    waiting(&world).await;
    op.go().unwrap();
    // The second may have been taken in before it was revoked.
    while let Some(op) = disk.next(Duration::from_millis(50)) {
        op.go().unwrap();
    }
    world.reaches(1, XVDA, "6").await;
    world.assert_nothing_held(1);
    guest.free_rings();
}
