//! What a ring and its disk's flusher say to each other: packets of a fixed size on a `SOCK_SEQPACKET`
//! pair, one of which costs a system call and no memory. The ring orders, the flusher answers each order
//! once; the end of the socket is the end of the other.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair};

/// What can keep a thread for as long as the storage likes. Ranges are bytes of the disk, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chore {
    /// Make durable what was written before.
    Flush,
    /// Give a range's storage back.
    Discard {
        offset: u64,
        len: u64,
        /// So that the data can't be had back.
        secure: bool,
    },
}

/// A chore under a number of the ring's choosing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) id: u32,
    pub(crate) chore: Chore,
}

/// What became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) id: u32,
    pub(crate) result: Result<(), Errno>,
}

/// Why nothing came or went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// Nothing there, or no room; the socket says when to try again.
    Later,
    /// The other end is gone, or speaks something else.
    Over,
}

const ORDER: usize = 24;
const ANSWER: usize = 8;
const FLUSH: u32 = 0;
const DISCARD: u32 = 1;
const SECURE_DISCARD: u32 = 2;

/// The two ends: the ring's and the flusher's. Neither blocks.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

impl Order {
    pub(crate) fn send(self, socket: BorrowedFd<'_>) -> Result<(), Stop> {
        let (kind, offset, len) = match self.chore {
            Chore::Flush => (FLUSH, 0, 0),
            Chore::Discard {
                offset,
                len,
                secure: false,
            } => (DISCARD, offset, len),
            Chore::Discard { offset, len, .. } => (SECURE_DISCARD, offset, len),
        };
        let mut packet = [0u8; ORDER];
        packet[..4].copy_from_slice(&self.id.to_ne_bytes());
        packet[4..8].copy_from_slice(&kind.to_ne_bytes());
        packet[8..16].copy_from_slice(&offset.to_ne_bytes());
        packet[16..].copy_from_slice(&len.to_ne_bytes());
        send(socket, &packet)
    }

    pub(crate) fn receive(socket: BorrowedFd<'_>) -> Result<Self, Stop> {
        let packet: [u8; ORDER] = receive(socket)?;
        let [id, kind] = [0, 4].map(|at| u32::from_ne_bytes(part(&packet, at)));
        let [offset, len] = [8, 16].map(|at| u64::from_ne_bytes(part(&packet, at)));
        let chore = match kind {
            FLUSH => Chore::Flush,
            DISCARD | SECURE_DISCARD => Chore::Discard {
                offset,
                len,
                secure: kind == SECURE_DISCARD,
            },
            _ => return Err(Stop::Over),
        };
        Ok(Self { id, chore })
    }
}

impl Answer {
    pub(crate) fn send(self, socket: BorrowedFd<'_>) -> Result<(), Stop> {
        let errno = self.result.map_or_else(Errno::raw_os_error, |()| 0);
        let mut packet = [0u8; ANSWER];
        packet[..4].copy_from_slice(&self.id.to_ne_bytes());
        packet[4..].copy_from_slice(&errno.to_ne_bytes());
        send(socket, &packet)
    }

    pub(crate) fn receive(socket: BorrowedFd<'_>) -> Result<Self, Stop> {
        let packet: [u8; ANSWER] = receive(socket)?;
        let id = u32::from_ne_bytes(part(&packet, 0));
        let result = match i32::from_ne_bytes(part(&packet, 4)) {
            0 => Ok(()),
            errno => Err(Errno::from_raw_os_error(errno)),
        };
        Ok(Self { id, result })
    }
}

fn part<const N: usize>(packet: &[u8], at: usize) -> [u8; N] {
    let bytes = packet.get(at..).and_then(|rest| rest.first_chunk());
    bytes.copied().unwrap_or([0; N])
}

fn send(socket: BorrowedFd<'_>, packet: &[u8]) -> Result<(), Stop> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match retry_on_intr(|| rustix::net::send(socket, packet, flags)) {
        Ok(_) => Ok(()),
        Err(Errno::AGAIN) => Err(Stop::Later),
        Err(_) => Err(Stop::Over),
    }
}

fn receive<const N: usize>(socket: BorrowedFd<'_>) -> Result<[u8; N], Stop> {
    let mut packet = [0u8; N];
    match retry_on_intr(|| rustix::net::recv(socket, &mut packet[..], RecvFlags::DONTWAIT)) {
        Ok((len, _)) if len == N => Ok(packet),
        Err(Errno::AGAIN) => Err(Stop::Later),
        // Nothing is the end; another length is not one of ours.
        Ok(_) | Err(_) => Err(Stop::Over),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn orders_and_answers_arrive_as_they_were_sent() {
        let (ring, flusher) = pair().unwrap();
        let discard = |secure| Chore::Discard {
            offset: u64::MAX - 511,
            len: 512,
            secure,
        };
        for (id, chore) in [
            (0, Chore::Flush),
            (7, discard(false)),
            (u32::MAX, discard(true)),
        ] {
            let order = Order { id, chore };
            order.send(ring.as_fd()).unwrap();
            assert_eq!(Order::receive(flusher.as_fd()), Ok(order));
        }
        assert_eq!(Order::receive(flusher.as_fd()), Err(Stop::Later));
        for result in [Ok(()), Err(Errno::IO), Err(Errno::OPNOTSUPP)] {
            let answer = Answer { id: 9, result };
            answer.send(flusher.as_fd()).unwrap();
            assert_eq!(Answer::receive(ring.as_fd()), Ok(answer));
        }
    }

    #[test]
    fn the_end_and_rubbish_are_the_end() {
        let (ring, flusher) = pair().unwrap();
        for rubbish in [&[1u8; ORDER][..], &[0; ORDER - 1], &[0; ORDER + 1], &[0; 1]] {
            send(ring.as_fd(), rubbish).unwrap();
            let expected = if rubbish.len() > ORDER {
                None
            } else {
                Some(Err(Stop::Over))
            };
            let got = Order::receive(flusher.as_fd());
            // A longer packet is cut; its beginning is an order.
            assert_eq!(got, expected.unwrap_or(got));
        }
        drop(ring);
        assert_eq!(Order::receive(flusher.as_fd()), Err(Stop::Over));
        let answer = Answer {
            id: 0,
            result: Ok(()),
        };
        assert_eq!(answer.send(flusher.as_fd()), Err(Stop::Over));
    }
}
