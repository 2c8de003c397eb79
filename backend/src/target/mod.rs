//! What a disk's requests act on: files, block devices, memory, nothing, or a test's script.

use serde::{Deserialize, Serialize};

/// Size and units of a target, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    /// Capacity; a multiple of `sector_size`.
    pub size: u64,
    /// Logical sector advertised to the guest (`sector-size`), 512 unless the operator asks otherwise.
    pub sector_size: u32,
    /// `physical-sector-size`.
    pub physical_sector_size: u32,
}

/// A target as a worker gets it: the parameters here, the descriptors beside the message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerTarget {
    /// Size and units.
    pub geometry: Geometry,
    /// Which engine serves it.
    pub kind: WorkerTargetKind,
}

/// The engines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerTargetKind {
    /// One descriptor: a regular file, a block device or a memfd, through io_uring.
    File,
    /// No descriptor: reads give zeroes, writes are dropped.
    Null,
    /// One descriptor: a socket to the test that decides each request's fate.
    Script,
}
