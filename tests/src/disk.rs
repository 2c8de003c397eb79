//! The guest's block device as its users see it: the NBD export and the load generator on one side,
//! a simulated frontend on the other. Says nothing about rings; that is the frontend's business.

/// What the guest learned about its disk when the frontend connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskInfo {
    /// Capacity in bytes.
    pub size: u64,
    /// Smallest unit of a request, in bytes (`sector-size`).
    pub sector_size: u32,
    /// Preferred unit, in bytes (`physical-sector-size`).
    pub physical_sector_size: u32,
    /// The backend refuses everything that modifies (`info` bit 2).
    pub readonly: bool,
    /// `feature-flush-cache` was offered.
    pub flush: bool,
    /// `feature-discard` was offered.
    pub discard: bool,
    /// Rings the frontend negotiated.
    pub queues: usize,
}

/// One request of the guest. Offsets and lengths are bytes, multiples of the sector size.
#[derive(Debug)]
pub enum Op {
    /// Read `len` bytes at `offset`.
    Read {
        /// Byte offset on the disk.
        offset: u64,
        /// Bytes to read.
        len: u32,
    },
    /// Write `data` at `offset`.
    Write {
        /// Byte offset on the disk.
        offset: u64,
        /// What to write.
        data: Vec<u8>,
    },
    /// Make every write that was answered before durable.
    Flush,
    /// The content of the range is no longer needed.
    Discard {
        /// Byte offset on the disk.
        offset: u64,
        /// Bytes to discard.
        len: u64,
    },
}

/// Why the guest's request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoError {
    /// The backend answered ERROR.
    #[error("the backend answered ERROR")]
    Error,
    /// The backend answered EOPNOTSUPP.
    #[error("the backend answered EOPNOTSUPP")]
    NotSupported,
    /// The range or alignment is outside what the disk offers; nothing was sent.
    #[error("offset or length outside the disk, or not a multiple of its sector size")]
    Invalid,
    /// The frontend is not connected any more.
    #[error("the disk is gone")]
    Gone,
}

/// Called once with the request's outcome; a read's data comes with it, other operations give an empty vector.
pub type Done = Box<dyn FnOnce(Result<Vec<u8>, IoError>) + Send>;

/// A connected guest disk. Requests may be submitted from any thread and complete in any order.
pub trait GuestDisk: Send + Sync {
    /// Geometry and features as negotiated.
    fn info(&self) -> DiskInfo;

    /// Hands `op` to queue `hint % queues`. `done` runs exactly once, on a thread of the frontend: it
    /// must not block. Blocks only while the queue's backlog is full.
    fn submit(&self, hint: usize, op: Op, done: Done);
}
