//! Targets on the worker's side: what starts reads and writes and reports their end. What else there
//! is to do to a target is [`upkeep`](super::upkeep)'s, in another process.

use std::fmt::Debug;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

use super::script::ScriptTarget;
use super::{WorkerTarget, WorkerTargetKind, open};
use crate::worker::engine::{Engine, Io, Tag};

/// What one ring's operations act on. One suite (`target::suite`) holds every implementation to this:
///
/// * Ranges given to [`start`](Self::start) exist: they come from a `Plan` and are not checked again.
/// * `start` never blocks. Each operation comes back exactly once as `Event::Done`, with its tag and
///   its buffer, in any order; until then the buffer is the target's.
/// * `Ok` means all of it: a short transfer is an error.
/// * After a failed write its range holds anything, and no byte outside has changed.
/// * A target opened read-only changes nothing, whatever it is asked.
/// * The fence (`target::take_fence`) lasts until the last operation of this description has ended.
pub(crate) trait Target: Debug {
    /// Starts `io`; nothing else is expected of the caller but to enter the engine.
    fn start(&mut self, engine: &mut Engine, tag: Tag, io: Io);

    /// A descriptor that has to be watched for reading while the ring is attached.
    fn watched(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The watched descriptor became readable. After an error no operation will ever be started
    /// again, and all those not handed back are.
    fn readable(&mut self, _engine: &mut Engine) -> io::Result<()> {
        Ok(())
    }

    /// The storage's device and inode, to know it by after a crash; zeroes where there is none.
    fn identity(&self) -> (u64, u64) {
        (0, 0)
    }
}

/// Takes over what [`OpenedTarget::incarnation`](super::OpenedTarget::incarnation) made and locks
/// the fence numbered `fence` on it.
pub(crate) fn attach(
    target: &WorkerTarget,
    fds: Vec<OwnedFd>,
    fence: u64,
) -> io::Result<Box<dyn Target>> {
    let mut fds = fds.into_iter();
    let mut next = || {
        fds.next()
            .ok_or(io::Error::from(io::ErrorKind::InvalidInput))
    };
    Ok(match target.kind {
        WorkerTargetKind::Null => Box::new(Null),
        WorkerTargetKind::File => {
            let file = next()?;
            open::take_fence(file.as_fd(), fence)?;
            Box::new(File { file })
        }
        WorkerTargetKind::Script => {
            let (socket, file) = (next()?, next()?);
            open::take_fence(file.as_fd(), fence)?;
            Box::new(ScriptTarget::new(socket, file))
        }
    })
}

pub(super) fn inode(file: &OwnedFd) -> (u64, u64) {
    rustix::fs::fstat(file).map_or((0, 0), |stat| (stat.st_dev, stat.st_ino))
}

/// A regular file, a block device or a memfd.
#[derive(Debug)]
struct File {
    file: OwnedFd,
}

impl Target for File {
    fn start(&mut self, engine: &mut Engine, tag: Tag, io: Io) {
        engine.start(self.file.as_fd(), tag, io);
    }

    fn identity(&self) -> (u64, u64) {
        inode(&self.file)
    }
}

/// Reads give zeroes, everything else succeeds and is forgotten.
#[derive(Debug)]
struct Null;

impl Target for Null {
    fn start(&mut self, engine: &mut Engine, tag: Tag, mut io: Io) {
        if let Io::Read { buffer, .. } = &mut io {
            engine.bytes_mut(buffer).fill(0);
        }
        engine.complete(tag, io, Ok::<(), Errno>(()));
    }
}
