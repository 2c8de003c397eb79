//! Ring memory for simulated guests and tests: plain, or watched.

use std::sync::Arc;
use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
};

use crate::back::PAGE_WORDS;
use crate::words::Words;

/// Ring memory that isn't shared with anything.
pub type HeapWords = Arc<[AtomicU32]>;

/// Zeroed memory of `pages` pages; clones are the same memory.
#[must_use]
pub fn heap_words(pages: u32) -> HeapWords {
    let words = (pages as usize).wrapping_mul(PAGE_WORDS);
    (0..words).map(|_| AtomicU32::new(0)).collect()
}

/// Memory that counts the loads of every word, and can rewrite a word right after its first load:
/// whoever reads twice what a guest may change sees two values. Clones are the same memory.
#[derive(Clone, Debug)]
pub struct ProbeWords {
    cells: Arc<[Probe]>,
}

#[derive(Debug, Default)]
struct Probe {
    value: AtomicU32,
    loads: AtomicU32,
    /// Bit 32 set: the low half replaces the value after the next load.
    rewrite: AtomicU64,
}

const ARMED: u64 = 1 << 32;

impl ProbeWords {
    /// Zeroed memory of `pages` pages.
    #[must_use]
    pub fn new(pages: u32) -> Self {
        let words = (pages as usize).wrapping_mul(PAGE_WORDS);
        Self {
            cells: (0..words).map(|_| Probe::default()).collect(),
        }
    }

    /// How often word `index` was loaded since the last [`Self::forget`].
    #[must_use]
    pub fn loads(&self, index: usize) -> u32 {
        self.cells
            .get(index)
            .map_or(0, |cell| cell.loads.load(SeqCst))
    }

    /// Sets all counts to 0.
    pub fn forget(&self) {
        for cell in &*self.cells {
            cell.loads.store(0, SeqCst);
        }
    }

    /// After its next load word `index` is `value`.
    pub fn rewrite_after_load(&self, index: usize, value: u32) {
        if let Some(cell) = self.cells.get(index) {
            cell.rewrite.store(ARMED | u64::from(value), SeqCst);
        }
    }

    fn load_with(&self, index: usize, order: std::sync::atomic::Ordering) -> u32 {
        let Some(cell) = self.cells.get(index) else {
            return 0;
        };
        let value = cell.value.load(order);
        cell.loads.fetch_add(1, SeqCst);
        let rewrite = cell.rewrite.swap(0, SeqCst);
        if rewrite & ARMED != 0 {
            cell.value.store(crate::slot::split(rewrite).0, SeqCst);
        }
        value
    }

    fn store_with(&self, index: usize, value: u32, order: std::sync::atomic::Ordering) {
        if let Some(cell) = self.cells.get(index) {
            cell.value.store(value, order);
        }
    }
}

impl Words for ProbeWords {
    fn word_count(&self) -> usize {
        self.cells.len()
    }

    fn load(&self, index: usize) -> u32 {
        self.load_with(index, Relaxed)
    }

    fn load_acquire(&self, index: usize) -> u32 {
        self.load_with(index, Acquire)
    }

    fn store(&self, index: usize, value: u32) {
        self.store_with(index, value, Relaxed);
    }

    fn store_release(&self, index: usize, value: u32) {
        self.store_with(index, value, Release);
    }
}
