//! One domain's memory and grants, as hypervisor and device holders see them.
//!
//! The v1 grant table lies in the first frames of the guest's memory, where the guest writes it. Beside
//! it stand the *active entries*, in memory of the hypervisor: for each grant a lock, the number of
//! mappings and the frame they use. A grant copy runs in its caller, so the caller takes the lock
//! itself and holds it while it copies; its device's copy record names the grant first, so that the
//! hypervisor finds and frees the lock if the caller dies.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{Access, CopyStatus, Direction, SharedPages, XEN_PAGE_SIZE};

/// Grant entries in one frame of the table; an entry is flags (16 bits), domid (16), frame (32).
pub(super) const ENTRIES_PER_FRAME: u32 = 512;
/// References a guest's operating system keeps for itself (grant_table.h, GNTTAB_NR_RESERVED_ENTRIES).
pub(super) const RESERVED_ENTRIES: u32 = 8;
/// The domain every device belongs to.
pub(super) const BACKEND: u16 = 0;

const TYPE_MASK: u32 = 3;
const PERMIT_ACCESS: u32 = 1;
const READONLY: u32 = 1 << 2;
const READING: u32 = 1 << 3;
const WRITING: u32 = 1 << 4;

/// How often an entry may change under a claim before it counts as unstable; Xen's bound as well.
const MAX_TRIES: u32 = 5;

/// Words of an active entry; one more entry at the front is the header.
const ACTIVE_WORDS: usize = 4;
const HEADER_ALIVE: usize = 0;

/// A domain's memory with its grants; the same type on both sides of the socket.
#[derive(Debug)]
pub(super) struct GuestMemory {
    memory: SharedPages,
    memory_fd: OwnedFd,
    /// Header, then one active entry a grant.
    active: SharedPages,
    active_fd: OwnedFd,
    /// Frames, those of the grant table included.
    frames: u32,
    /// Grants the table has room for.
    entries: u32,
}

impl GuestMemory {
    /// Memory of a new domain, alive.
    pub(super) fn create(frames: u32, entries: u32) -> io::Result<Self> {
        let (memory, memory_fd) = SharedPages::create("xen-guest", bytes_of_frames(frames))?;
        let (active, active_fd) = SharedPages::create("xen-active-grants", active_bytes(entries))?;
        let guest = Self {
            memory,
            memory_fd,
            active,
            active_fd,
            frames,
            entries,
        };
        guest.set_alive(true);
        Ok(guest)
    }

    /// The same memory, in a device holder.
    pub(super) fn open(
        frames: u32,
        entries: u32,
        memory_fd: OwnedFd,
        active_fd: OwnedFd,
    ) -> io::Result<Self> {
        let memory = SharedPages::map(&memory_fd, bytes_of_frames(frames), Access::ReadWrite)?;
        let active = SharedPages::map(&active_fd, active_bytes(entries), Access::ReadWrite)?;
        Ok(Self {
            memory,
            memory_fd,
            active,
            active_fd,
            frames,
            entries,
        })
    }

    /// What [`open`](Self::open) needs: frames, entries; memory, active entries.
    pub(super) fn share(&self) -> io::Result<([u32; 2], [OwnedFd; 2])> {
        let fds = [self.memory_fd.try_clone()?, self.active_fd.try_clone()?];
        Ok(([self.frames, self.entries], fds))
    }

    pub(super) fn memory(&self) -> &SharedPages {
        &self.memory
    }

    /// What mappings are made of.
    pub(super) fn memory_fd(&self) -> io::Result<OwnedFd> {
        self.memory_fd.try_clone()
    }

    pub(super) fn is_alive(&self) -> bool {
        self.active
            .region()
            .words32()
            .get(HEADER_ALIVE)
            .is_some_and(|alive| alive.load(Ordering::Acquire) == 1)
    }

    pub(super) fn set_alive(&self, alive: bool) {
        if let Some(word) = self.active.region().words32().get(HEADER_ALIVE) {
            word.store(u32::from(alive), Ordering::Release);
        }
    }

    /// Grant `gref`, or None beyond the table.
    pub(super) fn grant(&self, gref: u32) -> Option<Grant<'_>> {
        if gref >= self.entries {
            return None;
        }
        let shared = (gref as usize).checked_mul(2)?;
        let active = (gref as usize).checked_add(1)?.checked_mul(ACTIVE_WORDS)?;
        let [entry, frame] = self
            .memory
            .region()
            .words32()
            .get(shared..)?
            .first_chunk()?;
        let [lock, readers, writers, active_frame] = self
            .active
            .region()
            .words32()
            .get(active..)?
            .first_chunk()?;
        let frames = self.frames;
        Some(Grant {
            entry,
            frame,
            lock,
            readers,
            writers,
            active_frame,
            frames,
        })
    }

    /// Copies one segment, whose grant the caller holds; `frame` is what the claim gave.
    pub(super) fn copy(
        &self,
        frame: u32,
        offset: u16,
        local: &mut [u8],
        direction: Direction,
    ) -> bool {
        let at = bytes_of_frames(frame).saturating_add(usize::from(offset));
        match direction {
            Direction::FromGuest => self.memory.region().copy_out(at, local),
            Direction::ToGuest => self.memory.region().copy_in(at, local),
        }
    }
}

/// One entry of the grant table with its active entry.
#[derive(Debug)]
pub(super) struct Grant<'a> {
    /// Flags in the low half, domid in the high half: one word, claimed by compare-and-swap.
    entry: &'a AtomicU32,
    frame: &'a AtomicU32,
    /// 0, or the id of the device (or [`HYPERVISOR`]) that works on this grant.
    lock: &'a AtomicU32,
    /// Read-only mappings. These three change only under the lock.
    readers: &'a AtomicU32,
    /// Writable mappings.
    writers: &'a AtomicU32,
    /// The frame in use while anything is mapped, whatever the guest writes meanwhile.
    active_frame: &'a AtomicU32,
    frames: u32,
}

/// The hypervisor's own id as a holder of locks; devices count from 1.
pub(super) const HYPERVISOR: u32 = u32::MAX;

/// Guest side.
impl Grant<'_> {
    /// Grants `frame` to `domid`. The flags go last: the entry is valid from then on.
    pub(super) fn permit(&self, domid: u16, frame: u32, readonly: bool) {
        self.frame.store(frame, Ordering::Relaxed);
        let flags = PERMIT_ACCESS | if readonly { READONLY } else { 0 };
        self.entry
            .store(flags | u32::from(domid) << 16, Ordering::Release);
    }

    /// Ends the grant as Linux does: not while the flags say it is in use. None if there was no grant.
    pub(super) fn end(&self) -> Option<Result<(), super::StillMapped>> {
        let ended = self
            .entry
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |entry| {
                let in_use = entry & (READING | WRITING) != 0;
                (entry & TYPE_MASK != 0 && !in_use).then_some(0)
            });
        match ended {
            Ok(_) => Some(Ok(())),
            Err(entry) if entry & TYPE_MASK == 0 => None,
            Err(_) => Some(Err(super::StillMapped)),
        }
    }

    /// Clears the entry whatever its flags say.
    pub(super) fn revoke(&self) {
        self.entry.store(0, Ordering::Release);
    }
}

/// Hypervisor side, run by the hypervisor for mappings and by the caller for copies.
impl Grant<'_> {
    pub(super) fn try_lock(&self, owner: u32) -> bool {
        self.lock
            .compare_exchange(0, owner, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    pub(super) fn unlock(&self) {
        self.lock.store(0, Ordering::Release);
    }

    pub(super) fn is_locked_by(&self, owner: u32) -> bool {
        self.lock.load(Ordering::Acquire) == owner
    }

    /// Under the lock: marks the entry as in use and returns its frame; undone by [`settle`](Self::settle).
    pub(super) fn claim(&self, write: bool) -> Result<u32, CopyStatus> {
        let (readers, writers) = self.mappings();
        let mapped = readers != 0 || writers != 0;
        if mapped && (!write || writers != 0) {
            return Ok(self.active_frame.load(Ordering::Relaxed));
        }
        self.set_status(write)?;
        let frame = if mapped {
            self.active_frame
        } else {
            self.frame
        }
        .load(Ordering::Relaxed);
        if frame >= self.frames {
            self.settle();
            return Err(CopyStatus::BAD_PAGE);
        }
        self.active_frame.store(frame, Ordering::Relaxed);
        Ok(frame)
    }

    /// Under the lock: takes back the marks that the mappings alone don't justify.
    pub(super) fn settle(&self) {
        let stale = match self.mappings() {
            (_, 1..) => return,
            (1.., 0) => WRITING,
            (0, 0) => READING | WRITING,
        };
        self.entry.fetch_and(!stale, Ordering::Release);
    }

    /// Under the lock: one mapping more.
    pub(super) fn add_mapping(&self, access: Access) {
        self.mappings_of(access).fetch_add(1, Ordering::Relaxed);
    }

    /// Under the lock: one mapping less.
    pub(super) fn remove_mapping(&self, access: Access) {
        // Never below 0, even if a client scribbled over the count.
        let less = |count: u32| Some(count.saturating_sub(1));
        let _ = self
            .mappings_of(access)
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        self.settle();
    }

    /// Xen's _set_status_v1: the claim by compare-and-swap on memory the guest writes too.
    fn set_status(&self, write: bool) -> Result<(), CopyStatus> {
        let mut entry = self.entry.load(Ordering::Acquire);
        for _ in 0..MAX_TRIES {
            let domid = entry >> 16;
            let refused = entry & TYPE_MASK != PERMIT_ACCESS
                || domid != u32::from(BACKEND)
                || (write && entry & READONLY != 0);
            if refused {
                return Err(CopyStatus::GENERAL_ERROR);
            }
            let marks = if write { READING | WRITING } else { READING };
            let order = (Ordering::AcqRel, Ordering::Acquire);
            match self
                .entry
                .compare_exchange(entry, entry | marks, order.0, order.1)
            {
                Ok(_) => return Ok(()),
                Err(changed) => entry = changed,
            }
        }
        Err(CopyStatus::GENERAL_ERROR)
    }

    fn mappings(&self) -> (u32, u32) {
        (
            self.readers.load(Ordering::Relaxed),
            self.writers.load(Ordering::Relaxed),
        )
    }

    fn mappings_of(&self, access: Access) -> &AtomicU32 {
        match access {
            Access::ReadOnly => self.readers,
            Access::ReadWrite => self.writers,
        }
    }
}

fn bytes_of_frames(frames: u32) -> usize {
    (frames as usize).saturating_mul(XEN_PAGE_SIZE)
}

fn active_bytes(entries: u32) -> usize {
    (entries as usize)
        .saturating_add(1)
        .saturating_mul(ACTIVE_WORDS)
        .saturating_mul(size_of::<u32>())
}
