//! The control plane: watches the backend directories of XenStore, runs one task per vbd, places rings
//! on workers and answers on the control socket. It never touches a request's data; that is `worker`'s.

mod board;
mod claim;
mod connection;
mod control_socket;
mod device;
mod disk;
mod fences;
mod flusher;
mod guest_log;
mod handle;
mod host;
mod maptrack;
mod process;
mod service;
mod view;
mod workers;

use std::ffi::OsString;
use std::future::Future;
use std::io;
use std::path::PathBuf;

use xenblk_grants::persistent::{self, MAX_PERSISTENT_GRANTS};
use xenblk_xenstore::vbd::{self, Kind};

pub use handle::{Handle, Load, Waiting};
pub use host::HostSource;

/// Most workers of one supervisor.
pub const MAX_WORKERS: u32 = 256;

/// Pages of a ring's address space for persistent grants that must be left when it has as many as it may.
pub const MERGE_ROOM: u32 = persistent::MERGE_ROOM as u32;

/// Most pages of a ring's address space for persistent grants.
pub const MAX_WINDOW_PAGES: u32 = 32_768;

/// How a supervisor is set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// XenStore's socket, `/run/xenstored/socket` on a Xen host.
    pub store: PathBuf,
    /// Where grant and event channel descriptors come from.
    pub host: HostSource,
    /// What a worker is.
    pub program: WorkerProgram,
    /// Storage cores: at most this many workers, each started with its first ring. 1 to [`MAX_WORKERS`].
    pub workers: u32,
    /// Where to listen for [`crate::control::Request`]s; nowhere if absent.
    pub control: Option<PathBuf>,
    /// What is offered to guests and reserved for them.
    pub limits: Limits,
    /// Which backend directories are served.
    pub kind: Kind,
    /// A path that exists while the kernel's xen-blkback is loaded, which serves every `vbd`; absent where
    /// there is no such kernel.
    pub blkback: Option<PathBuf>,
}

/// What a worker is.
#[derive(Clone, Debug)]
pub enum WorkerProgram {
    /// A process of its own: `path args.. --channel-fd 0`, which calls [`crate::worker::main`] with its
    /// standard input.
    Process {
        /// The executable; `/proc/self/exe` never mixes the versions of an upgraded file.
        path: PathBuf,
        /// Arguments before `--channel-fd 0`, usually the hidden subcommand `worker`.
        args: Vec<OsString>,
    },
    /// A thread of this process, for tests.
    Threads,
}

impl Options {
    /// Where a Linux kernel lists its xen-blkback.
    pub const BLKBACK: &str = claim::BLKBACK;
}

impl WorkerProgram {
    /// This executable with the subcommand `worker`.
    pub fn this_executable() -> Self {
        Self::Process {
            path: "/proc/self/exe".into(),
            args: vec!["worker".into()],
        }
    }
}

/// What is offered to guests and reserved for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// `multi-queue-max-queues`.
    pub max_queues: u32,
    /// `max-ring-page-order`, at most 4.
    pub max_ring_page_order: u32,
    /// `feature-max-indirect-segments`, at most 256.
    pub max_indirect_segments: u16,
    /// Bounce memory a ring may use, in bytes; at least one request of the largest size.
    pub bounce_bytes: u64,
    /// Grants a ring may keep mapped, at most 4096; 0: `feature-persistent` isn't offered.
    pub max_persistent_grants: u32,
    /// Pages of address space a ring has for them, more than they are by at least [`MERGE_ROOM`].
    pub persistent_window_pages: u32,
    /// Share of a ring's persistent grants, in per cent, that goes when others need room; 1 to 100.
    pub persistent_purge_percent: u32,
    /// Seconds after which an unused persistent grant goes; 0: never.
    pub persistent_idle_seconds: u32,
    /// Entries of the hypervisor's maptrack table, which is one for the whole host, that all rings may
    /// use together. A page takes two in a PV domain, one in any other.
    pub maptrack_entries: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_queues: 16,
            max_ring_page_order: 4,
            max_indirect_segments: 256,
            bounce_bytes: 8 << 20,
            max_persistent_grants: 1056,
            persistent_window_pages: 2048,
            persistent_purge_percent: 5,
            persistent_idle_seconds: 60,
            // Three quarters of Xen's default; the rest is for the other backends of the domain.
            maptrack_entries: 196_608,
        }
    }
}

impl Limits {
    /// The part a frontend negotiates. A frontend that names no protocol speaks the native one, as the
    /// specification says.
    fn negotiable(&self) -> vbd::Limits {
        vbd::Limits {
            max_queues: self.max_queues,
            max_ring_page_order: self.max_ring_page_order,
            max_indirect_segments: self.max_indirect_segments.into(),
            default_protocol: vbd::Protocol::NATIVE,
        }
    }
}

/// Why a supervisor could not start.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    /// An option is out of range.
    #[error("{option} is {value}, expected {expected}")]
    Option {
        /// Which.
        option: &'static str,
        /// What it says.
        value: u64,
        /// What it may be.
        expected: String,
    },
    /// A socket or device could not be used.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, with its path.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// Somebody else serves the same disks.
    #[error("{0}")]
    Claimed(String),
    /// XenStore could not be used.
    #[error("XenStore at {}: {source}", path.display())]
    Store {
        /// Its socket.
        path: PathBuf,
        /// What went wrong.
        source: xenblk_xenstore::Error,
    },
}

fn io_error(what: String, source: io::Error) -> SupervisorError {
    SupervisorError::Io { what, source }
}

/// A supervisor on a host found usable, watching XenStore already.
#[derive(Debug)]
pub struct Supervisor(service::Service);

impl Supervisor {
    /// Opens everything that must be there from the start. Needs a tokio runtime with I/O and time; one
    /// thread is enough.
    pub async fn start(options: Options) -> Result<Self, SupervisorError> {
        options.check()?;
        Ok(Self(service::Service::start(options).await?))
    }

    /// For asking and telling it while it runs.
    pub fn handle(&self) -> Handle {
        self.0.handle()
    }

    /// Serves vbds until `shutdown` completes, then detaches every ring in order: what guests had asked
    /// for is done and published, however long their storage takes. Guests' states are left as they are;
    /// the next supervisor lets them connect anew.
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        self.0.run(shutdown).await;
    }
}

/// [`Supervisor::start`] and [`Supervisor::run`].
pub async fn run(
    options: Options,
    shutdown: impl Future<Output = ()>,
) -> Result<(), SupervisorError> {
    Supervisor::start(options).await?.run(shutdown).await;
    Ok(())
}

impl Options {
    fn check(&self) -> Result<(), SupervisorError> {
        check_range("workers", self.workers, 1, MAX_WORKERS)?;
        self.limits.check()
    }
}

impl Limits {
    fn check(&self) -> Result<(), SupervisorError> {
        let largest = u64::from(self.max_indirect_segments.max(11)) * 4096;
        check_range("max_queues", self.max_queues, 1, 16)?;
        check_range("max_ring_page_order", self.max_ring_page_order, 0, 4)?;
        check_range("max_indirect_segments", self.max_indirect_segments, 0, 256)?;
        check_range("bounce_bytes", self.bounce_bytes, largest, 1 << 30)?;
        let (grants, room) = (self.max_persistent_grants, MERGE_ROOM);
        check_range(
            "max_persistent_grants",
            grants,
            0,
            MAX_PERSISTENT_GRANTS as u32,
        )?;
        let (window, percent) = (self.persistent_window_pages, self.persistent_purge_percent);
        check_range(
            "persistent_window_pages",
            window,
            grants + room,
            MAX_WINDOW_PAGES,
        )?;
        check_range("persistent_purge_percent", percent, 1, 100)?;
        check_range(
            "persistent_idle_seconds",
            self.persistent_idle_seconds,
            0,
            86_400,
        )
    }
}

fn check_range<T: Into<u64>>(
    option: &'static str,
    value: T,
    min: T,
    max: T,
) -> Result<(), SupervisorError> {
    let (value, min, max) = (value.into(), min.into(), max.into());
    if (min..=max).contains(&value) {
        return Ok(());
    }
    let expected = format!("{min} to {max}");
    Err(SupervisorError::Option {
        option,
        value,
        expected,
    })
}
