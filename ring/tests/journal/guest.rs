//! A guest that keeps its ring busy, believes nothing it is told twice, and remembers when it asked
//! for what and when it was answered.

use std::collections::BTreeMap;
use std::rc::Rc;

use xenblk_ring::{
    DirectSegments, FrontRing, HeapWords, IndirectRequest, RawSlot, Request, Response, RwOp,
    RwRequest, Segment, Status,
};

use crate::mortal::ABI;
use crate::{BLOCKS, Chance};

const UNKNOWN: u8 = 0xee;
/// Grefs of one request: its data pages, the other ones its list names later, and the list's page.
const GREFS: u64 = 16;
const OTHERS: u32 = 4;
const LIST: u32 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Read,
    Write,
    /// That many segments.
    Indirect(u32),
    Unknown,
}

pub(crate) struct Asked {
    pub(crate) work: Work,
    pub(crate) block: u64,
    at: u64,
}

/// One write or read of one block, from its request to its response.
struct Past {
    block: u64,
    value: u64,
    write: bool,
    asked: u64,
    answered: u64,
}

pub(crate) struct Guest {
    front: FrontRing<HeapWords>,
    chance: Rc<Chance>,
    requests: u64,
    next: u64,
    clock: u64,
    pub(crate) asked: BTreeMap<u64, Asked>,
    pages: BTreeMap<u32, u64>,
    /// Lists that were read once: they say something else from then on.
    read_lists: Vec<u32>,
    /// The grefs each transfer was first run with.
    pub(crate) ran: BTreeMap<u64, Vec<u32>>,
    history: Vec<Past>,
    pub(crate) error: Option<String>,
}

impl Guest {
    pub(crate) fn new(ring: HeapWords, start: u32, requests: u64, chance: Rc<Chance>) -> Self {
        Self {
            front: FrontRing::init_at(ring, ABI, 1, start).unwrap(),
            chance,
            requests,
            next: 0,
            clock: 0,
            asked: BTreeMap::new(),
            pages: BTreeMap::new(),
            read_lists: Vec::new(),
            ran: BTreeMap::new(),
            history: Vec::new(),
            error: None,
        }
    }

    pub(crate) fn finished(&self) -> bool {
        self.next == self.requests && self.asked.is_empty()
    }

    /// Takes answers and asks for more, some of either.
    pub(crate) fn step(&mut self) {
        for _ in 0..self.chance.below(20) {
            match self.front.take() {
                Ok(Some(response)) => self.answered(response),
                Ok(None) => break,
                Err(corrupt) => self.fail(&format!("rsp_prod: {corrupt}")),
            }
        }
        for _ in 0..self.chance.below(20) {
            if self.next < self.requests && self.front.free() > 0 {
                self.ask();
            }
        }
        let _ = self.front.publish();
    }

    fn fail(&mut self, error: &str) {
        self.error.get_or_insert_with(|| error.to_owned());
    }

    fn ask(&mut self) {
        let id = self.next;
        self.next += 1;
        self.clock += 1;
        let work = match self.chance.below(8) {
            0 => Work::Unknown,
            1 | 2 => Work::Read,
            3..6 => Work::Write,
            _ => Work::Indirect(1 + self.chance.below(3) as u32),
        };
        let block = self.chance.below(BLOCKS - 3);
        let gref = (id * GREFS) as u32;
        for page in 0..2 * OTHERS {
            self.pages
                .insert(gref + page, (id + 1) * 100 + u64::from(page));
        }
        self.front.push(&encode(id, work, block, gref)).unwrap();
        self.asked.insert(
            id,
            Asked {
                work,
                block,
                at: self.clock,
            },
        );
    }

    fn answered(&mut self, response: Response) {
        let id = response.id;
        let Some(Asked { work, block, at }) = self.asked.remove(&id) else {
            return self.fail(&format!(
                "an answer for {id}, answered before or never asked"
            ));
        };
        let expected = match work {
            Work::Read => (0, Status::Okay),
            Work::Write | Work::Indirect(_) => (1, Status::Okay),
            Work::Unknown => (UNKNOWN, Status::NotSupported),
        };
        if (response.op, response.status) != (expected.0, expected.1.to_wire()) {
            self.fail(&format!("{response:?} for {work:?}"));
        }
        self.clock += 1;
        if work == Work::Unknown {
            return;
        }
        let Some(grefs) = self.ran.get(&id) else {
            return self.fail(&format!("{work:?} {id} is answered but was never run"));
        };
        for (block, gref) in (block..).zip(grefs) {
            self.history.push(Past {
                block,
                value: self.pages[gref],
                write: work != Work::Read,
                asked: at,
                answered: self.clock,
            });
        }
    }

    /// The list in a page; the guest rewrites it as soon as it was read.
    pub(crate) fn read_list(&mut self, gref: u32) -> Result<Vec<Segment>, String> {
        let id = u64::from(gref) / GREFS;
        let Some(Asked {
            work: Work::Indirect(count),
            ..
        }) = self.asked.get(&id)
        else {
            return Err(format!(
                "page {gref} is not the list of a request in flight"
            ));
        };
        if u64::from(gref) % GREFS != u64::from(LIST) {
            return Err(format!("page {gref} is no list"));
        }
        let read = self.read_lists.contains(&gref);
        let first = gref - LIST + if read { OTHERS } else { 0 };
        self.read_lists.push(gref);
        Ok((0..*count)
            .map(|page| Segment::new(first + page, 0, 0).unwrap())
            .collect())
    }

    /// A page granted for request `id`.
    pub(crate) fn page(&mut self, id: u64, gref: u32) -> Result<&mut u64, String> {
        if u64::from(gref) / GREFS != id {
            return Err(format!("request {id} is run with page {gref} of another"));
        }
        self.pages
            .get_mut(&gref)
            .ok_or(format!("page {gref} was never granted"))
    }

    /// Everything read and what is left on the disk could have come from one request at a time, each
    /// between its asking and its answer: what a block held was written, or is the disk's 0, and was
    /// not overwritten by a request that was asked for later and answered earlier.
    pub(crate) fn check_disk(&self, disk: &[u64]) -> Result<(), String> {
        if !self.finished() {
            return Err("requests left unanswered".to_owned());
        }
        let reads = self.history.iter().filter(|past| !past.write);
        for read in reads {
            self.check_value(read.block, read.value, read.asked, read.answered)?;
        }
        for (block, &value) in (0..).zip(disk) {
            self.check_value(block, value, u64::MAX, u64::MAX)?;
        }
        Ok(())
    }

    fn check_value(&self, block: u64, value: u64, asked: u64, answered: u64) -> Result<(), String> {
        let writes = || {
            self.history
                .iter()
                .filter(|past| past.write && past.block == block)
        };
        let (began, ended) = match writes().find(|write| write.value == value) {
            Some(write) => (write.asked, write.answered),
            None if value == 0 => (0, 0),
            None => return Err(format!("block {block} holds {value}, which nobody wrote")),
        };
        if began > answered {
            return Err(format!("block {block} held {value} before it was written"));
        }
        if writes().any(|later| later.asked > ended && later.answered < asked) {
            return Err(format!("block {block} holds {value}, overwritten before"));
        }
        Ok(())
    }
}

fn encode(id: u64, work: Work, sector: u64, gref: u32) -> RawSlot {
    let request = match work {
        Work::Unknown => return RawSlot::with_operation(ABI, UNKNOWN, id),
        Work::Indirect(count) => {
            let grefs = [gref + LIST; 8];
            let count = count as u16;
            Request::Indirect(IndirectRequest::new(id, RwOp::Write, sector, count, grefs).unwrap())
        }
        Work::Read | Work::Write => {
            let segments = DirectSegments::new(&[Segment::new(gref, 0, 0).unwrap()]).unwrap();
            let op = if work == Work::Read {
                RwOp::Read
            } else {
                RwOp::Write
            };
            Request::Rw(RwRequest {
                id,
                op,
                sector,
                segments,
            })
        }
    };
    request.encode(ABI)
}
