//! Numbers of fences. Every process that does I/O on targets, worker or flusher, gets one that no other
//! has, so that a dead one's I/O is not mistaken for that of its successor or of another disk's on the
//! same image.

use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::target::FENCES;

/// One supervisor's numbers: consecutive, from a random one that differs from its predecessors'.
#[derive(Debug)]
pub(super) struct Fences {
    first: u64,
    issued: AtomicU64,
}

impl Fences {
    pub(super) fn new() -> Self {
        // In the lower half, so that they never run out.
        let first = RandomState::new().hash_one(std::process::id()) % (FENCES / 2);
        Self {
            first,
            issued: AtomicU64::new(0),
        }
    }

    /// A number not given out before.
    pub(super) fn issue(&self) -> u64 {
        self.first + self.issued.fetch_add(1, Ordering::Relaxed)
    }

    /// All numbers that this supervisor has not given out.
    pub(super) fn of_others(&self) -> [Range<u64>; 2] {
        let next = self.first + self.issued.load(Ordering::Relaxed);
        [0..self.first, next..FENCES]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_issued_is_nobody_elses() {
        let fences = Fences::new();
        let issued = [fences.issue(), fences.issue(), fences.issue()];
        assert!(issued.is_sorted_by(|a, b| a < b), "{issued:?}");
        let others = fences.of_others();
        assert!(
            issued
                .iter()
                .all(|one| others.iter().all(|range| !range.contains(one)))
        );
        let count: u64 = others.iter().map(|range| range.end - range.start).sum();
        assert_eq!(count, FENCES - 3);
    }
}
