//! The mocked hypervisor's "ioctl": one datagram with a request and the descriptor its answer goes to.
//!
//! The answer's descriptor is what tells a call from a plain `write` on the same socket, so an
//! event-channel device can be read and written like the real one beside it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

use crate::Access;

/// Grants one map call takes; the real device's limit is 65536.
pub(super) const MAX_REFS: usize = 4096;
/// Words of the largest message, a map request or its answer, with room to notice a longer one.
const MAX_WORDS: usize = MAX_REFS + 8;
/// Bytes a receiver has to have room for.
pub(super) const MAX_BYTES: usize = MAX_WORDS * WORD;
/// Most descriptors an answer carries.
const MAX_FDS: usize = 2;
const WORD: usize = 4;

/// What a client may ask. Which socket accepts which is the hypervisor's business.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// Session: a new grant device. Answer: its descriptor.
    OpenGntdev,
    /// Session: a new event-channel device. Answer: its descriptor.
    OpenEvtchn { domid: u16 },
    /// gntdev: how to take part in copies. Answer: id; copy record, fault table.
    Hello,
    /// gntdev: a domain's memory. Answer: pages, grant entries; memory, active entries.
    Domain { domid: u16 },
    /// gntdev, MAP_GRANT_REF: note grants, without looking at them. Answer: the map's index.
    Note { domid: u16, refs: Vec<u32> },
    /// gntdev, the mmap of a noted map: pin its grants, all or none. Answer: a frame for each; memory.
    /// EINVAL: refused, and the map is used up, as it is after a success. EAGAIN: repeat, a grant is being
    /// copied.
    Pin { index: u32, access: Access },
    /// gntdev, UNMAP_GRANT_REF: forget a map and unpin its grants. ENOENT: no map has this index and this
    /// many grants. EAGAIN: repeat, some are being copied.
    Unmap { index: u32, count: u32 },
    /// evtchn: bind. Answer: local port; the other end's eventfd.
    Bind { domid: u16, port: u32 },
    /// evtchn: close a local port.
    Unbind { port: u32 },
}

impl Request {
    fn encode(&self) -> Vec<u8> {
        let mut words = match self {
            Self::OpenGntdev => vec![1],
            Self::OpenEvtchn { domid } => vec![2, u32::from(*domid)],
            Self::Hello => vec![3],
            Self::Domain { domid } => vec![4, u32::from(*domid)],
            Self::Note { domid, .. } => vec![5, u32::from(*domid)],
            Self::Pin { index, access } => {
                vec![9, *index, u32::from(*access == Access::ReadWrite)]
            }
            Self::Unmap { index, count } => vec![6, *index, *count],
            Self::Bind { domid, port } => vec![7, u32::from(*domid), *port],
            Self::Unbind { port } => vec![8, *port],
        };
        if let Self::Note { refs, .. } = self {
            words.extend(refs);
        }
        bytes_of(&words)
    }

    /// None for anything [`encode`](Self::encode) doesn't write.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let domid = |word: u32| u16::try_from(word).ok();
        Some(match *words_of(bytes)?.as_slice() {
            [1] => Self::OpenGntdev,
            [2, dom] => Self::OpenEvtchn { domid: domid(dom)? },
            [3] => Self::Hello,
            [4, dom] => Self::Domain { domid: domid(dom)? },
            [5, dom, ref refs @ ..] if (1..=MAX_REFS).contains(&refs.len()) => Self::Note {
                domid: domid(dom)?,
                refs: refs.to_vec(),
            },
            [9, index, writable @ (0 | 1)] => Self::Pin {
                index,
                access: if writable == 1 {
                    Access::ReadWrite
                } else {
                    Access::ReadOnly
                },
            },
            [6, index, count] => Self::Unmap { index, count },
            [7, dom, port] => Self::Bind {
                domid: domid(dom)?,
                port,
            },
            [8, port] => Self::Unbind { port },
            _ => return None,
        })
    }
}

/// What a call answers when it succeeds.
#[derive(Debug, Default)]
pub(super) struct Answer {
    pub(super) values: Vec<u32>,
    pub(super) fds: Vec<OwnedFd>,
}

/// A datagram from a client.
#[derive(Debug)]
pub(super) enum Received {
    /// Its length in the buffer, and the descriptor that came with it.
    Message {
        len: usize,
        answer_to: Option<OwnedFd>,
    },
    /// None now.
    Nothing,
    /// The last copy of the client's end is closed.
    Closed,
}

/// A pair of connected sockets that keep datagrams whole and in order.
pub(super) fn socket_pair(flags: SocketFlags) -> io::Result<(OwnedFd, OwnedFd)> {
    let kind = SocketType::SEQPACKET;
    Ok(rustix::net::socketpair(
        AddressFamily::UNIX,
        kind,
        flags | SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Client: asks, and waits for the answer. The answer comes soon, since the hypervisor never waits for
/// anyone; if it goes instead, the answer's socket closes and this is ECONNRESET.
pub(super) fn call(socket: BorrowedFd<'_>, request: &Request) -> io::Result<Answer> {
    let (ours, theirs) = socket_pair(SocketFlags::empty())?;
    send(socket, &request.encode(), Some(theirs.as_fd()))?;
    drop(theirs);
    let mut buffer = vec![0; MAX_BYTES];
    let mut fds = Vec::new();
    let len = receive_with_fds(ours.as_fd(), &mut buffer, RecvFlags::empty(), &mut fds)?;
    let words = buffer.get(..len).and_then(words_of).unwrap_or_default();
    match *words.as_slice() {
        [0, ref values @ ..] => Ok(Answer {
            values: values.to_vec(),
            fds,
        }),
        [errno] => Err(io::Error::from_raw_os_error(
            i32::try_from(errno).unwrap_or(0),
        )),
        _ => Err(io::ErrorKind::ConnectionReset.into()),
    }
}

/// Client: sends one datagram, waiting for room.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    answer_to: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    loop {
        match send_with_fds(socket, bytes, answer_to.as_slice(), SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let mut writable = [PollFd::from_borrowed_fd(socket, PollFlags::OUT)];
                match rustix::event::poll(&mut writable, None) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            result => return Ok(result?),
        }
    }
}

/// Hypervisor: answers without ever waiting; an answer nobody takes is lost.
pub(super) fn answer(to: &OwnedFd, result: Result<Answer, Errno>) {
    let (words, fds) = match result {
        Ok(Answer { mut values, fds }) => {
            values.insert(0, 0);
            (values, fds)
        }
        Err(errno) => (vec![errno.raw_os_error().unsigned_abs()], Vec::new()),
    };
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let _ = send_with_fds(to.as_fd(), &bytes_of(&words), &fds, flags);
}

/// Hypervisor: takes one datagram without waiting.
pub(super) fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Received {
    let mut fds = Vec::new();
    match receive_with_fds(socket, buffer, RecvFlags::DONTWAIT, &mut fds) {
        Ok(0) => Received::Closed,
        Ok(len) => Received::Message {
            len,
            answer_to: fds.pop(),
        },
        Err(Errno::AGAIN | Errno::INTR) => Received::Nothing,
        Err(_) => Received::Closed,
    }
}

fn send_with_fds(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags).map(drop)
}

fn receive_with_fds(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    flags: RecvFlags,
    fds: &mut Vec<OwnedFd>,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let message = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)
    })?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    Ok(message.bytes.min(buffer.len()))
}

fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// None unless the length is a multiple of 4.
pub(super) fn words_of(bytes: &[u8]) -> Option<Vec<u32>> {
    let (words, rest) = bytes.as_chunks::<WORD>();
    rest.is_empty()
        .then(|| words.iter().map(|&word| u32::from_ne_bytes(word)).collect())
}
