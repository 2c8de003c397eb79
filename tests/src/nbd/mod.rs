//! The guest's disk as an NBD export on a Unix socket, so that ordinary programs (qemu-img, nbdcopy,
//! fio) do real I/O through frontend, ring and backend. Fixed newstyle negotiation with simple
//! replies; TLS, structured replies and extended headers are refused in the protocol's own terms.
//!
//! The client is not trusted: every length is bounded before memory is taken for it, a connection
//! owns at most [`MAX_PAYLOAD`] bytes of data and [`MAX_REQUESTS`] requests until their replies are
//! *written*, and there are at most [`MAX_CONNECTIONS`] connections. What the requests mean on the
//! guest's side is left to [`GuestDisk`].

mod budget;
mod connection;
mod handshake;
mod wire;

use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::disk::{DiskInfo, GuestDisk};
use budget::Budget;

/// Largest READ or WRITE, in bytes; announced as the maximum block size. Also the most memory that a
/// connection's requests may hold.
pub const MAX_PAYLOAD: u32 = 32 << 20;
/// Requests a connection may have in flight; the next one is not read from the socket.
pub const MAX_REQUESTS: u32 = 256;
/// Connections served at a time; further ones are closed at once.
pub const MAX_CONNECTIONS: usize = 32;
/// A client that says nothing for so long during negotiation is cut off.
const HANDSHAKE_SILENCE: Duration = Duration::from_secs(30);
/// Connections the kernel may hold for us before they are accepted.
const BACKLOG: i32 = 64;
/// Longest path of a socket in bytes: `sun_path` (unix(7)) has 108, with a NUL.
const MAX_PATH: usize = 107;

/// One disk under the name that clients ask for it by.
pub struct Export {
    /// Export name; the empty name always means the first export.
    pub name: String,
    /// What it serves.
    pub disk: Arc<dyn GuestDisk>,
}

impl std::fmt::Debug for Export {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Export")
            .field("name", &self.name)
            .field("disk", &self.disk.info())
            .finish()
    }
}

/// Why the server did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Something has this name already; nothing was removed.
    #[error("{}: exists already; expected a socket path that is free", .0.display())]
    Exists(PathBuf),
    /// The kernel takes one byte more, but other programs expect the name to end in a NUL.
    #[error("{}: is too long; expected a socket path of at most {MAX_PATH} bytes", .0.display())]
    TooLong(PathBuf),
    /// The path can't be a Unix socket.
    #[error("{}: can't listen here: {source}", path.display())]
    Listen {
        /// The path as given.
        path: PathBuf,
        /// The kernel's reason.
        source: io::Error,
    },
}

/// Serves `exports` on a new socket at `path` (mode 0600) until the returned server is shut down.
///
/// # Errors
/// [`ServeError`] names the path; nothing is left behind.
pub fn serve(path: &Path, exports: Vec<Export>) -> Result<Server, ServeError> {
    if path.as_os_str().len() > MAX_PATH {
        return Err(ServeError::TooLong(path.to_owned()));
    }
    let failed = |source: io::Error| ServeError::Listen {
        path: path.to_owned(),
        source,
    };
    let listener = listen(path).map_err(|errno| match errno {
        rustix::io::Errno::ADDRINUSE => ServeError::Exists(path.to_owned()),
        other => failed(other.into()),
    })?;
    let inode = std::fs::symlink_metadata(path).map_err(failed)?.ino();
    let shared = Arc::new(Shared {
        exports,
        connections: Mutex::new(Connections::default()),
        ended: Condvar::new(),
    });
    let stopper = listener.try_clone().map_err(failed)?;
    let acceptor = Arc::clone(&shared);
    let accepting = thread::Builder::new()
        .name("nbd-accept".into())
        .spawn(move || accept(&listener, &acceptor))
        .map_err(failed)?;
    Ok(Server {
        path: path.to_owned(),
        inode,
        stopper,
        accepting: Some(accepting),
        shared,
    })
}

/// Binds and listens. The mode is set on the socket *before* it is bound, so there is no moment at
/// which others could connect.
fn listen(path: &Path) -> rustix::io::Result<UnixListener> {
    let address = SocketAddrUnix::new(path)?;
    let socket: OwnedFd = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(UnixListener::from(socket))
}

/// A running export. Dropping it stops it as [`Server::shutdown`] with no patience would.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    /// Ours, so that a file put at `path` by someone else later is never removed.
    inode: u64,
    /// The listening socket, to end the accepting thread by.
    stopper: UnixListener,
    accepting: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
}

impl Server {
    /// The NBD URI of export `name`.
    pub fn uri(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", self.path.display())
    }

    /// Accepts nothing more, reads nothing more, answers what is in flight, closes every connection
    /// and removes the socket. Connections that are not done after `patience` (a disk that does not
    /// answer, a client that does not read) are cut; returns how many.
    pub fn shutdown(mut self, patience: Duration) -> usize {
        self.stop(patience)
    }

    fn stop(&mut self, patience: Duration) -> usize {
        let Some(accepting) = self.accepting.take() else {
            return 0;
        };
        // Wakes accept(2) with EINVAL. Fails only if the socket isn't listening: then it has ended.
        let _ = rustix::net::shutdown(&self.stopper, rustix::net::Shutdown::Both);
        let _ = accepting.join();
        if std::fs::symlink_metadata(&self.path).is_ok_and(|now| now.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
        self.shared.drain(patience)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

/// What the accepting thread and the connections have in common.
struct Shared {
    exports: Vec<Export>,
    connections: Mutex<Connections>,
    /// Signalled when a connection has ended.
    ended: Condvar,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("exports", &self.exports)
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Connections {
    /// Numbers are never reused; they start the round robin over the queues.
    next: usize,
    /// A second handle on each open connection and its allowance, to end it by.
    open: HashMap<usize, (UnixStream, Arc<Budget>)>,
}

impl Shared {
    /// Registers a connection; `None` when there are [`MAX_CONNECTIONS`] or it can't be tracked.
    fn register(self: &Arc<Self>, stream: &UnixStream) -> Option<Registration> {
        let mut connections = self.connections.lock();
        if connections.open.len() >= MAX_CONNECTIONS {
            return None;
        }
        let number = connections.next;
        connections.next = number.wrapping_add(1);
        let budget = Budget::new();
        let handle = (stream.try_clone().ok()?, Arc::clone(&budget));
        connections.open.insert(number, handle);
        Some(Registration {
            number,
            budget,
            shared: Arc::clone(self),
        })
    }

    fn drain(&self, patience: Duration) -> usize {
        let deadline = Instant::now() + patience;
        let mut connections = self.connections.lock();
        for (stream, budget) in connections.open.values() {
            budget.close();
            let _ = stream.shutdown(Shutdown::Read);
        }
        while !connections.open.is_empty() {
            if self
                .ended
                .wait_until(&mut connections, deadline)
                .timed_out()
            {
                break;
            }
        }
        for (stream, _) in connections.open.values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        connections.open.len()
    }
}

/// Held by a connection's thread for as long as the connection lives.
struct Registration {
    number: usize,
    budget: Arc<Budget>,
    shared: Arc<Shared>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.shared.connections.lock().open.remove(&self.number);
        self.shared.ended.notify_all();
    }
}

fn accept(listener: &UnixListener, shared: &Arc<Shared>) {
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => match error
                .raw_os_error()
                .map(rustix::io::Errno::from_raw_os_error)
            {
                // `Server::stop` shut the socket down.
                Some(rustix::io::Errno::INVAL) => return,
                // Out of descriptors or memory: ends when connections end, so don't spin until then.
                Some(
                    rustix::io::Errno::MFILE | rustix::io::Errno::NFILE | rustix::io::Errno::NOMEM,
                ) => {
                    thread::sleep(Duration::from_millis(50));
                    continue;
                }
                _ => continue,
            },
        };
        // Refusals drop, and so close, the stream.
        let Some(registration) = shared.register(&stream) else {
            continue;
        };
        let _ = thread::Builder::new()
            .name(format!("nbd-{}", registration.number))
            .spawn(move || converse(&stream, &registration));
    }
}

/// One connection from its first to its last byte. Errors end it: the peer sees the socket close.
fn converse(stream: &UnixStream, registration: &Registration) {
    let negotiated = stream
        .set_read_timeout(Some(HANDSHAKE_SILENCE))
        .and_then(|()| handshake::negotiate(stream, &registration.shared.exports));
    if let Ok(Some(export)) = negotiated
        && stream.set_read_timeout(None).is_ok()
    {
        connection::transmit(
            stream,
            &export.disk,
            registration.number,
            &registration.budget,
        );
    }
}

/// Transmission flags of a disk: what its clients may ask for.
fn transmission_flags(info: &DiskInfo) -> u16 {
    let mut flags = wire::flag::HAS_FLAGS | wire::flag::CAN_MULTI_CONN;
    if info.readonly {
        return flags | wire::flag::READ_ONLY;
    }
    flags |= wire::flag::SEND_WRITE_ZEROES;
    if info.flush {
        flags |= wire::flag::SEND_FLUSH | wire::flag::SEND_FUA;
    }
    if info.discard {
        flags |= wire::flag::SEND_TRIM;
    }
    flags
}
