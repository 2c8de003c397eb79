//! What the process around a running supervisor may ask and tell it.

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

    /// How much is being served now.
    pub fn load(&self) -> Load {
        self.board.load()
    }
}
