//! The flusher of one connected disk as the supervisor sees it: started when the first ring asks for it,
//! and then given a socket for each ring that does. Many disks are never flushed, and a thousand idle
//! ones must not cost a thousand processes.

use std::io;
use std::os::fd::OwnedFd;

use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tracing::{debug, error};

use super::WorkerProgram;
use super::fences::Fences;
use super::process::RunningWorker;
use crate::channel::{Message, SupervisorEnd};
use crate::flusher::wire;
use crate::message::{Command, VERSION};
use crate::target::{OpenedTarget, WorkerTarget};

/// See the module's head.
#[derive(Debug)]
pub(super) struct Flusher(Mutex<Stage>);

#[derive(Debug)]
enum Stage {
    Wanted(Box<Seed>),
    Running {
        channel: SupervisorEnd,
        end: JoinHandle<()>,
    },
    /// It could not be started, or is not wanted any more.
    None,
}

/// What it will be started with.
#[derive(Debug)]
struct Seed {
    program: WorkerProgram,
    fence: u64,
    target: WorkerTarget,
    fds: Vec<OwnedFd>,
}

impl Flusher {
    /// Opens the target for it, now: an error of writing back that came before it is opened would not be
    /// told to it.
    pub(super) fn new(
        program: WorkerProgram,
        fences: &Fences,
        target: &OpenedTarget,
    ) -> io::Result<Self> {
        let (target, fds) = target.incarnation()?;
        let seed = Seed {
            program,
            fence: fences.issue(),
            target,
            fds,
        };
        Ok(Self(Mutex::new(Stage::Wanted(Box::new(seed)))))
    }

    /// A socket to it for another ring, or `None` if there is no flusher to be had; the reason is logged.
    pub(super) fn connect(&self) -> Option<OwnedFd> {
        let mut stage = self.0.lock();
        if let Stage::Wanted(_) = &*stage
            && let Stage::Wanted(seed) = std::mem::replace(&mut *stage, Stage::None)
        {
            match seed.start() {
                Ok(running) => *stage = running,
                Err(error) => error!(%error, "cannot start a flusher"),
            }
        }
        let Stage::Running { channel, .. } = &*stage else {
            return None;
        };
        let (ours, theirs) = wire::pair()
            .inspect_err(|error| error!(%error, "no socket to a flusher"))
            .ok()?;
        let serve = Message {
            body: Command::Serve,
            fds: vec![theirs],
        };
        channel
            .send(serve)
            .inspect_err(|error| error!(%error, "cannot reach a flusher"))
            .ok()?;
        Some(ours)
    }

    /// Whether there is something to wait for with [`Self::finish`].
    pub(super) fn is_running(&self) -> bool {
        matches!(&*self.0.lock(), Stage::Running { .. })
    }

    /// Lets it end, and returns once it has; the rings have let go of it before. Takes as long as what it
    /// is doing to the storage.
    pub(super) async fn finish(&self) {
        let stage = std::mem::replace(&mut *self.0.lock(), Stage::None);
        if let Stage::Running { channel, end } = stage {
            drop(channel);
            // It ends with the process it waits for, whatever that says.
            let _ = end.await;
        }
    }
}

impl Seed {
    fn start(self) -> io::Result<Stage> {
        let mut flusher = RunningWorker::start(&self.program, "flusher")?;
        let channel = flusher.channel()?;
        let hello = Message {
            body: Command::HelloFlusher {
                version: VERSION,
                fence: self.fence,
                target: self.target,
            },
            fds: self.fds,
        };
        let pid = flusher.pid();
        debug!(pid, "flusher started");
        // The channel is new, so there is room.
        channel.send(hello).map_err(io::Error::other)?;
        let end = tokio::spawn(async move {
            let exit = flusher.finish(false).await;
            if exit.is_failure() {
                error!(pid, %exit, "flusher died");
            }
        });
        Ok(Stage::Running { channel, end })
    }
}
