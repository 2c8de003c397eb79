//! Both ends of the channel between the supervisor and one worker. Messages are bounded in size and
//! number, keep their order, and carry file descriptors. A worker in another process is reached over
//! a `SOCK_SEQPACKET` socket pair with `SCM_RIGHTS`, one in a thread over a crossbeam queue beside an
//! eventfd; the users of this module can't tell which. What the messages mean is `message`'s business.

use std::io::{self, IoSlice, IoSliceMut};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crossbeam::channel::{Receiver, Sender, TryRecvError, TrySendError, bounded};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::message::{Command, Report};

/// Longest serialised message. An attach of 16 ring pages takes well under 2 KiB.
const MAX_BODY: usize = 16 * 1024;
/// Most descriptors of one message: four of a ring and those of its target.
const MAX_FDS: usize = 8;
/// Most undelivered messages of a queue between threads. (A socket is bounded by its send buffer.)
const QUEUE: usize = 256;

/// The supervisor's end: sends commands, receives reports.
pub type SupervisorEnd = Channel<Command, Report>;
/// The worker's end: receives commands, sends reports.
pub type WorkerEnd = Channel<Report, Command>;

/// A message with the descriptors that came or go with it.
#[derive(Debug)]
pub struct Message<T> {
    /// What is said.
    pub body: T,
    /// In the order the body documents.
    pub fds: Vec<OwnedFd>,
}

impl<T> From<T> for Message<T> {
    fn from(body: T) -> Self {
        Self {
            body,
            fds: Vec::new(),
        }
    }
}

/// Why nothing can be received any more.
#[derive(Debug, thiserror::Error)]
pub enum RecvError {
    /// The other end is closed or its process is gone, and everything it sent has been received.
    #[error("the other end of the channel is closed")]
    Closed,
    /// The other end speaks something else; the channel is of no use any more.
    #[error("unreadable message on the channel: {0}")]
    Garbled(String),
    /// The socket failed.
    #[error("receiving from the channel: {0}")]
    Io(#[from] io::Error),
}

/// Why a message was not sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError<T> {
    /// The other end has not read for a while. The message comes back; try again later.
    #[error("the channel is full")]
    Full(Message<T>),
    /// The other end is closed or its process is gone.
    #[error("the other end of the channel is closed")]
    Closed,
    /// The message is too large, or the socket failed.
    #[error("sending on the channel: {0}")]
    Io(#[from] io::Error),
}

/// One end of a channel that sends `S` and receives `R`. Dropping it closes the channel: the other
/// end receives what is under way and then [`RecvError::Closed`].
#[derive(Debug)]
pub struct Channel<S, R>(Transport<S, R>);

#[derive(Debug)]
enum Transport<S, R> {
    Socket {
        socket: OwnedFd,
        messages: PhantomData<fn(S) -> R>,
    },
    Queue {
        tx: Bell<Sender<Message<S>>>,
        rx: Receiver<Message<R>>,
        rung: Arc<OwnedFd>,
    },
}

/// A queue's sender with the eventfd its receiver polls. Dropped in this order: first the queue
/// closes, then the bell rings, so a woken receiver always sees the end.
#[derive(Debug)]
struct Bell<T> {
    sender: Option<T>,
    bell: Arc<OwnedFd>,
}

impl<T> Bell<T> {
    /// An eventfd write fails only when its counter is at 2^64 - 1, and then it is readable anyway.
    fn ring(&self) {
        let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
    }
}

impl<T> Drop for Bell<T> {
    fn drop(&mut self) {
        self.sender = None;
        self.ring();
    }
}

/// A channel to a worker in another process: the supervisor's end and the descriptor that becomes
/// that process's standard input (see [`inherited`]).
pub fn process_pair() -> io::Result<(SupervisorEnd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    Ok((Channel::from_socket(ours), theirs))
}

/// A channel to a worker in a thread.
pub fn thread_pair() -> io::Result<(SupervisorEnd, WorkerEnd)> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let commands_bell = Arc::new(eventfd(0, flags)?);
    let reports_bell = Arc::new(eventfd(0, flags)?);
    let (commands_tx, commands_rx) = bounded(QUEUE);
    let (reports_tx, reports_rx) = bounded(QUEUE);
    let supervisor = Transport::Queue {
        tx: Bell {
            sender: Some(commands_tx),
            bell: Arc::clone(&commands_bell),
        },
        rx: reports_rx,
        rung: Arc::clone(&reports_bell),
    };
    let worker = Transport::Queue {
        tx: Bell {
            sender: Some(reports_tx),
            bell: reports_bell,
        },
        rx: commands_rx,
        rung: commands_bell,
    };
    Ok((Channel(supervisor), Channel(worker)))
}

/// The worker's end as its process was given it: standard input. That needs no number on a command
/// line and no unsafe; afterwards standard input is `/dev/null`.
pub fn inherited() -> io::Result<OwnedFd> {
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    rustix::stdio::dup2_stdin(std::fs::File::open("/dev/null")?)?;
    Ok(socket)
}

impl<S: Serialize, R: DeserializeOwned> Channel<S, R> {
    /// The end of a [`process_pair`] that `socket` is.
    pub fn from_socket(socket: OwnedFd) -> Self {
        Self(Transport::Socket {
            socket,
            messages: PhantomData,
        })
    }

    /// The next message, or `None` when there is none yet. The descriptor of [`AsFd`] is readable
    /// whenever this has something to say; wait on it only after a `None`.
    pub fn try_recv(&self) -> Result<Option<Message<R>>, RecvError> {
        match &self.0 {
            Transport::Socket { socket, .. } => recv_packet(socket.as_fd()),
            Transport::Queue { rx, rung, .. } => {
                // The bell is cleared before the second look: a message queued after that look
                // rings again.
                for look in 0..2 {
                    match rx.try_recv() {
                        Ok(message) => return Ok(Some(message)),
                        Err(TryRecvError::Disconnected) => return Err(RecvError::Closed),
                        Err(TryRecvError::Empty) if look == 0 => {
                            let _ = rustix::io::read(&**rung, &mut [0u8; 8]);
                        }
                        Err(TryRecvError::Empty) => {}
                    }
                }
                Ok(None)
            }
        }
    }

    /// Sends without waiting.
    pub fn send(&self, message: impl Into<Message<S>>) -> Result<(), SendError<S>> {
        let message = message.into();
        match &self.0 {
            Transport::Socket { socket, .. } => send_packet(socket.as_fd(), message),
            Transport::Queue { tx, .. } => {
                let Some(sender) = &tx.sender else {
                    return Err(SendError::Closed);
                };
                match sender.try_send(message) {
                    Ok(()) => {
                        tx.ring();
                        Ok(())
                    }
                    Err(TrySendError::Full(message)) => Err(SendError::Full(message)),
                    Err(TrySendError::Disconnected(_)) => Err(SendError::Closed),
                }
            }
        }
    }
}

impl<S, R> AsFd for Channel<S, R> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Transport::Socket { socket, .. } => socket.as_fd(),
            Transport::Queue { rung, .. } => rung.as_fd(),
        }
    }
}

impl<S, R> std::os::fd::AsRawFd for Channel<S, R> {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.as_fd().as_raw_fd()
    }
}

fn recv_packet<R: DeserializeOwned>(
    socket: BorrowedFd<'_>,
) -> Result<Option<Message<R>>, RecvError> {
    let mut body = vec![0u8; MAX_BODY];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = loop {
        let mut iov = [IoSliceMut::new(&mut body)];
        match recvmsg(socket, &mut iov, &mut control, flags) {
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => return Ok(None),
            Err(rustix::io::Errno::CONNRESET) => return Err(RecvError::Closed),
            Err(error) => return Err(RecvError::Io(error.into())),
            Ok(got) => break got,
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.bytes == 0 {
        return Err(RecvError::Closed);
    }
    if got
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
    {
        return Err(RecvError::Garbled("longer than any message".into()));
    }
    body.truncate(got.bytes);
    let body = serde_json::from_slice(&body).map_err(|e| RecvError::Garbled(e.to_string()))?;
    Ok(Some(Message { body, fds }))
}

fn send_packet<S: Serialize>(
    socket: BorrowedFd<'_>,
    message: Message<S>,
) -> Result<(), SendError<S>> {
    let body = serde_json::to_vec(&message.body).map_err(io::Error::from)?;
    if body.len() > MAX_BODY || message.fds.len() > MAX_FDS {
        return Err(SendError::Io(io::ErrorKind::InvalidInput.into()));
    }
    let fds: Vec<BorrowedFd<'_>> = message.fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(SendError::Io(io::ErrorKind::InvalidInput.into()));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        match sendmsg(socket, &[IoSlice::new(&body)], &mut control, flags) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            // ETOOMANYREFS: too many descriptors under way between processes; it passes.
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::TOOMANYREFS) => {
                return Err(SendError::Full(message));
            }
            Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => {
                return Err(SendError::Closed);
            }
            Err(error) => return Err(SendError::Io(error.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};

    use super::*;
    use crate::message::{Left, RingId};

    fn readable(fd: &impl AsFd) -> bool {
        let mut fds = [rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)];
        rustix::event::poll(
            &mut fds,
            Some(&rustix::event::Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            }),
        )
        .unwrap()
            > 0
    }

    fn pairs() -> Vec<(SupervisorEnd, WorkerEnd)> {
        let (supervisor, theirs) = process_pair().unwrap();
        vec![
            (supervisor, Channel::from_socket(theirs)),
            thread_pair().unwrap(),
        ]
    }

    #[test]
    fn messages_keep_order_and_descriptors() {
        for (supervisor, worker) in pairs() {
            assert!(worker.try_recv().unwrap().is_none());
            assert!(!readable(&worker));
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(b"carried").unwrap();
            supervisor
                .send(Command::Hello {
                    version: 7,
                    fence: 3,
                })
                .unwrap();
            let detach = Command::Detach { ring: RingId(9) };
            supervisor
                .send(Message {
                    body: detach,
                    fds: vec![file.into()],
                })
                .unwrap();
            assert!(readable(&worker));

            let first = worker.try_recv().unwrap().unwrap();
            assert!(matches!(
                first.body,
                Command::Hello {
                    version: 7,
                    fence: 3
                }
            ));
            let second = worker.try_recv().unwrap().unwrap();
            assert!(matches!(second.body, Command::Detach { ring: RingId(9) }));
            let mut file = std::fs::File::from(second.fds.into_iter().next().unwrap());
            file.rewind().unwrap();
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text, "carried");

            assert!(worker.try_recv().unwrap().is_none());
            assert!(!readable(&worker), "drained, so a poll must wait");
            worker.send(Report::Ready { version: 7 }).unwrap();
            assert!(readable(&supervisor));
        }
    }

    #[test]
    fn the_end_comes_after_what_was_sent() {
        for (supervisor, worker) in pairs() {
            let left = Left::default();
            worker
                .send(Report::Detached {
                    ring: RingId(1),
                    left,
                })
                .unwrap();
            drop(worker);
            assert!(readable(&supervisor));
            assert!(supervisor.try_recv().unwrap().is_some());
            assert!(readable(&supervisor));
            assert!(matches!(supervisor.try_recv(), Err(RecvError::Closed)));
            assert!(matches!(
                supervisor.send(Command::Shutdown),
                Err(SendError::Closed)
            ));
        }
    }

    #[test]
    fn an_unread_channel_is_full_and_gives_the_message_back() {
        for (supervisor, worker) in pairs() {
            let mut sent = 0u64;
            let back = loop {
                match supervisor.send(Command::Detach { ring: RingId(sent) }) {
                    Ok(()) => sent += 1,
                    Err(SendError::Full(message)) => break message,
                    Err(error) => panic!("{error}"),
                }
            };
            assert!(matches!(back.body, Command::Detach { ring } if ring == RingId(sent)));
            for expected in 0..sent {
                let got = worker.try_recv().unwrap().unwrap();
                assert!(matches!(got.body, Command::Detach { ring } if ring == RingId(expected)));
            }
            supervisor.send(back).unwrap();
        }
    }

    #[test]
    fn rubbish_on_the_socket_is_an_error() {
        let (supervisor, theirs) = process_pair().unwrap();
        rustix::net::send(&theirs, b"{\"Ready\":", SendFlags::empty()).unwrap();
        assert!(matches!(supervisor.try_recv(), Err(RecvError::Garbled(_))));
    }
}
