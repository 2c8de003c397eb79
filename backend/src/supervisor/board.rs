//! What the control socket shows: each device task posts its disk here, the socket's task reads.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use xenblk_xenstore::vbd::BackendPath;

use super::handle::{Load, Waiting};
use crate::control::{DiskStatus, RingStatus, Status};
use crate::stats::Reader;

/// A ring's counters, read from the page its worker writes.
pub(super) type Counters = Arc<Reader>;

/// A disk as its task last posted it.
#[derive(Debug)]
pub(super) struct Posted {
    /// The disk, without rings and without what passes with time.
    pub(super) disk: DiskStatus,
    /// Its rings, their counters still unread.
    pub(super) rings: Vec<(RingStatus, Counters)>,
    /// Since when it waits for the storage, if it does.
    pub(super) waiting: Option<Instant>,
}

impl Posted {
    fn status(&self) -> DiskStatus {
        let read = |(ring, counters): &(RingStatus, Counters)| RingStatus {
            counters: counters.snapshot(),
            ..ring.clone()
        };
        DiskStatus {
            rings: self.rings.iter().map(read).collect(),
            waiting_seconds: self.waiting.map(|since| since.elapsed().as_secs()),
            ..self.disk.clone()
        }
    }
}

/// All disks.
#[derive(Debug, Default)]
pub(super) struct Board(Mutex<BTreeMap<BackendPath, Posted>>);

impl Board {
    /// Replaces what is shown of one disk.
    pub(super) fn post(&self, path: BackendPath, posted: Posted) {
        self.0.lock().insert(path, posted);
    }

    /// Forgets a disk.
    pub(super) fn remove(&self, path: BackendPath) {
        self.0.lock().remove(&path);
    }

    /// How much there is to serve.
    pub(super) fn load(&self) -> Load {
        let disks = self.0.lock();
        let rings = disks.values().map(|posted| posted.rings.len()).sum();
        Load {
            disks: disks.len(),
            rings,
        }
    }

    /// The disks that wait for their storage.
    pub(super) fn waiting(&self) -> Vec<Waiting> {
        let disks = self.0.lock();
        let waiting = disks.values().filter_map(|posted| {
            let since = posted.waiting?;
            let in_flight = |(_, counters): &(_, Counters)| counters.snapshot().in_flight;
            Some(Waiting {
                domid: posted.disk.domid,
                devid: posted.disk.devid,
                seconds: since.elapsed().as_secs(),
                requests: posted.rings.iter().map(in_flight).sum(),
            })
        });
        waiting.collect()
    }

    /// Every disk with its rings' counters as they are now.
    pub(super) fn status(&self) -> Status {
        Status {
            disks: self.0.lock().values().map(Posted::status).collect(),
        }
    }
}
