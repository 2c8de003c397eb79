//! `xenblk-sim load`: one run for each number of rings, each with a new guest and backend.

use std::io::{Write, stdout};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::Serialize;
use xenblk_tests::frontend::{Config, Disk, Profile, QueueCounters};
use xenblk_tests::load::{Mode, RingResult, Spec, run as run_load};
use xenblkd::stats::Snapshot;

use crate::cli::Load;
use crate::session::{Interrupt, Result, Session, check_image};
use crate::table;

/// What plain `null:` means.
const NULL_DISK: &str = "null:1G";

pub(crate) fn run(args: &Load) -> Result<ExitCode> {
    let mode = Mode::from(args.rw);
    let readonly = matches!(mode, Mode::Read | Mode::RandRead);
    let image = if args.image == "null:" {
        NULL_DISK
    } else {
        &args.image
    };
    check_image(image, readonly)?;
    let interrupt = Interrupt::install()?;
    let mut runs = Vec::new();
    for &queues in &args.queues {
        let config = Config {
            profile: Profile::Linux6,
            queues,
            ring_order: args.ring_order,
        };
        let mut session = Session::start(config, 1)?;
        let disk = session.attach(image, readonly)?;
        let spec = Spec {
            mode,
            block: args.bs,
            depth: args.iodepth as usize,
            runtime: args.runtime,
            size: args.size,
            stop: Arc::clone(&interrupt.stop),
        };
        let results = run_load(&disk, &spec)?;
        let run = Run::new(args.bs, &disk, &results, &session.backend_counters()?);
        if !args.json {
            run.print()?;
        }
        runs.push(run);
        session.end()?;
        if interrupt.came() {
            break;
        }
    }
    if args.json {
        let report = Report {
            image,
            block: args.bs,
            iodepth: args.iodepth,
            runs: &runs,
        };
        writeln!(stdout(), "{}", serde_json::to_string_pretty(&report)?)?;
    }
    let errors: u64 = runs.iter().map(|run| run.total.errors).sum();
    if errors > 0 {
        return Err(format!("{errors} requests failed").into());
    }
    Ok(ExitCode::SUCCESS)
}

/// The whole answer of `--json`.
#[derive(Serialize)]
struct Report<'a> {
    image: &'a str,
    block: u64,
    iodepth: u32,
    runs: &'a [Run],
}

/// One run.
#[derive(Serialize)]
struct Run {
    queues: usize,
    total: Row,
    rings: Vec<Row>,
}

/// One ring's figures, or all rings' together.
#[derive(Serialize)]
struct Row {
    requests: u64,
    errors: u64,
    iops: f64,
    mib_per_second: f64,
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
    #[serde(flatten)]
    sides: Sides,
}

/// What guest and backend counted.
#[derive(Clone, Copy, Default, Serialize)]
struct Sides {
    /// Events the guest sent, and those that woke it.
    notifies: u64,
    events: u64,
    /// The backend's grant copy calls and their segments.
    copies: u64,
    copied_segments: u64,
}

impl Sides {
    fn new(guest: &QueueCounters, backend: &Snapshot) -> Self {
        Self {
            notifies: guest.notifies.load(Ordering::Relaxed),
            events: guest.events.load(Ordering::Relaxed),
            copies: backend.copies,
            copied_segments: backend.copied_segments,
        }
    }

    fn add(&mut self, other: Self) {
        self.notifies += other.notifies;
        self.events += other.events;
        self.copies += other.copies;
        self.copied_segments += other.copied_segments;
    }
}

impl Row {
    fn new(result: &RingResult, block: u64, sides: Sides) -> Self {
        let micros = |per_mille| result.latency.percentile(per_mille).as_secs_f64() * 1e6;
        Self {
            requests: result.requests,
            errors: result.errors,
            iops: result.iops(),
            mib_per_second: result.iops() * block as f64 / f64::from(1 << 20),
            p50_us: micros(500),
            p99_us: micros(990),
            max_us: result.latency.max().as_secs_f64() * 1e6,
            sides,
        }
    }

    fn cells(&self, name: String) -> Vec<String> {
        let time = |micros: f64| table::time(Duration::from_secs_f64(micros / 1e6));
        vec![
            name,
            self.requests.to_string(),
            format!("{:.0}", self.iops),
            format!("{:.1}", self.mib_per_second),
            time(self.p50_us),
            time(self.p99_us),
            time(self.max_us),
            table::ratio(self.requests, self.sides.notifies),
            table::ratio(self.requests, self.sides.events),
            self.sides.copies.to_string(),
            table::ratio(self.sides.copied_segments, self.sides.copies),
            self.errors.to_string(),
        ]
    }
}

impl Run {
    fn new(block: u64, disk: &Disk, results: &[RingResult], backend: &[Snapshot]) -> Self {
        let mut all = RingResult::default();
        let mut sum = Sides::default();
        let mut rings = Vec::new();
        for (queue, (result, backend)) in results.iter().zip(backend).enumerate() {
            let sides = Sides::new(disk.counters(queue), backend);
            rings.push(Row::new(result, block, sides));
            sum.add(sides);
            all.requests += result.requests;
            all.errors += result.errors;
            all.elapsed = all.elapsed.max(result.elapsed);
            all.latency.merge(&result.latency);
        }
        Self {
            queues: results.len(),
            total: Row::new(&all, block, sum),
            rings,
        }
    }

    fn print(&self) -> std::io::Result<()> {
        let rings = self.rings.iter().enumerate();
        let mut rows: Vec<_> = rings
            .map(|(ring, row)| row.cells(ring.to_string()))
            .collect();
        rows.push(self.total.cells("all".into()));
        let heads = [
            "ring",
            "requests",
            "IOPS",
            "MiB/s",
            "p50",
            "p99",
            "max",
            "requests/notify",
            "responses/event",
            "copies",
            "segments/copy",
            "errors",
        ];
        table::write(&mut stdout().lock(), &heads, &rows)?;
        writeln!(stdout())
    }
}
