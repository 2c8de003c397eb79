//! `xenblk-sim load`: one run for each number of rings, each with a new guest and backend.

use std::io::{Write, stdout};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::Serialize;
use xenblk_tests::frontend::{Config, Disk, Profile};
use xenblk_tests::latency::Latency;
use xenblk_tests::load::{Mode, RingResult, Spec, run as run_load};

use crate::cli::Load;
use crate::session::{Result, Session, check_image};
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
            stop: Arc::clone(&session.interrupt.stop),
        };
        let results = run_load(&disk, &spec)?;
        let run = Run::new(args.bs, &disk, &results);
        if !args.json {
            run.print(&results)?;
        }
        runs.push(run);
        let interrupted = session.interrupt.came();
        session.end()?;
        if interrupted {
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
    /// Events the guest sent, and those that woke it.
    notifies: u64,
    events: u64,
}

impl Row {
    fn new(result: &RingResult, block: u64, notifies: u64, events: u64) -> Self {
        let micros = |per_mille| result.latency.percentile(per_mille).as_secs_f64() * 1e6;
        Self {
            requests: result.requests,
            errors: result.errors,
            iops: result.iops(),
            mib_per_second: result.iops() * block as f64 / f64::from(1 << 20),
            p50_us: micros(500),
            p99_us: micros(990),
            max_us: result.latency.max().as_secs_f64() * 1e6,
            notifies,
            events,
        }
    }
}

impl Run {
    fn new(block: u64, disk: &Disk, results: &[RingResult]) -> Self {
        let mut all = RingResult::default();
        let mut rings = Vec::new();
        for (queue, result) in results.iter().enumerate() {
            let counters = disk.counters(queue);
            let notifies = counters.notifies.load(Ordering::Relaxed);
            rings.push(Row::new(
                result,
                block,
                notifies,
                counters.events.load(Ordering::Relaxed),
            ));
            all.requests += result.requests;
            all.errors += result.errors;
            all.elapsed = all.elapsed.max(result.elapsed);
            all.latency.merge(&result.latency);
        }
        let notifies = rings.iter().map(|row| row.notifies).sum();
        let events = rings.iter().map(|row| row.events).sum();
        Self {
            queues: results.len(),
            total: Row::new(&all, block, notifies, events),
            rings,
        }
    }

    fn print(&self, results: &[RingResult]) -> std::io::Result<()> {
        let mut all = Latency::default();
        results.iter().for_each(|result| all.merge(&result.latency));
        let latencies = results.iter().map(|result| &result.latency).chain([&all]);
        let names = (0..self.queues)
            .map(|ring| ring.to_string())
            .chain(["all".into()]);
        let rows = self.rings.iter().chain([&self.total]);
        let rows = names
            .zip(rows)
            .zip(latencies)
            .map(|((name, row), latency)| {
                vec![
                    name,
                    row.requests.to_string(),
                    format!("{:.0}", row.iops),
                    format!("{:.1}", row.mib_per_second),
                    table::time(latency.percentile(500)),
                    table::time(latency.percentile(990)),
                    table::time(latency.max()),
                    table::ratio(row.requests, row.notifies),
                    table::ratio(row.requests, row.events),
                    row.errors.to_string(),
                ]
            });
        let rows: Vec<_> = rows.collect();
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
            "errors",
        ];
        table::write(&mut stdout().lock(), &heads, &rows)?;
        writeln!(stdout())
    }
}
