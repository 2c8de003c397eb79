//! The protocol crate: slots, indirect pages, lying indices, journals of the dead.

use std::iter::repeat_n;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use xenblk_ring::journal::word;
use xenblk_ring::layout::{
    MAX_INDIRECT_SEGMENTS, OP_INDIRECT, PAGE_SIZE, REQ_PROD, SEGMENTS_PER_PAGE,
};
use xenblk_ring::{
    Abi, BackRing, FrontRing, HeapWords, IndirectRequest, JournalIdentity, RawSlot, Request,
    RequestError, Segment, Status, Token, Words, decode_indirect_page, heap_words, journal_bytes,
};

use super::Input;

const ABIS: [Abi; 3] = [Abi::X86_64, Abi::X86_32, Abi::Arm];

type Journal = Arc<[AtomicU64]>;
type Back = BackRing<HeapWords, Journal>;

fn assert_in_range(segments: &[Segment]) {
    for segment in segments {
        assert!(segment.offset() + segment.len() <= PAGE_SIZE);
        assert!(segment.len() >= 512);
    }
}

/// A slot's bytes in every layout: what is accepted is in range and survives being written again; what
/// is not is answered under its own id and inner operation.
pub(super) fn slot(data: &[u8]) {
    let bytes = Input(data).array();
    let slot = RawSlot::from_bytes(&bytes);
    for abi in ABIS {
        let id_at = if abi == Abi::X86_32 { 4 } else { 8 };
        let id = u64::from_le_bytes(*bytes[id_at..].first_chunk().unwrap_or(&[0; 8]));
        match slot.parse(abi) {
            Ok(request) => {
                let again = request.encode(abi).parse(abi);
                match request {
                    Request::Indirect(indirect) => check_indirect(&indirect, again),
                    request => assert_eq!(again, Ok(request)),
                }
                if let Request::Rw(rw) = request {
                    assert_in_range(rw.segments.as_slice());
                }
            }
            Err(error) => {
                assert_eq!(error.id, id);
                let inner = bytes[0] == OP_INDIRECT;
                assert_eq!(error.op, bytes[usize::from(inner)]);
                assert!(!error.to_string().is_empty());
            }
        }
    }
}

/// Grefs beyond those needed are no part of it.
fn check_indirect(request: &IndirectRequest, again: Result<Request, RequestError>) {
    let count = usize::from(request.nr_segments());
    assert!((1..=MAX_INDIRECT_SEGMENTS).contains(&count));
    assert_eq!(request.grefs().len(), count.div_ceil(SEGMENTS_PER_PAGE));
    let shown = |request: &IndirectRequest| {
        let grefs = request.grefs().to_vec();
        (
            request.id,
            request.op,
            request.sector,
            request.nr_segments(),
            grefs,
        )
    };
    match again {
        Ok(Request::Indirect(again)) => assert_eq!(shown(&again), shown(request)),
        other => unreachable!("{request:?} became {other:?}"),
    }
}

/// The descriptors of an indirect page, and how many the slot says there are.
pub(super) fn indirect_page(data: &[u8]) {
    let mut input = Input(data);
    let count = usize::from(input.u16());
    let page = input.bytes(PAGE_SIZE);
    if let Ok(segments) = decode_indirect_page(page, count) {
        let segments: Vec<Segment> = segments.collect();
        assert_eq!(segments.len(), count);
        assert_in_range(&segments);
    }
}

fn identity(pages: u32) -> JournalIdentity {
    JournalIdentity {
        boot_id: [1; 16],
        domain_uuid: [2; 16],
        domid: 3,
        devid: 51712,
        queue: 0,
        ring_refs: (8..8 + pages).collect(),
        port: 4,
        max_indirect_segments: 256,
        incarnation: 1,
        target_dev: 5,
        target_ino: 6,
    }
}

fn empty_journal(abi: Abi, pages: u32) -> Journal {
    let words = journal_bytes(abi.entries(pages)) / 8;
    (0..words).map(|_| AtomicU64::new(0)).collect()
}

/// A backend with what it has taken in, and the memory it shares with its guest.
struct Served {
    back: Back,
    taken: Vec<Token>,
    words: HeapWords,
    journal: Journal,
    abi: Abi,
    pages: u32,
}

impl Served {
    fn new(abi: Abi, pages: u32, start: u32) -> Self {
        let (words, journal) = (heap_words(pages), empty_journal(abi, pages));
        let front = FrontRing::init_at(words.clone(), abi, pages, start);
        assert!(front.is_ok());
        let back = BackRing::attach(words.clone(), abi, pages, journal.clone(), &identity(pages));
        let Ok(back) = back else {
            unreachable!("a ring just set up")
        };
        Self {
            back,
            taken: Vec::new(),
            words,
            journal,
            abi,
            pages,
        }
    }

    fn consume(&mut self) {
        for _ in 0..=self.back.entries() {
            let Ok(Some(token)) = self.back.consume() else {
                return;
            };
            self.look_at(&token);
            self.taken.push(token);
        }
        unreachable!("more requests than the ring has entries");
    }

    /// Requests and segments must be looked at without harm, however they came to be in the journal.
    fn look_at(&mut self, token: &Token) {
        if let Ok(Request::Indirect(indirect)) = self.back.request(token) {
            let count = usize::from(indirect.nr_segments());
            let Some(segment) = Segment::new(u32::from(indirect.nr_segments()), 0, 7) else {
                unreachable!("a whole page")
            };
            // Tables are fewer than entries.
            let stored = self.back.store_segments(token, repeat_n(segment, count));
            if stored.is_ok() {
                assert_eq!(self.back.segments(token).count(), count);
            }
        }
        let segments: Vec<Segment> = self.back.segments(token).collect();
        assert_in_range(&segments);
    }

    fn finish_one(&mut self, nth: u8) {
        if !self.taken.is_empty() {
            let token = self.taken.swap_remove(usize::from(nth) % self.taken.len());
            self.back.finish(token, Status::Okay);
        }
    }

    fn publish(&mut self) {
        let owed = self.back.finished_unpublished();
        assert_eq!(self.back.publish().count, owed);
        assert_eq!(self.back.finished_unpublished(), 0);
    }

    /// The backend dies and its successor takes over.
    fn die(&mut self) -> bool {
        let recovered = BackRing::recover(
            self.words.clone(),
            self.abi,
            self.pages,
            self.journal.clone(),
            &identity(self.pages),
        );
        match recovered {
            Ok((back, pending)) => {
                // The dead one's tokens are nobody's now.
                std::mem::take(&mut self.taken).clear();
                self.back = back;
                for token in pending {
                    let segments: Vec<Segment> = self.back.segments(&token).collect();
                    assert_in_range(&segments);
                    // Parsed again, whatever it was.
                    let _ = self.back.request(&token);
                    self.taken.push(token);
                }
                true
            }
            Err(error) => {
                assert!(!error.to_string().is_empty());
                false
            }
        }
    }

    fn check(&self) {
        let entries = self.back.entries();
        let (taken, unpublished) = (self.taken.len() as u32, self.back.finished_unpublished());
        assert!(self.back.in_flight() <= entries);
        assert_eq!(self.back.in_flight(), taken + unpublished);
    }

    /// Everything that was taken in is answered, once.
    fn drain(mut self) {
        for token in std::mem::take(&mut self.taken) {
            self.back.finish(token, Status::Error);
        }
        self.publish();
        assert_eq!(self.back.in_flight(), 0);
    }
}

fn geometry(input: &mut Input<'_>) -> (Abi, u32) {
    (input.pick(&ABIS), input.pick(&[1, 1, 1, 2, 2, 16]))
}

/// A guest that writes anything anywhere in its ring while a backend serves it, dies and comes back.
pub(super) fn indices(data: &[u8]) {
    let mut input = Input(data);
    let (abi, pages) = geometry(&mut input);
    let mut served = Served::new(abi, pages, input.pick(&[0, u32::MAX - 5, 1 << 31]));
    while !input.is_empty() {
        match input.u8() % 8 {
            0 => {
                let (at, value) = (input.u16(), input.u32());
                served.words.store(usize::from(at), value);
            }
            1 => served
                .words
                .store(usize::from(input.u8() % 16), input.u32()),
            2 => {
                let more = served
                    .words
                    .load(REQ_PROD)
                    .wrapping_add(u32::from(input.u8()));
                served.words.store_release(REQ_PROD, more);
            }
            3 => served.consume(),
            4 => served.finish_one(input.u8()),
            5 => served.publish(),
            6 => {
                // A poisoned ring says so each time.
                let _ = served.back.final_check();
            }
            _ => {
                served.publish();
                if !served.die() {
                    return;
                }
            }
        }
        served.check();
    }
    served.drain();
}

/// A journal that was written to by anybody: it is refused, or what it holds is carried out to the end.
pub(super) fn journal(data: &[u8]) {
    let mut input = Input(data);
    let (abi, pages) = geometry(&mut input);
    let mut served = Served::new(abi, pages, input.pick(&[0, u32::MAX - 5]));
    // A few requests to start from.
    for _ in 0..input.u8() % 8 {
        served
            .words
            .store_release(REQ_PROD, served.words.load(REQ_PROD).wrapping_add(1));
        served.consume();
        if input.u8().is_multiple_of(2) {
            served.finish_one(0);
        }
    }
    while !input.is_empty() {
        let (kind, at) = (input.u8(), usize::from(input.u16()));
        let fields = [
            word::SEQ,
            word::AT,
            word::SEGS_VALID,
            word::STATUS,
            word::STATE,
            word::RAW,
        ];
        let slot = word::SLOTS + at % abi.entries(pages) as usize * word::SLOT_STRIDE;
        let index = match kind % 4 {
            0 => at,
            1 => word::PUBLISHED,
            _ => slot + fields[usize::from(kind / 4) % fields.len()],
        };
        let value = if kind >= 128 {
            u64::from(input.u8())
        } else {
            input.u64()
        };
        if kind.is_multiple_of(16) {
            served.words.store(at % 4, value as u32);
        } else if let Some(kept) = served.journal.get(index) {
            kept.store(value, Ordering::Relaxed);
        }
    }
    if served.die() {
        served.check();
        served.publish();
        served.consume();
        served.check();
        served.drain();
    }
}
