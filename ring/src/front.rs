//! The frontend's half of a ring, for simulated guests and tests: strict about its own indices, and
//! free to put anything into a slot.

use crate::abi::Abi;
use crate::back::{AttachError, Corrupt, Geometry, PAGE_WORDS, passes};
use crate::layout::{REQ_EVENT, REQ_PROD, RING_HEADER_BYTES, RSP_EVENT, RSP_PROD};
use crate::response::Response;
use crate::slot::RawSlot;
use crate::words::Words;

/// One ring as its frontend sees it: [`Self::push`] requests, [`Self::publish`] them, and on an event
/// [`Self::take`] responses until there are none, with [`Self::final_check`] before sleeping.
#[derive(Debug)]
pub struct FrontRing<W> {
    words: W,
    geometry: Geometry,
    /// The next request's index.
    req_prod: u32,
    /// `req_prod` as last published.
    req_published: u32,
    rsp_cons: u32,
    /// `rsp_prod` as last read and checked.
    producer: u32,
}

/// As many requests as the ring has slots are unanswered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("ring full")]
pub struct RingFull;

impl<W: Words> FrontRing<W> {
    /// Sets up a ring as `SHARED_RING_INIT` does: indices 0, events at 1, padding 0.
    ///
    /// # Errors
    /// The memory doesn't fit `pages`.
    pub fn init(words: W, abi: Abi, pages: u32) -> Result<Self, AttachError> {
        Self::init_at(words, abi, pages, 0)
    }

    /// As [`Self::init`] with all indices at `start`, as after that many requests.
    ///
    /// # Errors
    /// The memory doesn't fit `pages`.
    pub fn init_at(words: W, abi: Abi, pages: u32, start: u32) -> Result<Self, AttachError> {
        let geometry = Geometry::new(&words, abi, pages)?;
        words.store_run(0, &[0; RING_HEADER_BYTES / 4]);
        words.store(REQ_EVENT, start.wrapping_add(1));
        words.store(RSP_EVENT, start.wrapping_add(1));
        words.store_release(RSP_PROD, start);
        words.store_release(REQ_PROD, start);
        let (req_prod, req_published, rsp_cons, producer) = (start, start, start, start);
        Ok(Self {
            words,
            geometry,
            req_prod,
            req_published,
            rsp_cons,
            producer,
        })
    }

    /// The shared memory, for frontends that misbehave.
    pub fn words(&self) -> &W {
        &self.words
    }

    /// Requests that can be pushed.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.geometry.entries.wrapping_sub(self.in_flight())
    }

    /// Requests pushed and not answered, published or not.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.req_prod.wrapping_sub(self.rsp_cons)
    }

    /// Writes one request; the backend sees it with the next publish.
    ///
    /// # Errors
    /// No slot is free.
    pub fn push(&mut self, request: &RawSlot) -> Result<(), RingFull> {
        if self.free() == 0 {
            return Err(RingFull);
        }
        let first = self.geometry.slot_word(self.req_prod);
        self.words
            .store_run(first, request.as_words(self.geometry.abi));
        self.req_prod = self.req_prod.wrapping_add(1);
        Ok(())
    }

    /// Publishes what was pushed; true if the backend asked for an event at one of them.
    #[must_use = "the backend sleeps until it is notified"]
    pub fn publish(&mut self) -> bool {
        let old = self.req_published;
        self.req_published = self.req_prod;
        // Release: a backend that sees the index sees the requests below it.
        self.words.store_release(REQ_PROD, self.req_prod);
        // Pairs with the fence in the backend's final check.
        self.words.full_fence();
        passes(old, self.req_prod, self.words.load(REQ_EVENT))
    }

    /// Takes one response; `None` when there is none.
    ///
    /// # Errors
    /// The backend published more responses than it was asked requests.
    pub fn take(&mut self) -> Result<Option<Response>, Corrupt> {
        if !self.has_responses()? {
            return Ok(None);
        }
        let response = Response::load(&self.words, self.geometry.slot_word(self.rsp_cons));
        self.rsp_cons = self.rsp_cons.wrapping_add(1);
        Ok(Some(response))
    }

    fn has_responses(&mut self) -> Result<bool, Corrupt> {
        if self.producer == self.rsp_cons {
            // Pairs with the backend's release of rsp_prod.
            let producer = self.words.load_acquire(RSP_PROD);
            let (consumed, entries) = (self.rsp_cons, self.geometry.entries);
            let unanswered = self.req_published.wrapping_sub(consumed);
            if producer.wrapping_sub(consumed) > unanswered {
                return Err(Corrupt {
                    producer,
                    consumed,
                    unanswered,
                    entries,
                });
            }
            self.producer = producer;
        }
        Ok(self.producer != self.rsp_cons)
    }

    /// Before sleeping: asks for an event at the next response, then looks again; true if one came
    /// meanwhile.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn final_check(&mut self) -> Result<bool, Corrupt> {
        if self.has_responses()? {
            return Ok(true);
        }
        self.words.store(RSP_EVENT, self.rsp_cons.wrapping_add(1));
        // Pairs with the fence in the backend's publish.
        self.words.full_fence();
        self.has_responses()
    }
}

const _: () = assert!(PAGE_WORDS == 1024);
