//! The backend's half of a ring: takes requests in, keeps them in the journal, gives responses out.
//! What a request does is the caller's business, and so are the event channel and the order in which
//! requests end.

use std::rc::Rc;

use crate::abi::Abi;
use crate::journal::{self, Journal, JournalIdentity, JournalWords};
use crate::layout::{
    MAX_RING_PAGES, OP_INDIRECT, OP_READ, OP_WRITE, PAGE_SIZE, REQ_EVENT, REQ_PROD,
    RING_HEADER_BYTES, RSP_EVENT, RSP_PROD,
};
use crate::request::{Request, RequestError};
use crate::response::{Response, Status};
use crate::segment::Segment;
use crate::slot::{RawSlot, split};
use crate::token::{Home, Token};
use crate::words::Words;

/// Words of a page.
pub(crate) const PAGE_WORDS: usize = PAGE_SIZE / 4;

/// One ring, owned by one thread. The calls in order: [`Self::attach`] · then for each event
/// [`Self::consume`] until empty, [`Self::request`] for each token, for indirect ones
/// [`Self::store_segments`] before they are submitted · [`Self::finish`] as they end ·
/// [`Self::publish`] once for what has ended, and an event if it says so · [`Self::final_check`]
/// before sleeping.
#[derive(Debug)]
pub struct BackRing<W, J> {
    pub(crate) words: W,
    pub(crate) journal: Journal<J>,
    pub(crate) geometry: Geometry,
    /// Requests consumed: the ring index of the next one. What is in flight is this less `published`.
    pub(crate) req_cons: u64,
    /// P: responses published.
    pub(crate) published: u64,
    /// `req_prod` as last read and checked; everything up to it can be consumed.
    producer: u32,
    poison: Option<Corrupt>,
    /// Journal slots not in use, the last used last.
    pub(crate) free: Vec<u32>,
    /// Segment tables not in use.
    pub(crate) free_tables: Vec<u32>,
    /// Journal slots whose response awaits the next publish.
    pub(crate) done: Vec<u32>,
    pub(crate) home: Rc<Home>,
    counters: Counters,
}

/// What the frontend negotiated, and what follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) abi: Abi,
    pub(crate) entries: u32,
}

impl Geometry {
    pub(crate) fn new<W: Words>(words: &W, abi: Abi, pages: u32) -> Result<Self, AttachError> {
        if !pages.is_power_of_two() || pages > MAX_RING_PAGES {
            return Err(AttachError::Pages { pages });
        }
        let expected = (pages as usize).wrapping_mul(PAGE_WORDS);
        if words.word_count() < expected {
            return Err(AttachError::ShortRing {
                words: words.word_count(),
                expected,
            });
        }
        Ok(Self {
            abi,
            entries: abi.entries(pages),
        })
    }

    /// The first word of the slot that ring index `index` falls into; `entries` is a power of two.
    pub(crate) fn slot_word(self, index: u32) -> usize {
        let slot = index & self.entries.wrapping_sub(1);
        (slot as usize)
            .wrapping_mul(self.abi.slot_words())
            .wrapping_add(RING_HEADER_BYTES / 4)
    }
}

/// Why a ring can't be served at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// Not a ring size.
    #[error("a ring of {pages} pages, expected 1, 2, 4, 8 or 16")]
    Pages {
        /// As asked for.
        pages: u32,
    },
    /// Less memory than the ring has pages.
    #[error("ring memory of {words} words, expected {expected}")]
    ShortRing {
        /// Words given.
        words: usize,
        /// Words needed.
        expected: usize,
    },
    /// Less memory than [`journal_bytes`](crate::journal_bytes).
    #[error("journal memory of {words} 64-bit words, expected {expected}")]
    ShortJournal {
        /// Words given.
        words: usize,
        /// Words needed.
        expected: usize,
    },
    /// The identity names another number of pages.
    #[error("{ring_refs} ring references for a ring of {pages} pages")]
    RingRefs {
        /// Grefs in the identity.
        ring_refs: usize,
        /// Pages of the ring.
        pages: u32,
    },
    /// The frontend's ring is not a ring.
    #[error("{0}")]
    Corrupt(#[from] Corrupt),
}

/// The frontend's producer index is impossible: beyond a ring's worth of unanswered requests, or
/// backwards. The ring is not read again; the rest of the daemon never notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("req_prod {producer} with {consumed} consumed and {unanswered} of {entries} unanswered")]
pub struct Corrupt {
    /// `req_prod` (of a frontend ring `rsp_prod`) as read.
    pub producer: u32,
    /// Index up to which the ring had been consumed.
    pub consumed: u32,
    /// Consumed and unanswered (of a frontend ring: asked and unanswered).
    pub unanswered: u32,
    /// Slots of the ring.
    pub entries: u32,
}

/// All segment tables are in use; one becomes free when an indirect request is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no segment table free")]
pub struct NoSegmentTable;

/// What a publish did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the frontend sleeps until it is notified"]
pub struct Published {
    /// Responses published.
    pub count: u32,
    /// The frontend asked for an event at one of them.
    pub notify: bool,
}

/// What a ring has done since it was attached. Counts per operation are the caller's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests consumed.
    pub consumed: u64,
    /// Responses published.
    pub published: u64,
    /// Publishes with at least one response.
    pub batches: u64,
    /// Publishes after which the frontend had to be notified.
    pub notifies: u64,
    /// Tokens dropped, answered with ERROR.
    pub dropped: u64,
}

impl<W: Words, J: JournalWords> BackRing<W, J> {
    /// Starts on a ring nobody has served since its frontend set it up, or that was left drained:
    /// `rsp_prod` is read here, and never again. Formats `journal`, whatever was in it.
    ///
    /// # Errors
    /// The memory doesn't fit `pages`, or the ring holds more requests than it has slots.
    pub fn attach(
        words: W,
        abi: Abi,
        pages: u32,
        journal: J,
        identity: &JournalIdentity,
    ) -> Result<Self, AttachError> {
        let mut ring = Self::unattached(words, abi, pages, journal, identity)?;
        let published = u64::from(ring.words.load(RSP_PROD));
        ring.start(published, published);
        ring.look()?;
        ring.journal
            .format(&identity.words(abi, pages), identity.incarnation, published);
        Ok(ring)
    }

    /// Checks sizes and makes everything that is ever allocated.
    pub(crate) fn unattached(
        words: W,
        abi: Abi,
        pages: u32,
        journal: J,
        identity: &JournalIdentity,
    ) -> Result<Self, AttachError> {
        let geometry = Geometry::new(&words, abi, pages)?;
        let entries = geometry.entries;
        let expected = journal::journal_words(entries);
        if journal.word_count() < expected {
            return Err(AttachError::ShortJournal {
                words: journal.word_count(),
                expected,
            });
        }
        if identity.ring_refs.len() != pages as usize {
            return Err(AttachError::RingRefs {
                ring_refs: identity.ring_refs.len(),
                pages,
            });
        }
        Ok(Self {
            words,
            journal: Journal::new(journal, entries),
            geometry,
            req_cons: 0,
            published: 0,
            producer: 0,
            poison: None,
            free: (0..entries).rev().collect(),
            free_tables: (0..journal::tables(entries)).rev().collect(),
            done: Vec::with_capacity(entries as usize),
            home: Home::new(entries),
            counters: Counters::default(),
        })
    }

    /// Sets the indices; `producer` follows at the next look.
    pub(crate) fn start(&mut self, published: u64, req_cons: u64) {
        self.published = published;
        self.req_cons = req_cons;
        self.producer = index(req_cons);
    }

    /// Reads `req_prod` once. A ring's worth of requests may be unanswered, counting those consumed, so
    /// no more than the rest of it can be new (ring.h `RING_REQUEST_PROD_OVERFLOW`, which lets an index
    /// that went back behind `req_cons` pass; this doesn't).
    pub(crate) fn look(&mut self) -> Result<(), Corrupt> {
        // Pairs with the frontend's release of req_prod: the slots below it are written.
        let producer = self.words.load_acquire(REQ_PROD);
        let (consumed, unanswered) = (index(self.req_cons), self.in_flight());
        let entries = self.geometry.entries;
        if producer.wrapping_sub(consumed) > entries.wrapping_sub(unanswered) {
            let corrupt = Corrupt {
                producer,
                consumed,
                unanswered,
                entries,
            };
            self.poison = Some(corrupt);
            return Err(corrupt);
        }
        self.producer = producer;
        Ok(())
    }

    /// Whether there is a request to consume. Reads the ring only when all that was seen is consumed.
    ///
    /// # Errors
    /// The ring is poisoned, now or before.
    pub fn has_work(&mut self) -> Result<bool, Corrupt> {
        if let Some(corrupt) = self.poison {
            return Err(corrupt);
        }
        if self.producer == index(self.req_cons) {
            self.look()?;
        }
        Ok(self.producer != index(self.req_cons))
    }

    /// Takes one request: copies its slot into the journal, reading each word once. `None` when the
    /// ring is empty. There are never more unanswered than the ring has entries.
    ///
    /// # Errors
    /// The ring is poisoned, now or before.
    pub fn consume(&mut self) -> Result<Option<Token>, Corrupt> {
        if !self.has_work()? {
            return Ok(None);
        }
        // There is a free slot for each entry that isn't unanswered, and `look` counts those.
        let Some(slot) = self.free.pop() else {
            return Ok(None);
        };
        let first = self.geometry.slot_word(index(self.req_cons));
        let raw = RawSlot::load(&self.words, first, self.geometry.abi);
        self.journal.begin(slot, self.req_cons, &raw);
        self.req_cons = self.req_cons.wrapping_add(1);
        self.counters.consumed = self.counters.consumed.wrapping_add(1);
        Ok(Some(self.home.token(slot)))
    }

    /// What the request says, from the private copy.
    ///
    /// # Errors
    /// It can't be carried out; [`RequestError::status`] is what to finish it with.
    pub fn request(&self, token: &Token) -> Result<Request, RequestError> {
        self.journal.raw(self.slot(token)).parse(self.geometry.abi)
    }

    /// Keeps an indirect request's segments, at most 256. To be called before anything is done with
    /// them: after a crash the guest's page may read differently. What is stored first stays; a
    /// second call changes nothing.
    ///
    /// # Errors
    /// 64 requests have segments stored. Keep the token and try again after a publish.
    pub fn store_segments(
        &mut self,
        token: &Token,
        segments: impl ExactSizeIterator<Item = Segment>,
    ) -> Result<(), NoSegmentTable> {
        let slot = self.slot(token);
        if segments.len() > 0 && self.journal.table(slot).is_none() {
            let table = self.free_tables.pop().ok_or(NoSegmentTable)?;
            self.journal.store_segments(slot, table, segments);
        }
        Ok(())
    }

    /// The segments stored for a request; none if none were.
    pub fn segments(&self, token: &Token) -> impl Iterator<Item = Segment> {
        let stored = self.journal.table(self.slot(token));
        stored
            .into_iter()
            .flat_map(|stored| self.journal.segments(stored))
            .flatten()
    }

    fn slot(&self, token: &Token) -> u32 {
        debug_assert!(token.is_of(&self.home), "token of another ring");
        token.journal_slot()
    }

    /// Ends a request; its response goes out with the next publish. The data of a READ must be in the
    /// guest's pages, and no grant of the request mapped any more that isn't persistent: the frontend
    /// takes its pages back as soon as it sees the response.
    pub fn finish(&mut self, token: Token, status: Status) {
        if let Some(slot) = token.answer(&self.home) {
            self.finish_slot(slot, status);
        }
    }

    fn finish_slot(&mut self, slot: u32, status: Status) {
        let [operation, ..] = self.journal.head(slot);
        let status = match (operation, status) {
            // Windows takes "not supported" for success; Mach never wakes up.
            (OP_READ | OP_WRITE | OP_INDIRECT, Status::NotSupported) => Status::Error,
            (_, status) => status,
        };
        self.journal.finish(slot, status);
        self.done.push(slot);
    }

    /// Publishes the responses of everything finished, in one go: one store of `rsp_prod` and at most
    /// one event. Works on a poisoned ring too, whose requests are owed all the same.
    pub fn publish(&mut self) -> Published {
        while let Some(slot) = self.home.pop_dropped() {
            self.counters.dropped = self.counters.dropped.wrapping_add(1);
            self.finish_slot(slot, Status::Error);
        }
        if self.done.is_empty() {
            return Published {
                count: 0,
                notify: false,
            };
        }
        let old = index(self.published);
        let mut next = self.published;
        for &slot in &self.done {
            self.journal.place(slot, next);
            self.write_response(slot, index(next));
            next = next.wrapping_add(1);
        }
        self.journal.commit_published(next);
        self.published = next;
        let new = index(next);
        // Release: a frontend that sees the index sees the responses below it.
        self.words.store_release(RSP_PROD, new);
        while let Some(slot) = self.done.pop() {
            self.release(slot);
        }
        // Pairs with the fence in the frontend's final check: either it sees the new rsp_prod, or its
        // rsp_event is seen here.
        self.words.full_fence();
        let event = self.words.load(RSP_EVENT);
        let notify = passes(old, new, event);
        let count = new.wrapping_sub(old);
        self.counters.batches = self.counters.batches.wrapping_add(1);
        self.counters.published = self.counters.published.wrapping_add(u64::from(count));
        self.counters.notifies = self.counters.notifies.wrapping_add(u64::from(notify));
        Published { count, notify }
    }

    fn write_response(&self, slot: u32, at: u32) {
        let (id, op) = self.journal.echo(slot, self.geometry.abi);
        let response = Response {
            id,
            op,
            status: self.journal.status(slot),
        };
        response.store(&self.words, self.geometry.slot_word(at), self.geometry.abi);
    }

    /// Gives a journal slot and its segment table back. The table has no mark of its own: it is in use
    /// while a slot that isn't free names it.
    pub(crate) fn release(&mut self, slot: u32) {
        let stored = self.journal.table(slot);
        self.journal.free(slot);
        self.free_tables.extend(stored.map(|stored| stored.table));
        self.free.push(slot);
    }

    /// Before sleeping: asks for an event at the next request, then looks again; true if one came
    /// meanwhile. While a ring is deliberately not consumed this is not called, and no event comes.
    ///
    /// # Errors
    /// The ring is poisoned, now or before.
    pub fn final_check(&mut self) -> Result<bool, Corrupt> {
        if self.has_work()? {
            return Ok(true);
        }
        self.words
            .store(REQ_EVENT, index(self.req_cons).wrapping_add(1));
        // Pairs with the fence in the frontend's publish: either it sees this req_event, or its
        // req_prod is seen here.
        self.words.full_fence();
        self.has_work()
    }

    /// Requests consumed and not yet published, finished ones included.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        index(self.req_cons).wrapping_sub(index(self.published))
    }

    /// Slots of the ring.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.geometry.entries
    }

    /// Requests that the next publish answers, dropped tokens included.
    #[must_use]
    pub fn finished_unpublished(&self) -> u32 {
        u32::try_from(self.done.len())
            .unwrap_or(u32::MAX)
            .saturating_add(self.home.dropped())
    }

    /// What was done so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }
}

/// Ring indices are the low half of the journal's, which never wrap.
pub(crate) fn index(seq: u64) -> u32 {
    split(seq).0
}

/// Whether an index going from `old` to `new` passes `event` (ring.h `RING_PUSH_*_AND_CHECK_NOTIFY`).
pub(crate) fn passes(old: u32, new: u32, event: u32) -> bool {
    new.wrapping_sub(event) < new.wrapping_sub(old)
}
