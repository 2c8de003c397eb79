//! A ring's data on its way between the guest's pages and the ring's memory. In a PV dom0 the kernel
//! never gets an address of a guest's page for I/O, so every segment is copied, and what decides is how:
//! through a page that is mapped already, or by grant copy. A frontend that keeps its grants
//! (`feature-persistent`) gets those of a batch that aren't mapped yet mapped before its requests are
//! answered, as far as the ring's quota goes.
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing
)]

use std::time::Instant;

use xenblk_grants::persistent::{PersistentGrants, Work};
use xenblk_grants::{Direction, GrantRef};
use xenblk_ring::{DirectSegments, Request, Token};

use super::{Phase, RingService};
use crate::stats::Counter;
use crate::worker::engine::{Engine, SlabKey};

impl RingService {
    /// Moves what is listed; one grant copy for all that isn't mapped.
    pub(super) fn copy(&mut self, engine: &mut Engine, slab: SlabKey) {
        if self.copies.segments() == 0 {
            return;
        }
        let Some(slab) = engine.slab(slab) else {
            return;
        };
        let persistent = self.own.persistent.as_ref();
        let moved = self
            .copies
            .run(&*self.own.grants, persistent, self.own.dom, slab);
        let keeps = persistent.is_some();
        self.count(Counter::PersistentHits, moved.mapped);
        self.count(Counter::Copies, usize::from(moved.copied > 0));
        self.count(Counter::CopiedSegments, moved.copied);
        self.count(Counter::Fallbacks, if keeps { moved.copied } else { 0 });
    }

    /// Lists the copies between the segments of one request and its buffer, which starts at `local`.
    pub(super) fn list_copies(&mut self, token: &Token, local: usize, direction: Direction) {
        match self.direct_segments(token) {
            Some(direct) => {
                let segments = direct.as_slice().iter().copied();
                self.copies.list(segments, local, direction);
            }
            None => self
                .copies
                .list(self.own.back.segments(token), local, direction),
        }
    }

    /// Notes the grants a request presents, to be mapped with the others of its batch. A ring that ends
    /// maps nothing more.
    pub(super) fn want_grants(&mut self, token: &Token, now: Instant) {
        if self.phase != Phase::Serving || self.own.persistent.is_none() {
            return;
        }
        let direct = self.direct_segments(token);
        let Some(persistent) = &mut self.own.persistent else {
            return;
        };
        match direct {
            Some(direct) => {
                for segment in direct.as_slice() {
                    persistent.want(GrantRef(segment.gref()), now);
                }
            }
            None => {
                for segment in self.own.back.segments(token) {
                    persistent.want(GrantRef(segment.gref()), now);
                }
            }
        }
    }

    /// Maps what [`want_grants`](Self::want_grants) noted.
    pub(super) fn map_grants(&mut self, now: Instant) {
        if let Some(persistent) = &mut self.own.persistent {
            let work = persistent.map_wanted(&*self.own.grants, now);
            self.account(work);
        }
    }

    /// Gives back grants whose time has come. After the answers, which don't wait for it.
    pub(super) fn purge_due(&mut self, now: Instant) {
        if let Some(persistent) = &mut self.own.persistent
            && persistent.deadline().is_some_and(|due| due <= now)
        {
            let work = persistent.purge(&*self.own.grants, now);
            self.account(work);
        }
    }

    fn account(&self, work: Work) {
        if work == Work::default() {
            return;
        }
        self.count(Counter::Maps, work.maps);
        self.count(Counter::MappedGrants, work.mapped);
        self.count(Counter::MapFailures, work.failures);
        self.count(Counter::Purges, work.purges);
        self.count(Counter::PurgedGrants, work.purged);
        let mapped = self
            .own
            .persistent
            .as_ref()
            .map_or(0, PersistentGrants::mapped);
        self.own.stats.set(Counter::PersistentGrants, mapped as u64);
    }

    /// The segments that stand in a request's slot; `None`: they came in an indirect page.
    fn direct_segments(&self, token: &Token) -> Option<DirectSegments> {
        match self.own.back.request(token) {
            Ok(Request::Rw(rw)) => Some(rw.segments),
            Ok(Request::Flush(flush)) => flush.data.map(|data| data.segments),
            Ok(Request::Barrier(barrier)) => barrier.data.map(|data| data.segments),
            Ok(Request::Indirect(_) | Request::Discard(_)) | Err(_) => None,
        }
    }
}
