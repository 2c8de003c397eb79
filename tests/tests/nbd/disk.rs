//! A guest disk in memory that records what reaches it and, on request, holds operations back until
//! the test completes them.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use xenblk_tests::disk::{DiskInfo, Done, GuestDisk, IoError, Op};

/// What the disk saw, without data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    Read(u64, u32),
    Write(u64, usize),
    Flush,
    Discard(u64, u64),
}

#[derive(Default)]
struct State {
    data: Vec<u8>,
    seen: Vec<(usize, Seen)>,
    held: Vec<(Op, Done)>,
    hold: bool,
    fail: Option<IoError>,
    in_flight: usize,
    peak: usize,
}

pub(crate) struct MemoryDisk {
    info: DiskInfo,
    state: Mutex<State>,
    arrived: Condvar,
}

pub(crate) fn info(size: u64) -> DiskInfo {
    DiskInfo {
        size,
        sector_size: 512,
        physical_sector_size: 512,
        readonly: false,
        flush: true,
        discard: true,
        queues: 4,
    }
}

impl MemoryDisk {
    pub(crate) fn new(info: DiskInfo) -> Arc<Self> {
        let data = vec![0x5a; usize::try_from(info.size).unwrap()];
        let state = Mutex::new(State {
            data,
            ..State::default()
        });
        Arc::new(Self {
            info,
            state,
            arrived: Condvar::new(),
        })
    }

    /// From now on operations wait for [`Self::complete`].
    pub(crate) fn hold(&self) {
        self.state.lock().hold = true;
    }

    pub(crate) fn fail(&self, error: Option<IoError>) {
        self.state.lock().fail = error;
    }

    /// Waits until `count` operations are held.
    pub(crate) fn wait_held(&self, count: usize) {
        let mut state = self.state.lock();
        while state.held.len() < count {
            self.arrived.wait(&mut state);
        }
    }

    /// Waits until `count` operations have arrived since the disk was made.
    pub(crate) fn wait_seen(&self, count: usize) {
        let mut state = self.state.lock();
        while state.seen.len() < count {
            self.arrived.wait(&mut state);
        }
    }

    /// Completes the `index`-th held operation.
    pub(crate) fn complete(&self, index: usize) {
        let (op, done) = self.state.lock().held.remove(index);
        self.perform(op, done);
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.state
            .lock()
            .seen
            .iter()
            .map(|(_, seen)| seen.clone())
            .collect()
    }

    pub(crate) fn hints(&self) -> Vec<usize> {
        self.state
            .lock()
            .seen
            .iter()
            .map(|(hint, _)| *hint)
            .collect()
    }

    /// Most operations that were in flight at a time.
    pub(crate) fn peak(&self) -> usize {
        self.state.lock().peak
    }

    fn perform(&self, op: Op, done: Done) {
        let mut state = self.state.lock();
        state.in_flight -= 1;
        let outcome = match (state.fail, op) {
            (Some(error), _) => Err(error),
            (None, Op::Read { offset, len }) => {
                let at = usize::try_from(offset).unwrap();
                Ok(state.data[at..][..len as usize].to_vec())
            }
            (None, Op::Write { offset, data }) => {
                let at = usize::try_from(offset).unwrap();
                state.data[at..][..data.len()].copy_from_slice(&data);
                Ok(Vec::new())
            }
            (None, Op::Flush) => Ok(Vec::new()),
            (None, Op::Discard { offset, len }) => {
                let at = usize::try_from(offset).unwrap();
                state.data[at..][..usize::try_from(len).unwrap()].fill(0);
                Ok(Vec::new())
            }
        };
        drop(state);
        done(outcome);
    }
}

impl GuestDisk for MemoryDisk {
    fn info(&self) -> DiskInfo {
        self.info.clone()
    }

    fn submit(&self, hint: usize, op: Op, done: Done) {
        let seen = match &op {
            Op::Read { offset, len } => Seen::Read(*offset, *len),
            Op::Write { offset, data } => Seen::Write(*offset, data.len()),
            Op::Flush => Seen::Flush,
            Op::Discard { offset, len } => Seen::Discard(*offset, *len),
        };
        let mut state = self.state.lock();
        state.seen.push((hint, seen));
        state.in_flight += 1;
        state.peak = state.peak.max(state.in_flight);
        self.arrived.notify_all();
        if state.hold {
            state.held.push((op, done));
        } else {
            drop(state);
            self.perform(op, done);
        }
    }
}
