//! A ring's beginning and end: mapping it and binding its port from what the supervisor sent, and
//! giving everything back, with the proof that nothing is left.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Once;
use std::time::Duration;

use rustix::io::Errno;

use xenblk_grants::persistent::{MAX_PERSISTENT_GRANTS, PersistentGrants, PersistentLimits};
use xenblk_grants::{
    Access, DomId, EventChannels, GrantRef, GrantTable, Mapping, Port, SharedPages, Slab,
};
use xenblk_ring::layout::{MAX_DIRECT_SEGMENTS, PAGE_SIZE};
use xenblk_ring::{Abi, BackRing, JournalIdentity, journal_bytes};

use super::engine::Engine;
use super::ring::{FETCH_LEN, Owned, RingService};
use super::upkeep::Upkeep;
use crate::message::{Attach, HostKind, Left, Persistent, RingId};
use crate::plan::Rules;
use crate::stats::{self, Counter, Writer};
use crate::target::WorkerTargetKind;
use crate::target::serve::{self, Target};

/// What an attach needs besides the message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Surroundings {
    pub(super) boot_id: [u8; 16],
    /// The fence to lock on targets.
    pub(super) fence: u64,
}

/// A ring that is mapped, and whose port is still to be bound.
pub(super) struct Unbound {
    id: RingId,
    dom: DomId,
    remote: Port,
    back: BackRing<Mapping, SharedPages>,
    grants: Box<dyn GrantTable>,
    persistent: Option<PersistentGrants>,
    events: Box<dyn EventChannels>,
    target: Box<dyn Target>,
    upkeep: Upkeep,
    slab: Slab,
    fetch: Slab,
    rules: Rules,
    stats: Writer,
    span: tracing::Span,
}

/// What came of [`Unbound::bind`].
pub(super) enum Binding {
    Bound(Box<RingService>),
    /// The port is closed, or somebody still has it: the kernel doesn't say which. One line.
    Busy(Box<Unbound>, String),
    /// One line for the administrator.
    Failed(String),
}

/// Maps one ring. On error everything is closed and unmapped again; the text is one line for the
/// administrator.
pub(super) fn prepare(
    around: Surroundings,
    message: &Attach,
    fds: Vec<OwnedFd>,
) -> Result<Unbound, String> {
    let abi = Abi::from_protocol(&message.protocol)
        .ok_or_else(|| format!("protocol {:?}: expected one of blkif's", message.protocol))?;
    let mut fds = fds.into_iter();
    let mut next = |what| {
        fds.next()
            .ok_or(format!("no descriptor for {what} came along"))
    };
    let (gntdev, evtchn) = (next("gntdev")?, next("evtchn")?);
    let (journal, statistics) = (next("the journal")?, next("the statistics")?);
    let (grants, events) = devices(message.host, gntdev, evtchn).map_err(at("use the devices"))?;

    let pages = u32::try_from(message.ring_refs.len()).map_err(|_| "too many ring pages")?;
    if !pages.is_power_of_two() || pages > xenblk_ring::layout::MAX_RING_PAGES {
        return Err(format!("{pages} ring pages: expected 1, 2, 4, 8 or 16"));
    }
    let bytes = journal_bytes(abi.entries(pages));
    let journal =
        SharedPages::map(journal, bytes, Access::ReadWrite).map_err(at("map the journal"))?;
    let page = SharedPages::map(statistics, stats::BYTES, Access::ReadWrite)
        .map_err(at("map the statistics page"))?;
    let slab = bounce(message).map_err(at("reserve bounce memory"))?;
    let fetch = Slab::reserve(FETCH_LEN as usize).map_err(at("reserve bounce memory"))?;
    keep_in_memory(&[journal.lock(), slab.lock(), fetch.lock()]);
    let stats = Writer::new(page);
    let memory = bytes + stats::BYTES + slab.size() + fetch.size();
    stats.set(Counter::MemoryBytes, memory as u64);
    let target = serve::attach(&message.target, fds.collect(), around.fence)
        .map_err(at("take over the target"))?;

    let dom = DomId(message.domid);
    let refs: Vec<GrantRef> = message.ring_refs.iter().copied().map(GrantRef).collect();
    let mapping = grants.map(dom, &refs, Access::ReadWrite).map_err(|error| {
        format!(
            "can't map the ring's grants {:?}: {error}",
            message.ring_refs
        )
    })?;
    let identity = identity(message, around, &*target);
    let back = BackRing::attach(mapping, abi, pages, journal, &identity)
        .map_err(|error| format!("the ring can't be served: {error}"))?;
    let (domid, devid, queue) = (message.domid, message.devid, message.queue);
    Ok(Unbound {
        id: message.ring,
        dom,
        remote: Port(message.event_channel),
        back,
        grants,
        persistent: message
            .persistent
            .map(|limits| PersistentGrants::new(dom, persistent_limits(limits))),
        events,
        target,
        upkeep: Upkeep::new(!message.readonly && message.target.kind != WorkerTargetKind::Null),
        slab,
        fetch,
        rules: rules(message),
        stats,
        // Of the highest level, so that whatever is logged has it.
        span: tracing::error_span!("ring", domid, devid, queue),
    })
}

/// Without the lock all is well until the host swaps. Once is enough to say so.
fn keep_in_memory(locked: &[io::Result<()>]) {
    static SAID: Once = Once::new();
    if let Some(Err(error)) = locked.iter().find(|locked| locked.is_err()) {
        SAID.call_once(|| {
            tracing::info!(
                "can't lock memory: {error}; going on without, which is slow once the host swaps"
            );
        });
    }
}

impl Unbound {
    pub(super) fn id(&self) -> RingId {
        self.id
    }

    pub(super) fn span(&self) -> &tracing::Span {
        &self.span
    }

    /// Binds the port; then the ring can be served as number `place` of the worker.
    pub(super) fn bind(self: Box<Self>, engine: &mut Engine, place: usize) -> Binding {
        let port = match self.events.bind_interdomain(self.dom, self.remote) {
            Ok(port) => port,
            Err(error) => {
                let reason = format!("can't bind event channel {}: {error}", self.remote.0);
                return if Errno::from_io_error(&error) == Some(Errno::INVAL) {
                    Binding::Busy(self, reason)
                } else {
                    Binding::Failed(reason)
                };
            }
        };
        let (slab, fetch_slab) = (engine.add_slab(self.slab), engine.add_slab(self.fetch));
        let Some(fetch) = engine.lend(fetch_slab, FETCH_LEN) else {
            let reason = "the buffer for indirect segments has no room for itself";
            return Binding::Failed(reason.into());
        };
        Binding::Bound(Box::new(RingService::new(Owned {
            id: self.id,
            place,
            dom: self.dom,
            back: self.back,
            grants: self.grants,
            persistent: self.persistent,
            events: self.events,
            port,
            target: self.target,
            upkeep: self.upkeep,
            slab,
            fetch,
            rules: self.rules,
            stats: self.stats,
            span: self.span,
        })))
    }

    /// Gives everything back; nothing of it has been used.
    pub(super) fn close(self: Box<Self>) -> Left {
        let Self { back, grants, .. } = *self;
        drop(back);
        Left {
            pages: count(grants.mapped()),
            ..Left::default()
        }
    }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn identity(message: &Attach, around: Surroundings, target: &dyn Target) -> JournalIdentity {
    let (target_dev, target_ino) = target.identity();
    JournalIdentity {
        boot_id: around.boot_id,
        // The supervisor doesn't say; a journal is replayed by nobody yet.
        domain_uuid: [0; 16],
        domid: u32::from(message.domid),
        devid: message.devid,
        queue: message.queue,
        ring_refs: message.ring_refs.clone(),
        port: message.event_channel,
        max_indirect_segments: message.max_indirect_segments,
        incarnation: message.incarnation,
        target_dev,
        target_ino,
    }
}

type Devices = (Box<dyn GrantTable>, Box<dyn EventChannels>);

fn devices(host: HostKind, gntdev: OwnedFd, evtchn: OwnedFd) -> io::Result<Devices> {
    match host {
        HostKind::Xen => Ok((
            xenblk_grants::sys::grant_table(gntdev),
            xenblk_grants::sys::event_channels(evtchn),
        )),
        #[cfg(feature = "fake")]
        HostKind::Fake => Ok((
            xenblk_grants::fake::grant_table(gntdev)?,
            xenblk_grants::fake::event_channels(evtchn)?,
        )),
        #[cfg(not(feature = "fake"))]
        HostKind::Fake => Err(io::Error::other("this build has no mocked hypervisor")),
    }
}

/// Bounce memory for the ring. One request of the largest size has to fit whatever the allocator's
/// blocks, or it would wait for ever: when all is free there is a block of this power of two.
fn bounce(message: &Attach) -> io::Result<Slab> {
    let segments = usize::from(message.max_indirect_segments).max(MAX_DIRECT_SEGMENTS);
    let least = segments.next_power_of_two() * PAGE_SIZE;
    let bytes = usize::try_from(message.bounce_bytes).map_err(io::Error::other)?;
    if bytes < least {
        return Err(io::Error::other(format!(
            "{bytes} bytes given, at least {least} expected"
        )));
    }
    Slab::reserve(bytes)
}

fn persistent_limits(limits: Persistent) -> PersistentLimits {
    let size = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
    let idle = Duration::from_secs(limits.idle_seconds.into());
    PersistentLimits {
        max_grants: size(limits.max_grants).min(MAX_PERSISTENT_GRANTS),
        window_pages: size(limits.window_pages),
        purge_percent: size(limits.purge_percent),
        idle: (!idle.is_zero()).then_some(idle),
    }
}

fn rules(message: &Attach) -> Rules {
    let target = &message.target;
    Rules {
        size: target.geometry.size,
        sector_size: target.geometry.sector_size.max(512),
        readonly: message.readonly,
        discard: message.discard,
        secure_discard: message.secure_discard,
        discard_unit: target.discard_unit.max(512),
        max_indirect_segments: message.max_indirect_segments,
    }
}

fn at(doing: &'static str) -> impl Fn(io::Error) -> String {
    move |error| format!("can't {doing}: {error}")
}

impl RingService {
    /// Gives everything back: the port, the ring's pages, the memory, every descriptor. The ring is
    /// drained and nothing of it is being waited for. What is found left over nonetheless is a bug of
    /// ours; everything else is given back all the same.
    pub(super) fn close(self, engine: &mut Engine) -> Left {
        let Owned {
            place,
            back,
            grants,
            persistent,
            events,
            port,
            target,
            slab,
            fetch,
            ..
        } = self.own;
        let requests = back.in_flight();
        let operations = count(engine.pending_of(place));
        events.unbind(port);
        let fetch_slab = fetch.slab();
        engine.release(fetch);
        drop(back);
        let closed = persistent.map_or(Ok(()), |persistent| persistent.close(&*grants));
        let kept = closed.map_or_else(|left| left.entries.max(left.pages), |()| 0);
        let pages = count(grants.mapped());
        drop((grants, events, target));
        let lent = [slab, fetch_slab].map(|slab| engine.remove_slab(slab).err().unwrap_or(0));
        Left {
            requests,
            operations,
            buffers: count(lent.iter().sum()),
            pages,
            grants: count(kept),
        }
    }
}
