//! The kernel calls of a worker that no safe wrapper covers.
// UNSAFETY: io_uring takes raw addresses, and fcntl's range locks have no safe wrapper.
#![expect(
    unsafe_code,
    reason = "the one place of the backend that talks to the kernel by address"
)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

fn byte_lock(kind: libc::c_int, byte: u64) -> io::Result<libc::flock> {
    let kind = libc::c_short::try_from(kind).map_err(io::Error::other)?;
    let start = libc::off_t::try_from(byte).map_err(io::Error::other)?;
    Ok(libc::flock {
        l_type: kind,
        l_whence: 0,
        l_start: start,
        l_len: 1,
        l_pid: 0,
    })
}

/// Takes a read lock on one byte for `file`'s open file description (F_OFD_SETLK).
pub(crate) fn ofd_read_lock(file: BorrowedFd<'_>, byte: u64) -> io::Result<()> {
    let lock = byte_lock(libc::F_RDLCK, byte)?;
    // SAFETY: F_OFD_SETLK reads one `struct flock`; `lock` is one and outlives the call.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Whether no other open file description holds any lock on the byte (F_OFD_GETLK).
pub(crate) fn ofd_unlocked(file: BorrowedFd<'_>, byte: u64) -> io::Result<bool> {
    let mut lock = byte_lock(libc::F_WRLCK, byte)?;
    // SAFETY: F_OFD_GETLK reads and writes one `struct flock`; `lock` is one, borrowed mutably.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(i32::from(lock.l_type) == libc::F_UNLCK)
}
