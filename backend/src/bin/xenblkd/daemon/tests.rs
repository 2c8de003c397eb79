use std::fs;
use std::os::unix::net::UnixDatagram;
use std::process::{self, Child, Stdio};
use std::sync::mpsc::{Receiver, channel};

use rustix::process::{Pid, Signal, kill_process};
use xenblk_grants::fake::FakeXen;
use xenblk_xenstore::fake::Server;
use xenblk_xenstore::{Client, Tx};
use xenblkd::channel::{Channel, WorkerEnd};
use xenblkd::message::{Command, Report, VERSION};

use super::*;

#[test]
fn the_refusal_is_one_line_with_the_remedy() {
    let finding = |verdict, found: &str, remedy: Option<&str>| Finding {
        subject: "x",
        verdict,
        found: found.to_owned(),
        remedy: remedy.map(str::to_owned),
    };
    let fine = finding(Verdict::Ok, "fine", None);
    let poor = finding(Verdict::Warning, "poor", Some("buy more"));
    let first = finding(Verdict::Missing, "no device", Some("modprobe it"));
    let second = finding(Verdict::Missing, "no store", Some("start it"));
    refuse_if_missing(vec![fine.clone(), poor.clone()]).unwrap();
    let error = refuse_if_missing(vec![fine, poor, first, second]).unwrap_err();
    let expected = "no device; remedy: modprobe it (`xenblkd check` shows everything)";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn the_configuration_reaches_the_supervisor() {
    let config = Config::default();
    let options = options(&config, "/store".into());
    assert_eq!(options.limits, config.limits());
    assert_eq!(
        options.control.as_deref(),
        Some(Path::new("/run/xenblkd/control"))
    );
    let WorkerProgram::Process { args, .. } = options.program else {
        panic!("workers are processes")
    };
    assert_eq!(args, ["worker", "--log-level", "info"]);
}

const FOLDER: &str = "XENBLKD_TEST_FOLDER";

/// The daemon's life as a process of its own, for signals and environment are a process'.
#[test]
#[ignore = "run by what_the_service_manager_sees, in another process"]
fn a_daemon_on_a_mocked_host() {
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let named = folder.join("config");
    let config = Config::load(Some(&named)).unwrap();
    let _lock = Lock::take(config.state_directory()).unwrap_or_else(|error| end(&error));
    let xen = FakeXen::start().unwrap();
    xen.listen(&folder.join("xen")).unwrap();
    let server = Server::start().unwrap();
    server.listen(folder.join("store")).unwrap();
    let level = logs::start(config.log_level);
    let program = match std::env::var_os(STUCK) {
        None => WorkerProgram::Threads,
        Some(_) => WorkerProgram::Process {
            path: "/proc/self/exe".into(),
            args: [
                "--exact",
                "daemon::tests::a_stuck_worker",
                "--ignored",
                "--",
            ]
            .map(Into::into)
            .to_vec(),
        },
    };
    let options = Options {
        host: HostSource::Fake(folder.join("xen")),
        program,
        ..options(&config, folder.join("store"))
    };
    let reload = Reload {
        named: Some(named),
        config,
        level,
    };
    if let Err(error) = serve_to_the_end(options, reload) {
        end(&error);
    }
}

/// As `main` does.
fn end(error: &anyhow::Error) -> ! {
    eprintln!("xenblkd: {error:#}");
    process::exit(1);
}

/// Set: its workers never let go of a ring.
const STUCK: &str = "XENBLKD_TEST_STUCK";

#[test]
#[ignore = "run by the daemon under test, as its worker"]
fn a_stuck_worker() {
    let channel = xenblkd::channel::inherited().unwrap();
    let channel: WorkerEnd = Channel::from_socket(channel);
    let mut kept = Vec::new();
    loop {
        match channel.try_recv() {
            Ok(None) => std::thread::sleep(Duration::from_millis(1)),
            Err(_) => return,
            Ok(Some(message)) => {
                kept.push(message.fds);
                let report = match message.body {
                    Command::Hello { .. } => Report::Ready { version: VERSION },
                    Command::Attach(attach) => Report::Attached { ring: attach.ring },
                    _ => continue,
                };
                channel.send(report).unwrap();
            }
        }
    }
}

struct Daemon {
    folder: tempfile::TempDir,
    messages: Receiver<String>,
    process: Child,
}

impl Daemon {
    fn start(config: &str) -> Self {
        Self::start_with(config, &[])
    }

    fn start_with(config: &str, environment: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("notify");
        let messages = listen(UnixDatagram::bind(&socket).unwrap());
        let state = folder.path().join("state");
        fs::create_dir(&state).unwrap();
        let fixed = format!("state-directory = {state:?}\n");
        fs::write(folder.path().join("config"), fixed + config).unwrap();
        let process = Self::process(folder.path())
            .envs(environment.iter().copied())
            .env("NOTIFY_SOCKET", &socket)
            .env("WATCHDOG_USEC", "20000")
            .stderr(fs::File::create(folder.path().join("log")).unwrap())
            .spawn()
            .unwrap();
        Self {
            folder,
            messages,
            process,
        }
    }

    fn process(folder: &Path) -> process::Command {
        let mut command = process::Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "daemon::tests::a_daemon_on_a_mocked_host"])
            // Without it the harness would keep what the daemon says of its failure.
            .args(["--ignored", "--nocapture"])
            .env(FOLDER, folder)
            .stdout(Stdio::null());
        command
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    /// Waits for a message in which one line starts so; that line. Others are passed over.
    fn hears(&self, start: &str) -> String {
        loop {
            // Only a failure waits so long.
            let text = self.messages.recv_timeout(Duration::from_secs(60));
            let text = text.expect(start);
            if let Some(line) = text.lines().find(|line| line.starts_with(start)) {
                return line.to_owned();
            }
        }
    }

    /// The daemon says that it waits for the storage.
    fn waits(&self) {
        let control = self.folder.path().join("state/control");
        let waits = || {
            let status = crate::status::ask(&control).unwrap();
            status
                .disks
                .iter()
                .any(|disk| disk.waiting_seconds.is_some())
        };
        while !waits() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn configure(&self, text: &str) {
        let state = self.folder.path().join("state");
        let text = format!("state-directory = {state:?}\n{text}");
        fs::write(self.folder.path().join("config"), text).unwrap();
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// Runs `work` with a connection to the store.
    fn in_store<T>(&self, work: impl AsyncFnOnce(Client) -> T) -> T {
        let store = self.folder.path().join("store");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(async {
            let (client, _) = Client::connect(store).await.unwrap();
            work(client).await
        })
    }

    /// What a new disk is offered.
    fn offered_queues(&self, devid: u32) -> String {
        self.in_store(async |client| {
            let backend = format!("/local/domain/0/backend/vbd/1/{devid}");
            let frontend = format!("/local/domain/1/device/vbd/{devid}");
            let keys = [
                ("frontend", frontend.as_str()),
                ("frontend-id", "1"),
                ("mode", "w"),
                ("params", "null:1M"),
                ("online", "1"),
                ("state", "1"),
            ];
            let nodes: Vec<_> = keys
                .iter()
                .map(|(key, value)| (format!("{backend}/{key}"), (*value).to_owned()))
                .collect();
            client.write_many(Tx::NONE, &nodes).await.unwrap();
            let state = format!("{backend}/state");
            while client.read(Tx::NONE, &state).await.unwrap() != b"2" {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let queues = format!("{backend}/multi-queue-max-queues");
            String::from_utf8(client.read(Tx::NONE, &queues).await.unwrap()).unwrap()
        })
    }
}

/// Reads at any time: a daemon whose messages nobody takes waits with the next.
fn listen(socket: UnixDatagram) -> Receiver<String> {
    let (heard, messages) = channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 1024];
        // Until the test doesn't listen any more, which the next message shows.
        while let Ok(length) = socket.recv(&mut buffer) {
            let text = String::from_utf8(buffer[..length].to_vec()).unwrap();
            if heard.send(text).is_err() {
                return;
            }
        }
    });
    messages
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Already gone unless the test has failed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn what_the_service_manager_sees() {
    let mut daemon = Daemon::start("[limits]\nmax-queues = 3\n");
    daemon.hears("READY=1");
    daemon.hears("WATCHDOG=1");
    assert_eq!(daemon.offered_queues(51712), "3");

    daemon.configure("log-level = \"warn\"\n[limits]\nmax-queues = 5\n");
    daemon.signal(Signal::HUP);
    daemon.hears("RELOADING=1");
    daemon.hears("READY=1");
    assert_eq!(daemon.offered_queues(51728), "5");

    // What can't be used changes nothing and ends nothing.
    daemon.configure("[limits]\nmax-queues = 50\n");
    daemon.signal(Signal::HUP);
    daemon.hears("RELOADING=1");
    daemon.hears("READY=1");
    assert_eq!(daemon.offered_queues(51744), "5");

    let status = daemon.hears("STATUS=serving 3 disks");
    assert_eq!(status, "STATUS=serving 3 disks over 0 rings");
    daemon.signal(Signal::TERM);
    daemon.hears("STOPPING=1");
    assert!(daemon.process.wait().unwrap().success());
    assert!(!daemon.folder.path().join("state/control").exists());
}

/// The storage doesn't answer, and whoever stops the daemon has had enough.
#[test]
fn a_second_signal_ends_a_daemon_that_waits_for_its_storage() {
    for second in [Signal::TERM, Signal::INT] {
        let mut daemon = Daemon::start_with("", &[(STUCK, "1")]);
        daemon.hears("READY=1");
        daemon.offered_queues(51712);
        daemon.in_store(async |client: Client| {
            let frontend = "/local/domain/1/device/vbd/51712";
            let keys = [("ring-ref", "8"), ("event-channel", "3"), ("state", "3")];
            for (key, value) in keys {
                let node = format!("{frontend}/{key}");
                client.write(Tx::NONE, &node, value).await.unwrap();
            }
            let state = "/local/domain/0/backend/vbd/1/51712/state";
            while client.read(Tx::NONE, state).await.unwrap() != b"4" {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
        daemon.signal(Signal::TERM);
        daemon.hears("STOPPING=1");
        daemon.waits();
        daemon.signal(second);
        assert_eq!(daemon.process.wait().unwrap().code(), Some(1));
        let log = daemon.log();
        let line =
            "xenblkd: ended by a second signal while waiting for I/O (domain 1 vbd 51712 for ";
        assert!(log.contains(line), "{log}");
        assert!(!daemon.folder.path().join("state/control").exists());
    }
}

#[test]
fn a_second_daemon_is_told_who_serves() {
    let daemon = Daemon::start("");
    daemon.hears("READY=1");
    let second = Daemon::process(daemon.folder.path()).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    let said = String::from_utf8(second.stderr).unwrap();
    let line = format!(
        "xenblkd: another xenblkd (pid {}) already serves this host",
        daemon.process.id()
    );
    assert!(said.contains(&line), "{said}");
    // The first is none the worse.
    assert_eq!(daemon.offered_queues(51712), "16");
}
