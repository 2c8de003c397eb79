//! The two halves of a ring against each other, and the backend's half against frontends that lie.

mod rig;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

use proptest::prelude::*;
use rig::{identity, journal};
use xenblk_ring::layout::{REQ_EVENT, REQ_PROD, RING_HEADER_BYTES, RSP_EVENT, RSP_PROD};
use xenblk_ring::{
    Abi, AttachError, BackRing, FrontRing, HeapWords, IndirectRequest, ProbeWords, RawSlot,
    RecoverError, Request, Response, RwOp, Segment, Status, Words, heap_words,
};

const UNKNOWN: u8 = 0xee;

type Back<W> = BackRing<W, Vec<AtomicU64>>;

fn attach<W: Words>(words: W, abi: Abi, pages: u32) -> Back<W> {
    BackRing::attach(words, abi, pages, journal(abi, pages), &identity(pages)).unwrap()
}

/// Both halves on the same memory, their indices starting at `start`.
fn pair_at<W: Words + Clone>(
    words: &W,
    abi: Abi,
    pages: u32,
    start: u32,
) -> (FrontRing<W>, Back<W>) {
    let front = FrontRing::init_at(words.clone(), abi, pages, start).unwrap();
    (front, attach(words.clone(), abi, pages))
}

fn read_of_nothing(abi: Abi, id: u64) -> RawSlot {
    RawSlot::with_operation(abi, 0, id)
}

fn slot_word(abi: Abi, index: u32, entries: u32) -> usize {
    (RING_HEADER_BYTES + (index % entries) as usize * abi.slot_bytes()) / 4
}

#[test]
fn every_request_comes_back_once_over_every_size() {
    for (abi, order) in Abi::ALL
        .into_iter()
        .flat_map(|abi| (0..=4).map(move |o| (abi, o)))
    {
        let pages = 1 << order;
        let (mut front, mut back) = pair_at(&heap_words(pages), abi, pages, u32::MAX - 40);
        assert_eq!(back.entries(), 32 << order);
        let (mut next, mut answered) = (0, 0);
        while answered < 3 * u64::from(back.entries()) {
            while front.free() > 0 {
                front
                    .push(&RawSlot::with_operation(abi, UNKNOWN, next))
                    .unwrap();
                next += 1;
            }
            front
                .push(&RawSlot::with_operation(abi, UNKNOWN, next))
                .unwrap_err();
            let _ = front.publish();
            while let Some(token) = back.consume().unwrap() {
                let error = back.request(&token).unwrap_err();
                back.finish(token, error.status());
            }
            assert_eq!(back.finished_unpublished(), back.entries());
            assert_eq!(back.publish().count, back.entries());
            while let Some(response) = front.take().unwrap() {
                assert_eq!(
                    response,
                    Response {
                        id: answered,
                        op: UNKNOWN,
                        status: -2
                    }
                );
                answered += 1;
            }
        }
        let counters = back.counters();
        assert_eq!(
            (counters.consumed, counters.published, counters.dropped),
            (next, next, 0)
        );
    }
}

/// A slot of 108 bytes or 112 doesn't divide a page: some lie across two.
#[test]
fn slots_stand_where_blkif_puts_them_also_across_pages() {
    for abi in Abi::ALL {
        let words = heap_words(4);
        let (mut front, mut back) = pair_at(&words, abi, 4, 0);
        let mut crossing = 0;
        for index in 0..back.entries() {
            let bytes: [u8; 112] = std::array::from_fn(|at| (at as u8) ^ (index as u8));
            let raw = RawSlot::from_bytes(&bytes);
            front.push(&raw).unwrap();
            let start = RING_HEADER_BYTES + index as usize * abi.slot_bytes();
            crossing += usize::from(start / 4096 != (start + abi.slot_bytes() - 1) / 4096);
            for (offset, expected) in bytes[..abi.slot_bytes()].chunks(4).enumerate() {
                let word = words.load(start / 4 + offset);
                assert_eq!(
                    word.to_le_bytes(),
                    expected,
                    "{abi:?} slot {index} word {offset}"
                );
            }
            let _ = front.publish();
            let token = back.consume().unwrap().unwrap();
            let id_at = if abi == Abi::X86_32 { 4 } else { 8 };
            let id = u64::from_le_bytes(bytes[id_at..id_at + 8].try_into().unwrap());
            if let Err(error) = back.request(&token) {
                assert_eq!(error.id, id, "{abi:?} slot {index}");
            }
            back.finish(token, Status::Okay);
            let _ = back.publish();
            assert_eq!(front.take().unwrap().unwrap().id, id);
        }
        assert_eq!(crossing, if abi == Abi::X86_32 { 3 } else { 2 }, "{abi:?}");
    }
}

#[test]
fn a_response_covers_every_byte_of_its_slot_and_no_other() {
    for abi in Abi::ALL {
        let words = heap_words(1);
        let (mut front, mut back) = pair_at(&words, abi, 1, 0);
        front
            .push(&read_of_nothing(abi, 0x0102_0304_0506_0708))
            .unwrap();
        let _ = front.publish();
        let token = back.consume().unwrap().unwrap();
        for word in RING_HEADER_BYTES / 4..words.word_count() {
            words.store(word, 0xdead_beef);
        }
        back.finish(token, Status::Error);
        let _ = back.publish();
        let first = slot_word(abi, 0, 32);
        let slot: Vec<u8> = (0..abi.slot_bytes() / 4)
            .flat_map(|at| words.load(first + at).to_le_bytes())
            .collect();
        assert_eq!(slot[..12], [8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0xff, 0xff]);
        assert!(
            slot[12..].iter().all(|&byte| byte == 0),
            "{abi:?}: {slot:x?}"
        );
        assert_eq!(words.load(first + abi.slot_bytes() / 4), 0xdead_beef);
    }
}

/// Memory that changes right after it is read, wherever it is read: one snapshot decides.
#[test]
fn nothing_the_guest_may_change_is_read_twice() {
    for abi in Abi::ALL {
        let words = ProbeWords::new(1);
        let (mut front, mut back) = pair_at(&words, abi, 1, 0);
        let segment = Segment::new(77, 1, 6).unwrap();
        let segments = xenblk_ring::DirectSegments::new(&[segment; 3]).unwrap();
        let request = Request::Rw(xenblk_ring::RwRequest {
            id: 5,
            op: RwOp::Write,
            sector: 9,
            segments,
        });
        front.push(&request.encode(abi)).unwrap();
        front.push(&request.encode(abi)).unwrap();
        let _ = front.publish();
        words.forget();
        for word in 0..words.word_count() {
            words.rewrite_after_load(word, 0xffff_ffff);
        }
        for index in 0..2 {
            let token = back.consume().unwrap().unwrap();
            assert_eq!(back.request(&token).unwrap(), request);
            assert_eq!(back.request(&token).unwrap(), request);
            let first = slot_word(abi, index, 32);
            for word in first..first + abi.slot_bytes() / 4 {
                assert_eq!(words.loads(word), 1, "{abi:?} word {word}");
            }
            back.finish(token, Status::Okay);
        }
        assert_eq!(words.loads(REQ_PROD), 1, "once for the whole batch");
        let _ = back.publish();
        assert_eq!(words.loads(RSP_EVENT), 1);
        assert_eq!(
            words.loads(RSP_PROD),
            0,
            "the shared rsp_prod is the guest's to scribble on"
        );
        assert_eq!(words.loads(REQ_EVENT), 0);
        let slots = RING_HEADER_BYTES / 4..words.word_count();
        let total: u32 = slots.map(|word| words.loads(word)).sum();
        assert_eq!(
            total as usize,
            2 * abi.slot_bytes() / 4,
            "no other slot was touched"
        );
        // The index read above has changed since: now the ring is seen to be corrupt.
        assert_eq!(back.consume().unwrap_err().producer, 0xffff_ffff);
    }
}

/// `consumed` requests taken and `answered` of them answered, the producer then moved to `lie`.
fn lied_to(start: u32, consumed: u32, answered: u32, lie: u32) -> (HeapWords, Back<HeapWords>) {
    let words = heap_words(1);
    let (mut front, mut back) = pair_at(&words, Abi::X86_64, 1, start);
    for id in 0..consumed {
        front
            .push(&read_of_nothing(Abi::X86_64, u64::from(id)))
            .unwrap();
    }
    let _ = front.publish();
    let mut held = Vec::new();
    while let Some(token) = back.consume().unwrap() {
        held.push(token);
    }
    for token in held.drain(..answered as usize) {
        back.finish(token, Status::Error);
    }
    let _ = back.publish();
    for token in held {
        back.finish(token, Status::Error);
    }
    words.store(REQ_PROD, lie);
    (words, back)
}

#[test]
fn impossible_producers_poison_the_ring_and_only_the_ring() {
    for start in [0, 5, u32::MAX - 3, 0x7fff_fff0] {
        let (consumed, answered) = (10, 4);
        let at = |offset: u32| start.wrapping_add(offset);
        // 26 more fit: 32 entries less 6 unanswered.
        let lies = [
            at(10 + 27),
            at(10 + 32),
            at(10 + 33),
            at(9),
            at(4),
            at(3),
            at(10).wrapping_add(1 << 31),
            at(10).wrapping_sub(1 << 31).wrapping_sub(1),
            at(0).wrapping_sub(1),
            at(10).wrapping_sub(33),
        ];
        for lie in lies {
            let (words, mut back) = lied_to(start, consumed, answered, lie);
            let corrupt = back.has_work().unwrap_err();
            assert_eq!(
                (corrupt.producer, corrupt.unanswered, corrupt.entries),
                (lie, 6, 32)
            );
            // Making it plausible again changes nothing.
            words.store(REQ_PROD, at(11));
            assert_eq!(back.consume().unwrap_err(), corrupt);
            assert_eq!(back.final_check().unwrap_err(), corrupt);
            // What was consumed is answered all the same.
            assert_eq!(back.publish().count, 6);
            assert_eq!((back.in_flight(), words.load(RSP_PROD)), (0, at(10)));
        }
        let (_, mut back) = lied_to(start, consumed, answered, at(10 + 26));
        let taken = std::iter::from_fn(|| back.consume().unwrap()).collect::<Vec<_>>();
        assert_eq!(
            (taken.len(), back.in_flight()),
            (26, 32),
            "full to the brim is legal"
        );
    }
}

#[test]
fn attach_takes_rsp_prod_once_and_bounds_it() {
    let words = heap_words(1);
    let front = FrontRing::init_at(words.clone(), Abi::X86_32, 1, 0xffff_fff0).unwrap();
    let attach = || {
        let journal = journal(Abi::X86_32, 1);
        BackRing::attach(words.clone(), Abi::X86_32, 1, journal, &identity(1))
    };
    words.store(REQ_PROD, 0xffff_fff0_u32.wrapping_add(33));
    assert!(matches!(attach().unwrap_err(), AttachError::Corrupt(c) if c.unanswered == 0));
    words.store(REQ_PROD, 0xffff_ffef);
    assert!(matches!(attach().unwrap_err(), AttachError::Corrupt(_)));
    words.store(REQ_PROD, 0xffff_fff0_u32.wrapping_add(32));
    let mut back = attach().unwrap();
    words.store(RSP_PROD, 1234);
    for _ in 0..32 {
        let token = back.consume().unwrap().unwrap();
        back.finish(token, Status::Error);
    }
    assert!(back.consume().unwrap().is_none());
    assert_eq!(back.publish().count, 32);
    assert_eq!(front.words().load(RSP_PROD), 16);
}

#[test]
fn what_does_not_fit_is_refused() {
    let attach = |ring_pages, pages, journal_pages, refs| {
        let journal = journal(Abi::X86_64, journal_pages);
        let words = heap_words(ring_pages);
        BackRing::attach(words, Abi::X86_64, pages, journal, &identity(refs)).unwrap_err()
    };
    for pages in [0, 3, 17, 32, u32::MAX] {
        assert_eq!(attach(16, pages, 16, 1), AttachError::Pages { pages });
    }
    assert!(matches!(
        attach(1, 2, 2, 2),
        AttachError::ShortRing { words: 1024, .. }
    ));
    assert!(matches!(
        attach(2, 2, 1, 2),
        AttachError::ShortJournal { .. }
    ));
    assert!(matches!(
        attach(2, 2, 2, 1),
        AttachError::RingRefs {
            ring_refs: 1,
            pages: 2
        }
    ));
    assert_eq!(Abi::X86_64.entries(0), 0);
    assert_eq!(Abi::X86_64.entries(17), 0);
}

#[test]
fn a_dropped_token_is_answered_with_error_and_counted() {
    let (mut front, mut back) = pair_at(&heap_words(1), Abi::Arm, 1, 0);
    for id in 0..3 {
        front.push(&read_of_nothing(Abi::Arm, id)).unwrap();
    }
    let _ = front.publish();
    let first = back.consume().unwrap().unwrap();
    drop(back.consume().unwrap().unwrap());
    let last = back.consume().unwrap().unwrap();
    assert_eq!((back.in_flight(), back.finished_unpublished()), (3, 1));
    back.finish(last, Status::Okay);
    assert_eq!(back.publish().count, 2);
    let mut answers = BTreeMap::new();
    while let Some(response) = front.take().unwrap() {
        answers.insert(response.id, response.status);
    }
    assert_eq!(answers, BTreeMap::from([(1, -1), (2, 0)]));
    assert_eq!((back.counters().dropped, back.in_flight()), (1, 1));
    // A token that outlives its ring is nobody's.
    drop(back);
    drop(first);
}

#[test]
fn a_token_given_to_another_ring_is_answered_by_its_own() {
    let (mut front, mut back) = pair_at(&heap_words(1), Abi::Arm, 1, 0);
    let (_, mut other) = pair_at(&heap_words(1), Abi::Arm, 1, 0);
    front.push(&read_of_nothing(Abi::Arm, 1)).unwrap();
    let _ = front.publish();
    let token = back.consume().unwrap().unwrap();
    other.finish(token, Status::Okay);
    assert_eq!((other.publish().count, back.publish().count), (0, 1));
    assert_eq!(front.take().unwrap().unwrap().status, -1);
}

/// Windows takes "not supported" for success, so no READ or WRITE may be answered so.
#[test]
fn transfers_are_never_answered_not_supported() {
    for (operation, expected) in [
        (0, -1),
        (1, -1),
        (6, -1),
        (2, -2),
        (3, -2),
        (5, -2),
        (99, -2),
    ] {
        let (mut front, mut back) = pair_at(&heap_words(1), Abi::X86_64, 1, 0);
        front
            .push(&RawSlot::with_operation(Abi::X86_64, operation, 1))
            .unwrap();
        let _ = front.publish();
        let token = back.consume().unwrap().unwrap();
        back.finish(token, Status::NotSupported);
        let _ = back.publish();
        assert_eq!(
            front.take().unwrap().unwrap().status,
            expected,
            "operation {operation}"
        );
    }
}

#[test]
fn segment_tables_are_64_and_come_back_with_their_requests() {
    let (mut front, mut back) = pair_at(&heap_words(4), Abi::X86_64, 4, 0);
    let request = IndirectRequest::new(1, RwOp::Read, 0, 256, [9; 8]).unwrap();
    for _ in 0..66 {
        front
            .push(&Request::Indirect(request).encode(Abi::X86_64))
            .unwrap();
    }
    let _ = front.publish();
    let list = |seed: u32| (0..256).map(move |n| Segment::new(seed * 1000 + n, 0, 7).unwrap());
    let lists = |seed| list(seed).collect::<Vec<_>>().into_iter();
    let mut tokens: Vec<_> = std::iter::from_fn(|| back.consume().unwrap()).collect();
    for (seed, token) in (0..64).zip(&tokens) {
        assert_eq!(back.segments(token).count(), 0);
        back.store_segments(token, lists(seed)).unwrap();
        // What is stored first stays.
        back.store_segments(token, lists(seed + 100)).unwrap();
    }
    back.store_segments(&tokens[64], lists(64)).unwrap_err();
    for (seed, token) in (0..64).zip(&tokens) {
        assert!(
            back.segments(token).eq(list(seed)),
            "table of request {seed}"
        );
    }
    back.finish(tokens.remove(10), Status::Okay);
    back.store_segments(&tokens[63], lists(64)).unwrap_err();
    let _ = back.publish();
    back.store_segments(&tokens[63], lists(64)).unwrap();
    back.store_segments(&tokens[64], lists(65)).unwrap_err();
    assert!(back.segments(&tokens[63]).eq(list(64)));
    // A new request in the freed slot starts without segments.
    front.take().unwrap().unwrap();
    front
        .push(&Request::Indirect(request).encode(Abi::X86_64))
        .unwrap();
    let _ = front.publish();
    let token = back.consume().unwrap().unwrap();
    assert_eq!(back.segments(&token).count(), 0);
}

#[test]
fn a_journal_is_executed_only_for_the_ring_it_belongs_to() {
    let words = heap_words(1);
    let memory = std::sync::Arc::<[_]>::from(journal(Abi::X86_64, 1));
    let mut front = FrontRing::init(words.clone(), Abi::X86_64, 1).unwrap();
    let recover = |abi, identity: &xenblk_ring::JournalIdentity| {
        BackRing::recover(words.clone(), abi, 1, memory.clone(), identity)
            .map(|(_, pending)| pending.len())
    };
    assert_eq!(
        recover(Abi::X86_64, &identity(1)).unwrap_err(),
        RecoverError::Identity
    );
    let attached =
        BackRing::attach(words.clone(), Abi::X86_64, 1, memory.clone(), &identity(1)).unwrap();
    drop(attached);
    assert_eq!(recover(Abi::X86_64, &identity(1)), Ok(0));
    assert_eq!(recover(Abi::Arm, &identity(1)), Err(RecoverError::Identity));
    let changes: [fn(&mut xenblk_ring::JournalIdentity); 10] = [
        |id| id.boot_id[15] ^= 1,
        |id| id.domain_uuid[0] ^= 1,
        |id| id.domid ^= 1,
        |id| id.devid ^= 1,
        |id| id.queue ^= 1,
        |id| id.ring_refs[0] ^= 1,
        |id| id.port ^= 1,
        |id| id.max_indirect_segments ^= 1,
        |id| id.target_dev ^= 1,
        |id| id.target_ino ^= 1,
    ];
    for change in changes {
        let mut other = identity(1);
        change(&mut other);
        assert_eq!(
            recover(Abi::X86_64, &other),
            Err(RecoverError::Identity),
            "{other:?}"
        );
    }
    let mut next_life = identity(1);
    next_life.incarnation += 1;
    assert_eq!(recover(Abi::X86_64, &next_life), Ok(0));
    // The same pages with other indices: a ring set up anew.
    words.store(RSP_PROD, 1);
    let foreign = RecoverError::ForeignRing {
        rsp_prod: 1,
        published: 0,
    };
    assert_eq!(recover(Abi::X86_64, &identity(1)), Err(foreign));
    words.store(RSP_PROD, 0);
    front.push(&read_of_nothing(Abi::X86_64, 0)).unwrap();
    words.store(REQ_PROD, 33);
    let error = recover(Abi::X86_64, &identity(1)).unwrap_err();
    assert!(
        matches!(error, RecoverError::Attach(AttachError::Corrupt(_))),
        "{error}"
    );
}

/// Whatever stands in the journal, recovering it neither panics nor makes a request out of nothing.
#[test]
fn a_scribbled_journal_is_refused_or_harmless() {
    use std::sync::atomic::Ordering::Relaxed;
    use xenblk_ring::journal::word;
    let words = heap_words(1);
    let mut front = FrontRing::init(words.clone(), Abi::X86_64, 1).unwrap();
    for id in 0..4 {
        front.push(&read_of_nothing(Abi::X86_64, id)).unwrap();
    }
    let _ = front.publish();
    let memory = std::sync::Arc::<[_]>::from(journal(Abi::X86_64, 1));
    let attach =
        || BackRing::attach(words.clone(), Abi::X86_64, 1, memory.clone(), &identity(1)).unwrap();
    let fields = [
        word::SEQ,
        word::AT,
        word::SEGS_VALID,
        word::STATUS,
        word::STATE,
    ];
    let values = [
        0,
        1,
        2,
        3,
        4,
        33,
        1 << 32 | 1,
        257 << 32 | 1,
        2 << 32 | 99,
        u64::MAX,
    ];
    let mut refused = 0;
    for (field, value) in fields.into_iter().flat_map(|f| values.map(|v| (f, v))) {
        let mut back = attach();
        let tokens: Vec<_> = std::iter::from_fn(|| back.consume().unwrap()).collect();
        let slot = tokens[1].slot();
        drop((tokens, back));
        memory[word::SLOTS + slot * word::SLOT_STRIDE + field].store(value, Relaxed);
        match BackRing::recover(words.clone(), Abi::X86_64, 1, memory.clone(), &identity(1)) {
            Ok((ring, pending)) => {
                assert!(pending.len() <= 4 && ring.in_flight() <= 4);
            }
            Err(_) => refused += 1,
        }
    }
    // Unknown states, lost requests, sequences beyond or doubled, tables that aren't there.
    assert!(refused >= 15, "{refused}");
}

#[derive(Clone, Debug)]
enum Step {
    Push(u32),
    FrontPublish,
    Consume(u32),
    Finish(usize),
    Drop(usize),
    BackPublish,
    Take(u32),
    FrontSleep,
    BackSleep,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1..40_u32).prop_map(Step::Push),
        3 => Just(Step::FrontPublish),
        3 => (1..40_u32).prop_map(Step::Consume),
        8 => any::<usize>().prop_map(Step::Finish),
        1 => any::<usize>().prop_map(Step::Drop),
        3 => Just(Step::BackPublish),
        3 => (1..40_u32).prop_map(Step::Take),
        2 => Just(Step::FrontSleep),
        2 => Just(Step::BackSleep),
    ]
}

/// What `RING_PUSH_*_AND_CHECK_NOTIFY` means: the index went over the one asked for.
fn went_over(old: u32, new: u32, event: u32) -> bool {
    (1..=new.wrapping_sub(old)).any(|n| old.wrapping_add(n) == event)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Any order of everything both sides can do: one answer per request, events exactly when asked
    /// for, and nobody sleeps while there is something to do for him.
    #[test]
    fn halves_agree(
        start in prop_oneof![Just(0), Just(u32::MAX - 50), any::<u32>()],
        abi in prop::sample::select(&Abi::ALL),
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let words = heap_words(1);
        let (mut front, mut back) = pair_at(&words, abi, 1, start);
        let mut held = Vec::new();
        let (mut next, mut waiting) = (0_u64, BTreeMap::new());
        let (mut front_sleeps, mut back_sleeps) = (true, true);
        for step in steps {
            match step {
                Step::Push(count) => for _ in 0..count.min(front.free()) {
                    front.push(&RawSlot::with_operation(abi, UNKNOWN, next)).unwrap();
                    waiting.insert(next, ());
                    next += 1;
                },
                Step::FrontPublish => {
                    let (old, event) = (words.load(REQ_PROD), words.load(REQ_EVENT));
                    let notify = front.publish();
                    prop_assert_eq!(notify, went_over(old, words.load(REQ_PROD), event));
                    back_sleeps &= !notify;
                }
                Step::Consume(count) => for _ in 0..count {
                    let Some(token) = back.consume().unwrap() else { break };
                    prop_assert!(token.slot() < 32);
                    held.push(token);
                },
                Step::Finish(which) if !held.is_empty() => {
                    let token = held.swap_remove(which % held.len());
                    back.finish(token, Status::NotSupported);
                }
                Step::Drop(which) if !held.is_empty() => {
                    drop(held.swap_remove(which % held.len()));
                }
                Step::Finish(_) | Step::Drop(_) => {}
                Step::BackPublish => {
                    let (old, event) = (words.load(RSP_PROD), words.load(RSP_EVENT));
                    let owed = back.finished_unpublished();
                    let published = back.publish();
                    prop_assert_eq!(published.count, owed);
                    let new = words.load(RSP_PROD);
                    prop_assert_eq!(published.count, new.wrapping_sub(old));
                    prop_assert_eq!(published.notify, went_over(old, new, event));
                    front_sleeps &= !published.notify;
                }
                Step::Take(count) => for _ in 0..count {
                    let Some(response) = front.take().unwrap() else { break };
                    prop_assert_eq!(response.op, UNKNOWN);
                    prop_assert!(waiting.remove(&response.id).is_some(), "answered twice");
                },
                Step::FrontSleep => front_sleeps = !front.final_check().unwrap(),
                Step::BackSleep => back_sleeps = !back.final_check().unwrap(),
            }
            prop_assert!(back.in_flight() <= 32);
            if back_sleeps {
                // Only of what was there when he went to sleep, and initially req_event is 1.
                prop_assert_eq!(words.load(REQ_PROD).wrapping_sub(words.load(REQ_EVENT).wrapping_sub(1)), 0);
            }
            if front_sleeps {
                prop_assert_eq!(words.load(RSP_PROD).wrapping_sub(words.load(RSP_EVENT).wrapping_sub(1)), 0);
            }
        }
        drop(held);
        let _ = (front.publish(), back.publish());
        while front.in_flight() > 0 {
            while let Some(token) = back.consume().unwrap() {
                back.finish(token, Status::Okay);
            }
            let _ = back.publish();
            while let Some(response) = front.take().unwrap() {
                prop_assert!(waiting.remove(&response.id).is_some(), "answered twice");
            }
        }
        prop_assert!(waiting.is_empty());
    }

    /// A producer that moves anyhow never makes the backend hold more than a ring's worth.
    #[test]
    fn a_wild_producer_is_bounded(
        start in any::<u32>(),
        moves in prop::collection::vec(prop_oneof![0..40_u32, any::<u32>()], 1..20),
    ) {
        let words = heap_words(1);
        let (_front, mut back) = pair_at(&words, Abi::X86_32, 1, start);
        let mut held = Vec::new();
        for step in moves {
            words.store(REQ_PROD, words.load(REQ_PROD).wrapping_add(step));
            let corrupt = loop {
                match back.consume() {
                    Ok(Some(token)) => held.push(token),
                    Ok(None) => break false,
                    Err(_) => break true,
                }
            };
            prop_assert!(held.len() <= 32);
            prop_assert_eq!(back.in_flight() as usize, held.len());
            if corrupt {
                break;
            }
            for token in held.drain(held.len() / 2..) {
                back.finish(token, Status::Error);
            }
            let _ = back.publish();
        }
    }
}
