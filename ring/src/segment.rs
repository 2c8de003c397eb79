//! One piece of a guest page taking part in a request. A [`Segment`] is in range by construction; what
//! its gref grants is found out by whoever uses it.

use crate::layout::{
    MAX_DIRECT_SEGMENTS, SECTOR_SIZE, SECTORS_PER_PAGE, SEGMENT_BYTES, SEGMENTS_PER_PAGE,
};
use crate::request::Reason;

/// Sectors `first_sect` to `last_sect`, both included, of the page granted by `gref`;
/// `first_sect <= last_sect < 8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Segment {
    gref: u32,
    first_sect: u8,
    last_sect: u8,
}

impl Segment {
    /// `None` unless `first_sect <= last_sect < 8`.
    #[must_use]
    pub const fn new(gref: u32, first_sect: u8, last_sect: u8) -> Option<Self> {
        if first_sect > last_sect || last_sect >= SECTORS_PER_PAGE {
            return None;
        }
        Some(Self {
            gref,
            first_sect,
            last_sect,
        })
    }

    /// The grant of the page; any value.
    #[must_use]
    pub const fn gref(self) -> u32 {
        self.gref
    }

    /// First sector of the page that takes part, 0 to 7.
    #[must_use]
    pub const fn first_sect(self) -> u8 {
        self.first_sect
    }

    /// Last sector of the page that takes part, `first_sect` to 7.
    #[must_use]
    pub const fn last_sect(self) -> u8 {
        self.last_sect
    }

    /// Where in the page the segment starts, in bytes; at most 3584.
    #[must_use]
    pub const fn offset(self) -> usize {
        (self.first_sect as usize).wrapping_mul(SECTOR_SIZE)
    }

    /// Bytes of the segment, 512 to 4096.
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "a segment has at least one sector"
    )]
    pub const fn len(self) -> usize {
        (self.sectors() as usize).wrapping_mul(SECTOR_SIZE)
    }

    /// Sectors of the segment, 1 to 8.
    #[must_use]
    pub const fn sectors(self) -> u8 {
        self.last_sect.wrapping_sub(self.first_sect).wrapping_add(1)
    }

    /// A descriptor's two words: gref, then the two sector numbers and padding nobody looks at.
    pub(crate) fn from_words(index: usize, gref: u32, sectors: u32) -> Result<Self, Reason> {
        let [first_sect, last_sect, ..] = sectors.to_le_bytes();
        Self::new(gref, first_sect, last_sect).ok_or(Reason::BadSegment {
            index,
            first_sect,
            last_sect,
        })
    }

    /// The descriptor's two words, padding 0.
    pub(crate) const fn to_words(self) -> [u32; 2] {
        [
            self.gref,
            u32::from_le_bytes([self.first_sect, self.last_sect, 0, 0]),
        ]
    }
}

/// The segments of a request that carries them in its slot: 1 to 11.
#[derive(Clone, Copy)]
pub struct DirectSegments {
    count: usize,
    list: [Segment; MAX_DIRECT_SEGMENTS],
}

impl DirectSegments {
    const FILLER: Segment = Segment {
        gref: 0,
        first_sect: 0,
        last_sect: 0,
    };

    /// `None` unless there are 1 to 11 segments.
    #[must_use]
    pub fn new(segments: &[Segment]) -> Option<Self> {
        let mut list = [Self::FILLER; MAX_DIRECT_SEGMENTS];
        if segments.is_empty() {
            return None;
        }
        list.get_mut(..segments.len())?.copy_from_slice(segments);
        Some(Self {
            count: segments.len(),
            list,
        })
    }

    /// Decodes `count` descriptors standing in a slot.
    pub(crate) fn decode(count: u8, descriptors: &[[u32; 2]]) -> Result<Self, Reason> {
        let count = usize::from(count);
        if count == 0 {
            return Err(Reason::NoSegments);
        }
        let mut list = [Self::FILLER; MAX_DIRECT_SEGMENTS];
        let too_many = Reason::TooManySegments {
            count,
            most: MAX_DIRECT_SEGMENTS,
        };
        let wanted = list.get_mut(..count).ok_or(too_many)?;
        for (index, (segment, &[gref, sectors])) in wanted.iter_mut().zip(descriptors).enumerate() {
            *segment = Segment::from_words(index, gref, sectors)?;
        }
        Ok(Self { count, list })
    }

    /// The segments, in the order of the sectors on disk.
    #[must_use]
    pub fn as_slice(&self) -> &[Segment] {
        self.list.get(..self.count).unwrap_or_default()
    }

    /// Sectors of all segments together, 1 to 88.
    #[must_use]
    pub fn sectors(&self) -> u32 {
        self.as_slice()
            .iter()
            .map(|segment| u32::from(segment.sectors()))
            .sum()
    }
}

impl std::fmt::Debug for DirectSegments {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

impl PartialEq for DirectSegments {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl Eq for DirectSegments {}

/// The first `count` descriptors of an indirect page. `page` must be the caller's private copy: it is
/// read again while the result is walked.
///
/// # Errors
/// The first descriptor that is out of range, or `count` beyond what `page` holds.
pub fn decode_indirect_page(page: &[u8], count: usize) -> Result<PageSegments<'_>, Reason> {
    let (descriptors, _) = page.as_chunks::<SEGMENT_BYTES>();
    let most = descriptors.len().min(SEGMENTS_PER_PAGE);
    if count > most {
        return Err(Reason::TooManySegments { count, most });
    }
    let descriptors = descriptors.get(..count).unwrap_or_default();
    for (index, descriptor) in descriptors.iter().enumerate() {
        decode_descriptor(index, *descriptor)?;
    }
    Ok(PageSegments {
        rest: descriptors.iter(),
    })
}

fn decode_descriptor(index: usize, descriptor: [u8; SEGMENT_BYTES]) -> Result<Segment, Reason> {
    let [g0, g1, g2, g3, first, last, _, _] = descriptor;
    let gref = u32::from_le_bytes([g0, g1, g2, g3]);
    Segment::from_words(index, gref, u32::from_le_bytes([first, last, 0, 0]))
}

/// Iterator over checked descriptors; see [`decode_indirect_page`].
#[derive(Clone, Debug)]
pub struct PageSegments<'a> {
    rest: std::slice::Iter<'a, [u8; SEGMENT_BYTES]>,
}

impl Iterator for PageSegments<'_> {
    type Item = Segment;

    fn next(&mut self) -> Option<Segment> {
        // Checked before the iterator was made, so this ends the walk only where the page ends.
        decode_descriptor(0, *self.rest.next()?).ok()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.rest.size_hint()
    }
}

impl ExactSizeIterator for PageSegments<'_> {}
