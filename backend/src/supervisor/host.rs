//! Where the descriptors of a ring come from: the Xen devices of this host, or the mocked hypervisor.

use std::io;
use std::os::fd::OwnedFd;

use xenblk_grants::{DomId, sys};

use super::{SupervisorError, io_error};
use crate::message::HostKind;

/// Where grant and event channel descriptors come from.
#[derive(Clone, Debug)]
pub enum HostSource {
    /// `/dev/xen/gntdev` and `/dev/xen/evtchn` of this host.
    Xen,
    /// The mocked hypervisor listening on this socket.
    #[cfg(feature = "fake")]
    Fake(std::path::PathBuf),
}

/// A host found usable.
#[derive(Debug)]
pub(super) enum Host {
    Xen,
    #[cfg(feature = "fake")]
    Fake(xenblk_grants::fake::FakeHost),
}

/// `PV`, `PVH` or `HVM`.
const GUEST_TYPE: &str = "/sys/hypervisor/guest_type";

impl Host {
    /// Checks that the source can be used at all, so that a missing driver is one line at start and not
    /// one per disk.
    pub(super) fn find(source: &HostSource) -> Result<Self, SupervisorError> {
        match source {
            HostSource::Xen => {
                let failed = |device, module| {
                    let what = format!("{device} (is this a Xen domain with module {module}?)");
                    |error| io_error(what, error)
                };
                let gntdev = sys::open_gntdev().map_err(failed(sys::GNTDEV, "xen-gntdev"))?;
                if let Err(error) = sys::warm_up(&gntdev) {
                    tracing::info!("the first ring will be slow to connect: {error}");
                }
                // To see whether it is there; the domain does not matter.
                sys::open_evtchn(DomId(0)).map_err(failed(sys::EVTCHN, "xen-evtchn"))?;
                Ok(Self::Xen)
            }
            #[cfg(feature = "fake")]
            HostSource::Fake(socket) => {
                let failed =
                    |error| io_error(format!("mocked hypervisor {}", socket.display()), error);
                Ok(Self::Fake(
                    xenblk_grants::fake::FakeHost::connect(socket).map_err(failed)?,
                ))
            }
        }
    }

    /// Opens the gntdev and evtchn descriptors of one ring that serves `domid`.
    pub(super) fn open_devices(&self, domid: u16) -> io::Result<(OwnedFd, OwnedFd)> {
        match self {
            Self::Xen => Ok((sys::open_gntdev()?, sys::open_evtchn(DomId(domid))?)),
            #[cfg(feature = "fake")]
            Self::Fake(host) => Ok((host.open_gntdev()?, host.open_evtchn(DomId(domid))?)),
        }
    }

    /// Maptrack entries that one mapped page takes: a PV domain maps it for the kernel and for us.
    pub(super) fn maptrack_per_page(&self) -> u32 {
        match self {
            Self::Xen => match std::fs::read_to_string(GUEST_TYPE) {
                Ok(kind) if kind.trim_end() != "PV" => 1,
                _ => 2,
            },
            #[cfg(feature = "fake")]
            Self::Fake(_) => 1,
        }
    }

    /// How a worker has to use them.
    pub(super) fn kind(&self) -> HostKind {
        match self {
            Self::Xen => HostKind::Xen,
            #[cfg(feature = "fake")]
            Self::Fake(_) => HostKind::Fake,
        }
    }
}
