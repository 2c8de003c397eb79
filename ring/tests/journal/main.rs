//! Crash points: the real ring and journal over memory that takes no more stores after the k-th, as
//! when the process ends there; recovered, perhaps killed again, until the guest has its answers.
//! Always: each request answered exactly once and with its own status, never run again once answered,
//! never run with other segments than before, and the disk as some serial execution leaves it.
//!
//! Then the same with one store held back behind another, or left out: every such order is caught,
//! so the order that stands is needed and these tests would notice its loss.

mod guest;
mod host;
mod mortal;
#[path = "../rig/mod.rs"]
mod rig;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use guest::Guest;
use host::{Ended, Host};
use mortal::{Fault, Kind, Life, Memory};

/// Sectors of the disk: few, so that requests overlap.
const BLOCKS: u64 = 8;

/// Numbers that depend on the seed alone.
struct Chance(Cell<u64>);

impl Chance {
    fn new(seed: u64) -> Rc<Self> {
        Rc::new(Self(Cell::new(seed.wrapping_mul(2) + 1)))
    }

    /// 0 to `bound` - 1 (splitmix64).
    fn below(&self, bound: u64) -> u64 {
        self.0.set(self.0.get().wrapping_add(0x9e37_79b9_7f4a_7c15));
        let mut mixed = self.0.get();
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % bound
    }

    fn one_in(&self, bound: u64) -> bool {
        self.below(bound) == 0
    }
}

/// What outlives a host process besides the ring and its journal.
struct World {
    chance: Rc<Chance>,
    memory: Rc<Memory>,
    guest: Rc<RefCell<Guest>>,
    disk: RefCell<[u64; BLOCKS as usize]>,
    attached: Cell<bool>,
}

/// One guest with `requests` to make, over hosts that die after `lives` stores each, the last never.
/// The stores of the last, or what went wrong.
fn trial(seed: u64, requests: u64, lives: &[u64], fault: Fault) -> Result<u64, String> {
    let chance = Chance::new(seed);
    let memory = Rc::new(Memory::new());
    let start = [0, u32::MAX - 20, 0x7fff_ffff][chance.below(3) as usize];
    let guest = Guest::new(memory.ring.clone(), start, requests, Rc::clone(&chance));
    let world = World {
        chance,
        memory,
        guest: Rc::new(RefCell::new(guest)),
        disk: RefCell::new([0; BLOCKS as usize]),
        attached: Cell::new(false),
    };
    for &stores in lives.iter().chain([&u64::MAX]) {
        let life = Life::new(&world, stores, fault);
        let ended = Host::start(&world, &life)
            .and_then(|host| host.map_or(Ok(Ended::Died), |mut host| host.run()))?;
        if ended == Ended::Served {
            world.guest.borrow_mut().check_disk(&*world.disk.borrow())?;
            return Ok(life.made());
        }
        for _ in 0..world.chance.below(4) {
            world.guest.borrow_mut().step();
        }
    }
    Err("the last host died".to_owned())
}

/// Long runs with several crashes each.
fn random_crashes(seed: u64, fault: Fault) -> Result<u64, String> {
    let chance = Chance::new(!seed);
    let lives: Vec<u64> = (0..1 + chance.below(4))
        .map(|_| chance.below(1500))
        .collect();
    trial(seed, 80, &lives, fault).map_err(|error| format!("seed {seed}, lives {lives:?}: {error}"))
}

#[test]
fn a_crash_after_any_store_is_survived() {
    for seed in 0..4 {
        let stores = trial(seed, 12, &[], Fault::None).unwrap();
        assert!(stores > 400, "{stores}");
        for crash in 0..=stores {
            // The successor dies too, early: recovering is made of stores as well.
            for again in [u64::MAX, crash % 97] {
                trial(seed, 12, &[crash, again], Fault::None)
                    .unwrap_or_else(|error| panic!("seed {seed}, {crash} then {again}: {error}"));
            }
        }
    }
}

#[test]
fn crashes_anywhere_in_long_runs_are_survived() {
    for seed in 0..800 {
        random_crashes(seed, Fault::None).unwrap();
    }
}

#[test]
fn every_other_order_is_caught() {
    let hold = |held, until| Fault::Hold { held, until };
    let faults = [
        hold(Kind::Raw, Kind::Pending),
        hold(Kind::Seq, Kind::Pending),
        Fault::Omit(Kind::Unplace),
        Fault::Omit(Kind::NoSegments),
        hold(Kind::Table, Kind::SegsValid),
        hold(Kind::Status, Kind::Done),
        hold(Kind::Place, Kind::Published),
        hold(Kind::Response, Kind::Published),
        hold(Kind::Response, Kind::RspProd),
        hold(Kind::Published, Kind::RspProd),
        hold(Kind::Published, Kind::Free),
    ];
    for fault in faults {
        let mut runs = (0..5000).map(|seed| random_crashes(seed, fault));
        let caught = runs.find_map(Result::err);
        println!("{fault:?}: {caught:?}");
        assert!(caught.is_some(), "{fault:?} goes unnoticed");
    }
}
