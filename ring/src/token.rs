//! The right, and the duty, to answer one request.

use std::cell::Cell;
use std::rc::Rc;

/// One consumed request. [`BackRing::finish`](crate::BackRing::finish) takes it; dropping it instead
/// answers ERROR at the next publish, so that no path through the code can leave a guest waiting.
#[derive(Debug)]
#[must_use = "dropping a token answers its request with ERROR"]
pub struct Token {
    slot: u32,
    answered: bool,
    home: Rc<Home>,
}

/// Where a ring's dropped tokens wait for its next publish.
pub(crate) struct Home {
    dropped: Cell<Vec<u32>>,
}

impl Home {
    /// Room for all of a ring's tokens, so that dropping one never allocates.
    pub(crate) fn new(entries: u32) -> Rc<Self> {
        Rc::new(Self {
            dropped: Cell::new(Vec::with_capacity(entries as usize)),
        })
    }

    #[inline]
    pub(crate) fn token(self: &Rc<Self>, slot: u32) -> Token {
        Token {
            slot,
            answered: false,
            home: Rc::clone(self),
        }
    }

    #[inline]
    pub(crate) fn pop_dropped(&self) -> Option<u32> {
        let mut dropped = self.dropped.take();
        let slot = dropped.pop();
        self.dropped.set(dropped);
        slot
    }

    pub(crate) fn dropped(&self) -> u32 {
        let dropped = self.dropped.take();
        let count = u32::try_from(dropped.len()).unwrap_or(u32::MAX);
        self.dropped.set(dropped);
        count
    }
}

impl std::fmt::Debug for Home {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Home")
            .field("dropped", &self.dropped())
            .finish()
    }
}

impl Token {
    /// Names the request among those the ring has consumed and not yet published: less than the ring's
    /// entries, and used again after that. An index for what the caller keeps of a request.
    #[must_use]
    pub const fn slot(&self) -> usize {
        self.slot as usize
    }

    pub(crate) const fn journal_slot(&self) -> u32 {
        self.slot
    }

    pub(crate) fn is_of(&self, home: &Rc<Home>) -> bool {
        Rc::ptr_eq(&self.home, home)
    }

    /// The journal slot, if the token is `home`'s. A token of another ring is the caller's mistake;
    /// left to drop, its own ring answers it.
    #[inline]
    pub(crate) fn answer(mut self, home: &Rc<Home>) -> Option<u32> {
        if !self.is_of(home) {
            return None;
        }
        self.answered = true;
        Some(self.slot)
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        if !self.answered {
            let mut dropped = self.home.dropped.take();
            dropped.push(self.slot);
            self.home.dropped.set(dropped);
        }
    }
}
