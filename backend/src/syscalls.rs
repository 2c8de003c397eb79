//! System calls that no safe wrapper covers: range locks of open file descriptions and discards of
//! block devices. What they are for is `target`'s business.
// UNSAFETY: fcntl's range locks and these ioctls take a raw address.
#![expect(
    unsafe_code,
    reason = "no crate wraps these calls safely; each passes one plain structure of its own"
)]

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

/// `_IO(0x12, 119)`, linux/fs.h; takes two `u64`, offset and length in bytes.
const BLKDISCARD: libc::Ioctl = 0x1277;
/// `_IO(0x12, 125)`, linux/fs.h; takes the same.
const BLKSECDISCARD: libc::Ioctl = 0x127d;

fn range_lock(kind: libc::c_int, bytes: Range<u64>) -> io::Result<libc::flock> {
    let kind = libc::c_short::try_from(kind).map_err(io::Error::other)?;
    let start = libc::off_t::try_from(bytes.start).map_err(io::Error::other)?;
    let len = bytes.end.saturating_sub(bytes.start);
    let len = libc::off_t::try_from(len).map_err(io::Error::other)?;
    Ok(libc::flock {
        l_type: kind,
        l_whence: 0,
        l_start: start,
        l_len: len,
        l_pid: 0,
    })
}

/// Takes a read lock on one byte for `file`'s open file description (F_OFD_SETLK).
pub(crate) fn ofd_read_lock(file: BorrowedFd<'_>, byte: u64) -> io::Result<()> {
    let lock = range_lock(libc::F_RDLCK, byte..byte + 1)?;
    // SAFETY: F_OFD_SETLK reads one `struct flock`; `lock` is one and outlives the call.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Whether no other open file description holds any lock on these bytes, at least one (F_OFD_GETLK).
pub(crate) fn ofd_unlocked(file: BorrowedFd<'_>, bytes: Range<u64>) -> io::Result<bool> {
    let mut lock = range_lock(libc::F_WRLCK, bytes)?;
    // SAFETY: F_OFD_GETLK reads and writes one `struct flock`; `lock` is one, borrowed mutably.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(i32::from(lock.l_type) == libc::F_UNLCK)
}

/// Discards bytes of a block device and waits for it; with `secure`, so that they can't be had back.
pub(crate) fn discard_blocks(
    device: BorrowedFd<'_>,
    offset: u64,
    len: u64,
    secure: bool,
) -> Result<(), Errno> {
    let request = if secure { BLKSECDISCARD } else { BLKDISCARD };
    let range = [offset, len];
    // SAFETY: both requests read two u64 from the address; `range` is that and outlives the call.
    let rc = unsafe { libc::ioctl(device.as_raw_fd(), request, range.as_ptr()) };
    if rc == 0 {
        Ok(())
    } else {
        Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO))
    }
}

/// Whether a block device opened for writing can discard. Nothing is discarded: the kernel says whether
/// it could (EOPNOTSUPP) before it looks at the range, and this one is none (EINVAL).
pub(crate) fn can_discard_blocks(device: BorrowedFd<'_>, secure: bool) -> bool {
    discard_blocks(device, 1, 1, secure) == Err(Errno::INVAL)
}
