//! A ring's beginning and end: mapping it and binding its port from what the supervisor sent, and
//! giving everything back, with the proof that nothing is left.

use std::io;
use std::os::fd::OwnedFd;

use xenblk_grants::{Access, DomId, EventChannels, GrantRef, GrantTable, Port, SharedPages, Slab};
use xenblk_ring::layout::{MAX_DIRECT_SEGMENTS, PAGE_SIZE};
use xenblk_ring::{Abi, BackRing, JournalIdentity, journal_bytes};

use super::engine::Engine;
use super::ring::{FETCH_LEN, Owned, RingService};
use crate::message::{Attach, HostKind};
use crate::plan::Rules;
use crate::stats::{self, Writer};
use crate::target::serve::{self, Target};

/// What an attach needs besides the message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Surroundings {
    pub(super) boot_id: [u8; 16],
    /// The worker's number, for the fence.
    pub(super) slot: u32,
    /// Where the ring will stand among the worker's.
    pub(super) place: usize,
}

/// Maps and binds one ring. On error everything is closed and unmapped again; the text is one line
/// for the administrator.
pub(super) fn attach(
    engine: &mut Engine,
    around: Surroundings,
    message: &Attach,
    fds: Vec<OwnedFd>,
) -> Result<RingService, String> {
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
    let target = serve::attach(&message.target, fds.collect(), around.slot)
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
    let port = events
        .bind_interdomain(dom, Port(message.event_channel))
        .map_err(|error| {
            format!(
                "can't bind event channel {}: {error}",
                message.event_channel
            )
        })?;

    let (slab, fetch_slab) = (engine.add_slab(slab), engine.add_slab(fetch));
    let Some(fetch) = engine.lend(fetch_slab, FETCH_LEN) else {
        return Err("the buffer for indirect segments has no room for itself".into());
    };
    let (id, place, rules) = (message.ring, around.place, rules(message));
    let stats = Writer::new(page);
    Ok(RingService::new(Owned {
        id,
        place,
        dom,
        back,
        grants,
        events,
        port,
        target,
        slab,
        fetch,
        rules,
        stats,
    }))
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

fn rules(message: &Attach) -> Rules {
    let target = &message.target;
    Rules {
        size: target.geometry.size,
        sector_size: target.geometry.sector_size.max(512),
        readonly: message.readonly,
        discard: message.discard,
        discard_unit: target.discard_unit.max(512),
        max_indirect_segments: message.max_indirect_segments,
    }
}

fn at(doing: &'static str) -> impl Fn(io::Error) -> String {
    move |error| format!("can't {doing}: {error}")
}

impl RingService {
    /// Gives everything back: the port, the ring's pages, the memory, every descriptor. The ring is
    /// drained and nothing of it is being waited for. An error says what was found left over, which
    /// is a bug of ours; everything else is given back all the same.
    pub(super) fn close(self, engine: &mut Engine) -> Result<(), String> {
        let mut left = Vec::new();
        if !self.is_drained() {
            left.push(format!("{} requests unanswered", self.own.back.in_flight()));
        }
        let Owned {
            back,
            grants,
            events,
            port,
            target,
            slab,
            fetch,
            ..
        } = self.own;
        events.unbind(port);
        let fetch_slab = fetch.slab();
        engine.release(fetch);
        // Unmaps the ring, then closes the devices.
        drop(back);
        drop((grants, events, target));
        for slab in [slab, fetch_slab] {
            if let Err(lent) = engine.remove_slab(slab) {
                left.push(format!("{lent} buffers of its bounce memory lent"));
            }
        }
        if left.is_empty() {
            Ok(())
        } else {
            Err(left.join(", "))
        }
    }
}
