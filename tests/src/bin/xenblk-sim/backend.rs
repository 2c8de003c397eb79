//! The backend's processes: what `xenblkd` will be on a Xen host, pointed at the mocked world.

use std::io::{IsTerminal, Read};
use std::process::ExitCode;

use tokio::runtime;
use tokio::sync::oneshot;
use tracing_subscriber::EnvFilter;
use xenblk_xenstore::vbd::Kind;
use xenblkd::supervisor::{HostSource, Limits, Options, WorkerProgram, run};

use crate::cli::Supervisor;

/// The control plane. Ends in order when standard input does: that is how the simulator stops it, and what
/// happens when the simulator dies.
pub(crate) fn supervisor(args: Supervisor) -> ExitCode {
    log();
    let options = Options {
        store: args.store,
        host: HostSource::Fake(args.hypervisor),
        program: WorkerProgram::this_executable(),
        workers: args.workers,
        control: Some(args.control),
        limits: Limits::default(),
        kind: Kind::Vbd,
        blkback: None,
    };
    let (end, ended) = oneshot::channel::<()>();
    std::thread::spawn(move || {
        let mut rest = [0; 64];
        while matches!(std::io::stdin().read(&mut rest), Ok(1..)) {}
        drop(end);
    });
    let runtime = match runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return crate::fail(&error),
    };
    let result = runtime.block_on(run(options, async {
        // An error is what is waited for: the other end was dropped.
        let _ = ended.await;
    }));
    result.map_or_else(|error| crate::fail(&error), |()| ExitCode::SUCCESS)
}

/// One storage core; the supervisor hands it its channel as standard input.
pub(crate) fn worker() -> ExitCode {
    log();
    match xenblkd::channel::inherited() {
        Ok(channel) => xenblkd::worker::main(channel, Box::new(|_| {})),
        Err(error) => crate::fail(&error),
    }
}

/// To standard error, warnings and worse unless RUST_LOG says otherwise.
fn log() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
}
