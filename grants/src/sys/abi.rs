//! The kernel's interface to `/dev/xen/gntdev` and `/dev/xen/evtchn`: structures and ioctl numbers of
//! `xen/gntdev.h` and `xen/evtchn.h` (Linux uapi), and nothing else.

use std::mem::{align_of, offset_of, size_of};

use rustix::ioctl::Opcode;
use xen_sys::{domid_t, evtchn_port_t};

/// `_IOC(_IOC_NONE, kind, nr, size)`: these devices encode no direction.
const fn opcode(kind: u8, nr: u8, size: usize) -> Opcode {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "sizes of the structures below, asserted there"
    )]
    let size = size as Opcode;
    (size << 16) | ((kind as Opcode) << 8) | nr as Opcode
}

/// One grant to map.
#[repr(C)]
struct GrantEntry {
    _domid: u32,
    _gref: u32,
}

/// `ioctl_gntdev_map_grant_ref` without its entries, which follow it in memory.
#[repr(C)]
struct MapHeader {
    _count: u32,
    _pad: u32,
    /// Filled in: the offset to mmap the grants at.
    index: u64,
}

/// `ioctl_gntdev_unmap_grant_ref`.
#[repr(C)]
pub(super) struct Unmap {
    pub(super) index: u64,
    pub(super) count: u32,
    pub(super) pad: u32,
}

/// A granted page as a side of a copy.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Foreign {
    pub(super) gref: u32,
    pub(super) offset: u16,
    pub(super) domid: domid_t,
}

/// A side of a copy; the segment's flags tell which member counts.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) union Side {
    pub(super) virt: u64,
    pub(super) foreign: Foreign,
}

/// `gntdev_grant_copy_segment`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CopySegment {
    pub(super) source: Side,
    pub(super) dest: Side,
    pub(super) len: u16,
    pub(super) flags: u16,
    pub(super) status: i16,
}

/// `GNTCOPY_source_gref` (grant_table.h).
pub(super) const SOURCE_GREF: u16 = 1;
/// `GNTCOPY_dest_gref`.
pub(super) const DEST_GREF: u16 = 2;

/// `ioctl_gntdev_grant_copy`.
#[repr(C)]
pub(super) struct Copy {
    pub(super) count: u32,
    pub(super) segments: *mut CopySegment,
}

/// `ioctl_evtchn_bind_interdomain`.
#[repr(C)]
pub(super) struct BindInterdomain {
    pub(super) remote_domain: u32,
    pub(super) remote_port: evtchn_port_t,
}

/// `ioctl_evtchn_unbind` and `ioctl_evtchn_notify`.
#[repr(C)]
pub(super) struct OnePort {
    pub(super) port: evtchn_port_t,
}

/// `ioctl_evtchn_restrict_domid`.
#[repr(C)]
pub(super) struct RestrictDomid {
    pub(super) domid: domid_t,
}

pub(super) const MAP_GRANT_REF: Opcode =
    opcode(b'G', 0, size_of::<MapHeader>() + size_of::<GrantEntry>());
pub(super) const UNMAP_GRANT_REF: Opcode = opcode(b'G', 1, size_of::<Unmap>());
pub(super) const GRANT_COPY: Opcode = opcode(b'G', 8, size_of::<Copy>());
pub(super) const BIND_INTERDOMAIN: Opcode = opcode(b'E', 1, size_of::<BindInterdomain>());
pub(super) const UNBIND: Opcode = opcode(b'E', 3, size_of::<OnePort>());
pub(super) const NOTIFY: Opcode = opcode(b'E', 4, size_of::<OnePort>());
pub(super) const RESTRICT_DOMID: Opcode = opcode(b'E', 6, size_of::<RestrictDomid>());

// The numbers, as a C compiler computes them from the headers; each holds its structure's size.
const _: () = assert!(MAP_GRANT_REF == 0x0018_4700);
const _: () = assert!(UNMAP_GRANT_REF == 0x0010_4701);
const _: () = assert!(GRANT_COPY == 0x0010_4708);
const _: () = assert!(BIND_INTERDOMAIN == 0x0008_4501);
const _: () = assert!(UNBIND == 0x0004_4503);
const _: () = assert!(NOTIFY == 0x0004_4504);
const _: () = assert!(RESTRICT_DOMID == 0x0002_4506);
// The entries follow the header without a gap.
const _: () = assert!(size_of::<MapHeader>().is_multiple_of(align_of::<GrantEntry>()));
const _: () = assert!(offset_of!(MapHeader, index) == 8);
const _: () = assert!(size_of::<CopySegment>() == 24);
const _: () = assert!(offset_of!(CopySegment, dest) == 8);
const _: () = assert!(offset_of!(CopySegment, len) == 16);
const _: () = assert!(offset_of!(CopySegment, flags) == 18);
const _: () = assert!(offset_of!(CopySegment, status) == 20);
const _: () = assert!(offset_of!(Foreign, offset) == 4);
const _: () = assert!(offset_of!(Foreign, domid) == 6);
