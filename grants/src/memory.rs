//! Address space: one owner per mapping, and copies to and from memory that others write at the same
//! time. Knows nothing of grants.
#![expect(
    unsafe_code,
    reason = "mmap, and raw access to memory shared with other domains"
)]
// UNSAFETY: the compiler can't know what a mapping is backed by; `Region` ties the address range to
// its owner's lifetime, and every access to it goes through the checked methods here.

use std::ffi::c_void;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, MlockFlags, ProtFlags};

use crate::Access;
#[cfg(feature = "fake")]
use crate::XEN_PAGE_SIZE;

/// A range of address space mapped for this owner alone; unmapped on drop.
///
/// Invariant of every method: `base..base + len` is mapped until drop, readable if `len > 0`, and
/// writable if `access` is `ReadWrite`. `base` is page-aligned.
#[derive(Debug)]
pub(crate) struct Region {
    base: NonNull<u8>,
    len: usize,
    access: Access,
}

// SAFETY: the range belongs to the owner alone and isn't tied to a thread; shared access happens by
// atomic operations or, for private memory, through the references of `Slab`, which follow Rust's rules.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Private zeroed memory, `len` bytes, touched (and so taken from the host) page by page on use.
    pub(crate) fn anonymous(len: usize) -> io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, READ_WRITE, flags) }?;
        Self::owning(base, len, Access::ReadWrite)
    }

    /// `len` bytes of `file` from `offset`, shared with everyone who maps them.
    pub(crate) fn shared(
        file: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        access: Access,
    ) -> io::Result<Self> {
        let prot = protection(access);
        let flags = MapFlags::SHARED;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, flags, file, offset) }?;
        Self::owning(base, len, access)
    }

    /// Pages of `file`, by number, side by side in the order given.
    #[cfg(feature = "fake")]
    pub(crate) fn gathered(
        file: BorrowedFd<'_>,
        frames: &[u32],
        access: Access,
    ) -> io::Result<Self> {
        let len = frames.len().saturating_mul(XEN_PAGE_SIZE);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let prot = ProtFlags::empty();
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, prot, flags) }?;
        // From here on an early return unmaps the whole window.
        let region = Self::owning(base, len, access)?;
        // SAFETY: the range reserved above, which `region` owns and nobody else has seen yet.
        unsafe { gather(file, frames, access, region.base.as_ptr()) }?;
        Ok(region)
    }

    fn owning(base: *mut c_void, len: usize, access: Access) -> io::Result<Self> {
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len, access })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn access(&self) -> Access {
        self.access
    }

    /// Start of the range. Dereferencing it is the caller's responsibility.
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Keeps the range's pages in memory once they have been touched; costs none that haven't. ENOMEM or
    /// EPERM: more than RLIMIT_MEMLOCK allows.
    pub(crate) fn lock(&self) -> io::Result<()> {
        let (base, flags) = (self.base.as_ptr().cast(), MlockFlags::ONFAULT);
        // SAFETY: locking changes nothing that a reference into the range could see; it ends with munmap.
        Ok(unsafe { rustix::mm::mlock_with(base, self.len, flags) }?)
    }

    /// The range as 32-bit words; empty if it can't be written, because a store through it would kill
    /// the process.
    pub(crate) fn words32(&self) -> &[AtomicU32] {
        let len = self.writable_len() / HALF_WORD;
        // SAFETY: mapped, writable and page-aligned for as long as `self` lives; any bits are a valid
        // AtomicU32, and others change them only as a device would, whole words at a time.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), len) }
    }

    /// As [`words32`](Self::words32) with 64-bit words.
    pub(crate) fn words64(&self) -> &[AtomicU64] {
        let len = self.writable_len() / WORD;
        // SAFETY: as in `words32`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), len) }
    }

    /// One relaxed load, also from a range that can't be written.
    pub(crate) fn load64(&self, word: usize) -> Option<u64> {
        if word >= self.len / WORD {
            return None;
        }
        let at = self.base.as_ptr().wrapping_add(word.saturating_mul(WORD));
        // SAFETY: inside the mapped range (checked above) and aligned, since `base` is.
        let word = unsafe { AtomicU64::from_ptr(at.cast()) };
        Some(word.load(Ordering::Relaxed))
    }

    /// Whether `offset..offset + len` lies inside.
    pub(crate) fn holds(&self, offset: usize, len: usize) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len)
    }

    /// Copies out of the range, however others change it meanwhile. False: not inside, nothing copied.
    #[must_use]
    pub(crate) fn copy_out(&self, offset: usize, to: &mut [u8]) -> bool {
        if !self.holds(offset, to.len()) {
            return false;
        }
        let from = self.base.as_ptr().wrapping_add(offset);
        // SAFETY: `from` is valid for `to.len()` bytes (checked above).
        unsafe { load_racing(from, to) };
        true
    }

    /// Copies into the range. False: not inside or not writable, nothing copied.
    #[must_use]
    pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) -> bool {
        if self.access == Access::ReadOnly || !self.holds(offset, from.len()) {
            return false;
        }
        let to = self.base.as_ptr().wrapping_add(offset);
        // SAFETY: `to` is valid for writes of `from.len()` bytes (checked above).
        unsafe { store_racing(to, from) };
        true
    }

    fn writable_len(&self) -> usize {
        match self.access {
            Access::ReadWrite => self.len,
            Access::ReadOnly => 0,
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the range is this owner's alone, and references into it can't outlive `self`. The call
        // fails only for arguments mmap never returned.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

fn protection(access: Access) -> ProtFlags {
    match access {
        Access::ReadOnly => ProtFlags::READ,
        Access::ReadWrite => READ_WRITE,
    }
}

/// Puts pages of `file`, by number, side by side at `at`, replacing what is there.
///
/// # Safety
/// As many pages from `at` on are page-aligned address space that the caller owns and that nothing
/// refers to.
#[cfg(feature = "fake")]
pub(crate) unsafe fn gather(
    file: BorrowedFd<'_>,
    frames: &[u32],
    access: Access,
    at: *mut u8,
) -> io::Result<()> {
    for (&frame, page) in frames.iter().zip(0usize..) {
        let at = at.wrapping_add(page.saturating_mul(XEN_PAGE_SIZE));
        let offset = u64::from(frame).saturating_mul(XEN_PAGE_SIZE as u64);
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let prot = protection(access);
        // SAFETY: the caller owns the page at `at`, and nothing refers to it.
        unsafe { rustix::mm::mmap(at.cast(), XEN_PAGE_SIZE, prot, flags, file, offset) }?;
    }
    Ok(())
}

/// Copies from memory that others may be writing: relaxed loads of whole words, because a plain read
/// would be a data race. Words may be torn against each other, as in any copy of a live page.
///
/// # Safety
/// `shared` is valid for reads of `private.len()` bytes.
pub(crate) unsafe fn load_racing(mut shared: *const u8, private: &mut [u8]) {
    let (head, rest) = private.split_at_mut(shared.align_offset(WORD).min(private.len()));
    for byte in head {
        // SAFETY: the caller vouches for this byte of `shared`.
        *byte = unsafe { AtomicU8::from_ptr(shared.cast_mut()) }.load(Ordering::Relaxed);
        shared = shared.wrapping_add(1);
    }
    let mut words = rest.chunks_exact_mut(WORD);
    for word in &mut words {
        // SAFETY: the caller vouches for these bytes of `shared`, which is aligned since the head.
        let value =
            unsafe { AtomicU64::from_ptr(shared.cast_mut().cast()) }.load(Ordering::Relaxed);
        word.copy_from_slice(&value.to_ne_bytes());
        shared = shared.wrapping_add(WORD);
    }
    for byte in words.into_remainder() {
        // SAFETY: the caller vouches for this byte of `shared`.
        *byte = unsafe { AtomicU8::from_ptr(shared.cast_mut()) }.load(Ordering::Relaxed);
        shared = shared.wrapping_add(1);
    }
}

/// Copies to memory that others may be reading or writing; writes no byte beyond what was asked.
///
/// # Safety
/// `shared` is valid for writes of `private.len()` bytes.
pub(crate) unsafe fn store_racing(mut shared: *mut u8, private: &[u8]) {
    let (head, rest) = private.split_at(shared.align_offset(WORD).min(private.len()));
    for &byte in head {
        // SAFETY: the caller vouches for this byte of `shared`.
        unsafe { AtomicU8::from_ptr(shared) }.store(byte, Ordering::Relaxed);
        shared = shared.wrapping_add(1);
    }
    let (words, tail) = rest.as_chunks::<WORD>();
    for word in words {
        let value = u64::from_ne_bytes(*word);
        // SAFETY: the caller vouches for these bytes of `shared`, which is aligned since the head.
        unsafe { AtomicU64::from_ptr(shared.cast()) }.store(value, Ordering::Relaxed);
        shared = shared.wrapping_add(WORD);
    }
    for &byte in tail {
        // SAFETY: the caller vouches for this byte of `shared`.
        unsafe { AtomicU8::from_ptr(shared) }.store(byte, Ordering::Relaxed);
        shared = shared.wrapping_add(1);
    }
}

/// Bytes of the words shared memory is copied in.
const WORD: usize = 8;
const HALF_WORD: usize = 4;
