//! Granted pages in our address space, for as long as the grants stay mapped.

use std::fmt;
use std::sync::atomic::AtomicU32;

use crate::memory::Region;
use crate::{Access, XEN_PAGE_SIZE};

/// Mapped grants, contiguous, given back on drop. The guest may write them at any moment, so they are
/// seen as words or copied, never as a byte slice.
pub struct Mapping {
    // Dropped in this order: the pages leave our address space before the grants are given back.
    region: Region,
    _unmap: OnDrop,
}

impl Mapping {
    /// `unmap` gives the grants back once the pages are no longer in our address space.
    pub(crate) fn new(region: Region, unmap: impl FnOnce() + 'static) -> Self {
        Self {
            region,
            _unmap: OnDrop(Some(Box::new(unmap))),
        }
    }

    /// Number of granted pages.
    pub fn pages(&self) -> usize {
        self.region.len() / XEN_PAGE_SIZE
    }

    /// Whether stores are possible.
    pub fn access(&self) -> Access {
        self.region.access()
    }

    /// Copies from the guest's pages, starting at byte `offset`.
    pub fn copy_out(&self, offset: usize, to: &mut [u8]) -> Result<(), OutOfRange> {
        self.region
            .copy_out(offset, to)
            .then_some(())
            .ok_or(OutOfRange)
    }

    /// Copies into the guest's pages, starting at byte `offset`; a read-only mapping refuses.
    pub fn copy_in(&self, offset: usize, from: &[u8]) -> Result<(), OutOfRange> {
        self.region
            .copy_in(offset, from)
            .then_some(())
            .ok_or(OutOfRange)
    }
}

/// The mapping as 32-bit words, page after page; empty if it was mapped read-only.
impl AsRef<[AtomicU32]> for Mapping {
    fn as_ref(&self) -> &[AtomicU32] {
        self.region.words32()
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping")
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}

/// The bytes asked for are not all inside, or the mapping can't be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("outside the mapping, or not writable")]
pub struct OutOfRange;

struct OnDrop(Option<Box<dyn FnOnce()>>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        if let Some(unmap) = self.0.take() {
            unmap();
        }
    }
}
