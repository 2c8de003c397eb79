//! `FakeXen`: grants and event channels without Xen, across processes. Only enough for this backend;
//! not a model of Xen, and no security boundary towards the processes that hold its descriptors.
//!
//! It replaces the ioctl, not the mmap: guest memory is a memfd, mappings are real mappings of it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::AtomicU32;

use crate::{CopyStatus, DomId, EventChannels, GrantRef, GrantTable, Port};

/// The mocked hypervisor; it and its guests live in the process that started it. Dropping it closes every
/// device.
#[derive(Debug)]
pub struct FakeXen {}

impl FakeXen {
    /// Starts the hypervisor's thread.
    pub fn start() -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Lets other processes open devices through a socket at `path`, see [`FakeHost::connect`].
    pub fn listen(&self, path: &Path) -> io::Result<()> {
        let _ = path;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// A way to open devices from this process.
    pub fn host(&self) -> io::Result<FakeHost> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Creates a domain with `pages` pages of 4096 bytes beside its grant table. EEXIST: a domain of
    /// this number is alive.
    pub fn domain(&self, domid: DomId, pages: usize) -> io::Result<FakeDomain> {
        let _ = (domid, pages);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Destroys a domain: its ports close at once; it stays a zombie until nothing of it is mapped.
    pub fn kill_domain(&self, domid: DomId) {
        let _ = domid;
    }

    /// What is mapped and bound, once everything that dead processes held has been given back.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::default()
    }

    /// The failures to inject.
    pub fn faults(&self) -> Faults {
        Faults {}
    }
}

/// Failures to inject; they apply to every device of the hypervisor, in every process.
#[derive(Clone, Debug)]
pub struct Faults {}

impl Faults {
    /// The `nth` map call from now (1 is the next) fails as if one of its grants were bad.
    pub fn fail_map(&self, nth: u64) {
        let _ = nth;
    }

    /// The `nth` copied segment from now (1 is the next) is not copied and gets `status`.
    pub fn fail_copy(&self, nth: u64, status: CopyStatus) {
        let _ = (nth, status);
    }

    /// While true, every copy stops where it holds its grant and has not moved a byte.
    pub fn hold_copies(&self, hold: bool) {
        let _ = hold;
    }

    /// Copies stopped by [`hold_copies`](Self::hold_copies) so far.
    pub fn copies_held(&self) -> u64 {
        0
    }

    /// Pages that may be mapped at a time, over all domains; a map beyond fails as a bad grant does.
    pub fn limit_maptrack(&self, pages: u64) {
        let _ = pages;
    }
}

/// The hypervisor's view of who holds what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Granted pages mapped by device holders, by granting domain; domains without any are left out.
    pub mappings: BTreeMap<DomId, usize>,
    /// Every open port, of guests and of the backend domain, in order.
    pub ports: Vec<PortInfo>,
    /// Domains that are dead but still mapped.
    pub zombies: Vec<DomId>,
}

/// One open port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PortInfo {
    /// The domain it belongs to.
    pub domid: DomId,
    /// Its number there.
    pub port: Port,
    /// What it is connected to.
    pub state: PortState,
}

/// What a port is connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PortState {
    /// Nothing; `remote` may bind it, or has lost its other end.
    Unbound {
        /// The only domain that may bind it.
        remote: DomId,
    },
    /// A port of another domain.
    Interdomain {
        /// The other end's domain.
        remote: DomId,
        /// The other end's number there.
        port: Port,
    },
}

/// A guest: its memory, grant table and ports. Clones are the same domain; every method may be called from
/// any thread.
#[derive(Clone, Debug)]
pub struct FakeDomain {}

/// A page number within a domain's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gfn(pub u32);

/// `end_access` was refused: the page is mapped or being copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the grant is still in use")]
pub struct StillMapped;

impl FakeDomain {
    /// The domain's number.
    pub fn domid(&self) -> DomId {
        DomId(0)
    }

    /// Whether the domain was destroyed; its threads should stop.
    pub fn is_dead(&self) -> bool {
        true
    }

    /// A free page, zeroed; None when memory is used up.
    pub fn alloc_page(&self) -> Option<Gfn> {
        None
    }

    /// `count` free pages side by side, zeroed, for a multi-page ring; the first is returned.
    pub fn alloc_pages(&self, count: usize) -> Option<Gfn> {
        let _ = count;
        None
    }

    /// Gives one page back.
    pub fn free_page(&self, page: Gfn) {
        let _ = page;
    }

    /// The words of `count` pages starting at `first`; empty if they aren't all the domain's.
    pub fn words(&self, first: Gfn, count: usize) -> DomainWords {
        let _ = (first, count);
        DomainWords {}
    }

    /// Copies out of a page. Bytes outside the page are left alone, and false returned.
    pub fn read(&self, page: Gfn, offset: usize, to: &mut [u8]) -> bool {
        let _ = (page, offset, to);
        false
    }

    /// Copies into a page. False, and nothing is written, if the bytes aren't all inside the page.
    pub fn write(&self, page: Gfn, offset: usize, from: &[u8]) -> bool {
        let _ = (page, offset, from);
        false
    }

    /// Grants `page` to domain `to`; None when the grant table is full.
    pub fn grant(&self, page: Gfn, to: DomId, readonly: bool) -> Option<GrantRef> {
        let _ = (page, to, readonly);
        None
    }

    /// Ends a grant and frees its reference, as a guest does: refused while the page is in use.
    pub fn end_access(&self, gref: GrantRef) -> Result<(), StillMapped> {
        let _ = gref;
        Err(StillMapped)
    }

    /// Overwrites a grant whatever its state, as a hostile or dying guest does. The reference is not
    /// reused; what is mapped stays mapped.
    pub fn revoke(&self, gref: GrantRef) {
        let _ = gref;
    }

    /// A new port that `remote` may bind.
    pub fn alloc_unbound(&self, remote: DomId) -> io::Result<Port> {
        let _ = remote;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// An eventfd (non-blocking) that is readable while an event of `port` is pending; reading it
    /// acknowledges. It also wakes when the port or the domain goes. None: no such port.
    pub fn port_fd(&self, port: Port) -> Option<OwnedFd> {
        let _ = port;
        None
    }

    /// Sends an event; dropped when nobody is bound or the port is closed.
    pub fn notify(&self, port: Port) {
        let _ = port;
    }

    /// Closes a port; the backend's end becomes unbound, without an event.
    pub fn close(&self, port: Port) {
        let _ = port;
    }
}

/// Words of a domain's pages; keeps the memory alive, whatever becomes of the domain.
#[derive(Clone, Debug)]
pub struct DomainWords {}

impl AsRef<[AtomicU32]> for DomainWords {
    fn as_ref(&self) -> &[AtomicU32] {
        &[]
    }
}

/// What the supervisor opens devices with. A device is one descriptor, to be passed to whoever uses it; the
/// hypervisor drops everything it held once its last copy is closed, however its holder died.
#[derive(Debug)]
pub struct FakeHost {}

impl FakeHost {
    /// Connects to a hypervisor that [listens](FakeXen::listen) at `path`.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let _ = path;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Opens a grant device, for [`grant_table`].
    pub fn open_gntdev(&self) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Opens an event-channel device restricted to ports of `domid` (domain 0: unrestricted), for
    /// [`event_channels`]. Non-blocking.
    pub fn open_evtchn(&self, domid: DomId) -> io::Result<OwnedFd> {
        let _ = domid;
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Uses a descriptor of [`FakeHost::open_gntdev`]. One user at a time.
pub fn grant_table(fd: OwnedFd) -> io::Result<Box<dyn GrantTable>> {
    drop(fd);
    Err(io::ErrorKind::Unsupported.into())
}

/// Uses a descriptor of [`FakeHost::open_evtchn`].
pub fn event_channels(fd: OwnedFd) -> io::Result<Box<dyn EventChannels>> {
    drop(fd);
    Err(io::ErrorKind::Unsupported.into())
}
