//! What supervisor and worker say to each other: a versioned serde body and the file descriptors
//! that travel with it. The same types go over a socket pair to another process and over a queue to a
//! thread; nothing outside `channel` knows which it is.

use serde::{Deserialize, Serialize};

use crate::target::WorkerTarget;

/// Bumped on every incompatible change; a worker refuses a supervisor of another version. Workers are
/// started from the supervisor's own executable, so the two differ only by an operator's mistake.
pub const VERSION: u32 = 1;

/// Names one ring for as long as the supervisor lives; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RingId(pub u64);

/// Supervisor to worker.
#[derive(Debug, Serialize, Deserialize)]
pub enum Command {
    /// First message on a channel.
    Hello {
        /// Sender's [`VERSION`].
        version: u32,
        /// This worker's number, 0 to workers - 1; its fence lock is byte 2^40 + slot of the target.
        slot: u32,
    },
    /// Take over one ring. Descriptors, in this order: gntdev, evtchn, journal, statistics, then those
    /// of [`WorkerTarget`].
    Attach(Box<Attach>),
    /// Finish what the ring has consumed, publish, unmap, close, then report [`Report::Detached`].
    Detach {
        /// Which ring.
        ring: RingId,
    },
    /// Another ring of the same disk saw a flush fail: from now on answer ERROR to every FLUSH and
    /// WRITE of this ring.
    FlushFailed {
        /// Which ring.
        ring: RingId,
    },
    /// Detach every ring and exit.
    Shutdown,
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
    /// Refuse every operation that modifies.
    pub readonly: bool,
    /// Serve DISCARD (`discard-enable`).
    pub discard: bool,
    /// How the descriptors gntdev and evtchn are to be used.
    pub host: HostKind,
    /// What the requests act on.
    pub target: WorkerTarget,
    /// Which life of the worker slot this is, for the journal.
    pub incarnation: u64,
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
    /// The ring is gone: I/O finished, everything unmapped, descriptors closed.
    Detached {
        /// Which ring.
        ring: RingId,
    },
}
