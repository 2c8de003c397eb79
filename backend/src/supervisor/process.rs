//! One worker's or flusher's process or thread: started with its end of the channel, waited for at the end.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tracing::warn;

use super::WorkerProgram;
use crate::channel::{SupervisorEnd, process_pair, thread_pair};

/// A started worker. Dropping it closes the channel (unless taken), upon which a worker ends by itself.
#[derive(Debug)]
pub(super) struct RunningWorker {
    channel: Option<SupervisorEnd>,
    body: Body,
}

#[derive(Debug)]
enum Body {
    Process {
        child: Child,
        pidfd: AsyncFd<OwnedFd>,
    },
    Thread(tokio::task::JoinHandle<()>),
}

/// How a worker ended.
#[derive(Debug)]
pub(super) enum Exit {
    /// A process, with what `wait` said.
    Process(io::Result<ExitStatus>),
    /// A thread; `true` if it panicked.
    Thread { panicked: bool },
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(Ok(status)) => status.fmt(f),
            Self::Process(Err(error)) => write!(f, "waiting for it: {error}"),
            Self::Thread { panicked: true } => f.write_str("thread panicked"),
            Self::Thread { panicked: false } => f.write_str("thread ended"),
        }
    }
}

impl Exit {
    /// It did not end as told.
    pub(super) fn is_failure(&self) -> bool {
        match self {
            Self::Process(status) => !status.as_ref().is_ok_and(ExitStatus::success),
            Self::Thread { panicked } => *panicked,
        }
    }
}

impl RunningWorker {
    /// Starts one. The first message on its channel says what it is to be; `name` says it to a reader
    /// of the log.
    pub(super) fn start(program: &WorkerProgram, name: &'static str) -> io::Result<Self> {
        match program {
            WorkerProgram::Process { path, args } => {
                let (channel, theirs) = process_pair()?;
                // The channel goes as standard input: every other descriptor of ours is close-on-exec,
                // and without a pre-exec hook the standard library uses posix_spawn, never a bare fork.
                let mut command = Command::new(path);
                command.args(args).args(["--channel-fd", "0"]);
                let child = command
                    .stdin(Stdio::from(theirs))
                    .stdout(Stdio::null())
                    .spawn()?;
                // Ours to wait for, so the pid can't have been reused.
                let pid = Pid::from_child(&child);
                let pidfd = pidfd_open(pid, PidfdFlags::NONBLOCK)?;
                let pidfd = readable(pidfd)?;
                Ok(Self {
                    channel: Some(channel),
                    body: Body::Process { child, pidfd },
                })
            }
            WorkerProgram::Threads => {
                let (channel, theirs) = thread_pair()?;
                let thread = tokio::task::spawn_blocking(move || {
                    if let Err(error) = crate::worker::run(theirs) {
                        warn!(%error, "{name} thread failed");
                    }
                });
                Ok(Self {
                    channel: Some(channel),
                    body: Body::Thread(thread),
                })
            }
        }
    }

    /// The process's id; a thread has none.
    pub(super) fn pid(&self) -> Option<u32> {
        match &self.body {
            Body::Process { child, .. } => Some(child.id()),
            Body::Thread(_) => None,
        }
    }

    /// The channel, once. Dropping it makes the worker end.
    pub(super) fn channel(&mut self) -> io::Result<SupervisorEnd> {
        self.channel
            .take()
            .ok_or_else(|| io::Error::other("the channel was taken before"))
    }

    /// Waits until the process (or thread) is gone, however long its I/O takes. With `kill`, a process
    /// that has not ended by itself is ended: its channel is of no use any more.
    pub(super) async fn finish(self, kill: bool) -> Exit {
        drop(self.channel);
        match self.body {
            Body::Process { mut child, pidfd } => {
                if kill && let Err(error) = child.kill() {
                    warn!(pid = child.id(), %error, "cannot kill worker");
                }
                if let Err(error) = pidfd.readable().await.map(drop) {
                    warn!(pid = child.id(), %error, "cannot poll the worker's pidfd");
                }
                // A readable pidfd means there is something to reap, so this does not block.
                Exit::Process(child.wait())
            }
            Body::Thread(thread) => Exit::Thread {
                panicked: thread.await.is_err(),
            },
        }
    }
}

/// Waits for `inner`'s descriptor to become readable, which its type owns and never exchanges.
#[expect(
    deprecated,
    reason = "its successor is unsafe for types that might exchange their descriptor"
)]
pub(super) fn readable<T: AsRawFd>(inner: T) -> io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(inner, Interest::READABLE)
}
