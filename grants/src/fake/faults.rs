//! Failures to inject, as a table in memory that hypervisor and device holders share.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::{Access, CopyStatus, SharedPages};

/// Failures to inject; they apply to every device of the hypervisor, in every process.
#[derive(Clone, Debug)]
pub struct Faults(Arc<SharedPages>);

/// Size of the table in bytes.
const BYTES: usize = 4096;
/// Longest time a copy is held, in milliseconds, in case nobody ends it.
const LONGEST_HOLD: u32 = 60_000;

/// Words of the table.
#[derive(Clone, Copy)]
enum Word {
    /// Map calls until one fails; 0: never.
    MapCountdown,
    /// Copied segments until one fails; 0: never.
    CopyCountdown,
    /// The status that one gets, as u64 of the i16's bits.
    CopyStatus,
    /// 1: copies stop where they hold their grant.
    HoldCopies,
    /// How many did.
    CopiesHeld,
    /// Pages that may be mapped; 0: as many as anyone likes.
    MaptrackLimit,
}

impl Faults {
    pub(super) fn create() -> io::Result<(Self, OwnedFd)> {
        let (table, fd) = SharedPages::create("xen-faults", BYTES)?;
        Ok((Self(Arc::new(table)), fd))
    }

    pub(super) fn open(fd: &OwnedFd) -> io::Result<Self> {
        Ok(Self(Arc::new(SharedPages::map(
            fd,
            BYTES,
            Access::ReadWrite,
        )?)))
    }

    /// The `nth` map call from now (1 is the next) fails as if one of its grants were bad.
    pub fn fail_map(&self, nth: u64) {
        self.set(Word::MapCountdown, nth);
    }

    /// The `nth` copied segment from now (1 is the next) is not copied and gets `status`.
    pub fn fail_copy(&self, nth: u64, status: CopyStatus) {
        self.set(Word::CopyStatus, u64::from(status.0.cast_unsigned()));
        self.set(Word::CopyCountdown, nth);
    }

    /// While true, every copy stops where it holds its grant and has not moved a byte; for a minute at
    /// most.
    pub fn hold_copies(&self, hold: bool) {
        self.set(Word::HoldCopies, u64::from(hold));
    }

    /// Copies stopped by [`hold_copies`](Self::hold_copies) so far.
    pub fn copies_held(&self) -> u64 {
        self.word(Word::CopiesHeld)
            .map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Pages that may be mapped at a time, over all domains; a map beyond fails as a bad grant does. 0 is
    /// no limit.
    pub fn limit_maptrack(&self, pages: u64) {
        self.set(Word::MaptrackLimit, pages);
    }

    /// Whether this map call is to fail.
    pub(super) fn map_fails(&self) -> bool {
        self.due(Word::MapCountdown)
    }

    /// Whether `pages` mapped pages are too many.
    pub(super) fn exceeds_maptrack(&self, pages: u64) -> bool {
        let limit = self
            .word(Word::MaptrackLimit)
            .map_or(0, |word| word.load(Ordering::Relaxed));
        limit != 0 && pages > limit
    }

    /// The status this segment is to fail with, if it is.
    pub(super) fn copy_fails(&self) -> Option<CopyStatus> {
        if !self.due(Word::CopyCountdown) {
            return None;
        }
        let bits = self.word(Word::CopyStatus)?.load(Ordering::Acquire);
        u16::try_from(bits)
            .ok()
            .map(|bits| CopyStatus(bits.cast_signed()))
    }

    /// Where a copy that holds its grant waits while it is told to.
    pub(super) fn copy_waits(&self) {
        let Some(hold) = self.word(Word::HoldCopies) else {
            return;
        };
        if hold.load(Ordering::Relaxed) == 0 {
            return;
        }
        if let Some(held) = self.word(Word::CopiesHeld) {
            held.fetch_add(1, Ordering::AcqRel);
        }
        for _ in 0..LONGEST_HOLD {
            if hold.load(Ordering::Relaxed) == 0 {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Counts down; true exactly when the count reaches 0.
    fn due(&self, word: Word) -> bool {
        self.word(word).is_some_and(|word| {
            // The load keeps the usual case, no fault, from writing a line all devices share.
            word.load(Ordering::Relaxed) != 0
                && word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |n| n.checked_sub(1))
                    == Ok(1)
        })
    }

    fn set(&self, word: Word, value: u64) {
        if let Some(word) = self.word(word) {
            word.store(value, Ordering::Release);
        }
    }

    fn word(&self, word: Word) -> Option<&AtomicU64> {
        let table: &[AtomicU64] = (*self.0).as_ref();
        table.get(word as usize)
    }
}
