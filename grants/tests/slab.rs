//! The bounce slab under arbitrary use: runs never overlap, and all memory comes back.

use std::collections::BTreeSet;

use proptest::prelude::*;
use xenblk_grants::{Run, Slab, XEN_PAGE_SIZE};

#[derive(Clone, Debug)]
enum Step {
    Alloc(usize),
    /// Of the runs held, the one at this share of 255.
    Free(u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0usize..=40).prop_map(Step::Alloc),
        1 => (0usize..=300).prop_map(Step::Alloc),
        3 => any::<u8>().prop_map(Step::Free),
    ];
    prop::collection::vec(step, 0..200)
}

fn pages_of(run: &Run) -> std::ops::Range<usize> {
    let first = run.offset() / XEN_PAGE_SIZE;
    first..first + run.pages()
}

proptest! {
    #[test]
    fn runs_never_overlap_and_all_memory_returns(size in 1usize..=256, steps in steps()) {
        let mut slab = Slab::reserve(size * XEN_PAGE_SIZE).unwrap();
        let size = size.next_power_of_two();
        let mut held: Vec<(Run, u8)> = Vec::new();
        let mut used = BTreeSet::new();
        for (step, mark) in steps.into_iter().zip((1..=u8::MAX).cycle()) {
            match step {
                Step::Alloc(pages) => {
                    let Some(mut run) = slab.alloc(pages) else {
                        prop_assert!(pages == 0 || pages > size || !used.is_empty(), "an empty slab gives {pages}");
                        continue;
                    };
                    prop_assert_eq!(run.pages(), pages);
                    for page in pages_of(&run) {
                        prop_assert!(page < size && used.insert(page), "page {} was taken", page);
                    }
                    slab.bytes_mut(&mut run).fill(mark);
                    held.push((run, mark));
                }
                Step::Free(_) if held.is_empty() => {}
                Step::Free(which) => {
                    let (run, mark) = held.swap_remove(usize::from(which) * held.len() / 256);
                    prop_assert!(slab.bytes(&run) == vec![mark; run.len()], "nobody wrote to it");
                    pages_of(&run).for_each(|page| { used.remove(&page); });
                    slab.free(run);
                }
            }
            prop_assert_eq!(slab.free_pages(), size - used.len());
        }
        for (run, _) in held {
            slab.free(run);
        }
        prop_assert_eq!(slab.free_pages(), size);
        let whole = slab.alloc(size);
        prop_assert!(whole.is_some(), "everything merged again");
    }
}

#[test]
fn the_last_pages_given_back_are_the_first_handed_out() {
    let mut slab = Slab::reserve(64 * XEN_PAGE_SIZE).unwrap();
    let (one, two) = (slab.alloc(11).unwrap(), slab.alloc(11).unwrap());
    let (warm, keep) = (two.offset(), one);
    slab.free(two);
    assert_eq!(slab.alloc(11).unwrap().offset(), warm);
    drop(keep);
}

#[test]
fn addresses_stay_inside_the_run() {
    let mut slab = Slab::reserve(4 * XEN_PAGE_SIZE).unwrap();
    let run = slab.alloc(2).unwrap();
    let other = Slab::reserve(4 * XEN_PAGE_SIZE).unwrap().alloc(2).unwrap();
    let start = slab.ptr(&run, 0, run.len()).unwrap();
    assert_eq!(slab.ptr(&run, 4097, 4095), Some(start.wrapping_add(4097)));
    for (offset, len) in [
        (0, run.len() + 1),
        (run.len(), 1),
        (1, usize::MAX),
        (usize::MAX, 1),
    ] {
        assert_eq!(slab.ptr(&run, offset, len), None);
    }
    assert_eq!(slab.ptr(&other, 0, 1), None, "a run of another slab");
    assert!(slab.bytes(&other).is_empty());
}

#[test]
fn a_slab_has_a_size() {
    for bytes in [0, usize::MAX, (1 << 42) + 1] {
        assert!(Slab::reserve(bytes).is_err(), "{bytes}");
    }
    assert_eq!(Slab::reserve(4097).unwrap().pages(), 2);
}
