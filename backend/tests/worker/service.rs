//! What a well-behaved guest gets: its data, the order it asked for, and clear answers to failures.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use xenblk_ring::{Abi, RawSlot, RwOp, Segment};
use xenblkd::message::{Command, Report};
use xenblkd::target::OpenedTarget;
use xenblkd::target::script::OpKind;
use xenblkd::target::script::disk::{PendingOp, ScriptedDisk};

use crate::world::{ERROR, Front, LIMIT, NOT_SUPPORTED, OKAY, Page, Terms, World, disk};

pub(crate) struct Scripted {
    _dir: tempfile::TempDir,
    pub(crate) disk: ScriptedDisk,
    pub(crate) target: OpenedTarget,
}

impl Scripted {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("script");
        let scripted = ScriptedDisk::listen(&socket, 16 << 20).unwrap();
        let target = disk(&format!("script:{}", socket.display()));
        Self {
            _dir: dir,
            disk: scripted,
            target,
        }
    }

    pub(crate) fn next(&self) -> PendingOp {
        self.disk
            .next(LIMIT)
            .expect("the worker asks for an operation")
    }

    pub(crate) fn next_is(&self, op: OpKind, offset: u64) -> PendingOp {
        let pending = self.next();
        assert_eq!((pending.ask.op, pending.ask.offset), (op, offset));
        pending
    }

    /// Nothing more has been asked. A worker that answered a later request has started all it can.
    pub(crate) fn assert_quiet(&self) {
        let pending = self.disk.next(std::time::Duration::ZERO);
        assert!(pending.is_none(), "{pending:?}");
    }
}

fn image(size: u64) -> (tempfile::NamedTempFile, OpenedTarget) {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(size).unwrap();
    let target = disk(&format!("raw:{}", file.path().display()));
    (file, target)
}

fn bytes_at(file: &File, sector: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, sector * 512).unwrap();
    bytes
}

fn pages(front: &Front, count: usize, readonly: bool) -> Vec<Page> {
    (0..count).map(|_| front.page(readonly)).collect()
}

/// Direct transfers with odd pieces of pages, in disk order across segments.
fn direct(front: &mut Front, file: &File) {
    let (one, two) = (front.filled(0x11), front.filled(0x22));
    let segments = [one.part(6, 7), two.part(0, 0), one.part(3, 3)];
    let request = front.rw(RwOp::Write, 77, &segments);
    assert_eq!(front.run(&request), OKAY);
    let expected = [[0x11; 1024].as_slice(), &[0x22; 512], &[0x11; 512]].concat();
    assert_eq!(bytes_at(file, 77, 2048), expected);
    front.take_back(one);
    front.take_back(two);

    let back = front.page(false);
    let request = front.rw(RwOp::Read, 77, &[back.part(1, 4)]);
    assert_eq!(front.run(&request), OKAY);
    let bytes = front.bytes(back);
    assert_eq!(bytes[512..2560], expected);
    assert!(
        bytes[..512].iter().chain(&bytes[2560..]).all(|b| *b == 0),
        "not a byte more"
    );
    front.take_back(back);
}

/// The longest indirect transfers, both ways.
fn indirect(front: &mut Front, file: &File) {
    let data: Vec<Page> = (0..256u32).map(|n| front.filled(n as u8)).collect();
    let segments: Vec<Segment> = data.iter().map(|page| page.whole()).collect();
    let (request, list) = front.indirect(RwOp::Write, 4096, &segments);
    assert_eq!(front.run(&request), OKAY);
    front.take_back(list);
    let on_disk = bytes_at(file, 4096, 256 * 4096);
    assert!(
        on_disk
            .chunks(4096)
            .enumerate()
            .all(|(n, page)| page.iter().all(|b| *b == n as u8))
    );
    data.into_iter().for_each(|page| front.take_back(page));

    let back = pages(front, 256, false);
    let segments: Vec<Segment> = back.iter().map(|page| page.whole()).collect();
    let (request, list) = front.indirect(RwOp::Read, 4096, &segments);
    assert_eq!(front.run(&request), OKAY);
    front.take_back(list);
    for (n, page) in back.into_iter().enumerate() {
        assert_eq!(front.bytes(page), [n as u8; 4096]);
        front.take_back(page);
    }
}

fn other_operations(front: &mut Front, file: &File) {
    let request = front.flush(None);
    assert_eq!(front.run(&request), OKAY);
    let page = front.filled(0x77);
    let request = front.flush(Some((16, page.whole())));
    assert_eq!(front.run(&request), OKAY);
    assert_eq!(bytes_at(file, 16, 4096), [0x77; 4096]);
    let request = front.barrier(Some((24, page.part(0, 0))));
    assert_eq!(front.run(&request), OKAY);
    assert_eq!(bytes_at(file, 24, 512), [0x77; 512]);
    let request = front.barrier(None);
    assert_eq!(front.run(&request), OKAY);
    front.take_back(page);

    let request = front.discard(16, 8);
    assert_eq!(front.run(&request), OKAY);
    assert_eq!(front.read(16).unwrap(), [0; 4096]);
    for op in [4, 7, 255] {
        let id = front.id();
        front.push_raw(&RawSlot::with_operation(front.abi, op, id), id, op);
        front.kick();
        assert_eq!(front.settle()[&id], NOT_SUPPORTED, "operation {op}");
    }
}

#[test]
fn every_operation_on_every_ring() {
    let world = World::new();
    for abi in [Abi::X86_32, Abi::X86_64, Abi::Arm] {
        for pages in [1, 2, 4, 8, 16] {
            let (file, target) = image(16 << 20);
            let mut front = world.attach(
                &target,
                &Terms {
                    abi,
                    pages,
                    ..Terms::default()
                },
            );
            direct(&mut front, file.as_file());
            indirect(&mut front, file.as_file());
            other_operations(&mut front, file.as_file());
            let stats = front.stats();
            assert_eq!((stats.indirect, stats.flushes, stats.barriers), (2, 2, 2));
            assert_eq!((stats.discards, stats.unknown, stats.errors), (1, 3, 3));
            assert_eq!((stats.reads, stats.writes), (3, 2));
            assert_eq!(stats.bytes_written, 2048 + (1 << 20) + 4096 + 512);
            world.detach(front);
            assert_eq!(world.mapped(), 0);
        }
    }
}

#[test]
fn a_full_ring_is_served_in_few_calls() {
    let world = World::new();
    let (file, target) = image(1 << 20);
    let terms = Terms {
        pages: 4,
        ..Terms::default()
    };
    let mut front = world.attach(&target, &terms);
    let entries = front.ring.free();
    assert_eq!(entries, 128);
    for round in 1..=8u64 {
        let data: Vec<Page> = (0..entries)
            .map(|n| front.filled(n as u8 ^ round as u8))
            .collect();
        for (n, page) in data.iter().enumerate() {
            let request = front.rw(RwOp::Write, n as u64 * 8, &[page.whole()]);
            front.push(&request);
        }
        assert_eq!(front.ring.free(), 0);
        front.kick();
        assert!(front.settle().values().all(|status| *status == OKAY));
        data.into_iter().for_each(|page| front.take_back(page));
    }
    let on_disk = bytes_at(file.as_file(), 0, 128 * 4096);
    assert!(
        on_disk
            .chunks(4096)
            .enumerate()
            .all(|(n, page)| page[9] == n as u8 ^ 8)
    );
    let stats = front.stats();
    assert_eq!(stats.responses, 8 * 128);
    assert!(
        stats.copies <= stats.batches,
        "at most one copy call from the guest a turn: {stats:?}"
    );
    assert!(stats.notifies <= stats.publishes, "{stats:?}");
    assert!(stats.publishes <= stats.responses, "{stats:?}");
    world.detach(front);
}

#[test]
fn many_rings_of_one_worker_keep_apart() {
    let world = World::new();
    let disks: Vec<_> = (0..4).map(|_| image(1 << 20)).collect();
    let mut fronts: Vec<Front> = disks
        .iter()
        .map(|(_, target)| world.attach(target, &Terms::default()))
        .collect();
    for (n, front) in fronts.iter_mut().enumerate() {
        assert_eq!(front.write(8, n as u8 + 1), OKAY);
    }
    for (n, front) in fronts.iter_mut().enumerate() {
        assert_eq!(front.read(8).unwrap(), [n as u8 + 1; 4096]);
    }
    let idle = fronts[0].stats();
    assert_eq!(fronts[1].write(0, 9), OKAY);
    assert_eq!(fronts[0].stats(), idle, "an idle ring is left alone");
    fronts.into_iter().for_each(|front| world.detach(front));
    assert_eq!(world.mapped(), 0);
}

#[test]
fn answers_come_as_operations_end_and_a_stuck_one_holds_up_nobody() {
    let world = World::new();
    let script = Scripted::new();
    let mut front = world.attach(&script.target, &Terms::default());
    let page = front.page(false);
    let mut ids = HashMap::new();
    for n in 0..5u64 {
        let request = front.rw(RwOp::Read, n * 8, &[page.whole()]);
        ids.insert(n * 4096, front.push(&request));
    }
    front.kick();
    let ops: Vec<PendingOp> = (0..5).map(|_| script.next()).collect();
    let mut stuck = None;
    for op in ops.into_iter().rev() {
        if op.ask.offset == 2 * 4096 {
            stuck = Some(op);
            continue;
        }
        let id = ids[&op.ask.offset];
        op.go().unwrap();
        let taken = front.take(LIMIT);
        assert_eq!(
            taken.iter().map(|r| (r.id, r.status)).collect::<Vec<_>>(),
            [(id, OKAY)]
        );
    }
    let request = front.rw(RwOp::Read, 800, &[page.whole()]);
    let later = front.push(&request);
    front.kick();
    script.next_is(OpKind::Read, 800 * 512).go().unwrap();
    assert_eq!(front.take(LIMIT)[0].id, later);
    stuck.unwrap().go().unwrap();
    assert_eq!(front.take(LIMIT)[0].id, ids[&(2 * 4096)]);
    world.detach(front);
}

#[test]
fn a_failing_disk_is_an_error_and_the_next_request_succeeds() {
    let world = World::new();
    let script = Scripted::new();
    let mut front = world.attach(&script.target, &Terms::default());
    let page = front.filled(3);
    for errno in [libc::ENOSPC, libc::EIO, libc::EOPNOTSUPP] {
        let request = front.rw(RwOp::Write, 8, &[page.whole()]);
        let id = front.push(&request);
        front.kick();
        script.next().fail(errno).unwrap();
        assert_eq!(front.settle()[&id], ERROR, "never EOPNOTSUPP for a write");
    }
    let request = front.discard(0, 8);
    let id = front.push(&request);
    front.kick();
    script
        .next_is(OpKind::Discard, 0)
        .fail(libc::EOPNOTSUPP)
        .unwrap();
    assert_eq!(front.settle()[&id], NOT_SUPPORTED);
    let request = front.rw(RwOp::Write, 8, &[page.whole()]);
    let id = front.push(&request);
    front.kick();
    script.next().go().unwrap();
    assert_eq!(front.settle()[&id], OKAY);
    world.detach(front);
}

#[test]
fn a_failed_flush_ends_all_promises_of_the_ring_and_is_reported() {
    let world = World::new();
    let script = Scripted::new();
    let mut front = world.attach(&script.target, &Terms::default());
    let mut other = world.attach(&script.target, &Terms::default());
    let (first, second) = (front.flush(None), front.flush(None));
    let ids = [front.push(&first), front.push(&second)];
    front.kick();
    script.next_is(OpKind::Flush, 0).fail(libc::EIO).unwrap();
    let report = world.report();
    assert!(
        matches!(report, Report::FlushFailed { ring, .. } if ring == front.id),
        "{report:?}"
    );
    // One was ordered first; the kernel reports an error once, so the other isn't even tried.
    let statuses = front.settle();
    assert_eq!(ids.map(|id| statuses[&id]), [ERROR, ERROR]);

    let request = front.flush(None);
    assert_eq!(front.run(&request), ERROR);
    assert_eq!(front.write(0, 1), ERROR);
    let request = front.barrier(None);
    assert_eq!(front.run(&request), ERROR);
    script.assert_quiet();
    let page = front.page(false);
    let request = front.rw(RwOp::Read, 0, &[page.whole()]);
    let id = front.push(&request);
    front.kick();
    script.next_is(OpKind::Read, 0).go().unwrap();
    assert_eq!(front.settle()[&id], OKAY, "reads go on");

    world.command(Command::FlushFailed { ring: other.id });
    // A command and a request travel different ways: what follows a later report is after both.
    let third = world.attach(&script.target, &Terms::default());
    assert_eq!(other.write(0, 1), ERROR);
    script.assert_quiet();
    for front in [front, other, third] {
        world.detach(front);
    }
}

#[test]
fn a_barrier_is_after_everything_before_and_before_everything_after() {
    let world = World::new();
    let script = Scripted::new();
    let mut front = world.attach(&script.target, &Terms::default());
    let page = front.filled(8);
    let before = front.rw(RwOp::Write, 8, &[page.whole()]);
    let read_before = front.rw(RwOp::Read, 16, &[front.page(false).whole()]);
    let barrier = front.barrier(Some((24, page.part(0, 1))));
    let after = front.rw(RwOp::Write, 32, &[page.whole()]);
    for request in [&before, &read_before, &barrier, &after] {
        front.push(request);
    }
    front.kick();
    let mut first = [script.next(), script.next()];
    first.sort_by_key(|op| op.ask.offset);
    let [write, read] = first;
    assert_eq!((write.ask.offset, read.ask.offset), (8 * 512, 16 * 512));
    write.go().unwrap();
    assert_eq!(front.take(LIMIT).len(), 1);
    script.assert_quiet();
    read.go().unwrap();
    assert_eq!(front.take(LIMIT).len(), 1);
    for (op, offset) in [
        (OpKind::Flush, 0),
        (OpKind::Write, 24 * 512),
        (OpKind::Flush, 0),
    ] {
        let pending = script.next_is(op, offset);
        script.assert_quiet();
        pending.go().unwrap();
    }
    script.next_is(OpKind::Write, 32 * 512).go().unwrap();
    assert!(front.settle().values().all(|status| *status == OKAY));
    world.detach(front);
}

#[test]
fn a_discard_never_overtakes_nor_is_overtaken_by_what_overlaps() {
    let world = World::new();
    let script = Scripted::new();
    let mut front = world.attach(&script.target, &Terms::default());
    let page = front.filled(8);
    let discard = front.discard(0, 64);
    let apart = front.rw(RwOp::Write, 64, &[page.whole()]);
    let within = front.rw(RwOp::Write, 56, &[page.whole()]);
    let again = front.discard(60, 1);
    for request in [&discard, &apart, &within, &again] {
        front.push(request);
    }
    front.kick();
    // The flusher and the worker ask, in any order.
    let mut both = [script.next(), script.next()];
    both.sort_by_key(|op| op.ask.offset);
    let [first, write] = both;
    assert_eq!((first.ask.op, first.ask.offset), (OpKind::Discard, 0));
    assert_eq!((write.ask.op, write.ask.offset), (OpKind::Write, 64 * 512));
    write.go().unwrap();
    assert_eq!(front.take(LIMIT).len(), 1);
    script.assert_quiet();
    first.go().unwrap();
    let write = script.next_is(OpKind::Write, 56 * 512);
    assert_eq!(front.take(LIMIT).len(), 1);
    script.assert_quiet();
    write.go().unwrap();
    script.next_is(OpKind::Discard, 60 * 512).go().unwrap();
    assert!(front.settle().values().all(|status| *status == OKAY));
    world.detach(front);
}

#[test]
fn requests_wait_for_memory_and_segment_tables_and_none_is_lost() {
    let world = World::new();
    let script = Scripted::new();
    // Room for one request of the largest size at a time.
    let terms = Terms {
        pages: 8,
        bounce_bytes: 1 << 20,
        ..Terms::default()
    };
    let mut front = world.attach(&script.target, &terms);
    let page = front.page(false);
    let large = vec![page.whole(); 256];
    let small = [page.part(0, 0)];
    // More than the journal has segment tables, small enough to be under way together.
    for n in 0..200u64 {
        let (request, _) = front.indirect(RwOp::Read, n * 8, &small);
        front.push(&request);
    }
    let (request, _) = front.indirect(RwOp::Read, 0, &large);
    front.push(&request);
    let request = front.rw(RwOp::Read, 0, &[page.whole()]);
    front.push(&request);
    front.kick();
    // The first ones stay under way while others end, so tables come back one by one.
    let mut held = Vec::new();
    for n in 0..202 {
        let op = script.next();
        if n < 60 {
            held.push(op);
        } else {
            op.go().unwrap();
        }
        if n == 199 {
            held.drain(..).for_each(|op: PendingOp| op.go().unwrap());
        }
    }
    let statuses = front.settle();
    assert_eq!(statuses.len(), 202);
    assert!(statuses.values().all(|status| *status == OKAY));
    world.detach(front);
}

#[test]
fn a_read_only_disk_refuses_what_modifies() {
    let world = World::new();
    let (file, target) = image(1 << 20);
    let mut front = world.attach(
        &target,
        &Terms {
            readonly: true,
            ..Terms::default()
        },
    );
    assert_eq!(front.write(0, 5), ERROR);
    let page = front.filled(5);
    let (request, _) = front.indirect(RwOp::Write, 0, &[page.whole()]);
    assert_eq!(front.run(&request), ERROR);
    for request in [
        front.barrier(Some((0, page.whole()))),
        front.flush(Some((0, page.whole()))),
        front.discard(0, 8),
    ] {
        assert_eq!(front.run(&request), ERROR);
    }
    let request = front.flush(None);
    assert_eq!(front.run(&request), OKAY, "there is nothing to lose");
    assert_eq!(front.read(0).unwrap(), [0; 4096]);
    assert_eq!(bytes_at(file.as_file(), 0, 1 << 20), vec![0; 1 << 20]);
    world.detach(front);
}

#[test]
fn discard_is_not_supported_where_it_was_not_offered() {
    let world = World::new();
    let (_file, target) = image(1 << 20);
    let mut front = world.attach(
        &target,
        &Terms {
            discard: false,
            ..Terms::default()
        },
    );
    let request = front.discard(0, 8);
    assert_eq!(front.run(&request), NOT_SUPPORTED);
    world.detach(front);
}
