//! What the verifying writers put on a disk: every 512-byte sector tells where it belongs, which
//! generation of data it is and which run wrote it, so that a lost, stale, torn or misplaced sector is
//! recognised and named. Pure; who writes and reads is not its business.

use std::fmt;

/// Bytes of a blkif sector.
pub const SECTOR: usize = 512;
const MAGIC: u64 = 0x5845_4e42_4c4b_3031;
/// magic, seed, sector, generation
const HEADER_WORDS: usize = 4;

/// One run's data: the seed keeps the data of an earlier run from passing for this one's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// Any number; differs between runs.
    pub seed: u64,
}

/// A sector that does not hold what was written last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Where it was read.
    pub sector: u64,
    /// What should be there.
    pub expected_generation: u32,
    /// What is.
    pub found: Found,
}

/// What a mismatching sector holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Only zeroes.
    Zeroes,
    /// An intact sector of this run: of another place or another generation.
    Other {
        /// The sector it was written to.
        sector: u64,
        /// The generation it was written in.
        generation: u32,
    },
    /// Neither: torn, or not written by this run.
    Garbage,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "sector {}: expected generation {}, found ",
            self.sector, self.expected_generation
        )?;
        match self.found {
            Found::Zeroes => write!(f, "zeroes"),
            Found::Other { sector, generation } => {
                write!(f, "sector {sector} of generation {generation}")
            }
            Found::Garbage => write!(f, "garbage"),
        }
    }
}

impl Pattern {
    /// Fills `data`, whole sectors starting at `sector`, with their content in `generation`.
    pub fn fill(&self, sector: u64, generation: u32, data: &mut [u8]) {
        for (number, bytes) in (sector..).zip(data.chunks_exact_mut(SECTOR)) {
            for (word, slot) in self
                .words(number, generation)
                .zip(bytes.chunks_exact_mut(8))
            {
                slot.copy_from_slice(&word.to_le_bytes());
            }
        }
    }

    /// Compares `data`, whole sectors starting at `sector`, with `generation`; the first difference is
    /// returned. Generation 0 means never written: zeroes.
    pub fn check(&self, sector: u64, generation: u32, data: &[u8]) -> Result<(), Mismatch> {
        for (number, bytes) in (sector..).zip(data.chunks_exact(SECTOR)) {
            let right = if generation == 0 {
                bytes.iter().all(|&byte| byte == 0)
            } else {
                self.holds(number, generation, bytes)
            };
            if !right {
                let found = self.recognise(bytes);
                return Err(Mismatch {
                    sector: number,
                    expected_generation: generation,
                    found,
                });
            }
        }
        Ok(())
    }

    fn holds(&self, sector: u64, generation: u32, bytes: &[u8]) -> bool {
        self.words(sector, generation)
            .zip(bytes.chunks_exact(8))
            .all(|(word, found)| word.to_le_bytes() == found)
    }

    fn recognise(&self, bytes: &[u8]) -> Found {
        if bytes.iter().all(|&byte| byte == 0) {
            return Found::Zeroes;
        }
        let mut header = [0u64; HEADER_WORDS];
        for (word, found) in header.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(found.try_into().unwrap_or_default());
        }
        let [_, _, sector, generation] = header;
        match u32::try_from(generation) {
            Ok(generation) if self.holds(sector, generation, bytes) => {
                Found::Other { sector, generation }
            }
            _ => Found::Garbage,
        }
    }

    /// The 64 words of a sector: the header, then a xorshift sequence started from it.
    fn words(&self, sector: u64, generation: u32) -> impl Iterator<Item = u64> + use<> {
        let header = [MAGIC, self.seed, sector, u64::from(generation)];
        let mut state = scramble(self.seed ^ scramble(sector ^ (u64::from(generation) << 40))) | 1;
        let body = std::iter::repeat_with(move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        });
        header.into_iter().chain(body).take(SECTOR / 8)
    }
}

/// splitmix64's finalizer: neighbouring sectors get unrelated sequences.
pub fn scramble(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATTERN: Pattern = Pattern { seed: 7 };

    fn two_sectors() -> Vec<u8> {
        let mut data = vec![0; 2 * SECTOR];
        PATTERN.fill(100, 3, &mut data);
        data
    }

    #[test]
    fn what_was_written_passes() {
        assert_eq!(PATTERN.check(100, 3, &two_sectors()), Ok(()));
        assert_eq!(PATTERN.check(5, 0, &[0; SECTOR]), Ok(()));
    }

    #[test]
    fn each_kind_of_damage_is_named() {
        let data = two_sectors();
        let found = |pattern: Pattern, sector, generation, data: &[u8]| {
            pattern
                .check(sector, generation, data)
                .map_err(|mismatch| mismatch.found)
        };
        let stale = Err(Found::Other {
            sector: 100,
            generation: 3,
        });
        assert_eq!(found(PATTERN, 100, 4, &data), stale, "an old generation");
        assert_eq!(found(PATTERN, 101, 3, &data), stale, "another place");
        assert_eq!(
            found(PATTERN, 100, 1, &[0; SECTOR]),
            Err(Found::Zeroes),
            "a lost write"
        );
        assert_eq!(
            found(Pattern { seed: 8 }, 100, 3, &data),
            Err(Found::Garbage),
            "an old run"
        );
        let mut torn = data;
        torn[SECTOR + 300] ^= 1;
        let error = PATTERN.check(100, 3, &torn).unwrap_err();
        assert_eq!((error.sector, error.found), (101, Found::Garbage));
        assert_eq!(
            error.to_string(),
            "sector 101: expected generation 3, found garbage"
        );
    }
}
