//! A ring's bounce memory: private pages handed out as contiguous runs, so that one request is one
//! I/O buffer however scattered the guest's pages are.
#![expect(
    unsafe_code,
    reason = "byte views of memory the kernel also reads and writes"
)]
// UNSAFETY: the slab is one mapping shared between safe code and I/O in flight. Safe code sees it only
// through `bytes`, `bytes_mut` and grant copies, all of which borrow the slab.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::XEN_PAGE_SIZE;
use crate::buddy::Buddy;
use crate::memory::Region;

/// Largest slab: 4 TiB.
const MAX_PAGES: u32 = 1 << 30;

/// Private memory of one ring. Pages cost host memory once they have been used; the most recently freed
/// are handed out first, so a ring with few requests stays in few (warm) pages.
#[derive(Debug)]
pub struct Slab {
    region: Region,
    pages: Buddy,
    id: u32,
}

/// Consecutive pages of one [`Slab`], in the hands of whoever holds this. It is not `Clone`: a run whose
/// memory the kernel may still touch is moved into the pending request and comes back with its
/// completion. Dropping it instead of [`Slab::free`] loses the pages until the slab goes.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a run that is dropped is lost to its slab"]
pub struct Run {
    start: u32,
    pages: u32,
    slab: u32,
}

impl Run {
    /// Number of 4096-byte pages.
    pub fn pages(&self) -> usize {
        self.pages as usize
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.pages().saturating_mul(XEN_PAGE_SIZE)
    }

    /// Never true: a run has at least one page.
    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// Byte offset of the run in its slab: the base of [`CopyOp::local`](crate::CopyOp).
    pub fn offset(&self) -> usize {
        (self.start as usize).saturating_mul(XEN_PAGE_SIZE)
    }
}

impl Slab {
    /// Reserves `bytes`, rounded up to a power of two of pages: then every run that is no longer than the
    /// slab fits once the slab is empty. EINVAL for 0 and for more than 4 TiB.
    pub fn reserve(bytes: usize) -> io::Result<Self> {
        static NEXT_ID: AtomicU32 = AtomicU32::new(0);
        let pages = bytes.div_ceil(XEN_PAGE_SIZE).checked_next_power_of_two();
        let pages = pages
            .and_then(|pages| u32::try_from(pages).ok())
            .unwrap_or(0);
        if bytes == 0 || !(1..=MAX_PAGES).contains(&pages) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let region = Region::anonymous((pages as usize).saturating_mul(XEN_PAGE_SIZE))?;
        Ok(Self {
            region,
            pages: Buddy::new(pages),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// Bytes reserved.
    pub fn size(&self) -> usize {
        self.pages.pages().saturating_mul(XEN_PAGE_SIZE)
    }

    /// Keeps every page that is touched from now on in memory, so that no request waits for the host's swap,
    /// which may be a guest's disk.
    pub fn lock(&self) -> io::Result<()> {
        self.region.lock()
    }

    /// A run of exactly `pages` pages, or None while no hole is large enough.
    pub fn alloc(&mut self, pages: usize) -> Option<Run> {
        let pages = u32::try_from(pages).ok()?;
        let start = self.pages.alloc(pages)?;
        Some(Run {
            start,
            pages,
            slab: self.id,
        })
    }

    /// Takes a run back. The caller's last use of its memory, the kernel's included, is over.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "giving a run back uses it up"
    )]
    pub fn free(&mut self, run: Run) {
        debug_assert_eq!(
            run.slab, self.id,
            "a run goes back to the slab it came from"
        );
        if run.slab == self.id {
            self.pages.free(run.start, run.pages);
        }
    }

    /// Size in pages.
    pub fn pages(&self) -> usize {
        self.pages.pages()
    }

    /// Pages not handed out; all of them once every run came back.
    pub fn free_pages(&self) -> usize {
        self.pages.free_pages() as usize
    }

    /// Address of byte `offset` of the run, for `len` bytes of I/O; None unless all of them are in the
    /// run. The memory stays mapped until the slab is dropped, which therefore comes after the last I/O.
    pub fn ptr(&self, run: &Run, offset: usize, len: usize) -> Option<*mut u8> {
        if run.slab != self.id || offset.checked_add(len)? > run.len() {
            return None;
        }
        Some(
            self.region
                .base()
                .wrapping_add(run.offset())
                .wrapping_add(offset),
        )
    }

    /// The whole slab as one address range, to register it as an I/O buffer.
    pub fn registration(&self) -> (*mut u8, usize) {
        (self.region.base(), self.region.len())
    }

    /// The run's memory.
    pub fn bytes(&self, run: &Run) -> &[u8] {
        match self.ptr(run, 0, run.len()) {
            // SAFETY: in range of the mapping (the run came from this slab's allocator), initialised by
            // the kernel to zero; whoever writes it otherwise holds `&mut Slab`, or is I/O whose owner
            // holds the run, so that nobody else has it to call this.
            Some(start) => unsafe { std::slice::from_raw_parts(start, run.len()) },
            None => &[],
        }
    }

    /// The run's memory, to be written.
    pub fn bytes_mut(&mut self, run: &mut Run) -> &mut [u8] {
        match self.ptr(run, 0, run.len()) {
            // SAFETY: as in `bytes`; `&mut self` excludes every other view.
            Some(start) => unsafe { std::slice::from_raw_parts_mut(start, run.len()) },
            None => &mut [],
        }
    }

    /// Address of `local..local + len` of the slab, for a grant copy, or None if it isn't all inside.
    pub(crate) fn window(&mut self, local: usize, len: usize) -> Option<&mut [u8]> {
        if !self.region.holds(local, len) {
            return None;
        }
        let start = self.region.base().wrapping_add(local);
        // SAFETY: inside the mapping (checked above); `&mut self` excludes every other view, and a caller
        // that copies into a run it handed to the kernel races with the kernel only, as any I/O buffer.
        Some(unsafe { std::slice::from_raw_parts_mut(start, len) })
    }
}
