//! One ring's service: takes requests in, moves their data, drives their steps on the
//! target, answers. Each turn makes at most one copy call per direction, one publish and one notify,
//! whatever the number of requests. Nothing here waits, allocates per request or logs per request;
//! how many requests there can be is bounded by the ring's entries.
//!
//! Setting a ring up and taking it down is `attach`'s business; the order among requests is decided
//! by `inflight`, what is allowed by `plan`, how requests come in by `intake`.
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing
)]

mod data;
mod intake;
mod share;
mod storm;

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Instant;

use rustix::io::Errno;
use xenblk_grants::persistent::PersistentGrants;
use xenblk_grants::{Direction, DomId, EventChannels, GrantTable, Mapping, Port, SharedPages};
use xenblk_ring::{BackRing, Corrupt, Status, Token};

use super::copies::Copies;
use super::engine::{Buffer, Engine, Io, SlabKey, Source, Tag};
use super::upkeep::Upkeep;
use crate::inflight::{InFlight, Started};
use crate::message::RingId;
use crate::plan::{Plan, Rules, Step, Transfer};
use crate::stats::{Counter, Writer};
use crate::target::serve::Target;
pub(super) use intake::FETCH_LEN;
use intake::{Stage, Waiting};
use share::Share;
use storm::Storm;

/// How far a ring is from its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Serving,
    /// Takes nothing in any more, but stays until it is detached.
    Failed,
    /// Ends what it took in; then it can be closed.
    Draining,
}

/// What a turn leaves to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// There is more right now.
    More,
    /// The next event or completion brings the next turn.
    Rest,
}

/// What the supervisor has to be told, at most once each.
#[derive(Debug, Default)]
pub(super) struct News {
    pub(super) failed: Option<String>,
    pub(super) flush_failed: Option<String>,
    pub(super) flusher_wanted: bool,
}

/// What a ring owns: made by [`attach`](super::attach), given back when it is closed.
pub(super) struct Owned {
    pub(super) id: RingId,
    /// The ring's place in the worker, which completions carry.
    pub(super) place: usize,
    pub(super) dom: DomId,
    pub(super) back: BackRing<Mapping, SharedPages>,
    pub(super) grants: Box<dyn GrantTable>,
    /// The grants it keeps mapped, if the frontend keeps them granted.
    pub(super) persistent: Option<PersistentGrants>,
    pub(super) events: Box<dyn EventChannels>,
    pub(super) port: Port,
    pub(super) target: Box<dyn Target>,
    pub(super) upkeep: Upkeep,
    /// Bounce memory.
    pub(super) slab: SlabKey,
    /// Where descriptors of indirect requests are copied to.
    pub(super) fetch: Buffer,
    pub(super) rules: Rules,
    pub(super) stats: Writer,
    /// What is logged about the ring is logged in here: domid, devid and queue.
    pub(super) span: tracing::Span,
}

/// See the module's head.
pub(super) struct RingService {
    pub(super) own: Owned,
    pub(super) phase: Phase,
    pub(super) news: News,
    /// An event will wake us: the port is unmasked and being read. Exactly then.
    pub(super) armed: bool,
    /// An event came since the last turn.
    event: bool,
    storm: Storm,
    /// Where the kernel puts the number of the port that had an event; there is only one.
    port_word: Rc<Cell<u32>>,
    /// The target's descriptor is being watched.
    pub(super) watching: bool,
    /// The flusher's answers are being waited for.
    pub(super) listening: bool,
    target_gone: bool,
    /// A flush failed: what was written may be lost, so no later FLUSH or WRITE may succeed.
    pub(super) flush_failed: bool,
    share: Share,
    /// Taken in and not started, in the order they came.
    waiting: VecDeque<Waiting>,
    /// How many of them are not [`Stage::Planned`].
    unplanned: usize,
    started: InFlight,
    /// Slots of reads whose data is there and not yet with the guest.
    read: Vec<usize>,
    /// Slots of starting requests whose data is being copied from the guest.
    writes: Vec<usize>,
    copies: Copies,
}

impl std::fmt::Debug for RingService {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RingService")
            .field("id", &self.own.id)
            .field("phase", &self.phase)
            .finish()
    }
}

impl RingService {
    pub(super) fn new(own: Owned) -> Self {
        let started = InFlight::new(own.back.entries());
        Self {
            own,
            phase: Phase::Serving,
            news: News::default(),
            armed: false,
            event: false,
            storm: Storm::default(),
            port_word: Rc::new(Cell::new(0)),
            watching: false,
            listening: false,
            target_gone: false,
            flush_failed: false,
            share: Share::default(),
            waiting: VecDeque::new(),
            unplanned: 0,
            started,
            read: Vec::new(),
            writes: Vec::new(),
            copies: Copies::default(),
        }
    }

    /// One round of everything: what the target read goes to the guest, what the guest asked is
    /// taken in and started, what has ended is published.
    pub(super) fn turn(&mut self, engine: &mut Engine, now: Instant) -> Turn {
        self.deliver(engine);
        let taken = self.consume();
        self.judge_event(taken.requests, now);
        if self.unplanned > 0 {
            self.fetch(engine);
        }
        self.launch(engine, now);
        self.end_chores(engine);
        let answered = self.answer();
        self.purge_due(now);
        self.watch(engine);
        // What waits may have waited for what this turn gave back.
        if taken.more || self.can_fetch() || (answered && !self.waiting.is_empty()) {
            return Turn::More;
        }
        if self.phase == Phase::Serving {
            self.rest(engine, now)
        } else {
            Turn::Rest
        }
    }

    /// There is a request to take in. A corrupt ring has one, so that its next turn finds out.
    fn has_work(&mut self) -> bool {
        self.phase == Phase::Serving && self.own.back.has_work() != Ok(false)
    }

    /// When the ring wants a turn though nothing happens. `None` is the rule, and an idle ring's.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let purge = self
            .own
            .persistent
            .as_ref()
            .and_then(PersistentGrants::deadline);
        [self.storm.until(), purge].into_iter().flatten().min()
    }

    /// Nothing taken in is unanswered.
    pub(super) fn is_drained(&self) -> bool {
        self.own.back.in_flight() == 0 && self.started.is_empty() && self.waiting.is_empty()
    }

    /// Stops taking requests in.
    pub(super) fn fail(&mut self, reason: String) {
        if self.phase == Phase::Serving {
            self.phase = Phase::Failed;
            self.news.failed = Some(reason);
        }
    }

    fn corrupt(&mut self, corrupt: Corrupt) {
        self.fail(format!("the frontend's ring is corrupt: {corrupt}"));
    }

    fn count(&self, counter: Counter, n: usize) {
        self.own.stats.add(counter, n as u64);
    }

    fn finish(&mut self, token: Token, status: Status) {
        self.count(Counter::Errors, usize::from(status != Status::Okay));
        self.own.back.finish(token, status);
    }

    /// Starts waiting requests, in order, until one has to wait for bounce memory, for a segment
    /// table or for a request before it.
    fn launch(&mut self, engine: &mut Engine, now: Instant) {
        self.copies.clear();
        self.writes.clear();
        while let Some(Waiting {
            stage: Stage::Planned(plan),
            ..
        }) = self.waiting.front()
        {
            let plan = *plan;
            if self.flush_failed && !matches!(plan, Plan::Read(_) | Plan::Discard(..)) {
                if let Some(Waiting { token, .. }) = self.waiting.pop_front() {
                    self.finish(token, Status::Error);
                }
                continue;
            }
            if self.started.holds(&plan) {
                break;
            }
            let buffer = match plan.transfer() {
                None => None,
                Some(transfer) => match engine.lend(self.own.slab, transfer.len()) {
                    Some(buffer) => Some(buffer),
                    None => break,
                },
            };
            let Some(Waiting { token, .. }) = self.waiting.pop_front() else {
                break;
            };
            if buffer.is_some() {
                self.want_grants(&token, now);
            }
            let slot = token.slot();
            let data = buffer.as_ref().map(Buffer::offset);
            match data.filter(|_| !matches!(plan, Plan::Read(_))) {
                Some(local) => {
                    self.list_copies(&token, local, Direction::FromGuest);
                    self.writes.push(slot);
                    self.started.insert(Started {
                        token,
                        plan,
                        step: 0,
                        buffer,
                    });
                }
                None => {
                    self.started.insert(Started {
                        token,
                        plan,
                        step: 0,
                        buffer,
                    });
                    self.step(engine, slot);
                }
            }
        }
        self.map_grants(now);
        self.copy(engine, self.own.slab);
        let writes = std::mem::take(&mut self.writes);
        for (n, &slot) in writes.iter().enumerate() {
            if self.copies.copied(n) {
                self.step(engine, slot);
            } else {
                self.end(engine, slot, Status::Error);
            }
        }
        self.writes = writes;
    }

    /// Hands the current step of a request to the target.
    fn step(&mut self, engine: &mut Engine, slot: usize) {
        let Some(request) = self.started.get_mut(slot) else {
            return;
        };
        let io = match (request.plan.step(request.step), request.buffer.take()) {
            (Some(Step::Read(transfer)), Some(buffer)) => Io::Read {
                offset: transfer.offset(),
                buffer,
            },
            (Some(Step::Write(transfer)), Some(buffer)) => Io::Write {
                offset: transfer.offset(),
                buffer,
            },
            (Some(Step::Chore(chore)), buffer) => {
                request.buffer = buffer;
                self.count(Counter::TargetOps, 1);
                return self.own.upkeep.start(slot, chore);
            }
            (Some(Step::Read(_) | Step::Write(_)), None) | (None, _) => {
                return self.end(engine, slot, Status::Error);
            }
        };
        self.count(Counter::TargetOps, 1);
        let (ring, request) = (self.own.place, slot);
        self.own.target.start(engine, Tag { ring, request }, io);
    }

    /// Goes on with the requests whose flush or discard is over.
    fn end_chores(&mut self, engine: &mut Engine) {
        while let Some(ended) = self.own.upkeep.next() {
            match ended.result {
                Err(errno) if ended.flush => {
                    if !self.flush_failed {
                        self.flush_failed = true;
                        self.news.flush_failed = Some(format!("flushing failed: {errno}"));
                    }
                    self.end(engine, ended.slot, Status::Error);
                }
                Err(Errno::OPNOTSUPP) => self.end(engine, ended.slot, Status::NotSupported),
                Err(_) => self.end(engine, ended.slot, Status::Error),
                // It ran beside the one that failed, and its success may only mean that the error had
                // been reported already.
                Ok(()) if ended.flush && self.flush_failed => {
                    self.end(engine, ended.slot, Status::Error);
                }
                Ok(()) => self.go_on(engine, ended.slot),
            }
        }
        self.news.flusher_wanted |= self.own.upkeep.wants_flusher();
        let since = self.own.upkeep.flushing_since();
        self.own.stats.set(Counter::FlushingSince, since);
    }

    /// A step of the request in `slot` has succeeded.
    fn go_on(&mut self, engine: &mut Engine, slot: usize) {
        let Some(request) = self.started.get_mut(slot) else {
            return;
        };
        request.step += 1;
        if request.plan.step(request.step).is_some() {
            self.step(engine, slot);
        } else {
            self.end(engine, slot, Status::Okay);
        }
    }

    /// A transfer is over.
    pub(super) fn stepped(
        &mut self,
        engine: &mut Engine,
        slot: usize,
        io: Io,
        result: Result<(), Errno>,
    ) {
        let Some(request) = self.started.get_mut(slot) else {
            return;
        };
        let is_read = matches!(io, Io::Read { .. });
        let (Io::Read { buffer, .. } | Io::Write { buffer, .. }) = io;
        request.buffer = Some(buffer);
        match result {
            Err(_) => self.end(engine, slot, Status::Error),
            // Its data goes out with the others' of this turn.
            Ok(()) if is_read => self.read.push(slot),
            Ok(()) => self.go_on(engine, slot),
        }
    }

    /// One copy call gives the guest what was read for it; only then are those requests finished.
    fn deliver(&mut self, engine: &mut Engine) {
        if self.read.is_empty() {
            return;
        }
        self.copies.clear();
        let read = std::mem::take(&mut self.read);
        for &slot in &read {
            let Some(request) = self.started.remove(slot) else {
                continue;
            };
            let local = request.buffer.as_ref().map_or(0, Buffer::offset);
            self.list_copies(&request.token, local, Direction::ToGuest);
            self.started.insert(request);
        }
        self.copy(engine, self.own.slab);
        for (n, &slot) in read.iter().enumerate() {
            let status = if self.copies.copied(n) {
                Status::Okay
            } else {
                Status::Error
            };
            self.end(engine, slot, status);
        }
        self.read = read;
        self.read.clear();
    }

    /// A started request is over.
    fn end(&mut self, engine: &mut Engine, slot: usize, status: Status) {
        let Some(request) = self.started.remove(slot) else {
            return;
        };
        if let Some(buffer) = request.buffer {
            engine.release(buffer);
        }
        if status == Status::Okay {
            let (counter, bytes) = match request.plan {
                Plan::Read(transfer) => (Counter::BytesRead, u64::from(transfer.len())),
                Plan::Discard(range, _) => (Counter::BytesDiscarded, range.len()),
                plan => {
                    let written = plan.transfer().map_or(0, Transfer::len);
                    (Counter::BytesWritten, u64::from(written))
                }
            };
            self.own.stats.add(counter, bytes);
        }
        self.finish(request.token, status);
    }

    /// Publishes what has ended, once, and notifies the guest afterwards if it asked for it. Says
    /// whether there was anything.
    fn answer(&mut self) -> bool {
        let ended = self.own.back.finished_unpublished() > 0;
        if ended {
            let published = self.own.back.publish();
            self.count(Counter::Publishes, 1);
            self.own
                .stats
                .add(Counter::Responses, u64::from(published.count));
            if published.notify {
                self.count(Counter::Notifies, 1);
                // It fails only if the guest has closed its port, and then nobody waits for it.
                let _ = self.own.events.notify(self.own.port);
            }
        }
        self.own
            .stats
            .set(Counter::InFlight, u64::from(self.own.back.in_flight()));
        ended
    }

    /// Events are there for requests: a guest that sends many for nothing is heard less often.
    fn judge_event(&mut self, taken: u32, now: Instant) {
        let event = std::mem::take(&mut self.event);
        if taken > 0 {
            self.storm.over();
        } else if event {
            self.count(Counter::EmptyEvents, 1);
            let delayed = self.storm.empty_event(now);
            self.count(Counter::DelayedUnmasks, usize::from(delayed));
        }
    }

    /// Makes sure that the next request brings an event, or says that it is here already.
    fn rest(&mut self, engine: &mut Engine, now: Instant) -> Turn {
        match self.own.back.final_check() {
            Ok(true) => return Turn::More,
            Ok(false) => {}
            Err(corrupt) => {
                self.corrupt(corrupt);
                return Turn::Rest;
            }
        }
        if !self.armed && !self.storm.delayed(now) {
            self.count(Counter::Unmasks, 1);
            if let Err(error) = self.own.events.unmask(self.own.port) {
                self.fail(format!("can't unmask the event channel: {error}"));
                return Turn::Rest;
            }
            engine.read_port(self.own.events.as_fd(), self.own.place, &self.port_word);
            self.armed = true;
        }
        Turn::Rest
    }

    fn watch(&mut self, engine: &mut Engine) {
        if !self.listening
            && let Some(fd) = self.own.upkeep.watched()
        {
            engine.poll(fd, Source::Flusher(self.own.place));
            self.listening = true;
        }
        if self.watching || self.target_gone || (self.phase == Phase::Draining && self.is_drained())
        {
            return;
        }
        if let Some(fd) = self.own.target.watched() {
            engine.poll(fd, Source::Target(self.own.place));
            self.watching = true;
        }
    }

    /// One of the ring's own descriptors had something to say.
    pub(super) fn woken(&mut self, engine: &mut Engine, source: Source, result: Result<(), Errno>) {
        match source {
            Source::Port(_) => {
                self.armed = false;
                match result {
                    Ok(()) => {
                        self.event = true;
                        self.count(Counter::Events, 1);
                    }
                    Err(Errno::CANCELED) => {}
                    Err(error) => self.fail(format!("can't receive events: {error}")),
                }
            }
            Source::Target(_) => {
                self.watching = false;
                let readable = match result {
                    Ok(()) => self.own.target.readable(engine),
                    Err(Errno::CANCELED) => Ok(()),
                    Err(error) => Err(error.into()),
                };
                if let Err(error) = readable {
                    self.target_gone = true;
                    self.fail(format!("the target is gone: {error}"));
                }
            }
            Source::Flusher(_) => {
                self.listening = false;
                self.own.upkeep.readable();
            }
            Source::Channel => {}
        }
    }
}
