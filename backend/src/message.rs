//! What supervisor and worker say to each other: a versioned serde body and the file descriptors
//! that travel with it. The same types go over a socket pair to another process and over a queue to a
//! thread; nothing outside `channel` knows which it is.

use serde::{Deserialize, Serialize};

use crate::target::WorkerTarget;

/// Bumped on every incompatible change; a worker refuses a supervisor of another version. Workers are
/// started from the supervisor's own executable, so the two differ only by an operator's mistake.
pub const VERSION: u32 = 2;

/// Names one ring for as long as the supervisor lives; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RingId(pub u64);

/// Supervisor to worker, and to flusher. The first message says which of the two the new process is.
#[derive(Debug, Serialize, Deserialize)]
pub enum Command {
    /// First message on a channel to a worker.
    Hello {
        /// Sender's [`VERSION`].
        version: u32,
        /// Number of the fence this worker locks on each of its targets; no other process has it.
        fence: u64,
    },
    /// First message on a channel to the flusher of a disk, with the descriptors of [`WorkerTarget`].
    HelloFlusher {
        /// Sender's [`VERSION`].
        version: u32,
        /// As a worker's.
        fence: u64,
        /// What it looks after.
        target: WorkerTarget,
    },
    /// To a flusher: another ring of its disk, whose socket is the one descriptor.
    Serve,
    /// Take over one ring. Descriptors, in this order: gntdev, evtchn, journal, statistics, then those
    /// of [`WorkerTarget`].
    Attach(Box<Attach>),
    /// Finish what the ring has consumed, publish, unmap, close, then report [`Report::Detached`].
    Detach {
        /// Which ring.
        ring: RingId,
    },
    /// Answer to [`Report::FlusherWanted`], with one descriptor, the socket to the flusher of the ring's
    /// disk; without any if there is none to be had.
    Flusher {
        /// Which ring.
        ring: RingId,
    },
    /// Another ring of the same disk saw a flush fail: from now on answer ERROR to every FLUSH and
    /// WRITE of this ring.
    FlushFailed {
        /// Which ring.
        ring: RingId,
    },
    /// Log this much from now on. Has no effect on a worker in a thread, whose logger is the process'.
    LogLevel {
        /// How much.
        level: LogLevel,
    },
    /// Detach every ring and exit.
    Shutdown,
}

/// How much is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names are tracing's")]
pub enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl From<tracing::Level> for LogLevel {
    fn from(level: tracing::Level) -> Self {
        match level {
            tracing::Level::ERROR => Self::Error,
            tracing::Level::WARN => Self::Warn,
            tracing::Level::INFO => Self::Info,
            tracing::Level::DEBUG => Self::Debug,
            tracing::Level::TRACE => Self::Trace,
        }
    }
}

impl From<LogLevel> for tracing::Level {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Error => Self::ERROR,
            LogLevel::Warn => Self::WARN,
            LogLevel::Info => Self::INFO,
            LogLevel::Debug => Self::DEBUG,
            LogLevel::Trace => Self::TRACE,
        }
    }
}

/// Everything a worker needs to serve one ring; it reads nothing from XenStore.
#[derive(Debug, Serialize, Deserialize)]
pub struct Attach {
    /// The ring's name in later messages.
    pub ring: RingId,
    /// The frontend's domain, from the backend directory's path.
    pub domid: u16,
    /// The virtual device number, from the backend directory's path.
    pub devid: u32,
    /// Queue number within the device.
    pub queue: u32,
    /// Queues of the device; barriers drain only this ring, so they need to know.
    pub queues: u32,
    /// `protocol` as negotiated, for example `x86_64-abi`.
    pub protocol: String,
    /// Grants of the ring's pages, in order; 1 to 16, a power of two.
    pub ring_refs: Vec<u32>,
    /// The frontend's unbound port.
    pub event_channel: u32,
    /// Upper bound on segments of an indirect request, as advertised.
    pub max_indirect_segments: u16,
    /// Bytes of bounce memory this ring may use.
    pub bounce_bytes: u64,
    /// What of the guest's memory it may keep mapped; `None` unless both sides agreed to
    /// `feature-persistent`.
    pub persistent: Option<Persistent>,
    /// Refuse every operation that modifies.
    pub readonly: bool,
    /// Serve DISCARD (`discard-enable`).
    pub discard: bool,
    /// Serve the secure one too (`discard-secure`).
    pub secure_discard: bool,
    /// How the descriptors gntdev and evtchn are to be used.
    pub host: HostKind,
    /// What the requests act on.
    pub target: WorkerTarget,
    /// Which life of the worker slot this is, for the journal.
    pub incarnation: u64,
}

/// A ring's persistent grants. Every page the ring maps counts towards the host's limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Persistent {
    /// Most grants, at most 4096.
    pub max_grants: u32,
    /// Pages of address space for them; more than `max_grants`, so that pieces of it find room.
    pub window_pages: u32,
    /// Share of them, in per cent, that goes when others need room: 1 to 100.
    pub purge_percent: u32,
    /// Seconds after which an unused one goes; 0: never.
    pub idle_seconds: u32,
}

/// Which hypervisor the device descriptors belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostKind {
    /// `/dev/xen/gntdev` and `/dev/xen/evtchn`.
    Xen,
    /// Sockets of the mocked hypervisor; a build without feature `fake` refuses them.
    Fake,
}

/// Worker to supervisor.
#[derive(Debug, Serialize, Deserialize)]
pub enum Report {
    /// Answer to [`Command::Hello`].
    Ready {
        /// Sender's [`VERSION`].
        version: u32,
    },
    /// The frontend's port can't be bound yet, as is so for a moment after another process had it. It is
    /// tried until it can, or the ring is detached; said once, when that has taken long.
    Unbound {
        /// Which ring.
        ring: RingId,
        /// One line for the administrator.
        reason: String,
    },
    /// The ring is mapped, its port bound, and it is being served.
    Attached {
        /// Which ring.
        ring: RingId,
    },
    /// Attaching failed; every descriptor of the message is closed and nothing is mapped.
    AttachFailed {
        /// Which ring.
        ring: RingId,
        /// One line for the administrator: what was asked, what happened.
        reason: String,
    },
    /// The ring stopped serving (corrupt indices, target gone); it stays mapped until `Detach`.
    Failed {
        /// Which ring.
        ring: RingId,
        /// One line for the administrator.
        reason: String,
    },
    /// A flush of this ring failed: what was written before may be lost. The ring answers ERROR to
    /// every FLUSH and WRITE from now on; tell the disk's other rings, on every worker.
    FlushFailed {
        /// Which ring.
        ring: RingId,
        /// One line for the administrator.
        reason: String,
    },
    /// The ring's first flush or discard waits for a flusher: answer with [`Command::Flusher`].
    FlusherWanted {
        /// Which ring.
        ring: RingId,
    },
    /// The ring is gone: I/O finished, everything unmapped, descriptors closed, so far as `left` says so.
    Detached {
        /// Which ring.
        ring: RingId,
        /// The proof.
        left: Left,
    },
}

/// What was found not given back when a ring had ended, counted then and there. Nothing: the guest's
/// memory can't be reached any more, by us or by the storage. Anything else is a bug of ours, and the
/// guest must not be told that its disk is closed before the worker's process is gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// Requests taken in and not answered.
    pub requests: u32,
    /// Operations and waits the kernel has not given back: I/O, event channel, target.
    pub operations: u32,
    /// Pieces of bounce memory still lent to one.
    pub buffers: u32,
    /// Pages of the guest still mapped.
    pub pages: u32,
    /// Persistent grants its tree still knew, and pages of its window that had not come back.
    pub grants: u32,
}

impl Left {
    /// Everything was given back.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

impl std::fmt::Display for Left {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} requests, {} operations, {} buffers, {} mapped pages, {} persistent grants",
            self.requests, self.operations, self.buffers, self.pages, self.grants
        )
    }
}
