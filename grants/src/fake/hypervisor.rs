//! The hypervisor itself: who holds which device, what it mapped and bound, and what happens when the
//! last copy of a device's descriptor closes.
//!
//! It is a state machine behind one lock, fed by an epoll set. Its thread feeds it, and so does whoever
//! asks for a snapshot, which is therefore never behind what has already happened. It waits for no
//! client: sockets are non-blocking, an answer nobody takes is lost, and a grant that a client holds
//! locked is left for later.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::Snapshot;
use super::channel::EventQueue;
use super::client::{Client, Evtchn, Gntdev, GrantMap};
use super::device::{CopyRecord, RECORD_BYTES};
use super::domain::Domain;
use super::faults::Faults;
use super::grants::{BACKEND, HYPERVISOR};
use super::wire::{self, Answer, Received, Request};
use crate::{Access, DomId, Port, SharedPages};

/// Sockets held at a time; a further connection is closed at once.
const MAX_CLIENTS: usize = 16_384;
/// Ports of one event-channel device.
const MAX_PER_DEVICE: usize = 16_384;
/// Datagrams taken from one client before the others get their turn.
const DATAGRAMS_A_TURN: usize = 16;
/// Readiness events taken at a time.
const EVENTS_A_TURN: usize = 64;
/// Turns a snapshot waits for clients that never stop sending.
const SNAPSHOT_TURNS: usize = 10_000;

/// Shared by the hypervisor's thread and everyone in its process.
#[derive(Debug)]
pub(super) struct Hypervisor {
    epoll: Arc<OwnedFd>,
    state: Mutex<State>,
    faults: Faults,
}

#[derive(Debug)]
struct State {
    /// The living.
    domains: BTreeMap<DomId, Arc<Domain>>,
    /// The dead of whom something is still mapped.
    zombies: Vec<Arc<Domain>>,
    clients: BTreeMap<u64, Client>,
    /// Mappings whose holder is gone, while some of their grants are being copied by others.
    leftovers: Vec<GrantMap>,
    faults_fd: OwnedFd,
    last_client: u64,
    last_device: u32,
    last_port: u32,
    buffer: Vec<u8>,
}

impl Hypervisor {
    pub(super) fn create() -> io::Result<Arc<Self>> {
        let (faults, faults_fd) = Faults::create()?;
        let state = State {
            domains: BTreeMap::new(),
            zombies: Vec::new(),
            clients: BTreeMap::new(),
            leftovers: Vec::new(),
            faults_fd,
            last_client: 0,
            last_device: 0,
            last_port: 0,
            buffer: vec![0; wire::MAX_BYTES],
        };
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        Ok(Arc::new(Self {
            epoll,
            state: Mutex::new(state),
            faults,
        }))
    }

    pub(super) fn faults(&self) -> &Faults {
        &self.faults
    }

    /// The thread's body; returns once `stop` is readable.
    pub(super) fn run(&self, stop: BorrowedFd<'_>) {
        let mut events = Vec::with_capacity(EVENTS_A_TURN);
        if self.watch(stop, 0).is_err() {
            return;
        }
        loop {
            // Grants that others are copying are tried again soon.
            let again = !self.state.lock().leftovers.is_empty();
            let soon = Timespec {
                tv_sec: 0,
                tv_nsec: 1_000_000,
            };
            events.clear();
            let buffer = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&*self.epoll, buffer, again.then_some(&soon)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return,
            }
            if events.iter().any(|event| event.data.u64() == 0) {
                return;
            }
            self.turn(&mut self.state.lock(), &events);
        }
    }

    /// Closes every device and listener.
    pub(super) fn shut_down(&self) {
        let mut state = self.state.lock();
        for client in std::mem::take(&mut state.clients).into_values() {
            state.close(client);
        }
    }

    pub(super) fn listen(&self, listener: OwnedFd) -> io::Result<()> {
        self.adopt(&mut self.state.lock(), |_| Client::Listener(listener))
    }

    /// The client's end of a new session.
    pub(super) fn session(&self) -> io::Result<OwnedFd> {
        let (ours, theirs) = wire::socket_pair(SocketFlags::empty())?;
        self.adopt(&mut self.state.lock(), |_| Client::Session(ours))?;
        Ok(theirs)
    }

    pub(super) fn add_domain(&self, domain: Arc<Domain>) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.domains.contains_key(&domain.domid()) {
            return Err(Errno::EXIST.into());
        }
        state.domains.insert(domain.domid(), domain);
        Ok(())
    }

    pub(super) fn kill_domain(&self, domid: DomId) {
        let mut state = self.state.lock();
        if let Some(domain) = state.domains.remove(&domid) {
            domain.kill();
            state.zombies.push(domain);
            state.bury();
        }
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        let mut state = self.state.lock();
        let mut events = Vec::with_capacity(EVENTS_A_TURN);
        for _ in 0..SNAPSHOT_TURNS {
            events.clear();
            let buffer = rustix::buffer::spare_capacity(&mut events);
            let now = Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            let _ = epoll::wait(&*self.epoll, buffer, Some(&now));
            // The wake-up of the thread itself is not ours to take.
            events.retain(|event| event.data.u64() != 0);
            self.turn(&mut state, &events);
            if events.is_empty() {
                break;
            }
        }
        state.snapshot()
    }

    /// Puts a socket under watch as a client.
    fn adopt(&self, state: &mut State, client: impl FnOnce(u64) -> Client) -> io::Result<()> {
        if state.clients.len() >= MAX_CLIENTS {
            return Err(Errno::MFILE.into());
        }
        let id = state.last_client.checked_add(1).ok_or(Errno::MFILE)?;
        state.last_client = id;
        let client = client(id);
        client.with_socket(|socket| self.watch(socket, id))?;
        state.clients.insert(id, client);
        Ok(())
    }

    fn watch(&self, socket: BorrowedFd<'_>, id: u64) -> io::Result<()> {
        let data = epoll::EventData::new_u64(id);
        Ok(epoll::add(&*self.epoll, socket, data, EventFlags::IN)?)
    }

    /// Handles what became ready; ids of clients that have gone meanwhile are skipped.
    fn turn(&self, state: &mut MutexGuard<'_, State>, events: &[epoll::Event]) {
        for event in events {
            let id = event.data.u64();
            let flags = event.flags;
            if flags.contains(EventFlags::OUT)
                && let Some(Client::Evtchn(device)) = state.clients.get(&id)
            {
                device.queue.has_room();
                device.ports.values().for_each(|channel| channel.retry());
            }
            for _ in 0..DATAGRAMS_A_TURN {
                if !self.serve(state, id) {
                    break;
                }
            }
        }
        let leftovers = std::mem::take(&mut state.leftovers);
        state.leftovers = leftovers
            .into_iter()
            .filter_map(GrantMap::release)
            .collect();
        state.bury();
    }

    /// Takes one datagram or connection of client `id`. False: nothing more for now.
    fn serve(&self, state: &mut State, id: u64) -> bool {
        let mut buffer = std::mem::take(&mut state.buffer);
        let received = match state.clients.get(&id) {
            None => Received::Nothing,
            Some(Client::Listener(listener)) => {
                if let Ok(socket) = rustix::net::accept_with(listener, ACCEPTED) {
                    // Too many already: closed, which the other end sees.
                    let _ = self.adopt(state, |_| Client::Session(socket));
                }
                Received::Nothing
            }
            Some(client) => client.with_socket(|socket| wire::receive(socket, &mut buffer)),
        };
        let more = match received {
            Received::Nothing => false,
            Received::Closed => {
                if let Some(client) = state.clients.remove(&id) {
                    state.close(client);
                }
                false
            }
            Received::Message { len, answer_to } => {
                self.message(state, id, buffer.get(..len).unwrap_or_default(), answer_to);
                true
            }
        };
        state.buffer = buffer;
        more
    }

    /// A call if it says where to answer; else a plain write, which means something on an event-channel
    /// device only.
    fn message(&self, state: &mut State, id: u64, bytes: &[u8], answer_to: Option<OwnedFd>) {
        let Some(answer_to) = answer_to else {
            if let Some(Client::Evtchn(device)) = state.clients.get(&id) {
                device.unmask(bytes);
            }
            return;
        };
        let result = match Request::decode(bytes) {
            Some(request) => self.request(state, id, request),
            None => Err(Errno::INVAL),
        };
        wire::answer(&answer_to, result);
    }

    fn request(&self, state: &mut State, id: u64, request: Request) -> Result<Answer, Errno> {
        let Some(client) = state.clients.get_mut(&id) else {
            return Err(Errno::BADF);
        };
        match (client, request) {
            (Client::Session(_), Request::OpenGntdev) => self.open_gntdev(state),
            (Client::Session(_), Request::OpenEvtchn { domid }) => {
                self.open_evtchn(state, DomId(domid))
            }
            (Client::Gntdev(device), Request::Hello) => {
                let fds = vec![clone(&device.record_fd)?, clone(&state.faults_fd)?];
                Ok(Answer {
                    values: vec![device.id],
                    fds,
                })
            }
            (Client::Gntdev(_), Request::Domain { domid }) => {
                let domain = state.domains.get(&DomId(domid)).ok_or(Errno::SRCH)?;
                let (values, fds) = domain.guest().share().map_err(|_| Errno::NFILE)?;
                Ok(Answer {
                    values: values.into(),
                    fds: fds.into(),
                })
            }
            (Client::Gntdev(device), Request::Note { domid, refs }) => {
                let index = device.note(DomId(domid), refs)?;
                Ok(Answer {
                    values: vec![index],
                    fds: Vec::new(),
                })
            }
            (Client::Gntdev(_), Request::Pin { index, access }) => {
                self.pin(state, id, index, access)
            }
            (Client::Gntdev(device), Request::Unmap { index, count }) => {
                device.unmap(index, count).map(|()| Answer::default())
            }
            (Client::Evtchn(_), Request::Bind { domid, port }) => {
                state.bind(id, DomId(domid), Port(port))
            }
            (Client::Evtchn(device), Request::Unbind { port }) => {
                let channel = device.ports.remove(&Port(port)).ok_or(Errno::NOTCONN)?;
                channel.unbind();
                Ok(Answer::default())
            }
            _ => Err(Errno::NOTTY),
        }
    }

    /// The mmap of a noted map: the hypervisor is asked for its grants now.
    fn pin(&self, state: &mut State, id: u64, index: u32, access: Access) -> Result<Answer, Errno> {
        let Some(Client::Gntdev(device)) = state.clients.get(&id) else {
            return Err(Errno::BADF);
        };
        let entry = device.unused(index)?;
        let (domid, refs) = (entry.domid, entry.refs.clone());
        let mapped: usize = state.mapped().values().sum();
        let pages = mapped.saturating_add(refs.len()) as u64;
        let refused = self.faults.map_fails() || self.faults.exceeds_maptrack(pages);
        let pinned = if refused {
            Err(Errno::INVAL)
        } else {
            state.pin(domid, access, &refs)
        };
        // EAGAIN is retried by the kernel, within the one mmap.
        if pinned.as_ref().err() != Some(&Errno::AGAIN)
            && let Some(Client::Gntdev(device)) = state.clients.get_mut(&id)
            && let Some(entry) = device.maps.get_mut(&index)
        {
            entry.used = true;
            let (pins, answer) = pinned?;
            entry.pins = Some(pins);
            return Ok(answer);
        }
        Err(Errno::AGAIN)
    }

    fn open_gntdev(&self, state: &mut State) -> Result<Answer, Errno> {
        let (socket, theirs) = device_pair()?;
        let (record, record_fd) =
            SharedPages::create("xen-copy-record", RECORD_BYTES).map_err(|_| Errno::NOMEM)?;
        let id = state
            .last_device
            .checked_add(1)
            .filter(|&id| id != HYPERVISOR);
        let id = id.ok_or(Errno::MFILE)?;
        state.last_device = id;
        let maps = BTreeMap::new();
        let device = Gntdev {
            socket,
            id,
            record,
            record_fd,
            last_index: 0,
            maps,
        };
        self.adopt(state, |_| Client::Gntdev(device))
            .map_err(|_| Errno::MFILE)?;
        Ok(Answer {
            values: Vec::new(),
            fds: vec![theirs],
        })
    }

    fn open_evtchn(&self, state: &mut State, domid: DomId) -> Result<Answer, Errno> {
        let (socket, theirs) = device_pair()?;
        let device = |client| {
            Client::Evtchn(Evtchn {
                queue: Arc::new(EventQueue::new(socket, self.epoll.clone(), client)),
                domid,
                ports: BTreeMap::new(),
            })
        };
        self.adopt(state, device).map_err(|_| Errno::MFILE)?;
        Ok(Answer {
            values: Vec::new(),
            fds: vec![theirs],
        })
    }
}

impl State {
    /// Pins `refs`, all or none.
    fn pin(
        &mut self,
        domid: DomId,
        access: Access,
        refs: &[u32],
    ) -> Result<(GrantMap, Answer), Errno> {
        // A dead domain's grants can be mapped as long as it is a zombie.
        let zombie = self.zombies.iter().rfind(|zombie| zombie.domid() == domid);
        let domain = self
            .domains
            .get(&domid)
            .or(zombie)
            .ok_or(Errno::INVAL)?
            .clone();
        let memory = domain.guest().memory_fd().map_err(|_| Errno::NFILE)?;
        let grefs = Vec::with_capacity(refs.len());
        let mut map = GrantMap {
            domain,
            access,
            grefs,
        };
        let mut frames = Vec::with_capacity(refs.len());
        for &gref in refs {
            match map.pin(gref) {
                Ok(frame) => frames.push(frame),
                Err(errno) => {
                    self.leftovers.extend(map.release());
                    return Err(errno);
                }
            }
        }
        let answer = Answer {
            values: frames,
            fds: vec![memory],
        };
        Ok((map, answer))
    }

    fn bind(&mut self, id: u64, domid: DomId, remote: Port) -> Result<Answer, Errno> {
        let zombie = self.zombies.iter().any(|zombie| zombie.domid() == domid);
        let missing = if zombie { Errno::INVAL } else { Errno::SRCH };
        let Some(Client::Evtchn(device)) = self.clients.get_mut(&id) else {
            return Err(Errno::BADF);
        };
        if device.domid.0 != BACKEND && device.domid != domid {
            return Err(Errno::ACCESS);
        }
        if device.ports.len() >= MAX_PER_DEVICE {
            return Err(Errno::NOSPC);
        }
        let domain = self.domains.get(&domid).ok_or(missing)?;
        let channel = domain.channel(remote).ok_or(Errno::INVAL)?;
        let event = channel.event().map_err(|_| Errno::NFILE)?;
        let local = Port(self.last_port.checked_add(1).ok_or(Errno::NOSPC)?);
        if channel.remote().0 != BACKEND || !channel.bind(&device.queue, local) {
            return Err(Errno::INVAL);
        }
        self.last_port = local.0;
        device.ports.insert(local, channel);
        Ok(Answer {
            values: vec![local.0],
            fds: vec![event],
        })
    }

    /// The last copy of a client's descriptor is closed: Xen takes back what it held.
    fn close(&mut self, client: Client) {
        match client {
            Client::Listener(_) | Client::Session(_) => {}
            Client::Gntdev(device) => {
                if let Some(record) = device.record.load(0).and_then(CopyRecord::decode) {
                    self.abandon_copy(device.id, record);
                }
                let pins = device.maps.into_values().filter_map(|entry| entry.pins);
                self.leftovers.extend(pins.filter_map(GrantMap::release));
            }
            Client::Evtchn(device) => device.ports.values().for_each(|channel| channel.unbind()),
        }
    }

    /// Frees the grant that a device held locked when its holder died.
    fn abandon_copy(&self, device: u32, record: CopyRecord) {
        let living = self.domains.get(&DomId(record.domid));
        let same = |zombie: &&Arc<Domain>| zombie.domid().0 == record.domid;
        for domain in living.into_iter().chain(self.zombies.iter().filter(same)) {
            if let Some(grant) = domain.guest().grant(record.gref)
                && grant.is_locked_by(device)
            {
                grant.settle();
                grant.unlock();
            }
        }
    }

    /// Forgets the dead of whom nothing is mapped any more.
    fn bury(&mut self) {
        if !self.zombies.is_empty() {
            let mapped: Vec<_> = self.maps().map(|map| Arc::as_ptr(&map.domain)).collect();
            self.zombies
                .retain(|zombie| mapped.contains(&Arc::as_ptr(zombie)));
        }
    }

    fn maps(&self) -> impl Iterator<Item = &GrantMap> {
        let held = self.clients.values().filter_map(|client| match client {
            Client::Gntdev(device) => Some(device.pins()),
            _ => None,
        });
        held.flatten().chain(&self.leftovers)
    }

    /// Mapped pages by granting domain.
    fn mapped(&self) -> BTreeMap<DomId, usize> {
        let mut mapped = BTreeMap::<_, usize>::new();
        for map in self.maps() {
            let pages = mapped.entry(map.domain.domid()).or_default();
            *pages = pages.saturating_add(map.grefs.len());
        }
        mapped
    }

    fn snapshot(&self) -> Snapshot {
        let guests = self.domains.values().flat_map(|domain| domain.port_infos());
        let backend = self.clients.values().filter_map(|client| match client {
            Client::Evtchn(device) => Some(device.port_infos()),
            _ => None,
        });
        let mut ports: Vec<_> = guests.chain(backend.flatten()).collect();
        ports.sort_unstable();
        let zombies = self.zombies.iter().map(|zombie| zombie.domid()).collect();
        let entries = self.clients.values().map(|client| match client {
            Client::Gntdev(device) => device.maps.len(),
            _ => 0,
        });
        Snapshot {
            mappings: self.mapped(),
            maps: entries.sum(),
            ports,
            zombies,
        }
    }
}

/// A new device: the hypervisor's end and the holder's, which is read without blocking.
fn device_pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    wire::socket_pair(SocketFlags::NONBLOCK).map_err(|_| Errno::MFILE)
}

fn clone(fd: &OwnedFd) -> Result<OwnedFd, Errno> {
    fd.try_clone().map_err(|_| Errno::MFILE)
}

const ACCEPTED: SocketFlags = SocketFlags::CLOEXEC;
