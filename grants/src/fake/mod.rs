//! `FakeXen`: grants and event channels without Xen, across processes. Only enough for this backend: not a
//! model of Xen, and no security boundary towards the processes that hold its descriptors.
//!
//! It replaces the ioctl, not the mmap. A device (gntdev, evtchn) is a connected Unix socket whose other
//! end the hypervisor holds; end of file means that the last copy was closed, however the holder died, and
//! then its mappings are dropped and its ports unbound, as Xen does. Guest memory is a memfd with the v1
//! grant table in it; a mapping is a mapping of that memfd, a grant copy a copy in the caller, both after
//! the claim that Xen makes on the guest's entry. An event-channel device is read and written like the real
//! one, by `read`, `write` or io_uring; an event to the guest is one write to the port's eventfd.
//!
//! What it doesn't do: other backend domains than 0, transitive and v2 grants, virtual interrupts,
//! grant-table growth, unmap notifications, EFBIG after an overflow (a full queue delays events instead).

mod channel;
mod client;
mod device;
mod domain;
mod faults;
mod grants;
mod hypervisor;
mod wire;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use rustix::event::EventfdFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

pub use device::{FakeHost, event_channels, grant_table};
pub use domain::{DomainWords, FakeDomain, Gfn};
pub use faults::Faults;

use crate::{DomId, Port};
use domain::Domain;
use hypervisor::Hypervisor;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// The mocked hypervisor. It and its guests live in the process that started it; devices may be opened and
/// used in any other. Dropping it closes every device.
#[derive(Debug)]
pub struct FakeXen {
    hypervisor: Arc<Hypervisor>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl FakeXen {
    /// Starts the hypervisor's thread.
    pub fn start() -> io::Result<Self> {
        let hypervisor = Hypervisor::create()?;
        let stop = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?);
        let body = {
            let (hypervisor, stop) = (hypervisor.clone(), stop.clone());
            move || hypervisor.run((*stop).as_fd())
        };
        let thread = thread::Builder::new().name("fake-xen".into()).spawn(body)?;
        Ok(Self {
            hypervisor,
            stop,
            thread: Some(thread),
        })
    }

    /// Lets other processes open devices through a socket at `path`, which must not exist yet and is the
    /// caller's to remove. See [`FakeHost::connect`].
    pub fn listen(&self, path: &Path) -> io::Result<()> {
        let (kind, flags) = (
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        );
        let listener = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
        rustix::net::bind(&listener, &SocketAddrUnix::new(path)?)?;
        rustix::net::listen(&listener, BACKLOG)?;
        self.hypervisor.listen(listener)
    }

    /// A way to open devices from this process.
    pub fn host(&self) -> io::Result<FakeHost> {
        Ok(FakeHost::new(self.hypervisor.session()?))
    }

    /// Creates a domain with `pages` pages of 4096 bytes (1 to 4 million) beside its grant table. EEXIST: a
    /// domain of this number is alive.
    pub fn domain(&self, domid: DomId, pages: usize) -> io::Result<FakeDomain> {
        let domain = Domain::create(domid, pages)?;
        self.hypervisor.add_domain(domain.clone())?;
        Ok(FakeDomain::new(domain))
    }

    /// Destroys a domain: its ports close at once, and it stays a zombie until nothing of it is mapped.
    pub fn kill_domain(&self, domid: DomId) {
        self.hypervisor.kill_domain(domid);
    }

    /// What is mapped and bound, everything already taken back that dead processes held.
    pub fn snapshot(&self) -> Snapshot {
        self.hypervisor.snapshot()
    }

    /// The failures to inject.
    pub fn faults(&self) -> Faults {
        self.hypervisor.faults().clone()
    }
}

impl Drop for FakeXen {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.hypervisor.shut_down();
    }
}

/// The hypervisor's view of who holds what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Granted pages mapped by device holders, by granting domain; domains without any are left out.
    pub mappings: BTreeMap<DomId, usize>,
    /// Maps in the lists of grant devices, also those whose mmap failed and which weren't taken back.
    pub maps: usize,
    /// Every open port, of guests and of the backend domain, in order of domain and number.
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
    /// Nothing: `remote` may bind it, or has closed the other end.
    Unbound {
        /// The other end's domain.
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

/// `end_access` was refused: the page is mapped or being copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the grant is still in use")]
pub struct StillMapped;
