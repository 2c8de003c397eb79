//! The transmission phase of one connection: a reading thread that turns requests into disk
//! operations, and a replying thread that goes on with them as they complete, in whatever order.
//!
//! The completion callback runs on a frontend's thread and must not block, so it only queues; the
//! queue's length is bounded by the connection's [`Budget`]. Follow-up operations (the flush of a
//! FUA write, the next piece of WRITE_ZEROES) are submitted by the replying thread, which may block.

use std::io::{self, BufReader, IoSlice, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

use crossbeam::channel::{Receiver, Sender, unbounded};

use super::MAX_PAYLOAD;
use super::budget::{Budget, Permit};
use super::handshake::skip;
use super::wire::{self, CMD_FUA, CMD_NO_HOLE, Errno, Request, command};
use crate::disk::{DiskInfo, GuestDisk, IoError, Op};

/// WRITE_ZEROES goes to the disk in writes of at most so many bytes, one after the other.
const ZEROES_PIECE: u32 = 1 << 20;

/// Serves requests until the client disconnects, breaks the protocol or goes away; everything in
/// flight is answered first. `number` is where this connection starts its round robin over the queues.
pub(super) fn transmit(
    stream: &UnixStream,
    disk: &Arc<dyn GuestDisk>,
    number: usize,
    budget: &Arc<Budget>,
) {
    let Ok(output) = stream.try_clone() else {
        return;
    };
    let (completed, completions) = unbounded();
    let (follow_up, allowance) = (Arc::clone(disk), Arc::clone(budget));
    let replier = thread::Builder::new()
        .name(format!("nbd-{number}-reply"))
        .spawn(move || reply(&output, follow_up.as_ref(), &completions, &allowance));
    let Ok(replier) = replier else { return };
    let reader = Reader {
        disk: disk.as_ref(),
        info: disk.info(),
        budget: Arc::clone(budget),
        completed,
    };
    // However it ends, nothing more is read; what was accepted is still answered.
    let _ = reader.run(stream, number);
    drop(reader);
    let _ = replier.join();
}

/// What is left to do for a request once its present operation is answered.
enum Rest {
    /// Only the reply.
    Reply,
    /// Flush, then reply.
    Flush,
    /// Write zeroes to `len` bytes at `offset`, perhaps flush, then reply.
    Zeroes { offset: u64, len: u32, fua: bool },
}

/// A request that the disk is working on, or that is on its way to the replying thread.
struct Pending {
    cookie: u64,
    hint: usize,
    rest: Rest,
    /// Held, not read: its drop lets the reader go on.
    _permit: Permit,
    completed: Sender<Completion>,
}

struct Completion {
    pending: Pending,
    outcome: Result<Vec<u8>, Errno>,
}

impl Pending {
    fn submit(self, disk: &dyn GuestDisk, op: Op) {
        disk.submit(
            self.hint,
            op,
            Box::new(move |outcome| self.finish(outcome.map_err(errno))),
        );
    }

    /// Hands the request to the replying thread. If that has ended (the client is gone) the request
    /// is dropped here, which returns its permit.
    fn finish(self, outcome: Result<Vec<u8>, Errno>) {
        let queue = self.completed.clone();
        let _ = queue.send(Completion {
            pending: self,
            outcome,
        });
    }

    /// Submits what is left to do. `Err` gives the request back: only the reply is left.
    fn go_on(mut self, disk: &dyn GuestDisk) -> Result<(), Self> {
        let op = match self.rest {
            Rest::Reply => return Err(self),
            Rest::Flush => {
                self.rest = Rest::Reply;
                Op::Flush
            }
            Rest::Zeroes { offset, len, fua } => {
                let (op, rest) = zeroes(offset, len, fua);
                self.rest = rest;
                op
            }
        };
        self.submit(disk, op);
        Ok(())
    }
}

/// The next write of a WRITE_ZEROES and what is left after it.
fn zeroes(offset: u64, len: u32, fua: bool) -> (Op, Rest) {
    let piece = len.min(ZEROES_PIECE);
    let op = Op::Write {
        offset,
        data: vec![0; piece as usize],
    };
    let rest = match len - piece {
        0 => after_write(fua),
        len => Rest::Zeroes {
            offset: offset + u64::from(piece),
            len,
            fua,
        },
    };
    (op, rest)
}

fn after_write(fua: bool) -> Rest {
    if fua { Rest::Flush } else { Rest::Reply }
}

fn errno(error: IoError) -> Errno {
    match error {
        IoError::Error => Errno::Io,
        IoError::NotSupported => Errno::NotSupported,
        IoError::Invalid => Errno::Invalid,
        IoError::Gone => Errno::Shutdown,
    }
}

/// A request judged: what goes to the disk first, and the rest.
type Accepted = (Op, Rest);

struct Reader<'a> {
    disk: &'a dyn GuestDisk,
    info: DiskInfo,
    budget: Arc<Budget>,
    completed: Sender<Completion>,
}

impl Reader<'_> {
    fn run(&self, stream: &UnixStream, number: usize) -> io::Result<()> {
        let mut input = BufReader::new(stream);
        let mut hint = number;
        loop {
            let mut header = [0; wire::REQUEST_BYTES];
            input.read_exact(&mut header)?;
            let Some(request) = Request::decode(&header) else {
                return Err(io::ErrorKind::InvalidData.into());
            };
            if request.command == command::DISC {
                return Ok(());
            }
            let Some(permit) = self.budget.take(memory(&request)) else {
                return Ok(());
            };
            let judged = self.judge(&request);
            if judged.is_err() {
                skip_payload(&request, &mut input)?;
            }
            let (op, rest) = match judged {
                Ok((op, rest)) => (Ok(op), rest),
                Err(errno) => (Err(errno), Rest::Reply),
            };
            hint = hint.wrapping_add(1);
            let completed = self.completed.clone();
            let pending = Pending {
                cookie: request.cookie,
                hint,
                rest,
                _permit: permit,
                completed,
            };
            match op {
                Ok(op) => pending.submit(self.disk, with_payload(&request, op, &mut input)?),
                Err(errno) => pending.finish(Err(errno)),
            }
        }
    }

    /// What `request` means for the disk, or the error it is answered with. The data of a WRITE is
    /// still to be read.
    fn judge(&self, request: &Request) -> Result<Accepted, Errno> {
        let Request {
            flags,
            command,
            offset,
            len,
            ..
        } = *request;
        let allowed = if command == command::WRITE_ZEROES {
            CMD_FUA | CMD_NO_HOLE
        } else {
            CMD_FUA
        };
        let fua = flags & CMD_FUA != 0;
        if flags & !allowed != 0 || (fua && !self.info.flush) {
            return Err(Errno::Invalid);
        }
        let modifies = matches!(
            command,
            command::WRITE | command::TRIM | command::WRITE_ZEROES
        );
        if modifies && self.info.readonly {
            return Err(Errno::Perm);
        }
        match command {
            command::READ => {
                self.check(offset, len, MAX_PAYLOAD, Errno::Invalid)?;
                Ok((Op::Read { offset, len }, Rest::Reply))
            }
            command::WRITE => {
                self.check(offset, len, MAX_PAYLOAD, Errno::NoSpace)?;
                Ok((
                    Op::Write {
                        offset,
                        data: vec![0; len as usize],
                    },
                    after_write(fua),
                ))
            }
            command::FLUSH if self.info.flush => Ok((Op::Flush, Rest::Reply)),
            command::TRIM if self.info.discard => {
                self.check(offset, len, u32::MAX, Errno::Invalid)?;
                Ok((
                    Op::Discard {
                        offset,
                        len: u64::from(len),
                    },
                    after_write(fua),
                ))
            }
            command::WRITE_ZEROES => {
                self.check(offset, len, u32::MAX, Errno::NoSpace)?;
                Ok(zeroes(offset, len, fua))
            }
            _ => Err(Errno::Invalid),
        }
    }

    /// In whole sectors, not empty, at most `max` bytes and inside the disk; else `outside`.
    fn check(&self, offset: u64, len: u32, max: u32, outside: Errno) -> Result<(), Errno> {
        let sector = u64::from(self.info.sector_size.max(1));
        if len == 0 || len > max || !offset.is_multiple_of(sector) {
            return Err(Errno::Invalid);
        }
        if !u64::from(len).is_multiple_of(sector) {
            return Err(Errno::Invalid);
        }
        match self.info.size.checked_sub(offset) {
            Some(left) if u64::from(len) <= left => Ok(()),
            _ => Err(outside),
        }
    }
}

/// Bytes of memory that a request needs until its reply is written. One that is too long is refused
/// and needs none.
fn memory(request: &Request) -> u32 {
    match request.command {
        command::READ | command::WRITE if request.len <= MAX_PAYLOAD => request.len,
        command::WRITE_ZEROES => request.len.min(ZEROES_PIECE),
        _ => 0,
    }
}

/// Reads the data of a WRITE into `op`; other requests (WRITE_ZEROES too) carry none.
fn with_payload(request: &Request, mut op: Op, mut input: impl Read) -> io::Result<Op> {
    if let (command::WRITE, Op::Write { data, .. }) = (request.command, &mut op) {
        input.read_exact(data)?;
    }
    Ok(op)
}

/// A refused WRITE's data still follows its header. More than the announced maximum can't be
/// followed without reading gigabytes for nothing: the connection ends.
fn skip_payload(request: &Request, input: impl Read) -> io::Result<()> {
    match request.command {
        command::WRITE if request.len > MAX_PAYLOAD => Err(io::ErrorKind::InvalidData.into()),
        command::WRITE => skip(input, u64::from(request.len)),
        _ => Ok(()),
    }
}

/// Answers completed requests until the reader has ended and nothing is in flight, or the client no
/// longer takes answers.
fn reply(
    output: &UnixStream,
    disk: &dyn GuestDisk,
    completions: &Receiver<Completion>,
    budget: &Budget,
) {
    for Completion { pending, outcome } in completions {
        let (pending, outcome) = match outcome {
            Ok(data) => match pending.go_on(disk) {
                Ok(()) => continue,
                Err(pending) => (pending, Ok(data)),
            },
            Err(errno) => (pending, Err(errno)),
        };
        let written = match &outcome {
            Ok(data) => write_reply(output, &wire::simple_reply(pending.cookie, None), data),
            Err(errno) => write_reply(
                output,
                &wire::simple_reply(pending.cookie, Some(*errno)),
                &[],
            ),
        };
        if written.is_err() {
            // Before the permit goes back: no further request is worth reading.
            budget.close();
            break;
        }
        // The permit goes back only now, with the reply written.
        drop(pending);
    }
    // Also wakes a reader that waits for the client's next request.
    let _ = output.shutdown(Shutdown::Both);
}

/// One `writev` where the socket takes it all at once.
fn write_reply(mut output: &UnixStream, head: &[u8], data: &[u8]) -> io::Result<()> {
    let written = loop {
        match output.write_vectored(&[IoSlice::new(head), IoSlice::new(data)]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => break other?,
        }
    };
    if let Some(head) = head.get(written..) {
        output.write_all(head)?;
    }
    output.write_all(
        data.get(written.saturating_sub(head.len())..)
            .unwrap_or_default(),
    )
}
