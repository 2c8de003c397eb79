//! The backend as a process of its own: the supervisor, started from a program that has the subcommands
//! `supervisor` and `worker`. Its end is noticed at once; it never outlives this process.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::process::{Pid, Signal, kill_process};

/// Where the supervisor finds its world.
#[derive(Clone, Copy, Debug)]
pub struct Sockets<'a> {
    /// XenStore.
    pub store: &'a Path,
    /// The mocked hypervisor.
    pub hypervisor: &'a Path,
    /// Where it is to listen for control requests.
    pub control: &'a Path,
}

/// A running supervisor. Dropping it kills it.
#[derive(Debug)]
pub struct Backend {
    pid: Pid,
    /// The supervisor ends in order when its standard input does, so it can't outlive us either.
    lifeline: Option<ChildStdin>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    exited: Option<ExitStatus>,
    /// We asked for it.
    expected: bool,
}

impl Backend {
    /// Starts `program supervisor …`. `died` runs, on a thread of its own, if it ends without being asked.
    pub fn spawn(
        program: &Path,
        sockets: Sockets<'_>,
        workers: u32,
        died: impl FnOnce(ExitStatus) + Send + 'static,
    ) -> io::Result<Self> {
        let mut child = Command::new(program)
            .arg("supervisor")
            .arg("--store")
            .arg(sockets.store)
            .arg("--hypervisor")
            .arg(sockets.hypervisor)
            .arg("--control")
            .arg(sockets.control)
            .arg("--workers")
            .arg(workers.to_string())
            .stdin(Stdio::piped())
            // A Ctrl-C at the terminal is for us; the backend is told once its guests are done.
            .process_group(0)
            .spawn()?;
        let lifeline = child.stdin.take();
        let pid = Pid::from_child(&child);
        let shared = Arc::new(Shared::default());
        let watched = Arc::clone(&shared);
        thread::Builder::new()
            .name("backend-watch".into())
            .spawn(move || {
                if let Some(status) = watched.wait_for_end(&mut child) {
                    died(status);
                }
            })?;
        Ok(Self {
            pid,
            lifeline,
            shared,
        })
    }

    /// The supervisor's process.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Lets it detach its rings and end; kills it when `patience` is over. Returns whether it ended in
    /// order.
    pub fn stop(&mut self, patience: Duration) -> bool {
        self.shared.state.lock().expected = true;
        self.lifeline = None;
        if let Some(status) = self.shared.exited_within(patience) {
            return status.success();
        }
        self.kill();
        false
    }

    /// SIGKILL, and wait until it is gone. Its workers are not signalled.
    pub fn kill(&self) {
        let mut state = self.shared.state.lock();
        if state.exited.is_none() {
            // Not reaped yet, so the number is still its own. ESRCH cannot be.
            let _ = kill_process(self.pid, Signal::KILL);
        }
        while state.exited.is_none() {
            self.shared.changed.wait(&mut state);
        }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.shared.state.lock().expected = true;
        self.kill();
    }
}

impl Shared {
    /// Waits for the child; none if its end was asked for.
    fn wait_for_end(&self, child: &mut Child) -> Option<ExitStatus> {
        // Waits without reaping, so that `kill` never hits a number that was given to someone else.
        let _ = rustix::io::retry_on_intr(|| {
            rustix::process::waitid(
                rustix::process::WaitId::Pid(Pid::from_child(child)),
                rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT,
            )
        });
        let mut state = self.state.lock();
        let status = child.wait();
        state.exited = status.as_ref().ok().copied().or(state.exited);
        self.changed.notify_all();
        status.ok().filter(|_| !state.expected)
    }

    fn exited_within(&self, patience: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + patience;
        let mut state = self.state.lock();
        while state.exited.is_none() {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                break;
            }
        }
        state.exited
    }
}
