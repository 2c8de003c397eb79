//! The final check against the other side's publish, over every interleaving and every reordering the
//! memory model allows: nobody goes to sleep on something to do without an event on its way.
//!
//! `RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p xenblk-ring --test loom --release`
#![cfg(loom)]

mod rig;

use std::sync::atomic::{AtomicU32 as PlainU32, AtomicU64};

use loom::sync::atomic::{
    AtomicBool, AtomicU32,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
    fence,
};
use loom::sync::{Arc, Notify};
use loom::thread;
use rig::{identity, journal};
use xenblk_ring::{Abi, BackRing, FrontRing, RawSlot, Status, Words};

const ABI: Abi = Abi::X86_64;
/// Words the models share: the indices, and id and operation of the slots in use.
const SHARED: [usize; 8] = [0, 1, 2, 3, 16, 18, 16 + 28, 18 + 28];

/// Ring memory whose decisive words loom watches. The rest is plain: thousands of watched words would
/// only repeat what these show.
#[derive(Clone)]
struct ModelWords {
    shared: Arc<[AtomicU32; SHARED.len()]>,
    rest: std::sync::Arc<[PlainU32]>,
    fenced: bool,
}

impl ModelWords {
    /// `fenced`: with the barrier that ring.h calls `xen_mb`.
    fn new(fenced: bool) -> Self {
        Self {
            shared: Arc::new(std::array::from_fn(|_| AtomicU32::new(0))),
            rest: (0..1024).map(|_| PlainU32::new(0)).collect(),
            fenced,
        }
    }

    fn watched(&self, index: usize) -> Option<&AtomicU32> {
        SHARED
            .iter()
            .position(|&shared| shared == index)
            .map(|at| &self.shared[at])
    }
}

impl Words for ModelWords {
    fn word_count(&self) -> usize {
        self.rest.len()
    }

    fn load(&self, index: usize) -> u32 {
        match self.watched(index) {
            Some(word) => word.load(Relaxed),
            None => self.rest[index].load(Relaxed),
        }
    }

    fn load_acquire(&self, index: usize) -> u32 {
        self.watched(index)
            .expect("only indices are acquired")
            .load(Acquire)
    }

    fn store(&self, index: usize, value: u32) {
        match self.watched(index) {
            Some(word) => word.store(value, Relaxed),
            None => self.rest[index].store(value, Relaxed),
        }
    }

    fn store_release(&self, index: usize, value: u32) {
        self.watched(index)
            .expect("only indices are released")
            .store(value, Release);
    }

    fn full_fence(&self) {
        if self.fenced {
            fence(SeqCst);
        }
    }
}

type Front = FrontRing<ModelWords>;

type Back = BackRing<ModelWords, Vec<AtomicU64>>;

fn attach(words: &ModelWords) -> Back {
    BackRing::attach(words.clone(), ABI, 1, journal(ABI, 1), &identity(1)).unwrap()
}

fn push(front: &mut Front, id: u64) -> bool {
    front.push(&RawSlot::with_operation(ABI, 1, id)).unwrap();
    front.publish()
}

/// Takes and answers everything there is; whether the frontend wants an event.
fn serve(back: &mut Back, expected: &mut u64) -> bool {
    while let Some(token) = back.consume().unwrap() {
        // No segments, so the request is an error that names what the slot held.
        let error = back.request(&token).unwrap_err();
        assert_eq!(
            (error.id, error.op),
            (*expected, 1),
            "a request seen before it was written"
        );
        *expected += 1;
        back.finish(token, Status::Okay);
    }
    back.publish().notify
}

/// One request against a backend going to sleep.
fn request_against_final_check(fenced: bool) {
    loom::model(move || {
        let words = ModelWords::new(fenced);
        let mut front = FrontRing::init(words.clone(), ABI, 1).unwrap();
        let mut back = attach(&words);
        // One served already: req_event stays 1, behind, until the next final check.
        let _ = push(&mut front, 0);
        let mut seen = 0;
        let _ = serve(&mut back, &mut seen);
        let notified = Arc::new(AtomicBool::new(false));
        let guest = thread::spawn({
            let notified = notified.clone();
            move || notified.store(push(&mut front, 1), SeqCst)
        });
        let more = back.final_check().unwrap();
        if more {
            let _ = serve(&mut back, &mut seen);
            assert_eq!(seen, 2);
        }
        guest.join().unwrap();
        assert!(more || notified.load(SeqCst), "lost wake-up of the backend");
    });
}

/// One response against a frontend going to sleep.
fn response_against_final_check(fenced: bool) {
    loom::model(move || {
        let words = ModelWords::new(fenced);
        let mut front = FrontRing::init(words.clone(), ABI, 1).unwrap();
        // One answered already: rsp_event stays 1, behind, until the next final check.
        let _ = push(&mut front, 0);
        let mut back = attach(&words);
        let _ = serve(&mut back, &mut 0);
        assert_eq!(front.take().unwrap().unwrap().id, 0);
        let _ = push(&mut front, 1);
        drop(back);
        let notified = Arc::new(AtomicBool::new(false));
        let host = thread::spawn({
            let (notified, words) = (notified.clone(), words.clone());
            move || notified.store(serve(&mut attach(&words), &mut 1), SeqCst)
        });
        let more = front.final_check().unwrap();
        if more {
            let response = front.take().unwrap().unwrap();
            assert_eq!(
                (response.id, response.op),
                (1, 1),
                "a response seen before it was written"
            );
        }
        host.join().unwrap();
        assert!(
            more || notified.load(SeqCst),
            "lost wake-up of the frontend"
        );
    });
}

#[test]
fn a_backend_going_to_sleep_misses_no_request() {
    request_against_final_check(true);
}

#[test]
#[should_panic(expected = "lost wake-up of the backend")]
fn without_the_fence_it_misses_one() {
    request_against_final_check(false);
}

#[test]
fn a_frontend_going_to_sleep_misses_no_response() {
    response_against_final_check(true);
}

#[test]
#[should_panic(expected = "lost wake-up of the frontend")]
fn without_the_fence_the_frontend_misses_one() {
    response_against_final_check(false);
}

/// Both sides asleep unless woken, two requests: a lost event in either direction is a deadlock.
#[test]
fn two_requests_are_served_by_sides_that_sleep() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let words = ModelWords::new(true);
        let mut front = FrontRing::init(words.clone(), ABI, 1).unwrap();
        let (to_host, to_guest) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let host = thread::spawn({
            let (to_host, to_guest) = (to_host.clone(), to_guest.clone());
            move || {
                let mut back = attach(&words);
                let mut seen = 0;
                while seen < 2 {
                    if serve(&mut back, &mut seen) {
                        to_guest.notify();
                    }
                    if seen < 2 && !back.final_check().unwrap() {
                        to_host.wait();
                    }
                }
            }
        });
        for id in 0..2 {
            if push(&mut front, id) {
                to_host.notify();
            }
        }
        let mut answered = 0;
        while answered < 2 {
            while let Some(response) = front.take().unwrap() {
                assert_eq!(response.id, answered);
                answered += 1;
            }
            if answered < 2 && !front.final_check().unwrap() {
                to_guest.wait();
            }
        }
        host.join().unwrap();
    });
}
