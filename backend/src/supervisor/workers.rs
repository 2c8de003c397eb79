//! The workers as the device tasks see them: numbered slots that take rings. One task per slot starts
//! the worker with its first ring, passes commands and reports on, and when the worker dies tells the
//! owner of every ring it had, after the process is gone. That its I/O has ended too is the fence's
//! business (the device's).

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::{debug, error, info, warn};

use super::WorkerProgram;
use super::fences::Fences;
use super::flusher::Flusher;
use super::process::{Exit, RunningWorker, readable};
use crate::channel::{Message, RecvError, SendError, SupervisorEnd};
use crate::message::{Attach, Command, LogLevel, Report, RingId, VERSION};

/// How soon a command is tried again that found the channel full.
const RETRY: Duration = Duration::from_millis(1);

/// What a ring's owner hears about it.
#[derive(Debug)]
pub(super) enum RingEvent {
    /// The worker said so.
    Report(Report),
    /// A worker was found for the ring, with this fence; `pid` is absent for a thread.
    Placed { pid: Option<u32>, fence: u64 },
    /// The ring's worker is gone, or never came up; one line says why.
    Lost { reason: String },
}

/// Where a ring's events go. At most a handful per ring, so unbounded in type only.
pub(super) type RingEvents = UnboundedSender<(RingId, RingEvent)>;

/// A ring on its way to a slot.
#[derive(Debug)]
pub(super) struct NewRing {
    /// The message, but for the incarnation, which the slot fills in.
    pub(super) attach: Box<Attach>,
    /// Its descriptors, in the order `Attach` documents.
    pub(super) fds: Vec<OwnedFd>,
    /// Who hears about it.
    pub(super) events: RingEvents,
    /// Its disk's, if it comes to need one.
    pub(super) flusher: Arc<Flusher>,
}

/// Whom a ring of a living worker belongs to.
#[derive(Debug)]
struct Owner {
    events: RingEvents,
    flusher: Arc<Flusher>,
}

#[derive(Debug)]
enum Order {
    Attach(NewRing),
    Detach(RingId),
    FlushFailed(RingId),
}

/// The sending side of all slots, held by every device task. The workers end when the last is dropped.
#[derive(Clone, Debug)]
pub(super) struct Workers(Vec<UnboundedSender<Order>>);

impl Workers {
    /// Makes `count` slots without any worker; their tasks go to `tasks`. Workers are told every level that
    /// `log_level` takes on; until then they log as their program does.
    pub(super) fn new(
        program: &WorkerProgram,
        count: u32,
        fences: &Arc<Fences>,
        log_level: &watch::Receiver<Option<LogLevel>>,
        tasks: &mut JoinSet<()>,
    ) -> Self {
        let slots = (0..count.max(1)).map(|slot| {
            let (orders_tx, orders) = unbounded_channel();
            tasks.spawn(
                Slot {
                    slot,
                    program: program.clone(),
                    fences: Arc::clone(fences),
                    incarnation: 0,
                    orders,
                    log_level: log_level.clone(),
                }
                .run(),
            );
            orders_tx
        });
        Self(slots.collect())
    }

    /// Number of slots, at least 1.
    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }

    /// Hands a ring to `slot`, starting its worker if there is none.
    pub(super) fn attach(&self, slot: u32, ring: NewRing) {
        self.order(slot, Order::Attach(ring));
    }

    /// Asks for a ring back. Answered by `Detached`, or by `Lost` if the worker is no more.
    pub(super) fn detach(&self, slot: u32, ring: RingId) {
        self.order(slot, Order::Detach(ring));
    }

    /// Tells a ring that a flush of its disk failed on another.
    pub(super) fn flush_failed(&self, slot: u32, ring: RingId) {
        self.order(slot, Order::FlushFailed(ring));
    }

    fn order(&self, slot: u32, order: Order) {
        let sent = self.0.get(slot as usize).map(|orders| orders.send(order));
        // A slot's task ends only after every `Workers` is dropped; were it to panic, the dropped order
        // closes the owner's event channel.
        debug_assert!(matches!(sent, Some(Ok(()))), "slot {slot} is gone");
    }
}

/// One slot and the worker in it, if any.
#[derive(Debug)]
struct Slot {
    slot: u32,
    program: WorkerProgram,
    fences: Arc<Fences>,
    incarnation: u64,
    orders: UnboundedReceiver<Order>,
    log_level: watch::Receiver<Option<LogLevel>>,
}

impl Slot {
    async fn run(mut self) {
        while let Some(order) = self.orders.recv().await {
            match order {
                Order::Attach(ring) => self.live(ring).await,
                // Its owner was told of the loss before, or is about to read it.
                Order::Detach(ring) | Order::FlushFailed(ring) => {
                    debug!(slot = self.slot, ?ring, "order for a lost ring");
                }
            }
        }
    }

    /// One worker's life, from its first ring to its end.
    async fn live(&mut self, first: NewRing) {
        self.incarnation += 1;
        let slot = self.slot;
        let mut worker = match RunningWorker::start(&self.program, "worker") {
            Ok(worker) => worker,
            Err(error) => {
                error!(slot, %error, "cannot start worker");
                let reason = format!("cannot start worker {slot}: {error}");
                let _ = first
                    .events
                    .send((first.attach.ring, RingEvent::Lost { reason }));
                return;
            }
        };
        info!(
            slot,
            pid = worker.pid(),
            incarnation = self.incarnation,
            "worker started"
        );
        let (version, fence) = (VERSION, self.fences.issue());
        let mut life = Life {
            slot,
            incarnation: self.incarnation,
            fence,
            pid: worker.pid(),
            rings: HashMap::new(),
            backlog: VecDeque::from([Command::Hello { version, fence }.into()]),
        };
        if let Some(level) = *self.log_level.borrow_and_update() {
            life.backlog.push_back(Command::LogLevel { level }.into());
        }
        life.take(Order::Attach(first));
        let end = match worker.channel() {
            Ok(channel) => {
                life.serve(channel, &mut self.orders, &mut self.log_level)
                    .await
            }
            Err(error) => End::Broken(error.to_string()),
        };
        let exit = worker.finish(matches!(end, End::Broken(_))).await;
        life.tell_owners(&end, &exit);
    }
}

/// Why a worker is not served any more.
#[derive(Debug)]
enum End {
    /// Nobody can send orders any more, and the worker has gone in good order.
    Shutdown,
    /// The channel is closed or was of no use.
    Broken(String),
}

/// What is known of a living worker.
#[derive(Debug)]
struct Life {
    slot: u32,
    incarnation: u64,
    fence: u64,
    pid: Option<u32>,
    rings: HashMap<RingId, Owner>,
    /// Commands not sent yet. Bounded by the rings, each of which has at most one of a kind in here, and by how
    /// often the administrator changes the log level while the worker doesn't read.
    backlog: VecDeque<Message<Command>>,
}

impl Life {
    async fn serve(
        &mut self,
        channel: SupervisorEnd,
        orders: &mut UnboundedReceiver<Order>,
        log_level: &mut watch::Receiver<Option<LogLevel>>,
    ) -> End {
        let channel = match readable(channel) {
            Ok(channel) => channel,
            Err(error) => return End::Broken(error.to_string()),
        };
        let mut shutting_down = false;
        loop {
            if let Err(error) = self.send_backlog(channel.get_ref()) {
                return End::Broken(error);
            }
            tokio::select! {
                order = orders.recv(), if !shutting_down => match order {
                    Some(order) => self.take(order),
                    None => {
                        shutting_down = true;
                        self.backlog.push_back(Command::Shutdown.into());
                    }
                },
                ready = channel.readable() => {
                    let Ok(mut ready) = ready else { return End::Broken("cannot poll".into()) };
                    match channel.get_ref().try_recv() {
                        Ok(Some(message)) => if let Err(reason) = self.report(message.body) {
                            return End::Broken(reason);
                        },
                        Ok(None) => ready.clear_ready(),
                        Err(RecvError::Closed) if shutting_down && self.rings.is_empty() => return End::Shutdown,
                        Err(error) => return End::Broken(error.to_string()),
                    }
                }
                Ok(()) = log_level.changed(), if !shutting_down => {
                    if let Some(level) = *log_level.borrow_and_update() {
                        self.backlog.push_back(Command::LogLevel { level }.into());
                    }
                }
                () = tokio::time::sleep(RETRY), if !self.backlog.is_empty() => {}
            }
        }
    }

    fn take(&mut self, order: Order) {
        match order {
            Order::Attach(NewRing {
                mut attach,
                fds,
                events,
                flusher,
            }) => {
                attach.incarnation = self.incarnation;
                let (pid, fence) = (self.pid, self.fence);
                let _ = events.send((attach.ring, RingEvent::Placed { pid, fence }));
                self.rings.insert(attach.ring, Owner { events, flusher });
                self.backlog.push_back(Message {
                    body: Command::Attach(attach),
                    fds,
                });
            }
            Order::Detach(ring) if self.rings.contains_key(&ring) => {
                self.backlog.push_back(Command::Detach { ring }.into());
            }
            Order::FlushFailed(ring) if self.rings.contains_key(&ring) => {
                self.backlog.push_back(Command::FlushFailed { ring }.into());
            }
            Order::Detach(ring) | Order::FlushFailed(ring) => {
                debug!(slot = self.slot, ?ring, "order for a ring that is gone");
            }
        }
    }

    fn send_backlog(&mut self, channel: &SupervisorEnd) -> Result<(), String> {
        while let Some(message) = self.backlog.pop_front() {
            match channel.send(message) {
                Ok(()) => {}
                Err(SendError::Full(message)) => {
                    self.backlog.push_front(message);
                    return Ok(());
                }
                // Reports may still be waiting: the receiving side finds the end.
                Err(SendError::Closed) => self.backlog.clear(),
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }

    fn report(&mut self, report: Report) -> Result<(), String> {
        let ring = match &report {
            Report::Ready { version: VERSION } => return Ok(()),
            Report::Ready { version } => {
                return Err(format!(
                    "the worker speaks message version {version}, this daemon {VERSION}"
                ));
            }
            Report::Attached { ring }
            | Report::Unbound { ring, .. }
            | Report::Failed { ring, .. }
            | Report::FlushFailed { ring, .. }
            | Report::AttachFailed { ring, .. }
            | Report::Detached { ring, .. } => *ring,
            Report::FlusherWanted { ring } => {
                self.connect_flusher(*ring);
                return Ok(());
            }
        };
        // What a ring left behind goes with the worker's process only, so its owner hears of that too.
        let gone = match &report {
            Report::AttachFailed { .. } => true,
            Report::Detached { left, .. } => left.is_nothing(),
            _ => false,
        };
        let owner = if gone {
            self.rings.remove(&ring).map(|owner| owner.events)
        } else {
            self.rings.get(&ring).map(|owner| owner.events.clone())
        };
        match owner {
            Some(events) => drop(events.send((ring, RingEvent::Report(report)))),
            // It failed to attach while the order to detach it was on its way, as often as the guest
            // likes: not worth a line.
            None if gone => debug!(slot = self.slot, ?ring, "no such ring"),
            None => warn!(slot = self.slot, ?ring, "report about an unknown ring"),
        }
        Ok(())
    }

    /// Here and not in the device's task: that one may be waiting for XenStore, and a guest's flush must
    /// not wait for that.
    fn connect_flusher(&mut self, ring: RingId) {
        if let Some(owner) = self.rings.get(&ring) {
            let fds = owner.flusher.connect().into_iter().collect();
            self.backlog.push_back(Message {
                body: Command::Flusher { ring },
                fds,
            });
        }
    }

    /// Called once the process is gone: its mappings and ports are, too.
    fn tell_owners(&mut self, end: &End, exit: &Exit) {
        let slot = self.slot;
        let End::Broken(broken) = end else {
            debug!(slot, %exit, "worker ended");
            return;
        };
        error!(slot, pid = self.pid, %exit, rings = self.rings.len(), "worker died: {broken}");
        for (ring, Owner { events, .. }) in self.rings.drain() {
            let reason = format!("worker {slot} died ({exit})");
            let _ = events.send((ring, RingEvent::Lost { reason }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Left;
    use crate::target::{self, OpenMode, TargetSpec};

    /// A guest can make this happen as often as it likes: it publishes what can't be attached and
    /// closes at once.
    #[test]
    fn a_detach_that_crossed_a_failed_attach_is_not_worth_a_line() {
        let lines = Arc::new(tempfile::tempfile().unwrap());
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::INFO)
            .with_writer(Arc::clone(&lines))
            .finish();
        let ring = RingId(7);
        let (events, mut heard) = unbounded_channel();
        let nothing = TargetSpec::parse("null:512").unwrap();
        let nothing = target::open(&nothing, OpenMode::default()).unwrap();
        let flusher = Flusher::new(WorkerProgram::Threads, &Fences::new(), &nothing).unwrap();
        let flusher = Arc::new(flusher);
        let mut life = Life {
            slot: 0,
            incarnation: 1,
            fence: 1,
            pid: None,
            rings: HashMap::from([(ring, Owner { events, flusher })]),
            backlog: VecDeque::new(),
        };
        let reason = "no such grant".to_owned();
        tracing::subscriber::with_default(subscriber, || {
            life.report(Report::AttachFailed { ring, reason }).unwrap();
            let left = Left::default();
            life.report(Report::Detached { ring, left }).unwrap();
        });
        assert!(heard.try_recv().is_ok() && heard.try_recv().is_err());
        assert_eq!(lines.metadata().unwrap().len(), 0, "bytes of log");
    }
}
