//! What this host can do for xenblkd, what it lacks, and what to do about it: `xenblkd check`, and the
//! daemon's own look before it starts. Nothing is changed by looking.

mod facts;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;

use serde::Serialize;
use xenblk_xenstore::vbd::Kind;

use crate::config::Config;
use facts::{Blkback, Facts, Reach};

pub(crate) use facts::Root;

/// Mappings of a process below which a worker with many rings runs out: Linux' own default.
const MAP_COUNT: u64 = 65_530;
/// Locked memory of a worker with a handful of rings, in bytes.
const MEMLOCK: u64 = 256 << 20;
/// Descriptors of a worker with some hundred rings, four each.
const NOFILE: u64 = 4096;
/// Xen's default; two entries of 256 a frame are needed per mapped page in a PV dom0.
const MAPTRACK_FRAMES: u64 = 1024;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    /// As it should be, or for information.
    Ok,
    /// xenblkd runs, but not as well, or not for long.
    Warning,
    /// xenblkd can't run.
    Missing,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// What was looked at.
    pub(crate) subject: &'static str,
    pub(crate) verdict: Verdict,
    /// What is there.
    pub(crate) found: String,
    /// What to do about it; nothing if it is well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) remedy: Option<String>,
}

/// Looks at the host below `root` as a daemon with `config` would use it.
pub(crate) fn findings(root: &Root, config: &Config) -> Vec<Finding> {
    judge(&Facts::gather(root, config))
}

/// Whether something essential is missing.
pub(crate) fn is_missing(findings: &[Finding]) -> bool {
    findings
        .iter()
        .any(|finding| finding.verdict == Verdict::Missing)
}

/// A line for each finding, remedies below.
pub(crate) fn table(findings: &[Finding]) -> String {
    let width = findings
        .iter()
        .map(|finding| finding.subject.len())
        .max()
        .unwrap_or(0);
    let mut text = String::new();
    for Finding {
        subject,
        verdict,
        found,
        remedy,
    } in findings
    {
        let word = match verdict {
            Verdict::Ok => "ok",
            Verdict::Warning => "warning",
            Verdict::Missing => "MISSING",
        };
        // Writing to a String can't fail, here and below.
        let _ = writeln!(text, "{subject:width$}  {word:7}  {found}");
        if let Some(remedy) = remedy {
            let _ = writeln!(text, "{:width$}           -> {remedy}", "");
        }
    }
    let summary = match findings
        .iter()
        .map(|finding| finding.verdict)
        .max_by_key(|verdict| *verdict as u8)
    {
        Some(Verdict::Missing) => "xenblkd cannot run here until what is MISSING is mended.",
        Some(Verdict::Warning) => "xenblkd can run here; see the warnings.",
        _ => "xenblkd can run here.",
    };
    let _ = writeln!(text, "\n{summary}");
    text
}

fn ok(subject: &'static str, found: impl Into<String>) -> Finding {
    Finding {
        subject,
        verdict: Verdict::Ok,
        found: found.into(),
        remedy: None,
    }
}

fn warning(subject: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
    Finding {
        subject,
        verdict: Verdict::Warning,
        found: found.into(),
        remedy: Some(remedy.into()),
    }
}

fn missing(subject: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
    Finding {
        subject,
        verdict: Verdict::Missing,
        found: found.into(),
        remedy: Some(remedy.into()),
    }
}

/// In the order in which mending one may mend the next.
fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![
        hypervisor(facts),
        kernel(facts.release.as_deref()),
        device("gntdev", "/dev/xen/gntdev", "xen-gntdev", &facts.gntdev),
        device("evtchn", "/dev/xen/evtchn", "xen-evtchn", &facts.evtchn),
        store(facts),
        owner(facts),
        io_uring(facts),
        state_directory(facts),
    ];
    findings.push(maptrack(facts));
    findings.extend(limits(facts));
    findings
}

fn hypervisor(facts: &Facts) -> Finding {
    match (facts.hypervisor.as_deref(), facts.guest_type.as_deref()) {
        (Some("xen"), Some(kind @ ("PV" | "PVH" | "HVM"))) => ok("xen", format!("a {kind} domain")),
        (Some("xen"), _) => ok("xen", "a domain of unknown kind"),
        (found, _) => missing(
            "xen",
            format!(
                "/sys/hypervisor/type says {}",
                found.unwrap_or("nothing: no hypervisor")
            ),
            "boot this machine under Xen and run xenblkd in dom0 or a driver domain",
        ),
    }
}

fn kernel(release: Option<&str>) -> Finding {
    let release = release.unwrap_or("unknown");
    let mut numbers = release
        .split(['.', '-'])
        .map_while(|part| part.parse::<u32>().ok());
    match (numbers.next(), numbers.next()) {
        (Some(major), Some(minor)) if (major, minor) >= (6, 1) => {
            ok("kernel", format!("Linux {release}"))
        }
        _ => missing(
            "kernel",
            format!("Linux {release}"),
            "use Linux 6.1 or later: older ones lack the io_uring modes the workers run in",
        ),
    }
}

fn device(subject: &'static str, path: &str, module: &str, reach: &Reach) -> Finding {
    match reach {
        Reach::Usable => ok(subject, path),
        Reach::Missing => missing(
            subject,
            format!("{path} does not exist"),
            format!("modprobe {module}"),
        ),
        Reach::Refused(error) => missing(
            subject,
            format!("{path}: {error}"),
            "run xenblkd as root; in a unit or container, allow the devices in /dev/xen",
        ),
    }
}

fn store(facts: &Facts) -> Finding {
    let (path, reach) = &facts.store;
    let path = path.display();
    match reach {
        Reach::Usable => ok("xenstore", path.to_string()),
        Reach::Missing => missing(
            "xenstore",
            format!("{path} does not exist, nor does another way to XenStore"),
            "start xenstored (systemctl start xenstored, on Debian: systemctl start xen), or modprobe xenfs \
             in a driver domain, or set `xenstore` in the configuration",
        ),
        Reach::Refused(error) => missing(
            "xenstore",
            format!("{path}: {error}"),
            "start xenstored (systemctl start xenstored, on Debian: systemctl start xen) and run xenblkd as root",
        ),
    }
}

fn owner(facts: &Facts) -> Finding {
    const SUBJECT: &str = "backend/vbd";
    if facts.kind == Kind::Vbd3 {
        let found = "no kernel's; XAPI's tapback serves the same disks: it must not run";
        return ok("backend/vbd3", found);
    }
    match &facts.blkback {
        Blkback::KeptOut => ok(SUBJECT, "free; modprobe.d keeps xen-blkback out"),
        Blkback::MayCome => warning(
            SUBJECT,
            "free, but udev loads xen-blkback with the first disk and it takes every disk",
            "put the line `install xen-blkback /bin/false` into /etc/modprobe.d/xenblkd.conf",
        ),
        Blkback::Module => missing(
            SUBJECT,
            "the kernel's xen-blkback is loaded and serves the same disks",
            "shut down the guests it serves, rmmod xen-blkback, and put the line `install xen-blkback \
             /bin/false` into /etc/modprobe.d/xenblkd.conf",
        ),
        Blkback::BuiltIn => missing(
            SUBJECT,
            "xen-blkback is built into this kernel and serves the same disks",
            "boot with the parameter initcall_blacklist=xen_blkif_init",
        ),
    }
}

fn io_uring(facts: &Facts) -> Finding {
    match &facts.io_uring {
        Ok(()) => ok("io_uring", "usable"),
        Err(error) => missing(
            "io_uring",
            error.clone(),
            "sysctl kernel.io_uring_disabled=0, and a kernel with CONFIG_IO_URING, 6.1 or later",
        ),
    }
}

fn state_directory(facts: &Facts) -> Finding {
    let (path, reach) = &facts.state_directory;
    let path = path.display();
    match reach {
        Reach::Usable => ok("state", path.to_string()),
        Reach::Missing => missing(
            "state",
            format!("{path} can't be made: its parent doesn't exist"),
            format!("mkdir -p {path}"),
        ),
        Reach::Refused(error) => missing(
            "state",
            format!("{path}: {error}"),
            "run xenblkd as root, with this folder writable",
        ),
    }
}

fn maptrack(facts: &Facts) -> Finding {
    let Some(frames) = facts.maptrack_frames else {
        // Xen's filesystem of parameters may not be compiled in, nor its tool be installed.
        return ok(
            "maptrack",
            format!(
                "not to be seen here; Xen's default is {MAPTRACK_FRAMES} frames; `xl info` shows in xen_commandline \
                 whether gnttab_max_maptrack_frames says otherwise"
            ),
        );
    };
    let found = format!(
        "{frames} maptrack frames: {} mapped pages at once, host-wide",
        frames.saturating_mul(128)
    );
    if frames >= MAPTRACK_FRAMES {
        ok("maptrack", found)
    } else {
        let remedy = format!("boot Xen with gnttab_max_maptrack_frames={MAPTRACK_FRAMES} or more");
        warning("maptrack", found, remedy)
    }
}

fn limits(facts: &Facts) -> impl Iterator<Item = Finding> {
    let unit =
        |setting| format!("in a unit {setting} (the shipped one has it); in a shell, ulimit");
    let limits = [
        (
            "max_map_count",
            facts.max_map_count,
            MAP_COUNT,
            format!("sysctl vm.max_map_count={MAP_COUNT}"),
        ),
        (
            "memlock",
            facts.memlock,
            MEMLOCK,
            unit("LimitMEMLOCK=infinity"),
        ),
        ("nofile", facts.nofile, NOFILE, unit("LimitNOFILE=65536")),
    ];
    limits
        .into_iter()
        .filter_map(|(subject, value, least, remedy)| {
            Some(match value? {
                u64::MAX => ok(subject, "unlimited"),
                value if value >= least => ok(subject, value.to_string()),
                value => warning(subject, format!("{value}, less than {least}"), remedy),
            })
        })
}
