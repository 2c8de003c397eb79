//! From a parsed request to what will be done: a [`Plan`] is allowed on this disk and in range by
//! construction, so nothing behind it checks again. It says nothing about memory or order.
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

use xenblk_ring::{DiscardRequest, Request, RwOp, Segment, Status, WriteData};

use crate::flusher::wire::Chore;
use crate::target::SECTOR;

/// What a ring may do to its disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// Bytes of the disk.
    pub(crate) size: u64,
    /// Every range on disk and every segment is a multiple of this many bytes (`sector-size`).
    pub(crate) sector_size: u32,
    /// Refuse what modifies.
    pub(crate) readonly: bool,
    /// DISCARD is offered.
    pub(crate) discard: bool,
    /// So is the secure one.
    pub(crate) secure_discard: bool,
    /// What discards have to be a multiple of, in bytes; not 0.
    pub(crate) discard_unit: u32,
    /// As advertised.
    pub(crate) max_indirect_segments: u16,
}

/// Bytes of the disk, all of which exist; not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    offset: u64,
    len: u64,
}

/// A [`Range`] to be filled from or copied to memory: at most 256 pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Transfer {
    offset: u64,
    len: u32,
}

/// A request that will be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    Read(Transfer),
    Write(Transfer),
    /// Make published writes durable, then write through, if there is something to write.
    Flush(Option<Transfer>),
    /// The same, but after everything the ring took in before and before everything after.
    Barrier(Option<Transfer>),
    /// Give the storage back; with `true`, so that the data can't be had back.
    Discard(Range, bool),
}

/// One operation on the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Read(Transfer),
    Write(Transfer),
    /// The flusher's to do.
    Chore(Chore),
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// It is carried out.
    Do(Plan),
    /// It is answered, and nothing else happens.
    Answer(Status),
}

impl Range {
    /// `None` if the range wraps or ends beyond `size`; all in bytes.
    fn new(offset: u64, len: u64, size: u64) -> Option<Self> {
        let end = offset.checked_add(len)?;
        (len > 0 && end <= size).then_some(Self { offset, len })
    }

    pub(crate) fn len(self) -> u64 {
        self.len
    }

    /// Whether the two share a byte.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        // The ends can't wrap: `new` computed them.
        self.offset < other.offset.saturating_add(other.len)
            && other.offset < self.offset.saturating_add(self.len)
    }
}

impl Transfer {
    fn new(sector: u64, segments: impl Iterator<Item = Segment>, rules: &Rules) -> Option<Self> {
        let unit = u64::from(rules.sector_size);
        let offset = sector.checked_mul(SECTOR)?;
        let mut len = 0u64;
        for segment in segments {
            let bytes = u64::try_from(segment.len()).ok()?;
            if !bytes.is_multiple_of(unit) {
                return None;
            }
            len = len.checked_add(bytes)?;
        }
        let range = Range::new(offset, len, rules.size)?;
        let len = u32::try_from(len).ok()?;
        offset.is_multiple_of(unit).then_some(Self {
            offset: range.offset,
            len,
        })
    }

    pub(crate) fn offset(self) -> u64 {
        self.offset
    }

    pub(crate) fn len(self) -> u32 {
        self.len
    }

    pub(crate) fn range(self) -> Range {
        Range {
            offset: self.offset,
            len: u64::from(self.len),
        }
    }
}

impl Decision {
    /// Decides about a request whose segments stand in its slot. An indirect one is refused here if
    /// its segments needn't be fetched to know, and undecided (`None`) otherwise.
    pub(crate) fn new(request: &Request, rules: &Rules) -> Option<Self> {
        let decision = match request {
            Request::Rw(rw) => {
                let segments = rw.segments.as_slice().iter().copied();
                Self::transfer(rw.op, rw.sector, segments, rules)
            }
            Request::Flush(flush) => Self::through(Plan::Flush, flush.data.as_ref(), rules),
            Request::Barrier(barrier) => Self::through(Plan::Barrier, barrier.data.as_ref(), rules),
            Request::Discard(discard) => {
                if rules.readonly {
                    Self::Answer(Status::Error)
                } else if !rules.discard || (discard.secure && !rules.secure_discard) {
                    Self::Answer(Status::NotSupported)
                } else {
                    Self::discard(discard, rules)
                }
            }
            Request::Indirect(indirect) => {
                let refused = indirect.nr_segments() > rules.max_indirect_segments
                    || (indirect.op == RwOp::Write && rules.readonly);
                return refused.then_some(Self::Answer(Status::Error));
            }
        };
        Some(decision)
    }

    /// Decides about a READ or WRITE.
    pub(crate) fn transfer(
        op: RwOp,
        sector: u64,
        segments: impl Iterator<Item = Segment>,
        rules: &Rules,
    ) -> Self {
        if op == RwOp::Write && rules.readonly {
            return Self::Answer(Status::Error);
        }
        match (op, Transfer::new(sector, segments, rules)) {
            (_, None) => Self::Answer(Status::Error),
            (RwOp::Read, Some(transfer)) => Self::Do(Plan::Read(transfer)),
            (RwOp::Write, Some(transfer)) => Self::Do(Plan::Write(transfer)),
        }
    }

    /// A read-only disk has nothing to make durable, but a guest that asks is not in error (R16).
    fn through(
        plan: impl FnOnce(Option<Transfer>) -> Plan,
        data: Option<&WriteData>,
        rules: &Rules,
    ) -> Self {
        match data {
            None => Self::Do(plan(None)),
            Some(_) if rules.readonly => Self::Answer(Status::Error),
            Some(data) => {
                match Transfer::new(data.sector, data.segments.as_slice().iter().copied(), rules) {
                    Some(transfer) => Self::Do(plan(Some(transfer))),
                    None => Self::Answer(Status::Error),
                }
            }
        }
    }

    /// A discard is advice. What isn't a whole unit is kept, never rounded outward; if that is all of
    /// it, the guest has lost nothing. A secure one is a promise: what can't be kept is refused.
    fn discard(discard: &DiscardRequest, rules: &Rules) -> Self {
        let secure = discard.secure;
        let bytes = |sectors: u64| sectors.checked_mul(SECTOR);
        let (Some(offset), Some(len)) = (bytes(discard.sector), bytes(discard.nr_sectors)) else {
            return Self::Answer(Status::Error);
        };
        let Some(end) = offset.checked_add(len).filter(|end| *end <= rules.size) else {
            return Self::Answer(Status::Error);
        };
        let unit = u64::from(rules.discard_unit);
        let first = offset.checked_next_multiple_of(unit);
        let last = end.checked_rem(unit).and_then(|rest| end.checked_sub(rest));
        let whole = first
            .zip(last)
            .and_then(|(first, last)| Range::new(first, last.checked_sub(first)?, rules.size));
        match whole {
            Some(range) if secure && range.len < len => Self::Answer(Status::Error),
            None if secure && len > 0 => Self::Answer(Status::Error),
            Some(range) => Self::Do(Plan::Discard(range, secure)),
            None => Self::Answer(Status::Okay),
        }
    }
}

impl Plan {
    /// The `n`th operation on the target, from 0. Data of a flush or barrier is written between two
    /// flushes: what came before is durable first, and the data itself before the answer.
    pub(crate) fn step(&self, n: u8) -> Option<Step> {
        match (*self, n) {
            (Self::Read(transfer), 0) => Some(Step::Read(transfer)),
            (Self::Write(transfer), 0)
            | (Self::Flush(Some(transfer)) | Self::Barrier(Some(transfer)), 1) => {
                Some(Step::Write(transfer))
            }
            (Self::Flush(_) | Self::Barrier(_), 0)
            | (Self::Flush(Some(_)) | Self::Barrier(Some(_)), 2) => Some(Step::Chore(Chore::Flush)),
            (Self::Discard(range, secure), 0) => Some(Step::Chore(Chore::Discard {
                offset: range.offset,
                len: range.len,
                secure,
            })),
            _ => None,
        }
    }

    /// The bytes of the disk it reads or changes.
    pub(crate) fn range(&self) -> Option<Range> {
        match self {
            Self::Read(transfer) | Self::Write(transfer) => Some(transfer.range()),
            Self::Flush(data) | Self::Barrier(data) => data.map(Transfer::range),
            Self::Discard(range, _) => Some(*range),
        }
    }

    /// The guest's memory it needs a copy of.
    pub(crate) fn transfer(&self) -> Option<Transfer> {
        match self {
            Self::Read(transfer) | Self::Write(transfer) => Some(*transfer),
            Self::Flush(data) | Self::Barrier(data) => *data,
            Self::Discard(..) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use xenblk_ring::{BarrierRequest, DirectSegments, FlushRequest, RwRequest};

    use super::*;

    /// 100 sectors.
    const RULES: Rules = Rules {
        size: 100 * SECTOR,
        sector_size: 512,
        readonly: false,
        discard: true,
        secure_discard: false,
        discard_unit: 512,
        max_indirect_segments: 256,
    };
    const REFUSED: Decision = Decision::Answer(Status::Error);

    fn page(first: u8, last: u8) -> Segment {
        Segment::new(7, first, last).unwrap()
    }

    fn rw(op: RwOp, sector: u64, segments: &[Segment], rules: &Rules) -> Decision {
        let segments = DirectSegments::new(segments).unwrap();
        Decision::new(
            &Request::Rw(RwRequest {
                id: 1,
                op,
                sector,
                segments,
            }),
            rules,
        )
        .unwrap()
    }

    fn discard(sector: u64, nr_sectors: u64, rules: &Rules) -> Decision {
        let request = DiscardRequest {
            id: 1,
            sector,
            nr_sectors,
            secure: false,
        };
        Decision::new(&Request::Discard(request), rules).unwrap()
    }

    #[test]
    fn the_last_sector_exists_and_the_next_does_not() {
        for op in [RwOp::Read, RwOp::Write] {
            let last = rw(op, 99, &[page(3, 3)], &RULES);
            let Decision::Do(plan) = last else {
                panic!("{last:?}")
            };
            assert_eq!(plan.range(), Range::new(99 * 512, 512, RULES.size));
            for sector in [
                99,
                100,
                101,
                1 << 55,
                u64::MAX / 512,
                u64::MAX / 512 + 1,
                u64::MAX,
            ] {
                assert_eq!(rw(op, sector, &[page(0, 7)], &RULES), REFUSED, "{sector}");
            }
        }
    }

    #[test]
    fn a_disk_of_the_largest_size_still_has_an_end() {
        let rules = Rules {
            size: u64::MAX - 511,
            ..RULES
        };
        let last = u64::MAX / 512 - 1;
        assert!(matches!(
            rw(RwOp::Read, last, &[page(0, 0)], &rules),
            Decision::Do(_)
        ));
        assert_eq!(rw(RwOp::Read, last, &[page(0, 1)], &rules), REFUSED);
        assert_eq!(
            rw(RwOp::Read, u64::MAX / 512, &[page(0, 0)], &rules),
            REFUSED
        );
    }

    #[test]
    fn a_read_only_disk_refuses_all_that_modifies_and_nothing_else() {
        let rules = Rules {
            readonly: true,
            ..RULES
        };
        let segments = DirectSegments::new(&[page(0, 0)]).unwrap();
        let data = Some(WriteData {
            sector: 0,
            segments,
        });
        assert_eq!(rw(RwOp::Write, 0, &[page(0, 0)], &rules), REFUSED);
        assert_eq!(discard(0, 8, &rules), REFUSED);
        let decide = |request| Decision::new(&request, &rules).unwrap();
        assert_eq!(
            decide(Request::Barrier(BarrierRequest { id: 0, data })),
            REFUSED
        );
        assert_eq!(
            decide(Request::Flush(FlushRequest { id: 0, data })),
            REFUSED
        );
        let empty = FlushRequest { id: 0, data: None };
        assert_eq!(
            decide(Request::Flush(empty)),
            Decision::Do(Plan::Flush(None))
        );
        assert!(matches!(
            rw(RwOp::Read, 0, &[page(0, 0)], &rules),
            Decision::Do(_)
        ));
    }

    #[test]
    fn discards_shrink_to_whole_units_and_never_grow() {
        let rules = Rules {
            discard_unit: 4096,
            ..RULES
        };
        let range = |offset, len| Decision::Do(Plan::Discard(Range { offset, len }, false));
        assert_eq!(discard(0, 8, &rules), range(0, 4096));
        assert_eq!(discard(1, 23, &rules), range(4096, 8192));
        assert_eq!(discard(1, 14, &rules), Decision::Answer(Status::Okay));
        assert_eq!(discard(3, 0, &rules), Decision::Answer(Status::Okay));
        assert_eq!(discard(96, 5, &rules), REFUSED);
        assert_eq!(discard(1, u64::MAX, &rules), REFUSED);
        assert_eq!(discard(u64::MAX / 512, u64::MAX / 512, &rules), REFUSED);
        let off = Rules {
            discard: false,
            ..RULES
        };
        assert_eq!(discard(0, 8, &off), Decision::Answer(Status::NotSupported));
    }

    #[test]
    fn a_secure_discard_is_all_of_it_or_refused() {
        let secure = |sector, nr_sectors, rules| {
            let request = DiscardRequest {
                id: 1,
                sector,
                nr_sectors,
                secure: true,
            };
            Decision::new(&Request::Discard(request), rules).unwrap()
        };
        let unable = secure(0, 8, &RULES);
        assert_eq!(unable, Decision::Answer(Status::NotSupported));
        let rules = Rules {
            secure_discard: true,
            discard_unit: 4096,
            ..RULES
        };
        let all = Range {
            offset: 4096,
            len: 8192,
        };
        let expected = Decision::Do(Plan::Discard(all, true));
        assert_eq!(secure(8, 16, &rules), expected);
        for (sector, nr_sectors) in [(8, 15), (7, 17), (1, 14), (96, 5)] {
            assert_eq!(secure(sector, nr_sectors, &rules), REFUSED, "{sector}");
        }
        let off = Rules {
            discard: false,
            ..rules
        };
        let off = secure(8, 16, &off);
        assert_eq!(off, Decision::Answer(Status::NotSupported));
        let readonly = Rules {
            readonly: true,
            ..rules
        };
        assert_eq!(secure(8, 16, &readonly), REFUSED);
    }

    #[test]
    fn larger_sectors_bind_ranges_and_segments() {
        let rules = Rules {
            sector_size: 4096,
            size: 4096 * 4,
            ..RULES
        };
        assert!(matches!(
            rw(RwOp::Write, 8, &[page(0, 7)], &rules),
            Decision::Do(_)
        ));
        assert_eq!(rw(RwOp::Write, 4, &[page(0, 7)], &rules), REFUSED);
        assert_eq!(
            rw(RwOp::Write, 8, &[page(0, 3), page(4, 7)], &rules),
            REFUSED
        );
    }

    #[test]
    fn data_of_a_barrier_is_written_between_two_flushes() {
        let transfer = Transfer {
            offset: 0,
            len: 512,
        };
        let steps = |plan: Plan| (0..4).map_while(|n| plan.step(n)).collect::<Vec<_>>();
        let flush = Step::Chore(Chore::Flush);
        let through = vec![flush, Step::Write(transfer), flush];
        assert_eq!(steps(Plan::Barrier(Some(transfer))), through);
        assert_eq!(steps(Plan::Flush(Some(transfer))), through);
        assert_eq!(steps(Plan::Barrier(None)), [flush]);
        assert_eq!(steps(Plan::Write(transfer)), [Step::Write(transfer)]);
    }
}
