//! What the hypervisor keeps of each socket: what its other end may ask for, and what it holds.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

use super::PortInfo;
use super::channel::{Channel, EventQueue};
use super::domain::Domain;
use super::grants::{Grant, HYPERVISOR};
use super::wire;
use crate::{Access, DomId, Port, SharedPages};

/// Entries of one grant device's list.
const MAX_MAPS: usize = 16_384;

/// A socket, by what its other end may ask for.
#[derive(Debug)]
pub(super) enum Client {
    /// Connections of other processes arrive here.
    Listener(OwnedFd),
    /// Opens devices.
    Session(OwnedFd),
    Gntdev(Gntdev),
    Evtchn(Evtchn),
}

#[derive(Debug)]
pub(super) struct Gntdev {
    pub(super) socket: OwnedFd,
    pub(super) id: u32,
    pub(super) record: SharedPages,
    pub(super) record_fd: OwnedFd,
    pub(super) last_index: u32,
    pub(super) maps: BTreeMap<u32, MapEntry>,
}

/// An entry of a grant device's list: made by MAP_GRANT_REF, gone only by UNMAP_GRANT_REF or with the
/// device.
#[derive(Debug)]
pub(super) struct MapEntry {
    pub(super) domid: DomId,
    pub(super) refs: Vec<u32>,
    /// An mmap was tried, which is possible once.
    pub(super) used: bool,
    pub(super) pins: Option<GrantMap>,
}

#[derive(Debug)]
pub(super) struct Evtchn {
    pub(super) queue: Arc<EventQueue>,
    /// The only domain it may bind to; domain 0 stands for any.
    pub(super) domid: DomId,
    pub(super) ports: BTreeMap<Port, Arc<Channel>>,
}

/// The maptrack entries of one map.
#[derive(Debug)]
pub(super) struct GrantMap {
    pub(super) domain: Arc<Domain>,
    pub(super) access: Access,
    pub(super) grefs: Vec<u32>,
}

impl Client {
    pub(super) fn with_socket<T>(&self, use_it: impl FnOnce(BorrowedFd<'_>) -> T) -> T {
        match self {
            Self::Listener(socket) | Self::Session(socket) => use_it(socket.as_fd()),
            Self::Gntdev(device) => use_it(device.socket.as_fd()),
            Self::Evtchn(device) => use_it(device.queue.socket().as_fd()),
        }
    }
}

impl Gntdev {
    /// A new entry of the list, of grants nobody has looked at.
    pub(super) fn note(&mut self, domid: DomId, refs: Vec<u32>) -> Result<u32, Errno> {
        if self.maps.len() >= MAX_MAPS {
            return Err(Errno::NOMEM);
        }
        let index = self.last_index.checked_add(1).ok_or(Errno::NOMEM)?;
        self.last_index = index;
        let (used, pins) = (false, None);
        let entry = MapEntry {
            domid,
            refs,
            used,
            pins,
        };
        self.maps.insert(index, entry);
        Ok(index)
    }

    /// What is noted under `index`, unless its one mmap has been tried.
    pub(super) fn unused(&self, index: u32) -> Result<&MapEntry, Errno> {
        let entry = self.maps.get(&index).filter(|entry| !entry.used);
        entry.ok_or(Errno::INVAL)
    }

    /// Forgets a map of `count` grants and unpins them.
    pub(super) fn unmap(&mut self, index: u32, count: u32) -> Result<(), Errno> {
        let whole = |entry: &&mut MapEntry| u32::try_from(entry.refs.len()) == Ok(count);
        let entry = self.maps.get_mut(&index).filter(whole);
        let entry = entry.ok_or(Errno::NOENT)?;
        entry.pins = entry.pins.take().and_then(GrantMap::release);
        if entry.pins.is_some() {
            return Err(Errno::AGAIN);
        }
        self.maps.remove(&index);
        Ok(())
    }

    pub(super) fn pins(&self) -> impl Iterator<Item = &GrantMap> {
        self.maps.values().filter_map(|entry| entry.pins.as_ref())
    }
}

impl Evtchn {
    /// A plain write: whole ports, of which unknown ones are skipped.
    pub(super) fn unmask(&self, bytes: &[u8]) {
        for port in wire::words_of(bytes).unwrap_or_default() {
            if let Some(channel) = self.ports.get(&Port(port)) {
                channel.unmask();
            }
        }
    }

    pub(super) fn port_infos(&self) -> impl Iterator<Item = PortInfo> {
        self.ports
            .iter()
            .map(|(&local, channel)| channel.backend_end(local))
    }
}

impl GrantMap {
    /// Adds a grant and gives its frame. EAGAIN: it is being copied.
    pub(super) fn pin(&mut self, gref: u32) -> Result<u32, Errno> {
        let grant = self.domain.guest().grant(gref).ok_or(Errno::INVAL)?;
        let frame = locked(&grant, || {
            let frame = grant.claim(self.access == Access::ReadWrite);
            if frame.is_ok() {
                grant.add_mapping(self.access);
            }
            frame
        });
        let frame = frame.ok_or(Errno::AGAIN)?.map_err(|_| Errno::INVAL)?;
        self.grefs.push(gref);
        Ok(frame)
    }

    /// Unpins what nobody is copying at the moment, and returns the rest if there is one.
    pub(super) fn release(mut self) -> Option<Self> {
        let (domain, access) = (&self.domain, self.access);
        self.grefs.retain(|&gref| {
            let grant = domain.guest().grant(gref);
            grant.is_some_and(|grant| locked(&grant, || grant.remove_mapping(access)).is_none())
        });
        (!self.grefs.is_empty()).then_some(self)
    }
}

/// Runs `work` under the grant's lock, unless someone else has it.
fn locked<T>(grant: &Grant<'_>, work: impl FnOnce() -> T) -> Option<T> {
    grant.try_lock(HYPERVISOR).then(|| {
        let result = work();
        grant.unlock();
        result
    })
}
