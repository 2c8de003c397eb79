//! What a run of `xenblk-sim load` showed, as a table for people and as JSON.

use std::io::{Write, stdout};
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::Serialize;
use xenblk_tests::frontend::{Config, Disk};
use xenblk_tests::load::{RingResult, Spec};
use xenblkd::control::RingStatus;
use xenblkd::stats::Snapshot;

use crate::table;

/// One run; one line of `--json`.
#[derive(Serialize)]
pub(super) struct Run {
    image: String,
    profile: &'static str,
    /// Both sides have persistent grants.
    persistent: bool,
    queues: usize,
    ring_order: u32,
    block: u64,
    iodepth: usize,
    /// A signal ended it: its figures are those until then.
    pub(super) interrupted: bool,
    pub(super) total: Row,
    rings: Vec<Row>,
    /// Pages of the guest that were mapped after the disk was detached.
    pub(super) leaks: usize,
}

/// One ring's figures, or all rings' together.
#[derive(Serialize)]
pub(super) struct Row {
    requests: u64,
    pub(super) errors: u64,
    iops: f64,
    mib_per_second: f64,
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
    /// Requests for each event the guest sent, and responses for each event that woke it; none: no event.
    requests_per_notify: Option<f64>,
    responses_per_event: Option<f64>,
    #[serde(skip)]
    guest: Guest,
    /// Everything the backend counted.
    backend: Snapshot,
}

/// Events the guest sent, and those that woke it.
#[derive(Clone, Copy, Default)]
struct Guest {
    notifies: u64,
    events: u64,
}

impl Row {
    fn new(result: &RingResult, block: u64, guest: Guest, backend: Snapshot) -> Self {
        let micros = |per_mille| result.latency.percentile(per_mille).as_secs_f64() * 1e6;
        let per = |n: u64| (n > 0).then(|| result.requests as f64 / n as f64);
        Self {
            requests: result.requests,
            errors: result.errors,
            iops: result.iops(),
            mib_per_second: result.iops() * block as f64 / f64::from(1 << 20),
            p50_us: micros(500),
            p99_us: micros(990),
            max_us: result.latency.max().as_secs_f64() * 1e6,
            requests_per_notify: per(guest.notifies),
            responses_per_event: per(guest.events),
            guest,
            backend,
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
            table::ratio(self.requests, self.guest.notifies),
            table::ratio(self.requests, self.guest.events),
            self.backend.persistent_hits.to_string(),
            self.backend.maps.to_string(),
            self.backend.copies.to_string(),
            self.backend.purges.to_string(),
            self.errors.to_string(),
        ]
    }
}

impl Run {
    /// `rings`: the backend's view, taken after the run.
    pub(super) fn new(
        image: &str,
        config: Config,
        spec: &Spec,
        disk: &Disk,
        results: &[RingResult],
        rings: &[RingStatus],
    ) -> Self {
        let mut all = RingResult::default();
        let (mut sent, mut counted) = (Guest::default(), Snapshot::default());
        let mut rows = Vec::new();
        for (queue, (result, ring)) in results.iter().zip(rings).enumerate() {
            let counters = disk.counters(queue);
            let guest = Guest {
                notifies: counters.notifies.load(Ordering::Relaxed),
                events: counters.events.load(Ordering::Relaxed),
            };
            rows.push(Row::new(result, spec.block, guest, ring.counters));
            sent.notifies += guest.notifies;
            sent.events += guest.events;
            counted.add(&ring.counters);
            all.requests += result.requests;
            all.errors += result.errors;
            all.elapsed = all.elapsed.max(result.elapsed);
            all.latency.merge(&result.latency);
        }
        Self {
            image: image.to_owned(),
            profile: config.profile.name,
            persistent: disk.persistent(),
            queues: results.len(),
            ring_order: config.ring_order,
            block: spec.block,
            iodepth: spec.depth,
            interrupted: false,
            total: Row::new(&all, spec.block, sent, counted),
            rings: rows,
            leaks: 0,
        }
    }

    pub(super) fn print_json(&self) -> std::io::Result<()> {
        writeln!(stdout(), "{}", serde_json::to_string(self)?)
    }

    pub(super) fn print_table(&self) -> std::io::Result<()> {
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
            "hits",
            "maps",
            "copies",
            "purges",
            "errors",
        ];
        let mut out = stdout().lock();
        table::write(&mut out, &heads, &rows)?;
        let grants = if self.persistent {
            "persistent grants"
        } else {
            "a grant for each request"
        };
        let partial = if self.interrupted {
            ", interrupted before its end"
        } else {
            ""
        };
        // Each ring has the same.
        let ring = self.rings.first();
        let memory = ring.map_or(0, |ring| ring.backend.memory_bytes >> 10);
        writeln!(
            out,
            "{}, {grants}, at most {memory} KiB of memory a ring, {} pages mapped after detach{partial}\n",
            self.profile, self.leaks
        )
    }
}
