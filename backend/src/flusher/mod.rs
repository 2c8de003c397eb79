//! The flusher of one disk: a process (in unit tests a thread) that holds the disk's target and nothing
//! else of anybody's, and does to it what may take as long as the storage likes: flushes and discards.
//! A worker that waited for those would keep its other rings' disks waiting too, and could not even
//! exit. It is started by the supervisor with the first such request of a disk, gets from it one socket
//! for each ring that has one ([`wire`]), and ends when the disk and all those rings have let go of it.
//!
//! One thread, one operation at a time, so that what is under way is known: one flush answers all that
//! were ordered before it began, on whatever ring, and a long discard is done in pieces between them.

pub(crate) mod wire;

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::channel::{Message, WorkerEnd};
use crate::message::{Command, VERSION};
use crate::target::WorkerTarget;
use crate::target::upkeep::{self, Upkeep};
use wire::{Answer, Chore, Order, Stop};

/// Longest piece of a discard, in bytes; a multiple of every discard unit.
const PIECE: u64 = 256 << 20;
/// Orders of one ring that are not answered. A ring keeps to it; more are read later.
pub(crate) const ORDERS: usize = 32;

/// Looks after `target` until nobody is left who could ask for it. The error is one line for the
/// administrator.
pub(crate) fn run(
    channel: WorkerEnd,
    version: u32,
    fence: u64,
    target: &WorkerTarget,
    fds: Vec<OwnedFd>,
) -> Result<(), String> {
    if version != VERSION {
        return Err(format!(
            "the supervisor speaks version {version} of the messages, expected {VERSION}"
        ));
    }
    let target = upkeep::attach(target, fds, fence)
        .map_err(|error| format!("can't take over the target: {error}"))?;
    let mut flusher = Flusher {
        channel: Some(channel),
        target,
        rings: Vec::new(),
        flushes: Vec::new(),
        discards: VecDeque::new(),
        failed: None,
        next_key: 0,
    };
    while flusher.channel.is_some() || !flusher.rings.is_empty() {
        flusher.wait()?;
        flusher.take_rings();
        flusher.take_orders();
        flusher.flush();
        flusher.discard();
    }
    Ok(())
}

/// A ring that can order.
#[derive(Debug)]
struct Served {
    key: u64,
    socket: OwnedFd,
    /// Not answered yet.
    orders: usize,
}

/// Whose order it is.
#[derive(Clone, Copy, Debug)]
struct From {
    ring: u64,
    id: u32,
}

/// What is left of a discard.
#[derive(Debug)]
struct Discard {
    from: From,
    offset: u64,
    len: u64,
    secure: bool,
}

#[derive(Debug)]
struct Flusher {
    /// `None` once the supervisor has let go of the disk, or is gone.
    channel: Option<WorkerEnd>,
    target: Box<dyn Upkeep>,
    rings: Vec<Served>,
    /// Ordered since the last flush began.
    flushes: Vec<From>,
    discards: VecDeque<Discard>,
    /// A flush failed: what was written may be lost, and no later flush can bring it back. The kernel
    /// tells of an error once.
    failed: Option<Errno>,
    next_key: u64,
}

impl Flusher {
    /// Sleeps until somebody has something to say, unless there is something to do.
    fn wait(&self) -> Result<(), String> {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let rings = self.rings.iter().filter(|ring| ring.orders < ORDERS);
        let sources = rings.map(|ring| ring.socket.as_fd());
        let sources = sources.chain(self.channel.as_ref().map(AsFd::as_fd));
        let sources: Vec<_> = sources.collect();
        let mut fds: Vec<_> = sources
            .iter()
            .map(|source| PollFd::new(source, PollFlags::IN))
            .collect();
        let busy = !self.discards.is_empty();
        match poll(&mut fds, busy.then_some(&now)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(format!("poll: {error}")),
        }
    }

    fn take_rings(&mut self) {
        while let Some(channel) = &self.channel {
            match channel.try_recv() {
                Ok(Some(Message {
                    body: Command::Serve,
                    fds,
                })) => {
                    for socket in fds {
                        let (key, orders) = (self.next_key, 0);
                        self.next_key += 1;
                        self.rings.push(Served {
                            key,
                            socket,
                            orders,
                        });
                    }
                }
                Ok(Some(other)) => tracing::error!("not for a flusher: {:?}", other.body),
                Ok(None) => return,
                Err(_) => self.channel = None,
            }
        }
    }

    /// Takes in what rings have ordered. What a ring that is gone had ordered and is not begun is
    /// forgotten: nobody was told that it would happen.
    fn take_orders(&mut self) {
        let (flushes, discards) = (&mut self.flushes, &mut self.discards);
        self.rings.retain_mut(|ring| {
            while ring.orders < ORDERS {
                let order = match Order::receive(ring.socket.as_fd()) {
                    Ok(order) => order,
                    Err(Stop::Later) => break,
                    Err(Stop::Over) => {
                        flushes.retain(|from| from.ring != ring.key);
                        discards.retain(|discard| discard.from.ring != ring.key);
                        return false;
                    }
                };
                ring.orders += 1;
                let from = From {
                    ring: ring.key,
                    id: order.id,
                };
                match order.chore {
                    Chore::Flush => flushes.push(from),
                    Chore::Discard {
                        offset,
                        len,
                        secure,
                    } => discards.push_back(Discard {
                        from,
                        offset,
                        len,
                        secure,
                    }),
                }
            }
            true
        });
    }

    /// One flush for all that were ordered.
    fn flush(&mut self) {
        if self.flushes.is_empty() {
            return;
        }
        let result = match self.failed {
            Some(errno) => Err(errno),
            None => self.target.perform(Chore::Flush),
        };
        self.failed = result.err();
        for from in std::mem::take(&mut self.flushes) {
            self.answer(from, result);
        }
    }

    /// One piece of the oldest discard.
    fn discard(&mut self) {
        let Some(mut discard) = self.discards.pop_front() else {
            return;
        };
        let len = discard.len.min(PIECE);
        let result = self.target.perform(Chore::Discard {
            offset: discard.offset,
            len,
            secure: discard.secure,
        });
        discard.offset = discard.offset.saturating_add(len);
        discard.len -= len;
        if result.is_ok() && discard.len > 0 {
            self.discards.push_front(discard);
        } else {
            self.answer(discard.from, result);
        }
    }

    fn answer(&mut self, to: From, result: Result<(), Errno>) {
        let Some(ring) = self.rings.iter_mut().find(|ring| ring.key == to.ring) else {
            return;
        };
        ring.orders = ring.orders.saturating_sub(1);
        let id = to.id;
        // There is room for every answer to what a ring may have ordered. A ring that is gone is noticed
        // where its orders are received.
        if (Answer { id, result }).send(ring.socket.as_fd()) == Err(Stop::Later) {
            tracing::error!("a ring doesn't take its answers");
            let _ = rustix::net::shutdown(&ring.socket, rustix::net::Shutdown::Both);
        }
    }
}
