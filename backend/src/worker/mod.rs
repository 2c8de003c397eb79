//! A worker: one single-threaded loop around one io_uring that serves whole rings. It gets rings and
//! their descriptors from the supervisor and reads nothing from XenStore. A ring costs nothing while
//! its guest is idle: there is no scan and no timer, only completions make rings ready.

mod attach;
mod binding;
mod copies;
pub(crate) mod engine;
mod ring;
mod timers;
mod upkeep;

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;

use crate::channel::{Channel, Message, RecvError, SendError, WorkerEnd};
use crate::flusher;
use crate::message::{Command, Left, Report, RingId, VERSION};
use attach::Surroundings;
use binding::Unbounds;
use engine::{Engine, Event, Source};
use ring::{Phase, RingService, Turn};
use timers::Timers;

/// How long reports wait for a supervisor that doesn't read before they are sent again.
const REPORT_RETRY: Duration = Duration::from_millis(10);

/// What the supervisor's first message says: a worker's life or a flusher's. A worker serves rings until
/// the supervisor says [`Shutdown`](Command::Shutdown) or closes its end of the channel; then it finishes
/// what was consumed, detaches every ring and returns. The error is one line for the administrator.
pub fn run(channel: WorkerEnd) -> Result<(), String> {
    run_with(channel, Box::new(|_| {}))
}

fn run_with(channel: WorkerEnd, set_level: SetLevel) -> Result<(), String> {
    match first(&channel)? {
        None => Ok(()),
        Some(Message {
            body:
                Command::HelloFlusher {
                    version,
                    fence,
                    target,
                },
            fds,
        }) => flusher::run(channel, version, fence, &target, fds),
        Some(hello) => work(channel, hello, set_level),
    }
}

/// The first message, or nothing if the supervisor is gone before it sent one.
fn first(channel: &WorkerEnd) -> Result<Option<Message<Command>>, String> {
    loop {
        match channel.try_recv() {
            Ok(Some(message)) => return Ok(Some(message)),
            Ok(None) => {
                let mut fds = [PollFd::new(channel, PollFlags::IN)];
                retry_on_intr(|| poll(&mut fds, None)).map_err(|error| format!("poll: {error}"))?;
            }
            Err(RecvError::Closed) => return Ok(None),
            Err(error) => return Err(error.to_string()),
        }
    }
}

fn work(channel: WorkerEnd, hello: Message<Command>, set_level: SetLevel) -> Result<(), String> {
    let engine = Engine::new().map_err(|error| {
        format!("io_uring can't be used: {error}; expected Linux 6.1 or newer that permits it")
    })?;
    let boot_id = boot_id().ok_or("can't read /proc/sys/kernel/random/boot_id")?;
    let mut worker = Worker {
        rings: Vec::new(),
        unbound: Unbounds::default(),
        ready: VecDeque::new(),
        timers: Timers::default(),
        engine,
        channel,
        set_level,
        reports: VecDeque::new(),
        fence: None,
        boot_id,
        ending: false,
        supervisor_gone: false,
    };
    worker.obey(hello)?;
    worker.receive()?;
    worker.run()
}

/// Changes how much the process logs.
pub type SetLevel = Box<dyn FnMut(tracing::Level)>;

/// The whole life of a worker's or flusher's process. `channel` is the descriptor of
/// [`process_pair`](crate::channel::process_pair), usually [`inherited`](crate::channel::inherited);
/// `set_level` is called when the supervisor wants more or less logged.
pub fn main(channel: OwnedFd, set_level: SetLevel) -> ExitCode {
    harden();
    match run_with(Channel::from_socket(channel), set_level) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            tracing::error!("{problem}");
            ExitCode::FAILURE
        }
    }
}

/// Gives up what a worker never needs, and asks not to wait for memory that is freed by writing to a disk:
/// this domain's own disk may be one it serves. Neither is needed to serve, so a kernel or a unit that
/// doesn't permit it is no obstacle.
fn harden() {
    if let Err(error) = rustix::thread::set_no_new_privs(true) {
        tracing::info!("can't give up new privileges: {error}");
    }
    if let Err(error) = rustix::process::configure_io_flusher_behavior(true) {
        tracing::info!(
            "not part of the I/O path for the kernel's memory management: {error} (CAP_SYS_RESOURCE is needed)"
        );
    }
}

fn boot_id() -> Option<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
    Some(u128::from_str_radix(&digits, 16).ok()?.to_be_bytes())
}

struct Place {
    ring: RingService,
    /// Stands in the ready list.
    ready: bool,
    /// Its waits have been cancelled: the ring is closed when they have ended.
    closing: bool,
}

struct Worker {
    // Dropped before the engine: what the kernel may still write to is the engine's.
    rings: Vec<Option<Place>>,
    /// Rings whose port can't be bound yet.
    unbound: Unbounds,
    /// Rings that have something to do, in the order they came to.
    ready: VecDeque<usize>,
    timers: Timers,
    engine: Engine,
    channel: WorkerEnd,
    set_level: SetLevel,
    /// Reports not yet sent; a few for each ring.
    reports: VecDeque<Report>,
    /// From [`Command::Hello`].
    fence: Option<u64>,
    boot_id: [u8; 16],
    ending: bool,
    supervisor_gone: bool,
}

impl Worker {
    fn run(&mut self) -> Result<(), String> {
        loop {
            while let Some(event) = self.engine.next() {
                self.dispatch(event)?;
            }
            self.bind_due();
            let now = Instant::now();
            while let Some(at) = self.timers.expired(now) {
                self.mark(at);
            }
            for _ in 0..self.ready.len() {
                let Some(at) = self.ready.pop_front() else {
                    break;
                };
                self.turn(at, now);
            }
            self.send_reports();
            let idle = self.rings.iter().all(Option::is_none) && self.unbound.is_empty();
            if self.ending && idle && (self.reports.is_empty() || self.supervisor_gone) {
                return Ok(());
            }
            let report = (!self.reports.is_empty()).then_some(REPORT_RETRY);
            let timer = self
                .timers
                .next()
                .map(|next| next.saturating_duration_since(now));
            let limits = [report, self.unbound.due(), timer];
            let limit = limits.into_iter().flatten().min();
            self.engine
                .enter(self.ready.is_empty(), limit)
                .map_err(|error| format!("io_uring_enter: {error}"))?;
        }
    }

    fn dispatch(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Done { tag, io, result } => {
                if let Some(Some(place)) = self.rings.get_mut(tag.ring) {
                    place
                        .ring
                        .stepped(&mut self.engine, tag.request, io, result);
                }
                self.mark(tag.ring);
            }
            Event::Woken {
                source: Source::Channel,
                ..
            } => self.receive()?,
            Event::Woken {
                source: source @ (Source::Port(at) | Source::Target(at) | Source::Flusher(at)),
                result,
            } => {
                if let Some(Some(place)) = self.rings.get_mut(at) {
                    place.ring.woken(&mut self.engine, source, result);
                }
                self.mark(at);
            }
        }
        Ok(())
    }

    fn mark(&mut self, at: usize) {
        if let Some(Some(place)) = self.rings.get_mut(at)
            && !place.ready
        {
            place.ready = true;
            self.ready.push_back(at);
        }
    }

    fn turn(&mut self, at: usize, now: Instant) {
        let Some(Some(place)) = self.rings.get_mut(at) else {
            return;
        };
        place.ready = false;
        let turn = place.ring.turn(&mut self.engine, now);
        self.timers.set(at, place.ring.next_deadline());
        let (ring, news) = (place.ring.own.id, std::mem::take(&mut place.ring.news));
        if let Some(reason) = news.failed {
            self.reports.push_back(Report::Failed { ring, reason });
        }
        if news.flusher_wanted {
            self.reports.push_back(Report::FlusherWanted { ring });
        }
        if let Some(reason) = news.flush_failed {
            self.reports.push_back(Report::FlushFailed { ring, reason });
        }
        if turn == Turn::More {
            self.mark(at);
        }
        self.close(at);
    }

    /// Takes a drained ring down once nothing waits for its descriptors any more.
    fn close(&mut self, at: usize) {
        let Some(slot) = self.rings.get_mut(at) else {
            return;
        };
        let Some(place) = slot else { return };
        if place.ring.phase != Phase::Draining || !place.ring.is_drained() {
            return;
        }
        if place.ring.armed || place.ring.watching || place.ring.listening {
            if !std::mem::replace(&mut place.closing, true) {
                self.engine.cancel(Source::Port(at));
                self.engine.cancel(Source::Target(at));
                self.engine.cancel(Source::Flusher(at));
            }
            return;
        }
        let Some(place) = slot.take() else { return };
        self.ready.retain(|ready| *ready != at);
        self.timers.set(at, None);
        let (ring, span) = (place.ring.own.id, place.ring.own.span.clone());
        let left = place.ring.close(&mut self.engine);
        span.in_scope(|| self.detached(ring, left));
    }

    fn detached(&mut self, ring: RingId, left: Left) {
        if left.is_nothing() {
            tracing::debug!("detached");
        } else {
            tracing::error!("detached with {left}");
        }
        self.reports.push_back(Report::Detached { ring, left });
    }

    /// Carries out every command there is, and waits for the next.
    fn receive(&mut self) -> Result<(), String> {
        while !self.supervisor_gone {
            match self.channel.try_recv() {
                Ok(Some(message)) => self.obey(message)?,
                Ok(None) => {
                    self.engine.poll(self.channel.as_fd(), Source::Channel);
                    return Ok(());
                }
                Err(error) => {
                    if !matches!(error, RecvError::Closed) {
                        tracing::error!("{error}");
                    }
                    self.supervisor_gone = true;
                    self.end();
                    // Nobody is left who could start one.
                    for at in 0..self.rings.len() {
                        self.connect(at, None);
                    }
                }
            }
        }
        Ok(())
    }

    fn obey(&mut self, message: Message<Command>) -> Result<(), String> {
        match message.body {
            Command::Hello { version, fence } => {
                self.reports.push_back(Report::Ready { version: VERSION });
                if version != VERSION {
                    self.send_reports();
                    return Err(format!(
                        "the supervisor speaks version {version} of the messages, expected {VERSION}"
                    ));
                }
                self.fence = Some(fence);
            }
            Command::Attach(attach) => {
                let ring = attach.ring;
                if let Err(reason) = self.attach(&attach, message.fds) {
                    self.reports
                        .push_back(Report::AttachFailed { ring, reason });
                }
            }
            Command::Detach { ring } => match self.find(ring) {
                Some(at) => self.drain(at),
                None => self.give_up(ring),
            },
            Command::LogLevel { level } => (self.set_level)(level.into()),
            Command::FlushFailed { ring } => {
                if let Some(at) = self.find(ring)
                    && let Some(Some(place)) = self.rings.get_mut(at)
                {
                    place.ring.flush_failed = true;
                }
            }
            Command::Flusher { ring } => {
                if let Some(at) = self.find(ring) {
                    self.connect(at, message.fds.into_iter().next());
                }
            }
            Command::HelloFlusher { .. } | Command::Serve => {
                return Err("a message for a flusher".into());
            }
            Command::Shutdown => self.end(),
        }
        Ok(())
    }

    fn attach(&mut self, attach: &crate::message::Attach, fds: Vec<OwnedFd>) -> Result<(), String> {
        let fence = self.fence.ok_or("attach before hello")?;
        if self.ending {
            return Err("the worker is shutting down".into());
        }
        if self.find(attach.ring).is_some() || self.unbound.contains(attach.ring) {
            return Err("a ring of this name is attached".into());
        }
        let around = Surroundings {
            boot_id: self.boot_id,
            fence,
        };
        self.unbound.add(attach::prepare(around, attach, fds)?);
        self.bind_due();
        Ok(())
    }

    fn free_place(&mut self) -> usize {
        match self.rings.iter().position(Option::is_none) {
            Some(at) => at,
            None => {
                self.rings.push(None);
                self.rings.len() - 1
            }
        }
    }

    fn serve(&mut self, place: usize, ring: RingService) {
        if let Some(free) = self.rings.get_mut(place) {
            *free = Some(Place {
                ring,
                ready: false,
                closing: false,
            });
        }
        // Requests may be there already, and the event that binding the port raises may not.
        self.mark(place);
    }

    fn find(&self, ring: RingId) -> Option<usize> {
        let wanted =
            |place: &Option<Place>| place.as_ref().is_some_and(|at| at.ring.own.id == ring);
        self.rings.iter().position(wanted)
    }

    fn connect(&mut self, at: usize, flusher: Option<OwnedFd>) {
        if let Some(Some(place)) = self.rings.get_mut(at) {
            place.ring.own.upkeep.connect(flusher);
        }
        self.mark(at);
    }

    fn drain(&mut self, at: usize) {
        if let Some(Some(place)) = self.rings.get_mut(at) {
            place.ring.phase = Phase::Draining;
        }
        self.mark(at);
    }

    /// Every ring finishes what it took in; then the worker ends.
    fn end(&mut self) {
        self.ending = true;
        for at in 0..self.rings.len() {
            self.drain(at);
        }
        while let Some(ring) = self.unbound.first() {
            self.give_up(ring);
        }
    }

    fn send_reports(&mut self) {
        while let Some(report) = self.reports.pop_front() {
            match self.channel.send(report) {
                Ok(()) => {}
                Err(SendError::Full(message)) => {
                    self.reports.push_front(message.body);
                    return;
                }
                Err(SendError::Closed) => {
                    // What remains has nobody to hear it; `receive` notices the end by itself.
                    self.reports.clear();
                }
                Err(SendError::Io(error)) => tracing::error!("a report could not be sent: {error}"),
            }
        }
    }
}
