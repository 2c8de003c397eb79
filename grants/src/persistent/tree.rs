//! Which grant references are mapped, and where: a radix tree of two levels over the reference, filled
//! as references come. A guest chooses them, so its memory is bounded by what the leaves hold: an empty
//! leaf is freed, and a guest that spreads its references out gets one leaf of a kilobyte for each.
#![expect(
    clippy::indexing_slicing,
    reason = "indices are a reference's high and low bits, masked to the arrays' lengths"
)]

use crate::GrantRef;

/// References from here on are refused: 2^20 is 32 times what a Linux guest's table holds by default.
const LIMIT: u32 = 1 << 20;
/// A reference's bits that index a leaf.
const LEAF_BITS: u32 = 9;
const LEAF: usize = 1 << LEAF_BITS;
const TOP: usize = (LIMIT >> LEAF_BITS) as usize;

/// What is known of a reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// Nothing.
    Unknown,
    /// It is to be mapped.
    Wanted,
    /// It is mapped at this page of the window, below [`MAX_PAGE`].
    Page(u16),
}

#[derive(Debug)]
struct Leaf {
    entries: [u16; LEAF],
    used: usize,
}

/// See the module's head. Without entries it owns no memory.
#[derive(Debug, Default)]
pub(super) struct Tree {
    /// [`TOP`] leaves, or none before the first entry.
    top: Vec<Option<Box<Leaf>>>,
    used: usize,
}

const UNKNOWN: u16 = u16::MAX;
const WANTED: u16 = u16::MAX - 1;
/// Pages of a window have numbers below this.
pub(super) const MAX_PAGE: usize = WANTED as usize;

impl Tree {
    /// Whether the tree has a place for `gref`.
    pub(super) fn takes(gref: GrantRef) -> bool {
        gref.0 < LIMIT
    }

    pub(super) fn get(&self, gref: GrantRef) -> Entry {
        let (high, low) = split(gref);
        match self.top.get(high).and_then(Option::as_ref) {
            None => Entry::Unknown,
            Some(leaf) => match leaf.entries[low] {
                UNKNOWN => Entry::Unknown,
                WANTED => Entry::Wanted,
                page => Entry::Page(page),
            },
        }
    }

    /// Sets what is known of `gref`, for which there has to be a [place](Self::takes).
    pub(super) fn set(&mut self, gref: GrantRef, entry: Entry) {
        let (high, low) = split(gref);
        if self.top.is_empty() {
            self.top.resize_with(TOP, || None);
        }
        let Some(place) = self.top.get_mut(high) else {
            return;
        };
        let leaf = place.get_or_insert_with(|| {
            Box::new(Leaf {
                entries: [UNKNOWN; LEAF],
                used: 0,
            })
        });
        let new = match entry {
            Entry::Unknown => UNKNOWN,
            Entry::Wanted => WANTED,
            Entry::Page(page) => page,
        };
        let (was, is) = (leaf.entries[low] != UNKNOWN, new != UNKNOWN);
        leaf.entries[low] = new;
        match (was, is) {
            (false, true) => {
                leaf.used = leaf.used.saturating_add(1);
                self.used = self.used.saturating_add(1);
            }
            (true, false) => {
                leaf.used = leaf.used.saturating_sub(1);
                self.used = self.used.saturating_sub(1);
            }
            _ => {}
        }
        if leaf.used == 0 {
            *place = None;
        }
        if self.used == 0 {
            self.top = Vec::new();
        }
    }

    /// References of which something is known.
    pub(super) fn len(&self) -> usize {
        self.used
    }
}

/// Index of the leaf, which is beyond all of them for a reference that is too large, and index in it.
fn split(gref: GrantRef) -> (usize, usize) {
    ((gref.0 >> LEAF_BITS) as usize, gref.0 as usize & (LEAF - 1))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn reference() -> impl Strategy<Value = u32> {
        prop_oneof![0..40u32, 500..530u32, LIMIT - 3..LIMIT]
    }

    fn entry() -> impl Strategy<Value = Entry> {
        prop_oneof![
            Just(Entry::Unknown),
            Just(Entry::Wanted),
            (0..MAX_PAGE as u16).prop_map(Entry::Page)
        ]
    }

    proptest! {
        #[test]
        fn it_is_a_map_that_owns_nothing_when_empty(
            steps in prop::collection::vec((reference(), entry()), 0..200)
        ) {
            let (mut tree, mut model) = (Tree::default(), BTreeMap::new());
            for (gref, entry) in steps {
                tree.set(GrantRef(gref), entry);
                match entry {
                    Entry::Unknown => model.remove(&gref),
                    entry => model.insert(gref, entry),
                };
                prop_assert_eq!(tree.len(), model.len());
                for gref in (0..40).chain(500..530).chain(LIMIT - 3..LIMIT) {
                    let expected = model.get(&gref).copied().unwrap_or(Entry::Unknown);
                    prop_assert_eq!(tree.get(GrantRef(gref)), expected);
                }
                let leaves = tree.top.iter().flatten().count();
                let high = model.keys().map(|gref| gref >> LEAF_BITS);
                prop_assert_eq!(leaves, high.collect::<std::collections::BTreeSet<_>>().len());
            }
            for gref in model.into_keys() {
                tree.set(GrantRef(gref), Entry::Unknown);
            }
            prop_assert_eq!(tree.top.capacity(), 0);
        }
    }

    #[test]
    fn references_beyond_its_reach_are_unknown() {
        for gref in [LIMIT, u32::MAX] {
            assert!(!Tree::takes(GrantRef(gref)));
            let mut tree = Tree::default();
            assert_eq!(tree.get(GrantRef(gref)), Entry::Unknown);
            tree.set(GrantRef(0), Entry::Wanted);
            assert_eq!(tree.get(GrantRef(gref)), Entry::Unknown);
        }
        assert!(Tree::takes(GrantRef(LIMIT - 1)));
    }
}
