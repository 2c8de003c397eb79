//! One event channel: a guest's port, the eventfd the guest waits on, and the backend's end once bound.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::event::EventfdFlags;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::{PortInfo, PortState};
use crate::{DomId, Port};

/// The hypervisor's end of an event-channel device's socket.
#[derive(Debug)]
pub(super) struct EventQueue {
    socket: OwnedFd,
    epoll: Arc<OwnedFd>,
    client: u64,
}

impl EventQueue {
    pub(super) fn new(socket: OwnedFd, epoll: Arc<OwnedFd>, client: u64) -> Self {
        Self {
            socket,
            epoll,
            client,
        }
    }

    pub(super) fn socket(&self) -> impl AsFd {
        &self.socket
    }

    /// Queues a port to be read. False: the holder has left too many unread; the hypervisor's thread
    /// is told when there is room again.
    fn push(&self, port: Port) -> bool {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::send(&self.socket, &port.0.to_ne_bytes(), flags) {
            Err(Errno::AGAIN) => {
                self.watch(epoll::EventFlags::IN | epoll::EventFlags::OUT);
                false
            }
            // Sent, or nobody is left to read it.
            _ => true,
        }
    }

    /// Called when there is room again.
    pub(super) fn has_room(&self) {
        self.watch(epoll::EventFlags::IN);
    }

    fn watch(&self, events: epoll::EventFlags) {
        let data = epoll::EventData::new_u64(self.client);
        // Fails only once the device is closed.
        let _ = epoll::modify(&*self.epoll, &self.socket, data, events);
    }
}

/// An event channel between a guest's port and, once bound, a port of an event-channel device.
#[derive(Debug)]
pub(super) struct Channel {
    domid: DomId,
    port: Port,
    /// The domain that may bind.
    remote: DomId,
    /// Counts the events of the guest's port; the backend adds to it directly.
    event: OwnedFd,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    Unbound,
    Bound {
        queue: Arc<EventQueue>,
        local: Port,
        /// Not queued since it was last unmasked.
        enabled: bool,
        /// An event came while it was not enabled.
        pending: bool,
    },
    Closed,
}

impl Channel {
    pub(super) fn new(domid: DomId, port: Port, remote: DomId) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let event = rustix::event::eventfd(0, flags)?;
        Ok(Self {
            domid,
            port,
            remote,
            event,
            state: Mutex::new(State::Unbound),
        })
    }

    pub(super) fn remote(&self) -> DomId {
        self.remote
    }

    /// The guest's eventfd.
    pub(super) fn event(&self) -> io::Result<OwnedFd> {
        self.event.try_clone()
    }

    /// Gives the channel its backend end, pending at once. False unless it was unbound.
    pub(super) fn bind(&self, queue: &Arc<EventQueue>, local: Port) -> bool {
        let mut state = self.state.lock();
        if !matches!(*state, State::Unbound) {
            return false;
        }
        *state = State::Bound {
            queue: queue.clone(),
            local,
            enabled: true,
            pending: true,
        };
        state.deliver();
        true
    }

    /// The backend's end is gone; the guest may be bound again, and learns nothing.
    pub(super) fn unbind(&self) {
        let mut state = self.state.lock();
        if matches!(*state, State::Bound { .. }) {
            *state = State::Unbound;
        }
    }

    /// The guest's end is gone. Its threads are woken so that they notice.
    pub(super) fn close(&self) {
        *self.state.lock() = State::Closed;
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// An event from the guest; lost unless bound.
    pub(super) fn notify_backend(&self) {
        let mut state = self.state.lock();
        if let State::Bound { pending, .. } = &mut *state {
            *pending = true;
        }
        state.deliver();
    }

    /// The backend wrote its port back.
    pub(super) fn unmask(&self) {
        let mut state = self.state.lock();
        if let State::Bound { enabled, .. } = &mut *state {
            *enabled = true;
        }
        state.deliver();
    }

    /// Tries again what a full queue had refused.
    pub(super) fn retry(&self) {
        self.state.lock().deliver();
    }

    /// The guest's end, unless it is closed.
    pub(super) fn guest_end(&self) -> Option<PortInfo> {
        let state = match &*self.state.lock() {
            State::Unbound => PortState::Unbound {
                remote: self.remote,
            },
            State::Bound { local, .. } => PortState::Interdomain {
                remote: self.remote,
                port: *local,
            },
            State::Closed => return None,
        };
        Some(PortInfo {
            domid: self.domid,
            port: self.port,
            state,
        })
    }

    /// The backend's end, `local` at its device.
    pub(super) fn backend_end(&self, local: Port) -> PortInfo {
        let state = match &*self.state.lock() {
            State::Bound { .. } => PortState::Interdomain {
                remote: self.domid,
                port: self.port,
            },
            State::Unbound | State::Closed => PortState::Unbound { remote: self.domid },
        };
        PortInfo {
            domid: self.remote,
            port: local,
            state,
        }
    }
}

impl State {
    /// Queues the port if it may be and has reason to.
    fn deliver(&mut self) {
        if let Self::Bound {
            queue,
            local,
            enabled,
            pending,
        } = self
            && *enabled
            && *pending
            && queue.push(*local)
        {
            *enabled = false;
            *pending = false;
        }
    }
}
