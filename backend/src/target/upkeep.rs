//! Targets as the flusher has them: operations that wait for the storage, one at a time.

use std::fmt::Debug;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{FallocateFlags, FileType};
use rustix::io::{Errno, retry_on_intr};

use super::script::ScriptUpkeep;
use super::{WorkerTarget, WorkerTargetKind, open};
use crate::flusher::wire::Chore;
use crate::syscalls;

/// What the flusher does to a target. One suite (`target::suite`) holds every implementation to this:
///
/// * [`perform`](Self::perform) may wait for as long as the storage takes. When it has returned, nothing
///   of the chore is under way any more.
/// * After a flush is `Ok`, every write that was `Ok` before it started, on any description of the same
///   storage, survives loss of power as far as the storage can promise it.
/// * After a discard is `Ok` the range reads as anything; a regular file's reads as zeroes. No byte
///   outside has changed. EOPNOTSUPP: nothing was discarded.
/// * A secure discard is never carried out as a plain one.
/// * A target opened read-only changes nothing, whatever it is asked.
/// * The fence lasts as long as this.
pub(crate) trait Upkeep: Debug {
    /// Does it, and waits for its end.
    fn perform(&mut self, chore: Chore) -> Result<(), Errno>;
}

/// Takes over what [`OpenedTarget::incarnation`](super::OpenedTarget::incarnation) made and locks the
/// fence numbered `fence` on it.
pub(crate) fn attach(
    target: &WorkerTarget,
    fds: Vec<OwnedFd>,
    fence: u64,
) -> io::Result<Box<dyn Upkeep>> {
    let mut fds = fds.into_iter();
    let mut next = || {
        fds.next()
            .ok_or(io::Error::from(io::ErrorKind::InvalidInput))
    };
    Ok(match target.kind {
        WorkerTargetKind::Null => Box::new(Null),
        WorkerTargetKind::File => Box::new(File::new(next()?, fence)?),
        WorkerTargetKind::Script => {
            let (socket, file) = (next()?, File::new(next()?, fence)?);
            Box::new(ScriptUpkeep::new(socket, file))
        }
    })
}

/// A regular file, a block device or a memfd.
#[derive(Debug)]
pub(super) struct File {
    file: OwnedFd,
    device: bool,
}

impl File {
    fn new(file: OwnedFd, fence: u64) -> io::Result<Self> {
        open::take_fence(file.as_fd(), fence)?;
        let mode = rustix::fs::fstat(&file)?.st_mode;
        let device = FileType::from_raw_mode(mode) == FileType::BlockDevice;
        Ok(Self { file, device })
    }
}

impl Upkeep for File {
    fn perform(&mut self, chore: Chore) -> Result<(), Errno> {
        let file = &self.file;
        match chore {
            Chore::Flush => retry_on_intr(|| rustix::fs::fdatasync(file)),
            Chore::Discard {
                offset,
                len,
                secure,
            } if self.device => {
                retry_on_intr(|| syscalls::discard_blocks(file.as_fd(), offset, len, secure))
            }
            Chore::Discard { secure: true, .. } => Err(Errno::OPNOTSUPP),
            Chore::Discard { offset, len, .. } => {
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                retry_on_intr(|| rustix::fs::fallocate(file, hole, offset, len))
            }
        }
    }
}

/// There is nothing to look after.
#[derive(Debug)]
struct Null;

impl Upkeep for Null {
    fn perform(&mut self, _chore: Chore) -> Result<(), Errno> {
        Ok(())
    }
}
