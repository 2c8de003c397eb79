//! `/dev/xen/gntdev`: one descriptor per ring, so that its list of maps is short and its lock shared with
//! nobody.
//!
//! A map is made in two steps, an ioctl that only notes the grants and an mmap that asks the
//! hypervisor. One bad grant fails the mmap with EINVAL, and so does a full maptrack; the map then
//! stays in the device's list, can't be tried again, and in a PVH dom0 keeps its good grants, so it is
//! taken back at once. A PV dom0 gives grants back when their address range goes, a PVH dom0 when the
//! map is taken back as well: dropping a [`Mapping`] does both, in that order, and so does a [`Window`]. No address of a mapping
//! is ever given to the kernel for I/O: a page pinned while its mapping goes breaks a PV dom0.
#![expect(unsafe_code, reason = "ioctls with structures of `abi` behind them")]
// UNSAFETY: each call passes the structure its opcode names; what a copy refers to is checked against the
// slab before, and the slab is borrowed for as long as the call takes.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::rc::Rc;

use rustix::mm::{MapFlags, ProtFlags};

use super::abi::{
    Copy, CopySegment, DEST_GREF, Foreign, GRANT_COPY, MAP_GRANT_REF, SOURCE_GREF, Side,
    UNMAP_GRANT_REF, Unmap,
};
use super::ioctl::ioctl;
use crate::memory::Region;
use crate::window::{MapDevice, add, subtract};
use crate::{
    Access, Chunk, CopyOp, CopyStatus, Direction, DomId, GrantRef, GrantTable, MapError, Mapping,
    Slab, StillThere, Window, XEN_PAGE_SIZE,
};

/// Grants in one call: the kernel's `gntdev.limit` as shipped.
const MAX_MAP: usize = 65536;

pub(super) struct Gntdev {
    fd: Rc<OwnedFd>,
    mapped: Rc<Cell<usize>>,
    /// Kept between calls, so that a copy allocates nothing once it has grown.
    segments: RefCell<Vec<CopySegment>>,
}

impl Gntdev {
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self {
            fd: Rc::new(fd),
            mapped: Rc::default(),
            segments: RefCell::default(),
        }
    }
}

impl GrantTable for Gntdev {
    fn map(&self, dom: DomId, refs: &[GrantRef], access: Access) -> Result<Mapping, MapError> {
        let count = match u32::try_from(refs.len()) {
            Ok(count @ 1..) if refs.len() <= MAX_MAP => count,
            _ => {
                return Err(MapError::Count {
                    count: refs.len(),
                    max: MAX_MAP,
                });
            }
        };
        let index = note_grants(self.fd.as_fd(), dom, refs, count)?;
        let len = refs.len().saturating_mul(XEN_PAGE_SIZE);
        match Region::shared(self.fd.as_fd(), index, len, access) {
            Ok(region) => {
                let (fd, mapped) = (Rc::clone(&self.fd), Rc::clone(&self.mapped));
                add(&mapped, refs.len());
                let pages = refs.len();
                Ok(Mapping::new(region, move || {
                    if take_back(fd.as_fd(), index, count).is_ok() {
                        subtract(&mapped, pages);
                    }
                }))
            }
            Err(error) => {
                let _ = take_back(self.fd.as_fd(), index, count);
                Err(MapError::of(error))
            }
        }
    }

    fn mapped(&self) -> usize {
        self.mapped.get()
    }

    fn map_chunk(
        &self,
        window: &mut Window,
        dom: DomId,
        refs: &[GrantRef],
    ) -> Result<Chunk, MapError> {
        window.map(self, dom, refs)
    }

    fn unmap_chunk(&self, window: &mut Window, chunk: Chunk) -> Result<(), StillThere> {
        window.unmap(self, chunk)
    }

    fn copy(&self, dom: DomId, slab: &mut Slab, ops: &mut [CopyOp]) -> io::Result<()> {
        let mut segments = self.segments.borrow_mut();
        segments.clear();
        for op in ops.iter() {
            segments.push(segment(dom, slab, op).ok_or(io::ErrorKind::InvalidInput)?);
        }
        let mut arg = Copy {
            count: u32::try_from(segments.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
            segments: segments.as_mut_ptr(),
        };
        let arg = ptr::from_mut(&mut arg).cast();
        // SAFETY: the structure of this opcode; its `count` segments live in `segments`, and each local
        // side lies inside `slab`, which is borrowed mutably until the call has returned.
        unsafe { ioctl(self.fd.as_fd(), GRANT_COPY, arg) }?;
        // After a failed call a segment can read "okay" although nothing was copied, so statuses are
        // taken over only here.
        for (op, segment) in ops.iter_mut().zip(segments.iter()) {
            op.status = CopyStatus(segment.status);
        }
        Ok(())
    }
}

impl MapDevice for Gntdev {
    fn note(&self, dom: DomId, refs: &[GrantRef]) -> io::Result<u64> {
        let count = u32::try_from(refs.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        note_grants(self.fd.as_fd(), dom, refs, count)
    }

    unsafe fn place(&self, index: u64, pages: usize, at: *mut u8) -> io::Result<()> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let len = pages.saturating_mul(XEN_PAGE_SIZE);
        // SAFETY: the caller owns the range, and nothing refers to it.
        unsafe { rustix::mm::mmap(at.cast(), len, prot, flags, &self.fd, index) }?;
        Ok(())
    }

    fn take_back(&self, index: u64, pages: usize) -> io::Result<()> {
        let count = u32::try_from(pages).map_err(|_| io::ErrorKind::InvalidInput)?;
        take_back(self.fd.as_fd(), index, count)
    }

    fn mapped(&self) -> &Cell<usize> {
        &self.mapped
    }
}

/// Lets the kernel set up what its first map of a boot needs, which can take 0.1 s. It asks the
/// hypervisor nothing: the grant needn't exist.
pub(super) fn warm_up(fd: BorrowedFd<'_>) -> io::Result<()> {
    let index = note_grants(fd, DomId(0), &[GrantRef(0)], 1)?;
    take_back(fd, index, 1)
}

/// Announces a map of `refs`; the offset to mmap it at. The hypervisor isn't asked yet.
fn note_grants(fd: BorrowedFd<'_>, dom: DomId, refs: &[GrantRef], count: u32) -> io::Result<u64> {
    // A MapHeader (count, pad, index) and its entries (domid, gref), in pairs of 32-bit words.
    let mut pairs: Vec<[u32; 2]> = Vec::with_capacity(refs.len().saturating_add(2));
    pairs.extend([[count, 0], [0, 0]]);
    pairs.extend(refs.iter().map(|gref| [u32::from(dom.0), gref.0]));
    // SAFETY: `pairs` is a MapHeader followed by `count` entries, as this opcode expects.
    unsafe { ioctl(fd, MAP_GRANT_REF, pairs.as_mut_ptr().cast()) }?;
    let [first, second] = pairs.get(1).copied().unwrap_or_default();
    let (first, second) = (u64::from(first), u64::from(second));
    Ok(if cfg!(target_endian = "little") {
        second << 32 | first
    } else {
        first << 32 | second
    })
}

/// Gives a map back. Never while its pages are in our address space: a PVH dom0 would keep the grants.
/// It fails only for an index and count that name no map.
fn take_back(fd: BorrowedFd<'_>, index: u64, count: u32) -> io::Result<()> {
    let mut arg = Unmap {
        index,
        count,
        pad: 0,
    };
    // SAFETY: the structure of this opcode.
    unsafe { ioctl(fd, UNMAP_GRANT_REF, ptr::from_mut(&mut arg).cast()) }.map(drop)
}

/// `op` as the device takes it; None if a side of it is out of range.
fn segment(dom: DomId, slab: &mut Slab, op: &CopyOp) -> Option<CopySegment> {
    let len = usize::from(op.len);
    if usize::from(op.offset).checked_add(len)? > XEN_PAGE_SIZE {
        return None;
    }
    let local = slab.window(op.local, len)?.as_mut_ptr();
    let local = Side {
        virt: local.expose_provenance() as u64,
    };
    let guest = Side {
        foreign: Foreign {
            gref: op.gref.0,
            offset: op.offset,
            domid: dom.0,
        },
    };
    let (source, dest, flags) = match op.direction {
        Direction::FromGuest => (guest, local, SOURCE_GREF),
        Direction::ToGuest => (local, guest, DEST_GREF),
    };
    Some(CopySegment {
        source,
        dest,
        len: op.len,
        flags,
        status: CopyStatus::GENERAL_ERROR.0,
    })
}
