//! A device's rings on their way to their end, however long their storage takes, an earlier supervisor's
//! included. The task says meanwhile what it waits for, and to whom.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{debug, info, warn};
use xenblk_xenstore::vbd::{self, Believed};
use xenblk_xenstore::xenbus::State;
use xenblk_xenstore::{Client, Error, Tx};

use super::{Device, Turn};
use crate::supervisor::connection::{Change, Connection, await_fences};
use crate::supervisor::view::Session;

/// Storage that takes longer than this to end what a frontend has left behind is worth a line.
const LONG: Duration = Duration::from_secs(5);

/// What a closed connection is followed by, if the directory still says then what it said when this was
/// decided.
#[derive(Clone, Copy, Debug)]
pub(super) struct Closing {
    believed: Believed,
    then: State,
    /// It has been said that the storage takes long.
    said: bool,
}

impl Device {
    /// Begins to end the rings, if there are any; `then` is written when they have.
    pub(super) async fn close(
        &mut self,
        client: &Client,
        believed: Believed,
        then: State,
    ) -> Result<Turn, Error> {
        if let Some(connection) = &mut self.connection {
            connection.close();
        }
        let said = false;
        let closing = Closing {
            believed,
            then,
            said,
        };
        self.closing = Some(closing);
        self.go_on_closing(client, closing).await
    }

    /// When to say that the storage takes long.
    pub(super) fn late_at(&self) -> Option<Instant> {
        self.closing.filter(|closing| !closing.said)?;
        Some(self.connection.as_ref()?.closing_since()? + LONG)
    }

    /// Once the rings have ended, writes what they were ended for.
    pub(super) async fn go_on_closing(
        &mut self,
        client: &Client,
        closing: Closing,
    ) -> Result<Turn, Error> {
        if self
            .connection
            .as_ref()
            .is_some_and(|connection| !connection.is_closed())
        {
            let late = |since: Instant| since.elapsed() >= LONG;
            let since = self.connection.as_ref().and_then(Connection::closing_since);
            if !closing.said && since.is_some_and(late) {
                self.closing = Some(Closing {
                    said: true,
                    ..closing
                });
                let reason = self.waiting_for();
                self.complain(&reason);
                self.notice = Some(reason);
            }
            self.post_error(client).await?;
            return Ok(Turn::Wait);
        }
        self.closing = None;
        if self.connection.take().is_some() {
            self.log_disconnected();
        }
        let Closing {
            believed,
            then,
            said,
        } = closing;
        if said && self.trouble.is_none() {
            self.clear_error(client).await?;
        }
        if then == State::Closed && !believed.online {
            self.disk.release();
        }
        self.publish(client, believed, then).await
    }

    /// Lets every ring end. With `gone` the directory has been removed: one that is made in its place is told
    /// why it isn't served yet, and left pending for the task after this.
    pub(super) async fn finish(&mut self, gone: bool) {
        let Some(connection) = &mut self.connection else {
            return;
        };
        connection.close();
        self.post(if gone { "Removed" } else { "Stopping" });
        while let Some(connection) = &mut self.connection {
            if connection.is_closed() {
                self.connection = None;
                self.log_disconnected();
                return;
            }
            let late = connection.closing_since().map(|since| since + LONG);
            let late = late.filter(|late| *late > Instant::now());
            tokio::select! {
                biased;
                change = connection.changed() => if let Change::Failed(reason) | Change::Notice(reason) = change {
                    self.complain(&reason);
                },
                () = self.wake.woken(), if gone => self.tell_successor().await,
                () = tokio::time::sleep_until(late.unwrap_or_else(Instant::now).into()), if late.is_some() => {
                    self.complain(&self.waiting_for());
                }
            }
        }
    }

    /// Waits until no request of an earlier supervisor's workers can reach the target any more, or until
    /// this supervisor stops. Reads that come late hurt nobody.
    pub(super) async fn await_predecessor(&mut self, client: &Client) -> Result<(), Error> {
        const REASON: &str = "waiting for I/O of workers of an earlier daemon";
        let mut stopping = self.common.stopping.clone();
        let fences = Arc::clone(&self.common.fences);
        let disk = &mut self.disk;
        let ended = async {
            if disk.opening_since().is_some() {
                disk.opened().await;
            }
            match disk.target() {
                Some(target) if !target.capabilities().readonly => {
                    await_fences(target, fences.of_others().to_vec()).await;
                }
                _ => {}
            }
        };
        let mut told = false;
        let tell = async {
            tokio::time::sleep(LONG).await;
            told = true;
            warn!("{REASON}");
            let reported = async {
                vbd::report_error(client, &self.path, REASON).await?;
                vbd::report_hotplug_error(client, &self.path, REASON).await
            };
            if let Err(error) = reported.await {
                debug!(%error, "cannot tell what a disk waits for");
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = ended => {}
            _ = stopping.wait_for(|stop| *stop) => return Ok(()),
            () = tell => {}
        }
        self.predecessor = Some(false);
        if told && self.trouble.is_none() {
            self.clear_error(client).await?;
        }
        Ok(())
    }

    /// A directory that has come back while the disk that was there before is still being closed.
    async fn tell_successor(&self) {
        let session = self.common.session.borrow().clone();
        let Some(Session { client, .. }) = session else {
            return;
        };
        let reason = format!("not served before its predecessor: {}", self.waiting_for());
        let told = async {
            if vbd::read_believed(&client, Tx::NONE, &self.path)
                .await?
                .is_some()
            {
                vbd::report_error(&client, &self.path, &reason).await?;
                vbd::report_hotplug_error(&client, &self.path, &reason).await?;
            }
            Ok::<_, Error>(())
        };
        if let Err(error) = told.await {
            debug!(%error, "cannot tell why a disk isn't served yet");
        }
    }

    /// One line about a connection that can't be closed yet.
    fn waiting_for(&self) -> String {
        let connection = self.connection.as_ref();
        let seconds = connection
            .and_then(Connection::closing_since)
            .map_or(0, |since| since.elapsed().as_secs());
        match connection.map_or(0, Connection::in_flight) {
            0 => format!("waiting for I/O of a worker that has ended, for {seconds} s"),
            requests => format!("waiting for I/O of {requests} requests, for {seconds} s"),
        }
    }

    fn log_disconnected(&mut self) {
        if let Some(suppressed) = self.progress.admit() {
            info!(suppressed, "disconnected");
        }
    }
}
