use std::fs;
use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use xenblk_grants::fake::FakeXen;
use xenblk_xenstore::fake::Server;
use xenblk_xenstore::{Client, Tx};

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
    let xen = FakeXen::start().unwrap();
    xen.listen(&folder.join("xen")).unwrap();
    let server = Server::start().unwrap();
    server.listen(folder.join("store")).unwrap();
    let named = folder.join("config");
    let config = Config::load(Some(&named)).unwrap();
    let level = logs::start(config.log_level);
    let options = Options {
        host: HostSource::Fake(folder.join("xen")),
        program: WorkerProgram::Threads,
        ..options(&config, folder.join("store"))
    };
    let reload = Reload {
        named: Some(named),
        config,
        level,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.unwrap().block_on(serve(options, reload)).unwrap();
}

struct Daemon {
    folder: tempfile::TempDir,
    messages: UnixDatagram,
    process: Child,
}

impl Daemon {
    fn start(config: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("notify");
        let messages = UnixDatagram::bind(&socket).unwrap();
        // Only a failure waits so long.
        let patience = Some(Duration::from_secs(60));
        messages.set_read_timeout(patience).unwrap();
        let state = folder.path().join("state");
        fs::create_dir(&state).unwrap();
        let fixed = format!("state-directory = {state:?}\n");
        fs::write(folder.path().join("config"), fixed + config).unwrap();
        let process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "daemon::tests::a_daemon_on_a_mocked_host"])
            .arg("--ignored")
            .env(FOLDER, folder.path())
            .env("NOTIFY_SOCKET", &socket)
            .env("WATCHDOG_USEC", "20000")
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self {
            folder,
            messages,
            process,
        }
    }

    /// Waits for a message in which one line starts so; that line. Others are passed over.
    fn hears(&self, start: &str) -> String {
        loop {
            let mut buffer = [0; 1024];
            // A socket with a time limit isn't read again after a signal's handler, and tests beside this one
            // wait for children.
            let length = loop {
                match self.messages.recv(&mut buffer) {
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    received => break received.expect(start),
                }
            };
            let text = String::from_utf8(buffer[..length].to_vec()).unwrap();
            if let Some(line) = text.lines().find(|line| line.starts_with(start)) {
                return line.to_owned();
            }
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

    /// What a new disk is offered.
    fn offered_queues(&self, devid: u32) -> String {
        let store = self.folder.path().join("store");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(async {
            let (client, _) = Client::connect(store).await.unwrap();
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
