//! Which pages of a slab are free: a buddy allocator whose runs are trimmed to the exact number of
//! pages. Knows page numbers only, no memory.
#![expect(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    reason = "every index is a page number below `pages` or an order below ORDERS, produced here; \
              callers' counts are checked in `alloc` and `free` before any arithmetic"
)]

/// Orders 0 to 31: a slab of 2^32 pages can't be named by a u32.
const ORDERS: usize = 32;
/// End of a list.
const NONE: u32 = u32::MAX;
/// `order` of a page that doesn't start a free block.
const USED: u8 = u8::MAX;

/// Free blocks of 2^k pages, aligned to their size, in one last-in first-out list per order, linked
/// through arrays made at construction: nothing is allocated later, and no operation takes more
/// than a few steps per order.
#[derive(Debug)]
pub(crate) struct Buddy {
    /// First free block of each order.
    heads: [u32; ORDERS],
    /// Neighbours in the list, by the block's first page.
    links: Vec<Link>,
    /// Order of the free block starting at this page, else [`USED`].
    order: Vec<u8>,
    free_pages: u32,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    previous: u32,
    next: u32,
}

impl Buddy {
    pub(crate) fn new(pages: u32) -> Self {
        let none = Link {
            previous: NONE,
            next: NONE,
        };
        let mut buddy = Self {
            heads: [NONE; ORDERS],
            links: vec![none; pages as usize],
            order: vec![USED; pages as usize],
            free_pages: 0,
        };
        buddy.insert_range(0, pages);
        buddy
    }

    pub(crate) fn pages(&self) -> usize {
        self.order.len()
    }

    pub(crate) fn free_pages(&self) -> u32 {
        self.free_pages
    }

    /// First page of a run of exactly `pages` pages; the low end of the most recently freed block of
    /// the smallest order that holds it.
    pub(crate) fn alloc(&mut self, pages: u32) -> Option<u32> {
        if pages == 0 || pages > self.free_pages {
            return None;
        }
        let wanted = pages.checked_next_power_of_two()?.trailing_zeros() as usize;
        let order = (wanted..ORDERS).find(|&order| self.heads[order] != NONE)?;
        let start = self.heads[order];
        self.unlink(start);
        self.free_pages -= 1 << order;
        // The tail's buddies lie in the run just handed out, so nothing merges back.
        self.insert_range(start + pages, start + (1 << order));
        Some(start)
    }

    /// Takes back what [`alloc`](Self::alloc) gave.
    pub(crate) fn free(&mut self, start: u32, pages: u32) {
        debug_assert!(start as usize + pages as usize <= self.pages());
        self.insert_range(start, start + pages);
    }

    /// Frees `start..end` as the few aligned blocks it consists of.
    fn insert_range(&mut self, mut start: u32, end: u32) {
        self.free_pages += end - start;
        while start < end {
            let fits = (end - start).ilog2();
            let order = start.trailing_zeros().min(fits);
            self.insert(start, order as usize);
            start += 1 << order;
        }
    }

    /// Frees one block, merged with its buddy as long as that one is free too.
    fn insert(&mut self, mut start: u32, mut order: usize) {
        while order + 1 < ORDERS {
            let buddy = start ^ (1 << order);
            if self
                .order
                .get(buddy as usize)
                .is_none_or(|&free| usize::from(free) != order)
            {
                break;
            }
            self.unlink(buddy);
            start = start.min(buddy);
            order += 1;
        }
        self.push(start, order);
    }

    fn push(&mut self, start: u32, order: usize) {
        let next = self.heads[order];
        if next != NONE {
            self.links[next as usize].previous = start;
        }
        self.links[start as usize] = Link {
            previous: NONE,
            next,
        };
        self.heads[order] = start;
        self.order[start as usize] = u8::try_from(order).unwrap_or(USED);
    }

    fn unlink(&mut self, start: u32) {
        let order = usize::from(self.order[start as usize]);
        let Link { previous, next } = self.links[start as usize];
        if previous == NONE {
            self.heads[order] = next;
        } else {
            self.links[previous as usize].next = next;
        }
        if next != NONE {
            self.links[next as usize].previous = previous;
        }
        self.order[start as usize] = USED;
    }
}
