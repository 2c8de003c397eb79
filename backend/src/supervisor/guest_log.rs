//! Log lines a guest can provoke: a few at once, then one every ten seconds, the rest counted.

use std::time::{Duration, Instant};

const BURST: u32 = 8;
const REFILL: Duration = Duration::from_secs(10);

/// The right to write lines about one device.
#[derive(Debug)]
pub(super) struct GuestLog {
    left: u32,
    refilled: Instant,
    suppressed: u64,
}

impl GuestLog {
    pub(super) fn new() -> Self {
        Self {
            left: BURST,
            refilled: Instant::now(),
            suppressed: 0,
        }
    }

    /// Whether a line may be written now: `Some` with the number of lines kept back since the last one.
    pub(super) fn admit(&mut self) -> Option<u64> {
        let refills = self.refilled.elapsed().as_secs() / REFILL.as_secs();
        if refills > 0 {
            self.left = BURST.min(
                self.left
                    .saturating_add(u32::try_from(refills).unwrap_or(BURST)),
            );
            self.refilled = Instant::now();
        }
        if self.left == 0 {
            self.suppressed += 1;
            return None;
        }
        self.left -= 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_and_counted() {
        let mut log = GuestLog::new();
        let admitted = (0..1000).filter(|_| log.admit().is_some()).count();
        assert_eq!(admitted, BURST as usize);
        log.refilled = Instant::now().checked_sub(REFILL).unwrap();
        assert_eq!(log.admit(), Some(1000 - u64::from(BURST)));
        assert_eq!(log.admit(), None);
    }
}
