//! A ring's own address range for persistent grants: reserved once, with nothing behind it, and filled
//! chunk by chunk. It is also the pool of its free pages. Which grants are mapped, and for how long, is
//! `persistent`'s business; what a device does to map them, `sys`'s and `fake`'s.
//!
//! The range begins at a multiple of 2 MiB, so that its page tables, and the locks on them in Linux and
//! Xen, are no other ring's. No page of it ever sees mprotect, madvise or mremap: any of them takes a
//! PV dom0's mappings away for good. No address of it is ever given to the kernel for I/O.
#![expect(
    unsafe_code,
    reason = "mappings at addresses of our choice, and copies to and from what they show"
)]
// UNSAFETY: a `Window` owns its range; each page is either reserved (free in the allocator) or part of
// exactly one `Chunk`, which can't be copied, and only pages of a chunk are ever read or written.

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::buddy::Buddy;
use crate::memory::{load_racing, store_racing};
use crate::{DomId, GrantRef, MapError, XEN_PAGE_SIZE};

/// Most grants in one chunk. A chunk of 32 costs a seventeenth of a page mapped alone, and larger ones
/// save little more.
pub const MAX_CHUNK: usize = 32;
/// Largest window: 256 MiB.
const MAX_PAGES: u32 = 1 << 16;
/// What one page table maps, in bytes.
const TABLE_SPAN: usize = 2 << 20;
/// Most chunks of a process. Each is a mapping of its own and cuts the reserved range in two; the kernel
/// allows 65530 mappings (`vm.max_map_count`), and refuses the next in the middle of a change.
const MAX_CHUNKS: usize = 24_000;

static CHUNKS: AtomicUsize = AtomicUsize::new(0);

/// See the module's head.
#[derive(Debug)]
pub struct Window {
    base: NonNull<u8>,
    pages: u32,
    free: Buddy,
    id: u32,
    /// Chunks not given back.
    chunks: usize,
    /// Pages that are not ours any more: somebody else mapped something there between a failed map
    /// and our reserving them again. They are never touched.
    lost: Vec<Range<u32>>,
}

/// Grants mapped together into a [`Window`], contiguous, in the order they were given; given back
/// together by [`GrantTable::unmap_chunk`](crate::GrantTable::unmap_chunk). It is not `Clone`: having it
/// is what makes the pages accessible. Dropping it instead leaves them mapped until the window goes.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a chunk that is dropped stays mapped until its window goes"]
pub struct Chunk {
    start: u32,
    pages: u32,
    window: u32,
    index: u64,
}

/// A chunk that could not be given back, because the kernel had no memory for it. It is still mapped.
#[derive(Debug, thiserror::Error)]
#[error("giving grants back: {error}")]
pub struct StillThere {
    /// What is still mapped.
    pub chunk: Chunk,
    /// Why.
    #[source]
    pub error: io::Error,
}

/// What a device does to map grants, step by step; [`Window`] knows the order.
pub(crate) trait MapDevice {
    /// Notes a map of `refs` (1 to [`MAX_CHUNK`]); asks the hypervisor nothing yet. The map's index.
    fn note(&self, dom: DomId, refs: &[GrantRef]) -> io::Result<u64>;

    /// Puts the `pages` pages of a noted map at `at`, writable, replacing what is there; all or none.
    /// A failure may leave nothing at all there, and uses the map up.
    ///
    /// # Safety
    /// `at..at + pages` is page-aligned address space that the caller owns and that nothing refers to.
    unsafe fn place(&self, index: u64, pages: usize, at: *mut u8) -> io::Result<()>;

    /// Gives a noted map back, placed or not. It fails only if the device knows of no such map.
    fn take_back(&self, index: u64, pages: usize) -> io::Result<()>;

    /// Pages mapped and not given back.
    fn mapped(&self) -> &Cell<usize>;
}

pub(crate) fn add(count: &Cell<usize>, n: usize) {
    count.set(count.get().saturating_add(n));
}

pub(crate) fn subtract(count: &Cell<usize>, n: usize) {
    count.set(count.get().saturating_sub(n));
}

// SAFETY: the range belongs to the owner alone and isn't tied to a thread.
unsafe impl Send for Window {}

impl Window {
    /// Reserves address space for `pages` pages (1 to 65536); no memory. EINVAL: out of range.
    pub fn reserve(pages: usize) -> io::Result<Self> {
        static NEXT_ID: AtomicU32 = AtomicU32::new(0);
        let count = u32::try_from(pages).unwrap_or(0);
        if !(1..=MAX_PAGES).contains(&count) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let bytes = pages.saturating_mul(XEN_PAGE_SIZE);
        let whole = bytes.saturating_add(TABLE_SPAN);
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let start =
            unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), whole, NOTHING, RESERVED) }?;
        let start = start.cast::<u8>();
        let before = start.align_offset(TABLE_SPAN).min(TABLE_SPAN);
        let base = start.wrapping_add(before);
        // What is reserved beyond the window goes back. If that fails it stays reserved, for nothing.
        for (at, len) in [
            (start, before),
            (base.wrapping_add(bytes), TABLE_SPAN.saturating_sub(before)),
        ] {
            if len > 0 {
                // SAFETY: part of the mapping made above, outside the window, and nobody has seen it.
                let _ = unsafe { rustix::mm::munmap(at.cast(), len) };
            }
        }
        Ok(Self {
            base: NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?,
            pages: count,
            free: Buddy::new(count),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            chunks: 0,
            lost: Vec::new(),
        })
    }

    /// Size in pages.
    pub fn pages(&self) -> usize {
        self.pages as usize
    }

    /// Pages that are part of no chunk; all of them once every chunk came back.
    pub fn free_pages(&self) -> usize {
        self.free.free_pages() as usize
    }

    /// Copies `to.len()` bytes from byte `offset` of the chunk, however the guest changes them meanwhile.
    /// False: they aren't all in the chunk, or it is another window's, and nothing is copied.
    #[must_use]
    pub fn copy_out(&self, chunk: &Chunk, offset: usize, to: &mut [u8]) -> bool {
        match self.inside(chunk, offset, to.len()) {
            // SAFETY: `to.len()` bytes of a chunk, which is mapped, as it hasn't been given back.
            Some(from) => unsafe { load_racing(from, to) },
            None => return false,
        }
        true
    }

    /// Copies `from` to byte `offset` of the chunk; not a byte beyond. False as for
    /// [`copy_out`](Self::copy_out).
    #[must_use]
    pub fn copy_in(&self, chunk: &Chunk, offset: usize, from: &[u8]) -> bool {
        match self.inside(chunk, offset, from.len()) {
            // SAFETY: as in `copy_out`; chunks are mapped writable.
            Some(to) => unsafe { store_racing(to, from) },
            None => return false,
        }
        true
    }

    /// What [`GrantTable::map_chunk`](crate::GrantTable::map_chunk) does on any device.
    pub(crate) fn map(
        &mut self,
        device: &impl MapDevice,
        dom: DomId,
        refs: &[GrantRef],
    ) -> Result<Chunk, MapError> {
        let (count, max) = (refs.len(), MAX_CHUNK);
        if !(1..=max).contains(&count) {
            return Err(MapError::Count { count, max });
        }
        let pages = u32::try_from(count).map_err(|_| MapError::Count { count, max })?;
        if CHUNKS.load(Ordering::Relaxed) >= MAX_CHUNKS {
            return Err(MapError::NoRoom);
        }
        let start = self.free.alloc(pages).ok_or(MapError::NoRoom)?;
        let chunk = self.place(device, dom, refs, start, pages)?;
        add(device.mapped(), count);
        self.chunks = self.chunks.saturating_add(1);
        CHUNKS.fetch_add(1, Ordering::Relaxed);
        Ok(chunk)
    }

    /// Maps `refs` at pages just taken from the allocator; they are free again after a failure.
    fn place(
        &mut self,
        device: &impl MapDevice,
        dom: DomId,
        refs: &[GrantRef],
        start: u32,
        pages: u32,
    ) -> Result<Chunk, MapError> {
        let index = match device.note(dom, refs) {
            Ok(index) => index,
            Err(error) => {
                self.free.free(start, pages);
                return Err(error.into());
            }
        };
        // SAFETY: the pages are the window's, and free: no chunk has them.
        match unsafe { device.place(index, refs.len(), self.address(start)) } {
            Ok(()) => Ok(Chunk {
                start,
                pages,
                window: self.id,
                index,
            }),
            Err(error) => {
                // First of all: until then anybody's mmap may land there.
                match self.reserve_again(start, pages) {
                    Ok(()) => self.free.free(start, pages),
                    Err(_) => self.lost.push(start..start.saturating_add(pages)),
                }
                let _ = device.take_back(index, refs.len());
                Err(MapError::of(error))
            }
        }
    }

    /// What [`GrantTable::unmap_chunk`](crate::GrantTable::unmap_chunk) does on any device.
    pub(crate) fn unmap(
        &mut self,
        device: &impl MapDevice,
        chunk: Chunk,
    ) -> Result<(), StillThere> {
        if chunk.window != self.id {
            let error = io::ErrorKind::InvalidInput.into();
            return Err(StillThere { chunk, error });
        }
        let flags = RESERVED | MapFlags::FIXED;
        let (at, len) = (self.address(chunk.start), bytes(chunk.pages));
        // SAFETY: the pages are the window's and the chunk's, which nobody can reach again: it is used
        // up here.
        if let Err(error) = unsafe { rustix::mm::mmap_anonymous(at.cast(), len, NOTHING, flags) } {
            let error = error.into();
            return Err(StillThere { chunk, error });
        }
        // Only now: a PVH dom0 keeps the grants of a map whose pages are still in an address space.
        let pages = chunk.pages as usize;
        if device.take_back(chunk.index, pages).is_ok() {
            subtract(device.mapped(), pages);
        }
        self.free.free(chunk.start, chunk.pages);
        self.chunks = self.chunks.saturating_sub(1);
        CHUNKS.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    /// Fills the hole that a failed map leaves, before anything else can be mapped there.
    fn reserve_again(&self, start: u32, pages: u32) -> Result<(), Errno> {
        let flags = RESERVED | MapFlags::FIXED_NOREPLACE;
        let (at, len) = (self.address(start), bytes(pages));
        // SAFETY: FIXED_NOREPLACE replaces nothing.
        unsafe { rustix::mm::mmap_anonymous(at.cast(), len, NOTHING, flags) }.map(drop)
    }

    fn address(&self, page: u32) -> *mut u8 {
        self.base.as_ptr().wrapping_add(bytes(page))
    }

    /// Where byte `offset` of a chunk of this window is, if `len` bytes fit behind it.
    fn inside(&self, chunk: &Chunk, offset: usize, len: usize) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        (chunk.window == self.id && end <= bytes(chunk.pages))
            .then(|| self.address(chunk.start).wrapping_add(offset))
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        CHUNKS.fetch_sub(self.chunks, Ordering::Relaxed);
        let mut start = 0;
        self.lost.sort_unstable_by_key(|lost| lost.start);
        let end = self.pages..self.pages;
        for lost in self.lost.iter().chain([&end]) {
            let len = bytes(lost.start.saturating_sub(start));
            if len > 0 {
                // SAFETY: pages of the window up to the next that were lost; references into them
                // can't outlive `self`.
                let _ = unsafe { rustix::mm::munmap(self.address(start).cast(), len) };
            }
            start = lost.end;
        }
    }
}

impl Chunk {
    /// Number of granted pages.
    pub fn pages(&self) -> usize {
        self.pages as usize
    }

    /// The window's page at which it starts.
    pub fn start(&self) -> usize {
        self.start as usize
    }
}

const NOTHING: ProtFlags = ProtFlags::empty();
const RESERVED: MapFlags = MapFlags::PRIVATE.union(MapFlags::NORESERVE);

fn bytes(pages: u32) -> usize {
    (pages as usize).saturating_mul(XEN_PAGE_SIZE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that refuses every map, and what is found in the hole that leaves.
    struct Refusing {
        mapped: Cell<usize>,
        /// Somebody maps a page of their own there before the hole is reserved again.
        occupied: Cell<Option<*mut u8>>,
        occupies: bool,
        given_back: Cell<usize>,
    }

    impl MapDevice for Refusing {
        fn note(&self, _: DomId, _: &[GrantRef]) -> io::Result<u64> {
            Ok(7)
        }

        unsafe fn place(&self, index: u64, pages: usize, at: *mut u8) -> io::Result<()> {
            assert_eq!(index, 7);
            let len = pages * XEN_PAGE_SIZE;
            // SAFETY: the caller owns the range.
            unsafe { rustix::mm::munmap(at.cast(), len) }.unwrap();
            if self.occupies {
                let prot = ProtFlags::READ | ProtFlags::WRITE;
                let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
                // SAFETY: FIXED_NOREPLACE replaces nothing.
                let page =
                    unsafe { rustix::mm::mmap_anonymous(at.cast(), XEN_PAGE_SIZE, prot, flags) };
                self.occupied.set(Some(page.unwrap().cast()));
            }
            Err(Errno::INVAL.into())
        }

        fn take_back(&self, index: u64, pages: usize) -> io::Result<()> {
            assert_eq!(index, 7);
            self.given_back.set(self.given_back.get() + pages);
            Ok(())
        }

        fn mapped(&self) -> &Cell<usize> {
            &self.mapped
        }
    }

    fn refusing(occupies: bool) -> Refusing {
        Refusing {
            mapped: Cell::new(0),
            occupied: Cell::new(None),
            occupies,
            given_back: Cell::new(0),
        }
    }

    #[test]
    fn a_window_begins_where_a_page_table_does() {
        for pages in [1, 511, 512, 2048] {
            let window = Window::reserve(pages).unwrap();
            assert_eq!(window.base.as_ptr().addr() % TABLE_SPAN, 0);
            assert_eq!((window.pages(), window.free_pages()), (pages, pages));
        }
        for pages in [0, 65_537, usize::MAX] {
            assert!(Window::reserve(pages).is_err());
        }
    }

    #[test]
    fn a_hole_is_reserved_again_and_its_pages_are_free() {
        let device = refusing(false);
        let mut window = Window::reserve(8).unwrap();
        for _ in 0..3 {
            let refused = window.map(&device, DomId(1), &[GrantRef(1); 8]);
            assert!(matches!(refused, Err(MapError::Refused)));
            assert_eq!(window.free_pages(), 8);
        }
        assert_eq!((device.given_back.get(), device.mapped.get()), (24, 0));
    }

    /// Another thread's mapping, in a process that has one.
    #[test]
    fn a_hole_that_somebody_else_fills_is_theirs() {
        let device = refusing(true);
        let mut window = Window::reserve(8).unwrap();
        assert!(window.map(&device, DomId(1), &[GrantRef(1); 4]).is_err());
        assert_eq!(window.free_pages(), 4);
        assert!(window.map(&device, DomId(1), &[GrantRef(1); 4]).is_err());
        let none = window.map(&device, DomId(1), &[GrantRef(1)]);
        assert!(matches!(none, Err(MapError::NoRoom)));
        let theirs = device.occupied.get().unwrap();
        drop(window);
        // SAFETY: a page mapped above, which nobody else knows of.
        unsafe { theirs.write(5) };
        // SAFETY: as above, and last used here.
        unsafe { rustix::mm::munmap(theirs.cast(), XEN_PAGE_SIZE) }.unwrap();
    }
}
