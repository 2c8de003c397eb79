//! Where a queue's requests come from and where their outcomes go: the seam between the queue thread,
//! which knows rings and grants, and what runs on it (the inbox of [`GuestDisk`](crate::disk::GuestDisk),
//! load generators, verifiers).

use xenblk_grants::fake::{FakeDomain, Gfn};
use xenblk_ring::Segment;

use crate::disk::IoError;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoKind {
    /// Disk to buffer.
    Read,
    /// Buffer to disk.
    Write,
    /// Earlier writes become durable; no sectors.
    Flush,
    /// The sectors' content is no longer needed; no buffer.
    Discard,
}

/// One request of the block layer; it becomes exactly one ring request.
#[derive(Clone, Copy, Debug)]
pub struct Io {
    /// What to do.
    pub kind: IoKind,
    /// First sector, 512 bytes each.
    pub sector: u64,
    /// Sectors; for READ and WRITE at most [`Limits::sectors_at`].
    pub sectors: u64,
    /// The source's own name for it.
    pub token: usize,
}

/// What the connected disk takes.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Segments (pages) of one request.
    pub segments: usize,
    /// Capacity in sectors.
    pub capacity: u64,
}

impl Limits {
    /// Sectors one request starting at `sector` can carry. Buffers keep the alignment their data has on
    /// the disk, as page-cache pages do, so an unaligned start costs part of the first page.
    pub fn sectors_at(&self, sector: u64) -> u64 {
        self.segments as u64 * SECTORS_PER_PAGE - sector % SECTORS_PER_PAGE
    }
}

/// Sectors of a 4 KiB page.
pub(super) const SECTORS_PER_PAGE: u64 = 8;

/// The guest's memory behind one request.
#[derive(Debug)]
pub struct GuestBuffer<'a> {
    pub(super) domain: &'a FakeDomain,
    /// Page frame and the part of it that belongs to the request.
    pub(super) pages: &'a [(Gfn, Segment)],
}

impl GuestBuffer<'_> {
    /// Puts `data`, at most as long as the request, into the guest's pages from the start.
    pub fn write(&self, data: &[u8]) {
        let mut rest = data;
        for &(page, segment) in self.pages {
            let (now, later) = rest.split_at(segment.len().min(rest.len()));
            self.domain.write(page, segment.offset(), now);
            rest = later;
        }
    }

    /// Copies the guest's pages from the start into `data`, at most as long as the request.
    pub fn read(&self, data: &mut [u8]) {
        let mut rest = data;
        for &(page, segment) in self.pages {
            let (now, later) = rest.split_at_mut(segment.len().min(rest.len()));
            self.domain.read(page, segment.offset(), now);
            rest = later;
        }
    }
}

/// Runs on a queue's thread; nothing here may block.
pub trait Source: Send {
    /// The next request, or none for now. Asked whenever the ring has room.
    fn next(&mut self, limits: &Limits) -> Option<Io>;

    /// Puts a WRITE's data into the guest's pages before the request is sent.
    fn fill(&mut self, io: &Io, buffer: &GuestBuffer<'_>);

    /// The outcome, exactly once for each request; a READ's data is in `buffer` when it is `Ok`.
    fn done(&mut self, io: &Io, outcome: Result<(), IoError>, buffer: &GuestBuffer<'_>);
}

/// A source with an end: it is dropped once it is [`finished`](Self::finished) and has nothing in flight,
/// or when the disk is gone.
pub trait Job: Source {
    /// No further request will come.
    fn finished(&self) -> bool;
}
