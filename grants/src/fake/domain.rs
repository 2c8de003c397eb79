//! The guest's side: its pages, the grants it gives and its ports.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use parking_lot::{Mutex, RwLock};

use super::channel::Channel;
use super::grants::{ENTRIES_PER_FRAME, GuestMemory, RESERVED_ENTRIES};
use super::{PortInfo, StillMapped};
use crate::buddy::Buddy;
use crate::{DomId, GrantRef, Port, XEN_PAGE_SIZE};

/// Xen's default `gnttab_max_frames`: 32768 grants.
const MAX_TABLE_FRAMES: u32 = 64;
/// Largest domain: 16 GiB.
const MAX_PAGES: u32 = 1 << 22;
/// Open ports of one domain, as with 2-level event channels.
const MAX_PORTS: usize = 4096;

/// A guest: its memory, grant table and ports. Clones are the same domain; every method may be called
/// from any thread. The memory lives as long as a clone does, whatever becomes of the domain.
#[derive(Clone, Debug)]
pub struct FakeDomain(Arc<Domain>);

/// A frame number within a domain's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gfn(pub u32);

/// What guest and hypervisor both know of a domain.
#[derive(Debug)]
pub(super) struct Domain {
    domid: DomId,
    guest: GuestMemory,
    ports: RwLock<Ports>,
    /// Page numbers of the allocator start behind the grant table.
    first_page: u32,
    free_pages: Mutex<Buddy>,
    free_grefs: Mutex<Vec<u32>>,
}

#[derive(Debug, Default)]
struct Ports {
    last: u32,
    open: BTreeMap<Port, Arc<Channel>>,
}

impl Domain {
    pub(super) fn create(domid: DomId, pages: usize) -> io::Result<Arc<Self>> {
        let pages = u32::try_from(pages).unwrap_or(0);
        if !(1..=MAX_PAGES).contains(&pages) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // Twice as many grants as pages, so that a page can be granted again before its last grant ends.
        let table_frames = pages.div_ceil(ENTRIES_PER_FRAME / 2).min(MAX_TABLE_FRAMES);
        let entries = table_frames.saturating_mul(ENTRIES_PER_FRAME);
        let guest = GuestMemory::create(table_frames.saturating_add(pages), entries)?;
        Ok(Arc::new(Self {
            domid,
            guest,
            ports: RwLock::default(),
            first_page: table_frames,
            free_pages: Mutex::new(Buddy::new(pages)),
            free_grefs: Mutex::new((RESERVED_ENTRIES..entries).rev().collect()),
        }))
    }

    pub(super) fn domid(&self) -> DomId {
        self.domid
    }

    pub(super) fn guest(&self) -> &GuestMemory {
        &self.guest
    }

    pub(super) fn channel(&self, port: Port) -> Option<Arc<Channel>> {
        self.ports.read().open.get(&port).cloned()
    }

    /// Every open port of the guest.
    pub(super) fn port_infos(&self) -> Vec<PortInfo> {
        self.ports
            .read()
            .open
            .values()
            .filter_map(|channel| channel.guest_end())
            .collect()
    }

    /// Marks the domain dead and closes its ports. No port can be opened afterwards.
    pub(super) fn kill(&self) {
        let mut ports = self.ports.write();
        self.guest.set_alive(false);
        for channel in std::mem::take(&mut ports.open).into_values() {
            channel.close();
        }
    }
}

impl FakeDomain {
    pub(super) fn new(domain: Arc<Domain>) -> Self {
        Self(domain)
    }

    /// The domain's number.
    pub fn domid(&self) -> DomId {
        self.0.domid
    }

    /// Whether the domain was destroyed; its threads should stop.
    pub fn is_dead(&self) -> bool {
        !self.0.guest.is_alive()
    }

    /// A free page, zeroed; None when memory is used up.
    pub fn alloc_page(&self) -> Option<Gfn> {
        self.alloc_pages(1)
    }

    /// `count` free pages side by side, zeroed, for a multi-page ring; the first is returned.
    pub fn alloc_pages(&self, count: usize) -> Option<Gfn> {
        let start = self.0.free_pages.lock().alloc(u32::try_from(count).ok()?)?;
        let first = Gfn(start.checked_add(self.0.first_page)?);
        for page in (first.0..).take(count) {
            self.write(Gfn(page), 0, &[0; XEN_PAGE_SIZE]);
        }
        Some(first)
    }

    /// Gives one page back, also one of several allocated together. It must not be in use.
    pub fn free_page(&self, page: Gfn) {
        let mut free = self.0.free_pages.lock();
        if let Some(page) = page.0.checked_sub(self.0.first_page)
            && (page as usize) < free.pages()
        {
            free.free(page, 1);
        }
    }

    /// The words of `count` pages starting at `first`; empty if they aren't all the domain's.
    pub fn words(&self, first: Gfn, count: usize) -> DomainWords {
        const WORDS: usize = XEN_PAGE_SIZE / size_of::<u32>();
        let start = (first.0 as usize).saturating_mul(WORDS);
        let words = start..start.saturating_add(count.saturating_mul(WORDS));
        DomainWords {
            domain: self.0.clone(),
            words,
        }
    }

    /// Copies out of a page. False, and nothing is copied, if the bytes aren't all inside the page.
    pub fn read(&self, page: Gfn, offset: usize, to: &mut [u8]) -> bool {
        match byte_offset(page, offset, to.len()) {
            Some(at) => self.0.guest.memory().region().copy_out(at, to),
            None => false,
        }
    }

    /// Copies into a page. False, and nothing is copied, if the bytes aren't all inside the page.
    pub fn write(&self, page: Gfn, offset: usize, from: &[u8]) -> bool {
        match byte_offset(page, offset, from.len()) {
            Some(at) => self.0.guest.memory().region().copy_in(at, from),
            None => false,
        }
    }

    /// Grants `page` to domain `to`; None when the grant table is full.
    pub fn grant(&self, page: Gfn, to: DomId, readonly: bool) -> Option<GrantRef> {
        let gref = self.0.free_grefs.lock().pop()?;
        self.0.guest.grant(gref)?.permit(to.0, page.0, readonly);
        Some(GrantRef(gref))
    }

    /// Ends a grant and frees its reference, as a guest does: refused while the page is mapped or being
    /// copied. Ending what isn't granted does nothing.
    pub fn end_access(&self, gref: GrantRef) -> Result<(), StillMapped> {
        match self.0.guest.grant(gref.0).and_then(|grant| grant.end()) {
            Some(Ok(())) => {
                self.0.free_grefs.lock().push(gref.0);
                Ok(())
            }
            Some(Err(still_mapped)) => Err(still_mapped),
            None => Ok(()),
        }
    }

    /// Clears a grant whatever its state, as a hostile or dying guest does. What is mapped stays mapped;
    /// the reference isn't used again.
    pub fn revoke(&self, gref: GrantRef) {
        if let Some(grant) = self.0.guest.grant(gref.0) {
            grant.revoke();
        }
    }

    /// A new port that `remote` may bind. ESRCH: the domain is dead. ENOSPC: too many ports.
    pub fn alloc_unbound(&self, remote: DomId) -> io::Result<Port> {
        let mut ports = self.0.ports.write();
        if self.is_dead() {
            return Err(rustix::io::Errno::SRCH.into());
        }
        if ports.open.len() >= MAX_PORTS {
            return Err(rustix::io::Errno::NOSPC.into());
        }
        let port = Port(ports.last.checked_add(1).ok_or(rustix::io::Errno::NOSPC)?);
        ports.last = port.0;
        ports
            .open
            .insert(port, Arc::new(Channel::new(self.0.domid, port, remote)?));
        Ok(port)
    }

    /// An eventfd (non-blocking) that is readable while an event of `port` is pending; reading it
    /// acknowledges. It also becomes readable when the port or the domain goes. None: no such port, or no
    /// descriptor left.
    pub fn port_fd(&self, port: Port) -> Option<OwnedFd> {
        self.0.channel(port)?.event().ok()
    }

    /// Sends an event; dropped when nobody is bound or the port is closed.
    pub fn notify(&self, port: Port) {
        if let Some(channel) = self.0.channel(port) {
            channel.notify_backend();
        }
    }

    /// Closes a port; the backend's end becomes unbound, without an event.
    pub fn close(&self, port: Port) {
        let closed = self.0.ports.write().open.remove(&port);
        if let Some(channel) = closed {
            channel.close();
        }
    }
}

/// Words of a domain's pages.
#[derive(Clone, Debug)]
pub struct DomainWords {
    domain: Arc<Domain>,
    words: Range<usize>,
}

impl AsRef<[AtomicU32]> for DomainWords {
    fn as_ref(&self) -> &[AtomicU32] {
        let memory = self.domain.guest.memory().region().words32();
        memory.get(self.words.clone()).unwrap_or_default()
    }
}

/// Where byte `offset` of a page is, if `len` bytes fit behind it.
fn byte_offset(page: Gfn, offset: usize, len: usize) -> Option<usize> {
    if offset.checked_add(len)? > XEN_PAGE_SIZE {
        return None;
    }
    (page.0 as usize)
        .checked_mul(XEN_PAGE_SIZE)?
        .checked_add(offset)
}
