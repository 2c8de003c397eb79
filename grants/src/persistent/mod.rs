//! The grants one ring keeps mapped: its own tree, its own pool of pages, its own purging. A frontend
//! that agreed to `feature-persistent` presents the same pages again and again, and moving data through
//! a mapped page costs no hypercall.
//!
//! Everything here belongs to one ring and is used by one thread; no other ring can notice it. A use of
//! a mapped page is a borrow of this object, and purging it takes the object for itself, so nothing in
//! use can be purged: the compiler counts the users. Between two batches a grant may go; whoever comes
//! for it then copies.
//!
//! A guest's worst choice of references costs that guest: what can't be mapped is copied, a map that
//! failed is followed by a pause, and when the quota is used up grants are exchanged at a bounded rate,
//! by the purge. No failure to map is ever an error of a request.
//!
//! It leaves to others: what a request is, the copies of what isn't mapped, and calling [`purge`] when
//! the [`deadline`] has come.
//!
//! [`purge`]: PersistentGrants::purge
//! [`deadline`]: PersistentGrants::deadline

mod chunks;
mod tree;

use std::time::{Duration, Instant};

use crate::window::MAX_CHUNK;
use crate::{
    CopyOp, CopyStatus, Direction, DomId, GrantRef, GrantTable, MapError, Slab, Window,
    XEN_PAGE_SIZE,
};
use chunks::{Chunks, Held};
use tree::{Entry, MAX_PAGE, Tree};

/// Most chunks of a ring.
pub const MAX_CHUNKS: usize = 128;
/// Most grants a ring can keep, in chunks of the largest size.
pub const MAX_PERSISTENT_GRANTS: usize = MAX_CHUNKS * MAX_CHUNK;
/// Pages of a window beyond the quota, for merging chunks: their grants are mapped a second time before
/// the first mappings go.
pub const MERGE_ROOM: usize = MAX_CHUNK;
/// From so many chunks on, small ones are merged.
const MERGE_FROM: usize = MAX_CHUNKS / 2;
/// Time between two purges while grants have to make room for others, as in Linux's blkback.
const PURGE_PAUSE: Duration = Duration::from_millis(100);
/// Pause after a failed map, doubled with each that follows.
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const LONGEST_BACKOFF: Duration = Duration::from_secs(10);

/// What a ring may keep mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PersistentLimits {
    /// Grants, at most [`MAX_PERSISTENT_GRANTS`]; the ring's quota.
    pub max_grants: usize,
    /// Pages of address space, at least `max_grants` + [`MERGE_ROOM`] and less than 65534.
    pub window_pages: usize,
    /// Share of the mapped grants, in per cent, that goes when others need room.
    pub purge_percent: usize,
    /// How long a grant stays mapped without being used; `None`: for ever.
    pub idle: Option<Duration>,
}

/// What [`PersistentGrants::map_wanted`] or [`PersistentGrants::purge`] did, for the ring's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Chunks mapped: ioctl and mmap each.
    pub maps: usize,
    /// Grants in them.
    pub mapped: usize,
    /// Maps that failed.
    pub failures: usize,
    /// Chunks given back.
    pub purges: usize,
    /// Grants in them.
    pub purged: usize,
}

/// What was found left over when a ring's grants were given back; a bug of ours, or a host out of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{chunks} chunks of grants mapped, {entries} grants in the tree, {pages} pages of the window in use"
)]
pub struct Leftover {
    /// Chunks that could not be given back.
    pub chunks: usize,
    /// References the tree still knew.
    pub entries: usize,
    /// Pages that had not come back to the pool.
    pub pages: usize,
}

/// Why a grant was turned away since the last purge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shortage {
    /// The quota is used up, or the window has no run that is long enough.
    Grants,
    /// There are as many chunks as may be.
    Chunks,
}

/// See the module's head.
#[derive(Debug)]
pub struct PersistentGrants {
    dom: DomId,
    limits: PersistentLimits,
    /// Reserved with the first map.
    window: Option<Window>,
    tree: Tree,
    chunks: Chunks,
    /// To be mapped by this batch; `Wanted` in the tree.
    wanted: Vec<GrantRef>,
    shortage: Option<Shortage>,
    /// Nothing is mapped before this.
    paused_until: Option<Instant>,
    backoff: Duration,
    last_purge: Option<Instant>,
    deadline: Option<Instant>,
}

impl PersistentGrants {
    /// For the grants of `dom`. Costs nothing until a grant is wanted.
    pub fn new(dom: DomId, limits: PersistentLimits) -> Self {
        Self {
            dom,
            limits,
            window: None,
            tree: Tree::default(),
            chunks: Chunks::default(),
            wanted: Vec::new(),
            shortage: None,
            paused_until: None,
            backoff: FIRST_BACKOFF,
            last_purge: None,
            deadline: None,
        }
    }

    /// Grants mapped now.
    pub fn mapped(&self) -> usize {
        self.chunks.grants()
    }

    /// Notes that a request presents `gref`: one that isn't mapped yet will be by the next
    /// [`map_wanted`](Self::map_wanted), if there is room.
    pub fn want(&mut self, gref: GrantRef, now: Instant) {
        match self.tree.get(gref) {
            Entry::Page(page) => self.chunks.touch(page, now),
            Entry::Wanted => {}
            Entry::Unknown => {
                if Tree::takes(gref) && !self.is_paused(now) && self.has_room(now) {
                    self.tree.set(gref, Entry::Wanted);
                    self.wanted.push(gref);
                }
            }
        }
    }

    fn is_paused(&self, now: Instant) -> bool {
        self.paused_until.is_some_and(|until| now < until)
    }

    fn has_room(&mut self, now: Instant) -> bool {
        let wanted = self.wanted.len().saturating_add(1);
        let chunks = wanted.div_ceil(MAX_CHUNK);
        let shortage = if self.mapped().saturating_add(wanted) > self.limits.max_grants {
            Shortage::Grants
        } else if self.chunks.len().saturating_add(chunks) > MAX_CHUNKS {
            Shortage::Chunks
        } else {
            return true;
        };
        self.is_short(shortage, now);
        false
    }

    /// The purge has to make room, as soon as it may run again.
    fn is_short(&mut self, shortage: Shortage, now: Instant) {
        if self.shortage.is_none() && self.mapped() > 0 {
            self.shortage = Some(shortage);
            self.run_within(PURGE_PAUSE, now);
        }
    }

    /// Sets the deadline so that the purge runs a while after it last did.
    fn run_within(&mut self, pause: Duration, now: Instant) {
        let from = self.last_purge.unwrap_or(now);
        let at = from.checked_add(pause).unwrap_or(now).max(now);
        self.deadline = Some(self.deadline.map_or(at, |deadline| deadline.min(at)));
    }

    /// Maps what is wanted, in chunks, one ioctl and one mmap each. The first failure ends it: what is
    /// left is copied, and nothing is mapped for a while.
    pub fn map_wanted(&mut self, table: &dyn GrantTable, now: Instant) -> Work {
        let mut work = Work::default();
        if self.wanted.is_empty() {
            return work;
        }
        let wanted = std::mem::take(&mut self.wanted);
        let mut rest = wanted.as_slice();
        let mut size = MAX_CHUNK;
        while !rest.is_empty() && self.chunks.len() < MAX_CHUNKS {
            let (refs, after) = rest.split_at(rest.len().min(size));
            match self.map(table, refs, now) {
                Ok(()) => {
                    work.maps = work.maps.saturating_add(1);
                    work.mapped = work.mapped.saturating_add(refs.len());
                    rest = after;
                }
                Err(MapError::NoRoom) => {
                    // Room in pieces, at best.
                    size = refs.len().div_ceil(2);
                    if refs.len() == 1 {
                        self.is_short(Shortage::Grants, now);
                        break;
                    }
                }
                Err(_) => {
                    work.failures = 1;
                    self.pause(now);
                    break;
                }
            }
        }
        for &gref in rest {
            self.tree.set(gref, Entry::Unknown);
        }
        self.wanted = wanted;
        self.wanted.clear();
        if work.maps > 0 {
            if work.failures == 0 {
                self.paused_until = None;
                self.backoff = FIRST_BACKOFF;
            }
            if let Some(idle) = self.limits.idle
                && self.deadline.is_none()
            {
                self.deadline = now.checked_add(idle);
            }
            if self.chunks.len() >= MERGE_FROM {
                self.run_within(PURGE_PAUSE, now);
            }
        }
        work
    }

    fn pause(&mut self, now: Instant) {
        self.paused_until = now.checked_add(self.backoff);
        self.backoff = self.backoff.saturating_mul(2).min(LONGEST_BACKOFF);
    }

    /// Maps one chunk and enters it into the tree.
    fn map(
        &mut self,
        table: &dyn GrantTable,
        refs: &[GrantRef],
        now: Instant,
    ) -> Result<(), MapError> {
        let window = match &mut self.window {
            Some(window) => window,
            empty => empty.insert(Window::reserve(self.limits.window_pages.min(MAX_PAGE))?),
        };
        let chunk = table.map_chunk(window, self.dom, refs)?;
        for (&gref, page) in refs.iter().zip(chunk.start()..) {
            // Below `MAX_PAGE`: the window has no more pages.
            let page = u16::try_from(page).unwrap_or(0);
            self.tree.set(gref, Entry::Page(page));
        }
        self.chunks.insert(Held {
            chunk,
            refs: refs.into(),
            used: now,
        });
        Ok(())
    }

    /// Does `op` through its mapped page, if there is one: the bytes are copied, its status is okay.
    /// False: nothing happened, the page isn't mapped.
    pub fn transfer(&self, slab: &mut Slab, op: &mut CopyOp) -> bool {
        let Entry::Page(page) = self.tree.get(op.gref) else {
            return false;
        };
        let (offset, len) = (usize::from(op.offset), usize::from(op.len));
        let (Some(window), Some(held)) = (&self.window, self.chunks.at(page)) else {
            return false;
        };
        let Some(local) = slab.window(op.local, len) else {
            return false;
        };
        let inside = usize::from(page)
            .checked_sub(held.chunk.start())
            .and_then(|page| page.checked_mul(XEN_PAGE_SIZE)?.checked_add(offset));
        let Some(at) = inside.filter(|_| offset.saturating_add(len) <= XEN_PAGE_SIZE) else {
            return false;
        };
        let copied = match op.direction {
            Direction::FromGuest => window.copy_out(&held.chunk, at, local),
            Direction::ToGuest => window.copy_in(&held.chunk, at, local),
        };
        if copied {
            op.status = CopyStatus::OKAY;
        }
        copied
    }

    /// When [`purge`](Self::purge) has something to do; `None` while nothing is mapped.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Gives back what has not been used for too long and, where others need room, what was used the
    /// longest ago: whole chunks, at most the share agreed on but one at least. Merges small chunks.
    pub fn purge(&mut self, table: &dyn GrantTable, now: Instant) -> Work {
        let mut work = Work::default();
        let shortage = self.shortage.take();
        self.last_purge = Some(now);
        if let Some(idle) = self.limits.idle {
            while let Some(at) = self.chunks.least_recent()
                && self
                    .chunks
                    .used(at)
                    .is_some_and(|used| now.saturating_duration_since(used) >= idle)
                && self.give_back(table, at, &mut work)
            {}
        }
        let mut merged = false;
        if self.chunks.len() >= MERGE_FROM && !self.is_paused(now) {
            merged = self.merge(table, now, &mut work);
        }
        match shortage {
            Some(Shortage::Grants) => self.make_room(table, &mut work),
            Some(Shortage::Chunks) if !merged => self.make_room(table, &mut work),
            _ => {}
        }
        self.deadline = self.limits.idle.and_then(|idle| {
            let at = self.chunks.least_recent()?;
            self.chunks.used(at)?.checked_add(idle)
        });
        if merged && self.chunks.len() >= MERGE_FROM {
            self.run_within(PURGE_PAUSE, now);
        }
        work
    }

    fn make_room(&mut self, table: &dyn GrantTable, work: &mut Work) {
        if work.purges > 0 {
            // Something went already.
            return;
        }
        let share = self.mapped().saturating_mul(self.limits.purge_percent);
        let share = share.checked_div(100).unwrap_or(0);
        while let Some(at) = self.chunks.least_recent() {
            let grants = self.chunks.grants_of(at);
            let first = work.purges == 0;
            if !(first || work.purged.saturating_add(grants) <= share)
                || !self.give_back(table, at, work)
            {
                break;
            }
        }
    }

    /// Gives one chunk back; false if that was impossible, and it is still there.
    fn give_back(&mut self, table: &dyn GrantTable, at: usize, work: &mut Work) -> bool {
        let (Some(window), Some(held)) = (&mut self.window, self.chunks.remove(at)) else {
            return false;
        };
        // Out of the tree first: from here on nobody finds it.
        for (&gref, page) in held.refs.iter().zip(held.chunk.start()..) {
            if self.tree.get(gref) == Entry::Page(u16::try_from(page).unwrap_or(0)) {
                self.tree.set(gref, Entry::Unknown);
            }
        }
        match table.unmap_chunk(window, held.chunk) {
            Ok(()) => {
                work.purges = work.purges.saturating_add(1);
                work.purged = work.purged.saturating_add(held.refs.len());
                true
            }
            Err(still) => {
                for (&gref, page) in held.refs.iter().zip(still.chunk.start()..) {
                    if self.tree.get(gref) == Entry::Unknown {
                        self.tree
                            .set(gref, Entry::Page(u16::try_from(page).unwrap_or(0)));
                    }
                }
                self.chunks.insert(Held {
                    chunk: still.chunk,
                    ..held
                });
                false
            }
        }
    }

    /// Maps the grants of several small chunks together, then gives the small ones back: at no moment is
    /// one of them unmapped, or the guest could take it for its own and use it for something else. Says
    /// whether there are fewer chunks now.
    fn merge(&mut self, table: &dyn GrantTable, now: Instant, work: &mut Work) -> bool {
        let small = self.chunks.mergeable();
        if small.len() < 2 {
            return false;
        }
        let refs: Vec<GrantRef> = small
            .iter()
            .filter_map(|&at| self.chunks.get(at))
            .flat_map(|held| held.refs.iter().copied())
            .collect();
        let used = small.iter().filter_map(|&at| self.chunks.used(at)).max();
        match self.map(table, &refs, used.unwrap_or(now)) {
            Ok(()) => {
                work.maps = work.maps.saturating_add(1);
                work.mapped = work.mapped.saturating_add(refs.len());
            }
            Err(MapError::NoRoom) => return false,
            Err(_) => {
                work.failures = work.failures.saturating_add(1);
                self.pause(now);
                return false;
            }
        }
        let mut unmapped = Work::default();
        for at in small {
            self.give_back(table, at, &mut unmapped);
        }
        // Moved, not purged.
        work.mapped = work.mapped.saturating_sub(unmapped.purged);
        true
    }

    /// Gives everything back and proves it: every chunk, the tree empty, the window's pages all free.
    pub fn close(mut self, table: &dyn GrantTable) -> Result<(), Leftover> {
        let mut work = Work::default();
        for gref in std::mem::take(&mut self.wanted) {
            self.tree.set(gref, Entry::Unknown);
        }
        while let Some(at) = self.chunks.least_recent()
            && self.give_back(table, at, &mut work)
        {}
        let window = self.window.as_ref();
        let left = Leftover {
            chunks: self.chunks.len(),
            entries: self.tree.len(),
            pages: window.map_or(0, |window| {
                window.pages().saturating_sub(window.free_pages())
            }),
        };
        let clean = left.chunks == 0 && left.entries == 0 && left.pages == 0;
        if clean { Ok(()) } else { Err(left) }
    }
}
