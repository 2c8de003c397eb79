//! Where the descriptors of a ring come from: the Xen devices of this host, or the mocked hypervisor.

#[cfg(feature = "fake")]
use std::path::PathBuf;

/// Where grant and event channel descriptors come from.
#[derive(Clone, Debug)]
pub enum HostSource {
    /// `/dev/xen/gntdev` and `/dev/xen/evtchn`.
    Xen,
    /// The mocked hypervisor listening on this socket.
    #[cfg(feature = "fake")]
    Fake(PathBuf),
}
