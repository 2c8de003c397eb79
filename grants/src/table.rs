//! What a ring asks of `/dev/xen/gntdev`.

use std::{fmt, io};

use crate::{Chunk, DomId, GrantRef, Mapping, Slab, StillThere, Window};

/// One grant device, owned by one ring and used by one thread at a time.
pub trait GrantTable {
    /// Maps the pages behind `refs`, in order and contiguous. One bad grant fails the call and leaves
    /// nothing mapped.
    fn map(&self, dom: DomId, refs: &[GrantRef], access: Access) -> Result<Mapping, MapError>;

    /// Maps the pages behind `refs` (1 to [`MAX_CHUNK`](crate::MAX_CHUNK)), in order and contiguous,
    /// writable, at free pages of `window`: one ioctl and one mmap. One bad grant fails the call,
    /// leaves nothing mapped and loses no page of the window.
    fn map_chunk(
        &self,
        window: &mut Window,
        dom: DomId,
        refs: &[GrantRef],
    ) -> Result<Chunk, MapError>;

    /// Gives a chunk back, whole: one mmap, one ioctl. Nobody can reach its pages any more, since it
    /// takes the chunk. It fails only for want of memory, or for a chunk of another window.
    fn unmap_chunk(&self, window: &mut Window, chunk: Chunk) -> Result<(), StillThere>;

    /// Runs all of `ops` between granted pages of `dom` and `slab`. `Ok` means that every `status` is
    /// valid, not that every copy succeeded. After an error no status is valid: EINVAL, a segment
    /// leaves its page or the slab, and nothing was copied.
    fn copy(&self, dom: DomId, slab: &mut Slab, ops: &mut [CopyOp]) -> io::Result<()>;

    /// Pages mapped through this device and not given back: 0 once every [`Mapping`] is dropped
    /// and every [`Chunk`] unmapped.
    fn mapped(&self) -> usize;
}

/// Whether memory may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Loads only. The one way to map a page that was granted read-only.
    ReadOnly,
    /// Loads and stores.
    ReadWrite,
}

/// Which side of a [`CopyOp`] is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Granted page to slab (a guest's WRITE).
    FromGuest,
    /// Slab to granted page (a guest's READ).
    ToGuest,
}

/// One segment of a grant copy.
#[derive(Clone, Debug)]
pub struct CopyOp {
    /// The granted page.
    pub gref: GrantRef,
    /// First byte within the granted page.
    pub offset: u16,
    /// Bytes; `offset + len` is at most 4096.
    pub len: u16,
    /// First byte within the slab; may cross pages there.
    pub local: usize,
    /// Which side is written.
    pub direction: Direction,
    /// Outcome, valid only after [`GrantTable::copy`] returned `Ok`.
    pub status: CopyStatus,
}

impl CopyOp {
    /// A segment not yet copied; its status is not `OKAY`.
    pub fn new(gref: GrantRef, offset: u16, len: u16, local: usize, direction: Direction) -> Self {
        Self {
            gref,
            offset,
            len,
            local,
            direction,
            status: CopyStatus::GENERAL_ERROR,
        }
    }
}

/// A GNTST_* value (grant_table.h): 0 or a negative reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CopyStatus(pub i16);

impl CopyStatus {
    /// Copied.
    pub const OKAY: Self = Self(0);
    /// Not granted to us, or not in this direction.
    pub const GENERAL_ERROR: Self = Self(-1);
    /// No such domain, or it is dying.
    pub const BAD_DOMAIN: Self = Self(-2);
    /// Beyond the domain's grant table.
    pub const BAD_GNTREF: Self = Self(-3);
    /// The grant names no page of the domain.
    pub const BAD_PAGE: Self = Self(-9);
    /// The page is paged out for now: try again.
    pub const EAGAIN: Self = Self(-12);

    /// Whether the bytes were copied.
    pub fn is_okay(self) -> bool {
        self == Self::OKAY
    }
}

impl fmt::Display for CopyStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GNTST {}", self.0)
    }
}

/// Why nothing was mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// EINVAL: at least one grant is missing, revoked, read-only or of a dead domain, or the host has
    /// no maptrack entries left. The device doesn't say which; a grant copy's status does.
    #[error("the hypervisor refused a grant or is out of maptrack entries")]
    Refused,
    /// No grants, or more than one call takes.
    #[error("{count} grants in one call, expected 1 to {max}")]
    Count {
        /// What was asked for.
        count: usize,
        /// The device's limit.
        max: usize,
    },
    /// No run of free pages in the window is long enough, or the process has as many chunks as the
    /// kernel allows it mappings.
    #[error("no room in the window")]
    NoRoom,
    /// The device or the address space failed.
    #[error("mapping grants failed")]
    Io(#[from] io::Error),
}

impl MapError {
    /// What a failed mmap of a grant device means.
    pub(crate) fn of(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::InvalidInput {
            Self::Refused
        } else {
            Self::Io(error)
        }
    }
}
