//! An in-memory xenstored that speaks the real protocol over Unix sockets: watches, transactions with
//! conflicts, permissions, quotas for guests. Tests and the simulator only.
//!
//! What differs from Xen: a guest connects by socket ([`Server::connect_as`]) instead of a shared ring,
//! and a domain is born and dies when its caller says so, since there is no hypervisor to ask.

mod connection;
mod path;
mod store;
mod tree;

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc as blocking;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use tokio::sync::mpsc;

use connection::{Control, serve};

/// The domain that may do everything.
const PRIVILEGED: u16 = 0;

/// What a guest may use, as C xenstored limits it; domain 0 is free.
mod quota {
    pub(super) const NODES: usize = 1000;
    pub(super) const VALUE: usize = 2048;
    pub(super) const WATCHES: usize = 128;
    pub(super) const TRANSACTIONS: usize = 10;
    pub(super) const TRANSACTION_NODES: usize = 1024;
    /// Bytes waiting for a client that does not read, any client; then it is disconnected.
    pub(super) const UNREAD: usize = 8 << 20;
}

/// An errno name, as it goes over the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Errno(&'static str);

impl Errno {
    const E2BIG: Self = Self("E2BIG");
    const EACCES: Self = Self("EACCES");
    const EAGAIN: Self = Self("EAGAIN");
    const EBUSY: Self = Self("EBUSY");
    const EEXIST: Self = Self("EEXIST");
    const EINVAL: Self = Self("EINVAL");
    const ENOENT: Self = Self("ENOENT");
    const ENOSPC: Self = Self("ENOSPC");
    const ENOSYS: Self = Self("ENOSYS");
    const EPERM: Self = Self("EPERM");
}

/// A running server. Dropping it closes every connection and removes the sockets it made.
#[derive(Debug)]
pub struct Server {
    control: mpsc::UnboundedSender<Control>,
    thread: Option<JoinHandle<()>>,
    sockets: Mutex<Vec<PathBuf>>,
}

impl Server {
    /// Starts an empty store on a thread of its own.
    pub fn start() -> io::Result<Self> {
        let (control, receiver) = mpsc::unbounded_channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()?;
        let thread = std::thread::Builder::new()
            .name("xenstore".to_owned())
            .spawn(move || runtime.block_on(serve(receiver)))?;
        Ok(Self {
            control,
            thread: Some(thread),
            sockets: Mutex::new(Vec::new()),
        })
    }

    /// Accepts connections at `path`, which must not exist; its clients are domain 0.
    pub fn listen(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let listener = UnixListener::bind(&path)?;
        self.sockets.lock().push(path.as_ref().to_owned());
        listener.set_nonblocking(true)?;
        self.ask(|done| Control::Listen(listener, done))
    }

    /// A connection of domain `domid`, introduced or not: relative paths start at its home, and it may
    /// do what permissions allow. Tokio users call `set_nonblocking(true)` before `from_std`.
    pub fn connect_as(&self, domid: u16) -> io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        self.ask(|done| Control::Connect(domid, ours, done))?;
        Ok(theirs)
    }

    /// A domain starts: `@introduceDomain` fires, unless it was known.
    pub fn introduce(&self, domid: u16) -> io::Result<()> {
        self.ask(|done| Control::Introduce(domid, done))
    }

    /// A domain is gone: its connections close and `@releaseDomain` fires. Its nodes stay until the
    /// toolstack removes them, as in Xen. An error if it was never introduced.
    pub fn release(&self, domid: u16) -> io::Result<()> {
        self.ask(|done| Control::Release(domid, done))
    }

    /// Sends a command and waits until it is carried out.
    fn ask(&self, command: impl FnOnce(Done) -> Control) -> io::Result<()> {
        let (done, result) = blocking::sync_channel(1);
        let gone = || io::Error::from(io::ErrorKind::BrokenPipe);
        self.control.send(command(done)).map_err(|_| gone())?;
        result.recv().map_err(|_| gone())?
    }
}

type Done = blocking::SyncSender<io::Result<()>>;

impl Drop for Server {
    fn drop(&mut self) {
        // Its loop ends with the last sender; so replace ours.
        drop(std::mem::replace(
            &mut self.control,
            mpsc::unbounded_channel().0,
        ));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        for path in self.sockets.get_mut().drain(..) {
            let _ = std::fs::remove_file(path);
        }
    }
}
