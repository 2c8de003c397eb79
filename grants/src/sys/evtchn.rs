//! `/dev/xen/evtchn`: one descriptor per ring, so that its `bind_mutex`, which every call takes, is
//! shared with nobody.
#![expect(unsafe_code, reason = "ioctls with a structure of `abi` behind them")]
// UNSAFETY: each call passes a pointer to the structure its opcode names, on the stack of the caller.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;

use rustix::ioctl::Opcode;

use super::abi::{
    BIND_INTERDOMAIN, BindInterdomain, NOTIFY, OnePort, RESTRICT_DOMID, RestrictDomid, UNBIND,
};
use super::ioctl::ioctl;
use crate::{DomId, EventChannels, Port};

pub(super) struct Evtchn {
    fd: OwnedFd,
}

impl Evtchn {
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self { fd }
    }

    fn on_port(&self, opcode: Opcode, port: Port) -> io::Result<c_int> {
        let mut arg = OnePort { port: port.0 };
        // SAFETY: NOTIFY and UNBIND take one port.
        unsafe { ioctl(self.fd.as_fd(), opcode, ptr::from_mut(&mut arg).cast()) }
    }
}

impl EventChannels for Evtchn {
    fn bind_interdomain(&self, dom: DomId, remote: Port) -> io::Result<Port> {
        let mut arg = BindInterdomain {
            remote_domain: u32::from(dom.0),
            remote_port: remote.0,
        };
        let arg = ptr::from_mut(&mut arg).cast();
        // SAFETY: the structure of this opcode.
        let local = unsafe { ioctl(self.fd.as_fd(), BIND_INTERDOMAIN, arg) }?;
        // The kernel answers a failed bind with an error, never with a negative port.
        u32::try_from(local)
            .map(Port)
            .map_err(|_| io::ErrorKind::InvalidData.into())
    }

    fn notify(&self, port: Port) -> io::Result<()> {
        self.on_port(NOTIFY, port).map(drop)
    }

    fn unmask(&self, port: Port) -> io::Result<()> {
        let written = rustix::io::write(&self.fd, &port.0.to_ne_bytes())?;
        // The device takes whole ports or fails; a port that isn't ours is skipped silently.
        debug_assert_eq!(written, size_of::<u32>());
        Ok(())
    }

    fn unbind(&self, port: Port) {
        let _ = self.on_port(UNBIND, port);
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Leaves `fd` able to bind ports of `dom` only, for good. EINVAL: domain 0 or a reserved number.
pub(super) fn restrict(fd: BorrowedFd<'_>, dom: DomId) -> io::Result<()> {
    let mut arg = RestrictDomid { domid: dom.0 };
    // SAFETY: the structure of this opcode.
    unsafe { ioctl(fd, RESTRICT_DOMID, ptr::from_mut(&mut arg).cast()) }.map(drop)
}
