//! What a block device says about itself.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{FileType, Stat, ioctl_blkpbszget, ioctl_blksszget, major, minor};

use crate::syscalls;

/// Units are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) logical_sector: u32,
    pub(super) physical_sector: u32,
    /// BLKDISCARD works.
    pub(super) discard: bool,
    /// BLKSECDISCARD works.
    pub(super) secure_discard: bool,
    pub(super) discard_granularity: u32,
    pub(super) discard_alignment: u32,
}

pub(super) fn is_block_device(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice
}

/// Asks the device that `file` is; for discards, as it is opened: read-only, it can't.
pub(super) fn limits(file: &OwnedFd, stat: &Stat) -> io::Result<Limits> {
    let logical_sector = ioctl_blksszget(file)?.max(512);
    let (major, minor) = (major(stat.st_rdev), minor(stat.st_rdev));
    let node = format!("/sys/dev/block/{major}:{minor}");
    // A partition's queue is that of its disk.
    let granularity = attribute(&format!("{node}/queue/discard_granularity"))
        .or_else(|| attribute(&format!("{node}/../queue/discard_granularity")));
    Ok(Limits {
        logical_sector,
        physical_sector: ioctl_blkpbszget(file)?.max(logical_sector),
        discard: syscalls::can_discard_blocks(file.as_fd(), false),
        secure_discard: syscalls::can_discard_blocks(file.as_fd(), true),
        discard_granularity: granularity.unwrap_or(0).max(logical_sector),
        discard_alignment: attribute(&format!("{node}/discard_alignment")).unwrap_or(0),
    })
}

fn attribute(path: &str) -> Option<u32> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}
