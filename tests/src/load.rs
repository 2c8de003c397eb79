//! A load in fio's terms, run on the queue threads themselves: what is measured is ring, backend and
//! target, not the passing of requests between threads. Data is not looked at; that is `verify`'s.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam::channel::{Sender, unbounded};

use crate::disk::IoError;
use crate::frontend::{Disk, GuestBuffer, Io, IoKind, Job, Limits, Source};
use crate::latency::Latency;
use crate::pattern::scramble;

/// Which requests, in which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Reads in ascending order.
    Read,
    /// Writes in ascending order.
    Write,
    /// Reads anywhere.
    RandRead,
    /// Writes anywhere.
    RandWrite,
    /// Reads and writes anywhere, half each.
    RandRw,
}

/// One run.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Which requests.
    pub mode: Mode,
    /// Bytes of a request; a multiple of 512.
    pub block: u64,
    /// Requests in flight on each ring.
    pub depth: usize,
    /// Ends the run after this time.
    pub runtime: Duration,
    /// Ends the run earlier, once all rings together have moved so many bytes.
    pub size: Option<u64>,
    /// Ends the run when set.
    pub stop: Arc<AtomicBool>,
}

/// What one ring did.
#[derive(Clone, Debug, Default)]
pub struct RingResult {
    /// Requests answered.
    pub requests: u64,
    /// Of these, not with OKAY.
    pub errors: u64,
    /// From the first request to the last answer.
    pub elapsed: Duration,
    /// From handing a request to the ring to seeing its answer.
    pub latency: Latency,
}

impl RingResult {
    /// Requests a second.
    pub fn iops(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

/// Why a run was not started, or its result is void.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A request would not fit into one ring request or onto the disk.
    #[error("block size {block}: expected at most {most}, what one request to this disk can carry")]
    Block {
        /// What was asked.
        block: u64,
        /// What is possible.
        most: u64,
    },
    /// Not even one request would be sent.
    #[error("size {size}: expected at least one block of {block} bytes")]
    Size {
        /// What was asked.
        size: u64,
        /// Bytes of a request.
        block: u64,
    },
    /// The disk went away.
    #[error("the disk is gone: {0}")]
    Gone(String),
}

/// Runs `spec` on every ring of `disk` at once; results in the order of the rings.
pub fn run(disk: &Disk, spec: &Spec) -> Result<Vec<RingResult>, LoadError> {
    let limits = disk.limits();
    // A block that is no multiple of a page starts anywhere in its first page.
    let start = if spec.block.is_multiple_of(4096) {
        0
    } else {
        7
    };
    let most = limits.sectors_at(start).min(limits.capacity) * 512;
    if spec.block > most {
        return Err(LoadError::Block {
            block: spec.block,
            most,
        });
    }
    if let Some(size) = spec.size.filter(|&size| size < spec.block) {
        return Err(LoadError::Size {
            size,
            block: spec.block,
        });
    }
    let queues = disk.queues();
    let (report, reports) = unbounded();
    for queue in 0..queues {
        disk.run(
            queue,
            Box::new(Load::new(spec, limits, queue, queues, report.clone())),
        );
    }
    drop(report);
    let mut results = vec![RingResult::default(); queues];
    for (queue, result) in reports {
        results[queue] = result;
    }
    disk.gone().map_or(Ok(results), |reason| {
        Err(LoadError::Gone(reason.to_owned()))
    })
}

/// The load of one ring. Its result is sent when it is dropped, however it ended.
struct Load {
    spec: Spec,
    queue: usize,
    /// Blocks this ring may touch: its share for sequential modes, all for random ones.
    blocks: std::ops::Range<u64>,
    next_block: u64,
    random: u64,
    /// Requests still to be sent.
    left: u64,
    /// When each request in flight was sent, by token.
    sent: Vec<Instant>,
    free: Vec<usize>,
    started: Option<Instant>,
    result: RingResult,
    report: Sender<(usize, RingResult)>,
}

impl Load {
    fn new(
        spec: &Spec,
        limits: Limits,
        queue: usize,
        queues: usize,
        report: Sender<(usize, RingResult)>,
    ) -> Self {
        let all = limits.capacity * 512 / spec.block;
        let share = (all / queues as u64).max(1);
        let blocks = match spec.mode {
            Mode::Read | Mode::Write => {
                let first = share * queue as u64 % all;
                first..first + share
            }
            Mode::RandRead | Mode::RandWrite | Mode::RandRw => 0..all,
        };
        Self {
            spec: spec.clone(),
            queue,
            next_block: blocks.start,
            blocks,
            random: scramble(queue as u64),
            left: spec
                .size
                .map_or(u64::MAX, |size| (size / spec.block).div_ceil(queues as u64)),
            sent: vec![Instant::now(); spec.depth],
            free: (0..spec.depth).rev().collect(),
            started: None,
            result: RingResult::default(),
            report,
        }
    }

    /// The next block, and whether to write it.
    fn choose(&mut self) -> (u64, bool) {
        self.random = scramble(self.random);
        let anywhere = self.random % (self.blocks.end - self.blocks.start);
        match self.spec.mode {
            Mode::Read | Mode::Write => {
                let block = self.next_block;
                self.next_block = if block + 1 < self.blocks.end {
                    block + 1
                } else {
                    self.blocks.start
                };
                (block, self.spec.mode == Mode::Write)
            }
            Mode::RandRead => (anywhere, false),
            Mode::RandWrite => (anywhere, true),
            Mode::RandRw => (anywhere, self.random >> 63 == 1),
        }
    }
}

impl Source for Load {
    fn next(&mut self, _limits: &Limits) -> Option<Io> {
        let now = Instant::now();
        let started = *self.started.get_or_insert(now);
        if now - started >= self.spec.runtime || self.spec.stop.load(Ordering::Relaxed) {
            self.left = 0;
        }
        if self.left == 0 {
            return None;
        }
        let token = self.free.pop()?;
        self.left -= 1;
        self.sent[token] = now;
        let (block, write) = self.choose();
        let sectors = self.spec.block / 512;
        let kind = if write { IoKind::Write } else { IoKind::Read };
        Some(Io {
            kind,
            sector: block * sectors,
            sectors,
            token,
        })
    }

    fn fill(&mut self, _io: &Io, _buffer: &GuestBuffer<'_>) {}

    fn done(&mut self, io: &Io, outcome: Result<(), IoError>, _buffer: &GuestBuffer<'_>) {
        let now = Instant::now();
        self.result.latency.record(now - self.sent[io.token]);
        self.result.requests += 1;
        self.result.errors += u64::from(outcome.is_err());
        self.result.elapsed = self.started.map_or(Duration::ZERO, |started| now - started);
        self.free.push(io.token);
    }
}

impl Job for Load {
    fn finished(&self) -> bool {
        self.left == 0
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // Nobody listens only if the run itself was abandoned.
        let _ = self
            .report
            .send((self.queue, std::mem::take(&mut self.result)));
    }
}
