//! What a device holder does with its descriptors: opening them, copying and mapping through them, and
//! sending and taking events.
#![expect(
    unsafe_code,
    reason = "mapping a guest's pages at an address of the caller's"
)]
// UNSAFETY: `place` is unsafe because the address is; its caller owns the range it names.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::faults::Faults;
use super::grants::{Grant, GuestMemory};
use super::wire::{self, Answer, MAX_REFS, Request};
use crate::memory::{Region, gather};
use crate::window::{MapDevice, add, subtract};
use crate::{
    Access, Chunk, CopyOp, CopyStatus, Direction, DomId, EventChannels, GrantRef, GrantTable,
    MapError, Mapping, Port, SharedPages, Slab, StillThere, Window, XEN_PAGE_SIZE,
};

/// Bytes of a device's copy record.
pub(super) const RECORD_BYTES: usize = 4096;
/// How often a grant that is being copied elsewhere is tried again, with a short sleep in between: ten
/// seconds and more, far beyond any copy.
const LOCK_TRIES: u32 = 100_000;
const LOCK_PAUSE: Duration = Duration::from_micros(100);
/// Tries before the first sleep: another core finishes its copy within that.
const LOCK_SPINS: u32 = 100;

/// What the supervisor opens devices with. A device is one descriptor, to be passed to whoever uses it;
/// the hypervisor takes back everything it held once its last copy is closed, however its holder died.
#[derive(Debug)]
pub struct FakeHost {
    session: OwnedFd,
}

impl FakeHost {
    pub(super) fn new(session: OwnedFd) -> Self {
        Self { session }
    }

    /// Connects to a hypervisor that [listens](super::FakeXen::listen) at `path`.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let session = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
        rustix::net::connect(&session, &SocketAddrUnix::new(path)?)?;
        Ok(Self { session })
    }

    /// Opens a grant device, for [`grant_table`].
    pub fn open_gntdev(&self) -> io::Result<OwnedFd> {
        self.open(&Request::OpenGntdev)
    }

    /// Opens an event-channel device restricted to ports of `domid` (domain 0: unrestricted, as the real
    /// one can't be), for [`event_channels`]. Non-blocking.
    pub fn open_evtchn(&self, domid: DomId) -> io::Result<OwnedFd> {
        self.open(&Request::OpenEvtchn { domid: domid.0 })
    }

    fn open(&self, request: &Request) -> io::Result<OwnedFd> {
        let mut answer = wire::call(self.session.as_fd(), request)?;
        answer
            .fds
            .pop()
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// Uses a descriptor of [`FakeHost::open_gntdev`]. One user at a time: copies made through two at once
/// could leave a grant locked if both die.
pub fn grant_table(fd: OwnedFd) -> io::Result<Box<dyn GrantTable>> {
    let answer = wire::call(fd.as_fd(), &Request::Hello)?;
    let (&[id], Ok([record, faults])) = (&*answer.values, <[OwnedFd; 2]>::try_from(answer.fds))
    else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let record = SharedPages::map(record, RECORD_BYTES, Access::ReadWrite)?;
    let device = Device {
        socket: fd,
        id,
        record,
        faults: Faults::open(&faults)?,
        mapped: Cell::new(0),
    };
    Ok(Box::new(FakeGrantTable {
        device: Rc::new(device),
        guests: RefCell::default(),
    }))
}

/// Uses a descriptor of [`FakeHost::open_evtchn`].
pub fn event_channels(fd: OwnedFd) -> io::Result<Box<dyn EventChannels>> {
    Ok(Box::new(FakeEventChannels {
        socket: fd,
        ports: RefCell::default(),
    }))
}

/// A grant device's descriptor and what the hypervisor gave us with it.
#[derive(Debug)]
struct Device {
    socket: OwnedFd,
    /// Our name as a holder of grant locks.
    id: u32,
    /// One word: which grant we may have locked. It survives us.
    record: SharedPages,
    faults: Faults,
    /// Pages mapped through it.
    mapped: Cell<usize>,
}

#[derive(Debug)]
struct FakeGrantTable {
    device: Rc<Device>,
    /// Memory of the domains seen so far, so that a copy asks nobody.
    guests: RefCell<HashMap<DomId, Rc<GuestMemory>>>,
}

impl GrantTable for FakeGrantTable {
    fn map(&self, dom: DomId, refs: &[GrantRef], access: Access) -> Result<Mapping, MapError> {
        if refs.is_empty() || refs.len() > MAX_REFS {
            return Err(MapError::Count {
                count: refs.len(),
                max: MAX_REFS,
            });
        }
        let (index, count) = (self.device.note(dom, refs)?, refs.len());
        let pinned = self.device.pin(index, access);
        let region =
            pinned.and_then(|(frames, memory)| Region::gathered(memory.as_fd(), &frames, access));
        match region {
            Ok(region) => {
                let device = self.device.clone();
                add(&device.mapped, count);
                Ok(Mapping::new(region, move || {
                    if device.take_back(index, count).is_ok() {
                        subtract(&device.mapped, count);
                    }
                }))
            }
            Err(error) => {
                let _ = self.device.take_back(index, count);
                Err(MapError::of(error))
            }
        }
    }

    fn mapped(&self) -> usize {
        self.device.mapped.get()
    }

    fn map_chunk(
        &self,
        window: &mut Window,
        dom: DomId,
        refs: &[GrantRef],
    ) -> Result<Chunk, MapError> {
        window.map(&*self.device, dom, refs)
    }

    fn unmap_chunk(&self, window: &mut Window, chunk: Chunk) -> Result<(), StillThere> {
        window.unmap(&*self.device, chunk)
    }

    fn copy(&self, dom: DomId, slab: &mut Slab, ops: &mut [CopyOp]) -> io::Result<()> {
        for op in &*ops {
            let end = usize::from(op.offset).saturating_add(usize::from(op.len));
            if end > XEN_PAGE_SIZE || slab.window(op.local, usize::from(op.len)).is_none() {
                return Err(io::ErrorKind::InvalidInput.into());
            }
        }
        let guest = self.guest(dom)?;
        for op in ops {
            op.status = match (&guest, slab.window(op.local, usize::from(op.len))) {
                (Some(guest), Some(local)) => self.device.copy(dom, guest, op, local),
                _ => CopyStatus::BAD_DOMAIN,
            };
        }
        Ok(())
    }
}

impl FakeGrantTable {
    /// The domain's memory; None if there is no such domain. A dead one is asked for again, because its
    /// number may belong to another by now.
    fn guest(&self, dom: DomId) -> io::Result<Option<Rc<GuestMemory>>> {
        let mut guests = self.guests.borrow_mut();
        if let Some(guest) = guests.get(&dom)
            && guest.is_alive()
        {
            return Ok(Some(guest.clone()));
        }
        guests.remove(&dom);
        let answer = match self.device.call(&Request::Domain { domid: dom.0 }) {
            Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {
                return Ok(None);
            }
            result => result?,
        };
        let (&[frames, entries], Ok([memory, active])) =
            (&*answer.values, <[OwnedFd; 2]>::try_from(answer.fds))
        else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let guest = Rc::new(GuestMemory::open(frames, entries, memory, active)?);
        guests.insert(dom, guest.clone());
        Ok(Some(guest))
    }
}

impl MapDevice for Device {
    fn note(&self, dom: DomId, refs: &[GrantRef]) -> io::Result<u64> {
        let refs = refs.iter().map(|gref| gref.0).collect();
        let request = Request::Note { domid: dom.0, refs };
        match *self.call(&request)?.values {
            [index] => Ok(index.into()),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    unsafe fn place(&self, index: u64, pages: usize, at: *mut u8) -> io::Result<()> {
        let access = Access::ReadWrite;
        let placed = self.pin(index, access).and_then(|(frames, memory)| {
            if frames.len() != pages {
                return Err(io::ErrorKind::InvalidData.into());
            }
            // SAFETY: the caller owns the range, and nothing refers to it.
            unsafe { gather(memory.as_fd(), &frames, access, at) }
        });
        if placed.is_err() {
            // The kernel takes away what was there before it asks the driver, which then refuses.
            let len = pages.saturating_mul(XEN_PAGE_SIZE);
            // SAFETY: as above.
            unsafe { rustix::mm::munmap(at.cast(), len) }?;
        }
        placed
    }

    fn take_back(&self, index: u64, pages: usize) -> io::Result<()> {
        let count = u32::try_from(pages).map_err(|_| io::ErrorKind::InvalidInput)?;
        let index = u32::try_from(index).map_err(|_| io::ErrorKind::InvalidInput)?;
        match self.call(&Request::Unmap { index, count }) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(error),
            // Done, or the hypervisor is gone, and every mapping with it.
            _ => Ok(()),
        }
    }

    fn mapped(&self) -> &Cell<usize> {
        &self.mapped
    }
}

impl Device {
    /// Asks for the grants of a noted map: their frames, and the memory these are in.
    fn pin(&self, index: u64, access: Access) -> io::Result<(Vec<u32>, OwnedFd)> {
        let index = u32::try_from(index).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut answer = self.call(&Request::Pin { index, access })?;
        let memory = answer.fds.pop().ok_or(io::ErrorKind::InvalidData)?;
        Ok((answer.values, memory))
    }

    /// A call that is repeated while one of its grants is being copied.
    fn call(&self, request: &Request) -> io::Result<Answer> {
        let mut result = wire::call(self.socket.as_fd(), request);
        for _ in 0..LOCK_TRIES {
            match &result {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    thread::sleep(LOCK_PAUSE);
                    result = wire::call(self.socket.as_fd(), request);
                }
                _ => break,
            }
        }
        result
    }

    fn copy(&self, dom: DomId, guest: &GuestMemory, op: &CopyOp, local: &mut [u8]) -> CopyStatus {
        if let Some(status) = self.faults.copy_fails() {
            return status;
        }
        if !guest.is_alive() {
            return CopyStatus::BAD_DOMAIN;
        }
        let Some(grant) = guest.grant(op.gref.0) else {
            return CopyStatus::BAD_GNTREF;
        };
        // First the record, then the lock: the hypervisor looks for our lock where the record says.
        self.set_record(
            CopyRecord {
                domid: dom.0,
                gref: op.gref.0,
            }
            .encode(),
        );
        let status = if self.lock(&grant) {
            let status = self.copy_locked(guest, &grant, op, local);
            grant.unlock();
            status
        } else {
            CopyStatus::EAGAIN
        };
        self.set_record(0);
        status
    }

    fn copy_locked(
        &self,
        guest: &GuestMemory,
        grant: &Grant<'_>,
        op: &CopyOp,
        local: &mut [u8],
    ) -> CopyStatus {
        let frame = match grant.claim(op.direction == Direction::ToGuest) {
            Ok(frame) => frame,
            Err(status) => return status,
        };
        self.faults.copy_waits();
        let copied = guest.copy(frame, op.offset, local, op.direction);
        grant.settle();
        if copied {
            CopyStatus::OKAY
        } else {
            CopyStatus::BAD_PAGE
        }
    }

    fn lock(&self, grant: &Grant<'_>) -> bool {
        (0..LOCK_TRIES).any(|tries| {
            if tries > LOCK_SPINS {
                thread::sleep(LOCK_PAUSE);
            }
            grant.try_lock(self.id)
        })
    }

    fn set_record(&self, value: u64) {
        let words: &[AtomicU64] = self.record.as_ref();
        if let Some(word) = words.first() {
            word.store(value, Ordering::Release);
        }
    }
}

/// Which grant a device may have locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CopyRecord {
    pub(super) domid: u16,
    pub(super) gref: u32,
}

impl CopyRecord {
    const VALID: u64 = 1 << 63;

    fn encode(self) -> u64 {
        Self::VALID | u64::from(self.domid) << 32 | u64::from(self.gref)
    }

    /// None: the device was not copying.
    pub(super) fn decode(word: u64) -> Option<Self> {
        let [g0, g1, g2, g3, d0, d1, _, top] = word.to_le_bytes();
        let record = Self {
            domid: u16::from_le_bytes([d0, d1]),
            gref: u32::from_le_bytes([g0, g1, g2, g3]),
        };
        (top >> 7 == 1).then_some(record)
    }
}

#[derive(Debug)]
struct FakeEventChannels {
    socket: OwnedFd,
    /// The other end's eventfd of each port bound here.
    ports: RefCell<HashMap<Port, OwnedFd>>,
}

impl EventChannels for FakeEventChannels {
    fn bind_interdomain(&self, dom: DomId, remote: Port) -> io::Result<Port> {
        let request = Request::Bind {
            domid: dom.0,
            port: remote.0,
        };
        let mut answer = wire::call(self.socket.as_fd(), &request)?;
        let (&[port], Some(event)) = (&*answer.values, answer.fds.pop()) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        self.ports.borrow_mut().insert(Port(port), event);
        Ok(Port(port))
    }

    fn notify(&self, port: Port) -> io::Result<()> {
        match self.ports.borrow().get(&port) {
            // The write only fails when the counter is full, and then the event is pending already.
            Some(event) => {
                let _ = rustix::io::write(event, &1u64.to_ne_bytes());
                Ok(())
            }
            None => Err(Errno::NOTCONN.into()),
        }
    }

    fn unmask(&self, port: Port) -> io::Result<()> {
        wire::send(self.socket.as_fd(), &port.0.to_ne_bytes(), None)
    }

    fn unbind(&self, port: Port) {
        if self.ports.borrow_mut().remove(&port).is_some() {
            // Fails only if the hypervisor is gone.
            let _ = wire::call(self.socket.as_fd(), &Request::Unbind { port: port.0 });
        }
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
