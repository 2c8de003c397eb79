//! The frontend against a backend that breaks the rules, played by hand on the ring's words.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use xenblk_grants::fake::{DomainWords, FakeDomain, FakeXen, event_channels, grant_table};
use xenblk_grants::{Access, DomId, EventChannels, GrantRef, Port};
use xenblk_ring::Words;
use xenblk_ring::layout::{OP_FLUSH_DISKCACHE, OP_READ, OP_WRITE, REQ_PROD, RSP_PROD};

use super::Disk;
use super::Profile;
use super::ring::{Manners, RingParts};
use crate::disk::{DiskInfo, GuestDisk, IoError, Op};

const PATIENCE: Duration = Duration::from_secs(60);
const GUEST: DomId = DomId(1);
const OKAY: i16 = 0;
const ERROR: i16 = -1;

type Outcome = Result<Vec<u8>, IoError>;

/// A guest with one ring of one page, and the backend's end of it.
struct Bench {
    xen: FakeXen,
    _domain: FakeDomain,
    words: DomainWords,
    events: Box<dyn EventChannels>,
    port: Port,
    disk: Arc<Disk>,
    responses: u32,
}

impl Bench {
    fn new() -> Self {
        let xen = FakeXen::start().unwrap();
        let domain = xen.domain(GUEST, 64).unwrap();
        let parts = RingParts::new(&domain, DomId(0), 0).unwrap();
        let words = parts.front.words().clone();
        let device = xen.host().unwrap().open_evtchn(DomId(0)).unwrap();
        let events = event_channels(device).unwrap();
        let port = events.bind_interdomain(GUEST, parts.port).unwrap();
        let info = DiskInfo {
            size: 1 << 20,
            sector_size: 512,
            physical_sector_size: 512,
            readonly: false,
            flush: true,
            discard: true,
            queues: 1,
        };
        let manners = Manners::new(Profile::linux6(), false);
        let disk = Disk::start(info, 11, "xvda", &domain, manners, vec![parts]).unwrap();
        let disk = Arc::new(disk);
        Self {
            xen,
            _domain: domain,
            words,
            events,
            port,
            disk,
            responses: 0,
        }
    }

    /// Submits `op` and waits until it is request number `count` on the ring.
    fn submit(&self, op: Op, count: u32) -> Receiver<Outcome> {
        let (done, outcome) = sync_channel(1);
        self.disk
            .submit(0, op, Box::new(move |result| drop(done.send(result))));
        let deadline = Instant::now() + PATIENCE;
        while self.words.load_acquire(REQ_PROD) != count {
            assert!(
                Instant::now() < deadline,
                "request {count} was not published"
            );
            std::thread::yield_now();
        }
        outcome
    }

    fn read(&self, count: u32) -> Receiver<Outcome> {
        let (offset, len) = (0, 512);
        self.submit(Op::Read { offset, len }, count)
    }

    /// Words of slot `index`, 112 bytes each behind a header of 64.
    fn slot(index: u32) -> usize {
        16 + 28 * index as usize
    }

    fn id(&self, index: u32) -> u64 {
        u64::from(self.words.load(Self::slot(index) + 2))
    }

    /// Puts a response into the next slot, whatever it says.
    fn respond(&mut self, id: u64, op: u8, status: i16) {
        let slot = Self::slot(self.responses);
        self.words.store(slot, id as u32);
        self.words.store(slot + 1, (id >> 32) as u32);
        self.words
            .store(slot + 2, u32::from(op) | u32::from(status as u16) << 16);
        self.responses += 1;
        self.publish(self.responses);
    }

    fn publish(&self, rsp_prod: u32) {
        self.words.store_release(RSP_PROD, rsp_prod);
        self.events.notify(self.port).unwrap();
    }

    /// The disk died of what `reason` names, and stays dead.
    fn assert_dead(&self, outcome: &Receiver<Outcome>, reason: &str) {
        assert_eq!(outcome.recv_timeout(PATIENCE), Ok(Err(IoError::Gone)));
        let said = self.disk.gone().expect("the disk lives on");
        assert!(said.contains(reason), "{said}");
        let later = self.disk.request(0, Op::Flush, PATIENCE);
        assert_eq!(later, Some(Err(IoError::Gone)));
    }
}

#[test]
fn right_answers_are_believed() {
    let mut bench = Bench::new();
    let outcome = bench.read(1);
    bench.respond(bench.id(0), OP_READ, OKAY);
    assert_eq!(outcome.recv_timeout(PATIENCE), Ok(Ok(vec![0; 512])));
    let outcome = bench.read(2);
    bench.respond(bench.id(1), OP_READ, ERROR);
    assert_eq!(outcome.recv_timeout(PATIENCE), Ok(Err(IoError::Error)));
    assert_eq!(bench.disk.gone(), None, "an error is no reason to die");
}

#[test]
fn a_response_that_names_another_operation_kills_the_disk() {
    let mut bench = Bench::new();
    let outcome = bench.read(1);
    bench.respond(bench.id(0), OP_WRITE, OKAY);
    bench.assert_dead(&outcome, "names operation 1, expected 0");
}

#[test]
fn a_response_to_nothing_kills_the_disk() {
    for id in [1, 32, u64::MAX, 1 << 32] {
        let mut bench = Bench::new();
        let outcome = bench.read(1);
        assert_eq!(bench.id(0), 0);
        bench.respond(id, OP_READ, OKAY);
        bench.assert_dead(&outcome, &format!("id {id:#x}, which is not in flight"));
    }
}

#[test]
fn a_second_response_to_the_same_request_kills_the_disk() {
    let mut bench = Bench::new();
    let first = bench.read(1);
    let second = bench.read(2);
    let id = bench.id(0);
    bench.respond(id, OP_READ, OKAY);
    assert!(first.recv_timeout(PATIENCE).unwrap().is_ok());
    bench.respond(id, OP_READ, OKAY);
    bench.assert_dead(&second, "not in flight");
}

#[test]
fn more_responses_than_requests_kill_the_disk() {
    let bench = Bench::new();
    let outcome = bench.read(1);
    bench.publish(2);
    bench.assert_dead(&outcome, "rsp_prod ran past the ring");
}

#[test]
fn a_status_nobody_knows_kills_the_disk() {
    let mut bench = Bench::new();
    let outcome = bench.read(1);
    bench.respond(bench.id(0), OP_READ, 5);
    bench.assert_dead(&outcome, "status 5");
}

#[test]
fn a_grant_still_mapped_at_its_response_kills_the_disk() {
    let mut bench = Bench::new();
    let outcome = bench.read(1);
    let table = grant_table(bench.xen.host().unwrap().open_gntdev().unwrap()).unwrap();
    // The first segment's gref stands 24 bytes into the slot.
    let gref = GrantRef(bench.words.load(Bench::slot(0) + 6));
    let mapping = table.map(GUEST, &[gref], Access::ReadWrite).unwrap();
    bench.respond(bench.id(0), OP_READ, OKAY);
    bench.assert_dead(&outcome, "still in use");
    drop(mapping);
}

#[test]
fn a_failed_flush_is_reported_as_done_and_the_last_one() {
    let mut bench = Bench::new();
    let outcome = bench.submit(Op::Flush, 1);
    bench.respond(bench.id(0), OP_FLUSH_DISKCACHE, ERROR);
    assert_eq!(outcome.recv_timeout(PATIENCE), Ok(Ok(Vec::new())));
    let later = bench.disk.request(0, Op::Flush, PATIENCE);
    assert_eq!(later, Some(Ok(Vec::new())));
    assert_eq!(bench.words.load(REQ_PROD), 1, "a second flush was sent");
}

#[test]
fn requests_wait_while_the_guest_has_no_memory_for_them() {
    let mut bench = Bench::new();
    // 63 pages are left, enough for five requests of 11.
    let (done, outcomes) = sync_channel(32);
    for _ in 0..32 {
        let op = Op::Write {
            offset: 0,
            data: vec![7; 11 * 4096],
        };
        let done = done.clone();
        bench
            .disk
            .submit(0, op, Box::new(move |result| drop(done.send(result))));
    }
    for answered in 0..32 {
        let deadline = Instant::now() + PATIENCE;
        while bench.words.load_acquire(REQ_PROD) <= answered {
            assert_eq!(bench.disk.gone(), None);
            assert!(Instant::now() < deadline, "request {answered} never came");
            std::thread::yield_now();
        }
        bench.respond(bench.id(answered), OP_WRITE, OKAY);
        assert_eq!(outcomes.recv_timeout(PATIENCE), Ok(Ok(Vec::new())));
    }
}

#[test]
fn requests_outside_the_disk_or_its_sectors_are_not_sent() {
    let bench = Bench::new();
    for (offset, len) in [(0, 100), (5, 512), (1 << 20, 512), (u64::MAX - 511, 512)] {
        let outcome = bench.disk.request(0, Op::Read { offset, len }, PATIENCE);
        assert_eq!(outcome, Some(Err(IoError::Invalid)), "{offset}, {len}");
    }
    assert_eq!(bench.words.load(REQ_PROD), 0);
}

#[test]
fn a_killed_disk_answers_what_is_in_flight() {
    let bench = Bench::new();
    let outcome = bench.read(1);
    bench.disk.kill("the test says so".into());
    bench.assert_dead(&outcome, "the test says so");
}
