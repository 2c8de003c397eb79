//! Where log lines go: to the journal with their fields when it collects this process' output, else to
//! standard error. The level can be changed while running.

use std::env;
use std::io::{self, IsTerminal};

use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::Registry;
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::LogLevel;

/// Changes the level of the running process.
#[derive(Debug)]
pub(crate) struct Level(reload::Handle<LevelFilter, Registry>);

impl Level {
    pub(crate) fn set(&self, level: LogLevel) {
        // Fails only when the subscriber is gone, which lives as long as the process.
        let _ = self.0.reload(LevelFilter::from_level(level.0));
    }
}

/// Installs the process' logger. Called once.
pub(crate) fn start(level: LogLevel) -> Level {
    let (filter, handle) = reload::Layer::new(LevelFilter::from_level(level.0));
    let journal = if collected_by_journal() {
        tracing_journald::layer().ok()
    } else {
        None
    };
    let output = match journal {
        // Fields as DOMID=, DEVID=, QUEUE=: `journalctl DOMID=3` finds a guest's lines.
        Some(journal) => journal.with_field_prefix(None).boxed(),
        None => tracing_subscriber::fmt::layer()
            .with_writer(io::stderr)
            .with_ansi(io::stderr().is_terminal())
            .with_target(false)
            .boxed(),
    };
    tracing_subscriber::registry()
        .with(filter)
        .with(output)
        .init();
    Level(handle)
}

/// `$JOURNAL_STREAM` is `device:inode` of the stream (systemd.exec(5)); it is inherited by processes
/// whose output goes elsewhere by now, so standard error has to be that stream.
fn collected_by_journal() -> bool {
    let Ok(stream) = env::var("JOURNAL_STREAM") else {
        return false;
    };
    rustix::fs::fstat(io::stderr())
        .is_ok_and(|stat| stream == format!("{}:{}", stat.st_dev, stat.st_ino))
}
