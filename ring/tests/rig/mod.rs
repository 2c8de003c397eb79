//! What the tests of a ring start from.

use std::sync::atomic::AtomicU64;

use xenblk_ring::{Abi, JournalIdentity, journal_bytes};

pub(crate) fn identity(pages: u32) -> JournalIdentity {
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

pub(crate) fn journal(abi: Abi, pages: u32) -> Vec<AtomicU64> {
    (0..journal_bytes(abi.entries(pages)) / 8)
        .map(|_| AtomicU64::new(0))
        .collect()
}
