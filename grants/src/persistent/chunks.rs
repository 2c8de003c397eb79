//! The chunks a ring has mapped, by number and by page, and which of them was used the longest ago.
#![expect(
    clippy::indexing_slicing,
    reason = "indices are page numbers that were given a place by `insert`"
)]

use std::time::Instant;

use crate::window::MAX_CHUNK;
use crate::{Chunk, GrantRef};

/// A mapped chunk.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) chunk: Chunk,
    /// Its grants, in order.
    pub(super) refs: Box<[GrantRef]>,
    /// When a request last presented one of them.
    pub(super) used: Instant,
}

/// See the module's head. At most 256 of them, so that a page can name its chunk in a byte.
#[derive(Debug, Default)]
pub(super) struct Chunks {
    held: Vec<Option<Held>>,
    /// For each page of the window the number of its chunk; meaningless for free pages. As long as the
    /// highest page ever used demands.
    of_page: Vec<u8>,
    count: usize,
    grants: usize,
}

impl Chunks {
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Grants in all of them.
    pub(super) fn grants(&self) -> usize {
        self.grants
    }

    /// The chunk that has page `page` of the window.
    pub(super) fn at(&self, page: u16) -> Option<&Held> {
        self.get(usize::from(*self.of_page.get(usize::from(page))?))
    }

    pub(super) fn get(&self, number: usize) -> Option<&Held> {
        self.held.get(number)?.as_ref()
    }

    pub(super) fn used(&self, number: usize) -> Option<Instant> {
        self.get(number).map(|held| held.used)
    }

    pub(super) fn grants_of(&self, number: usize) -> usize {
        self.get(number).map_or(0, |held| held.refs.len())
    }

    /// The chunk that has `page` is used now.
    pub(super) fn touch(&mut self, page: u16, now: Instant) {
        let number = self.of_page.get(usize::from(page)).copied();
        if let Some(held) =
            number.and_then(|number| self.held.get_mut(usize::from(number))?.as_mut())
        {
            held.used = now;
        }
    }

    pub(super) fn insert(&mut self, held: Held) {
        let number = match self.held.iter().position(Option::is_none) {
            Some(number) => number,
            None => {
                self.held.push(None);
                self.held.len().saturating_sub(1)
            }
        };
        let pages = held.chunk.start()..held.chunk.start().saturating_add(held.chunk.pages());
        if self.of_page.len() < pages.end {
            self.of_page.resize(pages.end, 0);
        }
        // At most 256 chunks: `MAX_CHUNKS`, and one more while chunks are merged.
        self.of_page[pages].fill(u8::try_from(number).unwrap_or(u8::MAX));
        self.count = self.count.saturating_add(1);
        self.grants = self.grants.saturating_add(held.refs.len());
        self.held[number] = Some(held);
    }

    pub(super) fn remove(&mut self, number: usize) -> Option<Held> {
        let held = self.held.get_mut(number)?.take()?;
        self.count = self.count.saturating_sub(1);
        self.grants = self.grants.saturating_sub(held.refs.len());
        Some(held)
    }

    /// The chunk whose last use is the longest ago.
    pub(super) fn least_recent(&self) -> Option<usize> {
        let used = |(number, held): (usize, &Option<Held>)| Some((held.as_ref()?.used, number));
        let oldest = self.held.iter().enumerate().filter_map(used).min();
        oldest.map(|(_, number)| number)
    }

    /// The smallest chunks, as many as fit into one, none of which is more than half full.
    pub(super) fn mergeable(&self) -> Vec<usize> {
        let small = |(number, held): (usize, &Option<Held>)| {
            let grants = held.as_ref()?.refs.len();
            (grants <= MAX_CHUNK / 2).then_some((grants, number))
        };
        let mut small: Vec<_> = self.held.iter().enumerate().filter_map(small).collect();
        small.sort_unstable();
        let mut total = 0usize;
        let fits = |(grants, _): &(usize, usize)| {
            total = total.saturating_add(*grants);
            total <= MAX_CHUNK
        };
        small
            .into_iter()
            .take_while(fits)
            .map(|(_, number)| number)
            .collect()
    }
}
