//! The copies of one turn in one direction: listed request by request, run together, by grant copy in one
//! call where the page isn't mapped, and then asked request by request. Which requests these are is the caller's business.
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing
)]

use xenblk_grants::persistent::PersistentGrants;
use xenblk_grants::{CopyOp, Direction, DomId, GrantRef, GrantTable, Slab};
use xenblk_ring::Segment;

/// Kept from turn to turn for its memory.
#[derive(Debug, Default)]
pub(super) struct Copies {
    ops: Vec<CopyOp>,
    /// For each request where its operations end.
    ends: Vec<usize>,
    /// `ops` has been run, and their statuses mean something.
    valid: bool,
    /// Those of `ops` whose page isn't mapped, while some are, and where they stand there.
    unmapped: Vec<CopyOp>,
    places: Vec<usize>,
}

/// How many segments went which way.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moved {
    pub(super) mapped: usize,
    pub(super) copied: usize,
}

impl Copies {
    pub(super) fn clear(&mut self) {
        self.ops.clear();
        self.ends.clear();
        self.valid = false;
    }

    /// Requests listed.
    pub(super) fn requests(&self) -> usize {
        self.ends.len()
    }

    /// Segments listed.
    pub(super) fn segments(&self) -> usize {
        self.ops.len()
    }

    /// Lists the segments of one request, whose bytes in the slab start at `local`.
    pub(super) fn list(
        &mut self,
        segments: impl Iterator<Item = Segment>,
        mut local: usize,
        direction: Direction,
    ) {
        for segment in segments {
            // Both fit: a segment lies within one page.
            let part = |n: usize| u16::try_from(n).unwrap_or(0);
            let gref = GrantRef(segment.gref());
            let (offset, len) = (part(segment.offset()), part(segment.len()));
            self.ops
                .push(CopyOp::new(gref, offset, len, local, direction));
            local = local.saturating_add(segment.len());
        }
        self.ends.push(self.ops.len());
    }

    /// Lists the first `bytes` of one granted page as a request.
    pub(super) fn list_page(&mut self, gref: u32, bytes: u16, local: usize) {
        let op = CopyOp::new(GrantRef(gref), 0, bytes, local, Direction::FromGuest);
        self.ops.push(op);
        self.ends.push(self.ops.len());
    }

    /// Copies through the pages that are mapped, and in one grant copy everything else. If that fails
    /// nothing of it has been copied that may be believed, and its statuses are not looked at.
    pub(super) fn run(
        &mut self,
        grants: &dyn GrantTable,
        persistent: Option<&PersistentGrants>,
        dom: DomId,
        slab: &mut Slab,
    ) -> Moved {
        let Some(persistent) = persistent.filter(|persistent| persistent.mapped() > 0) else {
            self.valid = grants.copy(dom, slab, &mut self.ops).is_ok();
            let (mapped, copied) = (0, self.ops.len());
            return Moved { mapped, copied };
        };
        self.unmapped.clear();
        self.places.clear();
        for (place, op) in self.ops.iter_mut().enumerate() {
            if !persistent.transfer(slab, op) {
                self.unmapped.push(op.clone());
                self.places.push(place);
            }
        }
        if !self.unmapped.is_empty() && grants.copy(dom, slab, &mut self.unmapped).is_ok() {
            for (&place, copied) in self.places.iter().zip(&self.unmapped) {
                if let Some(op) = self.ops.get_mut(place) {
                    op.status = copied.status;
                }
            }
        }
        // What the grant copy would have done is "not copied" from the start.
        self.valid = true;
        let copied = self.unmapped.len();
        let mapped = self.ops.len().saturating_sub(copied);
        Moved { mapped, copied }
    }

    /// Whether every segment of the `n`th listed request has been copied.
    pub(super) fn copied(&self, n: usize) -> bool {
        let start = n
            .checked_sub(1)
            .map_or(Some(0), |before| self.ends.get(before).copied());
        let ops = start
            .zip(self.ends.get(n))
            .and_then(|(start, &end)| self.ops.get(start..end));
        self.valid && ops.is_some_and(|ops| ops.iter().all(|op| op.status.is_okay()))
    }
}
