//! How rings and workers begin to fail and end: nothing consumed stays unanswered, nothing mapped or
//! bound stays behind.

use std::time::Duration;

use xenblk_grants::fake::{PortInfo, PortState};
use xenblk_ring::RwOp;
use xenblkd::channel::{Message, RecvError};
use xenblkd::message::{Command, Left, Report, VERSION};
use xenblkd::target::script::OpKind;

use crate::service::Scripted;
use crate::world::{
    ERROR, GUEST, LIMIT, OKAY, PERSISTENT, Page, Terms, WORKER_PROCESS, World, disk,
};

#[test]
fn requests_that_were_there_before_the_ring_was_attached_are_served() {
    let world = World::new();
    let target = disk("memory:1M");
    let (mut front, attach, fds) = world.offer(&target, &Terms::default());
    let page = front.page(false);
    let request = front.rw(RwOp::Read, 0, &[page.whole()]);
    let id = front.push(&request);
    // Published, and the event that goes with it is lost.
    let _ = front.ring.publish();
    world.command(Message {
        body: Command::Attach(Box::new(attach)),
        fds,
    });
    assert_eq!(front.settle()[&id], OKAY);
    assert!(matches!(world.report(), Report::Attached { .. }));
    world.detach(front);
}

#[test]
fn detaching_waits_for_the_disk_and_takes_nothing_more_in() {
    let world = World::new();
    let script = Scripted::new();
    let mut front = world.attach(&script.target, &Terms::default());
    let page = front.filled(7);
    let request = front.rw(RwOp::Write, 8, &[page.whole()]);
    let id = front.push(&request);
    front.kick();
    let op = script.next_is(OpKind::Write, 8 * 512);
    world.command(Command::Detach { ring: front.id });
    assert!(
        world.report_within(Duration::from_millis(50)).is_none(),
        "its I/O is under way"
    );
    assert!(world.mapped() > 0);
    let late = front.rw(RwOp::Write, 16, &[page.whole()]);
    front.push(&late);
    front.kick();
    op.go().unwrap();
    let report = world.report();
    assert!(
        matches!(report, Report::Detached { ring, left } if ring == front.id && left.is_nothing()),
        "{report:?}"
    );
    let taken = front.take(LIMIT);
    assert_eq!(
        taken.iter().map(|r| (r.id, r.status)).collect::<Vec<_>>(),
        [(id, OKAY)]
    );
    script.assert_quiet();
    assert_eq!(world.mapped(), 0);
    assert!(script.target.fence_free(0).unwrap());
    front.take_back(page);
    front.assert_gone();
}

#[test]
fn the_end_of_the_supervisor_drains_the_worker() {
    let mut world = World::new();
    let script = Scripted::new();
    let mut front = world.attach(&script.target, &Terms::default());
    let page = front.filled(7);
    let requests: Vec<_> = (0..3)
        .map(|n| front.rw(RwOp::Write, n * 8, &[page.whole()]))
        .collect();
    for request in &requests {
        front.push(request);
    }
    front.kick();
    let ops = [script.next(), script.next(), script.next()];
    assert!(
        !script.target.fence_free(0).unwrap(),
        "the fence stands while I/O is under way"
    );
    world.supervisor = None;
    for op in ops {
        op.go().unwrap();
    }
    assert!(front.settle().values().all(|status| *status == OKAY));
    world.join().unwrap();
    assert_eq!(world.mapped(), 0);
    assert!(script.target.fence_free(0).unwrap());
    front.take_back(page);
    front.assert_gone();
}

#[test]
fn shutdown_detaches_every_ring_and_reports_each() {
    let mut world = World::new();
    let target = disk("null:1M");
    let fronts = [0, 1, 2].map(|_| world.attach(&target, &Terms::default()));
    world.command(Command::Shutdown);
    let mut ended: Vec<_> = (0..3)
        .map(|_| match world.report() {
            Report::Detached { ring, left } if left.is_nothing() => ring,
            other => panic!("{other:?}"),
        })
        .collect();
    ended.sort();
    assert_eq!(
        ended,
        fronts.iter().map(|front| front.id).collect::<Vec<_>>()
    );
    world.join().unwrap();
    for front in fronts {
        front.assert_gone();
    }
}

#[test]
fn a_target_that_goes_away_fails_its_ring_and_no_other() {
    let world = World::new();
    let script = Scripted::new();
    let mut front = world.attach(&script.target, &Terms::default());
    let mut other = world.attach(&disk("memory:1M"), &Terms::default());
    let page = front.page(false);
    let request = front.rw(RwOp::Read, 0, &[page.whole()]);
    let id = front.push(&request);
    front.kick();
    let _held = script.next();
    script.disk.hang_up();
    let report = world.report();
    assert!(
        matches!(report, Report::Failed { ring, .. } if ring == front.id),
        "{report:?}"
    );
    assert_eq!(front.settle()[&id], ERROR);
    assert_eq!(other.write(0, 1), OKAY);
    world.detach(front);
    world.detach(other);
}

#[test]
fn what_cannot_be_attached_says_why_and_leaves_nothing() {
    let world = World::new();
    let target = disk("memory:1M");
    type Change = fn(&mut xenblkd::message::Attach);
    let changes: [(Change, &str); 5] = [
        (
            |attach| attach.ring_refs = vec![0x00ff_ffff],
            "grants [16777215]",
        ),
        (
            |attach| attach.ring_refs.push(attach.ring_refs[0] + 100_000),
            "can't map the journal",
        ),
        (
            |attach| attach.ring_refs = vec![1; 3],
            "3 ring pages: expected 1, 2, 4, 8 or 16",
        ),
        (
            |attach| attach.protocol = "sparc-abi".into(),
            "\"sparc-abi\"",
        ),
        (
            |attach| attach.bounce_bytes = 4096,
            "4096 bytes given, at least 1048576 expected",
        ),
    ];
    for (change, expected) in changes {
        let (front, mut attach, fds) = world.offer(&target, &Terms::default());
        change(&mut attach);
        world.command(Message {
            body: Command::Attach(Box::new(attach)),
            fds,
        });
        match world.report() {
            Report::AttachFailed { ring, reason } => {
                assert_eq!(ring, front.id);
                assert!(reason.contains(expected), "{reason}");
                assert_eq!(reason.lines().count(), 1, "{reason}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(world.mapped(), 0);
        assert!(target.fence_free(0).unwrap());
        front.assert_gone();
    }
    let mut front = world.attach(&target, &Terms::default());
    assert_eq!(front.write(0, 1), OKAY, "the worker is none the worse");
    world.detach(front);
}

#[test]
fn a_message_without_its_descriptors_is_refused() {
    let world = World::new();
    let target = disk("memory:1M");
    let (front, attach, mut fds) = world.offer(&target, &Terms::default());
    fds.truncate(3);
    world.command(Message {
        body: Command::Attach(Box::new(attach)),
        fds,
    });
    assert!(matches!(world.report(), Report::AttachFailed { .. }));
    front.assert_gone();
}

#[test]
fn a_worker_refuses_a_supervisor_of_another_version() {
    let (supervisor, end) = xenblkd::channel::thread_pair().unwrap();
    let worker = std::thread::spawn(move || xenblkd::worker::run(end));
    supervisor
        .send(Command::Hello {
            version: VERSION + 1,
            fence: 0,
        })
        .unwrap();
    let problem = worker.join().unwrap().unwrap_err();
    assert!(
        problem.contains(&format!("expected {VERSION}")),
        "{problem}"
    );
}

/// Not a test of its own: what [`World::in_a_process`] runs.
#[test]
fn a_worker_process() {
    if std::env::var_os(WORKER_PROCESS).is_some() {
        crate::steady::watch();
        let channel = xenblkd::channel::inherited().unwrap();
        let code = xenblkd::worker::main(channel, Box::new(|_| {}));
        std::process::exit(i32::from(code != std::process::ExitCode::SUCCESS));
    }
}

#[test]
fn a_worker_process_serves_and_ends_like_a_thread() {
    let mut world = World::in_a_process();
    let mut front = world.attach(&disk("memory:1M"), &Terms::default());
    assert_eq!(front.write(8, 5), OKAY);
    assert_eq!(front.read(8).unwrap(), [5; 4096]);
    world.detach(front);
    world.command(Command::Shutdown);
    world.join().unwrap();
}

#[test]
fn a_killed_worker_holds_nothing_and_its_successor_serves_the_disk() {
    let script = Scripted::new();
    let mut world = World::in_a_process();
    let mut front = world.attach(&script.target, &Terms::default());
    let page = front.filled(7);
    let request = front.rw(RwOp::Write, 8, &[page.whole()]);
    front.push(&request);
    front.kick();
    let op = script.next();
    assert!(!script.target.fence_free(0).unwrap());
    world.kill();
    assert!(world.join().is_err());
    // It was never performed, and can't be any more: nobody hears this.
    let _ = op.go();
    // The kernel lets go of what an io_uring held only some time after its process has ended; of the
    // channel too, on which it waited.
    let left = || {
        let channel = world.supervisor.as_ref().unwrap().try_recv();
        let open = !matches!(channel, Err(RecvError::Closed));
        let ports = world.xen.snapshot().ports;
        let bound = |port: &PortInfo| matches!(port.state, PortState::Interdomain { .. });
        open || world.mapped() > 0
            || ports.iter().any(bound)
            || !script.target.fence_free(0).unwrap()
    };
    while left() {
        std::thread::yield_now();
    }
    front.take_back(page);
    front.assert_gone();

    let world = World::in_a_process();
    let mut front = world.attach(&script.target, &Terms::default());
    let page = front.page(false);
    let request = front.rw(RwOp::Read, 8, &[page.whole()]);
    let id = front.push(&request);
    front.kick();
    script.next_is(OpKind::Read, 8 * 512).go().unwrap();
    assert_eq!(front.settle()[&id], OKAY);
    assert_eq!(front.bytes(page), [0; 4096]);
    world.detach(front);
}

/// However a frontend with mapped grants ends, none is left once the storage has let go of its requests, and
/// none goes before.
#[test]
fn mapped_grants_go_when_the_storage_has_let_go() {
    type End = fn(&World, &[Page]);
    let ends: [End; 3] = [
        |_, _| (),
        |world, _| world.xen.kill_domain(GUEST),
        |world, pages| {
            for page in pages {
                world.guest.revoke(page.gref);
            }
        },
    ];
    for end in ends {
        let world = World::new();
        let script = Scripted::new();
        let terms = Terms {
            persistent: Some(PERSISTENT),
            ..Terms::default()
        };
        let mut front = world.attach(&script.target, &terms);
        let ring = world.mapped();
        let pages: Vec<Page> = (0..8).map(|_| front.page(false)).collect();
        for (page, sector) in pages.iter().zip((0..).step_by(8)) {
            let op = [RwOp::Read, RwOp::Write][sector as usize / 8 % 2];
            let request = front.rw(op, sector, &[page.whole()]);
            front.push(&request);
        }
        front.kick();
        let stuck: Vec<_> = pages.iter().map(|_| script.next()).collect();
        assert_eq!(world.mapped(), ring + pages.len());
        end(&world, &pages);
        world.command(Command::Detach { ring: front.id });
        let early = world.report_within(Duration::from_millis(50));
        assert!(early.is_none(), "its I/O is under way: {early:?}");
        assert!(world.mapped() > 0);
        for op in stuck {
            op.go().unwrap();
        }
        match world.report() {
            Report::Detached { ring, left } => {
                assert_eq!((ring, left), (front.id, Left::default()));
            }
            report => panic!("{report:?}"),
        }
        assert_eq!(world.mapped(), 0);
        assert!(world.xen.snapshot().zombies.is_empty());
        assert!(script.target.fence_free(0).unwrap());
    }
}
