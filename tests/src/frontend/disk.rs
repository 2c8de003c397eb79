//! The guest's block device: one queue thread per ring, and the way in for everybody else.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;
use xenblk_grants::DomId;
use xenblk_grants::fake::FakeDomain;

use super::inbox::{Inbox, Pending};
use super::link::Link;
use super::queue::{Queue, QueueCounters};
use super::ring::{GuestRing, Manners, RingParts};
use super::source::{Job, Limits};
use crate::disk::{DiskInfo, Done, GuestDisk, IoError, Op};

/// Requests that may wait in front of a ring; [`GuestDisk::submit`] blocks beyond.
const BACKLOG: usize = 256;

/// The way to one queue's thread. The standard library's channels drop what waits in them when the thread
/// ends, which is how a request that comes too late is answered; crossbeam's keep it.
#[derive(Debug)]
struct Entrance {
    requests: SyncSender<Pending>,
    jobs: SyncSender<Box<dyn Job>>,
    counters: Arc<QueueCounters>,
}

/// A connected disk. It ends with its connection: a reconnected guest has a new one.
#[derive(Debug)]
pub struct Disk {
    info: DiskInfo,
    limits: Limits,
    persistent: bool,
    link: Arc<Link>,
    entrances: Vec<Entrance>,
    threads: Mutex<Vec<JoinHandle<RingParts>>>,
}

impl Disk {
    /// Starts a thread for each ring.
    pub(super) fn start(
        info: DiskInfo,
        segments: usize,
        name: &str,
        domain: &FakeDomain,
        manners: Manners,
        rings: Vec<RingParts>,
    ) -> io::Result<Self> {
        let limits = Limits {
            segments,
            capacity: info.size / 512,
        };
        let link = Arc::new(Link::new(name.into(), info.flush, rings.len())?);
        let mut entrances = Vec::new();
        let mut threads = Vec::new();
        for (number, parts) in rings.into_iter().enumerate() {
            let (requests, inbox) = sync_channel(BACKLOG);
            let (jobs, job_queue) = sync_channel(1);
            let counters = Arc::new(QueueCounters::default());
            let closed = || io::Error::other("the ring's event channel is closed");
            let queue = Queue {
                number,
                port_fd: domain.port_fd(parts.port).ok_or_else(closed)?,
                ring: GuestRing::new(parts, domain.clone(), DomId(0), manners),
                domain: domain.clone(),
                limits,
                inbox: Inbox::new(inbox),
                jobs: job_queue,
                job: None,
                job_in_flight: 0,
                held: None,
                link: Arc::clone(&link),
                counters: Arc::clone(&counters),
            };
            entrances.push(Entrance {
                requests,
                jobs,
                counters,
            });
            let thread = thread::Builder::new().name(format!("{name} ring {number}"));
            threads.push(thread.spawn(move || queue.run())?);
        }
        Ok(Self {
            info,
            limits,
            persistent: manners.persistent,
            link,
            entrances,
            threads: Mutex::new(threads),
        })
    }

    /// What one request can be.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Grants outlive their requests: both sides have persistent grants.
    pub fn persistent(&self) -> bool {
        self.persistent
    }

    /// Rings.
    pub fn queues(&self) -> usize {
        self.entrances.len()
    }

    /// Why the disk is gone, if it is.
    pub fn gone(&self) -> Option<&str> {
        self.link.gone()
    }

    /// What the ring `queue` counted so far.
    pub fn counters(&self, queue: usize) -> &QueueCounters {
        &self.entrances[queue].counters
    }

    /// Runs `job` on the thread of ring `queue`, after those handed in before it.
    pub fn run(&self, queue: usize, job: Box<dyn Job>) {
        // A disk that is gone drops the job, which is how jobs learn of it.
        let _ = self.entrances[queue].jobs.send(job);
        self.link.wakes[queue].wake();
    }

    /// Submits and waits for at most `patience`; none if there was no answer.
    pub fn request(
        &self,
        hint: usize,
        op: Op,
        patience: Duration,
    ) -> Option<Result<Vec<u8>, IoError>> {
        let (answer, answers) = sync_channel(1);
        // Nobody listens once the patience is over.
        self.submit(
            hint,
            op,
            Box::new(move |outcome| drop(answer.send(outcome))),
        );
        answers.recv_timeout(patience).ok()
    }

    /// Ends the disk: everything in flight and to come fails with [`IoError::Gone`].
    pub fn kill(&self, reason: String) {
        self.link.kill(reason);
    }

    /// Waits for the threads of a killed disk and returns their rings.
    pub(super) fn join(&self) -> Vec<RingParts> {
        let threads = std::mem::take(&mut *self.threads.lock());
        threads
            .into_iter()
            .filter_map(|thread| thread.join().ok())
            .collect()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.link.kill("nobody uses it any more".into());
    }
}

impl GuestDisk for Disk {
    fn info(&self) -> DiskInfo {
        self.info.clone()
    }

    fn submit(&self, hint: usize, op: Op, done: Done) {
        let pending = Pending::new(op, done);
        if let Err(outcome) = pending.admit(&self.info) {
            return pending.answer(outcome);
        }
        let queue = hint % self.entrances.len();
        // The error case drops the request, which answers it.
        let _ = self.entrances[queue].requests.send(pending);
        self.link.wakes[queue].wake();
    }
}
