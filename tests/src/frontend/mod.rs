//! The guest's half of a virtual disk against the mocked hypervisor and the fake XenStore, with the manners
//! of one real frontend: its [`Profile`]. Like the blkfront of Linux 6 it trusts nothing, whichever it is:
//! whatever the backend must not do disables the disk and is said in one line.

mod control;
mod disk;
mod inbox;
mod link;
mod negotiate;
mod pool;
mod profile;
mod queue;
mod ring;
mod source;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use xenblk_grants::fake::FakeDomain;
use xenblk_ring::Abi;
use xenblk_ring::layout::MAX_RING_ORDER;
use xenblk_xenstore::{Client, Events};

pub use disk::Disk;
pub use negotiate::NegotiationError;
pub use profile::{IndirectGrants, Profile};
pub use queue::QueueCounters;
pub use source::{GuestBuffer, Io, IoKind, Job, Limits, Source};

use self::control::Control;
use crate::toolstack::Vbd;

/// How a guest drives its disks.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Whose behaviour.
    pub profile: &'static Profile,
    /// Rings it asks for, 1 to the profile's most.
    pub queues: u32,
    /// Pages of a ring as a power of two, 0 to the profile's most.
    pub ring_order: u32,
}

impl Config {
    /// Pages of guest memory one disk needs at most: the rings, and for each of their entries the
    /// largest request's data and segment page.
    pub fn pages_per_disk(&self) -> usize {
        let ring_pages = 1 << self.ring_order.min(MAX_RING_ORDER);
        let entries = Abi::NATIVE.entries(ring_pages) as usize;
        self.queues as usize * (ring_pages as usize + entries * self.profile.pages_per_entry())
    }
}

/// Where a frontend stands.
#[derive(Clone, Debug)]
pub enum Status {
    /// Not connected yet.
    Connecting,
    /// In use.
    Connected(Arc<Disk>),
    /// Closed, dead or given up, for this reason.
    Gone(String),
}

/// What a frontend is told.
#[derive(Debug)]
enum Order {
    /// Close and offer new rings, as a kernel started by kexec does; answered when that is done.
    Reset { done: oneshot::Sender<()> },
    /// The device is being removed; answered with the number of granted pages the backend still maps.
    Remove {
        reason: String,
        leaked: oneshot::Sender<usize>,
    },
}

/// A running frontend of one disk.
#[derive(Debug)]
pub struct Frontend {
    orders: mpsc::Sender<Order>,
    status: watch::Receiver<Status>,
}

impl Frontend {
    /// Finds the backend of `vbd` and starts to follow its state. `store` is a connection of the guest's,
    /// used for nothing else.
    pub async fn probe(
        vbd: Vbd,
        config: Config,
        domain: FakeDomain,
        store: (Client, Events),
    ) -> Result<Self, NegotiationError> {
        let (status_sender, status) = watch::channel(Status::Connecting);
        let control = Control::probe(vbd, config, domain, store, status_sender).await?;
        let (orders, receiver) = mpsc::channel(1);
        tokio::spawn(control.run(receiver));
        Ok(Self { orders, status })
    }

    /// Where it stands now.
    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// Waits until it is connected or has given up; the text says why not.
    pub async fn connected(&self, patience: Duration) -> Result<Arc<Disk>, String> {
        let mut status = self.status.clone();
        let settled = status.wait_for(|status| !matches!(status, Status::Connecting));
        match tokio::time::timeout(patience, settled).await {
            Ok(Ok(status)) => match &*status {
                Status::Connected(disk) => Ok(Arc::clone(disk)),
                Status::Gone(reason) => Err(reason.clone()),
                Status::Connecting => Err("still connecting".into()),
            },
            Ok(Err(_)) => Err("the frontend ended".into()),
            Err(_) => Err(format!("not connected after {patience:?}")),
        }
    }

    /// Closes the connection and offers new rings, driven by the guest; wait for their connection with
    /// [`connected`](Self::connected). The old disk is gone.
    pub async fn reset(&self) {
        let (done, answer) = oneshot::channel();
        // A frontend that has ended has nothing to reset.
        let _ = self.orders.send(Order::Reset { done }).await;
        let _ = answer.await;
    }

    /// The device goes away: requests fail, grants are taken back. Returns how many granted pages the
    /// backend still maps; 0 is expected of one that has closed.
    pub async fn remove(self, reason: &str) -> usize {
        let (leaked, answer) = oneshot::channel();
        let reason = reason.to_owned();
        if self
            .orders
            .send(Order::Remove { reason, leaked })
            .await
            .is_err()
        {
            return 0;
        }
        answer.await.unwrap_or(0)
    }
}
