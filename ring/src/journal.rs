//! The request table of one ring, kept in memory that outlives the process: one slot for each ring
//! entry, the slot being the private copy every request needs anyway. A ring alone can't say what is
//! owed, because responses overwrite requests out of order.
//!
//! Every store is a release store, made in the order of the methods of [`Journal`]; each of them names
//! the store that commits it. A process may end after any store: what the next one does then is in
//! `recover`. The obvious other orders lose or repeat requests (tests/journal.rs shows which).

use std::mem::offset_of;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Release},
};

use crate::abi::Abi;
use crate::layout::{MAX_INDIRECT_SEGMENTS, MAX_RING_PAGES};
use crate::response::Status;
use crate::segment::Segment;
use crate::slot::{RawSlot, SLOT_LONGS, echoed_operation, join, split};

/// The journal's memory as 64-bit words. As with [`Words`](crate::Words) no index can fail.
pub trait JournalWords {
    /// Words there are; see [`journal_bytes`].
    fn word_count(&self) -> usize;
    /// Acquire load.
    fn load(&self, index: usize) -> u64;
    /// Release store. A process that ends has made some first of its stores, and none later.
    fn store(&self, index: usize, value: u64);

    /// Loads `into.len()` words from `first` on.
    fn load_run(&self, first: usize, into: &mut [u64]) {
        for (offset, word) in into.iter_mut().enumerate() {
            *word = self.load(first.wrapping_add(offset));
        }
    }

    /// Stores `values` from `first` on, in order.
    fn store_run(&self, first: usize, values: &[u64]) {
        for (offset, &value) in values.iter().enumerate() {
            self.store(first.wrapping_add(offset), value);
        }
    }
}

impl<T: AsRef<[AtomicU64]>> JournalWords for T {
    fn word_count(&self) -> usize {
        self.as_ref().len()
    }

    fn load(&self, index: usize) -> u64 {
        self.as_ref()
            .get(index)
            .map_or(0, |word| word.load(Acquire))
    }

    fn store(&self, index: usize, value: u64) {
        if let Some(word) = self.as_ref().get(index) {
            word.store(value, Release);
        }
    }

    // One bounds check for the run: these two are on every request's way.
    fn load_run(&self, first: usize, into: &mut [u64]) {
        let from = self.as_ref().get(first..).unwrap_or_default();
        for (word, kept) in into.iter_mut().zip(from) {
            *word = kept.load(Acquire);
        }
    }

    fn store_run(&self, first: usize, values: &[u64]) {
        let to = self.as_ref().get(first..).unwrap_or_default();
        for (&value, kept) in values.iter().zip(to) {
            kept.store(value, Release);
        }
    }
}

/// Which ring a journal belongs to. A journal is executed only if all of it but `incarnation` is
/// what the successor was told: a request run on the wrong disk is worse than a lost one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalIdentity {
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot_id: [u8; 16],
    /// The frontend domain's UUID: domids are used again.
    pub domain_uuid: [u8; 16],
    /// The frontend domain.
    pub domid: u32,
    /// The virtual device.
    pub devid: u32,
    /// The queue within the device.
    pub queue: u32,
    /// Grefs of the ring's pages, in order; as many as the ring has pages.
    pub ring_refs: Vec<u32>,
    /// The frontend's event channel.
    pub port: u32,
    /// `feature-max-indirect-segments` as offered.
    pub max_indirect_segments: u16,
    /// Which life of the worker writes the journal.
    pub incarnation: u64,
    /// `st_dev` of the target; 0 where there is no file.
    pub target_dev: u64,
    /// `st_ino` of the target; 0 where there is no file.
    pub target_ino: u64,
}

/// "xenblkj" and the layout's version; stored last, so that a half-written header is no journal.
const MAGIC: u64 = u64::from_le_bytes(*b"xenblkj\x01");
/// `at` of a slot whose response has no place in the ring yet.
const NOWHERE: u64 = u64::MAX;
/// Segment tables of a ring: 2 KiB each, so not one for each of up to 512 requests.
const MAX_TABLES: u32 = 64;

#[repr(C)]
struct Header {
    magic: u64,
    identity: IdentityWords,
    incarnation: u64,
    /// P: responses published, counted from the ring's first index; the low half is `rsp_prod`.
    published: u64,
}

#[repr(C)]
struct IdentityWords {
    boot_id: [u64; 2],
    domain_uuid: [u64; 2],
    domid_devid: u64,
    queue_port: u64,
    abi_pages: u64,
    max_indirect_segments: u64,
    target_dev: u64,
    target_ino: u64,
    ring_refs: [u64; MAX_RING_PAGES as usize / 2],
}

#[repr(C)]
struct Slot {
    /// The request's index in the ring, free-running.
    seq: u64,
    /// The ring index its response is or will be written at, or [`NOWHERE`].
    at: u64,
    /// 0 while there are none; else table and count, see [`TableRef`].
    segs_valid: u64,
    /// [`Status`], as its 16 bits.
    status: u64,
    /// [`State`].
    state: u64,
    raw: [u64; SLOT_LONGS],
}

const WORD: usize = size_of::<u64>();
const IDENTITY_WORDS: usize = size_of::<IdentityWords>() / WORD;
const HEADER_WORDS: usize = size_of::<Header>() / WORD;
const SLOT_WORDS: usize = size_of::<Slot>() / WORD;

/// Where the journal's words stand, for whoever looks at one from outside.
pub mod word {
    use super::{HEADER_WORDS, Header, MAX_INDIRECT_SEGMENTS, SLOT_WORDS, Slot, WORD, offset_of};

    /// Layout and version; 0 while there is no journal.
    pub const MAGIC: usize = offset_of!(Header, magic) / WORD;
    /// First word of the identity.
    pub const IDENTITY: usize = offset_of!(Header, identity) / WORD;
    /// [`JournalIdentity::incarnation`](super::JournalIdentity::incarnation).
    pub const INCARNATION: usize = offset_of!(Header, incarnation) / WORD;
    /// P, the responses published.
    pub const PUBLISHED: usize = offset_of!(Header, published) / WORD;
    /// First word of the slots.
    pub const SLOTS: usize = HEADER_WORDS;
    /// Words from one slot to the next.
    pub const SLOT_STRIDE: usize = SLOT_WORDS;
    /// Within a slot: the request's ring index.
    pub const SEQ: usize = offset_of!(Slot, seq) / WORD;
    /// Within a slot: the response's ring index.
    pub const AT: usize = offset_of!(Slot, at) / WORD;
    /// Within a slot: segment table and count, 0 for none.
    pub const SEGS_VALID: usize = offset_of!(Slot, segs_valid) / WORD;
    /// Within a slot: the response's status.
    pub const STATUS: usize = offset_of!(Slot, status) / WORD;
    /// Within a slot: free, pending or done.
    pub const STATE: usize = offset_of!(Slot, state) / WORD;
    /// Within a slot: the request's bytes.
    pub const RAW: usize = offset_of!(Slot, raw) / WORD;
    /// Words of one segment table; the tables follow the slots.
    pub const TABLE_STRIDE: usize = MAX_INDIRECT_SEGMENTS;
}

/// Segment tables of a ring of `entries` slots.
pub(crate) fn tables(entries: u32) -> u32 {
    entries.min(MAX_TABLES)
}

/// Bytes of memory the journal of a ring of `entries` slots takes, a multiple of 8.
#[must_use]
pub fn journal_bytes(entries: u32) -> usize {
    journal_words(entries).wrapping_mul(WORD)
}

pub(crate) fn journal_words(entries: u32) -> usize {
    table_word(entries, tables(entries))
}

fn slot_word(slot: u32, field: usize) -> usize {
    word::SLOTS
        .wrapping_add((slot as usize).wrapping_mul(SLOT_WORDS))
        .wrapping_add(field)
}

fn table_word(entries: u32, table: u32) -> usize {
    slot_word(entries, (table as usize).wrapping_mul(word::TABLE_STRIDE))
}

/// A slot's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Free = 0,
    Pending = 1,
    Done = 2,
}

/// What `segs_valid` says once it isn't 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TableRef {
    pub(crate) table: u32,
    pub(crate) count: u32,
}

/// The journal's words by name.
#[derive(Debug)]
pub(crate) struct Journal<J> {
    words: J,
    entries: u32,
}

impl<J: JournalWords> Journal<J> {
    /// `words` must have [`journal_words`] words; what is missing reads 0 and keeps nothing.
    pub(crate) fn new(words: J, entries: u32) -> Self {
        Self { words, entries }
    }

    fn get(&self, slot: u32, field: usize) -> u64 {
        self.words.load(slot_word(slot, field))
    }

    fn set(&self, slot: u32, field: usize, value: u64) {
        self.words.store(slot_word(slot, field), value);
    }

    /// A new ring with nothing owed, the next response going to index `published`. Commit: the magic.
    pub(crate) fn format(
        &self,
        identity: &[u64; IDENTITY_WORDS],
        incarnation: u64,
        published: u64,
    ) {
        self.words.store(word::MAGIC, 0);
        for slot in 0..self.entries {
            self.set(slot, word::STATE, State::Free as u64);
        }
        self.words.store_run(word::IDENTITY, identity);
        self.words.store(word::INCARNATION, incarnation);
        self.words.store(word::PUBLISHED, published);
        self.words.store(word::MAGIC, MAGIC);
    }

    /// Whether this is the journal of the ring called `identity`.
    pub(crate) fn belongs_to(&self, identity: &[u64; IDENTITY_WORDS]) -> bool {
        let mut stored = [0; IDENTITY_WORDS];
        self.words.load_run(word::IDENTITY, &mut stored);
        self.words.load(word::MAGIC) == MAGIC && stored == *identity
    }

    pub(crate) fn set_incarnation(&self, incarnation: u64) {
        self.words.store(word::INCARNATION, incarnation);
    }

    /// Consume. Commit: the state, until which the slot is free and its other words mean nothing.
    pub(crate) fn begin(&self, slot: u32, seq: u64, raw: &RawSlot) {
        self.words
            .store_run(slot_word(slot, word::RAW), &raw.longs());
        self.set(slot, word::SEQ, seq);
        self.unplace(slot);
        self.set(slot, word::SEGS_VALID, 0);
        self.set(slot, word::STATE, State::Pending as u64);
    }

    /// An indirect request's segments. Commit: `segs_valid`; only then may they be acted upon, since
    /// the guest's page may say something else when it is read again.
    pub(crate) fn store_segments(
        &self,
        slot: u32,
        table: u32,
        segments: impl Iterator<Item = Segment>,
    ) {
        let first = table_word(self.entries, table);
        let mut count = 0;
        for segment in segments.take(MAX_INDIRECT_SEGMENTS) {
            let [gref, sectors] = segment.to_words();
            self.words
                .store(first.wrapping_add(count), join(gref, sectors));
            count = count.wrapping_add(1);
        }
        // Table numbers are stored plus one: 0 says there is none.
        let valid = join(table.wrapping_add(1), u32::try_from(count).unwrap_or(0));
        self.set(slot, word::SEGS_VALID, valid);
    }

    /// The outcome. Commit: the state.
    pub(crate) fn finish(&self, slot: u32, status: Status) {
        let [low, high] = status.to_wire().to_le_bytes();
        self.set(
            slot,
            word::STATUS,
            u64::from(u16::from_le_bytes([low, high])),
        );
        self.set(slot, word::STATE, State::Done as u64);
    }

    /// Where the response is about to be written.
    pub(crate) fn place(&self, slot: u32, at: u64) {
        self.set(slot, word::AT, at);
    }

    /// The response has no place any more, or not yet.
    pub(crate) fn unplace(&self, slot: u32) {
        self.place(slot, NOWHERE);
    }

    /// Every response placed below `published` counts as published. This is its own commit.
    pub(crate) fn commit_published(&self, published: u64) {
        self.words.store(word::PUBLISHED, published);
    }

    /// The slot can be used again. This is its own commit.
    pub(crate) fn free(&self, slot: u32) {
        self.set(slot, word::STATE, State::Free as u64);
    }

    pub(crate) fn published(&self) -> u64 {
        self.words.load(word::PUBLISHED)
    }

    /// `None` if the word is none of the states.
    pub(crate) fn state(&self, slot: u32) -> Option<State> {
        let is = |state: &State| self.get(slot, word::STATE) == *state as u64;
        [State::Free, State::Pending, State::Done]
            .into_iter()
            .find(is)
    }

    pub(crate) fn seq(&self, slot: u32) -> u64 {
        self.get(slot, word::SEQ)
    }

    pub(crate) fn at(&self, slot: u32) -> u64 {
        self.get(slot, word::AT)
    }

    /// The status's bits as the response carries them.
    pub(crate) fn status(&self, slot: u32) -> i16 {
        let [low, high, ..] = self.get(slot, word::STATUS).to_le_bytes();
        i16::from_le_bytes([low, high])
    }

    pub(crate) fn raw(&self, slot: u32) -> RawSlot {
        let mut longs = [0; SLOT_LONGS];
        self.words.load_run(slot_word(slot, word::RAW), &mut longs);
        RawSlot::from_longs(&longs)
    }

    /// The first four bytes of the request.
    pub(crate) fn head(&self, slot: u32) -> [u8; 4] {
        split(self.get(slot, word::RAW)).0.to_le_bytes()
    }

    /// The id and operation the response has to carry.
    pub(crate) fn echo(&self, slot: u32, abi: Abi) -> (u64, u8) {
        let word_at = |word: usize| {
            let (low, high) = split(self.get(slot, word::RAW.wrapping_add(word / 2)));
            if word.is_multiple_of(2) { low } else { high }
        };
        let first = abi.offsets().id / 4;
        let id = join(word_at(first), word_at(first.wrapping_add(1)));
        (id, echoed_operation(self.head(slot)))
    }

    /// `None` while no segments are stored. Counts and table numbers beyond what there is are cut.
    pub(crate) fn table(&self, slot: u32) -> Option<TableRef> {
        let (table, count) = split(self.get(slot, word::SEGS_VALID));
        let table = table.checked_sub(1)?;
        Some(TableRef { table, count })
    }

    /// The segments of a table. `None` for a word that is no segment, which nobody here stores.
    pub(crate) fn segments(&self, stored: TableRef) -> impl Iterator<Item = Option<Segment>> {
        let first = table_word(self.entries, stored.table);
        let count = (stored.count as usize).min(MAX_INDIRECT_SEGMENTS);
        (0..count).map(move |index| {
            let (gref, sectors) = split(self.words.load(first.wrapping_add(index)));
            Segment::from_words(index, gref, sectors).ok()
        })
    }
}

impl JournalIdentity {
    /// The identity as the header holds it, with the ring's own geometry. Everything is written and
    /// compared as these words, so nothing can be compared that isn't written.
    pub(crate) fn words(&self, abi: Abi, pages: u32) -> [u64; IDENTITY_WORDS] {
        let mut words = [0; IDENTITY_WORDS];
        let [boot_low, boot_high] = halves(self.boot_id);
        let [uuid_low, uuid_high] = halves(self.domain_uuid);
        let abi = match abi {
            Abi::X86_32 => 1,
            Abi::X86_64 => 2,
            Abi::Arm => 3,
        };
        let fields = [
            boot_low,
            boot_high,
            uuid_low,
            uuid_high,
            join(self.domid, self.devid),
            join(self.queue, self.port),
            join(abi, pages),
            u64::from(self.max_indirect_segments),
            self.target_dev,
            self.target_ino,
        ];
        let refs = self.ring_refs.chunks(2).map(|pair| match *pair {
            [low, high] => join(low, high),
            [low] => u64::from(low),
            _ => 0,
        });
        for (word, value) in words.iter_mut().zip(fields.into_iter().chain(refs)) {
            *word = value;
        }
        words
    }
}

fn halves(bytes: [u8; 16]) -> [u64; 2] {
    let value = u128::from_le_bytes(bytes);
    [(value & 0xffff_ffff_ffff_ffff) as u64, (value >> 64) as u64]
}

/// The fields of [`JournalIdentity::words`] are those of the header, in its order.
const _: () = {
    assert!(offset_of!(IdentityWords, boot_id) == 0);
    assert!(offset_of!(IdentityWords, domain_uuid) == 2 * WORD);
    assert!(offset_of!(IdentityWords, domid_devid) == 4 * WORD);
    assert!(offset_of!(IdentityWords, queue_port) == 5 * WORD);
    assert!(offset_of!(IdentityWords, abi_pages) == 6 * WORD);
    assert!(offset_of!(IdentityWords, max_indirect_segments) == 7 * WORD);
    assert!(offset_of!(IdentityWords, target_dev) == 8 * WORD);
    assert!(offset_of!(IdentityWords, target_ino) == 9 * WORD);
    assert!(offset_of!(IdentityWords, ring_refs) == 10 * WORD);
    // A word is stored in one piece only where it is aligned.
    assert!(align_of::<Header>() == WORD && align_of::<Slot>() == WORD);
};
