//! A guest that does its worst beside one that only wants its data: whatever the first one tries, the
//! second reads back what it wrote, each request gets one answer, and in the end nothing is left.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use xenblk_grants::CopyStatus;
use xenblk_grants::fake::{DomainWords, FakeDomain};
use xenblk_ring::{Abi, IndirectRequest, RawSlot, Request, RwOp, Segment, Words, layout};
use xenblkd::message::{Command, Persistent, Report};
use xenblkd::target::script::OpKind;

use crate::service::Scripted;
use crate::world::{ERROR, Front, GUEST, OKAY, PERSISTENT, Page, Terms, World, disk};

/// What the honest guest's disk and pages hold, and nobody else's.
const SECRET: u8 = 0x5e;
/// What pages hold that nobody may write to.
const CANARY: u8 = 0xcc;

/// The honest guest.
struct Honest {
    front: Front,
    rounds: u64,
}

impl Honest {
    fn new(world: &World) -> Self {
        let front = world.attach_of(&world.neighbour(), &disk("memory:1M"), &Terms::default());
        Self { front, rounds: 0 }
    }

    fn check(&mut self) {
        let sector = self.rounds % 200 * 8;
        self.rounds += 1;
        assert_eq!(self.front.write(sector, SECRET), OKAY);
        assert_eq!(self.front.read(sector).unwrap(), [SECRET; 4096]);
    }
}

/// The hostile guest's pages.
struct Pages {
    writable: Vec<Page>,
    readonly: Vec<Page>,
    /// Of segments.
    lists: Vec<Page>,
}

impl Pages {
    fn new(front: &Front) -> Self {
        Self {
            writable: (0..6).map(|_| front.page(false)).collect(),
            readonly: (0..3).map(|_| front.filled(CANARY)).collect(),
            lists: (0..4).map(|_| front.page(true)).collect(),
        }
    }

    /// Grants of all kinds of pages, and of none.
    fn grefs(&self) -> Vec<u32> {
        let own = [&self.writable, &self.readonly, &self.lists];
        let mut grefs: Vec<u32> = own.into_iter().flatten().map(|page| page.gref.0).collect();
        grefs.extend([0, 1, 7, 1 << 20, u32::MAX]);
        grefs
    }

    fn assert_harmless(&self, front: &Front) {
        for page in &self.readonly {
            assert_eq!(front.bytes(*page), [CANARY; 4096], "granted read-only");
        }
        for page in &self.writable {
            let bytes = front.bytes(*page);
            let leaked = bytes.windows(8).any(|part| part == [SECRET; 8]);
            assert!(!leaked, "another guest's data");
        }
    }
}

/// Numbers that look random and are the same in each run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = self.0.wrapping_add(1);
        (self.0 >> 33) as u32
    }

    fn below(&mut self, bound: u32) -> u32 {
        self.next() % bound
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u32) as usize]
    }
}

/// Stops the rewriting thread even when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Replaces words of slots (of 28) and of lists by others that mean something, or nothing. None is the
/// grant of the ring itself: a READ would put an end to it.
fn rewrite(
    ring: &DomainWords,
    guest: &FakeDomain,
    grefs: &[u32],
    lists: &[Page],
    stop: &AtomicBool,
) {
    // Operation, count or inner operation, count of an indirect request.
    const HEADS: [u32; 10] = [
        0x0020_0106,
        0x0b00,
        0x0b01,
        0x0100_0006,
        0x0100_0106,
        0x0101_0006,
        5,
        3,
        2,
        0xff09,
    ];
    const SECTORS: [u32; 6] = [0x0700, 0, 0x0703, 0xff00, 0x0203, 0x0007];
    let mut numbers = Numbers(1);
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..64 {
            let slot = 16 + numbers.below(32) as usize * 28;
            ring.store(slot, numbers.pick(&HEADS));
            let value = match numbers.below(4) {
                0 => numbers.pick(grefs),
                1 => numbers.pick(&SECTORS),
                2 => 1024 + numbers.below(1024),
                _ => numbers.next(),
            };
            ring.store(slot + 4 + numbers.below(24) as usize, value);
            let descriptor = numbers.below(256) as usize * 8;
            let (at, value) = if numbers.below(2) == 0 {
                (descriptor, numbers.pick(grefs))
            } else {
                (descriptor + 4, numbers.pick(&SECTORS))
            };
            let list = numbers.pick(lists);
            assert!(guest.write(list.gfn, at, &value.to_le_bytes()));
        }
        std::thread::yield_now();
    }
}

#[test]
fn slots_and_lists_rewritten_all_the_time_harm_nobody() {
    rewritten(&Terms::default());
    rewritten(&Terms {
        persistent: Some(PERSISTENT),
        ..Terms::default()
    });
}

fn rewritten(terms: &Terms) {
    let world = World::new();
    let mut honest = Honest::new(&world);
    let mut bad = world.attach(&disk("memory:1M"), terms);
    let pages = Pages::new(&bad);
    let (ring, grefs) = (bad.ring.words().clone(), pages.grefs());
    let stop = AtomicBool::new(false);
    let mut numbers = Numbers(2);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| rewrite(&ring, &world.guest, &grefs, &pages.lists, &stop));
        for _ in 0..150 {
            let count = 1 + numbers.below(32);
            for _ in 0..count {
                let sector = u64::from(numbers.below(2048));
                let page = numbers.pick(&pages.writable);
                let op = numbers.pick(&[RwOp::Read, RwOp::Write]);
                let request = match numbers.below(4) {
                    0 => bad.rw(op, sector, &[page.whole(); 11]),
                    // Its length stands where others have a grant.
                    1 => bad.discard(sector, 64),
                    _ => {
                        let mut grefs = [u32::MAX; layout::MAX_INDIRECT_PAGES];
                        grefs[0] = numbers.pick(&pages.lists).gref.0;
                        let segments = 1 + numbers.below(256) as u16;
                        let id = bad.id();
                        let request = IndirectRequest::new(id, op, 0, segments, grefs);
                        Request::Indirect(request.unwrap())
                    }
                };
                bad.ring.push(&request.encode(bad.abi)).unwrap();
            }
            bad.kick();
            honest.check();
            bad.swallow(count as usize);
        }
    });
    pages.assert_harmless(&bad);
    assert_eq!(bad.ring.in_flight(), 0, "one answer for each request");
    world.detach(bad);
    honest.check();
    world.detach(honest.front);
    assert_eq!(world.mapped(), 0);
}

/// The disk is a way to write to the ring behind the frontend's back.
#[test]
fn a_guest_that_reads_into_its_own_ring_stops_that_ring_alone() {
    let world = World::new();
    let mut honest = Honest::new(&world);
    let mut bad = world.attach(&disk("memory:1M"), &Terms::default());
    assert_eq!(bad.write(0, 0xff), OKAY);
    let ring = Segment::new(bad.refs[0].0, 0, 7).unwrap();
    let request = bad.rw(RwOp::Read, 0, &[ring]);
    bad.push(&request);
    bad.kick();
    let report = world.report();
    assert!(
        matches!(report, Report::Failed { ring, .. } if ring == bad.id),
        "{report:?}"
    );
    honest.check();
    world.detach(bad);
    world.detach(honest.front);
    assert_eq!(world.mapped(), 0);
}

#[test]
fn grants_revoked_and_a_domain_killed_in_mid_operation() {
    let world = World::new();
    let mut honest = Honest::new(&world);
    let script = Scripted::new();
    let mut bad = world.attach(&script.target, &Terms::default());
    let revoked = bad.page(false);
    assert!(world.guest.write(revoked.gfn, 0, &[CANARY; 4096]));
    let page = bad.page(false);
    let read = bad.rw(RwOp::Read, 0, &[page.whole(), revoked.whole()]);
    let read = bad.push(&read);
    let (indirect, list) = bad.indirect(RwOp::Read, 64, &[revoked.whole()]);
    let indirect = bad.push(&indirect);
    bad.kick();
    let ops = [script.next(), script.next()];
    world.guest.revoke(revoked.gref);
    world.guest.revoke(list.gref);
    honest.check();
    for op in ops {
        op.go().unwrap();
    }
    let statuses = bad.settle();
    assert_eq!([statuses[&read], statuses[&indirect]], [ERROR, ERROR]);
    assert_eq!(bad.bytes(revoked), [CANARY; 4096]);

    // Two under way, and two that wait for them.
    let requests = [
        bad.rw(RwOp::Write, 0, &[page.whole()]),
        bad.rw(RwOp::Read, 8, &[page.whole()]),
        bad.barrier(None),
        bad.rw(RwOp::Read, 16, &[page.whole()]),
    ];
    for request in &requests {
        bad.push(request);
    }
    bad.kick();
    let ops = [script.next(), script.next()];
    world.xen.kill_domain(GUEST);
    honest.check();
    world.command(Command::Detach { ring: bad.id });
    let early = world.report_within(Duration::from_millis(50));
    assert!(early.is_none(), "its I/O is under way: {early:?}");
    honest.check();
    for op in ops {
        op.go().unwrap();
    }
    script.next_is(OpKind::Flush, 0).go().unwrap();
    script.next_is(OpKind::Read, 16 * 512).go().unwrap();
    let report = world.report();
    assert!(
        matches!(report, Report::Detached { ring, left } if ring == bad.id && left.is_nothing()),
        "{report:?}"
    );
    assert!(world.xen.snapshot().zombies.is_empty());
    assert!(script.target.fence_free(0).unwrap());
    honest.check();
    world.detach(honest.front);
    assert_eq!(world.mapped(), 0);
}

/// Bounce memory is used again and again: what an earlier request left in it is for nobody.
#[test]
fn a_transfer_that_fails_or_falls_short_shows_nothing_of_earlier_ones() {
    const OLD: u8 = 0xee;
    const PAGES: usize = 16;
    let world = World::new();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let target = disk(&format!("raw:{}", file.path().display()));
    let terms = Terms {
        bounce_bytes: (PAGES * 4096) as u64,
        max_indirect: PAGES as u16,
        ..Terms::default()
    };
    let mut front = world.attach(&target, &terms);
    let old: Vec<Segment> = (0..PAGES).map(|_| front.filled(OLD).whole()).collect();
    let pages: Vec<Page> = (0..PAGES).map(|_| front.page(false)).collect();
    let whole: Vec<Segment> = pages.iter().map(|page| page.whole()).collect();
    // All of the bounce memory is written to the disk's first pages, and so is full of old data.
    let poison = |front: &mut Front| {
        let (request, list) = front.indirect(RwOp::Write, 0, &old);
        assert_eq!(front.run(&request), OKAY);
        front.take_back(list);
        for page in &pages {
            assert!(world.guest.write(page.gfn, 0, &[CANARY; 4096]));
        }
    };

    // The disk ends earlier than it did: two pages are there, or none.
    for sector in [0, 16, 1024] {
        for segments in [&whole[..11], &whole[..3], &[pages[0].part(2, 5); 9]] {
            poison(&mut front);
            file.as_file().set_len(8192).unwrap();
            let request = front.rw(RwOp::Read, sector, segments);
            assert_eq!(front.run(&request), ERROR);
            let (request, list) = front.indirect(RwOp::Read, sector, &whole);
            assert_eq!(front.run(&request), ERROR);
            front.take_back(list);
            for page in &pages {
                assert_eq!(front.bytes(*page), [CANARY; 4096], "sector {sector}");
            }
            file.as_file().set_len(1 << 20).unwrap();
        }
    }
    // What is a hole now is zeroes, not what the memory held.
    poison(&mut front);
    let request = front.rw(RwOp::Read, 1024, &whole[..11]);
    assert_eq!(front.run(&request), OKAY);
    for page in &pages[..11] {
        assert_eq!(front.bytes(*page), [0; 4096]);
    }
    // The guest's data comes to half only: nothing of it is written, and nothing old either.
    for nth in [1, 2, 11] {
        poison(&mut front);
        let request = front.rw(RwOp::Write, 1024, &whole[..11]);
        world.xen.faults().fail_copy(nth, CopyStatus::GENERAL_ERROR);
        assert_eq!(front.run(&request), ERROR);
        assert_eq!(front.read(1024).unwrap(), [0; 4096]);
        assert_eq!(front.read(1104).unwrap(), [0; 4096]);
    }
    world.detach(front);
}

/// What a guest without any sense does.
#[derive(Clone, Debug)]
enum Action {
    /// A slot of these bytes, with some of them replaced by what makes it further.
    Push {
        bytes: Vec<u8>,
        sense: Sense,
    },
    Kick,
    /// Takes a page back at once, and grants another.
    Revoke(usize),
    /// Sets `req_prod` or `rsp_event`, whatever the ring holds.
    Lie {
        word: usize,
        value: u32,
    },
    /// Lets go of the ring and comes back with a new one.
    Reconnect,
}

#[derive(Clone, Debug)]
struct Sense {
    operation: u8,
    inner: u8,
    count: u8,
    sector: Option<u16>,
    /// Which of the grants known, for each place of the slot where one can stand.
    grefs: Vec<Option<usize>>,
    /// First and last sector of each segment.
    sectors: Option<(u8, u8)>,
}

fn sense() -> impl Strategy<Value = Sense> {
    let operation = prop_oneof![Just(0u8), Just(1), Just(6), Just(6), 2u8..6, any::<u8>()];
    let count = prop_oneof![0u8..13, any::<u8>()];
    let gref = prop::option::weighted(0.9, 0usize..64);
    let sectors = prop::option::weighted(0.8, (0u8..9, 0u8..9));
    (
        operation,
        prop_oneof![Just(0u8), Just(1), any::<u8>()],
        count,
        prop::option::weighted(0.9, 0u16..2100),
        prop::collection::vec(gref, 11),
        sectors,
    )
        .prop_map(|(operation, inner, count, sector, grefs, sectors)| Sense {
            operation,
            inner,
            count,
            sector,
            grefs,
            sectors,
        })
}

fn action() -> impl Strategy<Value = Action> {
    let bytes = prop::collection::vec(any::<u8>(), 112);
    let value = prop_oneof![0u32..600, any::<u32>()];
    prop_oneof![
        20 => (bytes, sense()).prop_map(|(bytes, sense)| Action::Push { bytes, sense }),
        4 => Just(Action::Kick),
        3 => (0usize..6).prop_map(Action::Revoke),
        1 => (prop::sample::select(vec![layout::REQ_PROD, layout::RSP_EVENT]), value)
            .prop_map(|(word, value)| Action::Lie { word, value }),
        1 => Just(Action::Reconnect),
    ]
}

/// The guest that does them.
struct Senseless<'a> {
    world: &'a World,
    terms: Terms,
    front: Front,
    pages: Pages,
    /// It has lied, and its own half of the ring means nothing any more.
    lied: bool,
}

impl<'a> Senseless<'a> {
    fn new(world: &'a World, terms: Terms) -> Self {
        let front = world.attach(&disk("memory:1M"), &terms);
        let pages = Pages::new(&front);
        Self {
            world,
            terms,
            front,
            pages,
            lied: false,
        }
    }

    fn slot(&self, bytes: &[u8], sense: &Sense) -> RawSlot {
        let mut slot = RawSlot::from_bytes(bytes.try_into().unwrap());
        let known = self.pages.grefs();
        let at = self.front.abi.offsets();
        let mut put = |offset: usize, bytes: &[u8]| {
            for (n, byte) in bytes.iter().enumerate() {
                slot.set_byte(offset + n, *byte);
            }
        };
        if let Some(sector) = sense.sector {
            put(at.sector, &u64::from(sector).to_le_bytes());
        }
        let indirect = sense.operation == layout::OP_INDIRECT;
        if indirect {
            put(0, &[sense.operation, sense.inner, sense.count, 0]);
            let list = self.pages.lists[usize::from(sense.count) % self.pages.lists.len()];
            put(at.indirect_grefs, &list.gref.0.to_le_bytes());
        } else {
            put(0, &[sense.operation, sense.count]);
        }
        let mut descriptors = Vec::new();
        for gref in &sense.grefs {
            let gref = gref.map_or(u32::MAX / 3, |n| known[n % known.len()]);
            descriptors.extend(gref.to_le_bytes());
            let (first, last) = sense.sectors.unwrap_or((0, 7));
            descriptors.extend([first, last, 0xff, 0xff]);
        }
        if indirect {
            let list = self.pages.lists[usize::from(sense.count) % self.pages.lists.len()];
            let list = list.gfn;
            for n in 0..256 / sense.grefs.len() {
                let written = self
                    .world
                    .guest
                    .write(list, n * descriptors.len(), &descriptors);
                assert!(written);
            }
        } else if sense.sectors.is_some() {
            put(at.segments, &descriptors);
        }
        slot
    }

    fn act(&mut self, action: &Action) {
        match action {
            Action::Reconnect => self.reconnect(),
            Action::Revoke(n) => {
                let page = self.pages.writable[*n];
                self.world.guest.revoke(page.gref);
                self.pages.writable[*n] = self.front.page(false);
            }
            Action::Lie { word, value } => {
                self.settle();
                self.lied = true;
                self.front.ring.words().store(*word, *value);
                self.world.guest.notify(self.front.port);
            }
            Action::Push { .. } | Action::Kick if self.lied => {
                self.world.guest.notify(self.front.port);
            }
            Action::Kick => self.front.kick(),
            Action::Push { bytes, sense } => {
                if self.front.ring.free() == 0 {
                    self.settle();
                }
                let slot = self.slot(bytes, sense);
                self.front.ring.push(&slot).unwrap();
            }
        }
    }

    /// One answer comes for each request.
    fn settle(&mut self) {
        if !self.lied {
            self.front.kick();
            self.front.swallow(self.front.ring.in_flight() as usize);
        }
    }

    fn reconnect(&mut self) {
        let target = disk("memory:1M");
        let new = self.world.offer(&target, &self.terms);
        let (front, attach, fds) = new;
        let old = std::mem::replace(&mut self.front, front);
        let_go(self.world, old, self.lied);
        self.world.command(xenblkd::channel::Message {
            body: Command::Attach(Box::new(attach)),
            fds,
        });
        self.world.give_flusher(&mut self.front, &target);
        let report = self.world.report();
        assert!(matches!(report, Report::Attached { .. }), "{report:?}");
        self.lied = false;
    }

    fn end(mut self) {
        self.settle();
        self.pages.assert_harmless(&self.front);
        let pages = &self.pages;
        let pages = [&pages.writable, &pages.readonly, &pages.lists];
        let pages: Vec<_> = pages.into_iter().flatten().copied().collect();
        let kept = self.terms.persistent.is_some();
        if !kept && !self.lied {
            for page in &pages {
                self.front.take_back(*page);
            }
        }
        let_go(self.world, self.front, self.lied);
        if kept {
            for page in pages {
                self.world.guest.end_access(page.gref).unwrap();
                self.world.guest.free_page(page.gfn);
            }
        }
    }
}

/// The worker may have found the ring corrupt, but lets go of it whatever happened.
fn let_go(world: &World, front: Front, lied: bool) {
    world.command(Command::Detach { ring: front.id });
    loop {
        match world.report() {
            Report::Detached { ring, left } if ring == front.id && left.is_nothing() => break,
            Report::Failed { ring, .. } if ring == front.id && lied => {}
            other => panic!("{other:?}"),
        }
    }
    front.assert_gone();
}

#[test]
fn no_sequence_of_nonsense_harms_the_neighbour_or_leaves_anything() {
    let world = World::new();
    let honest = RefCell::new(Honest::new(&world));
    let held = world.mapped();
    let config = Config {
        cases: 24,
        max_shrink_iters: 64,
        failure_persistence: None,
        ..Config::default()
    };
    let abi = prop::sample::select(Abi::ALL.to_vec());
    let pages = prop::sample::select(vec![1u32, 2, 16]);
    let actions = prop::collection::vec(action(), 1..120);
    let persistent = prop::sample::select(vec![
        None,
        Some(PERSISTENT),
        Some(Persistent {
            max_grants: 3,
            ..PERSISTENT
        }),
    ]);
    let sequence = (abi, pages, persistent, actions);
    TestRunner::new(config)
        .run(&sequence, |(abi, pages, persistent, actions)| {
            let terms = Terms {
                abi,
                pages,
                bounce_bytes: 1 << 20,
                persistent,
                ..Terms::default()
            };
            let mut guest = Senseless::new(&world, terms);
            for action in &actions {
                guest.act(action);
            }
            honest.borrow_mut().check();
            guest.end();
            assert_eq!(world.mapped(), held);
            Ok(())
        })
        .unwrap();
    world.detach(honest.into_inner().front);
}
