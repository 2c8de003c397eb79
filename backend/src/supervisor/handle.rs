//! What the process around a running supervisor may ask and tell it.

use std::fmt;
use std::sync::Arc;

use tokio::sync::watch;

use super::board::Board;
use super::{Limits, SupervisorError};
use crate::message::LogLevel;

/// Any number of these; they neither keep the supervisor going nor need it to be.
#[derive(Clone, Debug)]
pub struct Handle {
    pub(super) limits: watch::Sender<Limits>,
    pub(super) log_level: watch::Sender<Option<LogLevel>>,
    pub(super) board: Arc<Board>,
}

/// How much is being served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Backend directories.
    pub disks: usize,
    /// Rings on workers.
    pub rings: usize,
}

/// A disk that isn't let go yet, because the storage has requests of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The frontend's domain.
    pub domid: u16,
    /// The virtual device number.
    pub devid: u32,
    /// Since when, in seconds.
    pub seconds: u64,
    /// Requests unanswered.
    pub requests: u64,
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            domid,
            devid,
            seconds,
            requests,
        } = self;
        write!(
            f,
            "domain {domid} vbd {devid} for {seconds} s, {requests} requests"
        )
    }
}

impl Handle {
    /// Changes what is offered to frontends that start from now on; those that have read an offer are
    /// held to it.
    pub fn set_limits(&self, limits: Limits) -> Result<(), SupervisorError> {
        limits.check()?;
        self.limits.send_replace(limits);
        Ok(())
    }

    /// Makes every worker, running or to come, log so much.
    pub fn set_log_level(&self, level: tracing::Level) {
        self.log_level.send_replace(Some(level.into()));
    }

    /// The disks that are waited for.
    pub fn waiting(&self) -> Vec<Waiting> {
        self.board.waiting()
    }

    /// How much is being served now.
    pub fn load(&self) -> Load {
        self.board.load()
    }
}
