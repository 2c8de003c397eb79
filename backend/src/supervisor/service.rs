//! The supervisor's own loop: the connection to XenStore, its watches, and the tasks of devices and
//! workers. What a device does is decided in its task; here it is only found, woken and ended.

use std::collections::HashMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tracing::{debug, error, info, warn};
use xenblk_xenstore::vbd::{BackendPath, Kind};
use xenblk_xenstore::{Client, Error, Event, Events, Tx};

use super::board::Board;
use super::claim::Claim;
use super::control_socket::ControlSocket;
use super::device::{Common, Device};
use super::fences::Fences;
use super::handle::Handle;
use super::host::Host;
use super::maptrack::Maptrack;
use super::view::{Session, Wake, device_of_token};
use super::workers::Workers;
use super::{Limits, Options, SupervisorError};
use crate::message::LogLevel;

/// Token of the watch on all backend directories.
const DEVICES: &str = "devices";
/// Token of the watch on dying domains.
const RELEASED: &str = "released";
const RELEASE_DOMAIN: &str = "@releaseDomain";

/// First and longest pause between attempts to reach XenStore again.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));

/// When it is told first what a stop waits for, and how often then.
const WAIT_TOLD: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(30));

/// A running supervisor.
#[derive(Debug)]
pub(super) struct Service {
    store: PathBuf,
    events: Events,
    generation: u64,
    session: watch::Sender<Option<Session>>,
    stopping: watch::Sender<bool>,
    limits: watch::Sender<Limits>,
    log_level: watch::Sender<Option<LogLevel>>,
    common: Common,
    devices: HashMap<BackendPath, Arc<Wake>>,
    tasks: JoinSet<BackendPath>,
    /// Which device a task serves, for the one that panics.
    task_ids: HashMap<Id, BackendPath>,
    slots: JoinSet<()>,
    control: Option<AbortHandle>,
    control_tasks: JoinSet<()>,
}

impl Service {
    /// Opens everything that must be there from the start.
    pub(super) async fn start(options: Options) -> Result<Self, SupervisorError> {
        let host = Arc::new(Host::find(&options.host)?);
        let claim = Claim::new(options.kind, options.blkback);
        if let Some(rival) = claim.rival() {
            return Err(SupervisorError::Claimed(rival));
        }
        let failed = |source| SupervisorError::Store {
            path: options.store.clone(),
            source,
        };
        let (client, events) = connect(&options.store, claim.kind).await.map_err(failed)?;
        let domid = client
            .read_optional(Tx::NONE, "domid")
            .await
            .map_err(failed)?;
        let domid = domid.map(|text| String::from_utf8_lossy(&text).into_owned());
        let board = Arc::new(Board::default());
        let mut control_tasks = JoinSet::new();
        let control = match &options.control {
            Some(path) => {
                Some(control_tasks.spawn(ControlSocket::bind(path)?.serve(Arc::clone(&board))))
            }
            None => None,
        };
        let mut slots = JoinSet::new();
        let (log_level, log_level_rx) = watch::channel(None);
        let fences = Arc::new(Fences::new());
        let workers = Workers::new(
            &options.program,
            options.workers,
            &fences,
            &log_level_rx,
            &mut slots,
        );
        let generation = 0;
        let (session, session_rx) = watch::channel(Some(Session { client, generation }));
        let (stopping, stopping_rx) = watch::channel(false);
        let (limits, limits_rx) = watch::channel(options.limits);
        info!(domid, store = %options.store.display(), workers = options.workers, "serving");
        Ok(Self {
            store: options.store,
            events,
            generation,
            session,
            stopping,
            limits,
            log_level,
            common: Common {
                host,
                claim: Arc::new(claim),
                workers,
                program: options.program,
                fences,
                maptrack: Maptrack::default(),
                limits: limits_rx,
                board,
                session: session_rx,
                stopping: stopping_rx,
            },
            devices: HashMap::new(),
            tasks: JoinSet::new(),
            task_ids: HashMap::new(),
            slots,
            control,
            control_tasks,
        })
    }

    pub(super) fn handle(&self) -> Handle {
        Handle {
            limits: self.limits.clone(),
            log_level: self.log_level.clone(),
            board: Arc::clone(&self.common.board),
        }
    }

    /// Serves until `shutdown`, then ends everything in order.
    pub(super) async fn run(mut self, shutdown: impl Future<Output = ()>) {
        let mut shutdown = pin!(shutdown);
        loop {
            tokio::select! {
                biased;
                () = &mut shutdown => break,
                Some(ended) = self.tasks.join_next_with_id() => self.device_ended(ended),
                event = self.events.next() => match event {
                    Some(Event::Watch { path, token }) => self.on_watch(&path, &token).await,
                    Some(Event::Disconnected { reason }) => {
                        warn!(reason, "XenStore is gone; rings go on, trying to reach it again");
                        tokio::select! {
                            biased;
                            () = &mut shutdown => break,
                            () = self.reconnect() => {}
                        }
                    }
                    None => self.reconnect().await,
                },
            }
        }
        self.stop().await;
    }

    async fn stop(mut self) {
        info!(devices = self.devices.len(), "stopping");
        self.stopping.send_replace(true);
        let board = Arc::clone(&self.common.board);
        let first = tokio::time::Instant::now() + WAIT_TOLD.0;
        let mut tell = tokio::time::interval_at(first, WAIT_TOLD.1);
        loop {
            tokio::select! {
                ended = self.tasks.join_next() => match ended {
                    Some(Ok(_)) => {}
                    Some(Err(error)) => error!(%error, "a device's task failed"),
                    None => break,
                },
                _ = tell.tick() => for disk in board.waiting() {
                    warn!(domid = disk.domid, devid = disk.devid, "still waiting for I/O: {disk}");
                }
            }
        }
        // The workers end once nobody can give them orders any more.
        drop(self.common);
        while self.slots.join_next().await.is_some() {}
        if let Some(control) = self.control {
            control.abort();
        }
        while self.control_tasks.join_next().await.is_some() {}
        info!("stopped");
    }

    /// Reaches XenStore again, however long that takes; watches are registered anew, and their first events
    /// make every device look again.
    async fn reconnect(&mut self) {
        self.session.send_replace(None);
        let (mut pause, longest) = BACKOFF;
        let (client, events) = loop {
            match connect(&self.store, self.common.claim.kind).await {
                Ok(connected) => break connected,
                Err(error) => debug!(%error, "XenStore cannot be reached"),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(longest);
        };
        info!("XenStore is back");
        self.events = events;
        self.generation += 1;
        self.session.send_replace(Some(Session {
            client,
            generation: self.generation,
        }));
    }

    async fn on_watch(&mut self, path: &str, token: &str) {
        if token == RELEASED {
            for wake in self.devices.values() {
                wake.domain_released();
            }
        } else if let Some(device) = device_of_token(token) {
            if let Some(wake) = self.devices.get(&device) {
                wake.frontend_wrote();
            }
        } else if let Some((device, _)) = BackendPath::parse(path) {
            self.look_at(device);
        } else {
            // Something above the devices came, went, or changed too often to be told one by one.
            for wake in self.devices.values() {
                wake.look();
            }
            if let Err(error) = self.rescan().await {
                debug!(%error, "cannot list the backend directories");
            }
        }
    }

    /// Wakes the device's task, or starts it.
    fn look_at(&mut self, path: BackendPath) {
        if let Some(wake) = self.devices.get(&path) {
            wake.look();
            return;
        }
        let wake = Arc::new(Wake::default());
        self.devices.insert(path, Arc::clone(&wake));
        let device = Device::new(path, self.common.clone(), wake);
        let task = self.tasks.spawn(async move {
            device.run().await;
            path
        });
        self.task_ids.insert(task.id(), path);
    }

    /// Looks at every device there is a directory for.
    async fn rescan(&mut self) -> Result<(), Error> {
        let Some(Session { client, .. }) = self.session.borrow().clone() else {
            return Ok(());
        };
        let root = self.common.claim.kind.root();
        for domid in children(&client, &root).await? {
            let domain = format!("{root}/{domid}");
            for devid in children(&client, &domain).await? {
                if let Some((path, _)) = BackendPath::parse(&format!("{domain}/{devid}")) {
                    self.look_at(path);
                }
            }
        }
        Ok(())
    }

    fn device_ended(&mut self, ended: Result<(Id, BackendPath), JoinError>) {
        let id = match &ended {
            Ok((id, _)) => *id,
            Err(error) => error.id(),
        };
        let Some(path) = self.task_ids.remove(&id) else {
            return;
        };
        if let Err(error) = ended {
            error!(%path, %error, "a device's task failed; the next event starts it anew");
        }
        let wake = self.devices.remove(&path);
        // The directory may have come back between the task's last look and now.
        if wake.is_some_and(|wake| wake.is_pending()) {
            self.look_at(path);
        }
    }
}

async fn connect(store: &Path, kind: Kind) -> Result<(Client, Events), Error> {
    let (client, events) = Client::connect(store).await?;
    if let Err(error) = client.watch(RELEASE_DOMAIN, RELEASED).await {
        // A driver domain may not be allowed to; vanished directories tell as well, if later.
        warn!(%error, "cannot watch {RELEASE_DOMAIN}");
    }
    client.watch(&kind.root(), DEVICES).await?;
    Ok((client, events))
}

async fn children(client: &Client, path: &str) -> Result<Vec<String>, Error> {
    match client.directory(Tx::NONE, path).await {
        Err(Error::NoEntry) => Ok(Vec::new()),
        listed => listed,
    }
}
