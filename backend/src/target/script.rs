//! The protocol between a script target and the test that decides the fate of each of its operations:
//! JSON packets on a `SOCK_SEQPACKET` Unix socket the test listens on. The test greets every
//! connection with [`Greeting`] and one descriptor, the file that holds the data; the worker asks
//! about each operation before it starts and the test answers when it likes, in any order.

#[cfg(feature = "fake")]
pub mod disk;

use std::collections::HashMap;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};

use super::TargetError;
use super::serve::{self, Target};
use super::upkeep::{self, Upkeep};
use crate::flusher::wire::Chore;
use crate::worker::engine::{Engine, Io, Tag};

/// Longest packet.
pub(crate) const MAX_PACKET: usize = 512;

/// First packet from the test on each connection.
#[derive(Debug, Serialize, Deserialize)]
pub struct Greeting {
    /// Always [`GREETING`].
    pub protocol: String,
}

/// What a [`Greeting`] says.
pub const GREETING: &str = "xenblk-script-1";

/// Kinds of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpKind {
    /// Read a range.
    Read,
    /// Write a range.
    Write,
    /// Make writes durable.
    Flush,
    /// Give a range's storage back.
    Discard,
}

/// The worker is about to start this operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    /// Unique among the connection's unanswered operations.
    pub id: u64,
    /// What it does.
    pub op: OpKind,
    /// First byte.
    pub offset: u64,
    /// Bytes; 0 for a flush.
    pub len: u64,
}

impl Ask {
    fn send(&self, socket: &OwnedFd) -> io::Result<()> {
        let packet = serde_json::to_vec(self)?;
        rustix::net::send(socket, &packet, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

/// What is to happen to an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// Perform it on the file.
    Go,
    /// Don't; it fails with this `errno`.
    Fail(i32),
}

/// The test's answer to an [`Ask`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Of the operation.
    pub id: u64,
    /// Its fate.
    pub verdict: Verdict,
}

/// Connects to the test listening at `path` and takes its greeting: the connection and the data file.
pub(super) fn connect(path: &Path) -> Result<(OwnedFd, OwnedFd), TargetError> {
    let value = path.display().to_string();
    let at = |doing| {
        let value = value.clone();
        move |e: Errno| TargetError::Io {
            value,
            doing,
            source: e.into(),
        }
    };
    let address = SocketAddrUnix::new(path).map_err(at("connect"))?;
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(at("connect"))?;
    rustix::net::connect(&socket, &address).map_err(at("connect"))?;

    let mut packet = [0u8; MAX_PACKET];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut iov = [IoSliceMut::new(&mut packet)];
    let got = retry_on_intr(|| {
        rustix::net::recvmsg(&socket, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC)
    })
    .map_err(at("receive its greeting"))?;
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let problem = |problem: &str| TargetError::Script {
        value: value.clone(),
        problem: problem.into(),
    };
    let greeting: Greeting = serde_json::from_slice(packet.get(..got.bytes).unwrap_or_default())
        .map_err(|e| problem(&e.to_string()))?;
    if greeting.protocol != GREETING {
        return Err(problem("expected xenblk-script-1"));
    }
    let file = file.ok_or_else(|| problem("no descriptor came with the greeting"))?;
    rustix::io::ioctl_fionbio(&socket, true).map_err(at("use the socket"))?;
    Ok((socket, file))
}

/// The next answer on `socket`, or `None` while there is none.
fn answer(socket: &OwnedFd) -> io::Result<Option<Answer>> {
    let mut packet = [0u8; MAX_PACKET];
    let received =
        retry_on_intr(|| rustix::net::recv(socket, &mut packet[..], RecvFlags::DONTWAIT));
    match received {
        Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok((len, _)) => Ok(Some(serde_json::from_slice(
            packet.get(..len).unwrap_or_default(),
        )?)),
        Err(Errno::AGAIN) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The worker's side: each operation waits here for its verdict.
#[derive(Debug)]
pub(super) struct ScriptTarget {
    socket: OwnedFd,
    file: OwnedFd,
    asked: HashMap<u64, (Tag, Io)>,
    next_id: u64,
}

impl ScriptTarget {
    pub(super) fn new(socket: OwnedFd, file: OwnedFd) -> Self {
        Self {
            socket,
            file,
            asked: HashMap::new(),
            next_id: 0,
        }
    }

    fn ask(&self, id: u64, io: &Io) -> io::Result<()> {
        let (op, offset, len) = match io {
            Io::Read { offset, buffer } => (OpKind::Read, *offset, u64::from(buffer.len())),
            Io::Write { offset, buffer } => (OpKind::Write, *offset, u64::from(buffer.len())),
        };
        let ask = Ask {
            id,
            op,
            offset,
            len,
        };
        ask.send(&self.socket)
    }

    fn decide(&mut self, engine: &mut Engine, answer: Answer) {
        let Some((tag, io)) = self.asked.remove(&answer.id) else {
            return;
        };
        match answer.verdict {
            Verdict::Go => engine.start(self.file.as_fd(), tag, io),
            Verdict::Fail(errno) => {
                engine.complete(tag, io, Err(Errno::from_raw_os_error(errno)));
            }
        }
    }
}

impl Target for ScriptTarget {
    fn start(&mut self, engine: &mut Engine, tag: Tag, io: Io) {
        let id = self.next_id;
        self.next_id += 1;
        match self.ask(id, &io) {
            Ok(()) => {
                self.asked.insert(id, (tag, io));
            }
            // The test is gone, or doesn't read what it is asked.
            Err(_) => engine.complete(tag, io, Err(Errno::IO)),
        }
    }

    fn watched(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn readable(&mut self, engine: &mut Engine) -> io::Result<()> {
        loop {
            match answer(&self.socket) {
                Ok(Some(answer)) => self.decide(engine, answer),
                Ok(None) => return Ok(()),
                Err(error) => {
                    for (_, (tag, io)) in self.asked.drain() {
                        engine.complete(tag, io, Err(Errno::IO));
                    }
                    return Err(error);
                }
            }
        }
    }

    fn identity(&self) -> (u64, u64) {
        serve::inode(&self.file)
    }
}

/// The flusher's side: waits for each verdict.
#[derive(Debug)]
pub(super) struct ScriptUpkeep {
    socket: OwnedFd,
    file: upkeep::File,
    next_id: u64,
}

impl ScriptUpkeep {
    pub(super) fn new(socket: OwnedFd, file: upkeep::File) -> Self {
        Self {
            socket,
            file,
            next_id: 0,
        }
    }

    fn ask(&mut self, chore: Chore) -> io::Result<Verdict> {
        let id = self.next_id;
        self.next_id += 1;
        let (op, offset, len) = match chore {
            Chore::Flush => (OpKind::Flush, 0, 0),
            Chore::Discard { offset, len, .. } => (OpKind::Discard, offset, len),
        };
        let ask = Ask {
            id,
            op,
            offset,
            len,
        };
        ask.send(&self.socket)?;
        loop {
            match answer(&self.socket)? {
                Some(answer) if answer.id == id => return Ok(answer.verdict),
                Some(_) => {}
                None => {
                    let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
                    retry_on_intr(|| poll(&mut fds, None))?;
                }
            }
        }
    }
}

impl Upkeep for ScriptUpkeep {
    fn perform(&mut self, chore: Chore) -> Result<(), Errno> {
        // The test is gone, or doesn't read what it is asked.
        match self.ask(chore).map_err(|_| Errno::IO)? {
            Verdict::Go => self.file.perform(chore),
            Verdict::Fail(errno) => Err(Errno::from_raw_os_error(errno)),
        }
    }
}
