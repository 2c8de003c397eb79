//! Taking over a ring whose process ended without draining it. Whoever calls this has made sure that
//! the dead process's I/O has ended too; its exit alone proves nothing.

use crate::abi::Abi;
use crate::back::{AttachError, BackRing, index};
use crate::journal::{JournalIdentity, JournalWords, State, TableRef};
use crate::layout::{MAX_INDIRECT_SEGMENTS, RSP_PROD};
use crate::token::Token;
use crate::words::Words;

/// Why a journal is not executed. The ring stays as it is; its frontend has to reconnect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecoverError {
    /// The memory doesn't fit, or the ring's indices don't fit the journal's.
    #[error("{0}")]
    Attach(#[from] AttachError),
    /// No journal, or that of another ring, disk, guest or boot.
    #[error("the journal is not this ring's")]
    Identity,
    /// The ring's own count of responses is not one this journal can have led to.
    #[error("rsp_prod {rsp_prod} of the ring against {published} in the journal: another ring")]
    ForeignRing {
        /// As the ring says.
        rsp_prod: u32,
        /// As the journal says.
        published: u32,
    },
    /// The journal contradicts itself.
    #[error("damaged journal: {0}")]
    Damaged(&'static str),
}

impl<W: Words, J: JournalWords> BackRing<W, J> {
    /// Continues from the journal a dead process left: the requests it finished are published by the
    /// next [`Self::publish`], and those it didn't are returned in the order they came, to be run
    /// again through the same checks as ever (with the stored [`Self::segments`] where there are any).
    /// Afterwards the event channel is unmasked, the ring scanned, and the frontend notified once
    /// whatever `publish` says: nobody knows which events were lost. May itself end after any store.
    ///
    /// # Errors
    /// The journal is not this ring's, or not sound. Nothing may be executed then.
    pub fn recover(
        words: W,
        abi: Abi,
        pages: u32,
        journal: J,
        identity: &JournalIdentity,
    ) -> Result<(Self, Vec<Token>), RecoverError> {
        let mut ring = Self::unattached(words, abi, pages, journal, identity)?;
        if !ring.journal.belongs_to(&identity.words(abi, pages)) {
            return Err(RecoverError::Identity);
        }
        let published = ring.journal.published();
        let rsp_prod = ring.words.load(RSP_PROD);
        if index(published).wrapping_sub(rsp_prod) > ring.entries() {
            let published = index(published);
            return Err(RecoverError::ForeignRing {
                rsp_prod,
                published,
            });
        }
        ring.journal.set_incarnation(identity.incarnation);
        // The commit was P; the store that follows it may be missing, and repeating it is harmless.
        ring.words.store_release(RSP_PROD, index(published));
        let pending = ring.sort_slots(published)?;
        let live = pending.len().saturating_add(ring.done.len());
        let req_cons = published.wrapping_add(u64::try_from(live).unwrap_or(u64::MAX));
        ring.check_sequence(req_cons)?;
        ring.start(published, req_cons);
        ring.look().map_err(AttachError::from)?;
        Ok((ring, pending))
    }

    /// Frees what was published, takes back the places of what wasn't, and gathers the rest: finished
    /// requests in `done`, pending ones as tokens in the order of their ring indices.
    fn sort_slots(&mut self, published: u64) -> Result<Vec<Token>, RecoverError> {
        let mut pending = Vec::new();
        self.free.clear();
        for slot in (0..self.geometry.entries).rev() {
            match self.journal.state(slot) {
                Some(State::Free) => self.free.push(slot),
                Some(State::Done) if self.journal.at(slot) < published => {
                    self.journal.free(slot);
                    self.free.push(slot);
                }
                Some(State::Done) => {
                    self.journal.unplace(slot);
                    self.claim_table(slot)?;
                    self.done.push(slot);
                }
                Some(State::Pending) => {
                    self.journal.unplace(slot);
                    self.claim_table(slot)?;
                    pending.push(slot);
                }
                None => return Err(RecoverError::Damaged("unknown state of a slot")),
            }
        }
        pending.sort_by_key(|&slot| self.journal.seq(slot));
        Ok(pending
            .into_iter()
            .map(|slot| self.home.token(slot))
            .collect())
    }

    /// A live slot's table is in use: by it alone, and full of segments.
    fn claim_table(&mut self, slot: u32) -> Result<(), RecoverError> {
        let Some(stored) = self.journal.table(slot) else {
            return Ok(());
        };
        let TableRef { table, count } = stored;
        let free = self.free_tables.iter().position(|&free| free == table);
        let free = free.ok_or(RecoverError::Damaged(
            "a segment table used twice or not there",
        ))?;
        self.free_tables.swap_remove(free);
        let sound = (1..=MAX_INDIRECT_SEGMENTS).contains(&(count as usize))
            && self
                .journal
                .segments(stored)
                .all(|segment| segment.is_some());
        if sound {
            Ok(())
        } else {
            Err(RecoverError::Damaged("a segment table holds no segments"))
        }
    }

    /// Every live request was consumed once: its ring index is its own, and below `req_cons`.
    fn check_sequence(&self, req_cons: u64) -> Result<(), RecoverError> {
        let live = (0..self.geometry.entries)
            .filter(|slot| !self.free.contains(slot))
            .map(|slot| self.journal.seq(slot));
        let mut live: Vec<u64> = live.collect();
        live.sort_unstable();
        if live.last().is_some_and(|&last| last >= req_cons) {
            return Err(RecoverError::Damaged("a request beyond those consumed"));
        }
        if live.array_windows().any(|[one, next]| one == next) {
            return Err(RecoverError::Damaged("a request stands in two slots"));
        }
        Ok(())
    }
}
