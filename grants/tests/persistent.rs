//! The grants a ring keeps mapped: whatever is presented, purged, refused or revoked in whatever order,
//! the data is the guest's, the quota holds, and at the end nothing is mapped.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use xenblk_grants::fake::{FakeDomain, FakeXen, Gfn, grant_table};
use xenblk_grants::persistent::{
    Leftover, MAX_CHUNKS, MAX_PERSISTENT_GRANTS, MERGE_ROOM, PersistentGrants, PersistentLimits,
    Work,
};
use xenblk_grants::{
    CopyOp, CopyStatus, Direction, DomId, GrantRef, GrantTable, Run, Slab, XEN_PAGE_SIZE,
};

const GUEST: DomId = DomId(7);
const IDLE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(100);

fn limits(max_grants: usize) -> PersistentLimits {
    PersistentLimits {
        max_grants,
        window_pages: (max_grants + MERGE_ROOM).next_power_of_two(),
        purge_percent: 5,
        idle: Some(IDLE),
    }
}

/// A guest with granted pages, and a ring's grants and bounce page on the other side.
struct Ring {
    // Closed before the hypervisor goes.
    table: Box<dyn GrantTable>,
    xen: FakeXen,
    guest: FakeDomain,
    pages: Vec<(Gfn, GrantRef)>,
    grants: PersistentGrants,
    slab: Slab,
    run: Run,
    now: Instant,
}

impl Ring {
    fn new(pages: usize, limits: PersistentLimits) -> Self {
        let xen = FakeXen::start().unwrap();
        let guest = xen.domain(GUEST, pages + 8).unwrap();
        let grant = |_| {
            let page = guest.alloc_page().unwrap();
            (page, guest.grant(page, DomId(0), false).unwrap())
        };
        let pages = (0..pages).map(grant).collect();
        let table = grant_table(xen.host().unwrap().open_gntdev().unwrap()).unwrap();
        let mut slab = Slab::reserve(XEN_PAGE_SIZE).unwrap();
        let run = slab.alloc(1).unwrap();
        Self {
            table,
            xen,
            guest,
            pages,
            grants: PersistentGrants::new(GUEST, limits),
            slab,
            run,
            now: Instant::now(),
        }
    }

    fn gref(&self, page: usize) -> GrantRef {
        self.pages[page].1
    }

    /// A batch that presents these pages.
    fn present(&mut self, pages: impl IntoIterator<Item = usize>) -> Work {
        for page in pages {
            self.grants.want(self.gref(page), self.now);
        }
        self.grants.map_wanted(&*self.table, self.now)
    }

    /// Moves 512 bytes from the guest's page and back to another place of it; whether through a mapping.
    fn moves(&mut self, page: usize, byte: u8) -> bool {
        let (gfn, gref) = self.pages[page];
        assert!(self.guest.write(gfn, 1024, &[byte; 512]));
        let mut out = CopyOp::new(gref, 1024, 512, self.run.offset(), Direction::FromGuest);
        let mapped = self.moved(&mut out);
        assert_eq!(out.status, CopyStatus::OKAY);
        assert!(self.slab.bytes(&self.run)[..512] == [byte; 512]);
        self.slab.bytes_mut(&mut self.run)[..512].fill(!byte);
        let mut back = CopyOp::new(gref, 2048, 512, self.run.offset(), Direction::ToGuest);
        assert_eq!(self.moved(&mut back), mapped);
        assert_eq!(back.status, CopyStatus::OKAY);
        let mut page = [0; XEN_PAGE_SIZE];
        assert!(self.guest.read(gfn, 0, &mut page));
        assert!(page[1024..1536] == [byte; 512] && page[2048..2560] == [!byte; 512]);
        mapped
    }

    fn moved(&mut self, op: &mut CopyOp) -> bool {
        let mapped = self.grants.transfer(&mut self.slab, op);
        if !mapped {
            self.table
                .copy(GUEST, &mut self.slab, std::slice::from_mut(op))
                .unwrap();
        }
        mapped
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
    }

    fn purge(&mut self) -> Work {
        self.grants.purge(&*self.table, self.now)
    }

    /// Pages mapped as the hypervisor counts them.
    fn mapped(&self) -> usize {
        self.xen.snapshot().mappings.values().sum()
    }

    /// Closes, and the guest gets everything back.
    fn end(self) {
        self.end_with(|closed| closed.unwrap());
    }

    /// As [`Self::end`], when maps have failed: a thread of another test may have mapped something into the
    /// hole before it was reserved again, and then the window is that much smaller.
    fn end_after_failures(self) {
        self.end_with(|closed| {
            let lost = closed.map_or_else(|left| (left.chunks, left.entries), |()| (0, 0));
            assert_eq!(lost, (0, 0));
        });
    }

    fn end_with(self, check: impl Fn(Result<(), Leftover>)) {
        check(self.grants.close(&*self.table));
        let snapshot = self.xen.snapshot();
        assert_eq!((snapshot.mappings.len(), snapshot.maps), (0, 0));
        for (_, gref) in self.pages {
            self.guest.end_access(gref).unwrap();
        }
    }
}

#[test]
fn unknown_grants_of_a_batch_are_mapped_together_and_stay() {
    let mut ring = Ring::new(100, limits(1056));
    assert_eq!(ring.grants.deadline(), None, "no grants, no timer");
    let work = ring.present((0..70).chain(0..70));
    assert_eq!((work.maps, work.mapped), (3, 70));
    assert_eq!((ring.grants.mapped(), ring.mapped()), (70, 70));
    for round in 0..3 {
        assert_eq!(ring.present(0..70), Work::default());
        assert!((0..70).all(|page| ring.moves(page, page as u8 ^ round)));
    }
    assert!(!ring.moves(70, 9), "never presented, so not mapped");
    assert_eq!(ring.xen.snapshot().maps, 3);
    ring.end();
}

#[test]
fn one_grant_many_times_is_mapped_once() {
    let mut ring = Ring::new(1, limits(32));
    assert_eq!(ring.present([0; 32]).mapped, 1);
    assert!((0..32).all(|n| ring.moves(0, n)));
    ring.end();
}

#[test]
fn what_is_beyond_the_quota_is_copied_until_a_purge_makes_room() {
    let mut ring = Ring::new(200, limits(128));
    let work = ring.present(0..200);
    assert_eq!((work.maps, work.mapped), (4, 128));
    for page in 0..200 {
        assert_eq!(ring.moves(page, 3), page < 128);
    }
    // The second chunk is the one used the longest ago.
    ring.pass(PAUSE);
    ring.present((0..32).chain(64..128).chain(150..160));
    assert_eq!(ring.mapped(), 128, "a batch purges nothing");
    let due = ring.grants.deadline().unwrap();
    assert!(due <= ring.now + PAUSE);
    ring.now = due;
    let work = ring.purge();
    assert_eq!(
        (work.purges, work.purged),
        (1, 32),
        "five per cent, but a whole chunk"
    );
    assert!(!ring.moves(40, 1) && ring.moves(0, 1) && ring.moves(70, 1));
    assert_eq!(ring.present(150..200).mapped, 32);
    // Exchange goes on at the purge's rate, whatever the guest presents.
    ring.present(32..64);
    assert_eq!(ring.grants.deadline(), Some(ring.now + PAUSE));
    ring.end();
}

#[test]
fn a_purge_takes_its_share_and_no_more() {
    let mut ring = Ring::new(1100, limits(1056));
    for first in (0..1056).step_by(8) {
        ring.present(first..first + 8);
        ring.pass(Duration::from_millis(1));
        if let Some(due) = ring.grants.deadline()
            && due <= ring.now
        {
            ring.purge();
        }
    }
    while ring.grants.mapped() < 1056 {
        ring.pass(PAUSE);
        ring.present(0..1056);
        ring.purge();
    }
    ring.present(1056..1060);
    ring.pass(PAUSE);
    let work = ring.purge();
    assert!(work.purged <= 1056 / 20 && work.purged > 20, "{work:?}");
    ring.end();
}

#[test]
fn what_is_not_used_for_a_minute_goes_and_the_timer_with_it() {
    let mut ring = Ring::new(64, limits(64));
    ring.present(0..32);
    ring.pass(Duration::from_secs(30));
    ring.present(32..64);
    assert_eq!(ring.grants.deadline(), Some(ring.now + IDLE / 2));
    ring.pass(Duration::from_secs(30));
    let work = ring.purge();
    assert_eq!((work.purges, work.purged), (1, 32));
    assert_eq!(ring.mapped(), 32);
    assert!(!ring.moves(0, 1) && ring.moves(40, 1));
    assert_eq!(ring.grants.deadline(), Some(ring.now + IDLE / 2));
    ring.pass(IDLE / 2);
    assert_eq!(ring.purge().purged, 32);
    assert_eq!((ring.mapped(), ring.grants.deadline()), (0, None));
    let forever = PersistentLimits {
        idle: None,
        ..limits(64)
    };
    let mut ring = Ring::new(8, forever);
    ring.present(0..8);
    assert_eq!(ring.grants.deadline(), None);
    ring.pass(IDLE * 100);
    assert_eq!(ring.purge(), Work::default());
    ring.end();
}

#[test]
fn small_chunks_are_merged_and_their_pages_never_unmapped() {
    let mut ring = Ring::new(400, limits(400));
    for page in 0..200 {
        ring.present([page]);
    }
    assert_eq!(
        ring.xen.snapshot().maps,
        MAX_CHUNKS,
        "one each, up to the limit"
    );
    assert!(!ring.moves(150, 1));
    for _ in 0..40 {
        ring.pass(PAUSE);
        let before: Vec<usize> = (0..400).filter(|&page| ring.moves(page, 4)).collect();
        let work = ring.purge();
        assert_eq!(
            (work.purged, work.mapped),
            (0, 0),
            "moved, not purged: {work:?}"
        );
        assert!(before.into_iter().all(|page| ring.moves(page, 5)));
        ring.present(0..400);
    }
    assert_eq!(ring.grants.mapped(), 400);
    assert!(ring.xen.snapshot().maps < MAX_CHUNKS / 2 + 1);
    ring.end();
}

#[test]
fn a_failed_map_is_copied_and_tried_again_later_and_later() {
    let mut ring = Ring::new(64, limits(64));
    let bad = ring.gref(5);
    ring.guest.revoke(bad);
    let work = ring.present(0..40);
    assert_eq!((work.maps, work.failures, work.mapped), (0, 1, 0));
    assert_eq!((ring.mapped(), ring.xen.snapshot().maps), (0, 0));
    let mut op = CopyOp::new(bad, 0, 512, 0, Direction::FromGuest);
    assert!(
        !ring.moved(&mut op) && !op.status.is_okay(),
        "the guest's own fault"
    );
    assert!(!ring.moves(4, 1) && !ring.moves(6, 1), "copied");
    assert_eq!(ring.present(6..64), Work::default(), "not at once");
    for pause in [1, 2, 4, 8, 16, 32, 64, 100, 100] {
        ring.pass(PAUSE * pause - Duration::from_millis(1));
        assert_eq!(ring.present(0..64), Work::default());
        ring.pass(Duration::from_millis(1));
        assert_eq!(ring.present(0..64).failures, 1);
    }
    ring.pass(PAUSE * 100);
    assert_eq!(ring.present((0..5).chain(6..64)).mapped, 63);
    ring.end_after_failures();
}

#[test]
fn no_grant_that_a_table_cannot_hold_is_mapped_or_asked_for() {
    let mut ring = Ring::new(1, limits(64));
    for gref in [1 << 20, u32::MAX] {
        ring.grants.want(GrantRef(gref), ring.now);
        let mut op = CopyOp::new(GrantRef(gref), 0, 8, 0, Direction::FromGuest);
        assert!(!ring.grants.transfer(&mut ring.slab, &mut op));
    }
    assert_eq!(
        ring.grants.map_wanted(&*ring.table, ring.now),
        Work::default()
    );
    ring.end();
}

#[test]
fn an_exhausted_maptrack_degrades_to_copies_and_recovers() {
    let mut ring = Ring::new(96, limits(96));
    ring.xen.faults().limit_maptrack(50);
    let work = ring.present(0..96);
    assert_eq!((work.maps, work.mapped, work.failures), (1, 32, 1));
    assert!((0..96).all(|page| ring.moves(page, 1) == (page < 32)));
    ring.xen.faults().limit_maptrack(0);
    ring.pass(PAUSE);
    assert_eq!(ring.present(0..96).mapped, 64);
    assert!((0..96).all(|page| ring.moves(page, 2)));
    ring.end();
}

#[test]
fn a_segment_that_leaves_its_page_or_the_slab_is_not_moved() {
    let mut ring = Ring::new(2, limits(32));
    ring.present(0..2);
    let gref = ring.gref(0);
    for (offset, len, local) in [(4095, 2, 0), (4096, 1, 0), (0, 4096, 1), (0, 1, usize::MAX)] {
        for direction in [Direction::FromGuest, Direction::ToGuest] {
            let mut op = CopyOp::new(gref, offset, len, local, direction);
            assert!(!ring.grants.transfer(&mut ring.slab, &mut op));
            assert!(!op.status.is_okay());
        }
    }
    ring.end();
}

/// The `k`th map of `n` fails, for all of them: the data is right all the same, and nothing is lost.
#[test]
fn every_map_may_fail() {
    for n in 1..=64 {
        let mut ring = Ring::new(n, limits(MAX_PERSISTENT_GRANTS));
        for k in 1..=n {
            // The first k - 1 are mapped already.
            ring.xen.faults().fail_map(1);
            let mut failures = 0;
            for page in 0..n {
                failures += ring.present([page]).failures;
                let mapped = ring.moves(page, page as u8);
                assert_eq!(mapped, page + 1 < k, "map {k} of {n}, page {page}");
            }
            assert_eq!(failures, 1);
            assert_eq!((ring.mapped(), ring.grants.mapped()), (k - 1, k - 1));
            assert_eq!(ring.xen.snapshot().maps, k - 1, "none was left behind");
            ring.pass(PAUSE);
            assert_eq!(ring.present([k - 1]).mapped, 1);
        }
        ring.end();
    }
}

#[derive(Clone, Debug)]
enum Step {
    Present(Vec<usize>),
    Move(usize),
    Pass(u64),
    Purge,
    FailMap(u64),
    Maptrack(u64),
    /// The guest grants the page anew, if nobody has it mapped.
    Regrant(usize),
}

const PAGES: usize = 120;

fn step() -> impl Strategy<Value = Step> {
    let page = 0..PAGES;
    prop_oneof![
        6 => prop::collection::vec(page.clone(), 1..60).prop_map(Step::Present),
        6 => (0..PAGES - 20, 1..20usize).prop_map(|(at, n)| Step::Present((at..at + n).collect())),
        6 => page.clone().prop_map(Step::Move),
        4 => (1..40_000u64).prop_map(Step::Pass),
        4 => Just(Step::Purge),
        1 => (1..4u64).prop_map(Step::FailMap),
        1 => prop_oneof![Just(0), 20..100u64].prop_map(Step::Maptrack),
        4 => page.prop_map(Step::Regrant),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_order_of_events_breaks_the_rules(
        max in 1..100usize, steps in prop::collection::vec(step(), 1..120)
    ) {
        let mut ring = Ring::new(PAGES, limits(max));
        // Pages that may be mapped: presented since they were last granted.
        let mut presented = BTreeSet::new();
        for step in steps {
            match step {
                Step::Present(pages) => {
                    let before = ring.grants.mapped();
                    presented.extend(pages.iter().copied());
                    let work = ring.present(pages);
                    prop_assert_eq!(ring.grants.mapped(), before + work.mapped);
                }
                Step::Move(page) => {
                    let mapped = ring.moves(page, page as u8);
                    prop_assert!(!mapped || presented.contains(&page));
                }
                Step::Pass(ms) => ring.pass(Duration::from_millis(ms)),
                Step::Purge => {
                    let before = ring.grants.mapped();
                    let work = ring.purge();
                    prop_assert_eq!(ring.grants.mapped() + work.purged, before + work.mapped);
                    if let Some(due) = ring.grants.deadline() {
                        prop_assert!(due > ring.now, "a purge that leaves itself to be done");
                    }
                }
                Step::FailMap(nth) => ring.xen.faults().fail_map(nth),
                Step::Maptrack(pages) => ring.xen.faults().limit_maptrack(pages),
                Step::Regrant(page) => {
                    let (gfn, gref) = ring.pages[page];
                    if ring.guest.end_access(gref).is_ok() {
                        ring.pages[page].1 = ring.guest.grant(gfn, DomId(0), false).unwrap();
                        presented.remove(&page);
                    }
                }
            }
            prop_assert!(ring.grants.mapped() <= max);
            let snapshot = ring.xen.snapshot();
            prop_assert_eq!(snapshot.mappings.values().sum::<usize>(), ring.grants.mapped());
            prop_assert!(snapshot.maps <= MAX_CHUNKS);
            prop_assert_eq!(ring.grants.deadline().is_some(), ring.grants.mapped() > 0);
        }
        ring.xen.faults().fail_map(0);
        ring.end_after_failures();
    }
}
