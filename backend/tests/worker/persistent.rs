//! Frontends that keep their pages granted, and what becomes of those that say so and don't.

use std::time::{Duration, Instant};

use xenblk_grants::DomId;
use xenblk_ring::RwOp;
use xenblkd::message::{Command, Persistent, Report};

use crate::world::{ERROR, Front, GUEST, LIMIT, OKAY, PERSISTENT, Page, Terms, World, disk};

/// As many pages as a batch has requests, and more.
const PAGES: usize = 48;

pub(crate) fn terms(max_grants: u32) -> Terms {
    Terms {
        persistent: Some(Persistent {
            max_grants,
            window_pages: max_grants + 64,
            ..PERSISTENT
        }),
        ..Terms::default()
    }
}

/// A guest that uses the same writable pages again and again.
pub(crate) struct Keeper<'a> {
    world: &'a World,
    front: Front,
    pages: Vec<Page>,
    round: usize,
}

impl<'a> Keeper<'a> {
    pub(crate) fn new(world: &'a World, terms: &Terms) -> Self {
        let front = world.attach(&disk("memory:4M"), terms);
        let pages = (0..PAGES).map(|_| front.page(false)).collect();
        let round = 0;
        Self {
            world,
            front,
            pages,
            round,
        }
    }

    /// A batch of writes and one of reads, in pages of their own, that must bring back what was written.
    pub(crate) fn round(&mut self) {
        self.round += 1;
        let round = self.round;
        let byte = |n: usize| (round * 31 + n) as u8;
        let half = PAGES / 2;
        for n in 0..half {
            let page = self.pages[n];
            assert!(self.world.guest.write(page.gfn, 0, &[byte(n); 4096]));
            let write = self.front.rw(RwOp::Write, n as u64 * 8, &[page.whole()]);
            self.front.push(&write);
        }
        self.finish();
        for n in 0..half {
            let segments = [self.pages[half + n].part(2, 5)];
            let read = self.front.rw(RwOp::Read, n as u64 * 8 + 1, &segments);
            self.front.push(&read);
        }
        self.finish();
        for n in 0..half {
            let bytes = self.front.bytes(self.pages[half + n]);
            assert!(bytes[1024..3072] == [byte(n); 2048], "page {n}");
        }
    }

    fn finish(&mut self) {
        self.front.kick();
        assert!(self.front.settle().values().all(|status| *status == OKAY));
    }

    /// After the detach every page is the guest's again.
    fn end(self) {
        self.world.detach(self.front);
        for page in self.pages {
            self.world.guest.end_access(page.gref).unwrap();
        }
        assert_eq!(self.world.xen.snapshot().maps, 0);
    }
}

#[test]
fn known_pages_cost_no_copy_and_no_map() {
    let world = World::new();
    let mut keeper = Keeper::new(&world, &terms(1056));
    keeper.round();
    let known = keeper.front.stats();
    assert_eq!(known.mapped_grants, PAGES as u64, "{known:?}");
    assert_eq!(known.persistent_grants, PAGES as u64);
    assert!(known.maps <= 2 * 24, "{known:?}");
    for _ in 0..50 {
        keeper.round();
    }
    let stats = keeper.front.stats();
    assert_eq!((stats.copies, stats.fallbacks), (0, 0), "{stats:?}");
    assert_eq!(stats.maps, known.maps, "{stats:?}");
    assert_eq!(stats.persistent_hits, 51 * PAGES as u64);
    assert_eq!(world.mapped(), PAGES + 1, "and the ring");
    keeper.end();
}

#[test]
fn a_batch_is_mapped_in_one_chunk() {
    let world = World::new();
    let mut front = world.attach(&disk("memory:4M"), &terms(1056));
    let pages: Vec<Page> = (0..32).map(|_| front.page(false)).collect();
    for page in &pages {
        let read = front.rw(RwOp::Read, 0, &[page.whole()]);
        front.push(&read);
    }
    front.kick();
    assert!(front.settle().values().all(|status| *status == OKAY));
    let stats = front.stats();
    assert_eq!((stats.maps, stats.mapped_grants), (1, 32), "{stats:?}");
    world.detach(front);
    for page in pages {
        world.guest.end_access(page.gref).unwrap();
    }
}

#[test]
fn beyond_the_quota_pages_are_copied_and_let_go_with_the_response() {
    let world = World::new();
    let mut keeper = Keeper::new(&world, &terms(32));
    for _ in 0..20 {
        keeper.round();
        assert!(world.mapped() <= 32 + 1);
    }
    let stats = keeper.front.stats();
    assert_eq!((stats.errors, stats.map_failures), (0, 0), "{stats:?}");
    assert!(
        stats.fallbacks > 0 && stats.persistent_hits > 0,
        "{stats:?}"
    );
    // What a page's answer finds unmapped can be taken back at once, as Linux does.
    let free = |page: &Page| world.guest.end_access(page.gref).is_ok();
    let taken: Vec<bool> = keeper.pages.iter().map(free).collect();
    let mapped = taken.iter().filter(|taken| !**taken).count();
    assert_eq!(mapped, world.mapped() - 1);
    for (page, taken) in keeper.pages.iter_mut().zip(taken) {
        if taken {
            *page = keeper.front.page(false);
        }
    }
    keeper.round();
    keeper.end();
}

#[test]
fn unused_grants_go_without_a_request_and_without_an_event() {
    let world = World::new();
    let terms = Terms {
        persistent: Some(Persistent {
            idle_seconds: 1,
            ..PERSISTENT
        }),
        ..Terms::default()
    };
    let mut keeper = Keeper::new(&world, &terms);
    keeper.round();
    assert!(world.mapped() > 1);
    let began = Instant::now();
    while world.mapped() > 1 {
        assert!(began.elapsed() < LIMIT, "{:?}", keeper.front.stats());
        std::thread::sleep(Duration::from_millis(20));
    }
    let stats = keeper.front.stats();
    assert_eq!(stats.purged_grants, stats.mapped_grants, "{stats:?}");
    assert_eq!(stats.persistent_grants, 0);
    // The next ones are mapped anew.
    keeper.round();
    assert!(world.mapped() > 1);
    keeper.end();
}

/// Maps fail one after the other, or the hypervisor has no room for some of them.
#[test]
fn a_map_that_fails_is_no_error_of_the_guest() {
    for nth in 1..=4 {
        let world = World::new();
        // One page a map: many maps.
        let mut keeper = Keeper::new(&world, &terms(1056));
        world.xen.faults().fail_map(nth);
        for _ in 0..3 {
            keeper.round();
        }
        let stats = keeper.front.stats();
        assert_eq!(stats.errors, 0, "{stats:?}");
        world.xen.faults().fail_map(0);
        keeper.end();
    }
    let world = World::new();
    world.xen.faults().limit_maptrack(20);
    let mut keeper = Keeper::new(&world, &terms(1056));
    for _ in 0..3 {
        keeper.round();
    }
    let stats = keeper.front.stats();
    assert!(stats.map_failures > 0 && stats.fallbacks > 0, "{stats:?}");
    assert_eq!(stats.errors, 0, "{stats:?}");
    world.xen.faults().limit_maptrack(0);
    let began = Instant::now();
    while keeper.front.stats().persistent_grants < PAGES as u64 {
        assert!(began.elapsed() < LIMIT, "{:?}", keeper.front.stats());
        keeper.round();
    }
    keeper.end();
}

#[test]
fn a_bad_grant_fails_its_own_request_and_none_of_its_batch() {
    let world = World::new();
    let mut front = world.attach(&disk("memory:4M"), &terms(1056));
    let (good, gone, readonly) = (front.page(false), front.page(false), front.page(true));
    world.guest.revoke(gone.gref);
    let requests = [
        (front.rw(RwOp::Read, 0, &[good.whole()]), OKAY),
        (
            front.rw(RwOp::Read, 0, &[good.part(0, 3), gone.whole()]),
            ERROR,
        ),
        (front.rw(RwOp::Write, 0, &[gone.whole()]), ERROR),
        (front.rw(RwOp::Write, 0, &[readonly.whole(); 11]), OKAY),
        (front.rw(RwOp::Read, 0, &[readonly.whole()]), ERROR),
        (front.rw(RwOp::Read, 0, &[good.whole(); 11]), OKAY),
    ];
    for _ in 0..3 {
        let mut expected = Vec::new();
        for (request, status) in &requests {
            let mut request = *request;
            if let xenblk_ring::Request::Rw(rw) = &mut request {
                rw.id = front.id();
            }
            expected.push((front.push(&request), *status));
        }
        front.kick();
        let statuses = front.settle();
        for (id, status) in expected {
            assert_eq!(statuses[&id], status);
        }
    }
    world.detach(front);
    world.guest.end_access(good.gref).unwrap();
    world.guest.end_access(readonly.gref).unwrap();
}

#[test]
fn a_guest_that_takes_mapped_pages_away_harms_itself_alone() {
    let world = World::new();
    let neighbour = world.neighbour();
    let mut honest = world.attach_of(&neighbour, &disk("memory:4M"), &Terms::default());
    let mut front = world.attach(&disk("memory:4M"), &terms(1056));
    let page = front.page(false);
    for n in 0..40u8 {
        let read = front.rw(RwOp::Read, 0, &[page.whole()]);
        front.run(&read);
        // As far as it can: what is mapped stays mapped.
        world.guest.revoke(page.gref);
        assert_eq!(honest.write(u64::from(n) * 8, n), OKAY);
        assert_eq!(honest.read(u64::from(n) * 8).unwrap(), [n; 4096]);
    }
    world.detach(front);
    world.detach(honest);
    assert_eq!(world.xen.snapshot().maps, 0);
}

#[test]
fn indirect_pages_are_copied_once_however_their_grants_are_mapped() {
    let world = World::new();
    let mut front = world.attach(&disk("memory:4M"), &terms(1056));
    let pages: Vec<Page> = (0..64).map(|_| front.page(false)).collect();
    let list = front.page(false);
    for round in 0..6u8 {
        let segments: Vec<_> = pages.iter().map(|page| page.whole()).collect();
        let op = if round % 2 == 0 {
            RwOp::Write
        } else {
            RwOp::Read
        };
        for (n, page) in pages.iter().enumerate() {
            let byte = if op == RwOp::Write { n as u8 ^ 0x40 } else { 0 };
            assert!(world.guest.write(page.gfn, 0, &[byte; 4096]));
        }
        assert!(
            world
                .guest
                .write(list.gfn, 0, &xenblk_ring::encode_indirect_page(&segments))
        );
        let mut grefs = [0xdead_beef; 8];
        grefs[0] = list.gref.0;
        let request = xenblk_ring::IndirectRequest::new(front.id(), op, 0, 64, grefs).unwrap();
        assert_eq!(front.run(&xenblk_ring::Request::Indirect(request)), OKAY);
        for (n, page) in pages.iter().enumerate() {
            assert_eq!(front.bytes(*page), [n as u8 ^ 0x40; 4096], "{round}");
        }
        let stats = front.stats();
        assert_eq!(stats.mapped_grants, 64 + u64::from(round > 2), "{stats:?}");
        if round == 2 {
            // The list's page as data; from here on it is mapped.
            let read = front.rw(RwOp::Read, 4096, &[list.whole()]);
            assert_eq!(front.run(&read), OKAY);
        }
    }
    assert_eq!(front.stats().copied_segments, 3, "three lists, no data");
    world.detach(front);
    for page in pages.into_iter().chain([list]) {
        world.guest.end_access(page.gref).unwrap();
    }
}

#[test]
fn a_guest_that_changes_its_grants_all_the_time_is_copied_for() {
    const QUOTA: u32 = 64;
    let world = World::new();
    let neighbour = world.neighbour();
    let mut honest = world.attach_of(&neighbour, &disk("memory:4M"), &Terms::default());
    let mut front = world.attach(&disk("memory:4M"), &terms(QUOTA));
    let gfn = front.page(false).gfn;
    let began = Instant::now();
    let mut grefs = Vec::new();
    for round in 0..60u8 {
        for _ in 0..32 {
            let gref = world.guest.grant(gfn, DomId(0), false).unwrap();
            let segment = Page { gfn, gref }.whole();
            let read = front.rw(RwOp::Read, 0, &[segment; 11]);
            front.push(&read);
            grefs.push(gref);
        }
        front.kick();
        assert!(front.settle().values().all(|status| *status == OKAY));
        assert!(world.mapped() <= QUOTA as usize + 2);
        assert_eq!(honest.write(0, round), OKAY);
        assert_eq!(honest.read(0).unwrap(), [round; 4096]);
    }
    let stats = front.stats();
    // The quota, and what the purge has exchanged at its own pace: a chunk each time.
    let purges = began.elapsed().as_millis() as u64 / 100 + 1;
    let most = u64::from(QUOTA) + purges * 32;
    assert!(stats.mapped_grants <= most, "{stats:?}, at most {most}");
    assert!(stats.fallbacks > 0, "{stats:?}");
    world.detach(front);
    world.detach(honest);
    for gref in grefs {
        world.guest.end_access(gref).unwrap();
    }
}

#[test]
fn a_domain_that_dies_is_held_by_no_mapped_grant() {
    let world = World::new();
    let mut keeper = Keeper::new(&world, &terms(1056));
    keeper.round();
    world.xen.kill_domain(GUEST);
    assert_eq!(world.xen.snapshot().zombies, [GUEST]);
    world.command(Command::Detach {
        ring: keeper.front.id,
    });
    let report = world.report();
    assert!(
        matches!(report, Report::Detached { left, .. } if left.is_nothing()),
        "{report:?}"
    );
    assert!(world.xen.snapshot().zombies.is_empty());
}
