//! The private copy of a ring slot. Everything that looks at a request looks at this copy; the ring
//! itself is read once, when the copy is made.

use crate::abi::Abi;
use crate::layout::{MAX_SLOT_WORDS, OP_INDIRECT};
use crate::words::Words;

/// Longs (two words) of a copy as the journal keeps it.
pub(crate) const SLOT_LONGS: usize = MAX_SLOT_WORDS / 2;

/// A slot's words; on x86_32 the last is 0.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RawSlot {
    words: [u32; MAX_SLOT_WORDS],
}

impl RawSlot {
    /// Copies the slot starting at word `first`, each word loaded once.
    pub(crate) fn load<W: Words>(words: &W, first: usize, abi: Abi) -> Self {
        let mut copy = [0; MAX_SLOT_WORDS];
        words.load_run(first, copy.get_mut(..abi.slot_words()).unwrap_or_default());
        Self { words: copy }
    }

    /// A slot holding `bytes`, whatever they mean.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; MAX_SLOT_WORDS * 4]) -> Self {
        let mut words = [0; MAX_SLOT_WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        Self { words }
    }

    /// The words an `abi` ring has room for.
    #[must_use]
    pub fn as_words(&self, abi: Abi) -> &[u32] {
        self.words.get(..abi.slot_words()).unwrap_or_default()
    }

    #[inline]
    pub(crate) fn from_longs(longs: &[u64; SLOT_LONGS]) -> Self {
        let mut words = [0; MAX_SLOT_WORDS];
        for ([low, high], &long) in words.as_chunks_mut::<2>().0.iter_mut().zip(longs) {
            (*low, *high) = split(long);
        }
        Self { words }
    }

    #[inline]
    pub(crate) fn longs(&self) -> [u64; SLOT_LONGS] {
        let mut longs = [0; SLOT_LONGS];
        for (long, &[low, high]) in longs.iter_mut().zip(self.words.as_chunks::<2>().0) {
            *long = join(low, high);
        }
        longs
    }

    /// The word at byte `offset`, which is a multiple of 4 as every field's is.
    pub(crate) fn word(&self, offset: usize) -> u32 {
        self.words.get(offset / 4).copied().unwrap_or_default()
    }

    /// The 64-bit field at byte `offset`.
    pub(crate) fn long(&self, offset: usize) -> u64 {
        join(self.word(offset), self.word(offset.wrapping_add(4)))
    }

    /// Bytes 0 to 3: operation, then what the operation makes of them.
    pub(crate) fn head(&self) -> [u8; 4] {
        self.word(0).to_le_bytes()
    }

    /// The 8-byte descriptors from byte `offset` on, as many as the slot holds.
    pub(crate) fn descriptors(&self, offset: usize) -> &[[u32; 2]] {
        self.words
            .get(offset / 4..)
            .unwrap_or_default()
            .as_chunks::<2>()
            .0
    }

    #[cfg(feature = "front")]
    pub(crate) const EMPTY: Self = Self {
        words: [0; MAX_SLOT_WORDS],
    };

    #[cfg(feature = "front")]
    pub(crate) fn set_word(&mut self, offset: usize, value: u32) {
        if let Some(word) = self.words.get_mut(offset / 4) {
            *word = value;
        }
    }

    #[cfg(feature = "front")]
    pub(crate) fn set_long(&mut self, offset: usize, value: u64) {
        let (low, high) = split(value);
        self.set_word(offset, low);
        self.set_word(offset.wrapping_add(4), high);
    }
}

/// Guests' bytes are not for logs.
impl std::fmt::Debug for RawSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [operation, ..] = self.head();
        f.debug_struct("RawSlot")
            .field("operation", &operation)
            .finish_non_exhaustive()
    }
}

/// The operation a response to a request starting with `head` must carry: the request's own, but for
/// INDIRECT the inner one, valid or not. Linux compares and kills the disk on a mismatch, although
/// blkif.h says "copied from request".
pub(crate) const fn echoed_operation(head: [u8; 4]) -> u8 {
    match head {
        [OP_INDIRECT, inner, ..] => inner,
        [operation, ..] => operation,
    }
}

#[inline]
pub(crate) fn join(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

#[inline]
pub(crate) const fn split(long: u64) -> (u32, u32) {
    ((long & 0xffff_ffff) as u32, (long >> 32) as u32)
}
