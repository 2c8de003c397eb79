//! Sizes, offsets and constants of the blkif ABI (Xen `public/io/blkif.h` and `public/io/ring.h`).
//! Nothing here computes; a test compares every number with Debian's libxen-dev.

/// Bytes of a granted page: Xen's 4 KiB, whatever page size the host has.
pub const PAGE_SIZE: usize = 4096;
/// Bytes of a sector: every sector number and count in the protocol is in these units.
pub const SECTOR_SIZE: usize = 512;
/// Sectors in one page, the exclusive bound of a segment's `first_sect` and `last_sect`.
pub const SECTORS_PER_PAGE: u8 = 8;
/// Segments that fit into a slot (`BLKIF_MAX_SEGMENTS_PER_REQUEST`).
pub const MAX_DIRECT_SEGMENTS: usize = 11;
/// Segments this backend accepts in one indirect request, as Linux does.
pub const MAX_INDIRECT_SEGMENTS: usize = 256;
/// Grefs of indirect pages in a slot (`BLKIF_MAX_INDIRECT_PAGES_PER_REQUEST`).
pub const MAX_INDIRECT_PAGES: usize = 8;
/// Bytes of one segment descriptor, in a slot as in an indirect page.
pub const SEGMENT_BYTES: usize = 8;
/// Segment descriptors in one indirect page.
pub const SEGMENTS_PER_PAGE: usize = PAGE_SIZE / SEGMENT_BYTES;
/// Largest `ring-page-order` offered.
pub const MAX_RING_ORDER: u32 = 4;
/// Pages of the largest ring.
pub const MAX_RING_PAGES: u32 = 1 << MAX_RING_ORDER;

/// Bytes before the first slot (`offsetof(struct blkif_sring, ring)`).
pub const RING_HEADER_BYTES: usize = 64;
/// Word index of `req_prod`: requests the frontend has published.
pub const REQ_PROD: usize = 0;
/// Word index of `req_event`: the backend wants an event when `req_prod` passes it.
pub const REQ_EVENT: usize = 1;
/// Word index of `rsp_prod`: responses the backend has published.
pub const RSP_PROD: usize = 2;
/// Word index of `rsp_event`: the frontend wants an event when `rsp_prod` passes it.
pub const RSP_EVENT: usize = 3;

/// Read sectors into the segments.
pub const OP_READ: u8 = 0;
/// Write the segments.
pub const OP_WRITE: u8 = 1;
/// Write, ordered after everything before it and before everything after it; segments optional.
pub const OP_WRITE_BARRIER: u8 = 2;
/// Make completed writes durable; segments optional.
pub const OP_FLUSH_DISKCACHE: u8 = 3;
/// Tell the disk that sectors are unused.
pub const OP_DISCARD: u8 = 5;
/// READ or WRITE whose segments stand in pages of their own.
pub const OP_INDIRECT: u8 = 6;
/// Bit of a discard's `flag`: erase securely.
pub const DISCARD_SECURE: u8 = 1;

/// Bytes of a slot on x86_32; a slot is as large as the larger of request and response.
pub const SLOT_BYTES_X86_32: usize = size_of::<i386::Request>();
/// Bytes of a slot on x86_64 and arm.
pub const SLOT_BYTES_64: usize = size_of::<lp64::Request>();
/// Words of the largest slot.
pub(crate) const MAX_SLOT_WORDS: usize = SLOT_BYTES_64 / 4;

/// Defines blkif.h's structures under one alignment rule. They are never instantiated: shared memory
/// is only ever seen as words, and the structures say at which word a field stands.
macro_rules! blkif_structs {
    ($abi:ident, $repr:meta) => {
        mod $abi {
            use super::{MAX_DIRECT_SEGMENTS, MAX_INDIRECT_PAGES, Segment};

            #[$repr]
            pub(super) struct Request {
                pub(super) operation: u8,
                pub(super) nr_segments: u8,
                pub(super) handle: u16,
                pub(super) id: u64,
                pub(super) sector_number: u64,
                pub(super) seg: [Segment; MAX_DIRECT_SEGMENTS],
            }

            #[$repr]
            pub(super) struct Discard {
                pub(super) operation: u8,
                pub(super) flag: u8,
                pub(super) handle: u16,
                pub(super) id: u64,
                pub(super) sector_number: u64,
                pub(super) nr_sectors: u64,
            }

            #[$repr]
            pub(super) struct Indirect {
                pub(super) operation: u8,
                pub(super) indirect_op: u8,
                pub(super) nr_segments: u16,
                pub(super) id: u64,
                pub(super) sector_number: u64,
                pub(super) handle: u16,
                pub(super) indirect_grefs: [u32; MAX_INDIRECT_PAGES],
            }

            #[$repr]
            pub(super) struct Response {
                pub(super) id: u64,
                pub(super) operation: u8,
                pub(super) status: i16,
            }
        }
    };
}

/// `struct blkif_request_segment`, the same under both rules.
#[repr(C)]
struct Segment {
    gref: u32,
    first_sect: u8,
    last_sect: u8,
}

blkif_structs!(lp64, repr(C));
blkif_structs!(i386, repr(C, packed(4)));

/// Byte offsets of the fields this crate reads and writes, for one alignment rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offsets {
    /// Request `id`.
    pub id: usize,
    /// Request `sector_number`.
    pub sector: usize,
    /// `seg[0]` of a direct request.
    pub segments: usize,
    /// `nr_sectors` of a discard.
    pub discard_sectors: usize,
    /// `handle` of an indirect request.
    pub indirect_handle: usize,
    /// `indirect_grefs[0]`.
    pub indirect_grefs: usize,
    /// Response `id`.
    pub response_id: usize,
    /// Response `operation`; `status` stands two bytes on.
    pub response_operation: usize,
    /// Bytes of a response proper; the slot goes on with padding.
    pub response_bytes: usize,
}

macro_rules! offsets {
    ($abi:ident) => {
        Offsets {
            id: std::mem::offset_of!($abi::Request, id),
            sector: std::mem::offset_of!($abi::Request, sector_number),
            segments: std::mem::offset_of!($abi::Request, seg),
            discard_sectors: std::mem::offset_of!($abi::Discard, nr_sectors),
            indirect_handle: std::mem::offset_of!($abi::Indirect, handle),
            indirect_grefs: std::mem::offset_of!($abi::Indirect, indirect_grefs),
            response_id: std::mem::offset_of!($abi::Response, id),
            response_operation: std::mem::offset_of!($abi::Response, operation),
            response_bytes: size_of::<$abi::Response>(),
        }
    };
}

/// Offsets on x86_64 and arm.
pub const OFFSETS_64: Offsets = offsets!(lp64);
/// Offsets on x86_32, where 64-bit fields are aligned to 4 bytes.
pub const OFFSETS_X86_32: Offsets = offsets!(i386);

/// The numbers as blkif.h's readers know them, so that a slip in the structures above can't compile.
const _: () = {
    assert!(SLOT_BYTES_64 == 112 && SLOT_BYTES_X86_32 == 108);
    assert!(size_of::<Segment>() == SEGMENT_BYTES);
    assert!(std::mem::offset_of!(Segment, first_sect) == 4);
    assert!(std::mem::offset_of!(Segment, last_sect) == 5);
    assert!(PAGE_SIZE / SECTOR_SIZE == SECTORS_PER_PAGE as usize);
    let long = OFFSETS_64;
    assert!(long.id == 8 && long.sector == 16 && long.segments == 24);
    assert!(long.discard_sectors == 24 && long.indirect_handle == 24 && long.indirect_grefs == 28);
    assert!(long.response_id == 0 && long.response_operation == 8 && long.response_bytes == 16);
    let short = OFFSETS_X86_32;
    assert!(short.id == 4 && short.sector == 12 && short.segments == 20);
    assert!(short.discard_sectors == 20 && short.indirect_handle == 20);
    assert!(short.indirect_grefs == 24);
    assert!(short.response_id == 0 && short.response_operation == 8 && short.response_bytes == 12);
    // Bytes 0 and 1 are the operation and, of an indirect request, the inner one, under every rule.
    assert!(std::mem::offset_of!(lp64::Request, operation) == 0);
    assert!(std::mem::offset_of!(lp64::Request, nr_segments) == 1);
    assert!(std::mem::offset_of!(lp64::Request, handle) == 2);
    assert!(std::mem::offset_of!(lp64::Discard, flag) == 1);
    assert!(std::mem::offset_of!(lp64::Indirect, indirect_op) == 1);
    assert!(std::mem::offset_of!(lp64::Indirect, nr_segments) == 2);
    assert!(std::mem::offset_of!(lp64::Response, status) == 10);
    assert!(std::mem::offset_of!(i386::Indirect, nr_segments) == 2);
    assert!(std::mem::offset_of!(i386::Response, status) == 10);
};
