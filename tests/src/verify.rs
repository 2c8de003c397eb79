//! Proof that a disk keeps what it is given: every ring writes its share of a [`Pattern`] while the others
//! write theirs right beside it, parts are overwritten and read back at once, and in the end each ring
//! reads what another one wrote. No two requests in flight overlap, so there is one right answer.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam::channel::{Sender, unbounded};

use crate::disk::IoError;
use crate::frontend::{Disk, GuestBuffer, Io, IoKind, Job, Limits, Source};
use crate::latency::Latency;
use crate::pattern::{Mismatch, Pattern, SECTOR, scramble};

/// Sectors of a block: as much as Linux puts into one request (32 indirect segments).
const BLOCK: u64 = 256;
/// Sectors of a random read in [`Stage::Sample`].
const SAMPLE: u64 = 8;
/// Most examples a report names.
const EXAMPLES: usize = 3;

/// The steps of a pass, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Generation 1 everywhere, ascending, neighbouring blocks by different rings.
    Fill,
    /// Generation 2 over part of every other block, in no order; each is read back at once.
    Overwrite,
    /// Every block is read and compared, by another ring than wrote it.
    Check,
    /// As many 4 KiB reads anywhere as there are blocks, times eight.
    Sample,
}

impl Stage {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Fill, Self::Overwrite, Self::Check, Self::Sample];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fill => "write",
            Self::Overwrite => "overwrite",
            Self::Check => "read and compare",
            Self::Sample => "random 4 KiB reads",
        }
    }
}

/// What is where on the disk once [`Stage::Overwrite`] is through; pure.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// The data.
    pub pattern: Pattern,
    /// Sectors covered; a tail that is no whole block stays unused.
    pub sectors: u64,
}

impl Layout {
    /// Whole blocks covered.
    pub fn blocks(&self) -> u64 {
        self.sectors / BLOCK
    }

    /// The part of `block` that generation 2 replaces, in sectors of the disk; it starts and ends
    /// anywhere, is empty for half the blocks, and takes 1 to 200 sectors.
    fn overwritten(&self, block: u64) -> Range<u64> {
        let random = scramble(self.pattern.seed ^ scramble(block));
        let first = block * BLOCK + (random >> 8) % 56;
        let len = if random & 1 == 0 {
            0
        } else {
            1 + (random >> 32) % 200
        };
        first..first + len
    }

    /// Compares `data`, whole sectors from `sector` on, with the final content.
    pub fn check(&self, sector: u64, data: &[u8]) -> Result<(), Mismatch> {
        let end = sector + (data.len() / SECTOR) as u64;
        let mut at = sector;
        while at < end {
            let new = self.overwritten(at / BLOCK);
            let block_end = (at / BLOCK + 1) * BLOCK;
            let (generation, until) = if new.contains(&at) {
                (2, new.end)
            } else if at < new.start {
                (1, new.start)
            } else {
                (1, block_end)
            };
            let until = until.min(end);
            let bytes = |sector_on_disk: u64| (sector_on_disk - sector) as usize * SECTOR;
            self.pattern
                .check(at, generation, &data[bytes(at)..bytes(until)])?;
            at = until;
        }
        Ok(())
    }
}

/// How a pass is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// What is written.
    pub layout: Layout,
    /// Requests in flight on each ring.
    pub depth: usize,
    /// Sectors read or written so far, for a progress bar; see [`total_sectors`].
    pub progress: Arc<AtomicU64>,
    /// Ends the pass when set.
    pub stop: Arc<AtomicBool>,
}

/// What one ring saw in one stage.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Requests answered.
    pub requests: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Requests that failed.
    pub io_errors: u64,
    /// Requests whose data was wrong.
    pub mismatches: u64,
    /// The first few of either, in words.
    pub examples: Vec<String>,
    /// From the first request to the last answer.
    pub elapsed: Duration,
    /// Of every request.
    pub latency: Latency,
}

impl Outcome {
    /// Adds what the same ring saw in another stage.
    pub fn merge(&mut self, other: &Self) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.io_errors += other.io_errors;
        self.mismatches += other.mismatches;
        self.examples.extend(other.examples.iter().cloned());
        self.examples.truncate(EXAMPLES);
        self.elapsed += other.elapsed;
        self.latency.merge(&other.latency);
    }

    /// What must be 0.
    pub fn verify_errors(&self) -> u64 {
        self.io_errors + self.mismatches
    }

    fn note(&mut self, example: String) {
        if self.examples.len() < EXAMPLES {
            self.examples.push(example);
        }
    }
}

/// Sectors all stages together read and write; roughly, the overwritten parts differ.
pub fn total_sectors(layout: &Layout) -> u64 {
    let overwritten: u64 = (0..layout.blocks())
        .map(|block| layout.overwritten(block))
        .map(|part| 2 * (part.end - part.start))
        .sum();
    layout.blocks() * (2 * BLOCK + 8 * SAMPLE) + overwritten
}

/// Runs one stage on every ring at once; outcomes in the order of the rings. A disk that goes away shows
/// as I/O errors.
pub fn run_stage(disk: &Disk, stage: Stage, options: &Options) -> Vec<Outcome> {
    let queues = disk.queues();
    let (report, reports) = unbounded();
    for queue in 0..queues {
        disk.run(
            queue,
            Box::new(Sweep::new(stage, options, queue, queues, report.clone())),
        );
    }
    drop(report);
    let mut outcomes = vec![Outcome::default(); queues];
    for (queue, outcome) in reports {
        outcomes[queue] = outcome;
    }
    outcomes
}

/// One ring's part of a stage. Its outcome is sent when it is dropped, however it ended.
struct Sweep {
    stage: Stage,
    options: Options,
    queue: usize,
    /// Work items handed out and to be handed out.
    next: u64,
    items: u64,
    /// Distance between this ring's blocks, and the first one.
    step: u64,
    first: u64,
    /// Ranges to be read back before anything new is written.
    read_back: Vec<Range<u64>>,
    sent: Vec<Instant>,
    free: Vec<usize>,
    started: Option<Instant>,
    scratch: Vec<u8>,
    outcome: Outcome,
    report: Sender<(usize, Outcome)>,
}

impl Sweep {
    fn new(
        stage: Stage,
        options: &Options,
        queue: usize,
        queues: usize,
        report: Sender<(usize, Outcome)>,
    ) -> Self {
        let step = queues as u64;
        // A check takes the blocks the next ring wrote.
        let first = match stage {
            Stage::Fill | Stage::Overwrite | Stage::Sample => queue as u64,
            Stage::Check => (queue as u64 + 1) % step,
        };
        let mine = options.layout.blocks().saturating_sub(first).div_ceil(step);
        Self {
            stage,
            options: options.clone(),
            queue,
            next: 0,
            items: if stage == Stage::Sample {
                mine * 8
            } else {
                mine
            },
            step,
            first,
            read_back: Vec::new(),
            sent: vec![Instant::now(); options.depth],
            free: (0..options.depth).rev().collect(),
            started: None,
            scratch: vec![0; BLOCK as usize * SECTOR],
            outcome: Outcome::default(),
            report,
        }
    }

    /// The next range and whether it is written; skips blocks that are not overwritten.
    fn choose(&mut self) -> Option<(IoKind, Range<u64>)> {
        if let Some(range) = self.read_back.pop() {
            return Some((IoKind::Read, range));
        }
        while self.next < self.items {
            let item = self.next;
            self.next += 1;
            let in_order = (self.first + item * self.step) * BLOCK;
            match self.stage {
                Stage::Fill => return Some((IoKind::Write, in_order..in_order + BLOCK)),
                Stage::Check => return Some((IoKind::Read, in_order..in_order + BLOCK)),
                Stage::Overwrite => {
                    let shuffled = shuffle(item, self.items);
                    let part = self
                        .options
                        .layout
                        .overwritten(self.first + shuffled * self.step);
                    if !part.is_empty() {
                        return Some((IoKind::Write, part));
                    }
                }
                Stage::Sample => {
                    let random =
                        scramble(self.options.layout.pattern.seed ^ (item << 8) ^ self.first);
                    let samples = self.options.layout.blocks() * BLOCK / SAMPLE;
                    let sector = random % samples * SAMPLE;
                    return Some((IoKind::Read, sector..sector + SAMPLE));
                }
            }
        }
        None
    }

    fn compare(&mut self, io: &Io, buffer: &GuestBuffer<'_>) -> Result<(), Mismatch> {
        let data = &mut self.scratch[..io.sectors as usize * SECTOR];
        buffer.read(data);
        match self.stage {
            // Only the part just written is read back: it is all generation 2.
            Stage::Overwrite => self.options.layout.pattern.check(io.sector, 2, data),
            _ => self.options.layout.check(io.sector, data),
        }
    }
}

/// A permutation of 0..n: a step coprime to n visits everything once, far from where it was before.
fn shuffle(item: u64, n: u64) -> u64 {
    let coprime = |step: &u64| {
        let (mut a, mut b) = (*step, n);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a == 1
    };
    let step = (n * 5 / 8..).find(coprime).unwrap_or(1);
    item * step % n
}

impl Source for Sweep {
    fn next(&mut self, _limits: &Limits) -> Option<Io> {
        let now = Instant::now();
        self.started.get_or_insert(now);
        if self.options.stop.load(Ordering::Relaxed) {
            self.next = self.items;
            self.read_back.clear();
        }
        let token = self.free.pop()?;
        let Some((kind, range)) = self.choose() else {
            self.free.push(token);
            return None;
        };
        self.sent[token] = now;
        Some(Io {
            kind,
            sector: range.start,
            sectors: range.end - range.start,
            token,
        })
    }

    fn fill(&mut self, io: &Io, buffer: &GuestBuffer<'_>) {
        let generation = if self.stage == Stage::Fill { 1 } else { 2 };
        let data = &mut self.scratch[..io.sectors as usize * SECTOR];
        self.options
            .layout
            .pattern
            .fill(io.sector, generation, data);
        buffer.write(data);
    }

    fn done(&mut self, io: &Io, outcome: Result<(), IoError>, buffer: &GuestBuffer<'_>) {
        let now = Instant::now();
        self.outcome.latency.record(now - self.sent[io.token]);
        self.outcome.requests += 1;
        self.outcome.bytes += io.sectors * SECTOR as u64;
        self.options
            .progress
            .fetch_add(io.sectors, Ordering::Relaxed);
        self.free.push(io.token);
        match (outcome, io.kind) {
            (Err(error), _) => {
                self.outcome.io_errors += 1;
                self.outcome
                    .note(format!("{:?} at sector {}: {error}", io.kind, io.sector));
            }
            (Ok(()), IoKind::Read) => {
                if let Err(mismatch) = self.compare(io, buffer) {
                    self.outcome.mismatches += 1;
                    self.outcome.note(mismatch.to_string());
                }
            }
            (Ok(()), _) if self.stage == Stage::Overwrite => {
                self.read_back.push(io.sector..io.sector + io.sectors);
            }
            (Ok(()), _) => {}
        }
        self.outcome.elapsed = self.started.map_or(Duration::ZERO, |started| now - started);
    }
}

impl Job for Sweep {
    fn finished(&self) -> bool {
        self.next == self.items && self.read_back.is_empty()
    }
}

impl Drop for Sweep {
    fn drop(&mut self) {
        if !self.finished() {
            self.outcome.io_errors += 1;
            self.outcome.note("the disk went away".into());
        }
        // Nobody listens only if the pass itself was abandoned.
        let _ = self
            .report
            .send((self.queue, std::mem::take(&mut self.outcome)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout {
        pattern: Pattern { seed: 11 },
        sectors: 64 * BLOCK + 17,
    };

    fn final_content() -> Vec<u8> {
        let mut disk = vec![0; (LAYOUT.blocks() * BLOCK) as usize * SECTOR];
        LAYOUT.pattern.fill(0, 1, &mut disk);
        for block in 0..LAYOUT.blocks() {
            let part = LAYOUT.overwritten(block);
            let bytes = part.start as usize * SECTOR..part.end as usize * SECTOR;
            LAYOUT.pattern.fill(part.start, 2, &mut disk[bytes]);
        }
        disk
    }

    #[test]
    fn the_final_content_passes_wherever_it_is_cut() {
        let disk = final_content();
        for (from, to) in [
            (0, 64 * BLOCK),
            (1, 300),
            (255, 257),
            (700, 701),
            (513, 64 * BLOCK - 1),
        ] {
            let data = &disk[from as usize * SECTOR..to as usize * SECTOR];
            assert_eq!(LAYOUT.check(from, data), Ok(()), "{from}..{to}");
        }
    }

    #[test]
    fn a_lost_overwrite_is_found() {
        let mut disk = final_content();
        let part = (0..)
            .map(|block| LAYOUT.overwritten(block))
            .find(|part| !part.is_empty())
            .unwrap();
        let last = part.end - 1;
        LAYOUT
            .pattern
            .fill(last, 1, &mut disk[last as usize * SECTOR..][..SECTOR]);
        let mismatch = LAYOUT.check(0, &disk).unwrap_err();
        assert_eq!((mismatch.sector, mismatch.expected_generation), (last, 2));
    }

    #[test]
    fn overwritten_parts_stay_in_their_block_and_shuffling_visits_all() {
        for block in 0..1000 {
            let part = LAYOUT.overwritten(block);
            assert!(
                part.start >= block * BLOCK && part.end <= (block + 1) * BLOCK,
                "{part:?}"
            );
        }
        for n in 1..100 {
            let mut seen: Vec<u64> = (0..n).map(|item| shuffle(item, n)).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..n).collect::<Vec<_>>());
        }
    }
}
