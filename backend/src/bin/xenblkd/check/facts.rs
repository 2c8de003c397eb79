//! What the host looks like, read without changing anything. Everything is read below one root folder,
//! so that a test can show any host it likes; what can only be asked of a running kernel (may I open
//! this device, does that socket answer) is asked of the same paths.

use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::Access;
use xenblk_xenstore::vbd::Kind;

use crate::config::Config;

/// Reads below a root folder, `/` outside tests.
#[derive(Debug)]
pub(crate) struct Root(PathBuf);

impl Root {
    pub(crate) fn new(root: impl Into<PathBuf>) -> Self {
        Self(root.into())
    }

    pub(crate) fn as_path(&self) -> &Path {
        &self.0
    }

    fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        self.0
            .join(path.as_ref().strip_prefix("/").unwrap_or(path.as_ref()))
    }

    /// One line of a file of procfs or sysfs.
    fn line(&self, path: &str) -> Option<String> {
        Some(fs::read_to_string(self.at(path)).ok()?.trim().to_owned())
    }

    fn number(&self, path: &str) -> Option<u64> {
        self.line(path)?.parse().ok()
    }
}

/// How far a file can be used.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reach {
    Usable,
    Missing,
    Refused(String),
}

impl Reach {
    fn of<T>(tried: io::Result<T>) -> Self {
        match tried {
            Ok(_) => Self::Usable,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::Missing,
            Err(error) => Self::Refused(error.to_string()),
        }
    }
}

/// The kernel's own backend for the same disks.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Blkback {
    /// Not here, and modprobe.d keeps it out.
    KeptOut,
    /// Not here, but udev loads it with the first disk.
    MayCome,
    /// A loaded module, its driver registered.
    Module,
    /// Compiled in.
    BuiltIn,
}

/// A soft limit of this process; `u64::MAX` for "unlimited".
pub(super) type Limit = Option<u64>;

#[derive(Debug)]
pub(super) struct Facts {
    /// Which directories are to be served.
    pub(super) kind: Kind,
    /// `/sys/hypervisor/type`.
    pub(super) hypervisor: Option<String>,
    /// `/sys/hypervisor/guest_type`: PV, PVH or HVM.
    pub(super) guest_type: Option<String>,
    /// Kernel release, as `uname -r`.
    pub(super) release: Option<String>,
    pub(super) gntdev: Reach,
    pub(super) evtchn: Reach,
    pub(super) blkback: Blkback,
    /// XenStore's socket or device, and whether it takes a connection.
    pub(super) store: (PathBuf, Reach),
    /// The folder of lock and control socket, and whether it can be written or made.
    pub(super) state_directory: (PathBuf, Reach),
    /// Why io_uring can't be used.
    pub(super) io_uring: Result<(), String>,
    /// `gnttab_max_maptrack_frames`, where xenhypfs tells.
    pub(super) maptrack_frames: Option<u64>,
    pub(super) max_map_count: Option<u64>,
    pub(super) memlock: Limit,
    pub(super) nofile: Limit,
}

impl Facts {
    pub(super) fn gather(root: &Root, config: &Config) -> Self {
        let (store, state_directory) = (config.xenstore(root.as_path()), config.state_directory());
        Self {
            kind: config.kind(),
            hypervisor: root.line("/sys/hypervisor/type"),
            guest_type: root.line("/sys/hypervisor/guest_type"),
            release: root.line("/proc/sys/kernel/osrelease"),
            gntdev: open_device(root, "/dev/xen/gntdev"),
            evtchn: open_device(root, "/dev/xen/evtchn"),
            blkback: blkback(root),
            store: reach_store(root, store),
            state_directory: (
                state_directory.to_owned(),
                writable(&root.at(state_directory)),
            ),
            io_uring: io_uring(root),
            maptrack_frames: maptrack_frames(root),
            max_map_count: root.number("/proc/sys/vm/max_map_count"),
            memlock: soft_limit(root, "Max locked memory"),
            nofile: soft_limit(root, "Max open files"),
        }
    }
}

/// Opening gntdev or evtchn and closing it again has no effect on anybody.
fn open_device(root: &Root, path: &str) -> Reach {
    Reach::of(
        fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(root.at(path)),
    )
}

fn blkback(root: &Root) -> Blkback {
    let driver = root.at("/sys/bus/xen-backend/drivers/vbd").exists();
    // Built-in code has a folder in /sys/module too, but no initstate.
    let module = root.at("/sys/module/xen_blkback/initstate").exists();
    match (driver, module) {
        (true, false) => Blkback::BuiltIn,
        (_, true) => Blkback::Module,
        (false, false) if kept_out(root) => Blkback::KeptOut,
        (false, false) => Blkback::MayCome,
    }
}

/// Whether some modprobe.d file makes loading xen-blkback do something else. `blacklist` alone stops
/// udev, but nobody who asks for the module by its name.
fn kept_out(root: &Root) -> bool {
    let folders = [
        "/etc/modprobe.d",
        "/run/modprobe.d",
        "/usr/lib/modprobe.d",
        "/lib/modprobe.d",
    ];
    let files = folders
        .into_iter()
        .filter_map(|folder| fs::read_dir(root.at(folder)).ok());
    let mut texts = files
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok());
    texts.any(|text| text.lines().any(keeps_out))
}

fn keeps_out(line: &str) -> bool {
    let mut words = line.split_whitespace();
    words.next() == Some("install") && matches!(words.next(), Some("xen-blkback" | "xen_blkback"))
}

fn reach_store(root: &Root, store: PathBuf) -> (PathBuf, Reach) {
    let path = root.at(&store);
    let reach = if store.starts_with("/dev") {
        Reach::of(fs::OpenOptions::new().read(true).write(true).open(path))
    } else {
        Reach::of(UnixStream::connect(path))
    };
    (store, reach)
}

/// A folder that isn't there will be made: then its parent counts.
fn writable(folder: &Path) -> Reach {
    let wanted = Access::WRITE_OK | Access::EXEC_OK;
    let access = |path: &Path| Reach::of(rustix::fs::access(path, wanted).map_err(io::Error::from));
    match (access(folder), folder.parent()) {
        (Reach::Missing, Some(parent)) => access(parent),
        (reach, _) => reach,
    }
}

fn io_uring(root: &Root) -> Result<(), String> {
    match root.number("/proc/sys/kernel/io_uring_disabled") {
        Some(2) => return Err("kernel.io_uring_disabled is 2".to_owned()),
        Some(1) if !rustix::process::geteuid().is_root() => {
            return Err("kernel.io_uring_disabled is 1, which leaves it to root".to_owned());
        }
        _ => {}
    }
    let mut builder = io_uring::IoUring::<io_uring::squeue::Entry>::builder();
    builder
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag();
    builder
        .build(8)
        .map(drop)
        .map_err(|error| format!("io_uring_setup: {error}"))
}

/// Xen tells this through a hypercall only, which its tool makes.
fn maptrack_frames(root: &Root) -> Option<u64> {
    let tool = root.at("/usr/sbin/xenhypfs");
    let mut command = Command::new(tool);
    command
        .args(["cat", "/params/gnttab_max_maptrack_frames"])
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    let output = command
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}

fn soft_limit(root: &Root, name: &str) -> Limit {
    let limits = fs::read_to_string(root.at("/proc/self/limits")).ok()?;
    let rest = limits.lines().find_map(|line| line.strip_prefix(name))?;
    match rest.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}
