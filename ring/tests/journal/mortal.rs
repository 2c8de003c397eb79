//! Memory that outlives its writer: a ring and a journal that stop taking stores when a life is over.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use xenblk_ring::journal::word;
use xenblk_ring::layout::{RING_HEADER_BYTES, RSP_PROD};
use xenblk_ring::{Abi, HeapWords, JournalWords, Words, heap_words};

use crate::guest::Guest;
use crate::{Chance, World, rig};

pub(crate) const ABI: Abi = Abi::X86_64;
const ENTRIES: usize = 32;

/// A store by what it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Raw,
    Seq,
    Unplace,
    NoSegments,
    Pending,
    Table,
    SegsValid,
    Status,
    Done,
    Place,
    Response,
    Published,
    RspProd,
    Free,
    /// Event index, and everything while attaching.
    Other,
}

/// How the order of stores differs from the real one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Stores of one kind wait for the next of another.
    Hold {
        held: Kind,
        until: Kind,
    },
    /// Stores of one kind are not made.
    Omit(Kind),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Ring(usize),
    Journal(usize),
}

impl Place {
    fn kind(self, value: u64) -> Kind {
        let slots = word::SLOTS..word::SLOTS + ENTRIES * word::SLOT_STRIDE;
        match self {
            Self::Ring(RSP_PROD) => Kind::RspProd,
            Self::Ring(index) if index >= RING_HEADER_BYTES / 4 => Kind::Response,
            Self::Ring(_) => Kind::Other,
            Self::Journal(word::PUBLISHED) => Kind::Published,
            Self::Journal(index) if index < slots.start => Kind::Other,
            Self::Journal(index) if index >= slots.end => Kind::Table,
            Self::Journal(index) => match (index - slots.start) % word::SLOT_STRIDE {
                word::SEQ => Kind::Seq,
                word::AT if value == u64::MAX => Kind::Unplace,
                word::AT => Kind::Place,
                word::SEGS_VALID if value == 0 => Kind::NoSegments,
                word::SEGS_VALID => Kind::SegsValid,
                word::STATUS => Kind::Status,
                word::STATE => [Kind::Free, Kind::Pending, Kind::Done][value as usize],
                _ => Kind::Raw,
            },
        }
    }
}

pub(crate) struct Memory {
    pub(crate) ring: HeapWords,
    journal: Arc<[AtomicU64]>,
}

impl Memory {
    pub(crate) fn new() -> Self {
        Self {
            ring: heap_words(1),
            journal: rig::journal(ABI, 1).into(),
        }
    }
}

/// One process's access to the memory. The guest's processors run between its stores.
pub(crate) struct Life {
    memory: Rc<Memory>,
    guest: Rc<RefCell<Guest>>,
    chance: Rc<Chance>,
    left: Cell<u64>,
    made: Cell<u64>,
    dead: Cell<bool>,
    fault: Fault,
    held: RefCell<Vec<(Place, u64)>>,
}

impl Life {
    pub(crate) fn new(world: &World, stores: u64, fault: Fault) -> Rc<Self> {
        Rc::new(Self {
            memory: Rc::clone(&world.memory),
            guest: Rc::clone(&world.guest),
            chance: Rc::clone(&world.chance),
            left: Cell::new(stores),
            made: Cell::new(0),
            dead: Cell::new(false),
            fault,
            held: RefCell::default(),
        })
    }

    /// Nothing may be done any more: the process ended before the last thing it tried.
    pub(crate) fn dead(&self) -> bool {
        self.dead.get()
    }

    pub(crate) fn made(&self) -> u64 {
        self.made.get()
    }

    /// Whether one more thing can be done that others see.
    pub(crate) fn spend(&self) -> bool {
        match self.left.get().checked_sub(1) {
            Some(left) if !self.dead() => {
                self.left.set(left);
                self.made.set(self.made.get() + 1);
                true
            }
            _ => {
                self.dead.set(true);
                false
            }
        }
    }

    fn store(&self, place: Place, value: u64) {
        let attaching = self.load(Place::Journal(word::MAGIC)) == 0;
        let kind = if attaching {
            Kind::Other
        } else {
            place.kind(value)
        };
        match self.fault {
            Fault::Omit(omitted) if omitted == kind => return,
            Fault::Hold { held, .. } if held == kind => {
                return self.held.borrow_mut().push((place, value));
            }
            _ => self.commit(place, value),
        }
        if matches!(self.fault, Fault::Hold { until, .. } if until == kind) {
            for (place, value) in self.held.take() {
                self.commit(place, value);
            }
        }
    }

    fn commit(&self, place: Place, value: u64) {
        if !self.spend() {
            return;
        }
        match place {
            Place::Ring(index) => self.memory.ring.store_release(index, value as u32),
            Place::Journal(index) => self.memory.journal.store(index, value),
        }
        if self.chance.one_in(16)
            && let Ok(mut guest) = self.guest.try_borrow_mut()
        {
            guest.step();
        }
    }

    fn load(&self, place: Place) -> u64 {
        let held = self.held.borrow();
        if let Some((_, value)) = held.iter().rev().find(|(at, _)| *at == place) {
            return *value;
        }
        match place {
            Place::Ring(index) => self.memory.ring.load_acquire(index).into(),
            Place::Journal(index) => self.memory.journal[index].load(SeqCst),
        }
    }
}

pub(crate) struct MortalRing(pub(crate) Rc<Life>);

impl Words for MortalRing {
    fn word_count(&self) -> usize {
        self.0.memory.ring.word_count()
    }

    fn load(&self, index: usize) -> u32 {
        self.0.load(Place::Ring(index)) as u32
    }

    fn load_acquire(&self, index: usize) -> u32 {
        self.load(index)
    }

    fn store(&self, index: usize, value: u32) {
        self.0.store(Place::Ring(index), value.into());
    }

    fn store_release(&self, index: usize, value: u32) {
        self.store(index, value);
    }
}

pub(crate) struct MortalJournal(pub(crate) Rc<Life>);

impl JournalWords for MortalJournal {
    fn word_count(&self) -> usize {
        self.0.memory.journal.len()
    }

    fn load(&self, index: usize) -> u64 {
        self.0.load(Place::Journal(index))
    }

    fn store(&self, index: usize, value: u64) {
        self.0.store(Place::Journal(index), value);
    }
}
