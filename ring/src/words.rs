//! Memory shared with a guest, seen as 32-bit words: the guest writes it at any time, so there is never
//! a reference to it as bytes or structures, only loads and stores of whole words.

use std::sync::atomic::{
    AtomicU32,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
    fence,
};

/// The pages of a ring, in order and contiguous, as little-endian words.
///
/// No index can fail: a load beyond the end is 0, a store there is dropped. Implemented for anything
/// that gives its memory out as `[AtomicU32]`; tests implement it to watch, count or lose accesses.
pub trait Words {
    /// Words there are.
    fn word_count(&self) -> usize;
    /// Relaxed load.
    fn load(&self, index: usize) -> u32;
    /// Acquire load, of a producer index: pairs with the other side's release store.
    fn load_acquire(&self, index: usize) -> u32;
    /// Relaxed store.
    fn store(&self, index: usize, value: u32);
    /// Release store, of a producer index.
    fn store_release(&self, index: usize, value: u32);

    /// The full barrier between storing an index and testing the other side's event index (ring.h
    /// `xen_mb`): without it both sides can miss what the other just stored, and sleep.
    fn full_fence(&self) {
        fence(SeqCst);
    }

    /// Loads `into.len()` words from `first` on, each exactly once.
    fn load_run(&self, first: usize, into: &mut [u32]) {
        for (offset, word) in into.iter_mut().enumerate() {
            *word = self.load(first.wrapping_add(offset));
        }
    }

    /// Stores `values` from `first` on.
    fn store_run(&self, first: usize, values: &[u32]) {
        for (offset, &value) in values.iter().enumerate() {
            self.store(first.wrapping_add(offset), value);
        }
    }
}

impl<T: AsRef<[AtomicU32]>> Words for T {
    fn word_count(&self) -> usize {
        self.as_ref().len()
    }

    fn load(&self, index: usize) -> u32 {
        self.as_ref()
            .get(index)
            .map_or(0, |word| word.load(Relaxed))
    }

    fn load_acquire(&self, index: usize) -> u32 {
        self.as_ref()
            .get(index)
            .map_or(0, |word| word.load(Acquire))
    }

    fn store(&self, index: usize, value: u32) {
        if let Some(word) = self.as_ref().get(index) {
            word.store(value, Relaxed);
        }
    }

    fn store_release(&self, index: usize, value: u32) {
        if let Some(word) = self.as_ref().get(index) {
            word.store(value, Release);
        }
    }

    // One bounds check for the run: these two are on every request's way.
    fn load_run(&self, first: usize, into: &mut [u32]) {
        let from = self.as_ref().get(first..).unwrap_or_default();
        for (word, shared) in into.iter_mut().zip(from) {
            *word = shared.load(Relaxed);
        }
    }

    fn store_run(&self, first: usize, values: &[u32]) {
        let to = self.as_ref().get(first..).unwrap_or_default();
        for (&value, shared) in values.iter().zip(to) {
            shared.store(value, Relaxed);
        }
    }
}
