//! A ring's intake: requests are copied into the journal once, decided about, and wait in order until
//! they are started. What of an indirect request lies in the guest's pages is copied once too, and
//! stands in the journal before anything is done with it.
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing
)]

use xenblk_ring::layout::PAGE_SIZE;
use xenblk_ring::{IndirectRequest, Request, RwOp, Status, Token, decode_indirect_page};

use super::share::Share;
use super::{Phase, RingService};
use crate::plan::{Decision, Plan, Transfer};
use crate::stats::Counter;
use crate::worker::engine::Engine;

/// Indirect requests whose segments one copy call fetches; each has room for [`FETCH_BYTES`].
const FETCH_SLOTS: usize = 32;
/// Descriptors of the longest indirect request: 256 of 8 bytes, always in its first page.
const FETCH_BYTES: usize = 2048;
/// Bytes of the buffer that is for all of them.
pub(in crate::worker) const FETCH_LEN: u32 = (FETCH_SLOTS * FETCH_BYTES) as u32;

/// A request taken in and not started.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) token: Token,
    pub(super) stage: Stage,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// Its segments are in the guest's page.
    Indirect(IndirectRequest),
    /// Its segments are in this slot of the fetch buffer: the journal has no table for them yet.
    Fetched(IndirectRequest, usize),
    /// It waits for its turn and for bounce memory.
    Planned(Plan),
}

/// What a turn took in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    pub(super) requests: u32,
    /// It stopped because it had its share, and there is more.
    pub(super) more: bool,
}

impl RingService {
    /// Takes requests in, as many as a turn's share allows.
    pub(super) fn consume(&mut self) -> Taken {
        let mut requests = 0u32;
        self.share.renew();
        while self.phase == Phase::Serving && self.share.is_left() {
            match self.own.back.consume() {
                Ok(Some(token)) => {
                    requests = requests.saturating_add(1);
                    let bytes = self.sort_in(token);
                    self.share.take(bytes);
                }
                Ok(None) => break,
                Err(corrupt) => self.corrupt(corrupt),
            }
        }
        if requests > 0 {
            self.count(Counter::Batches, 1);
        }
        let more = !self.share.is_left() && self.has_work();
        if !more {
            // Who has nothing to do owes nothing.
            self.share = Share::default();
        }
        Taken { requests, more }
    }

    /// Decides about a request; returns the bytes it will move.
    fn sort_in(&mut self, token: Token) -> u64 {
        let request = match self.own.back.request(&token) {
            Ok(request) => request,
            Err(error) => {
                let known = error.status() != Status::NotSupported;
                self.count(Counter::Unknown, usize::from(!known));
                self.finish(token, error.status());
                return 0;
            }
        };
        self.count(counter_of(&request), 1);
        match (Decision::new(&request, &self.own.rules), request) {
            (Some(decision), _) => self.decided(token, decision),
            (None, Request::Indirect(indirect)) => {
                self.count(Counter::Indirect, 1);
                self.unplanned += 1;
                let stage = Stage::Indirect(indirect);
                self.waiting.push_back(Waiting { token, stage });
                // Not known before its segments are; a page each is the most.
                u64::from(indirect.nr_segments()).saturating_mul(PAGE_SIZE as u64)
            }
            (None, _) => {
                self.finish(token, Status::Error);
                0
            }
        }
    }

    fn decided(&mut self, token: Token, decision: Decision) -> u64 {
        match decision {
            Decision::Do(plan) => {
                let stage = Stage::Planned(plan);
                self.waiting.push_back(Waiting { token, stage });
                u64::from(plan.transfer().map_or(0, Transfer::len))
            }
            Decision::Answer(status) => {
                self.finish(token, status);
                0
            }
        }
    }

    /// Copies the segments of waiting indirect requests out of the guest's pages, once, into the
    /// journal, and plans the requests. What finds no table in the journal keeps its segments in the
    /// fetch buffer, and nothing else is fetched until it has one.
    pub(super) fn fetch(&mut self, engine: &mut Engine) {
        // The copies' outcome is to be had now only: the next copies of this ring overwrite it.
        let fresh = self.can_fetch();
        if fresh {
            self.copy_descriptors(engine);
        }
        let mut queue = std::mem::take(&mut self.waiting);
        for _ in 0..queue.len() {
            let Some(Waiting { token, stage }) = queue.pop_front() else {
                break;
            };
            let decision = match &stage {
                Stage::Fetched(_, slot) if fresh && !self.copies.copied(*slot) => {
                    Some(Decision::Answer(Status::Error))
                }
                Stage::Fetched(indirect, slot) => {
                    self.keep_segments(engine, &token, indirect, *slot)
                }
                Stage::Indirect(_) | Stage::Planned(_) => None,
            };
            match decision {
                None => queue.push_back(Waiting { token, stage }),
                Some(decision) => {
                    self.unplanned = self.unplanned.saturating_sub(1);
                    match decision {
                        Decision::Do(plan) => {
                            let stage = Stage::Planned(plan);
                            queue.push_back(Waiting { token, stage });
                        }
                        Decision::Answer(status) => self.finish(token, status),
                    }
                }
            }
        }
        self.waiting = queue;
    }

    /// There is something to fetch, and nothing in the fetch buffer.
    pub(super) fn can_fetch(&self) -> bool {
        let fetched = |waiting: &Waiting| matches!(waiting.stage, Stage::Fetched(..));
        self.unplanned > 0 && !self.waiting.iter().any(fetched)
    }

    /// One copy call for the first [`FETCH_SLOTS`] unfetched requests.
    fn copy_descriptors(&mut self, engine: &mut Engine) {
        let base = self.own.fetch.offset();
        self.copies.clear();
        for waiting in &mut self.waiting {
            let slot = self.copies.requests();
            if slot == FETCH_SLOTS {
                break;
            }
            if let Stage::Indirect(indirect) = &waiting.stage {
                let bytes = usize::from(indirect.nr_segments())
                    .saturating_mul(8)
                    .min(FETCH_BYTES);
                let gref = indirect.grefs().first().copied().unwrap_or(0);
                let local = base.saturating_add(slot.saturating_mul(FETCH_BYTES));
                self.copies
                    .list_page(gref, u16::try_from(bytes).unwrap_or(0), local);
                waiting.stage = Stage::Fetched(*indirect, slot);
            }
        }
        self.copy(engine, self.own.fetch.slab());
    }

    /// `None` while the journal has no room for the segments.
    fn keep_segments(
        &mut self,
        engine: &Engine,
        token: &Token,
        indirect: &IndirectRequest,
        slot: usize,
    ) -> Option<Decision> {
        const REFUSED: Option<Decision> = Some(Decision::Answer(Status::Error));
        let bytes = engine.bytes(&self.own.fetch);
        let start = slot.saturating_mul(FETCH_BYTES);
        let page = bytes
            .get(start..start.saturating_add(FETCH_BYTES))
            .unwrap_or_default();
        let count = usize::from(indirect.nr_segments());
        let Ok(segments) = decode_indirect_page(page, count) else {
            return REFUSED;
        };
        self.own.back.store_segments(token, segments).ok()?;
        let segments = self.own.back.segments(token);
        Some(Decision::transfer(
            indirect.op,
            indirect.sector,
            segments,
            &self.own.rules,
        ))
    }
}

fn counter_of(request: &Request) -> Counter {
    match request {
        Request::Rw(rw) if rw.op == RwOp::Read => Counter::Reads,
        Request::Indirect(indirect) if indirect.op == RwOp::Read => Counter::Reads,
        Request::Rw(_) | Request::Indirect(_) => Counter::Writes,
        Request::Flush(_) => Counter::Flushes,
        Request::Barrier(_) => Counter::Barriers,
        Request::Discard(_) => Counter::Discards,
    }
}
