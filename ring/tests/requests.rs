//! Bytes to requests and back, for every ABI, against a reference that reads bytes as blkif.h puts them.

mod rig;

use proptest::prelude::*;
use rig::{identity, journal};
use xenblk_ring::{
    Abi, BackRing, BarrierRequest, DirectSegments, DiscardRequest, FlushRequest, FrontRing,
    IndirectRequest, RawSlot, Reason, Request, Response, RwOp, RwRequest, Segment, Status,
    WriteData, decode_indirect_page, encode_indirect_page, heap_words,
};

fn abi() -> impl Strategy<Value = Abi> {
    prop::sample::select(&Abi::ALL)
}

fn segment() -> impl Strategy<Value = Segment> {
    (any::<u32>(), 0..8_u8, 0..8_u8)
        .prop_map(|(gref, a, b)| Segment::new(gref, a.min(b), a.max(b)).unwrap())
}

fn segments() -> impl Strategy<Value = DirectSegments> {
    prop::collection::vec(segment(), 1..=11).prop_map(|list| DirectSegments::new(&list).unwrap())
}

fn direction() -> impl Strategy<Value = RwOp> {
    prop_oneof![Just(RwOp::Read), Just(RwOp::Write)]
}

fn data() -> impl Strategy<Value = Option<WriteData>> {
    prop::option::of(
        (any::<u64>(), segments()).prop_map(|(sector, segments)| WriteData { sector, segments }),
    )
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        (any::<u64>(), direction(), any::<u64>(), segments()).prop_map(
            |(id, op, sector, segments)| Request::Rw(RwRequest {
                id,
                op,
                sector,
                segments
            })
        ),
        (any::<u64>(), data()).prop_map(|(id, data)| Request::Flush(FlushRequest { id, data })),
        (any::<u64>(), data()).prop_map(|(id, data)| Request::Barrier(BarrierRequest { id, data })),
        (any::<u64>(), any::<u64>(), any::<u64>(), any::<bool>()).prop_map(
            |(id, sector, nr_sectors, secure)| {
                Request::Discard(DiscardRequest {
                    id,
                    sector,
                    nr_sectors,
                    secure,
                })
            }
        ),
        (
            any::<u64>(),
            direction(),
            any::<u64>(),
            1..=256_u16,
            any::<u32>()
        )
            .prop_map(|(id, op, sector, count, gref)| {
                let grefs = [gref, 0, 0, 0, 0, 0, 0, 0];
                Request::Indirect(IndirectRequest::new(id, op, sector, count, grefs).unwrap())
            }),
    ]
}

/// Slots as hostile guests fill them: noise, but with operations and counts that get further than
/// noise does.
fn slot_bytes() -> impl Strategy<Value = [u8; 112]> {
    let noise = prop::collection::vec(any::<u8>(), 112);
    let operation = prop_oneof![0..8_u8, any::<u8>()];
    let second = prop_oneof![0..14_u8, any::<u8>()];
    let sectors = prop::collection::vec(0..9_u8, 22);
    (
        noise,
        operation,
        second,
        any::<bool>(),
        0..2_u8,
        sectors,
        any::<bool>(),
    )
        .prop_map(|(noise, operation, second, plain, high, sectors, short)| {
            let mut bytes: [u8; 112] = noise.try_into().unwrap();
            (bytes[0], bytes[1]) = (operation, second);
            if plain {
                bytes[3] = high;
                for (n, pair) in sectors.chunks(2).enumerate() {
                    let at = if short { 20 } else { 24 } + 8 * n + 4;
                    bytes[at..at + 2].copy_from_slice(pair);
                }
            }
            bytes
        })
}

/// The fields by hand, from the table of offsets in blkif.h's comments.
struct Reference<'a> {
    bytes: &'a [u8; 112],
    wide: usize,
}

impl Reference<'_> {
    fn long(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes[at..at + 8].try_into().unwrap())
    }

    fn id(&self) -> u64 {
        self.long(4 + self.wide)
    }

    fn sector(&self) -> u64 {
        self.long(12 + 4 * usize::from(self.wide > 0))
    }

    fn echoed(&self) -> u8 {
        if self.bytes[0] == 6 {
            self.bytes[1]
        } else {
            self.bytes[0]
        }
    }

    /// `Err` with the index of the first bad segment.
    fn segments(&self, count: usize) -> Result<Vec<(u32, u8, u8)>, usize> {
        let at = 20 + self.wide;
        let one = |n: usize| {
            let raw = &self.bytes[at + 8 * n..at + 8 * n + 8];
            (
                u32::from_le_bytes(raw[..4].try_into().unwrap()),
                raw[4],
                raw[5],
            )
        };
        let list: Vec<_> = (0..count).map(one).collect();
        match list
            .iter()
            .position(|&(_, first, last)| first > last || last > 7)
        {
            Some(bad) => Err(bad),
            None => Ok(list),
        }
    }

    fn valid(&self) -> bool {
        let count = usize::from(self.bytes[1]);
        match self.bytes[0] {
            0 | 1 => (1..=11).contains(&count) && self.segments(count).is_ok(),
            2 | 3 => count <= 11 && self.segments(count).is_ok(),
            5 => true,
            6 => {
                let indirect = u16::from_le_bytes([self.bytes[2], self.bytes[3]]);
                self.bytes[1] < 2 && (1..=256).contains(&indirect)
            }
            _ => false,
        }
    }
}

fn plain(segments: &DirectSegments) -> Vec<(u32, u8, u8)> {
    let plain = |s: &Segment| (s.gref(), s.first_sect(), s.last_sect());
    segments.as_slice().iter().map(plain).collect()
}

proptest! {
    #[test]
    fn requests_survive_the_ring(abi in abi(), requests in prop::collection::vec(request(), 1..20)) {
        let words = heap_words(1);
        let mut front = FrontRing::init(words.clone(), abi, 1).unwrap();
        let mut back = BackRing::attach(words, abi, 1, journal(abi, 1), &identity(1)).unwrap();
        for request in &requests {
            prop_assert_eq!(request.encode(abi).parse(abi), Ok(*request));
            front.push(&request.encode(abi)).unwrap();
        }
        let _ = front.publish();
        for request in &requests {
            let token = back.consume().unwrap().unwrap();
            prop_assert_eq!(back.request(&token), Ok(*request));
        }
    }

    #[test]
    fn responses_survive_the_ring(
        abi in abi(),
        id in any::<u64>(),
        bytes in slot_bytes(),
        status in prop_oneof![Just(Status::Okay), Just(Status::Error)],
    ) {
        let mut bytes = bytes;
        let at = if abi == Abi::X86_32 { 4 } else { 8 };
        bytes[at..at + 8].copy_from_slice(&id.to_le_bytes());
        let words = heap_words(1);
        let mut front = FrontRing::init_at(words.clone(), abi, 1, u32::MAX).unwrap();
        let mut back = BackRing::attach(words, abi, 1, journal(abi, 1), &identity(1)).unwrap();
        front.push(&RawSlot::from_bytes(&bytes)).unwrap();
        let _ = front.publish();
        let token = back.consume().unwrap().unwrap();
        back.finish(token, status);
        let _ = back.publish();
        let op = Reference { bytes: &bytes, wide: at - 4 }.echoed();
        let expected = Response { id, op, status: status.to_wire() };
        prop_assert_eq!(front.take().unwrap(), Some(expected));
        prop_assert_eq!(Status::from_wire(expected.status), Some(status));
    }

    /// Every slot is either the request its bytes say, in range, or an error that says what to echo.
    #[test]
    fn any_bytes_are_a_request_or_an_answerable_error(abi in abi(), bytes in slot_bytes()) {
        let reference = Reference { bytes: &bytes, wide: if abi == Abi::X86_32 { 0 } else { 4 } };
        let count = usize::from(bytes[1]);
        let parsed = RawSlot::from_bytes(&bytes).parse(abi);
        prop_assert_eq!(parsed.is_ok(), reference.valid(), "{:?}", parsed);
        let check_data = |id: u64, data: &Option<WriteData>| {
            prop_assert_eq!((id, data.is_some()), (reference.id(), count > 0));
            if let Some(data) = data {
                prop_assert_eq!(data.sector, reference.sector());
                prop_assert_eq!(Ok(plain(&data.segments)), reference.segments(count));
            }
            Ok(())
        };
        match parsed {
            Ok(Request::Rw(rw)) => {
                prop_assert_eq!(rw.op.operation(), bytes[0]);
                prop_assert_eq!((rw.id, rw.sector), (reference.id(), reference.sector()));
                prop_assert_eq!(Ok(plain(&rw.segments)), reference.segments(count));
            }
            Ok(Request::Flush(flush)) => {
                prop_assert_eq!(bytes[0], 3);
                check_data(flush.id, &flush.data)?;
            }
            Ok(Request::Barrier(barrier)) => {
                prop_assert_eq!(bytes[0], 2);
                check_data(barrier.id, &barrier.data)?;
            }
            Ok(Request::Discard(discard)) => {
                prop_assert_eq!((bytes[0], discard.secure), (5, bytes[1] & 1 == 1));
                prop_assert_eq!((discard.id, discard.sector), (reference.id(), reference.sector()));
                let at = if abi == Abi::X86_32 { 20 } else { 24 };
                prop_assert_eq!(discard.nr_sectors, reference.long(at));
            }
            Ok(Request::Indirect(indirect)) => {
                prop_assert_eq!((bytes[0], indirect.op.operation()), (6, bytes[1]));
                prop_assert_eq!((indirect.id, indirect.sector), (reference.id(), reference.sector()));
                let at = if abi == Abi::X86_32 { 24 } else { 28 };
                let gref = reference.long(at) as u32;
                prop_assert_eq!(indirect.grefs(), [gref], "256 segments fit one page");
            }
            Err(error) => {
                prop_assert_eq!((error.id, error.op), (reference.id(), reference.echoed()));
                let unknown = !matches!(bytes[0], 0..=3 | 5 | 6);
                let expected = if unknown { Status::NotSupported } else { Status::Error };
                prop_assert_eq!(error.status(), expected);
                if let Reason::BadSegment { index, .. } = error.reason {
                    prop_assert_eq!(reference.segments(count), Err(index));
                }
            }
        }
    }

    #[test]
    fn indirect_pages_survive(list in prop::collection::vec(segment(), 0..=512)) {
        let page = encode_indirect_page(&list);
        let decoded = decode_indirect_page(&page, list.len()).unwrap();
        prop_assert_eq!(decoded.len(), list.len());
        prop_assert!(decoded.eq(list));
    }

    #[test]
    fn any_indirect_page_is_segments_or_an_error(
        page in prop::collection::vec(prop_oneof![0..9_u8, any::<u8>()], 0..300),
        count in 0..40_usize,
    ) {
        let bad = (0..count.min(page.len() / 8)).find(|n| {
            let (first, last) = (page[8 * n + 4], page[8 * n + 5]);
            first > last || last > 7
        });
        match decode_indirect_page(&page, count) {
            Ok(list) => {
                prop_assert!(bad.is_none() && 8 * count <= page.len());
                for (n, segment) in list.enumerate() {
                    let raw: [u8; 4] = page[8 * n..8 * n + 4].try_into().unwrap();
                    prop_assert_eq!(segment.gref(), u32::from_le_bytes(raw));
                    prop_assert_eq!(segment.offset(), 512 * usize::from(page[8 * n + 4]));
                    prop_assert!(segment.offset() + segment.len() <= 4096);
                }
            }
            Err(Reason::BadSegment { index, .. }) => prop_assert_eq!(Some(index), bad),
            Err(reason) => {
                let most = page.len() / 8;
                prop_assert_eq!(reason, Reason::TooManySegments { count, most });
                prop_assert!(count > most);
            }
        }
    }
}

#[test]
fn an_indirect_page_holds_512() {
    let page = [0; 8192];
    assert_eq!(decode_indirect_page(&page, 512).unwrap().len(), 512);
    let too_many = Reason::TooManySegments {
        count: 513,
        most: 512,
    };
    assert_eq!(decode_indirect_page(&page, 513).unwrap_err(), too_many);
}

/// Linux compares the operation of a response, on error paths too, and kills the disk on a mismatch.
#[test]
fn a_refused_indirect_request_echoes_its_inner_operation() {
    for (inner, count) in [
        (0, 0),
        (1, 257),
        (1, 0xffff),
        (2, 1),
        (3, 1),
        (5, 1),
        (6, 1),
        (255, 1),
    ] {
        let mut slot = RawSlot::with_operation(Abi::X86_64, 6, u64::MAX);
        let [low, high] = u16::to_le_bytes(count);
        for (at, byte) in [(1, inner), (2, low), (3, high)] {
            slot.set_byte(at, byte);
        }
        let error = slot.parse(Abi::X86_64).unwrap_err();
        assert_eq!((error.id, error.op), (u64::MAX, inner), "{error}");
        assert_eq!(error.status(), Status::Error);
    }
}

/// What Linux sends as an empty flush: sector all ones, which must not count.
#[test]
fn an_empty_flush_has_no_sector() {
    let flush = Request::Flush(FlushRequest { id: 1, data: None });
    let slot = flush.encode(Abi::X86_64);
    let sector = &slot.as_words(Abi::X86_64)[4..6];
    assert_eq!(sector, [u32::MAX; 2]);
    assert_eq!(slot.parse(Abi::X86_64), Ok(flush));
}

#[test]
fn out_of_range_segments_cannot_be_made() {
    for (first, last) in [(1, 0), (0, 8), (8, 8), (7, 255), (255, 255)] {
        assert_eq!(Segment::new(0, first, last), None);
    }
    assert_eq!(DirectSegments::new(&[]), None);
    assert_eq!(
        DirectSegments::new(&[Segment::new(0, 0, 0).unwrap(); 12]),
        None
    );
    assert_eq!(
        DirectSegments::new(&[Segment::new(0, 1, 7).unwrap(); 11])
            .unwrap()
            .sectors(),
        77
    );
}

#[test]
fn protocols_have_names() {
    for abi in Abi::ALL {
        assert_eq!(Abi::from_protocol(abi.protocol()), Some(abi));
    }
    for name in ["", "x86_64", "x86_64-abi ", "X86_64-ABI", "x86_64-abi\0"] {
        assert_eq!(Abi::from_protocol(name), None);
    }
    assert!(Abi::ALL.contains(&Abi::NATIVE));
}
