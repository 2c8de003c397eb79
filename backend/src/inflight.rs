//! The requests of one ring that have been started, found by their token's slot, and the order they
//! impose on those not yet started. At most as many as the ring has entries; nothing is allocated
//! after the ring was attached.

use xenblk_ring::Token;

use crate::plan::Plan;
use crate::worker::engine::Buffer;

/// A started request.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) token: Token,
    pub(crate) plan: Plan,
    /// Which of the plan's steps is being done.
    pub(crate) step: u8,
    /// Its bounce memory, while the target hasn't got it.
    pub(crate) buffer: Option<Buffer>,
}

/// See the module's head.
#[derive(Debug)]
pub(crate) struct InFlight {
    started: Vec<Option<Started>>,
    count: usize,
    discards: usize,
    barrier: bool,
}

impl InFlight {
    pub(crate) fn new(entries: u32) -> Self {
        let started = (0..entries).map(|_| None).collect();
        Self {
            started,
            count: 0,
            discards: 0,
            barrier: false,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether `plan` has to wait for something started before it:
    /// * a barrier waits for everything, and everything for a barrier;
    /// * a discard and what overlaps it wait for each other. Hole punching runs beside other I/O, so
    ///   a later write that overtook it would be destroyed; a discard is never reordered with a
    ///   request of its ring. (Other rings are not ordered, as on any multi-queue disk.)
    ///
    /// Overlapping reads and writes are the guest's to order, as on any disk.
    pub(crate) fn holds(&self, plan: &Plan) -> bool {
        let discard = matches!(plan, Plan::Discard(..));
        if self.barrier || (matches!(plan, Plan::Barrier(_)) && self.count > 0) {
            return true;
        }
        let Some(range) = plan.range() else {
            return false;
        };
        if !discard && self.discards == 0 {
            return false;
        }
        self.started.iter().flatten().any(|other| {
            (discard || matches!(other.plan, Plan::Discard(..)))
                && other
                    .plan
                    .range()
                    .is_some_and(|other| other.overlaps(range))
        })
    }

    pub(crate) fn insert(&mut self, request: Started) {
        let slot = request.token.slot();
        self.note(&request.plan, true);
        if let Some(place) = self.started.get_mut(slot) {
            debug_assert!(place.is_none(), "a token's slot is its own");
            *place = Some(request);
        }
    }

    pub(crate) fn get_mut(&mut self, slot: usize) -> Option<&mut Started> {
        self.started.get_mut(slot)?.as_mut()
    }

    pub(crate) fn remove(&mut self, slot: usize) -> Option<Started> {
        let request = self.started.get_mut(slot)?.take()?;
        self.note(&request.plan, false);
        Some(request)
    }

    fn note(&mut self, plan: &Plan, starts: bool) {
        let change = |count: usize| {
            if starts {
                count + 1
            } else {
                count.saturating_sub(1)
            }
        };
        self.count = change(self.count);
        match plan {
            Plan::Barrier(_) => self.barrier = starts,
            Plan::Discard(..) => self.discards = change(self.discards),
            _ => {}
        }
    }
}
