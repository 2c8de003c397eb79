//! One io_uring: takes operations that own their memory, gives back completions. It also holds the
//! rings' bounce slabs, so that memory the kernel was given outlives whatever the kernel does with
//! it. It decides nothing about requests. Only reads and writes are carried out here: whatever else a
//! target is asked may keep a thread of the kernel's for as long as the storage likes, and with it this
//! process' exit and all its rings, so that is `flusher`'s.
// UNSAFETY: io_uring takes raw addresses.
#![expect(
    unsafe_code,
    reason = "the one place of the backend that talks to the kernel by address"
)]

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::rc::Rc;
use std::time::Duration;

use io_uring::types::{CancelBuilder, Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use rustix::io::Errno;
use xenblk_grants::{Run, Slab};

/// Submission entries; more wait in [`Engine::queued`].
const SQ_ENTRIES: u32 = 1024;
/// Completion entries. The kernel keeps what doesn't fit (IORING_FEAT_NODROP).
const CQ_ENTRIES: u32 = 4096;
/// An operation the kernel interrupts or puts off more often than this has failed.
const RETRIES: u8 = 32;

/// A slab given to [`Engine::add_slab`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlabKey(usize);

/// Memory of a slab, lent: whoever has it may have it filled or written; giving it back is
/// [`Engine::release`]'s.
#[derive(Debug)]
#[must_use = "release it, or its slab never becomes whole again"]
pub(crate) struct Buffer {
    slab: SlabKey,
    run: Run,
    len: u32,
}

/// One transfer from or to a file, in bytes, as long as its buffer.
#[derive(Debug)]
pub(crate) enum Io {
    Read { offset: u64, buffer: Buffer },
    Write { offset: u64, buffer: Buffer },
}

/// Whose completion it is: a ring of the worker and a request of that ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag {
    pub(crate) ring: usize,
    pub(crate) request: usize,
}

/// A descriptor that was waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The supervisor's channel.
    Channel,
    /// The event channel device of a ring.
    Port(usize),
    /// The target of a ring.
    Target(usize),
    /// The flusher's answers to a ring.
    Flusher(usize),
}

#[derive(Debug)]
pub(crate) enum Event {
    /// An operation is over, completely: `Ok` only if the whole range was transferred.
    Done {
        tag: Tag,
        io: Io,
        result: Result<(), Errno>,
    },
    /// The wait is over; it has to be armed again. `ECANCELED` after [`Engine::cancel`].
    Woken {
        source: Source,
        result: Result<(), Errno>,
    },
}

#[derive(Debug)]
enum Pending {
    Io {
        tag: Tag,
        fd: RawFd,
        io: Io,
        done: u32,
        retries: u8,
    },
    /// The kernel writes the port's number to `word`. It stays here until then because only the
    /// shared count keeps it in place; nobody needs its value.
    Port {
        ring: usize,
        #[expect(dead_code, reason = "holding it is all it is for")]
        word: Rc<Cell<u32>>,
    },
    Poll {
        source: Source,
    },
    Cancel,
}

struct HeldSlab {
    slab: Slab,
    /// Buffers lent and not released.
    lent: usize,
}

/// See the module's head.
pub(crate) struct Engine {
    ring: IoUring,
    /// By user_data. A free entry is `None` and stands in `free`.
    pending: Vec<Option<Pending>>,
    free: Vec<usize>,
    /// Built, not yet in the submission queue.
    queued: VecDeque<squeue::Entry>,
    ready: VecDeque<Event>,
    slabs: Vec<Option<HeldSlab>>,
}

impl Engine {
    /// Only the thread that creates it may use it (SINGLE_ISSUER), and completions run only when that
    /// thread asks for them (DEFER_TASKRUN), not in the middle of something else.
    pub(crate) fn new() -> io::Result<Self> {
        let ring = IoUring::builder()
            .dontfork()
            .setup_cqsize(CQ_ENTRIES)
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .build(SQ_ENTRIES)?;
        if !ring.params().is_feature_nodrop() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let (pending, free, slabs) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self {
            ring,
            pending,
            free,
            queued: VecDeque::new(),
            ready: VecDeque::new(),
            slabs,
        })
    }

    pub(crate) fn add_slab(&mut self, slab: Slab) -> SlabKey {
        let held = Some(HeldSlab { slab, lent: 0 });
        match self.slabs.iter().position(Option::is_none) {
            Some(at) => {
                self.slabs[at] = held;
                SlabKey(at)
            }
            None => {
                self.slabs.push(held);
                SlabKey(self.slabs.len() - 1)
            }
        }
    }

    /// Frees a slab's memory, or says how many of its buffers are missing.
    pub(crate) fn remove_slab(&mut self, key: SlabKey) -> Result<(), usize> {
        match self.slabs.get_mut(key.0) {
            Some(held) => match held {
                Some(HeldSlab { lent: 0, .. }) | None => {
                    *held = None;
                    Ok(())
                }
                Some(HeldSlab { lent, .. }) => Err(*lent),
            },
            None => Ok(()),
        }
    }

    /// The slab for a grant copy. The memory of buffers under I/O must be left alone.
    pub(crate) fn slab(&mut self, key: SlabKey) -> Option<&mut Slab> {
        Some(&mut self.slabs.get_mut(key.0)?.as_mut()?.slab)
    }

    /// Lends `len` contiguous bytes, page-aligned, or `None` while there are none.
    pub(crate) fn lend(&mut self, key: SlabKey, len: u32) -> Option<Buffer> {
        let held = self.slabs.get_mut(key.0)?.as_mut()?;
        let run = held.slab.alloc((len as usize).div_ceil(4096))?;
        held.lent += 1;
        Some(Buffer {
            slab: key,
            run,
            len,
        })
    }

    pub(crate) fn release(&mut self, buffer: Buffer) {
        if let Some(Some(held)) = self.slabs.get_mut(buffer.slab.0) {
            held.slab.free(buffer.run);
            held.lent -= 1;
        }
    }

    pub(crate) fn bytes(&self, buffer: &Buffer) -> &[u8] {
        match self.slabs.get(buffer.slab.0) {
            Some(Some(held)) => &held.slab.bytes(&buffer.run)[..buffer.len as usize],
            _ => &[],
        }
    }

    pub(crate) fn bytes_mut(&mut self, buffer: &mut Buffer) -> &mut [u8] {
        match self.slabs.get_mut(buffer.slab.0) {
            Some(Some(held)) => &mut held.slab.bytes_mut(&mut buffer.run)[..buffer.len as usize],
            _ => &mut [],
        }
    }

    /// Starts `io` on `file`, which has to stay open until the next [`Self::enter`].
    pub(crate) fn start(&mut self, file: BorrowedFd<'_>, tag: Tag, io: Io) {
        let fd = file.as_raw_fd();
        let key = self.keep(Pending::Io {
            tag,
            fd,
            io,
            done: 0,
            retries: 0,
        });
        self.issue(key);
    }

    /// Makes `io` come back as [`Event::Done`] without the kernel's doing.
    pub(crate) fn complete(&mut self, tag: Tag, io: Io, result: Result<(), Errno>) {
        self.ready.push_back(Event::Done { tag, io, result });
    }

    /// Reads one port from an event channel device when there is one.
    pub(crate) fn read_port(&mut self, device: BorrowedFd<'_>, ring: usize, word: &Rc<Cell<u32>>) {
        let address = word.as_ptr().cast::<u8>();
        let key = self.keep(Pending::Port {
            ring,
            word: Rc::clone(word),
        });
        let fd = Fd(device.as_raw_fd());
        self.queue(
            opcode::Read::new(fd, address, 4).offset(u64::MAX).build(),
            key,
        );
    }

    /// Waits until `file` is readable or closed by the other end.
    pub(crate) fn poll(&mut self, file: BorrowedFd<'_>, source: Source) {
        let key = self.keep(Pending::Poll { source });
        let mask = libc::POLLIN as u32;
        self.queue(
            opcode::PollAdd::new(Fd(file.as_raw_fd()), mask).build(),
            key,
        );
    }

    /// Ends the wait for `source`, if there is one; it comes back as [`Event::Woken`].
    pub(crate) fn cancel(&mut self, source: Source) {
        let wanted = |pending: &Option<Pending>| match pending {
            Some(Pending::Poll { source: at }) => *at == source,
            Some(Pending::Port { ring, .. }) => Source::Port(*ring) == source,
            _ => false,
        };
        if let Some(key) = self.pending.iter().position(wanted) {
            let builder = CancelBuilder::user_data(key as u64);
            let key = self.keep(Pending::Cancel);
            self.queue(opcode::AsyncCancel2::new(builder).build(), key);
        }
    }

    /// Operations and waits of a ring that have not come back.
    pub(crate) fn pending_of(&self, ring: usize) -> usize {
        let of_ring = |pending: &&Pending| match pending {
            Pending::Io { tag, .. } => tag.ring == ring,
            Pending::Port { ring: at, .. } => *at == ring,
            Pending::Poll { source } => match source {
                Source::Port(at) | Source::Target(at) | Source::Flusher(at) => *at == ring,
                Source::Channel => false,
            },
            Pending::Cancel => false,
        };
        self.pending.iter().flatten().filter(of_ring).count()
    }

    /// The next thing that happened; call [`Self::enter`] after a `None`.
    pub(crate) fn next(&mut self) -> Option<Event> {
        self.ready.pop_front()
    }

    /// Submits everything and takes in completions; with `wait`, sleeps until there is one or the
    /// time is over.
    pub(crate) fn enter(&mut self, wait: bool, limit: Option<Duration>) -> io::Result<()> {
        self.fill();
        // All of it is on its way before this sleeps: what is still queued could be the very thing
        // that would end the sleep.
        while !self.queued.is_empty() {
            self.ring.submit().map(drop).or_else(tolerate)?;
            let queued = self.queued.len();
            self.fill();
            if self.queued.len() == queued {
                break;
            }
        }
        let idle = self.queued.is_empty() && self.ready.is_empty();
        let want = usize::from(wait && idle && self.ring.completion().is_empty());
        let result = match limit {
            Some(limit) if want > 0 => {
                let time = Timespec::from(limit);
                let args = SubmitArgs::new().timespec(&time);
                self.ring.submitter().submit_with_args(want, &args)
            }
            _ => {
                let queue = self.ring.submission();
                let idle = queue.is_empty() && !queue.taskrun() && !queue.cq_overflow();
                drop(queue);
                if want == 0 && idle {
                    Ok(0)
                } else {
                    self.ring.submit_and_wait(want)
                }
            }
        };
        result.map(drop).or_else(tolerate)?;
        self.reap();
        Ok(())
    }

    fn keep(&mut self, pending: Pending) -> usize {
        match self.free.pop() {
            Some(key) => {
                self.pending[key] = Some(pending);
                key
            }
            None => {
                self.pending.push(Some(pending));
                self.pending.len() - 1
            }
        }
    }

    fn queue(&mut self, entry: squeue::Entry, key: usize) {
        self.queued.push_back(entry.user_data(key as u64));
    }

    /// Moves built entries to the submission queue, as far as they fit.
    fn fill(&mut self) {
        let mut queue = self.ring.submission();
        while let Some(entry) = self.queued.front() {
            // SAFETY: every address in `entry` was made by `issue` or `read_port` from memory that
            // its `pending` entry keeps: a slab's run (slabs stay until all their buffers are
            // released, and a buffer under I/O is in `pending`) or a counted port word. `pending`
            // entries go only when their completion has come, and `drop` waits for all of them.
            if unsafe { queue.push(entry) }.is_err() {
                break;
            }
            self.queued.pop_front();
        }
    }

    /// Builds and queues the rest of the operation `key`.
    fn issue(&mut self, key: usize) {
        let Some(Some(Pending::Io { fd, io, done, .. })) = &self.pending.get(key) else {
            return;
        };
        let (fd, done) = (Fd(*fd), *done);
        let entry = match io {
            Io::Read { offset, buffer } => {
                let (address, len) = self.address(buffer, done);
                opcode::Read::new(fd, address, len)
                    .offset(offset + u64::from(done))
                    .build()
            }
            Io::Write { offset, buffer } => {
                let (address, len) = self.address(buffer, done);
                opcode::Write::new(fd, address, len)
                    .offset(offset + u64::from(done))
                    .build()
            }
        };
        self.queue(entry, key);
    }

    /// Where `buffer` goes on after `done` bytes, and how many are left.
    fn address(&self, buffer: &Buffer, done: u32) -> (*mut u8, u32) {
        match self.slabs.get(buffer.slab.0) {
            Some(Some(held)) => {
                let len = buffer.len - done;
                match held.slab.ptr(&buffer.run, done as usize, len as usize) {
                    Some(address) => (address, len),
                    None => (std::ptr::null_mut(), 0),
                }
            }
            _ => (std::ptr::null_mut(), 0),
        }
    }

    fn reap(&mut self) {
        loop {
            let Some(entry) = self.ring.completion().next() else {
                return;
            };
            let (key, result) = (entry.user_data() as usize, entry.result());
            let outcome = match u32::try_from(result) {
                Ok(bytes) => Ok(bytes),
                Err(_) => Err(Errno::from_raw_os_error(-result)),
            };
            self.completed(key, outcome);
        }
    }

    fn completed(&mut self, key: usize, outcome: Result<u32, Errno>) {
        let Some(slot) = self.pending.get_mut(key) else {
            return;
        };
        if let Some(Pending::Io {
            io, done, retries, ..
        }) = slot
        {
            let again = match (&outcome, &*io) {
                (Err(Errno::INTR | Errno::AGAIN), _) => {
                    *retries += 1;
                    *retries <= RETRIES
                }
                (Ok(0) | Err(_), _) => false,
                // A short transfer is no success: the rest is tried, and says why it can't be had.
                (Ok(bytes), Io::Read { buffer, .. } | Io::Write { buffer, .. }) => {
                    *done = done.saturating_add(*bytes).min(buffer.len);
                    *done < buffer.len
                }
            };
            if again {
                return self.issue(key);
            }
        }
        let Some(pending) = slot.take() else { return };
        self.free.push(key);
        let result = outcome.map(|_| ());
        self.ready.push_back(match pending {
            Pending::Io { tag, io, done, .. } => {
                let (Io::Read { buffer, .. } | Io::Write { buffer, .. }) = &io;
                let whole = done == buffer.len;
                // Nothing transferred and no error: the end of the file, where a disk has none.
                let result = if whole {
                    result
                } else {
                    result.and(Err(Errno::IO))
                };
                Event::Done { tag, io, result }
            }
            Pending::Port { ring, .. } => {
                // End of file on the device: nothing will ever come from it again.
                let result = if outcome == Ok(0) {
                    Err(Errno::PIPE)
                } else {
                    result
                };
                Event::Woken {
                    source: Source::Port(ring),
                    result,
                }
            }
            Pending::Poll { source } => Event::Woken { source, result },
            Pending::Cancel => return,
        });
    }
}

impl Drop for Engine {
    /// Nothing the kernel may still write to is freed: every wait is cancelled, every I/O awaited.
    fn drop(&mut self) {
        let key = self.keep(Pending::Cancel);
        self.queue(opcode::AsyncCancel2::new(CancelBuilder::any()).build(), key);
        while self.pending.iter().any(Option::is_some) {
            if let Err(error) = self.enter(true, None) {
                // What the kernel does with the memory can't be known any more, so it must stay.
                tracing::error!("io_uring_enter while closing: {error}");
                std::process::abort();
            }
            self.ready.clear();
        }
    }
}

impl Buffer {
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn slab(&self) -> SlabKey {
        self.slab
    }

    /// Where it starts in its slab, in bytes, for a grant copy.
    pub(crate) fn offset(&self) -> usize {
        self.run.offset()
    }
}

/// ETIME: the time is over. EINTR: a signal. EBUSY and EAGAIN: completions have to be taken in first;
/// what was not submitted stays in the queue.
fn tolerate(error: io::Error) -> io::Result<()> {
    match error.raw_os_error() {
        Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => Ok(()),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn more_than_the_submission_queue_holds_is_submitted_before_sleeping() {
        let mut engine = Engine::new().unwrap();
        let (silent, _writer) = io::pipe().unwrap();
        let (speaking, mut writer) = io::pipe().unwrap();
        io::Write::write_all(&mut writer, b"x").unwrap();
        for n in 0..SQ_ENTRIES as usize * 2 {
            engine.poll(silent.as_fd(), Source::Target(n));
        }
        engine.poll(speaking.as_fd(), Source::Channel);
        engine.enter(true, Some(Duration::from_secs(30))).unwrap();
        let event = engine.next();
        assert!(
            matches!(
                event,
                Some(Event::Woken {
                    source: Source::Channel,
                    result: Ok(())
                })
            ),
            "{event:?}"
        );
    }
}
