//! A backend process: takes requests, runs them in any order, answers in any order, may end anywhere.

use std::rc::Rc;

use xenblk_ring::{BackRing, RecoverError, Request, RwOp, Segment, Status, Token};

use crate::guest::Work;
use crate::mortal::{ABI, Life, MortalJournal, MortalRing};
use crate::{World, rig};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Died,
    /// The guest has all its answers.
    Served,
}

/// A transfer on its way.
struct Transfer {
    token: Token,
    id: u64,
    op: RwOp,
    block: u64,
    grefs: Vec<u32>,
}

pub(crate) struct Host<'a> {
    world: &'a World,
    life: Rc<Life>,
    ring: BackRing<MortalRing, MortalJournal>,
    /// Consumed, not looked at.
    taken: Vec<Token>,
    submitted: Vec<Transfer>,
    ended: Vec<Token>,
}

impl<'a> Host<'a> {
    /// `None` if it died of it.
    pub(crate) fn start(world: &'a World, life: &Rc<Life>) -> Result<Option<Self>, String> {
        let memory = || (MortalRing(Rc::clone(life)), MortalJournal(Rc::clone(life)));
        let identity = rig::identity(1);
        let (words, journal) = memory();
        let (ring, taken) = match BackRing::recover(words, ABI, 1, journal, &identity) {
            Ok(recovered) => recovered,
            Err(RecoverError::Identity) if !world.attached.get() => {
                let (words, journal) = memory();
                let ring = BackRing::attach(words, ABI, 1, journal, &identity);
                (ring.map_err(|error| error.to_string())?, Vec::new())
            }
            Err(error) => return Err(format!("recover: {error}")),
        };
        if life.dead() {
            return Ok(None);
        }
        world.attached.set(true);
        let life = Rc::clone(life);
        let host = Self {
            world,
            life,
            ring,
            taken,
            submitted: Vec::new(),
            ended: Vec::new(),
        };
        host.check_order()?;
        Ok(Some(host))
    }

    /// The guest numbers its requests, so those to run again have rising ids.
    fn check_order(&self) -> Result<(), String> {
        let ids = self
            .taken
            .iter()
            .map(|token| match self.ring.request(token) {
                Ok(Request::Rw(rw)) => rw.id,
                Ok(Request::Indirect(indirect)) => indirect.id,
                Ok(_) => u64::MAX,
                Err(error) => error.id,
            });
        let ids: Vec<u64> = ids.collect();
        let rising = ids.is_sorted_by(|one, next| one < next);
        if rising {
            Ok(())
        } else {
            Err(format!("to be run again in the order {ids:?}"))
        }
    }

    pub(crate) fn run(&mut self) -> Result<Ended, String> {
        for _ in 0..5000 {
            self.world.guest.borrow_mut().step();
            let done = self.turn();
            if let Some(error) = self.world.guest.borrow_mut().error.take() {
                return Err(error);
            }
            if self.life.dead() {
                self.io_outlives_process()?;
                return Ok(Ended::Died);
            }
            done?;
            if self.world.guest.borrow().finished() {
                return Ok(Ended::Served);
            }
        }
        Err("the guest waits for an answer that doesn't come".to_owned())
    }

    /// A bit of everything. Stops where it died; what is returned counts only if it didn't.
    fn turn(&mut self) -> Result<(), String> {
        let chance = &self.world.chance;
        for _ in 0..chance.below(12) {
            match self.ring.consume().map_err(|corrupt| corrupt.to_string())? {
                Some(token) => self.taken.push(token),
                None => break,
            }
        }
        for token in std::mem::take(&mut self.taken) {
            if self.life.dead() {
                return Ok(());
            }
            self.submit(token)?;
        }
        for _ in 0..chance.below(12) {
            if !self.submitted.is_empty() && !self.life.dead() {
                let which = chance.below(self.submitted.len() as u64) as usize;
                let transfer = self.submitted.swap_remove(which);
                if !self.life.spend() {
                    self.submitted.push(transfer);
                    return Ok(());
                }
                self.transfer(&transfer)?;
                self.ended.push(transfer.token);
            }
        }
        for token in std::mem::take(&mut self.ended) {
            if !chance.one_in(4) {
                self.ring.finish(token, Status::Okay);
            } else {
                self.ended.push(token);
            }
        }
        if chance.one_in(2) {
            let _ = self.ring.publish();
        }
        self.ring
            .final_check()
            .map_err(|corrupt| corrupt.to_string())?;
        Ok(())
    }

    fn submit(&mut self, token: Token) -> Result<(), String> {
        let request = match self.ring.request(&token) {
            Ok(request) => request,
            Err(error) => {
                self.ring.finish(token, error.status());
                return Ok(());
            }
        };
        let (id, op, block, grefs) = match request {
            Request::Rw(rw) => {
                let grefs = rw
                    .segments
                    .as_slice()
                    .iter()
                    .map(|segment| segment.gref())
                    .collect();
                (rw.id, rw.op, rw.sector, grefs)
            }
            Request::Indirect(indirect) => {
                if self.ring.segments(&token).next().is_none() {
                    let list = self
                        .world
                        .guest
                        .borrow_mut()
                        .read_list(indirect.grefs()[0])?;
                    let stored = self.ring.store_segments(&token, list.into_iter());
                    stored.map_err(|error| error.to_string())?;
                }
                let grefs = self.ring.segments(&token).map(Segment::gref).collect();
                (indirect.id, indirect.op, indirect.sector, grefs)
            }
            other => return Err(format!("{other:?} was never asked for")),
        };
        if !self.life.dead() {
            self.submitted.push(Transfer {
                token,
                id,
                op,
                block,
                grefs,
            });
        }
        Ok(())
    }

    fn transfer(&self, transfer: &Transfer) -> Result<(), String> {
        let Transfer {
            id,
            op,
            block,
            ref grefs,
            ..
        } = *transfer;
        let mut guest = self.world.guest.borrow_mut();
        let Some(asked) = guest.asked.get(&id) else {
            return Err(format!("request {id} is run after its answer"));
        };
        let count = match asked.work {
            Work::Indirect(count) => count as usize,
            _ => 1,
        };
        let reads = asked.work == Work::Read;
        if asked.block != block || reads != (op == RwOp::Read) || grefs.len() != count {
            return Err(format!(
                "{op:?} of {block} with {grefs:?}, asked was {:?}",
                asked.work
            ));
        }
        let before = guest.ran.entry(id).or_insert_with(|| grefs.clone());
        if before != grefs {
            return Err(format!(
                "request {id} is run with {grefs:?} after {before:?}"
            ));
        }
        let mut disk = self.world.disk.borrow_mut();
        for (block, &gref) in disk[block as usize..].iter_mut().zip(grefs) {
            let page = guest.page(id, gref)?;
            match op {
                RwOp::Read => *page = *block,
                RwOp::Write => *block = *page,
            }
        }
        Ok(())
    }

    /// What was submitted may still happen after the end of the process, but not after a successor
    /// starts: that it waits for this is the successor's duty, and outside this test.
    fn io_outlives_process(&mut self) -> Result<(), String> {
        for transfer in std::mem::take(&mut self.submitted) {
            if self.world.chance.one_in(2) {
                self.transfer(&transfer)?;
            }
        }
        Ok(())
    }
}
