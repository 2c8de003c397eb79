//! What a device's task sees of XenStore: both directories as they are now, the frontend's `state` being
//! watched. It reads and judges keys; what follows from them is the device's business.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;
use tracing::debug;
use xenblk_xenstore::vbd::{self, BackendKeys, BackendPath, Believed, ReadError};
use xenblk_xenstore::xenbus::State;
use xenblk_xenstore::{Client, Error, Tx};

/// A connection to XenStore. The generation tells apart what was registered on which.
#[derive(Clone, Debug)]
pub(super) struct Session {
    pub(super) client: Client,
    pub(super) generation: u64,
}

/// How a device's task is woken; wakes between two looks count once.
#[derive(Debug, Default)]
pub(super) struct Wake {
    notify: Notify,
    pending: AtomicBool,
    /// The frontend has written its state since the task last looked, maybe what it was before.
    frontend: AtomicBool,
    /// A domain has died since the task last looked; maybe this device's.
    released: AtomicBool,
}

impl Wake {
    /// Something the device depends on may have changed.
    pub(super) fn look(&self) {
        self.pending.store(true, Ordering::Relaxed);
        self.notify.notify_one();
    }

    /// The frontend has written its state.
    pub(super) fn frontend_wrote(&self) {
        self.frontend.store(true, Ordering::Relaxed);
        self.look();
    }

    /// Some domain has died.
    pub(super) fn domain_released(&self) {
        self.released.store(true, Ordering::Relaxed);
        self.look();
    }

    /// Completes once woken. Cancellation-safe.
    pub(super) async fn woken(&self) {
        self.notify.notified().await;
    }

    /// Woken since the task last began to look.
    pub(super) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Relaxed)
    }
}

/// The token of a device's frontend watch.
fn frontend_token(path: &BackendPath) -> String {
    format!("frontend of {path}")
}

/// The device whose frontend watch has `token`.
pub(super) fn device_of_token(token: &str) -> Option<BackendPath> {
    BackendPath::parse(token.strip_prefix("frontend of ")?).map(|(path, _)| path)
}

/// What the store says now.
#[derive(Debug)]
pub(super) struct Look {
    /// The backend directory's `state` and `online`.
    pub(super) ours: Believed,
    /// What the toolstack wants; an error of one line while that is unusable and always was.
    pub(super) keys: Result<BackendKeys, String>,
    /// The frontend's state; `None` if it has none or its domain is dead.
    pub(super) theirs: Option<State>,
    /// The frontend has written its state, though it may look as before.
    pub(super) frontend_wrote: bool,
}

/// One device's eyes.
#[derive(Debug)]
pub(super) struct View {
    path: BackendPath,
    wake: Arc<Wake>,
    /// The watched frontend node, with the session it is watched on.
    watched: Option<(u64, String)>,
    /// The watch has not fired yet as every new one does.
    watch_is_new: bool,
    /// The backend directory's keys when they were last usable.
    keys: Option<BackendKeys>,
    /// The frontend's domain is gone for good.
    dead: bool,
}

impl View {
    pub(super) fn new(path: BackendPath, wake: Arc<Wake>) -> Self {
        Self {
            path,
            wake,
            watched: None,
            watch_is_new: false,
            keys: None,
            dead: false,
        }
    }

    /// Reads everything, each key once; `None` if the backend directory is gone.
    pub(super) async fn look(&mut self, session: &Session) -> Result<Option<Look>, Error> {
        self.wake.pending.store(false, Ordering::Relaxed);
        let client = &session.client;
        let Some(ours) = vbd::read_believed(client, Tx::NONE, &self.path).await? else {
            return Ok(None);
        };
        let (theirs, keys) = match self.keys(client).await? {
            Ok(keys) => {
                self.watch_frontend(session, &keys.frontend).await?;
                let dead = self.is_domain_dead(client).await?;
                let theirs = vbd::read_state(client, Tx::NONE, &keys.frontend).await?;
                (theirs.filter(|_| !dead), Ok(keys))
            }
            Err(reason) => (None, Err(reason)),
        };
        // A new watch fires once by itself.
        let wrote = self.wake.frontend.swap(false, Ordering::Relaxed);
        let frontend_wrote = wrote && !std::mem::take(&mut self.watch_is_new);
        Ok(Some(Look {
            ours,
            keys,
            theirs,
            frontend_wrote,
        }))
    }

    async fn keys(&mut self, client: &Client) -> Result<Result<BackendKeys, String>, Error> {
        match vbd::read_backend(client, Tx::NONE, &self.path).await {
            Ok(keys) => {
                self.keys = Some(keys.clone());
                Ok(Ok(keys))
            }
            Err(ReadError::Store(error)) => Err(error),
            Err(ReadError::Key(error)) => {
                let reason = format!("{}: {error}", self.path);
                debug!("{reason}");
                // Keys that were usable before: the directory is being taken apart, key by key.
                Ok(self.keys.clone().ok_or(reason))
            }
        }
    }

    /// Asked only when some domain has died: a toolstack need not introduce a domain whose disk it serves
    /// to itself.
    async fn is_domain_dead(&mut self, client: &Client) -> Result<bool, Error> {
        if !self.dead && self.wake.released.swap(false, Ordering::Relaxed) {
            let introduced = client.is_domain_introduced(self.path.domid).await;
            if introduced.is_err() {
                self.wake.released.store(true, Ordering::Relaxed);
            }
            self.dead = !introduced?;
        }
        Ok(self.dead)
    }

    /// Watches the frontend's `state`, nothing else of it: a guest can write as much as it likes.
    async fn watch_frontend(&mut self, session: &Session, frontend: &str) -> Result<(), Error> {
        let node = format!("{frontend}/state");
        let token = frontend_token(&self.path);
        match &self.watched {
            Some((on, watched)) if *on == session.generation && *watched == node => return Ok(()),
            Some((on, watched)) if *on == session.generation => {
                session.client.unwatch(watched, &token).await?;
            }
            _ => {}
        }
        self.watched = None;
        match session.client.watch(&node, &token).await {
            Ok(()) | Err(Error::Exists) => {}
            Err(error) => return Err(error),
        }
        self.watched = Some((session.generation, node));
        self.watch_is_new = true;
        Ok(())
    }

    /// Ends the watch.
    pub(super) async fn close(self, session: &Session) -> Result<(), Error> {
        match &self.watched {
            Some((on, node)) if *on == session.generation => {
                session
                    .client
                    .unwatch(node, &frontend_token(&self.path))
                    .await
            }
            _ => Ok(()),
        }
    }
}
