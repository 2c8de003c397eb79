//! One frontend's rings on the workers: made ready, attached all at once, detached all together. The
//! device's task decides when; what the frontend published has been checked before it comes here.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinSet;
use tracing::{debug, info, warn};
use xenblk_grants::SharedPages;
use xenblk_xenstore::vbd::{BackendPath, FrontendRings, QueueKeys};

use super::board::Counters;
use super::fences::Fences;
use super::flusher::Flusher;
use super::host::Host;
use super::maptrack::{Maptrack, Share};
use super::workers::{NewRing, RingEvent, Workers};
use super::{Limits, WorkerProgram};
use crate::control::RingStatus;
use crate::message::{Attach, Persistent, Report, RingId};
use crate::stats::{self, Reader};
use crate::target::OpenedTarget;

/// How often a dead worker's fence is looked at.
const FENCE_POLL: Duration = Duration::from_millis(10);

static NEXT_RING: AtomicU64 = AtomicU64::new(1);

/// What the rings of a device have in common.
#[derive(Clone, Debug)]
pub(super) struct RingSetup {
    pub(super) path: BackendPath,
    pub(super) target: Arc<OpenedTarget>,
    pub(super) host: Arc<Host>,
    pub(super) limits: Limits,
    pub(super) maptrack: Maptrack,
    pub(super) discard: bool,
    pub(super) program: WorkerProgram,
    pub(super) fences: Arc<Fences>,
}

/// The rings of one connected (or connecting, or closing) frontend.
#[derive(Debug)]
pub(super) struct Connection {
    target: Arc<OpenedTarget>,
    flusher: Arc<Flusher>,
    workers: Workers,
    rings: Vec<Ring>,
    announced: bool,
    /// Set once a flush has failed: the disk refuses writes, one line says why.
    degraded: Option<String>,
    closing: Option<Closing>,
    events: UnboundedReceiver<(RingId, RingEvent)>,
}

#[derive(Debug)]
struct Closing {
    since: Instant,
    fence: Fence,
}

/// The I/O of workers that died with rings of the connection.
#[derive(Debug)]
enum Fence {
    /// Not looked at: not every ring is gone.
    Unknown,
    /// Ends when there is none any more.
    Awaited(JoinSet<()>),
    /// There is none.
    Free,
}

#[derive(Debug)]
struct Ring {
    id: RingId,
    queue: u32,
    slot: u32,
    pid: Option<u32>,
    /// Its worker's; known once it has one.
    fence: Option<u64>,
    state: RingState,
    /// Why it isn't being served yet, once that has taken long.
    unbound: Option<String>,
    counters: Counters,
    /// Held as long as something may be mapped for it.
    _share: Share,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RingState {
    Attaching,
    Serving,
    /// Stopped by its worker, still mapped.
    Failed,
    /// Detached, but its worker still has something of the guest's: it is gone only with the worker.
    Left,
    /// Nothing of it is left in any worker; `lost` if its worker died, so that its fence must be awaited.
    Gone {
        lost: bool,
    },
}

/// What a connection tells its device.
#[derive(Debug)]
pub(super) enum Change {
    /// Something for the status board, or the last of the rings is now being served.
    Progress,
    /// A ring failed: one line for the administrator.
    Failed(String),
    /// One line for the administrator about a device that goes on: the disk refuses writes from now on, as
    /// every ring has been told, or a ring takes long to attach.
    Notice(String),
}

/// One ring made ready: everything opened, nothing handed over yet.
struct ReadyRing {
    attach: Box<Attach>,
    fds: Vec<OwnedFd>,
    counters: Counters,
    share: Share,
}

impl Connection {
    /// Opens what the rings need, off this thread, and hands them to the workers. The error is one line.
    pub(super) async fn start(
        setup: RingSetup,
        rings: FrontendRings,
        workers: Workers,
    ) -> Result<Self, String> {
        let target = Arc::clone(&setup.target);
        let path = setup.path;
        let ready = tokio::task::spawn_blocking(move || {
            let flusher = Flusher::new(setup.program.clone(), &setup.fences, &setup.target)
                .map_err(|error| format!("open the target for flushing: {error}"))?;
            let queues = rings.queues.iter().zip(0..);
            let ready: Result<Vec<_>, String> = queues
                .map(|(keys, queue)| make_ready(&setup, &rings, keys, queue))
                .collect();
            Ok::<_, String>((Arc::new(flusher), ready?))
        });
        let (flusher, ready) = ready.await.map_err(|error| error.to_string())??;
        let (events_tx, events) = unbounded_channel();
        let place = |ready: ReadyRing| {
            let (ring, queue) = (ready.attach.ring, ready.attach.queue);
            let slot = slot_of(path, queue, workers.count());
            workers.attach(
                slot,
                NewRing {
                    attach: ready.attach,
                    fds: ready.fds,
                    events: events_tx.clone(),
                    flusher: Arc::clone(&flusher),
                },
            );
            Ring {
                id: ring,
                queue,
                slot,
                pid: None,
                fence: None,
                state: RingState::Attaching,
                unbound: None,
                counters: ready.counters,
                _share: ready.share,
            }
        };
        let rings = ready.into_iter().map(place).collect();
        Ok(Self {
            target,
            flusher,
            workers,
            rings,
            announced: false,
            degraded: None,
            closing: None,
            events,
        })
    }

    /// Every ring is being served.
    pub(super) fn is_serving(&self) -> bool {
        self.rings
            .iter()
            .all(|ring| ring.state == RingState::Serving)
    }

    /// A ring will never be served (again).
    pub(super) fn is_broken(&self) -> bool {
        self.rings
            .iter()
            .any(|ring| !matches!(ring.state, RingState::Attaching | RingState::Serving))
    }

    /// State Connected has been written for these rings.
    pub(super) fn is_announced(&self) -> bool {
        self.announced
    }

    /// See [`is_announced`](Self::is_announced).
    pub(super) fn set_announced(&mut self) {
        self.announced = true;
    }

    /// What is wrong although the device goes on: it refuses writes, or a ring can't have its port yet.
    pub(super) fn complaint(&self) -> Option<&str> {
        let unbound = self.rings.iter().find_map(|ring| ring.unbound.as_deref());
        self.degraded.as_deref().or(unbound)
    }

    /// Number of rings.
    pub(super) fn queues(&self) -> u32 {
        u32::try_from(self.rings.len()).unwrap_or(u32::MAX)
    }

    /// The rings for the status board.
    pub(super) fn status(&self) -> Vec<(RingStatus, Counters)> {
        let live = self
            .rings
            .iter()
            .filter(|ring| !matches!(ring.state, RingState::Gone { .. }));
        live.map(|ring| {
            let status = RingStatus {
                queue: ring.queue,
                worker: ring.slot,
                pid: ring.pid,
                counters: stats::Snapshot::default(),
            };
            (status, Arc::clone(&ring.counters))
        })
        .collect()
    }

    /// The next thing that happens to a ring, or the end of its closing. Cancellation-safe.
    pub(super) async fn changed(&mut self) -> Change {
        if let Some(closing) = &mut self.closing
            && let Fence::Awaited(polling) = &mut closing.fence
        {
            polling.join_next().await;
            closing.fence = Fence::Free;
            return Change::Progress;
        }
        let change = match self.events.recv().await {
            Some((ring, event)) => self.apply(ring, event),
            // Every sender is gone, and with them the workers.
            None if self.closing.is_some() && !self.is_closed() => {
                for ring in &mut self.rings {
                    ring.state = RingState::Gone { lost: true };
                }
                Change::Progress
            }
            None => std::future::pending().await,
        };
        self.look_at_fences();
        change
    }

    fn apply(&mut self, id: RingId, event: RingEvent) -> Change {
        let Some(ring) = self.rings.iter_mut().find(|ring| ring.id == id) else {
            warn!(?id, "event for a ring that isn't ours");
            return Change::Progress;
        };
        let queue = ring.queue;
        match event {
            RingEvent::Placed { pid, fence } => (ring.pid, ring.fence) = (pid, Some(fence)),
            RingEvent::Report(Report::Attached { .. }) if ring.state == RingState::Attaching => {
                ring.state = RingState::Serving;
                ring.unbound = None;
            }
            RingEvent::Report(Report::Detached { left, .. }) if left.is_nothing() => {
                ring.state = RingState::Gone { lost: false };
            }
            RingEvent::Report(Report::Detached { left, .. }) => {
                ring.state = RingState::Left;
                let worker = ring.slot;
                return Change::Notice(format!(
                    "queue {queue}: worker {worker} ended it with {left}; the disk is closed once that worker is gone"
                ));
            }
            RingEvent::Report(Report::Unbound { reason, .. }) => {
                let reason = format!("queue {queue}: {reason}; trying on");
                ring.unbound = Some(reason.clone());
                return Change::Notice(reason);
            }
            RingEvent::Report(Report::AttachFailed { reason, .. }) => {
                ring.state = RingState::Gone { lost: false };
                return Change::Failed(format!("queue {queue}: cannot attach: {reason}"));
            }
            RingEvent::Report(Report::Failed { reason, .. }) => {
                ring.state = RingState::Failed;
                return Change::Failed(format!("queue {queue}: {reason}"));
            }
            RingEvent::Report(Report::FlushFailed { reason, .. }) if self.degraded.is_none() => {
                let reason = format!(
                    "queue {queue}: {reason}; nothing is written until the frontend connects anew"
                );
                self.degraded = Some(reason.clone());
                self.spread_flush_failure(id);
                return Change::Notice(reason);
            }
            RingEvent::Lost { reason } => {
                ring.state = RingState::Gone { lost: true };
                return Change::Failed(format!("queue {queue}: {reason}"));
            }
            RingEvent::Report(report) => debug!(?report, "unexpected report"),
        }
        Change::Progress
    }

    /// A flush that failed on one ring has failed for all: what any of them wrote may be lost.
    fn spread_flush_failure(&self, origin: RingId) {
        for ring in self.rings.iter().filter(|ring| ring.id != origin) {
            self.workers.flush_failed(ring.slot, ring.id);
        }
    }

    /// Begins to detach every ring; [`changed`](Self::changed) brings it to its end, however long the
    /// storage takes.
    pub(super) fn close(&mut self) {
        if self.closing.is_some() {
            return;
        }
        self.closing = Some(Closing {
            since: Instant::now(),
            fence: Fence::Unknown,
        });
        for ring in &self.rings {
            if !matches!(ring.state, RingState::Gone { .. }) {
                self.workers.detach(ring.slot, ring.id);
            }
        }
        self.look_at_fences();
    }

    /// Since when it is being closed, if it is.
    pub(super) fn closing_since(&self) -> Option<Instant> {
        self.closing.as_ref().map(|closing| closing.since)
    }

    /// No worker has anything of the rings left, nor the storage any request of a worker that died.
    pub(super) fn is_closed(&self) -> bool {
        let free = |closing: &Closing| matches!(closing.fence, Fence::Free);
        self.closing.as_ref().is_some_and(free)
    }

    /// Requests taken in and not answered.
    pub(super) fn in_flight(&self) -> u64 {
        let live = |ring: &&Ring| !matches!(ring.state, RingState::Gone { .. });
        let in_flight = |ring: &Ring| ring.counters.snapshot().in_flight;
        self.rings.iter().filter(live).map(in_flight).sum()
    }

    /// With every ring gone, what is left to wait for is the flusher and the I/O of workers that died.
    fn look_at_fences(&mut self) {
        let Some(closing) = &mut self.closing else {
            return;
        };
        let gone = |ring: &Ring| matches!(ring.state, RingState::Gone { .. });
        if !matches!(closing.fence, Fence::Unknown) || !self.rings.iter().all(gone) {
            return;
        }
        let lost = |ring: &&Ring| ring.state == RingState::Gone { lost: true };
        let fences: Vec<_> = self
            .rings
            .iter()
            .filter(lost)
            .filter_map(|ring| ring.fence)
            .map(|fence| fence..fence + 1)
            .collect();
        closing.fence = if fences.is_empty() && !self.flusher.is_running() {
            Fence::Free
        } else {
            let mut polling = JoinSet::new();
            let target = Arc::clone(&self.target);
            let flusher = Arc::clone(&self.flusher);
            polling.spawn(async move {
                flusher.finish().await;
                await_fences(&target, fences).await;
            });
            Fence::Awaited(polling)
        };
    }
}

/// Waits until no request of the processes with these fences can reach the target any more, as long as
/// the storage takes: a write landing later would overwrite a newer one.
pub(super) async fn await_fences(target: &Arc<OpenedTarget>, fences: Vec<Range<u64>>) {
    let fences: Arc<[_]> = fences.into();
    let mut waited = false;
    loop {
        let (target, fences) = (Arc::clone(target), Arc::clone(&fences));
        let free = tokio::task::spawn_blocking(move || fences_free(&target, &fences)).await;
        match free {
            Ok(Ok(true)) => return,
            Ok(Ok(false)) if waited => {}
            Ok(Ok(false)) => info!("waiting for the I/O of a dead worker to end"),
            Ok(Err(error)) if !waited => warn!(%error, "cannot look at the fence of a dead worker"),
            Ok(Err(_)) => {}
            Err(error) => warn!(%error, "looking at the fence of a dead worker"),
        }
        waited = true;
        tokio::time::sleep(FENCE_POLL).await;
    }
}

fn fences_free(target: &OpenedTarget, fences: &[Range<u64>]) -> std::io::Result<bool> {
    for range in fences.iter().filter(|range| !range.is_empty()) {
        if !target.fences_free(range.clone())? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Queue i of a disk goes to worker (hash(disk) + i) mod W: a disk's queues spread, and so do disks.
fn slot_of(path: BackendPath, queue: u32, workers: u32) -> u32 {
    let mut hasher = DefaultHasher::new();
    path.hash(&mut hasher);
    let slot = hasher.finish().wrapping_add(u64::from(queue)) % u64::from(workers.max(1));
    u32::try_from(slot).unwrap_or(0)
}

fn make_ready(
    setup: &RingSetup,
    rings: &FrontendRings,
    keys: &QueueKeys,
    queue: u32,
) -> Result<ReadyRing, String> {
    let failed = |what: &'static str| move |error| format!("queue {queue}: {what}: {error}");
    let (gntdev, evtchn) = setup
        .host
        .open_devices(setup.path.domid)
        .map_err(failed("open devices"))?;
    let protocol = rings.protocol.as_str();
    let abi = xenblk_ring::Abi::from_protocol(protocol)
        .ok_or_else(|| format!("unknown protocol {protocol}"))?;
    let entries = abi.entries(rings.pages);
    let name = format!(
        "xenblkd-journal-{}-{}-{queue}",
        setup.path.domid, setup.path.devid
    );
    let (_, journal) = SharedPages::create(&name, xenblk_ring::journal_bytes(entries))
        .map_err(failed("create journal"))?;
    let name = format!(
        "xenblkd-statistics-{}-{}-{queue}",
        setup.path.domid, setup.path.devid
    );
    let (page, statistics) =
        SharedPages::create(&name, stats::BYTES).map_err(failed("create statistics page"))?;
    let (target, target_fds) = setup
        .target
        .incarnation()
        .map_err(failed("open the target for a worker"))?;
    let mut fds = vec![gntdev, evtchn, journal, statistics];
    fds.extend(target_fds);
    let (limits, host) = (&setup.limits, &setup.host);
    let wanted = if rings.persistent {
        limits.max_persistent_grants
    } else {
        0
    };
    let share = setup.maptrack.share(
        limits.maptrack_entries,
        host.maptrack_per_page(),
        rings.pages,
        wanted,
    );
    let persistent = (share.grants() > 0).then_some(Persistent {
        max_grants: share.grants(),
        window_pages: limits.persistent_window_pages,
        purge_percent: limits.persistent_purge_percent,
        idle_seconds: limits.persistent_idle_seconds,
    });
    let attach = Attach {
        ring: RingId(NEXT_RING.fetch_add(1, Ordering::Relaxed)),
        domid: setup.path.domid,
        devid: setup.path.devid,
        queue,
        queues: u32::try_from(rings.queues.len()).unwrap_or(u32::MAX),
        protocol: protocol.to_owned(),
        ring_refs: keys.ring_refs.clone(),
        event_channel: keys.event_channel,
        max_indirect_segments: setup.limits.max_indirect_segments,
        bounce_bytes: setup.limits.bounce_bytes,
        persistent,
        readonly: setup.target.capabilities().readonly,
        discard: setup.discard,
        secure_discard: setup.discard && setup.target.capabilities().secure_discard,
        host: setup.host.kind(),
        target,
        // Known once the ring has a worker.
        incarnation: 0,
    };
    Ok(ReadyRing {
        attach: Box::new(attach),
        fds,
        counters: Arc::new(Reader::new(page)),
        share,
    })
}
