//! Requests from other threads: a bounded queue in front of each ring, and the splitting of the guest's
//! requests into ring requests. The answers go out through the requests' own callbacks.

use std::ops::Range;
use std::sync::mpsc::Receiver;

use xenblk_ring::layout::SECTOR_SIZE;

use super::source::{GuestBuffer, Io, IoKind, Limits, Source};
use crate::disk::{DiskInfo, Done, IoError, Op};

/// A request waiting for its outcome. Dropping it answers [`IoError::Gone`]: no path loses a request.
pub(super) struct Pending {
    op: Op,
    done: Option<Done>,
}

impl Pending {
    pub(super) fn new(op: Op, done: Done) -> Self {
        Self {
            op,
            done: Some(done),
        }
    }

    pub(super) fn answer(mut self, outcome: Result<Vec<u8>, IoError>) {
        if let Some(done) = self.done.take() {
            done(outcome);
        }
    }

    /// Decides what needs no ring: `Err` carries the outcome.
    pub(super) fn admit(&self, info: &DiskInfo) -> Result<(), Result<Vec<u8>, IoError>> {
        let (offset, len) = self.range();
        let unit = u64::from(info.sector_size);
        let inside = offset.checked_add(len).is_some_and(|end| end <= info.size);
        if !inside || !offset.is_multiple_of(unit) || !len.is_multiple_of(unit) {
            return Err(Err(IoError::Invalid));
        }
        match self.kind() {
            // A read-only disk is written nevertheless: the block layer above would refuse, but then
            // nobody would see that the backend does.
            IoKind::Read | IoKind::Write | IoKind::Discard if len == 0 => Err(Ok(Vec::new())),
            IoKind::Discard if !info.discard => Err(Err(IoError::NotSupported)),
            _ => Ok(()),
        }
    }

    fn kind(&self) -> IoKind {
        match self.op {
            Op::Read { .. } => IoKind::Read,
            Op::Write { .. } => IoKind::Write,
            Op::Flush => IoKind::Flush,
            Op::Discard { .. } => IoKind::Discard,
        }
    }

    /// First byte and number of bytes.
    fn range(&self) -> (u64, u64) {
        match &self.op {
            Op::Read { offset, len } => (*offset, u64::from(*len)),
            Op::Write { offset, data } => (*offset, data.len() as u64),
            Op::Flush => (0, 0),
            Op::Discard { offset, len } => (*offset, *len),
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            done(Err(IoError::Gone));
        }
    }
}

/// A request being served, in pieces.
struct Parent {
    pending: Pending,
    first_sector: u64,
    sectors: u64,
    /// Sectors already handed out.
    sent: u64,
    /// Ring requests not answered yet.
    outstanding: u32,
    /// The first failure of a piece.
    failed: Option<IoError>,
    /// A READ's data so far.
    data: Vec<u8>,
}

impl Parent {
    /// Where the data of `io` lies in the parent's.
    fn piece(&self, io: &Io) -> Range<usize> {
        let start = (io.sector - self.first_sector) as usize * SECTOR_SIZE;
        start..start + io.sectors as usize * SECTOR_SIZE
    }
}

/// The inbox of one queue. At most one parent per ring slot and one being split are alive, so the memory
/// is bounded by the ring.
pub(super) struct Inbox {
    receiver: Receiver<Pending>,
    parents: Vec<Option<Parent>>,
    free: Vec<usize>,
    /// The parent that is not completely handed out.
    splitting: Option<usize>,
}

impl Inbox {
    pub(super) fn new(receiver: Receiver<Pending>) -> Self {
        Self {
            receiver,
            parents: Vec::new(),
            free: Vec::new(),
            splitting: None,
        }
    }

    /// Looks once more; true if nothing can be handed out now.
    pub(super) fn is_idle(&mut self) -> bool {
        if self.splitting.is_none() {
            let pending = self.receiver.try_recv().ok();
            self.splitting = pending.map(|pending| self.adopt(pending));
        }
        self.splitting.is_none()
    }

    fn adopt(&mut self, pending: Pending) -> usize {
        let (offset, len) = pending.range();
        let data = if pending.kind() == IoKind::Read {
            vec![0; len as usize]
        } else {
            Vec::new()
        };
        let parent = Parent {
            pending,
            first_sector: offset / SECTOR_SIZE as u64,
            sectors: len / SECTOR_SIZE as u64,
            sent: 0,
            outstanding: 0,
            failed: None,
            data,
        };
        let token = self.free.pop().unwrap_or_else(|| {
            self.parents.push(None);
            self.parents.len() - 1
        });
        self.parents[token] = Some(parent);
        token
    }
}

impl Source for Inbox {
    fn next(&mut self, limits: &Limits) -> Option<Io> {
        if self.is_idle() {
            return None;
        }
        let token = self.splitting.take()?;
        let parent = self.parents[token].as_mut()?;
        let sector = parent.first_sector + parent.sent;
        let kind = parent.pending.kind();
        let most = match kind {
            IoKind::Read | IoKind::Write => limits.sectors_at(sector),
            IoKind::Discard | IoKind::Flush => u64::from(u32::MAX),
        };
        let sectors = (parent.sectors - parent.sent).min(most);
        parent.sent += sectors;
        parent.outstanding += 1;
        if parent.sent < parent.sectors {
            self.splitting = Some(token);
        }
        Some(Io {
            kind,
            sector,
            sectors,
            token,
        })
    }

    fn fill(&mut self, io: &Io, buffer: &GuestBuffer<'_>) {
        let Some(parent) = &self.parents[io.token] else {
            return;
        };
        if let Op::Write { data, .. } = &parent.pending.op {
            buffer.write(&data[parent.piece(io)]);
        }
    }

    fn done(&mut self, io: &Io, outcome: Result<(), IoError>, buffer: &GuestBuffer<'_>) {
        let Some(parent) = self.parents[io.token].as_mut() else {
            return;
        };
        match outcome {
            Ok(()) if io.kind == IoKind::Read => {
                let piece = parent.piece(io);
                buffer.read(&mut parent.data[piece]);
            }
            Ok(()) => {}
            Err(error) => parent.failed = parent.failed.or(Some(error)),
        }
        parent.outstanding -= 1;
        if parent.outstanding == 0 && parent.sent == parent.sectors {
            self.free.push(io.token);
            if let Some(parent) = self.parents[io.token].take() {
                let outcome = parent.failed.map_or(Ok(parent.data), Err);
                parent.pending.answer(outcome);
            }
        }
    }
}
