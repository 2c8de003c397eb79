//! The XenBus side of blkfront: one task that follows the backend's state and moves ours, makes rings,
//! connects and closes. It never touches a request.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout_at};
use xenblk_grants::DomId;
use xenblk_grants::fake::FakeDomain;
use xenblk_xenstore::xenbus::State;
use xenblk_xenstore::{Client, Event, Events, Tx, vbd};

use super::disk::Disk;
use super::negotiate::{NegotiationError, Transport, read_device, read_transport, write_rings};
use super::profile::{OnClosing, Start};
use super::ring::RingParts;
use super::{Config, Order, Status};
use crate::toolstack::Vbd;

/// How long the kernel waits for each state of a reset (xenbus_reset_frontend).
const RESET_STEP: Duration = Duration::from_secs(5);

/// The rings of one connection, from their making to their return.
enum Connection {
    /// Published, not used yet.
    Offered(Vec<RingParts>),
    /// In use; the threads own the rings.
    Connected(Arc<Disk>),
}

pub(super) struct Control {
    vbd: Vbd,
    config: Config,
    domain: FakeDomain,
    store: Client,
    events: Events,
    /// Our directory and the backend's.
    directory: String,
    backend: String,
    state: State,
    connection: Option<Connection>,
    status: watch::Sender<Status>,
}

impl Control {
    /// Finds the backend and watches its state, as the bus does before the driver's probe.
    pub(super) async fn probe(
        vbd: Vbd,
        config: Config,
        domain: FakeDomain,
        (store, events): (Client, Events),
        status: watch::Sender<Status>,
    ) -> Result<Self, NegotiationError> {
        let directory = vbd.frontend_path();
        let backend = store
            .read(Tx::NONE, &format!("{directory}/backend"))
            .await?;
        let backend = String::from_utf8_lossy(&backend).into_owned();
        store.watch(&format!("{backend}/state"), "otherend").await?;
        Ok(Self {
            vbd,
            config,
            domain,
            store,
            events,
            directory,
            backend,
            state: State::Initialising,
            connection: None,
            status,
        })
    }

    /// Runs until told to end, or until XenStore is gone.
    pub(super) async fn run(mut self, mut orders: mpsc::Receiver<Order>) {
        if self.config.profile.negotiation.start == Start::AfterClosing
            && let Err(error) = self.close_cycle().await
        {
            self.fail(&error).await;
        }
        loop {
            let result = tokio::select! {
                event = self.events.next() => match event {
                    Some(Event::Watch { .. }) => self.other_end_changed().await,
                    Some(Event::Disconnected { .. }) | None => return,
                },
                order = orders.recv() => match order {
                    Some(Order::Reset { done }) => {
                        let result = self.reset().await;
                        // Nobody needs to wait for it.
                        let _ = done.send(());
                        result
                    }
                    Some(Order::Remove { reason, leaked }) => {
                        self.end(reason);
                        // The toolstack may have stopped waiting.
                        let _ = leaked.send(self.release());
                        return;
                    }
                    None => return,
                },
            };
            if let Err(error) = result {
                self.fail(&error).await;
            }
        }
    }

    /// blkback_changed(): what each state of the backend makes us do.
    async fn other_end_changed(&mut self) -> Result<(), NegotiationError> {
        match (self.other_end().await?, self.state) {
            (State::InitWait, State::Initialising) => self.offer().await,
            (State::Connected, State::Initialising) => {
                // The backend skipped InitWait: negotiate late.
                self.offer().await?;
                self.connect().await
            }
            (State::Connected, State::Initialised) => self.connect().await,
            (State::Closing | State::Closed, state) if state != State::Closed => {
                let online = format!("{}/online", self.backend);
                if self
                    .store
                    .read_optional(Tx::NONE, &online)
                    .await?
                    .as_deref()
                    == Some(b"1")
                {
                    eprintln!("guest: {}: the backend closed the disk by itself", self.vbd);
                }
                self.end("the backend closed it".into());
                if self.config.profile.on_closing == OnClosing::ClosingClosed {
                    self.enter(State::Closing).await?;
                }
                self.enter(State::Closed).await
            }
            _ => Ok(()),
        }
    }

    async fn other_end(&self) -> Result<State, NegotiationError> {
        let state = vbd::read_state(&self.store, Tx::NONE, &self.backend).await?;
        Ok(state.unwrap_or(State::Unknown))
    }

    async fn enter(&mut self, state: State) -> Result<(), NegotiationError> {
        self.state = state;
        let path = format!("{}/state", self.directory);
        Ok(self.store.write(Tx::NONE, &path, state.as_str()).await?)
    }

    /// Makes the rings, publishes them and enters Initialised (talk_to_blkback).
    async fn offer(&mut self) -> Result<(), NegotiationError> {
        self.release();
        let wanted = Transport {
            queues: self.config.queues,
            ring_order: self.config.ring_order,
        };
        let transport = read_transport(&self.store, &self.backend, &wanted).await?;
        let rings = (0..transport.queues)
            .map(|_| RingParts::new(&self.domain, DomId(0), transport.ring_order))
            .collect::<Result<Vec<_>, _>>()?;
        let keys: Vec<_> = rings.iter().map(RingParts::keys).collect();
        self.connection = Some(Connection::Offered(rings));
        let negotiation = &self.config.profile.negotiation;
        write_rings(&self.store, &self.directory, negotiation, &keys).await?;
        self.enter(State::Initialised).await
    }

    /// Reads the disk's properties, starts the queues and enters Connected (blkfront_connect).
    async fn connect(&mut self) -> Result<(), NegotiationError> {
        let Some(Connection::Offered(rings)) = self.connection.take() else {
            return Ok(());
        };
        let profile = self.config.profile;
        let described = read_device(&self.store, &self.backend, profile, rings.len()).await;
        let (info, segments, manners) = match described {
            Ok(described) => described,
            Err(error) => {
                self.connection = Some(Connection::Offered(rings));
                return Err(error);
            }
        };
        let name = self.vbd.name();
        let disk = Disk::start(info, segments, &name, &self.domain, manners, rings)?;
        let disk = Arc::new(disk);
        self.connection = Some(Connection::Connected(Arc::clone(&disk)));
        self.enter(State::Connected).await?;
        self.status.send_replace(Status::Connected(disk));
        Ok(())
    }

    /// The disk is gone from now on; its grants stay until [`release`](Self::release).
    fn end(&self, reason: String) {
        if let Some(Connection::Connected(disk)) = &self.connection {
            disk.kill(reason.clone());
        }
        self.status.send_replace(Status::Gone(reason));
    }

    /// Takes the rings' grants back, once the backend let go; returns how many it still maps.
    fn release(&mut self) -> usize {
        let rings = match self.connection.take() {
            None => return 0,
            Some(Connection::Offered(rings)) => rings,
            Some(Connection::Connected(disk)) => disk.join(),
        };
        rings
            .into_iter()
            .map(|ring| ring.release(&self.domain))
            .sum()
    }

    /// What a kernel started by kexec does with the disk it finds.
    async fn reset(&mut self) -> Result<(), NegotiationError> {
        self.end("the guest reset it".into());
        self.close_cycle().await
    }

    /// xenbus_reset_frontend(), and the way of Windows at every start: Closing, Closed and Initialising
    /// from the step that the backend's state calls for; then the rings are offered.
    async fn close_cycle(&mut self) -> Result<(), NegotiationError> {
        let found = self.other_end().await?;
        if !matches!(found, State::Closing | State::Closed) {
            self.step(State::Closing, State::Closing).await?;
        }
        if found != State::Closed {
            self.step(State::Closed, State::Closed).await?;
        }
        let leaked = self.release();
        if leaked > 0 {
            eprintln!(
                "guest: {}: the closed backend still maps {leaked} granted pages",
                self.vbd
            );
        }
        self.status.send_replace(Status::Connecting);
        self.step(State::Initialising, State::InitWait).await?;
        self.other_end_changed().await
    }

    /// Enters a state and waits for the backend's answer.
    async fn step(&mut self, ours: State, theirs: State) -> Result<(), NegotiationError> {
        self.enter(ours).await?;
        self.wait_for(theirs).await
    }

    async fn wait_for(&mut self, theirs: State) -> Result<(), NegotiationError> {
        let deadline = Instant::now() + RESET_STEP;
        loop {
            let found = self.other_end().await?;
            if found == theirs {
                return Ok(());
            }
            if !matches!(timeout_at(deadline, self.events.next()).await, Ok(Some(_))) {
                let path = format!("{}/state", self.backend);
                return Err(NegotiationError::State {
                    path,
                    found,
                    expected: theirs,
                });
            }
        }
    }

    /// xenbus_dev_fatal(): leaves the reason for the administrator and closes.
    async fn fail(&mut self, error: &NegotiationError) {
        let text = error.to_string();
        let node = format!(
            "/local/domain/{0}/error/device/vbd/{1}/error",
            self.vbd.domid, self.vbd.devid
        );
        // If XenStore is what failed, this fails too; the status says it in any case.
        let _ = self.store.write(Tx::NONE, &node, &text).await;
        let _ = self.enter(State::Closing).await;
        self.end(text);
    }
}
