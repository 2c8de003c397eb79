//! The running daemon's disks and rings, as `xenblkd status` shows them. The numbers come over the control
//! socket; here they are only laid out.

use std::fmt::Write as _;
use std::io;
use std::path::Path;

use anyhow::{Context, bail};
use xenblkd::control::{self, DiskStatus, Request, Response, RingStatus, Status};

/// Asks the daemon that listens on `control`.
pub(crate) fn ask(control: &Path) -> anyhow::Result<Status> {
    let answer = control::ask(control, Request::Status {}).map_err(|error| {
        let advice = match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                "no xenblkd is running; start it with systemctl start xenblkd"
            }
            io::ErrorKind::PermissionDenied => "run this as root",
            _ => "the daemon may be of another version; see its log",
        };
        anyhow::Error::new(error).context(format!("cannot ask {} ({advice})", control.display()))
    })?;
    match answer {
        Response::Status(status) => Ok(status),
        Response::Error(problem) => bail!("the daemon did not understand: {problem}"),
        other => bail!("the daemon answered something else: {other:?}"),
    }
}

/// One line of JSON, of the control socket's types.
pub(crate) fn json(status: &Status) -> anyhow::Result<String> {
    serde_json::to_string(status).context("cannot write the status as JSON")
}

/// A line for each disk, and a table of its rings below it.
pub(crate) fn table(status: &Status) -> String {
    if status.disks.is_empty() {
        return "No disks.\n".to_owned();
    }
    let mut text = String::new();
    for disk in &status.disks {
        describe(&mut text, disk);
    }
    text
}

fn describe(text: &mut String, disk: &DiskStatus) {
    let size = disk.size.map_or_else(|| "size unknown".to_owned(), bytes);
    let mode = if disk.readonly {
        "read-only"
    } else {
        "read-write"
    };
    let DiskStatus {
        domid,
        devid,
        state,
        params,
        ..
    } = disk;
    // Writing to a String can't fail, here and below.
    let params = on_one_line(params);
    let _ = writeln!(
        text,
        "domain {domid} vbd {devid}: {state}, {size}, {mode}, {params}"
    );
    if let Some(error) = &disk.error {
        let _ = writeln!(text, "    error: {}", on_one_line(error));
    }
    if let Some(seconds) = disk.waiting_seconds {
        let _ = writeln!(text, "    waiting for I/O for {seconds} s");
    }
    if !disk.rings.is_empty() {
        rings(text, &disk.rings);
    }
}

/// The toolstack's text, which must not pass for another disk or move the terminal's cursor.
fn on_one_line(text: &str) -> String {
    let shown = |c: char| {
        if c.is_control() {
            c.escape_default().to_string()
        } else {
            c.to_string()
        }
    };
    text.chars().map(shown).collect()
}

const HEADINGS: [&str; 15] = [
    "queue",
    "worker",
    "pid",
    "in flight",
    "reads",
    "read",
    "writes",
    "written",
    "flushes",
    "discards",
    "errors",
    "requests/notify",
    "late unmasks",
    // Persistent grants mapped now, and the share of segments that went through one.
    "grants",
    "hits",
];

fn rings(text: &mut String, rings: &[RingStatus]) {
    let rows: Vec<[String; HEADINGS.len()]> = rings.iter().map(row).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEADINGS.len())
        .map(|column| width(column).max(HEADINGS[column].len()))
        .collect();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<String> = cells
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:>width$}"))
            .collect();
        let _ = writeln!(text, "    {}", padded.join("  "));
    };
    line(&mut HEADINGS.into_iter());
    for row in &rows {
        line(&mut row.iter().map(String::as_str));
    }
}

fn row(ring: &RingStatus) -> [String; HEADINGS.len()] {
    let counters = &ring.counters;
    let tenths = counters
        .responses
        .saturating_mul(10)
        .checked_div(counters.notifies);
    let ratio = tenths.map_or_else(
        || "-".to_owned(),
        |tenths| format!("{}.{}", tenths / 10, tenths % 10),
    );
    let segments = counters
        .persistent_hits
        .saturating_add(counters.copied_segments);
    let hits = counters
        .persistent_hits
        .saturating_mul(100)
        .checked_div(segments);
    [
        ring.queue.to_string(),
        ring.worker.to_string(),
        ring.pid
            .map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
        counters.in_flight.to_string(),
        counters.reads.to_string(),
        bytes(counters.bytes_read),
        counters.writes.to_string(),
        bytes(counters.bytes_written),
        counters.flushes.to_string(),
        counters.discards.to_string(),
        counters.errors.to_string(),
        ratio,
        counters.delayed_unmasks.to_string(),
        counters.persistent_grants.to_string(),
        hits.map_or_else(|| "-".to_owned(), |percent| format!("{percent}%")),
    ]
}

/// In the largest binary unit that leaves a whole part, with one decimal, cut off.
fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let Some(power) = bytes
        .checked_ilog2()
        .map(|log| log / 10)
        .filter(|power| *power > 0)
    else {
        return format!("{bytes} B");
    };
    let tenths = (u128::from(bytes) * 10) >> (10 * power);
    format!(
        "{}.{} {}",
        tenths / 10,
        tenths % 10,
        UNITS[power as usize - 1]
    )
}

#[cfg(test)]
mod tests {
    use xenblkd::stats::Snapshot;

    use super::*;

    fn disk() -> DiskStatus {
        let counters = Snapshot {
            reads: 1000,
            bytes_read: 4_096_000,
            writes: 20,
            bytes_written: 512,
            flushes: 3,
            responses: 1023,
            notifies: 100,
            in_flight: 2,
            delayed_unmasks: 5,
            persistent_grants: 352,
            persistent_hits: 1990,
            copied_segments: 10,
            ..Snapshot::default()
        };
        let first = RingStatus {
            queue: 0,
            worker: 1,
            pid: Some(4321),
            counters,
        };
        let idle = RingStatus {
            queue: 1,
            worker: 0,
            pid: None,
            counters: Snapshot::default(),
        };
        DiskStatus {
            domid: 3,
            devid: 51712,
            params: "raw:/dev/vg/guest".to_owned(),
            state: "Connected".to_owned(),
            size: Some(10 << 30),
            readonly: false,
            error: None,
            waiting_seconds: None,
            rings: vec![first, idle],
        }
    }

    #[test]
    fn a_disk_and_its_rings_are_a_table() {
        let broken = DiskStatus {
            domid: 4,
            params: "/no\nsuch".to_owned(),
            state: "InitWait".to_owned(),
            size: None,
            readonly: true,
            error: Some("/no\nsuch: can't find it".to_owned()),
            waiting_seconds: Some(75),
            rings: vec![],
            ..disk()
        };
        let expected = "\
domain 3 vbd 51712: Connected, 10.0 GiB, read-write, raw:/dev/vg/guest
    queue  worker   pid  in flight  reads     read  writes  written  flushes  discards  errors  requests/notify  late unmasks  grants  hits
        0       1  4321          2   1000  3.9 MiB      20    512 B        3         0       0             10.2             5     352   99%
        1       0     -          0      0      0 B       0      0 B        0         0       0                -             0       0     -
domain 4 vbd 51712: InitWait, size unknown, read-only, /no\\nsuch
    error: /no\\nsuch: can't find it
    waiting for I/O for 75 s
";
        assert_eq!(
            table(&Status {
                disks: vec![disk(), broken]
            }),
            expected
        );
        assert_eq!(table(&Status::default()), "No disks.\n");
    }

    #[test]
    fn the_json_is_the_control_sockets() {
        let status = Status {
            disks: vec![disk()],
        };
        let text = json(&status).unwrap();
        assert!(!text.contains('\n'));
        assert_eq!(serde_json::from_str::<Status>(&text).unwrap(), status);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            value["disks"][0]["rings"][0]["counters"]["bytes_read"],
            4_096_000
        );
    }

    #[test]
    fn sizes_are_cut_not_rounded() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1_048_575, "1023.9 KiB"),
            (3 << 39, "1.5 TiB"),
            (u64::MAX, "15.9 EiB"),
        ];
        for (size, shown) in cases {
            assert_eq!(bytes(size), shown);
        }
    }

    #[test]
    fn no_daemon_is_one_line_with_the_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let error = format!("{:#}", ask(&path).unwrap_err());
        let expected = format!(
            "cannot ask {} (no xenblkd is running; start it with systemctl start xenblkd): ",
            path.display()
        );
        assert!(error.starts_with(&expected), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }
}
