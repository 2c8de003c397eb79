//! A ring's counters in a page shared by the worker, which alone writes, and the supervisor, which
//! reads. Counters only grow, except [`Snapshot::in_flight`], [`Snapshot::flushing_since`],
//! [`Snapshot::persistent_grants`] and [`Snapshot::memory_bytes`]; each is read on its own, so two of one
//! snapshot may be a few requests apart.

use std::sync::atomic::Ordering;

use xenblk_grants::SharedPages;

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $field:ident $variant:ident,)+) => {
        /// Names one counter; the order is the layout of the page, one `u64` each.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Counter { $($(#[doc = $doc])+ $variant,)+ }

        /// The counters as read once.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub struct Snapshot { $($(#[doc = $doc])+ pub $field: u64,)+ }

        const COUNTERS: usize = [$(Counter::$variant),+].len();

        impl Snapshot {
            fn read(page: &SharedPages) -> Self {
                let get = |counter: Counter| page.load(counter as usize).unwrap_or(0);
                Self { $($field: get(Counter::$variant),)+ }
            }

            /// Adds another ring's counters.
            pub fn add(&mut self, other: &Self) {
                $(self.$field = self.$field.wrapping_add(other.$field);)+
            }
        }
    };
}

counters! {
    /// READ requests consumed, direct or indirect.
    reads Reads,
    /// WRITE requests consumed, direct or indirect.
    writes Writes,
    /// FLUSH_DISKCACHE requests consumed.
    flushes Flushes,
    /// WRITE_BARRIER requests consumed.
    barriers Barriers,
    /// DISCARD requests consumed.
    discards Discards,
    /// Requests of no known operation.
    unknown Unknown,
    /// Requests whose segments came in indirect pages (counted as READ or WRITE too).
    indirect Indirect,
    /// Requests answered with another status than OKAY.
    errors Errors,
    /// Bytes given to the guest by successful reads.
    bytes_read BytesRead,
    /// Bytes taken from the guest by successful writes.
    bytes_written BytesWritten,
    /// Bytes discarded.
    bytes_discarded BytesDiscarded,
    /// Events received on the ring's port.
    events Events,
    /// Those of them that brought no request.
    empty_events EmptyEvents,
    /// Times the port was unmasked, to receive the next event.
    unmasks Unmasks,
    /// Times it stayed masked for a while, because too many events in a row had brought no request.
    delayed_unmasks DelayedUnmasks,
    /// Events sent to the guest.
    notifies Notifies,
    /// Times responses were published.
    publishes Publishes,
    /// Responses published.
    responses Responses,
    /// Grant copy calls.
    copies Copies,
    /// Segments and indirect pages of those calls.
    copied_segments CopiedSegments,
    /// Segments and indirect pages moved through a grant that was mapped.
    persistent_hits PersistentHits,
    /// Those of `copied_segments` that a frontend with persistent grants presented: theirs was not mapped.
    fallbacks Fallbacks,
    /// Chunks of persistent grants mapped, an ioctl and an mmap each.
    maps Maps,
    /// Grants mapped in them.
    mapped_grants MappedGrants,
    /// Chunks that could not be mapped: a bad grant, or no maptrack entries left.
    map_failures MapFailures,
    /// Chunks given back, unused for long or to make room.
    purges Purges,
    /// Grants in them.
    purged_grants PurgedGrants,
    /// Turns of the ring that consumed at least one request.
    batches Batches,
    /// Operations handed to the target.
    target_ops TargetOps,
    /// Persistent grants mapped now.
    persistent_grants PersistentGrants,
    /// Requests consumed and not yet published.
    in_flight InFlight,
    /// Since when a flush has not been answered by the storage, in milliseconds of CLOCK_MONOTONIC; 0 if
    /// none is under way.
    flushing_since FlushingSince,
    /// Memory of ours the ring may use at most, in bytes: journal, statistics, bounce memory and segment
    /// descriptors. Set once.
    memory_bytes MemoryBytes,
}

/// Bytes of a statistics page.
pub const BYTES: usize = 4096;
const _: () = assert!(COUNTERS * 8 <= BYTES);

/// The writing side. One per page: increments are plain load and store.
#[derive(Debug)]
pub struct Writer(SharedPages);

impl Writer {
    /// Counts into `page`, from what it holds already (zero in a fresh page).
    pub fn new(page: SharedPages) -> Self {
        Self(page)
    }

    /// Adds `n`.
    pub fn add(&self, counter: Counter, n: u64) {
        if let Some(word) = self.0.as_ref().get(counter as usize) {
            word.store(
                word.load(Ordering::Relaxed).wrapping_add(n),
                Ordering::Relaxed,
            );
        }
    }

    /// Replaces a value that isn't a running total.
    pub fn set(&self, counter: Counter, value: u64) {
        if let Some(word) = self.0.as_ref().get(counter as usize) {
            word.store(value, Ordering::Relaxed);
        }
    }
}

/// The reading side.
#[derive(Debug)]
pub struct Reader(SharedPages);

impl Reader {
    /// Reads `page`, read-only or not, which another process may be writing.
    pub fn new(page: SharedPages) -> Self {
        Self(page)
    }

    /// The counters now.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::read(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use xenblk_grants::Access;

    use super::*;

    #[test]
    fn a_reader_sees_what_the_writer_counted() {
        let (ours, fd) = SharedPages::create("stats", BYTES).unwrap();
        let theirs = SharedPages::map(fd, BYTES, Access::ReadOnly).unwrap();
        let (writer, reader) = (Writer::new(ours), Reader::new(theirs));
        writer.add(Counter::Reads, 2);
        writer.add(Counter::Reads, 1);
        writer.set(Counter::InFlight, 9);
        writer.set(Counter::InFlight, 4);
        let expected = Snapshot {
            reads: 3,
            in_flight: 4,
            ..Snapshot::default()
        };
        assert_eq!(reader.snapshot(), expected);
    }
}
