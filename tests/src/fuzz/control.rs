//! The control socket of a running supervisor.

use std::cell::OnceCell;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use tempfile::TempDir;
use xenblk_grants::fake::FakeXen;
use xenblk_xenstore::fake::Server;
use xenblk_xenstore::vbd::Kind;
use xenblkd::control::Response;
use xenblkd::supervisor::{HostSource, Limits, Options, Supervisor, WorkerProgram};

struct Daemon {
    control: PathBuf,
    _directory: TempDir,
    _xen: FakeXen,
    _store: Server,
}

impl Daemon {
    fn start() -> Result<Self, Box<dyn std::error::Error>> {
        let directory = tempfile::tempdir()?;
        let at = |name| directory.path().join(name);
        let xen = FakeXen::start()?;
        xen.listen(&at("hypervisor"))?;
        let store = Server::start()?;
        store.listen(at("xenstore"))?;
        let options = Options {
            store: at("xenstore"),
            host: HostSource::Fake(at("hypervisor")),
            program: WorkerProgram::Threads,
            workers: 1,
            control: Some(at("control")),
            limits: Limits::default(),
            kind: Kind::Vbd,
            blkback: None,
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let supervisor = runtime.block_on(Supervisor::start(options))?;
        // Lives as long as this process.
        std::thread::spawn(move || runtime.block_on(supervisor.run(std::future::pending())));
        Ok(Self {
            control: at("control"),
            _directory: directory,
            _xen: xen,
            _store: store,
        })
    }
}

/// Lines, or what is no line: each that is answered is answered by one JSON object, and the next client
/// is served.
pub(super) fn requests(data: &[u8]) {
    thread_local! {
        static DAEMON: OnceCell<Daemon> = const { OnceCell::new() };
    }
    DAEMON.with(|daemon| {
        let daemon = daemon.get_or_init(|| {
            Daemon::start().unwrap_or_else(|error| unreachable!("a supervisor: {error}"))
        });
        let ask = |bytes: &[u8]| {
            let Ok(mut socket) = UnixStream::connect(&daemon.control) else {
                unreachable!("the supervisor listens")
            };
            // It may have closed already, after a line that is too long.
            let _ = socket.write_all(bytes);
            let _ = socket.shutdown(Shutdown::Write);
            let mut answers = Vec::new();
            let _ = socket.read_to_end(&mut answers);
            answers
        };
        for line in ask(data).split_inclusive(|&byte| byte == b'\n') {
            let answer: Result<Response, _> = serde_json::from_slice(line);
            assert!(answer.is_ok(), "{}", String::from_utf8_lossy(line));
        }
        let version: Result<Response, _> = serde_json::from_slice(&ask(b"{\"version\":{}}\n"));
        assert!(
            matches!(version, Ok(Response::Version { .. })),
            "{version:?}"
        );
    });
}
