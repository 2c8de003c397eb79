//! Guest bytes become a request here, or an error that still says how to answer. Whether the sectors
//! exist, the disk is writable or the operation is offered is for the caller to check.

use crate::abi::Abi;
use crate::layout::{
    DISCARD_SECURE, MAX_INDIRECT_PAGES, MAX_INDIRECT_SEGMENTS, OP_DISCARD, OP_FLUSH_DISKCACHE,
    OP_INDIRECT, OP_READ, OP_WRITE, OP_WRITE_BARRIER, SEGMENTS_PER_PAGE,
};
use crate::response::Status;
use crate::segment::DirectSegments;
use crate::slot::{RawSlot, echoed_operation};

/// What a guest asks for. `id` is opaque: any value, repeated or not. Sectors are 512 bytes; a sector
/// number is any value, so the end of a range has to be computed with a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// `BLKIF_OP_READ`, `BLKIF_OP_WRITE`.
    Rw(RwRequest),
    /// `BLKIF_OP_FLUSH_DISKCACHE`.
    Flush(FlushRequest),
    /// `BLKIF_OP_WRITE_BARRIER`.
    Barrier(BarrierRequest),
    /// `BLKIF_OP_DISCARD`.
    Discard(DiscardRequest),
    /// `BLKIF_OP_INDIRECT`.
    Indirect(IndirectRequest),
}

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RwOp {
    /// Disk to guest.
    Read,
    /// Guest to disk.
    Write,
}

impl RwOp {
    const fn from_operation(operation: u8) -> Option<Self> {
        match operation {
            OP_READ => Some(Self::Read),
            OP_WRITE => Some(Self::Write),
            _ => None,
        }
    }

    /// The operation's number in blkif.h.
    #[must_use]
    pub const fn operation(self) -> u8 {
        match self {
            Self::Read => OP_READ,
            Self::Write => OP_WRITE,
        }
    }
}

/// A READ or WRITE with its segments in the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RwRequest {
    /// Echoed in the response.
    pub id: u64,
    /// The direction.
    pub op: RwOp,
    /// First sector on the disk.
    pub sector: u64,
    /// The memory, in disk order.
    pub segments: DirectSegments,
}

/// What a flush or barrier writes besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteData {
    /// First sector on the disk.
    pub sector: u64,
    /// The memory, in disk order.
    pub segments: DirectSegments,
}

/// Make durable every write answered before this request was published, and then `data`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlushRequest {
    /// Echoed in the response.
    pub id: u64,
    /// Written through, if any. Without segments the slot's sector number means nothing (Linux sends
    /// all ones), so there is none here.
    pub data: Option<WriteData>,
}

/// A write (or nothing) after all earlier requests and before all later ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarrierRequest {
    /// Echoed in the response.
    pub id: u64,
    /// Written in order, if any.
    pub data: Option<WriteData>,
}

/// Sectors that may be forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscardRequest {
    /// Echoed in the response.
    pub id: u64,
    /// First sector.
    pub sector: u64,
    /// Number of sectors; any value.
    pub nr_sectors: u64,
    /// `BLKIF_DISCARD_SECURE` is set: to be erased for good.
    pub secure: bool,
}

/// A READ or WRITE of 1 to 256 segments that stand in pages granted by [`Self::grefs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndirectRequest {
    /// Echoed in the response.
    pub id: u64,
    /// The inner operation, which is what the response echoes.
    pub op: RwOp,
    /// First sector on the disk.
    pub sector: u64,
    nr_segments: u16,
    grefs: [u32; MAX_INDIRECT_PAGES],
}

impl IndirectRequest {
    /// Unneeded grefs are kept but never shown: frontends leave anything there.
    ///
    /// # Errors
    /// `nr_segments` is not 1 to 256.
    pub fn new(
        id: u64,
        op: RwOp,
        sector: u64,
        nr_segments: u16,
        grefs: [u32; MAX_INDIRECT_PAGES],
    ) -> Result<Self, Reason> {
        let count = usize::from(nr_segments);
        if count == 0 {
            return Err(Reason::NoSegments);
        }
        if count > MAX_INDIRECT_SEGMENTS {
            return Err(Reason::TooManySegments {
                count,
                most: MAX_INDIRECT_SEGMENTS,
            });
        }
        Ok(Self {
            id,
            op,
            sector,
            nr_segments,
            grefs,
        })
    }

    /// Segments there are, 1 to 256.
    #[must_use]
    pub const fn nr_segments(&self) -> u16 {
        self.nr_segments
    }

    /// The pages that hold them, 512 to a page; no more than needed.
    #[must_use]
    pub fn grefs(&self) -> &[u32] {
        let pages = usize::from(self.nr_segments).div_ceil(SEGMENTS_PER_PAGE);
        self.grefs.get(..pages).unwrap_or_default()
    }
}

/// A request that can't be carried out, with what its response has to echo.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request {id:#x}, operation {op}: {reason}")]
pub struct RequestError {
    /// The request's id, bit for bit.
    pub id: u64,
    /// The operation as the response echoes it.
    pub op: u8,
    /// What is wrong.
    pub reason: Reason,
}

impl RequestError {
    /// The answer the guest gets.
    #[must_use]
    pub const fn status(&self) -> Status {
        match self.reason {
            Reason::UnknownOperation => Status::NotSupported,
            Reason::NoSegments
            | Reason::TooManySegments { .. }
            | Reason::BadSegment { .. }
            | Reason::InnerOperation => Status::Error,
        }
    }
}

/// Why a request or an indirect page is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// Not an operation of blkif.h, or a reserved one.
    #[error("unknown operation")]
    UnknownOperation,
    /// A transfer of nothing.
    #[error("no segments")]
    NoSegments,
    /// More than the request can carry.
    #[error("{count} segments, at most {most} expected")]
    TooManySegments {
        /// What the guest says.
        count: usize,
        /// What there may be.
        most: usize,
    },
    /// Not `first_sect <= last_sect < 8`.
    #[error("segment {index} has sectors {first_sect} to {last_sect}, expected within 0 to 7")]
    BadSegment {
        /// Which one, from 0.
        index: usize,
        /// As the guest wrote it.
        first_sect: u8,
        /// As the guest wrote it.
        last_sect: u8,
    },
    /// Only READ and WRITE can be indirect. (FreeBSD can send WRITE_BARRIER; Linux refuses it too.)
    #[error("inner operation of an indirect request is neither READ nor WRITE")]
    InnerOperation,
}

impl RawSlot {
    /// What the copy asks for.
    ///
    /// # Errors
    /// The operation is unknown, or its segments are none, too many or out of range.
    pub fn parse(&self, abi: Abi) -> Result<Request, RequestError> {
        let id = self.long(abi.offsets().id);
        self.parse_body(abi, id).map_err(|reason| RequestError {
            id,
            op: echoed_operation(self.head()),
            reason,
        })
    }

    fn parse_body(&self, abi: Abi, id: u64) -> Result<Request, Reason> {
        let at = abi.offsets();
        let sector = self.long(at.sector);
        // `handle` is never looked at: frontends put anything there.
        let [operation, second, ..] = self.head();
        if let Some(op) = RwOp::from_operation(operation) {
            let segments = DirectSegments::decode(second, self.descriptors(at.segments))?;
            return Ok(Request::Rw(RwRequest {
                id,
                op,
                sector,
                segments,
            }));
        }
        match operation {
            OP_FLUSH_DISKCACHE => {
                let data = self.write_data(abi, sector, second)?;
                Ok(Request::Flush(FlushRequest { id, data }))
            }
            OP_WRITE_BARRIER => {
                let data = self.write_data(abi, sector, second)?;
                Ok(Request::Barrier(BarrierRequest { id, data }))
            }
            OP_DISCARD => {
                let nr_sectors = self.long(at.discard_sectors);
                let secure = second & DISCARD_SECURE != 0;
                Ok(Request::Discard(DiscardRequest {
                    id,
                    sector,
                    nr_sectors,
                    secure,
                }))
            }
            OP_INDIRECT => {
                let op = RwOp::from_operation(second).ok_or(Reason::InnerOperation)?;
                let [_, _, low, high] = self.head();
                let nr_segments = u16::from_le_bytes([low, high]);
                let mut grefs = [0; MAX_INDIRECT_PAGES];
                for (page, gref) in grefs.iter_mut().enumerate() {
                    *gref = self.word(at.indirect_grefs.wrapping_add(page.wrapping_mul(4)));
                }
                IndirectRequest::new(id, op, sector, nr_segments, grefs).map(Request::Indirect)
            }
            _ => Err(Reason::UnknownOperation),
        }
    }

    fn write_data(&self, abi: Abi, sector: u64, count: u8) -> Result<Option<WriteData>, Reason> {
        if count == 0 {
            return Ok(None);
        }
        let segments = DirectSegments::decode(count, self.descriptors(abi.offsets().segments))?;
        Ok(Some(WriteData { sector, segments }))
    }
}
