//! The simulator's command line, as a user meets it.

use std::io::{BufRead, BufReader};
use std::ops::Not;
use std::os::unix::net::UnixListener;
use std::process::{Child, ChildStderr, ChildStdout, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use super::*;

/// A folder to run in, whose `tmp` is the simulator's place for temporary files.
fn playground() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("tmp")).unwrap();
    folder
}

fn command(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(sim());
    command
        .args(args)
        .current_dir(folder)
        .env("TMPDIR", folder.join("tmp"))
        .stdin(Stdio::null());
    command
}

fn output(folder: &Path, args: &[&str]) -> Output {
    command(folder, args).output().unwrap()
}

/// One byte more than a socket's name can have and still end in the NUL that other programs expect.
const TOO_LONG: &str = "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\
                        xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx";

fn only_entry(folder: &Path) -> PathBuf {
    let mut entries = std::fs::read_dir(folder).unwrap();
    entries.next().expect("nothing there").unwrap().path()
}

fn assert_nothing_left(folder: &Path) {
    let left: Vec<_> = std::fs::read_dir(folder.join("tmp")).unwrap().collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

/// Arguments, and what the one line about them names and expects.
const REFUSED: &[(&[&str], &str, &str)] = &[
    (&["serve", "missing"], "missing", "No such file"),
    (&["serve", "empty"], "empty", "at least 512"),
    (&["serve", "short"], "short", "multiple of 512"),
    (&["serve", "unaligned"], "1000", "multiple of 512"),
    (
        &["serve", "."],
        ".",
        "expected a regular file or a block device",
    ),
    (&["serve", "qcow2:x"], "qcow2:x", "null:SIZE"),
    (&["serve", "good", "missing"], "missing", "No such file"),
    (
        &["serve", "good", "--nbd", "stale"],
        "stale",
        "exists already",
    ),
    (
        &["serve", "good", "--nbd", "live"],
        "live",
        "exists already",
    ),
    (
        &["serve", "good", "--nbd", "no/where"],
        "no/where",
        "No such file",
    ),
    (&["serve", "good", "--queues", "17"], "17", "from 1 to 16"),
    (&["serve", "good", "--queues", "0"], "'0'", "from 1 to 16"),
    (&["serve", "good", "--ring-order", "5"], "5", "from 0 to 4"),
    (
        &["serve", "good", "--profile", "beos"],
        "beos",
        "expected one of linux6, linux3.11, win9, freebsd14",
    ),
    (
        &["serve", "good", "--profile", "freebsd14", "--queues", "4"],
        "--queues 4",
        "at most 1, the rings of freebsd14",
    ),
    (
        &[
            "load",
            "null:",
            "--profile",
            "linux3.11",
            "--ring-order",
            "1",
        ],
        "--ring-order 1",
        "at most 0",
    ),
    (
        &["serve", "good", "--fast"],
        "--fast",
        "unexpected argument",
    ),
    (&["serve"], "IMAGE", "required"),
    (&["load", "null:5"], "null:5", "multiple of 512"),
    (&["load", "good", "--rw", "scribble"], "scribble", "randrw"),
    (
        &["load", "null:", "--bs", "1000"],
        "1000",
        "multiple of 512",
    ),
    (&["load", "null:", "--bs", "256k"], "262144", "131072"),
    (
        &["load", "null:", "--queues", "1,x"],
        "'x'",
        "expected a number from 1 to 16",
    ),
    (
        &["load", "null:", "--size", "512"],
        "512",
        "one block of 4096",
    ),
    (&["serve", "no\nsuch"], "no\\nsuch", "No such file"),
    (
        &["serve", "good", "--nbd", TOO_LONG],
        TOO_LONG,
        "at most 107 bytes",
    ),
    (&["load", "null:", "--runtime", "-1"], "-1", ""),
    (&["frobnicate"], "frobnicate", "unrecognized subcommand"),
];

#[test]
fn bad_values_and_images_are_refused_in_one_line_and_nothing_is_made() {
    let folder = playground();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("empty"), "").unwrap();
    std::fs::write(at("short"), [1; 100]).unwrap();
    std::fs::write(at("unaligned"), [1; 1000]).unwrap();
    std::fs::write(at("good"), [1; 4096]).unwrap();
    std::fs::write(at("stale"), "").unwrap();
    let _live = UnixListener::bind(at("live")).unwrap();
    let before = listing(folder.path());
    for &(args, value, expected) in REFUSED {
        let output = output(folder.path(), args);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{args:?} succeeded");
        assert_eq!(said.lines().count(), 1, "{args:?}: {said}");
        assert!(
            said.contains(value) && said.contains(expected),
            "{args:?}: {said}"
        );
        assert_eq!(output.stdout, b"", "{args:?}");
    }
    assert_eq!(listing(folder.path()), before);
    assert_nothing_left(folder.path());
}

/// Every file with its length.
fn listing(folder: &Path) -> Vec<(PathBuf, u64)> {
    let entries = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap());
    let mut files: Vec<_> = entries
        .filter(|entry| entry.file_name() != "tmp")
        .map(|entry| (entry.path(), entry.metadata().unwrap().len()))
        .collect();
    files.sort();
    files
}

/// A running `serve`, killed if a test ends before it did.
struct Serving {
    child: Child,
    out: BufReader<ChildStdout>,
    err: BufReader<ChildStderr>,
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Serving {
    fn start(folder: &Path, args: &[&str]) -> Self {
        let mut child = command(folder, args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let err = BufReader::new(child.stderr.take().unwrap());
        Self { child, out, err }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        line
    }

    /// Sends `signal` and waits for the end; whether it was a success, and what was said on standard error.
    fn end(mut self, signal: Signal) -> (bool, String) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        let mut said = String::new();
        self.err.read_to_string(&mut said).unwrap();
        (self.child.wait().unwrap().success(), said)
    }
}

#[test]
fn serve_names_its_exports_and_removes_everything_when_interrupted() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let folder = playground();
        image(folder.path(), "a.img", MIB);
        let args = [
            "serve",
            "a.img",
            "memory:2M",
            "--nbd",
            "nbd.sock",
            "--queues",
            "2",
        ];
        let mut serving = Serving::start(folder.path(), &args);
        for name in ["xvda", "xvdb"] {
            let line = serving.line();
            let uri = format!("nbd+unix:///{name}?socket=nbd.sock");
            assert!(line.starts_with(&uri) && line.contains("2 rings"), "{line}");
        }
        assert!(folder.path().join("nbd.sock").exists());
        assert_eq!(serving.end(signal), (true, String::new()));
        assert!(!folder.path().join("nbd.sock").exists());
        assert_nothing_left(folder.path());
    }
}

/// However early it comes, once there is anything to take away.
#[test]
fn a_signal_during_the_start_leaves_nothing_behind() {
    for (signal, args) in [
        (Signal::INT, &["serve", "memory:1M"][..]),
        (Signal::TERM, &["load", "null:"]),
        (Signal::HUP, &[]),
    ] {
        let folder = playground();
        let serving = Serving::start(folder.path(), args);
        // A busy loop: what is looked for is there for a moment only.
        while std::fs::read_dir(folder.path().join("tmp"))
            .unwrap()
            .next()
            .is_none()
        {}
        let (_, said) = serving.end(signal);
        assert!(
            said.is_empty() || said == "xenblk-sim: interrupted\n",
            "{said}"
        );
        assert_nothing_left(folder.path());
    }
}

/// The signal comes with the first thing made, before backend and guest have started.
#[test]
fn an_interrupted_start_leaves_nothing() {
    for args in [&["serve", "memory:1M"][..], &["load", "null:"], &[]] {
        let folder = playground();
        let tmp = folder.path().join("tmp");
        let starting = Serving::start(folder.path(), args);
        while std::fs::read_dir(&tmp).unwrap().next().is_none() {
            std::hint::spin_loop();
        }
        let (success, said) = starting.end(Signal::TERM);
        assert_eq!(success, args.contains(&"serve"), "{said}");
        assert_nothing_left(folder.path());
    }
}

#[test]
fn serve_says_that_the_backend_died_and_fails_at_its_end() {
    let folder = playground();
    let serving = {
        let mut serving = Serving::start(folder.path(), &["serve", "null:1G"]);
        assert!(serving.line().starts_with("nbd+unix:///?socket="));
        serving
    };
    let control = only_entry(&folder.path().join("tmp")).join("control");
    for pid in workers(&control) {
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }
    eventually("the disk is closed", || {
        status(&control)
            .disks
            .iter()
            .all(|disk| disk.rings.is_empty())
            .then_some(())
    });
    let (success, said) = serving.end(Signal::INT);
    assert!(!success);
    assert!(
        said.contains("guest: xvda") && said.contains("xenblk-sim: xvda"),
        "{said}"
    );
    assert_nothing_left(folder.path());
}

#[test]
fn a_killed_simulator_takes_its_backend_with_it() {
    let folder = playground();
    let mut serving = Serving::start(folder.path(), &["serve", "memory:1M"]);
    assert!(serving.line().starts_with("nbd+unix:///?socket="));
    let host = only_entry(&folder.path().join("tmp"));
    let workers = workers(&host.join("control"));
    assert!(!workers.is_empty());
    let (success, _) = serving.end(Signal::KILL);
    assert!(!success);
    for pid in workers {
        // A zombie has no command line.
        let command_line = PathBuf::from(format!("/proc/{pid}/cmdline"));
        eventually("the worker's end", || {
            std::fs::read(&command_line)
                .is_ok_and(|text| !text.is_empty())
                .not()
                .then_some(())
        });
    }
    assert!(host.exists(), "it was killed");
    let next = output(folder.path(), &["load", "null:", "--size", "1M"]);
    assert!(next.status.success());
    assert_nothing_left(folder.path());
}

#[test]
fn load_reports_each_number_of_rings_in_json() {
    let folder = playground();
    let args = [
        "load", "null:", "--queues", "1,3", "--size", "4M", "--bs", "16k", "--json",
    ];
    let output = output(folder.path(), &args);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).unwrap();
    let runs: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(runs.len(), 2, "{text}");
    for (run, queues) in runs.iter().zip([1, 3]) {
        assert_eq!(run["queues"], queues, "{run}");
        assert_eq!(run["profile"], "linux6");
        assert_eq!(run["interrupted"], false);
        assert_eq!(run["leaks"], 0);
        assert_eq!(run["rings"].as_array().unwrap().len(), queues);
        let requests = run["total"]["requests"].as_u64().unwrap();
        assert!(
            (256..=258).contains(&requests),
            "{requests} of 256 requests"
        );
        assert_eq!(run["total"]["errors"], 0);
        assert_eq!(run["total"]["backend"]["reads"], requests);
        // What a ring may use is bounded by what the supervisor gives it, and a little.
        let memory = run["rings"][0]["backend"]["memory_bytes"].as_u64().unwrap();
        assert!((8 << 20..9 << 20).contains(&memory), "{memory} bytes");
    }
    assert_nothing_left(folder.path());
}

#[test]
fn an_interrupted_load_shows_what_it_has_and_fails() {
    let folder = playground();
    let args = ["load", "null:", "--runtime", "600", "--json"];
    let mut loading = Serving::start(folder.path(), &args);
    let control = eventually("the load's world", || {
        let mut worlds = std::fs::read_dir(folder.path().join("tmp")).unwrap();
        worlds
            .next()
            .map(|entry| entry.unwrap().path().join("control"))
    });
    eventually("requests on every ring", || {
        let Ok(Response::Status(status)) = ask(&control, Request::Status {}) else {
            return None;
        };
        let rings = &status.disks.first()?.rings;
        let busy = rings.iter().all(|ring| ring.counters.responses > 0);
        (rings.len() == 4 && busy).then_some(())
    });
    kill_process(Pid::from_child(&loading.child), Signal::INT).unwrap();
    let run: serde_json::Value = serde_json::from_str(&loading.line()).unwrap();
    assert_eq!(run["interrupted"], true);
    assert_eq!(run["leaks"], 0);
    assert!(run["total"]["requests"].as_u64() > Some(0), "{run}");
    let (success, said) = loading.end(Signal::INT);
    assert_eq!(
        (success, said.as_str()),
        (false, "xenblk-sim: interrupted\n")
    );
}

#[test]
fn load_does_not_change_an_image_it_only_reads_and_fills_one_it_writes() {
    let folder = playground();
    std::fs::write(folder.path().join("a.img"), vec![9; MIB as usize]).unwrap();
    let short = ["--size", "1M", "--bs", "64k", "--queues", "2"];
    for mode in ["read", "randread"] {
        let mut args = vec!["load", "a.img", "--rw", mode];
        args.extend(short);
        let output = output(folder.path(), &args);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let table = String::from_utf8(output.stdout).unwrap();
        assert!(table.contains("IOPS") && table.contains("all"), "{table}");
    }
    let data = std::fs::read(folder.path().join("a.img")).unwrap();
    assert!(data.iter().all(|&byte| byte == 9));
    let mut args = vec!["load", "a.img", "--rw", "write"];
    args.extend(short);
    assert!(output(folder.path(), &args).status.success());
    let data = std::fs::read(folder.path().join("a.img")).unwrap();
    assert!(
        data.iter().all(|&byte| byte != 9),
        "some blocks were not written"
    );
}

#[test]
fn profiles_are_listed_with_what_they_are() {
    let folder = playground();
    let output = output(folder.path(), &["profiles"]);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    for profile in Profile::all() {
        let described = format!("{}: {}", profile.name, profile.summary);
        assert!(text.lines().any(|line| line == described), "{text}");
    }
}
