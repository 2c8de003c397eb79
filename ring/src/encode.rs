//! Requests as a frontend writes them: the inverse of parsing.

use crate::abi::Abi;
use crate::layout::{
    DISCARD_SECURE, OP_DISCARD, OP_FLUSH_DISKCACHE, OP_INDIRECT, OP_WRITE_BARRIER, PAGE_SIZE,
    SEGMENT_BYTES,
};
use crate::request::{
    BarrierRequest, DiscardRequest, FlushRequest, IndirectRequest, Request, RwRequest, WriteData,
};
use crate::segment::{DirectSegments, Segment};
use crate::slot::{RawSlot, join};

impl RawSlot {
    /// A slot of only operation and id, as an operation nobody knows would look.
    #[must_use]
    pub fn with_operation(abi: Abi, operation: u8, id: u64) -> Self {
        let mut slot = Self::EMPTY;
        slot.set_word(0, u32::from(operation));
        slot.set_long(abi.offsets().id, id);
        slot
    }

    /// Overwrites the byte at `offset`, for requests no honest frontend sends.
    pub fn set_byte(&mut self, offset: usize, value: u8) {
        let mut bytes = self.word(offset).to_le_bytes();
        if let Some(byte) = bytes.get_mut(offset % 4) {
            *byte = value;
        }
        self.set_word(offset, u32::from_le_bytes(bytes));
    }

    fn set_segments(&mut self, abi: Abi, segments: &DirectSegments) {
        let mut at = abi.offsets().segments;
        for segment in segments.as_slice() {
            let [gref, sectors] = segment.to_words();
            self.set_long(at, join(gref, sectors));
            at = at.wrapping_add(SEGMENT_BYTES);
        }
        self.set_byte(1, u8::try_from(segments.as_slice().len()).unwrap_or(0));
    }
}

impl Request {
    /// The request as it stands in a ring; `handle` is 0.
    #[must_use]
    pub fn encode(&self, abi: Abi) -> RawSlot {
        match self {
            Self::Rw(RwRequest {
                id,
                op,
                sector,
                segments,
            }) => {
                let mut slot = RawSlot::with_operation(abi, op.operation(), *id);
                slot.set_long(abi.offsets().sector, *sector);
                slot.set_segments(abi, segments);
                slot
            }
            Self::Flush(FlushRequest { id, data }) => {
                encode_ordered(abi, OP_FLUSH_DISKCACHE, *id, data.as_ref())
            }
            Self::Barrier(BarrierRequest { id, data }) => {
                encode_ordered(abi, OP_WRITE_BARRIER, *id, data.as_ref())
            }
            Self::Discard(discard) => encode_discard(abi, discard),
            Self::Indirect(indirect) => encode_indirect(abi, indirect),
        }
    }
}

fn encode_ordered(abi: Abi, operation: u8, id: u64, data: Option<&WriteData>) -> RawSlot {
    let mut slot = RawSlot::with_operation(abi, operation, id);
    match data {
        Some(WriteData { sector, segments }) => {
            slot.set_long(abi.offsets().sector, *sector);
            slot.set_segments(abi, segments);
        }
        // What Linux leaves there.
        None => slot.set_long(abi.offsets().sector, u64::MAX),
    }
    slot
}

fn encode_discard(abi: Abi, discard: &DiscardRequest) -> RawSlot {
    let mut slot = RawSlot::with_operation(abi, OP_DISCARD, discard.id);
    slot.set_byte(1, if discard.secure { DISCARD_SECURE } else { 0 });
    slot.set_long(abi.offsets().sector, discard.sector);
    slot.set_long(abi.offsets().discard_sectors, discard.nr_sectors);
    slot
}

fn encode_indirect(abi: Abi, indirect: &IndirectRequest) -> RawSlot {
    let mut slot = RawSlot::with_operation(abi, OP_INDIRECT, indirect.id);
    let [low, high] = indirect.nr_segments().to_le_bytes();
    slot.set_word(
        0,
        u32::from_le_bytes([OP_INDIRECT, indirect.op.operation(), low, high]),
    );
    slot.set_long(abi.offsets().sector, indirect.sector);
    let mut at = abi.offsets().indirect_grefs;
    for &gref in indirect.grefs() {
        slot.set_word(at, gref);
        at = at.wrapping_add(4);
    }
    slot
}

/// An indirect page holding the first 512 of `segments`.
#[must_use]
pub fn encode_indirect_page(segments: &[Segment]) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    for (bytes, segment) in page
        .as_chunks_mut::<SEGMENT_BYTES>()
        .0
        .iter_mut()
        .zip(segments)
    {
        let [gref, sectors] = segment.to_words();
        *bytes = join(gref, sectors).to_le_bytes();
    }
    page
}
