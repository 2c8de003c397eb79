//! The real devices, `/dev/xen/gntdev` and `/dev/xen/evtchn`. A device is opened by the supervisor and
//! used, one descriptor a ring, by the worker it was passed to.
//!
//! What these devices do beyond their headers, and what differs between PV and PVH dom0 and between
//! kernels, stands where it matters: in [`gntdev`](self::gntdev) and [`EventChannels`].

mod abi;
mod evtchn;
mod gntdev;
mod ioctl;

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags};

use crate::{DomId, EventChannels, GrantTable};

/// Where dom0's grant device is.
pub const GNTDEV: &str = "/dev/xen/gntdev";
/// Where dom0's event-channel device is.
pub const EVTCHN: &str = "/dev/xen/evtchn";

/// Opens a grant device, for [`grant_table`].
pub fn open_gntdev() -> io::Result<OwnedFd> {
    open(GNTDEV)
}

/// Opens an event-channel device that can bind ports of `domid` alone, for [`event_channels`]. Domain
/// 0 (whose disks a driver domain may serve) can't be restricted to: the kernel refuses, and the
/// device stays unrestricted.
pub fn open_evtchn(domid: DomId) -> io::Result<OwnedFd> {
    let fd = open(EVTCHN)?;
    match evtchn::restrict(fd.as_fd(), domid) {
        Err(error) if domid == DomId(0) && error.kind() == io::ErrorKind::InvalidInput => Ok(fd),
        other => other.map(|()| fd),
    }
}

/// Spares the first ring of a boot what the kernel has to set up for its first map; worth a try, no more.
pub fn warm_up(gntdev: &OwnedFd) -> io::Result<()> {
    gntdev::warm_up(gntdev.as_fd())
}

/// Uses a descriptor of [`open_gntdev`]. One user at a time.
pub fn grant_table(fd: OwnedFd) -> Box<dyn GrantTable> {
    Box::new(gntdev::Gntdev::new(fd))
}

/// Uses a descriptor of [`open_evtchn`].
pub fn event_channels(fd: OwnedFd) -> Box<dyn EventChannels> {
    Box::new(evtchn::Evtchn::new(fd))
}

fn open(path: &str) -> io::Result<OwnedFd> {
    // Non-blocking, so that an io_uring arms a poll for the read of an event instead of parking a thread.
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}
