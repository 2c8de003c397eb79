//! `xenblkd run`: from a host that has been looked at to a supervisor that serves it, with what the
//! service manager and the signals have to say to it. Serving itself is `supervisor`'s.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tracing::{error, info, warn};
use xenblkd::supervisor::{Handle, HostSource, Options, Supervisor, Waiting, WorkerProgram};

use crate::check::{self, Finding, Root, Verdict};
use crate::config::Config;
use crate::lock::Lock;
use crate::logs::{self, Level};

/// How often the status line of `systemctl status` is brought up to date.
const STATUS_EVERY: Duration = Duration::from_secs(2);

/// Serves until TERM or INT. The error is one line with the remedy, and nothing was touched then.
pub(crate) fn run(named: Option<&Path>) -> anyhow::Result<()> {
    let config = Config::load(named)?;
    let root = Root::new("/");
    refuse_if_missing(check::findings(&root, &config))?;
    let level = logs::start(config.log_level);
    // Held to the end, also while guests' last requests are finished.
    let _lock = Lock::take(config.state_directory())?;
    let options = options(&config, config.xenstore(root.as_path()));
    let named = named.map(Path::to_owned);
    serve_to_the_end(
        options,
        Reload {
            named,
            config,
            level,
        },
    )
}

fn serve_to_the_end(options: Options, reload: Reload) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = runtime.context("cannot start the event loop")?;
    let served = runtime.block_on(serve(options, reload));
    // A target that is being opened may keep its thread as long as its server likes.
    runtime.shutdown_background();
    served
}

/// The first essential thing that is missing; `xenblkd check` shows them all.
fn refuse_if_missing(findings: Vec<Finding>) -> anyhow::Result<()> {
    let missing = findings
        .into_iter()
        .find(|finding| finding.verdict == Verdict::Missing);
    match missing {
        None => Ok(()),
        Some(Finding { found, remedy, .. }) => {
            bail!(
                "{found}; remedy: {} (`xenblkd check` shows everything)",
                remedy.unwrap_or_default()
            )
        }
    }
}

fn options(config: &Config, store: PathBuf) -> Options {
    let log_level = config.log_level.to_string();
    let args = ["worker", "--log-level", &log_level]
        .map(OsString::from)
        .into();
    Options {
        store,
        host: HostSource::Xen,
        program: WorkerProgram::Process {
            path: "/proc/self/exe".into(),
            args,
        },
        workers: config.workers(),
        control: Some(config.control()),
        limits: config.limits(),
        kind: config.kind(),
        blkback: Some(Options::BLKBACK.into()),
    }
}

async fn serve(options: Options, reload: Reload) -> anyhow::Result<()> {
    let mut stops = stops()?;
    let mut again = stops.clone();
    let mut hangup = signal(SignalKind::hangup()).context("cannot catch SIGHUP")?;
    // Its text names the cause already.
    let started = Supervisor::start(options).await;
    let supervisor = started.map_err(|error| anyhow!("{error}"))?;
    let handle = supervisor.handle();
    // On this very thread: a supervisor that hangs doesn't feed the watchdog. Draining feeds it still.
    tokio::spawn(feed_watchdog());
    let report = tokio::spawn(report_status(handle.clone()));
    notify(&[NotifyState::Ready]);
    let shutdown = async {
        let mut reload = reload;
        loop {
            tokio::select! {
                _ = stops.wait_for(|stops| *stops >= 1) => break,
                _ = hangup.recv() => reload.run(&handle),
            }
        }
        report.abort();
        notify(&[
            NotifyState::Stopping,
            NotifyState::Status("finishing the guests' requests"),
        ]);
    };
    tokio::select! {
        () = supervisor.run(shutdown) => Ok(()),
        _ = again.wait_for(|stops| *stops >= 2) => Err(given_up(&handle)),
    }
}

/// How often TERM or INT has come. From now on neither ends the process by itself.
fn stops() -> anyhow::Result<watch::Receiver<u32>> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot catch SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot catch SIGINT")?;
    let (count, stops) = watch::channel(0);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            count.send_modify(|count| *count += 1);
        }
    });
    Ok(stops)
}

/// Leaving before the storage has answered does no harm: workers see the end of their channel, finish and
/// go, and the next daemon waits for them before it serves their disks.
fn given_up(supervisor: &Handle) -> anyhow::Error {
    let waiting: Vec<String> = supervisor
        .waiting()
        .iter()
        .map(Waiting::to_string)
        .collect();
    anyhow!(
        "ended by a second signal while waiting for I/O ({}); workers go on until it has ended",
        waiting.join("; ")
    )
}

/// What SIGHUP brings up to date.
struct Reload {
    named: Option<PathBuf>,
    config: Config,
    level: Level,
}

impl Reload {
    fn run(&mut self, supervisor: &Handle) {
        if let Ok(now) = NotifyState::monotonic_usec_now() {
            notify(&[NotifyState::Reloading, now]);
        }
        match Config::load(self.named.as_deref()) {
            Ok(config) => self.take_up(config, supervisor),
            Err(error) => error!("not reloaded, going on as before: {error}"),
        }
        notify(&[NotifyState::Ready]);
    }

    fn take_up(&mut self, config: Config, supervisor: &Handle) {
        self.level.set(config.log_level);
        supervisor.set_log_level(config.log_level.0);
        if let Err(error) = supervisor.set_limits(config.limits()) {
            error!("limits not taken up: {error}");
        }
        for key in self.config.needs_restart(&config) {
            warn!("{key} has changed in the configuration, but takes a restart");
        }
        info!(level = %config.log_level, "configuration read again; limits hold for devices that connect from now on");
        self.config = config;
    }
}

async fn feed_watchdog() {
    let Some(deadline) = sd_notify::watchdog_enabled() else {
        return;
    };
    let mut ticks = tokio::time::interval(deadline / 2);
    loop {
        ticks.tick().await;
        notify(&[NotifyState::Watchdog]);
    }
}

async fn report_status(supervisor: Handle) {
    let mut ticks = tokio::time::interval(STATUS_EVERY);
    let mut shown = None;
    loop {
        ticks.tick().await;
        let load = supervisor.load();
        if shown.replace(load) != Some(load) {
            let text = format!("serving {} disks over {} rings", load.disks, load.rings);
            notify(&[NotifyState::Status(&text)]);
        }
    }
}

/// Without a service manager this does nothing.
fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        warn!(%error, "cannot reach the service manager");
    }
}

#[cfg(test)]
mod tests;
