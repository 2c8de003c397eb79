//! `xenblk-sim` without a command: a disk is written and verified through a guest, and each ring's share
//! is shown.

use std::fs::File;
use std::io::{IsTerminal, Read, Write, stderr, stdout};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use indicatif::{ProgressBar, ProgressStyle};
use xenblk_tests::disk::{GuestDisk, Op};
use xenblk_tests::frontend::{Config, Disk, Profile};
use xenblk_tests::pattern::{Pattern, SECTOR};
use xenblk_tests::verify::{Layout, Options, Outcome, Stage, run_stage, total_sectors};
use xenblk_tests::world::DRAIN;
use xenblkd::control::RingStatus;

use crate::session::{Interrupt, Result, Session};
use crate::table;

/// The image's size in bytes.
const SIZE: u64 = 512 << 20;
/// Requests in flight on each ring.
const DEPTH: usize = 32;

pub(crate) fn run() -> Result<ExitCode> {
    let config = Config {
        profile: Profile::linux6(),
        queues: 4,
        ring_order: 0,
    };
    let interrupt = Interrupt::install()?;
    let mut session = Session::start(config, 1)?;
    let image = session.world.directory().join("disk.img");
    File::create_new(&image)?.set_len(SIZE)?;
    let disk = session.attach(&format!("raw:{}", image.display()), false)?;
    introduce(&session, &image, &disk)?;

    let seed = SystemTime::UNIX_EPOCH
        .elapsed()
        .map_or(0, |since| since.as_nanos() as u64);
    let options = Options {
        layout: Layout {
            pattern: Pattern { seed },
            sectors: disk.info().size / 512,
        },
        depth: DEPTH,
        progress: Arc::new(AtomicU64::new(0)),
        stop: Arc::clone(&interrupt.stop),
    };
    let mut outcomes = vec![Outcome::default(); disk.queues()];
    for stage in Stage::ALL {
        if interrupt.came() {
            break;
        }
        let part = observe(stage, &options, || run_stage(&disk, stage, &options));
        for (sum, outcome) in outcomes.iter_mut().zip(&part) {
            sum.merge(outcome);
        }
        if stage == Stage::Overwrite && !matches!(disk.request(0, Op::Flush, DRAIN), Some(Ok(_))) {
            return Err("the flush failed".into());
        }
    }
    let interrupted = interrupt.came();
    print_rings(&disk, &outcomes, &session.rings()?)?;
    session.detach()?;
    let mut errors: u64 = outcomes.iter().map(Outcome::verify_errors).sum();
    if !interrupted {
        errors += compare_file(&image, &options.layout)?;
    }
    session.end()?;
    for example in outcomes.iter().flat_map(|outcome| &outcome.examples) {
        eprintln!("xenblk-sim: {example}");
    }
    if interrupted {
        return Err("interrupted".into());
    }
    writeln!(stdout(), "{errors} verify errors")?;
    Ok(if errors == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn introduce(session: &Session, image: &Path, disk: &Disk) -> std::io::Result<()> {
    let mut out = stdout().lock();
    let mib = disk.info().size >> 20;
    writeln!(out, "image    {}, {mib} MiB, sparse", image.display())?;
    if let Some(backend) = session.world.backend() {
        let pid = backend.pid().as_raw_nonzero();
        writeln!(
            out,
            "backend  supervisor is process {pid}, this is process {}",
            std::process::id()
        )?;
    }
    let (domid, rings) = (session.domid(), disk.queues());
    let segments = disk.limits().segments;
    let grants = if disk.persistent() {
        ", persistent grants"
    } else {
        ""
    };
    writeln!(
        out,
        "guest    domain {domid}, linux6, {rings} rings, {segments} segments a request{grants}"
    )
}

/// Shows progress while `work` runs: a bar on a terminal, otherwise one line at the end.
fn observe(stage: Stage, options: &Options, work: impl FnOnce() -> Vec<Outcome>) -> Vec<Outcome> {
    let started = Instant::now();
    let sectors = || options.progress.load(Ordering::Relaxed);
    let before = sectors();
    let done = AtomicBool::new(false);
    let bar = if stderr().is_terminal() {
        progress_bar(stage, options)
    } else {
        ProgressBar::hidden()
    };
    let outcomes = thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                bar.set_position(sectors() * SECTOR as u64);
                thread::park_timeout(Duration::from_millis(100));
            }
        });
        let outcomes = work();
        done.store(true, Ordering::Release);
        outcomes
    });
    bar.finish_and_clear();
    let bytes = (sectors() - before) * SECTOR as u64;
    let seconds = started.elapsed().as_secs_f64();
    let mib = bytes as f64 / f64::from(1 << 20);
    eprintln!(
        "{:<18} {mib:6.0} MiB in {seconds:4.1} s, {:6.0} MiB/s",
        stage.name(),
        mib / seconds
    );
    outcomes
}

fn progress_bar(stage: Stage, options: &Options) -> ProgressBar {
    let bar = ProgressBar::new(total_sectors(&options.layout) * SECTOR as u64);
    let template = "{msg:18} [{bar:40}] {bytes}/{total_bytes} {binary_bytes_per_sec}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(stage.name());
    bar
}

fn print_rings(disk: &Disk, outcomes: &[Outcome], backend: &[RingStatus]) -> std::io::Result<()> {
    let rows: Vec<Vec<String>> = outcomes
        .iter()
        .zip(backend)
        .enumerate()
        .map(|(ring, (outcome, backend))| {
            let counters = disk.counters(ring);
            let notifies = counters.notifies.load(Ordering::Relaxed);
            let events = counters.events.load(Ordering::Relaxed);
            let seconds = outcome.elapsed.as_secs_f64().max(f64::MIN_POSITIVE);
            vec![
                ring.to_string(),
                outcome.requests.to_string(),
                (outcome.bytes >> 20).to_string(),
                format!("{:.0}", outcome.requests as f64 / seconds),
                table::time(outcome.latency.percentile(500)),
                table::time(outcome.latency.percentile(990)),
                table::ratio(outcome.requests, notifies),
                table::ratio(outcome.requests, events),
                backend.counters.persistent_hits.to_string(),
                backend.counters.maps.to_string(),
                backend.counters.copies.to_string(),
                backend.counters.purges.to_string(),
            ]
        })
        .collect();
    let heads = [
        "ring",
        "requests",
        "MiB",
        "IOPS",
        "p50",
        "p99",
        "requests/notify",
        "responses/event",
        "hits",
        "maps",
        "copies",
        "purges",
    ];
    table::write(&mut stdout().lock(), &heads, &rows)
}

/// Compares the image itself, past guest and backend; returns how many pieces of it are wrong.
fn compare_file(image: &Path, layout: &Layout) -> Result<u64> {
    let mut file = File::open(image)?;
    let mut data = vec![0; 1 << 20];
    let mut wrong = 0;
    let sectors = (data.len() / SECTOR) as u64;
    for sector in (0..layout.sectors).step_by(sectors as usize) {
        file.read_exact(&mut data)?;
        if let Err(mismatch) = layout.check(sector, &data) {
            eprintln!("xenblk-sim: {}: {mismatch}", image.display());
            wrong += 1;
        }
    }
    Ok(wrong)
}
