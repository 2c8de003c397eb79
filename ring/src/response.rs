//! What the guest gets back.

use crate::abi::Abi;
use crate::layout::MAX_SLOT_WORDS;
use crate::slot::split;
use crate::words::Words;

/// The outcome of a request (`BLKIF_RSP_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i16)]
pub enum Status {
    /// Done.
    Okay = 0,
    /// Failed.
    Error = -1,
    /// Not an operation this disk has. Never for READ, WRITE or INDIRECT: Windows takes it for success.
    NotSupported = -2,
}

impl Status {
    /// The number on the ring.
    #[must_use]
    pub const fn to_wire(self) -> i16 {
        self as i16
    }

    /// The status a number on the ring stands for.
    #[must_use]
    pub const fn from_wire(status: i16) -> Option<Self> {
        match status {
            0 => Some(Self::Okay),
            -1 => Some(Self::Error),
            -2 => Some(Self::NotSupported),
            _ => None,
        }
    }
}

/// A response slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Response {
    /// The request's id, bit for bit.
    pub id: u64,
    /// The request's operation; of an indirect request the inner one.
    pub op: u8,
    /// `BLKIF_RSP_*`; a frontend has to expect any value.
    pub status: i16,
}

impl Response {
    /// Writes every byte of the slot at word `first`: what isn't response is 0, so that neither this
    /// process's memory (XSA-216) nor the request that stood there is left behind it.
    pub(crate) fn store<W: Words>(self, words: &W, first: usize, abi: Abi) {
        let mut slot = [0; MAX_SLOT_WORDS];
        let [s0, s1] = self.status.to_le_bytes();
        let (low, high) = split(self.id);
        // The response's fields are at the same words under every ABI; layout.rs asserts it.
        let [w0, w1, w2, ..] = &mut slot;
        (*w0, *w1, *w2) = (low, high, u32::from_le_bytes([self.op, 0, s0, s1]));
        words.store_run(first, slot.get(..abi.slot_words()).unwrap_or_default());
    }

    /// Reads the slot at word `first`, each of its words once.
    #[cfg(feature = "front")]
    pub(crate) fn load<W: Words>(words: &W, first: usize) -> Self {
        let mut slot = [0; 3];
        words.load_run(first, &mut slot);
        let [low, high, rest] = slot;
        let [op, _, s0, s1] = rest.to_le_bytes();
        Self {
            id: crate::slot::join(low, high),
            op,
            status: i16::from_le_bytes([s0, s1]),
        }
    }
}
