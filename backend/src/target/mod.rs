//! What a disk's requests act on: files, block devices, memory, nothing, or a test's script. Parsing
//! and opening happen on the supervisor's side, once; every worker incarnation then gets open file
//! descriptions of its own. Which bytes a request may touch is decided by `plan`, not here.

mod device;
mod error;
mod open;
pub mod script;
pub(crate) mod serve;
mod spec;
#[cfg(all(test, feature = "fake"))]
mod suite;
pub(crate) mod upkeep;

use serde::{Deserialize, Serialize};

pub use error::TargetError;
pub use open::{FENCES, OpenMode, OpenedTarget, open};
pub use spec::TargetSpec;

/// Unit of everything a guest addresses, in bytes; also the smallest `sector-size`.
pub const SECTOR: u64 = 512;

/// Size and units of a target, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    /// Capacity; a multiple of `sector_size`, at least one sector, at most `i64::MAX`.
    pub size: u64,
    /// Logical sector advertised to the guest (`sector-size`), 512 unless the operator asks otherwise.
    pub sector_size: u32,
    /// `physical-sector-size`.
    pub physical_sector_size: u32,
}

/// What a target can do, for the keys the guest sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// FLUSH makes published writes durable (`feature-flush-cache`).
    pub flush: bool,
    /// DISCARD is served (`feature-discard`).
    pub discard: bool,
    /// `discard-granularity`, in bytes.
    pub discard_granularity: u32,
    /// `discard-alignment`: where the first such unit starts, in bytes.
    pub discard_alignment: u32,
    /// DISCARD is also served so that the data can't be had back (`discard-secure`).
    pub secure_discard: bool,
    /// Refuses everything that modifies; its descriptors are open read-only.
    pub readonly: bool,
}

/// A target as a worker gets it: the parameters here, the descriptors beside the message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerTarget {
    /// Size and units.
    pub geometry: Geometry,
    /// A discard must be a multiple of this many bytes; the rest of a range is left alone.
    pub discard_unit: u32,
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
    /// Two descriptors: a socket to the test that decides each request's fate, and the file that
    /// holds the data.
    Script,
}
