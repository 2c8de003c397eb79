//! What a broken or hostile guest gets: an answer for each bad request, and nobody else is harmed.

use std::sync::atomic::{AtomicBool, Ordering};

use xenblk_ring::{Abi, RawSlot, RwOp, Segment, Words, layout};
use xenblkd::message::Report;

use crate::world::{ERROR, Front, NOT_SUPPORTED, OKAY, Terms, World, disk};

const SECTORS: u64 = 2048;

fn world() -> (World, Front) {
    let world = World::new();
    let front = world.attach(&disk("memory:1M"), &Terms::default());
    (world, front)
}

/// A slot of one operation with its count byte and sector, and no segments worth the name.
fn raw(front: &mut Front, op: u8, count: u8, inner: u8) -> (RawSlot, u64) {
    let id = front.id();
    let mut slot = RawSlot::with_operation(front.abi, op, id);
    if op == layout::OP_INDIRECT {
        slot.set_byte(1, inner);
        slot.set_byte(2, count);
    } else {
        slot.set_byte(1, count);
    }
    (slot, id)
}

#[test]
fn a_bad_grant_fails_its_own_request_only() {
    let (world, mut front) = world();
    let good = front.filled(1);
    let ungranted = front.page(true);
    front.take_back(ungranted);
    let foreign = world.xen.domain(xenblk_grants::DomId(6), 64).unwrap();
    let page = foreign.alloc_page().unwrap();
    let foreign_gref = foreign.grant(page, xenblk_grants::DomId(7), false).unwrap();
    for gref in [
        0,
        u32::MAX,
        1 << 20,
        ungranted.gref.0,
        foreign_gref.0 + 20_000,
    ] {
        let bad = Segment::new(gref, 0, 7).unwrap();
        let segments = [good.whole(), bad, good.whole()];
        let mut expected = Vec::new();
        for op in [RwOp::Write, RwOp::Read] {
            let before = front.rw(RwOp::Write, 0, &[good.whole()]);
            let wrong = front.rw(op, 8, &segments);
            let after = front.rw(RwOp::Write, 64, &[good.whole()]);
            expected.push((front.push(&before), OKAY));
            expected.push((front.push(&wrong), ERROR));
            expected.push((front.push(&after), OKAY));
        }
        front.kick();
        let statuses = front.settle();
        for (id, status) in expected {
            assert_eq!(statuses[&id], status, "gref {gref:#x}");
        }
    }
    // A read into a page granted read-only.
    let request = front.rw(RwOp::Read, 0, &[good.whole()]);
    assert_eq!(front.run(&request), ERROR);
    front.take_back(good);
    world.detach(front);
}

#[test]
fn one_grant_in_several_requests_at_once() {
    let (world, mut front) = world();
    let page = front.page(false);
    let requests: Vec<_> = (0..24)
        .map(|n| {
            let op = if n % 2 == 0 { RwOp::Read } else { RwOp::Write };
            front.rw(op, n * 4, &[page.part(0, 3), page.part(4, 7)])
        })
        .collect();
    for request in &requests {
        front.push(request);
    }
    front.kick();
    assert!(front.settle().values().all(|status| *status == OKAY));
    front.take_back(page);
    world.detach(front);
}

/// Stops the rewriting thread even when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_slot_rewritten_while_it_is_taken_in_is_one_request_or_the_other() {
    let (world, mut front) = world();
    assert_eq!(front.write(0, 0xaa), OKAY);
    let page = front.page(false);
    let words = front.ring.words().clone();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Words that the response doesn't overlap: the sector's upper half and the segment's
            // sectors, each right or impossible.
            let mut turn = 0usize;
            while !stop.load(Ordering::Relaxed) {
                for slot in 0..32 {
                    words.store(
                        16 + slot * 28 + 5,
                        if turn.is_multiple_of(2) { 0 } else { u32::MAX },
                    );
                    let sectors = [0x0000, 0x0003, 0xff00, 0x0700];
                    words.store(16 + slot * 28 + 7, sectors[turn / 2 % 4]);
                }
                turn += 1;
            }
        });
        let _stop = Stop(&stop);
        for _ in 0..1000 {
            let request = front.rw(RwOp::Read, 0, &[page.part(0, 0)]);
            let id = front.push(&request);
            front.kick();
            let status = front.settle()[&id];
            assert!(status == OKAY || status == ERROR, "{status}");
        }
    });
    assert!(
        front
            .bytes(page)
            .iter()
            .all(|byte| *byte == 0 || *byte == 0xaa)
    );
    front.take_back(page);
    world.detach(front);
}

#[test]
fn wrong_numbers_of_segments_are_errors() {
    let world = World::new();
    let terms = Terms {
        max_indirect: 32,
        ..Terms::default()
    };
    let mut front = world.attach(&disk("memory:1M"), &terms);
    for op in [layout::OP_READ, layout::OP_WRITE] {
        for count in [0, 12, 13, 128, 255] {
            let (slot, id) = raw(&mut front, op, count, 0);
            front.push_raw(&slot, id, op);
            front.kick();
            assert_eq!(
                front.settle()[&id],
                ERROR,
                "operation {op}, {count} segments"
            );
        }
        // More than was advertised, and none.
        for count in [0, 33, 255] {
            let (slot, id) = raw(&mut front, layout::OP_INDIRECT, count, op);
            front.push_raw(&slot, id, op);
            front.kick();
            assert_eq!(
                front.settle()[&id],
                ERROR,
                "indirect {op}, {count} segments"
            );
        }
    }
    let page = front.page(false);
    let (request, _) = front.indirect(RwOp::Read, 0, &vec![page.part(0, 0); 32]);
    assert_eq!(front.run(&request), OKAY, "as many as were advertised");
    world.detach(front);
}

#[test]
fn odd_indirect_requests_are_answered_with_their_inner_operation() {
    let (world, mut front) = world();
    for inner in [2, 3, 4, 5, 6, 255] {
        let (slot, id) = raw(&mut front, layout::OP_INDIRECT, 1, inner);
        front.push_raw(&slot, id, inner);
        front.kick();
        let status = front.settle()[&id];
        assert!(
            status == ERROR || status == NOT_SUPPORTED,
            "{inner}: {status}"
        );
    }
    // The list of segments is one of its own data pages; and never granted; and not a list.
    let page = front.page(false);
    let (own, list) = front.indirect(RwOp::Read, 0, &[page.whole(), page.whole()]);
    assert_eq!(front.run(&own), OKAY);
    front.take_back(list);
    let again = front.again(&own);
    assert_eq!(front.run(&again), ERROR, "its page is not granted any more");
    let rubbish = front.filled(0xff);
    let (request, list) = front.indirect(RwOp::Write, 0, &[rubbish.whole()]);
    world.guest.write(list.gfn, 4, &[9, 2]);
    assert_eq!(front.run(&request), ERROR, "first sector after the last");
    world.guest.write(list.gfn, 4, &[0, 8]);
    let again = front.again(&request);
    assert_eq!(front.run(&again), ERROR, "a ninth sector");
    world.guest.write(list.gfn, 4, &[0, 7]);
    let again = front.again(&request);
    assert_eq!(front.run(&again), OKAY);
    world.detach(front);
}

#[test]
fn ranges_beyond_the_disk_are_errors_however_they_are_written() {
    let (world, mut front) = world();
    let page = front.page(false);
    let sectors = [
        SECTORS - 7,
        SECTORS,
        SECTORS + 1,
        1 << 55,
        u64::MAX - 7,
        u64::MAX,
    ];
    for sector in sectors {
        for op in [RwOp::Read, RwOp::Write] {
            let request = front.rw(op, sector, &[page.whole()]);
            assert_eq!(front.run(&request), ERROR, "{op:?} at {sector}");
            let (request, _) = front.indirect(op, sector, &[page.whole()]);
            assert_eq!(front.run(&request), ERROR, "indirect {op:?} at {sector}");
        }
        let request = front.flush(Some((sector, page.whole())));
        assert_eq!(front.run(&request), ERROR, "flush at {sector}");
        let request = front.barrier(Some((sector, page.whole())));
        assert_eq!(front.run(&request), ERROR, "barrier at {sector}");
        let request = front.discard(sector, 8);
        assert_eq!(front.run(&request), ERROR, "discard at {sector}");
    }
    let request = front.discard(8, u64::MAX);
    assert_eq!(front.run(&request), ERROR);
    let request = front.rw(RwOp::Write, SECTORS - 8, &[page.whole()]);
    assert_eq!(front.run(&request), OKAY, "the last sectors exist");
    world.detach(front);
}

#[test]
fn segments_outside_their_page_are_errors() {
    for abi in [Abi::X86_32, Abi::X86_64] {
        let world = World::new();
        let terms = Terms {
            abi,
            ..Terms::default()
        };
        let mut front = world.attach(&disk("memory:1M"), &terms);
        let page = front.page(false);
        let sectors_at = if abi == Abi::X86_32 { 24 } else { 28 };
        for (first, last) in [(1, 0), (7, 6), (0, 8), (8, 8), (255, 255), (0, 255)] {
            let request = front.rw(RwOp::Write, 0, &[page.whole(), page.whole()]);
            let xenblk_ring::Request::Rw(rw) = request else {
                unreachable!()
            };
            let mut slot = request.encode(abi);
            slot.set_byte(sectors_at, first);
            slot.set_byte(sectors_at + 1, last);
            front.push_raw(&slot, rw.id, layout::OP_WRITE);
            front.kick();
            assert_eq!(front.settle()[&rw.id], ERROR, "{first} to {last}");
        }
        world.detach(front);
    }
}

#[test]
fn a_producer_index_that_runs_past_the_ring_stops_that_ring_alone() {
    let world = World::new();
    for jump in [33, 1000, 1 << 31, u32::MAX] {
        let mut bad = world.attach(&disk("memory:1M"), &Terms::default());
        let mut good = world.attach(&disk("memory:1M"), &Terms::default());
        assert_eq!(bad.write(0, 1), OKAY);
        // One request has been made and answered.
        bad.ring
            .words()
            .store(layout::REQ_PROD, 1u32.wrapping_add(jump));
        world.guest.notify(bad.port);
        let report = world.report();
        assert!(
            matches!(report, Report::Failed { ring, .. } if ring == bad.id),
            "{report:?}"
        );
        let served = bad.stats().responses;
        // Further events mean nothing.
        world.guest.notify(bad.port);
        assert_eq!(good.write(0, 1), OKAY);
        assert_eq!((bad.stats().responses, served), (1, 1));
        world.detach(bad);
        world.detach(good);
    }
    assert_eq!(world.mapped(), 0);
}

#[test]
fn a_storm_of_events_and_identical_ids() {
    let (world, mut front) = world();
    for _ in 0..2000 {
        world.guest.notify(front.port);
    }
    assert_eq!(front.write(0, 6), OKAY);
    assert_eq!(front.stats().responses, 1);
    // Ids are the guest's own affair.
    let page = front.page(false);
    for round in 0..3 {
        let id = front.id();
        let mut request = front.rw(RwOp::Read, round * 8, &[page.whole()]);
        if let xenblk_ring::Request::Rw(rw) = &mut request {
            rw.id = id;
        }
        let twin = request;
        front.push(&request);
        front.ring.push(&twin.encode(front.abi)).unwrap();
        front.kick();
        let mut answers = 0;
        while answers < 2 {
            let response = front.ring.take().unwrap();
            match response {
                Some(response) => {
                    assert_eq!((response.id, response.status), (id, OKAY));
                    answers += 1;
                }
                None => std::thread::yield_now(),
            }
        }
        front.forget(id);
    }
    world.detach(front);
}

#[test]
fn a_guest_that_dies_is_let_go() {
    let (world, mut front) = world();
    let page = front.filled(1);
    assert_eq!(front.write(0, 1), OKAY);
    let request = front.rw(RwOp::Write, 0, &[page.whole()]);
    front.push(&request);
    world.xen.kill_domain(crate::world::GUEST);
    assert!(world.mapped() > 0, "a zombie until its ring is let go");
    world.command(xenblkd::message::Command::Detach { ring: front.id });
    assert!(matches!(world.report(), Report::Detached { .. }));
    assert_eq!(world.mapped(), 0);
    assert!(world.xen.snapshot().zombies.is_empty());
}
