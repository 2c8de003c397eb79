//! A ring's way to its disk's flusher: which requests wait for a flush or a discard, and what of it has
//! been ordered. At most one flush is ordered at a time: it covers all that wait when it is ordered, the
//! next one what has come since. What that means for requests is `ring`'s business.
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing
)]

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use crate::flusher::ORDERS;
use crate::flusher::wire::{Answer, Chore, Order, Stop};

/// The id of every order to flush; those of discards are the requests' slots.
const FLUSH: u32 = u32::MAX;
/// Most discards ordered at a time; with the flush they fit the flusher's bound.
const DISCARDS: usize = ORDERS - 1;

#[derive(Debug)]
enum Link {
    /// There is nothing to look after: whatever is asked has been done.
    Needless,
    /// Nothing has needed a flusher yet, or `asked`: the supervisor was asked for one.
    Absent {
        asked: bool,
    },
    Open(OwnedFd),
    /// The flusher is gone, and what becomes of its last orders can't be known.
    Gone,
}

/// A request whose chore has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    pub(super) slot: usize,
    pub(super) flush: bool,
    pub(super) result: Result<(), Errno>,
}

/// See the module's head. Bounded by the ring's entries, as every request stands in it once.
#[derive(Debug)]
pub(super) struct Upkeep {
    link: Link,
    /// Slots the ordered flush covers.
    flushing: Vec<usize>,
    /// Slots that wait for the next one.
    to_flush: Vec<usize>,
    /// Slots of ordered discards.
    discarding: Vec<usize>,
    to_discard: VecDeque<(usize, Chore)>,
    ended: VecDeque<Ended>,
    /// Since when some flush has not been answered, in milliseconds of CLOCK_MONOTONIC; 0 if none.
    since: u64,
}

impl Upkeep {
    /// With `needed` false everything asked succeeds at once.
    pub(super) fn new(needed: bool) -> Self {
        let link = if needed {
            Link::Absent { asked: false }
        } else {
            Link::Needless
        };
        Self {
            link,
            flushing: Vec::new(),
            to_flush: Vec::new(),
            discarding: Vec::new(),
            to_discard: VecDeque::new(),
            ended: VecDeque::new(),
            since: 0,
        }
    }

    /// Takes in a chore of the request in `slot`, which then comes back from [`Self::next`].
    pub(super) fn start(&mut self, slot: usize, chore: Chore) {
        match chore {
            Chore::Flush => self.to_flush.push(slot),
            Chore::Discard { .. } => self.to_discard.push_back((slot, chore)),
        }
    }

    /// A request whose chore has ended, until there is none left. Only then what was taken in is ordered,
    /// so that the flushes of one batch are one order.
    pub(super) fn next(&mut self) -> Option<Ended> {
        if self.ended.is_empty() {
            self.go_on();
        }
        self.ended.pop_front()
    }

    /// Whether the supervisor has to be asked for a flusher; says so once.
    pub(super) fn wants_flusher(&mut self) -> bool {
        let waits = !self.to_flush.is_empty() || !self.to_discard.is_empty();
        match &mut self.link {
            Link::Absent { asked } if waits => !std::mem::replace(asked, true),
            _ => false,
        }
    }

    /// Takes the socket to the flusher; nothing instead of one means that there will be none.
    pub(super) fn connect(&mut self, socket: Option<OwnedFd>) {
        if matches!(self.link, Link::Absent { .. }) {
            self.link = socket.map_or(Link::Gone, Link::Open);
        }
    }

    /// The socket, while an answer is awaited.
    pub(super) fn watched(&self) -> Option<BorrowedFd<'_>> {
        let awaits = !self.flushing.is_empty() || !self.discarding.is_empty();
        match &self.link {
            Link::Open(socket) if awaits => Some(socket.as_fd()),
            _ => None,
        }
    }

    /// Since when some flush has not been answered, in milliseconds of CLOCK_MONOTONIC; 0 if none is.
    pub(super) fn flushing_since(&self) -> u64 {
        self.since
    }

    /// The watched socket became readable.
    pub(super) fn readable(&mut self) {
        while let Link::Open(socket) = &self.link {
            match Answer::receive(socket.as_fd()) {
                Ok(answer) => self.answered(answer),
                Err(Stop::Later) => break,
                Err(Stop::Over) => self.link = Link::Gone,
            }
        }
    }

    fn answered(&mut self, Answer { id, result }: Answer) {
        if id == FLUSH {
            self.end_flushes(false, result);
            return;
        }
        let ordered = self
            .discarding
            .iter()
            .position(|slot| *slot as u64 == u64::from(id));
        if let Some(at) = ordered {
            let slot = self.discarding.swap_remove(at);
            self.end(slot, false, result);
        }
    }

    /// Orders what can be ordered.
    fn go_on(&mut self) {
        self.order();
        match self.link {
            Link::Needless => self.end_all(Ok(())),
            Link::Gone => self.end_all(Err(Errno::IO)),
            Link::Absent { .. } | Link::Open(_) => {}
        }
        let none = self.flushing.is_empty() && self.to_flush.is_empty();
        match (none, self.since) {
            (true, _) => self.since = 0,
            (false, 0) => self.since = monotonic_ms(),
            (false, _) => {}
        }
    }

    fn order(&mut self) {
        let Link::Open(socket) = &self.link else {
            return;
        };
        let (id, chore) = (FLUSH, Chore::Flush);
        let mut sent = Ok(());
        if self.flushing.is_empty() && !self.to_flush.is_empty() {
            sent = Order { id, chore }.send(socket.as_fd());
            if sent.is_ok() {
                std::mem::swap(&mut self.flushing, &mut self.to_flush);
            }
        }
        while sent.is_ok()
            && self.discarding.len() < DISCARDS
            && let Some(&(slot, chore)) = self.to_discard.front()
        {
            // A slot is less than a ring's entries.
            let id = u32::try_from(slot).unwrap_or(FLUSH);
            sent = Order { id, chore }.send(socket.as_fd());
            if sent.is_ok() {
                self.to_discard.pop_front();
                self.discarding.push(slot);
            }
        }
        // There is room for all that may be ordered at a time, so a flusher without any is none.
        if sent.is_err() {
            self.link = Link::Gone;
        }
    }

    /// Ends everything that has been asked.
    fn end_all(&mut self, result: Result<(), Errno>) {
        self.end_flushes(true, result);
        let discarding = std::mem::take(&mut self.discarding);
        for slot in discarding {
            self.end(slot, false, result);
        }
        while let Some((slot, _)) = self.to_discard.pop_front() {
            self.end(slot, false, result);
        }
    }

    /// Ends the flushes that are ordered and, with `all`, those that wait.
    fn end_flushes(&mut self, all: bool, result: Result<(), Errno>) {
        for slot in self.flushing.drain(..) {
            self.ended.push_back(Ended {
                slot,
                flush: true,
                result,
            });
        }
        if all {
            std::mem::swap(&mut self.flushing, &mut self.to_flush);
            if !self.flushing.is_empty() {
                self.end_flushes(false, result);
            }
        }
        self.since = 0;
    }

    fn end(&mut self, slot: usize, flush: bool, result: Result<(), Errno>) {
        self.ended.push_back(Ended {
            slot,
            flush,
            result,
        });
    }
}

fn monotonic_ms() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let part = |n: i64| u64::try_from(n).unwrap_or(0);
    part(now.tv_sec) * 1000 + part(now.tv_nsec) / 1_000_000
}
