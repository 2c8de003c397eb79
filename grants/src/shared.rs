//! Memory that outlives the process using it: journals and statistics pages, a memfd handed from the
//! supervisor to each incarnation of a worker.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

use crate::Access;
use crate::memory::Region;

/// A mapped memfd of a fixed size. The seals guarantee that no holder of the descriptor can shrink it,
/// so no access can raise SIGBUS.
#[derive(Debug)]
pub struct SharedPages {
    region: Region,
}

impl SharedPages {
    /// A new zeroed memfd of `bytes`, its memory allocated now (a full tmpfs is an error here, not a
    /// signal later) and its size sealed. The name shows in `/proc/<pid>/maps`.
    pub fn create(name: &str, bytes: usize) -> io::Result<(Self, OwnedFd)> {
        let size = u64::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        let memfd = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(name, memfd)?;
        rustix::fs::ftruncate(&fd, size)?;
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, size)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let region = Region::shared(fd.as_fd(), 0, bytes, Access::ReadWrite)?;
        Ok((Self { region }, fd))
    }

    /// Maps the first `bytes` of what [`create`](Self::create) made, here or in another process.
    /// EINVAL: a descriptor that isn't sealed against shrinking, or is shorter.
    pub fn map(fd: impl AsFd, bytes: usize, access: Access) -> io::Result<Self> {
        let fd = fd.as_fd();
        let sealed = rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK);
        let size = usize::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0);
        if !sealed || size < bytes {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self {
            region: Region::shared(fd, 0, bytes, access)?,
        })
    }

    /// Keeps the pages in memory.
    pub fn lock(&self) -> io::Result<()> {
        self.region.lock()
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// Whether there are no bytes at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The memory itself, for the mocked hypervisor's guests.
    #[cfg(feature = "fake")]
    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// One relaxed load of 64-bit word number `word`; the way to read a read-only mapping.
    pub fn load(&self, word: usize) -> Option<u64> {
        self.region.load64(word)
    }
}

/// The pages as 64-bit words; empty if they were mapped read-only, where a store would kill the process.
impl AsRef<[AtomicU64]> for SharedPages {
    fn as_ref(&self) -> &[AtomicU64] {
        self.region.words64()
    }
}
