//! The test's side of a script target: a disk whose operations happen when, how and in what order a
//! test says.

use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender, unbounded};
use parking_lot::Mutex;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix,
    SocketFlags, SocketType,
};

use super::{Answer, Ask, GREETING, Greeting, MAX_PACKET, Verdict};

/// Listens for script targets. Dropping it closes every connection and removes the socket.
#[derive(Debug)]
pub struct ScriptedDisk {
    path: PathBuf,
    file: File,
    listener: Arc<OwnedFd>,
    connections: Arc<Mutex<Vec<Arc<OwnedFd>>>>,
    asked: Receiver<PendingOp>,
}

/// An operation that waits for the test's word. If it is dropped the operation stays under way.
#[derive(Debug)]
#[must_use = "the operation waits for go or fail"]
pub struct PendingOp {
    /// What it is.
    pub ask: Ask,
    connection: Arc<OwnedFd>,
}

impl ScriptedDisk {
    /// A disk of `size` zero bytes behind a new socket at `path`.
    pub fn listen(path: &Path, size: u64) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::bind(&listener, &SocketAddrUnix::new(path)?)?;
        rustix::net::listen(&listener, 64)?;
        let file = rustix::fs::memfd_create("scripted-disk", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, size)?;
        let (tell, asked) = unbounded();
        let disk = Self {
            path: path.into(),
            file: file.into(),
            listener: Arc::new(listener),
            connections: Arc::default(),
            asked,
        };
        let (listener, file) = (Arc::clone(&disk.listener), disk.file.try_clone()?);
        let connections = Arc::clone(&disk.connections);
        std::thread::Builder::new()
            .name("scripted-disk".into())
            .spawn(move || {
                while let Ok(connection) =
                    rustix::net::accept_with(&*listener, SocketFlags::CLOEXEC)
                {
                    let connection = Arc::new(connection);
                    if greet(&connection, &file).is_err() {
                        continue;
                    }
                    connections.lock().push(Arc::clone(&connection));
                    let tell = tell.clone();
                    // Ends with its connection.
                    let _ = std::thread::Builder::new()
                        .name("scripted-disk".into())
                        .spawn(move || listen_to(&connection, &tell));
                }
            })?;
        Ok(disk)
    }

    /// What the disk holds.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The next operation some ring wants to start, or `None` after `limit`.
    pub fn next(&self, limit: Duration) -> Option<PendingOp> {
        self.asked.recv_timeout(limit).ok()
    }

    /// Closes every connection: the targets are gone.
    pub fn hang_up(&self) {
        for connection in self.connections.lock().drain(..) {
            let _ = rustix::net::shutdown(&connection, Shutdown::Both);
        }
    }
}

impl Drop for ScriptedDisk {
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.listener, Shutdown::Both);
        self.hang_up();
        let _ = std::fs::remove_file(&self.path);
    }
}

impl PendingOp {
    /// It is performed.
    pub fn go(self) -> io::Result<()> {
        self.answer(Verdict::Go)
    }

    /// It fails with `errno`, and nothing is read or changed.
    pub fn fail(self, errno: i32) -> io::Result<()> {
        self.answer(Verdict::Fail(errno))
    }

    fn answer(&self, verdict: Verdict) -> io::Result<()> {
        let packet = serde_json::to_vec(&Answer {
            id: self.ask.id,
            verdict,
        })?;
        rustix::net::send(&self.connection, &packet, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

fn greet(connection: &OwnedFd, file: &File) -> io::Result<()> {
    let greeting = serde_json::to_vec(&Greeting {
        protocol: GREETING.into(),
    })?;
    let fds = [file.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    rustix::net::sendmsg(
        connection,
        &[IoSlice::new(&greeting)],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

fn listen_to(connection: &Arc<OwnedFd>, tell: &Sender<PendingOp>) {
    let mut packet = [0u8; MAX_PACKET];
    while let Ok((len, _)) =
        rustix::net::recv(connection, &mut packet[..], rustix::net::RecvFlags::empty())
    {
        let Ok(ask) = serde_json::from_slice(packet.get(..len).unwrap_or_default()) else {
            return;
        };
        if tell
            .send(PendingOp {
                ask,
                connection: Arc::clone(connection),
            })
            .is_err()
        {
            return;
        }
    }
}
