//! The thread behind each ring: sends what its sources have, hands out what was answered, and sleeps on the
//! ring's event channel when there is neither. What a response may be is `ring`'s business, where requests
//! come from `source`'s.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use xenblk_grants::fake::FakeDomain;
use xenblk_ring::Status;

use super::inbox::Inbox;
use super::link::Link;
use super::ring::{Answer, GuestRing, Owner, RingParts, Violation};
use super::source::{GuestBuffer, Io, IoKind, Job, Limits, Source};
use crate::disk::IoError;

/// After how long a ring that waits for other rings' grants looks for them again.
const RETRY: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 1_000_000,
};

/// What a queue counted; written by its thread, read by anyone.
#[derive(Debug, Default)]
pub struct QueueCounters {
    /// Requests put on the ring.
    pub requests: AtomicU64,
    /// Requests not answered with OKAY.
    pub errors: AtomicU64,
    /// Events sent to the backend.
    pub notifies: AtomicU64,
    /// Wake-ups by the backend's events.
    pub events: AtomicU64,
}

/// One queue's thread.
pub(super) struct Queue {
    pub(super) number: usize,
    pub(super) ring: GuestRing,
    pub(super) domain: FakeDomain,
    /// Readable while the backend's event is pending.
    pub(super) port_fd: OwnedFd,
    pub(super) limits: Limits,
    pub(super) inbox: Inbox,
    pub(super) jobs: Receiver<Box<dyn Job>>,
    pub(super) job: Option<Box<dyn Job>>,
    /// Requests of the job in flight or held.
    pub(super) job_in_flight: usize,
    /// A request for which the guest had no memory or grants left; nothing else is sent before it.
    pub(super) held: Option<(Io, Owner)>,
    pub(super) link: Arc<Link>,
    pub(super) counters: Arc<QueueCounters>,
}

impl Queue {
    /// Runs until the disk is gone; gives the ring back for its grants to be taken.
    pub(super) fn run(mut self) -> RingParts {
        while self.link.gone().is_none() {
            if let Err(violation) = self.turn() {
                self.link
                    .disable(format!("ring {}: {violation}", self.number));
            }
        }
        let unanswered = self.ring.abandon().into_iter().chain(self.held.take());
        for (io, owner) in unanswered {
            let buffer = GuestBuffer {
                domain: &self.domain,
                pages: &[],
            };
            if let Some(source) = Self::source(&mut self.inbox, &mut self.job, owner) {
                source.done(&io, Err(IoError::Gone), &buffer);
            }
        }
        self.ring.into_parts()
    }

    /// Everything there is to do now, then sleep if that was nothing.
    fn turn(&mut self) -> Result<(), Violation> {
        self.ring.pool.purge();
        let answered = self.collect()?;
        let sent = self.send()?;
        // Sets rsp_event, so that the next response raises an event, and looks once more.
        if answered
            || sent
            || self
                .ring
                .parts
                .front
                .final_check()
                .map_err(|_| Violation::Ring)?
        {
            return Ok(());
        }
        self.link.wakes[self.number].prepare();
        let nothing_to_send = self.held.is_some() || (self.inbox.is_idle() && !self.has_new_job());
        if nothing_to_send && self.link.gone().is_none() {
            self.sleep();
        }
        self.link.wakes[self.number].awake();
        Ok(())
    }

    fn sleep(&self) {
        let wake = &self.link.wakes[self.number];
        let mut fds = [
            PollFd::from_borrowed_fd(self.port_fd.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN),
        ];
        // Other rings don't say when they give grants back; our own answers do.
        let waits_for_others = self.held.is_some() && self.ring.is_idle();
        let limit = if waits_for_others {
            Some(RETRY)
        } else {
            let patience = self.ring.pool.patience();
            patience.and_then(|patience| Timespec::try_from(patience).ok())
        };
        // Fails only with EINTR, and the caller looks at everything again anyway.
        let _ = poll(&mut fds, limit.as_ref());
        if !fds[0].revents().is_empty() {
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.port_fd, &mut count);
            self.counters.events.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Hands out every response there is.
    fn collect(&mut self) -> Result<bool, Violation> {
        let mut any = false;
        while let Some(answer) = self.ring.take()? {
            any = true;
            self.deliver(&answer);
            self.ring.recycle(answer);
        }
        Ok(any)
    }

    fn deliver(&mut self, answer: &Answer) {
        let mut outcome = match answer.status {
            Status::Okay => Ok(()),
            Status::Error => Err(IoError::Error),
            Status::NotSupported => Err(IoError::NotSupported),
        };
        if outcome.is_err() {
            self.counters.errors.fetch_add(1, Ordering::Relaxed);
            if answer.io.kind == IoKind::Flush {
                // Linux: an empty flush that fails is reported as done and was the last one sent.
                self.link.stop_flushing(answer.status);
                outcome = Ok(());
            }
        }
        if answer.owner == Owner::Job {
            self.job_in_flight -= 1;
        }
        if let Some(source) = Self::source(&mut self.inbox, &mut self.job, answer.owner) {
            source.done(&answer.io, outcome, &answer.buffer(&self.domain));
        }
    }

    /// Fills the ring, the job's and the inbox's requests in turn, then publishes and notifies once.
    fn send(&mut self) -> Result<bool, Violation> {
        let mut any = match self.held.take() {
            Some((io, owner)) => self.push(io, owner)?,
            None => false,
        };
        let mut dry = [false; 2];
        while self.can_send() && dry != [true; 2] {
            for (owner, dry) in [Owner::Job, Owner::Inbox].into_iter().zip(&mut dry) {
                let sent = self.can_send() && self.send_one(owner)?;
                any |= sent;
                *dry = !sent;
            }
        }
        if any && self.ring.parts.front.publish() {
            self.counters.notifies.fetch_add(1, Ordering::Relaxed);
            self.domain.notify(self.ring.parts.port);
        }
        Ok(any)
    }

    fn can_send(&self) -> bool {
        self.held.is_none() && self.ring.has_room()
    }

    fn send_one(&mut self, owner: Owner) -> Result<bool, Violation> {
        if owner == Owner::Job {
            self.has_new_job();
        }
        let Some(source) = Self::source(&mut self.inbox, &mut self.job, owner) else {
            return Ok(false);
        };
        let Some(io) = source.next(&self.limits) else {
            return Ok(owner == Owner::Job && self.retire_job());
        };
        if io.kind == IoKind::Flush && !self.link.flushes() {
            let nothing = GuestBuffer {
                domain: &self.domain,
                pages: &[],
            };
            source.done(&io, Ok(()), &nothing);
            return Ok(true);
        }
        self.job_in_flight += usize::from(owner == Owner::Job);
        self.push(io, owner)
    }

    /// Puts a request on the ring, or holds it.
    fn push(&mut self, io: Io, owner: Owner) -> Result<bool, Violation> {
        let Some(source) = Self::source(&mut self.inbox, &mut self.job, owner) else {
            return Ok(false);
        };
        let fill = |buffer: &GuestBuffer<'_>| source.fill(&io, buffer);
        if self.ring.push(io, owner, fill)? {
            self.counters.requests.fetch_add(1, Ordering::Relaxed);
            return Ok(true);
        }
        self.held = Some((io, owner));
        Ok(false)
    }

    /// Takes the next job once there is none; true if it did.
    fn has_new_job(&mut self) -> bool {
        if self.job.is_some() {
            return false;
        }
        self.job = self.jobs.try_recv().ok();
        self.job.is_some()
    }

    /// Drops a job that is through, which is how it learns of its end.
    fn retire_job(&mut self) -> bool {
        let through =
            self.job_in_flight == 0 && self.job.as_ref().is_some_and(|job| job.finished());
        if through {
            self.job = None;
        }
        through
    }

    fn source<'a>(
        inbox: &'a mut Inbox,
        job: &'a mut Option<Box<dyn Job>>,
        owner: Owner,
    ) -> Option<&'a mut dyn Source> {
        match owner {
            Owner::Inbox => Some(inbox),
            Owner::Job => job.as_mut().map(|job| job.as_mut() as &mut dyn Source),
        }
    }
}
