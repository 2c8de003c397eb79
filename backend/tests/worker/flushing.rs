//! What a flush promises, and whom a stuck or dead flusher keeps waiting: the disk's own guest, for
//! flushes and discards, and nobody else.

use std::time::Duration;

use xenblk_ring::RwOp;
use xenblkd::channel::Message;
use xenblkd::message::{Command, Report};
use xenblkd::target::script::OpKind;

use crate::service::Scripted;
use crate::world::{ERROR, Flusher, Front, LIMIT, OKAY, Terms, World, disk};

const LAZY: Terms = Terms {
    flusher: false,
    ..Terms::DEFAULT
};

/// A ring that has just asked for a flusher.
fn wants_flusher(world: &World, front: &Front) {
    let report = world.report();
    assert!(
        matches!(report, Report::FlusherWanted { ring } if ring == front.id),
        "{report:?}"
    );
}

fn push_flush(front: &mut Front) -> u64 {
    let request = front.flush(None);
    let id = front.push(&request);
    front.kick();
    id
}

#[test]
fn a_flusher_is_asked_for_once_and_with_the_first_flush() {
    let world = World::new();
    let target = disk("memory:1M");
    let mut front = world.attach(&target, &LAZY);
    assert_eq!(front.write(0, 1), OKAY);
    assert!(front.read(0).is_ok());
    let first = push_flush(&mut front);
    wants_flusher(&world, &front);
    let second = push_flush(&mut front);
    let page = front.filled(2);
    let write = front.rw(RwOp::Write, 8, &[page.whole()]);
    let write = front.push(&write);
    front.kick();
    let taken = front.take(LIMIT);
    assert_eq!((taken.len(), taken[0].id), (1, write), "which needs none");
    world.give_flusher(&mut front, &target);
    let statuses = front.settle();
    assert_eq!([statuses[&first], statuses[&second]], [OKAY, OKAY]);
    world.detach(front);
}

#[test]
fn nothing_that_cannot_lose_anything_asks_for_a_flusher() {
    let world = World::new();
    let readonly = Terms {
        readonly: true,
        ..LAZY
    };
    for (spec, terms) in [("null:1M", LAZY), ("memory:1M", readonly)] {
        let mut front = world.attach(&disk(spec), &terms);
        let request = front.flush(None);
        assert_eq!(front.run(&request), OKAY, "{spec}");
        world.detach(front);
    }
}

/// One flush for those that came while another was under way; never the one under way, which may have
/// missed what they are to cover.
#[test]
fn flushes_of_all_rings_become_one() {
    let world = World::new();
    let script = Scripted::new();
    let flusher = Flusher::start(&script.target);
    let mut fronts = [(); 3].map(|()| world.attach(&script.target, &LAZY));
    for front in &fronts {
        world.connect(front, &flusher);
    }
    let first = push_flush(&mut fronts[0]);
    let under_way = script.next_is(OpKind::Flush, 0);
    let page = fronts[1].filled(5);
    let write = fronts[1].rw(RwOp::Write, 0, &[page.whole()]);
    fronts[1].push(&write);
    fronts[1].kick();
    script.next_is(OpKind::Write, 0).go().unwrap();
    fronts[1].settle();
    let later: Vec<Vec<u64>> = fronts
        .iter_mut()
        .map(|front| {
            let requests: Vec<_> = (0..4).map(|_| front.flush(None)).collect();
            let ids = requests.iter().map(|request| front.push(request)).collect();
            front.kick();
            ids
        })
        .collect();
    under_way.go().unwrap();
    let taken = fronts[0].take(LIMIT);
    let taken: Vec<_> = taken
        .iter()
        .map(|response| (response.id, response.status))
        .collect();
    assert_eq!(taken, [(first, OKAY)], "the others need one of their own");
    // At most one for each ring, if the flusher hears of one after the other, and not one a request.
    let mut flushes = 0;
    while fronts.iter().any(|front| front.in_flight() > 0) {
        if let Some(op) = script.disk.next(Duration::from_millis(1)) {
            assert_eq!(op.ask.op, OpKind::Flush);
            op.go().unwrap();
            flushes += 1;
        }
        for front in &mut fronts {
            front.take(Duration::ZERO);
        }
    }
    assert!(
        (1..=3).contains(&flushes),
        "{flushes} for {} requests",
        later.concat().len()
    );
    for front in fronts {
        world.detach(front);
    }
}

#[test]
fn a_stuck_flush_keeps_nobody_elses_requests_nor_teardown_waiting() {
    let mut world = World::in_a_process();
    let script = Scripted::new();
    let flusher = Flusher::start(&script.target);
    let mut stuck = world.attach(&script.target, &LAZY);
    let mut sibling = world.attach(&script.target, &LAZY);
    let mut other = world.attach(&disk("memory:1M"), &Terms::default());
    world.connect(&stuck, &flusher);
    world.connect(&sibling, &flusher);
    let id = push_flush(&mut stuck);
    let under_way = script.next_is(OpKind::Flush, 0);
    assert!(stuck.stats().flushing_since > 0, "it can be seen");
    assert_eq!(sibling.stats().flushing_since, 0);
    assert_eq!(other.write(0, 1), OKAY);
    let request = other.flush(None);
    assert_eq!(other.run(&request), OKAY);
    world.detach(other);
    // The disk's own other ring, too, unless it flushes itself.
    let page = sibling.filled(3);
    let write = sibling.rw(RwOp::Write, 0, &[page.whole()]);
    sibling.push(&write);
    sibling.kick();
    script.next_is(OpKind::Write, 0).go().unwrap();
    assert!(sibling.settle().values().all(|status| *status == OKAY));
    world.detach(sibling);
    assert!(
        stuck.take(Duration::ZERO).is_empty(),
        "never before the storage"
    );
    // The worker itself can end at any time, and its grants with it.
    world.kill();
    assert!(world.join().is_err());
    assert_eq!(world.mapped(), 0);
    world.supervisor = None;
    // Nobody is left to hear of it.
    let _ = under_way.go();
    stuck.forget(id);
}

#[test]
fn the_end_of_the_flusher_is_a_failed_flush_and_no_success() {
    let world = World::new();
    let script = Scripted::new();
    let mut front = world.attach(&script.target, &LAZY);
    let (ours, theirs) = crate::world::flusher_sockets();
    let body = Command::Flusher { ring: front.id };
    world.command(Message {
        body,
        fds: vec![ours],
    });
    let flush = push_flush(&mut front);
    let discard = front.discard(0, 8);
    let discard = front.push(&discard);
    front.kick();
    // It has the order, and dies with it.
    assert!(crate::world::readable(&theirs, LIMIT));
    drop(theirs);
    let report = world.report();
    assert!(
        matches!(&report, Report::FlushFailed { ring, .. } if *ring == front.id),
        "{report:?}"
    );
    let statuses = front.settle();
    assert_eq!([statuses[&flush], statuses[&discard]], [ERROR, ERROR]);
    assert_eq!(front.write(0, 1), ERROR, "what was written may be lost");
    let request = front.flush(None);
    assert_eq!(front.run(&request), ERROR);
    world.detach(front);
}

#[test]
fn no_flusher_to_be_had_is_a_failed_flush() {
    let world = World::new();
    let mut front = world.attach(&disk("memory:1M"), &LAZY);
    let id = push_flush(&mut front);
    wants_flusher(&world, &front);
    world.command(Command::Flusher { ring: front.id });
    assert_eq!(front.settle()[&id], ERROR);
    let report = world.report();
    assert!(matches!(report, Report::FlushFailed { .. }), "{report:?}");
    assert_eq!(front.write(0, 1), ERROR);
    world.detach(front);
}

#[test]
fn a_flush_that_no_supervisor_can_serve_any_more_is_no_success() {
    let mut world = World::new();
    let mut front = world.attach(&disk("memory:1M"), &LAZY);
    let id = push_flush(&mut front);
    wants_flusher(&world, &front);
    world.supervisor = None;
    assert_eq!(front.settle()[&id], ERROR);
    world.join().unwrap();
    front.assert_gone();
}

#[test]
fn a_flush_is_finished_after_the_supervisor_has_died() {
    let mut world = World::new();
    let script = Scripted::new();
    let mut front = world.attach(&script.target, &Terms::default());
    let id = push_flush(&mut front);
    let under_way = script.next_is(OpKind::Flush, 0);
    world.supervisor = None;
    front.lose_flushers_supervisor();
    under_way.go().unwrap();
    assert_eq!(front.settle()[&id], OKAY);
    world.join().unwrap();
    front.assert_gone();
}

/// The flusher, too, remembers a failure: the kernel tells of it once.
#[test]
fn a_flush_that_failed_on_one_ring_fails_on_every_other() {
    let world = World::new();
    let script = Scripted::new();
    let flusher = Flusher::start(&script.target);
    let mut fronts = [(); 2].map(|()| world.attach(&script.target, &LAZY));
    for front in &fronts {
        world.connect(front, &flusher);
    }
    let [one, two] = &mut fronts;
    let first = push_flush(one);
    script.next_is(OpKind::Flush, 0).fail(libc::EIO).unwrap();
    assert_eq!(one.settle()[&first], ERROR);
    // Before the supervisor has told it.
    let second = push_flush(two);
    assert_eq!(two.settle()[&second], ERROR);
    script.assert_quiet();
    for _ in 0..2 {
        let report = world.report();
        assert!(matches!(report, Report::FlushFailed { .. }), "{report:?}");
    }
    for front in fronts {
        world.detach(front);
    }
}

#[test]
fn discards_are_bounded_done_in_order_and_forgotten_with_their_ring() {
    let mut world = World::new();
    let script = Scripted::new();
    let terms = Terms {
        pages: 8,
        ..Terms::default()
    };
    let mut front = world.attach(&script.target, &terms);
    for n in 0..200u64 {
        let request = front.discard(n * 8, 8);
        front.push(&request);
    }
    front.kick();
    for n in 0..200u64 {
        let op = script.next_is(OpKind::Discard, n * 4096);
        assert_eq!(op.ask.len, 4096);
        script.assert_quiet();
        op.go().unwrap();
    }
    let statuses = front.settle();
    assert!(statuses.values().all(|status| *status == OKAY));
    assert_eq!(front.stats().bytes_discarded, 200 * 4096);
    world.detach(front);
    world.supervisor = None;
    world.join().unwrap();
}
