//! The two halves of a ring against each other.

use std::sync::atomic::AtomicU64;

use xenblk_ring::*;

const IDENTITY_REFS: u32 = 8;

fn identity(pages: u32) -> JournalIdentity {
    JournalIdentity {
        boot_id: [1; 16],
        domain_uuid: [2; 16],
        domid: 3,
        devid: 51712,
        queue: 0,
        ring_refs: (IDENTITY_REFS..IDENTITY_REFS + pages).collect(),
        port: 4,
        max_indirect_segments: 256,
        incarnation: 1,
        target_dev: 5,
        target_ino: 6,
    }
}

fn journal(abi: Abi, pages: u32) -> Vec<AtomicU64> {
    (0..journal_bytes(abi.entries(pages)) / 8)
        .map(|_| AtomicU64::new(0))
        .collect()
}

#[test]
fn every_request_comes_back_once_over_every_size() {
    for abi in Abi::ALL {
        for order in 0..=4 {
            let pages = 1 << order;
            let words = heap_words(pages);
            let mut front = FrontRing::init_at(words.clone(), abi, pages, u32::MAX - 40).unwrap();
            let mut back =
                BackRing::attach(words, abi, pages, journal(abi, pages), &identity(pages)).unwrap();
            let mut next = 0_u64;
            let mut answered = 0_u64;
            while answered < 3 * u64::from(back.entries()) {
                while front.free() > 0 {
                    front
                        .push(&RawSlot::with_operation(abi, 0xee, next))
                        .unwrap();
                    next += 1;
                }
                let _ = front.publish();
                while let Some(token) = back.consume().unwrap() {
                    let error = back.request(&token).unwrap_err();
                    assert_eq!((error.op, error.status()), (0xee, Status::NotSupported));
                    back.finish(token, error.status());
                }
                assert_eq!(back.publish().count, back.entries());
                while let Some(response) = front.take().unwrap() {
                    assert_eq!(
                        response,
                        Response {
                            id: answered,
                            op: 0xee,
                            status: -2
                        }
                    );
                    answered += 1;
                }
            }
        }
    }
}
