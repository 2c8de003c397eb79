//! One vbd: a task that reads what XenStore says, asks `xenbus::step` what to do and does it, again and
//! again until there is nothing to do. It owns the device's target and its connection; everything
//! that goes wrong here ends in this device's `error` and `hotplug-error` nodes and nowhere else.

mod closing;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tracing::{Instrument, debug, error_span, info, warn};
use xenblk_xenstore::vbd::{
    self, BackendKeys, BackendPath, Believed, DeviceProperties, DiscardProperties, ReadError,
};
use xenblk_xenstore::xenbus::{self, Action, Situation, State, Target};
use xenblk_xenstore::{Client, Error, Tx};

use super::board::{Board, Posted};
use super::claim::Claim;
use super::connection::{Change, Connection, RingSetup};
use super::disk::{Disk, is_script_to_come, is_set_up};
use super::fences::Fences;
use super::guest_log::GuestLog;
use super::host::Host;
use super::maptrack::Maptrack;
use super::view::{Look, Session, View, Wake};
use super::workers::Workers;
use super::{Limits, WorkerProgram};
use crate::control::DiskStatus;
use closing::Closing;

/// A target that opens within this time is open before InitWait is shown, so that a toolstack sees a
/// bad one at once. libxl waits ten seconds for InitWait; a slow target must not use them up.
const GRACE: Duration = Duration::from_secs(1);

/// How often it is looked whether another backend of the same disks is still there.
const RIVAL_POLL: Duration = Duration::from_secs(1);

/// When a turn that XenStore refused is taken again.
const RETRY: Duration = Duration::from_millis(500);

/// What all device tasks have in common.
#[derive(Clone, Debug)]
pub(super) struct Common {
    pub(super) host: Arc<Host>,
    pub(super) claim: Arc<Claim>,
    pub(super) workers: Workers,
    /// What flushers are started from.
    pub(super) program: WorkerProgram,
    pub(super) fences: Arc<Fences>,
    pub(super) maptrack: Maptrack,
    /// What is offered to frontends from now on.
    pub(super) limits: watch::Receiver<Limits>,
    pub(super) board: Arc<Board>,
    /// The present connection to XenStore; `None` while there is none.
    pub(super) session: watch::Receiver<Option<Session>>,
    /// Turns true when the supervisor ends.
    pub(super) stopping: watch::Receiver<bool>,
}

/// Why the device can't serve its frontend.
#[derive(Debug)]
struct Trouble {
    reason: String,
    /// The frontend's state at that time: when it moves on, the device gets another chance.
    theirs: Option<State>,
    /// The `error` node says so.
    posted: bool,
}

/// The task's own state.
#[derive(Debug)]
pub(super) struct Device {
    path: BackendPath,
    common: Common,
    /// What the frontend was offered last.
    limits: Limits,
    wake: Arc<Wake>,
    view: View,
    /// What the toolstack wants, as last seen.
    keys: Option<BackendKeys>,
    theirs: Option<State>,
    disk: Disk,
    connection: Option<Connection>,
    /// What the connection is being closed for.
    closing: Option<Closing>,
    trouble: Option<Trouble>,
    /// Who else serves this device; then it is left alone.
    rival: Option<String>,
    /// Our hotplug script knows that the target is open.
    script_told: bool,
    /// For the `error` node, of a device that goes on all the same.
    notice: Option<String>,
    /// Whether workers of an earlier supervisor may still have I/O under way; unknown before the first look.
    predecessor: Option<bool>,
    /// Since when they are being waited for.
    predecessor_since: Option<Instant>,
    /// Until when InitWait is held back.
    held: Option<Instant>,
    /// Lines about trouble, and lines about the ordinary course: neither uses up the other's.
    troubles: GuestLog,
    progress: GuestLog,
}

/// What a turn came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// Something was done: look again.
    Again,
    /// Nothing to do until woken.
    Wait,
    /// The directory is gone.
    Gone,
}

impl Device {
    pub(super) fn new(path: BackendPath, common: Common, wake: Arc<Wake>) -> Self {
        let limits = *common.limits.borrow();
        Self {
            path,
            limits,
            common,
            view: View::new(path, Arc::clone(&wake)),
            wake,
            keys: None,
            theirs: None,
            disk: Disk::new(),
            connection: None,
            closing: None,
            trouble: None,
            rival: None,
            script_told: false,
            notice: None,
            predecessor: None,
            predecessor_since: None,
            held: None,
            troubles: GuestLog::new(),
            progress: GuestLog::new(),
        }
    }

    /// Runs until the directory is gone or the supervisor stops; either way every ring is detached then.
    pub(super) async fn run(self) {
        // Of the highest level, so that lines have its fields whatever is logged.
        let span = error_span!("vbd", domid = self.path.domid, devid = self.path.devid);
        self.serve().instrument(span).await;
    }

    async fn serve(mut self) {
        let mut gone = false;
        while !gone && !*self.common.stopping.borrow() {
            let session = self.common.session.borrow_and_update().clone();
            let turn = match &session {
                Some(session) => self.turn(session).await,
                None => Ok(Turn::Wait),
            };
            match turn {
                Ok(Turn::Again) => {}
                Ok(Turn::Gone) => gone = true,
                Ok(Turn::Wait) => self.wait(false).await,
                Err(error) => {
                    debug!(%error, "XenStore refused a step");
                    self.wait(true).await;
                }
            }
        }
        self.finish(gone).await;
        self.disk.release();
        self.common.board.remove(self.path);
        let session = self.common.session.borrow().clone();
        let Some(session) = session else { return };
        let cleared = if gone {
            self.clear_error(&session.client).await
        } else {
            Ok(())
        };
        if let Err(error) = cleared.and(self.view.close(&session).await) {
            debug!(%error, "cannot clean up in XenStore");
        }
    }

    /// Waits for anything that could change the next turn.
    async fn wait(&mut self, retry: bool) {
        let retry_at = retry.then(|| Instant::now() + RETRY);
        // Nothing tells when it goes.
        let rival = self.rival.is_some().then(|| Instant::now() + RIVAL_POLL);
        let timer = [retry_at, self.held, self.late_at(), rival]
            .into_iter()
            .flatten()
            .min();
        let connection = self.connection.as_mut();
        let ring = async {
            match connection {
                Some(connection) => connection.changed().await,
                None => std::future::pending().await,
            }
        };
        let change = tokio::select! {
            biased;
            _ = self.common.stopping.wait_for(|stop| *stop) => return,
            change = ring => change,
            () = self.disk.opened() => return,
            () = self.wake.woken() => return,
            _ = self.common.session.changed() => return,
            () = tokio::time::sleep_until(timer.unwrap_or_else(Instant::now).into()), if timer.is_some() => return,
        };
        match change {
            Change::Progress => {}
            // What goes wrong while it ends is over when it has ended.
            Change::Failed(reason) if self.closing.is_some() => debug!("{reason}"),
            Change::Failed(reason) => self.trouble(reason),
            Change::Notice(reason) => {
                self.complain(&reason);
                self.notice = Some(reason);
            }
        }
    }

    /// Takes note of what is wrong. The first reason is the cause; what follows from it isn't worth a line.
    fn trouble(&mut self, reason: String) {
        if self.trouble.is_some() {
            debug!("{reason}");
            return;
        }
        self.complain(&reason);
        self.trouble = Some(Trouble {
            reason,
            theirs: self.theirs,
            posted: false,
        });
    }

    fn complain(&mut self, reason: &str) {
        if let Some(suppressed) = self.troubles.admit() {
            warn!(suppressed, "{reason}");
        }
    }

    async fn turn(&mut self, session: &Session) -> Result<Turn, Error> {
        let client = &session.client;
        let Some(look) = self.view.look(session).await? else {
            return Ok(Turn::Gone);
        };
        if look.theirs != self.theirs {
            debug!(theirs = ?look.theirs, ours = ?look.ours.state, "frontend");
        }
        self.theirs = look.theirs;
        if let Some(closing) = self.closing {
            let turn = self.go_on_closing(client, closing).await;
            self.post(&format!("{:?}", look.ours.state));
            return turn;
        }
        let turn = match &look.keys {
            Ok(keys) => {
                self.keys = Some(keys.clone());
                self.act(client, &look, keys).await
            }
            Err(reason) => {
                self.trouble(reason.clone());
                self.post_error(client).await.map(|()| Turn::Wait)
            }
        };
        self.post(&format!("{:?}", look.ours.state));
        turn
    }

    async fn act(
        &mut self,
        client: &Client,
        look: &Look,
        keys: &BackendKeys,
    ) -> Result<Turn, Error> {
        if self.connection.is_none() && self.stands_back(client).await? {
            return Ok(Turn::Wait);
        }
        // Before the trouble may be forgotten, and for what the look brings.
        self.post_error(client).await?;
        self.reconsider(look, keys);
        self.post_error(client).await?;
        self.tell_script(client, keys).await?;
        let broken = self.connection.as_ref().is_some_and(Connection::is_broken);
        let target = if self.is_for_script_to_tell(look, keys) {
            Target::NotYet
        } else if broken || self.trouble.is_some() {
            Target::Failed
        } else {
            self.disk.readiness()
        };
        let connected = self.connection.is_some();
        let (ours, online) = (Some(look.ours.state), look.ours.online);
        let now = Situation {
            ours,
            theirs: self.theirs,
            online,
            target,
            connected,
        };
        if let Some(connection) = &self.connection
            && !connection.is_announced()
            && xenbus::step(Situation {
                connected: false,
                ..now
            }) == Action::Connect
        {
            // Coming up, and still wanted.
            return if connection.is_serving() {
                self.announce(client, look, keys).await
            } else {
                Ok(Turn::Wait)
            };
        }
        let action = xenbus::step(now);
        if self.predecessor == Some(true)
            && !matches!(action, Action::Wait | Action::Close | Action::Remove)
        {
            self.predecessor_since = Some(Instant::now());
            self.post(&format!("{:?}", look.ours.state));
            self.await_predecessor(client).await?;
            self.predecessor_since = None;
            return Ok(Turn::Again);
        }
        match action {
            Action::Wait => Ok(Turn::Wait),
            Action::PublishInitWait if !is_set_up(self.path.kind, keys) => Ok(Turn::Wait),
            Action::PublishInitWait if self.hold(look) => Ok(Turn::Wait),
            Action::PublishInitWait => self.publish(client, look.ours, State::InitWait).await,
            Action::Connect => self.connect(client, keys).await,
            Action::Close => self.publish(client, look.ours, State::Closing).await,
            Action::Disconnect { then } => self.close(client, look.ours, then).await,
            Action::Remove => Ok(Turn::Gone),
        }
    }

    /// Whether somebody else serves the directory: nothing of it is touched then, and its state least of
    /// all, which is the other's to write. The remedy goes where the toolstack looks.
    async fn stands_back(&mut self, client: &Client) -> Result<bool, Error> {
        let rival = self.common.claim.rival();
        if rival != self.rival {
            match &rival {
                Some(reason) => {
                    self.complain(reason);
                    vbd::report_error(client, &self.path, reason).await?;
                    vbd::report_hotplug_error(client, &self.path, reason).await?;
                }
                None => self.clear_error(client).await?,
            }
        }
        self.rival = rival;
        Ok(self.rival.is_some())
    }

    /// Lets our script end well, which waits for the target as long as the toolstack lets it.
    async fn tell_script(&mut self, client: &Client, keys: &BackendKeys) -> Result<(), Error> {
        if !self.script_told && self.disk.target().is_some() && is_script_to_come(keys) {
            vbd::report_target_open(client, &self.path).await?;
            self.script_told = true;
        }
        Ok(())
    }

    /// What the look means for the target and for earlier trouble.
    fn reconsider(&mut self, look: &Look, keys: &BackendKeys) {
        let again = look.frontend_wrote && look.ours.state == State::Closed;
        let moved_on = |trouble: &Trouble| trouble.theirs != self.theirs || again;
        if self.trouble.as_ref().is_some_and(moved_on) {
            self.trouble = None;
            self.disk.forgive();
        }
        let ours = look.ours.state;
        if self.predecessor.is_none() {
            let fresh = matches!(ours, State::Unknown | State::Initialising | State::Closed);
            self.predecessor = Some(!fresh);
            if ours == State::Connected
                && matches!(self.theirs, Some(State::Initialised | State::Connected))
            {
                let reason =
                    "the backend that served this disk has ended; the frontend has to connect anew";
                self.trouble(reason.to_owned());
            }
        }
        let wanted = look.ours.online || self.predecessor == Some(true);
        if wanted && self.connection.is_none() {
            self.disk.choose(self.path.kind, keys);
        }
        if let Some(reason) = self.disk.failure().map(str::to_owned)
            && self.trouble.is_none()
        {
            self.trouble(reason);
        }
    }

    /// Whether a target that can't be had stays at InitWait, although it never will be. libxl waits ten
    /// seconds for InitWait and says nothing but that it didn't come; from the script, which it runs
    /// then, it takes the reason.
    fn is_for_script_to_tell(&self, look: &Look, keys: &BackendKeys) -> bool {
        let unused = matches!(
            look.ours.state,
            State::Unknown | State::Initialising | State::InitWait
        );
        unused && look.ours.online && self.disk.failure().is_some() && is_script_to_come(keys)
    }

    /// Whether to keep back InitWait a little longer for the target.
    fn hold(&mut self, look: &Look) -> bool {
        let first = matches!(look.ours.state, State::Unknown | State::Initialising);
        let until = self
            .disk
            .opening_since()
            .filter(|_| first)
            .map(|since| since + GRACE);
        self.held = until.filter(|until| Instant::now() < *until);
        self.held.is_some()
    }

    /// Reads the frontend's parameters, once, and hands its rings to the workers.
    async fn connect(&mut self, client: &Client, keys: &BackendKeys) -> Result<Turn, Error> {
        let Some(target) = self.disk.target().map(Arc::clone) else {
            return Ok(Turn::Wait);
        };
        let limits = self.limits.negotiable();
        let rings = match vbd::read_frontend(client, Tx::NONE, &keys.frontend, &limits).await {
            Ok(rings) => rings,
            Err(ReadError::Store(error)) => return Err(error),
            Err(ReadError::Key(error)) => {
                self.trouble(format!("{}: {error}", keys.frontend));
                return Ok(Turn::Again);
            }
        };
        debug!(
            queues = rings.queues.len(),
            pages = rings.pages,
            "connecting"
        );
        let setup = RingSetup {
            path: self.path,
            target,
            host: Arc::clone(&self.common.host),
            limits: self.limits,
            maptrack: self.common.maptrack.clone(),
            discard: keys.discard_enable,
            program: self.common.program.clone(),
            fences: Arc::clone(&self.common.fences),
        };
        match Connection::start(setup, rings, self.common.workers.clone()).await {
            Ok(connection) => self.connection = Some(connection),
            Err(reason) => self.trouble(reason),
        }
        Ok(Turn::Again)
    }

    /// Every ring is being served: shows the disk and state Connected, in one transaction.
    async fn announce(
        &mut self,
        client: &Client,
        look: &Look,
        keys: &BackendKeys,
    ) -> Result<Turn, Error> {
        let (Some(target), Some(connection)) = (self.disk.target(), &mut self.connection) else {
            return Ok(Turn::Wait);
        };
        let keys = vbd::device_keys(&properties(target, keys, &self.limits), connection.queues());
        let outcome = vbd::publish(client, &self.path, look.ours, &keys, State::Connected).await?;
        if outcome == vbd::Outcome::Written {
            connection.set_announced();
            if let Some(suppressed) = self.progress.admit() {
                info!(suppressed, %target, queues = connection.queues(), "connected");
            }
            self.clear_error(client).await?;
        }
        Ok(Turn::Again)
    }

    async fn publish(
        &mut self,
        client: &Client,
        believed: Believed,
        state: State,
    ) -> Result<Turn, Error> {
        let offer = *self.common.limits.borrow();
        let keys = match state {
            State::InitWait => vbd::transport_keys(&offer.negotiable()),
            _ => Vec::new(),
        };
        let outcome = vbd::publish(client, &self.path, believed, &keys, state).await?;
        if state == State::InitWait && outcome == vbd::Outcome::Written {
            self.limits = offer;
        }
        debug!(?state, ?outcome, "published");
        Ok(Turn::Again)
    }

    async fn post_error(&mut self, client: &Client) -> Result<(), Error> {
        if let Some(notice) = &self.notice {
            vbd::report_error(client, &self.path, notice).await?;
            self.notice = None;
        }
        if let Some(trouble) = self.trouble.as_mut().filter(|trouble| !trouble.posted) {
            vbd::report_error(client, &self.path, &trouble.reason).await?;
            vbd::report_hotplug_error(client, &self.path, &trouble.reason).await?;
            trouble.posted = true;
        }
        Ok(())
    }

    async fn clear_error(&self, client: &Client) -> Result<(), Error> {
        for node in [self.path.error_key(), self.path.key("hotplug-error")] {
            match client.rm(Tx::NONE, &node).await {
                Ok(()) | Err(Error::NoEntry) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Shows the disk to the control socket, in `state`.
    fn post(&self, state: &str) {
        let keys = self.keys.as_ref();
        let trouble = self.trouble.as_ref().map(|trouble| trouble.reason.as_str());
        let error = trouble
            .or(self.rival.as_deref())
            .or(self.connection.as_ref().and_then(Connection::complaint));
        let disk = DiskStatus {
            domid: self.path.domid,
            devid: self.path.devid,
            params: keys
                .and_then(|keys| keys.params.clone())
                .unwrap_or_default(),
            state: state.to_owned(),
            size: self.disk.target().map(|target| target.geometry().size),
            readonly: keys.is_some_and(|keys| keys.readonly),
            error: error.map(str::to_owned),
            waiting_seconds: None,
            rings: Vec::new(),
        };
        let rings = self
            .connection
            .as_ref()
            .map(Connection::status)
            .unwrap_or_default();
        let waiting = self.connection.as_ref().and_then(Connection::closing_since);
        self.common.board.post(
            self.path,
            Posted {
                disk,
                rings,
                waiting: waiting.or(self.predecessor_since),
            },
        );
    }
}

/// The disk as the frontend will see it.
fn properties(
    target: &crate::target::OpenedTarget,
    keys: &BackendKeys,
    limits: &Limits,
) -> DeviceProperties {
    let (geometry, capabilities) = (target.geometry(), target.capabilities());
    let discard = capabilities.discard && keys.discard_enable && !capabilities.readonly;
    DeviceProperties {
        sectors: geometry.size / crate::target::SECTOR,
        sector_size: geometry.sector_size,
        physical_sector_size: geometry.physical_sector_size,
        readonly: capabilities.readonly,
        cdrom: keys.cdrom,
        removable: keys.removable,
        flush: capabilities.flush,
        persistent: limits.max_persistent_grants > 0,
        discard: discard.then_some(DiscardProperties {
            granularity: capabilities.discard_granularity,
            alignment: capabilities.discard_alignment,
            secure: capabilities.secure_discard,
        }),
    }
}
