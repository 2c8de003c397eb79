//! The hypervisor's maptrack table: one entry for each page that a domain has mapped, and in a PV domain
//! two. It is one table for all backends of the host, so the rings get a budget of it, and each ring its
//! quota of that. A ring whose quota is small copies more; none is ever refused for it.

use std::sync::Arc;

use parking_lot::Mutex;
use xenblk_grants::MAX_CHUNK;

use super::MERGE_ROOM;

/// A new ring gets at most this part of what is left, so that something is left for the next.
const PART: u64 = 8;

/// Entries in use, as far as they have been promised to rings.
#[derive(Clone, Debug, Default)]
pub(super) struct Maptrack(Arc<Mutex<u64>>);

/// What one ring was promised, until it is dropped.
#[derive(Debug)]
pub(super) struct Share {
    maptrack: Maptrack,
    entries: u64,
    grants: u32,
}

impl Maptrack {
    /// A share for a ring of `ring_pages`, which it has to map, that would keep up to `wanted` grants mapped.
    /// All rings together may use `limit` entries, a page takes `per_page` of them.
    pub(super) fn share(&self, limit: u32, per_page: u32, ring_pages: u32, wanted: u32) -> Share {
        let per_page = u64::from(per_page.max(1));
        let ring_pages = u64::from(ring_pages);
        let mut used = self.0.lock();
        let left = u64::from(limit).saturating_sub(*used) / per_page;
        let quota = u64::from(wanted).min(left.saturating_sub(ring_pages) / PART);
        // Less than a chunk isn't worth the timer.
        let quota = if quota < MAX_CHUNK as u64 { 0 } else { quota };
        let room = if quota == 0 { 0 } else { MERGE_ROOM.into() };
        let entries = (ring_pages + quota + room) * per_page;
        *used += entries;
        Share {
            maptrack: self.clone(),
            entries,
            grants: u32::try_from(quota).unwrap_or(wanted),
        }
    }
}

impl Share {
    /// Grants the ring may keep mapped; 0: none.
    pub(super) fn grants(&self) -> u32 {
        self.grants
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut used = self.maptrack.0.lock();
        *used = used.saturating_sub(self.entries);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ring_gets_its_pages_and_late_ones_less_of_the_rest() {
        let maptrack = Maptrack::default();
        let share = || maptrack.share(20_000, 2, 16, 1056);
        let first = share();
        assert_eq!(first.grants(), 1056);
        let mut shares = vec![first];
        for _ in 0..100 {
            let next = share();
            assert!(next.grants() <= shares[shares.len() - 1].grants());
            shares.push(next);
        }
        let used = *maptrack.0.lock();
        assert!(used > 18_000, "{used}: most of the budget is used");
        let pages: u64 = shares
            .iter()
            .map(|share| u64::from(share.grants()) + 16)
            .sum();
        assert!(pages * 2 <= used, "and nothing twice");
        assert_eq!(shares[100].grants(), 0);
        drop(shares);
        assert_eq!(*maptrack.0.lock(), 0);
        assert_eq!(share().grants(), 1056);
        assert_eq!(maptrack.share(20_000, 2, 1, 0).grants(), 0, "none wanted");
        assert_eq!(
            maptrack.share(0, 1, 1, 1056).grants(),
            0,
            "no budget at all"
        );
    }
}
