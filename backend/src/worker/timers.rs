//! When rings want a turn though nothing happens to them. One deadline a ring, and most have none: an idle
//! ring costs nothing here, and the worker sleeps without limit when all are idle. What a deadline is for is
//! the ring's own business.

use std::collections::BTreeSet;
use std::time::Instant;

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Timers {
    /// Deadlines with the places of their rings, the next first.
    queue: BTreeSet<(Instant, usize)>,
    /// The deadline of each place, to find it in `queue`.
    of: Vec<Option<Instant>>,
}

impl Timers {
    /// The ring at `place` wants a turn at `deadline`, or none any more; replaces what was set before.
    pub(super) fn set(&mut self, place: usize, deadline: Option<Instant>) {
        if self.of.len() <= place {
            if deadline.is_none() {
                return;
            }
            self.of.resize(place.saturating_add(1), None);
        }
        let Some(set) = self.of.get_mut(place) else {
            return;
        };
        if *set == deadline {
            return;
        }
        if let Some(old) = std::mem::replace(set, deadline) {
            self.queue.remove(&(old, place));
        }
        if let Some(new) = deadline {
            self.queue.insert((new, place));
        }
    }

    /// The next deadline.
    pub(super) fn next(&self) -> Option<Instant> {
        self.queue.first().map(|(deadline, _)| *deadline)
    }

    /// The place of a ring whose deadline is over, which it then has no more.
    pub(super) fn expired(&mut self, now: Instant) -> Option<usize> {
        let &(deadline, place) = self.queue.first()?;
        (deadline <= now).then(|| {
            self.set(place, None);
            place
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn deadlines_expire_in_their_order_and_once() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut timers = Timers::default();
        timers.set(3, None);
        assert_eq!((timers.next(), timers.expired(at(0))), (None, None));
        timers.set(3, Some(at(30)));
        timers.set(1, Some(at(10)));
        timers.set(2, Some(at(20)));
        // Replaced, moved to the front, taken back.
        timers.set(3, Some(at(5)));
        timers.set(2, None);
        assert_eq!(timers.next(), Some(at(5)));
        assert_eq!(timers.expired(at(4)), None);
        assert_eq!(timers.expired(at(10)), Some(3));
        assert_eq!(timers.expired(at(10)), Some(1));
        assert_eq!((timers.next(), timers.expired(at(99))), (None, None));
        timers.set(1, Some(at(40)));
        assert_eq!(timers.expired(at(40)), Some(1));
    }
}
