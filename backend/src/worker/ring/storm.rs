//! A guest that sends events and no requests: each one wakes the worker for nothing, at the other guests'
//! cost. After some of them in a row the ring's port is unmasked later and later, until there is a request.
//! Only that guest waits longer for its next one.

use std::time::{Duration, Instant};

/// Events in a row that may bring no request. A guest in good order has one now and then, for a request that
/// was seen before its event.
const FREE: u32 = 8;
/// How long the port stays masked after the first one beyond that; it doubles with each.
const FIRST: Duration = Duration::from_millis(1);
/// Longest delay: ten wakeups a second are no burden.
const LONGEST: Duration = Duration::from_millis(100);

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Storm {
    /// Events since the last request.
    empty: u32,
    /// The port stays masked until then.
    until: Option<Instant>,
}

impl Storm {
    /// There was a request.
    pub(super) fn over(&mut self) {
        *self = Self::default();
    }

    /// An event came, and no request. Says whether the port is to stay masked for a while.
    pub(super) fn empty_event(&mut self, now: Instant) -> bool {
        self.empty = self.empty.saturating_add(1);
        let Some(beyond) = self.empty.checked_sub(FREE).filter(|beyond| *beyond > 0) else {
            return false;
        };
        let factor = 1u32.checked_shl(beyond.saturating_sub(1));
        let delay = factor.map_or(LONGEST, |factor| FIRST.saturating_mul(factor));
        self.until = now.checked_add(delay.min(LONGEST));
        true
    }

    /// When the port may be unmasked, if that is later than `now`.
    pub(super) fn delayed(&mut self, now: Instant) -> bool {
        self.until = self.until.filter(|until| *until > now);
        self.until.is_some()
    }

    /// When the port may be unmasked, if it may not.
    pub(super) fn until(&self) -> Option<Instant> {
        self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_a_limit_and_a_request_ends_them() {
        let now = Instant::now();
        let mut storm = Storm::default();
        for round in 0..2 {
            for n in 0..FREE {
                assert!(!storm.empty_event(now), "round {round}, event {n}");
                assert!(!storm.delayed(now));
            }
            for expected in [1, 2, 4, 8, 16, 32, 64, 100, 100, 100] {
                assert!(storm.empty_event(now));
                let until = now + Duration::from_millis(expected);
                assert_eq!(storm.until(), Some(until));
                assert!(storm.delayed(until - Duration::from_nanos(1)));
                assert!(!storm.delayed(until));
                assert_eq!(storm.until(), None);
            }
            storm.over();
        }
        // Far beyond any number of doublings.
        for _ in 0..100 {
            storm.empty_event(now);
        }
        assert_eq!(storm.until(), Some(now + LONGEST));
    }
}
