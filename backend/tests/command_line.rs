//! What `xenblkd` says and returns on a machine that can't serve: one line and the right exit code.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn xenblkd(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_xenblkd"))
        .args(arguments)
        .output()
        .unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The only line on standard error, of a run that failed with exit code 1 and printed nothing else.
#[track_caller]
fn refusal(arguments: &[&str]) -> String {
    let output = xenblkd(arguments);
    let error = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {error}");
    assert_eq!(stdout(&output), "");
    let line = error.strip_suffix('\n').unwrap();
    assert!(!line.contains('\n'), "{error}");
    line.strip_prefix("xenblkd: ").unwrap().to_owned()
}

fn folder_with(config: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("c.toml");
    std::fs::write(&file, config).unwrap();
    (folder, file.to_str().unwrap().to_owned())
}

#[test]
fn a_configuration_that_is_missing_or_wrong_stops_every_command() {
    let (_folder, wrong) = folder_with("\nworker = 1\n");
    for command in ["run", "check", "check-config", "status"] {
        let line = refusal(&[command, "--config", "/nonexistent/c.toml"]);
        assert_eq!(
            line,
            "cannot read /nonexistent/c.toml: No such file or directory (os error 2); expected a readable TOML file"
        );
        let line = refusal(&[command, "--config", &wrong]);
        assert!(
            line.starts_with(&format!(
                "{wrong}:2: unknown field `worker`, expected one of `log-level`, "
            )),
            "{line}"
        );
    }
}

#[test]
fn a_good_configuration_is_called_so() {
    let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/xenblkd.toml");
    let output = xenblkd(&["check-config", "--config", shipped]);
    assert!(output.status.success());
    assert_eq!(stdout(&output), format!("{shipped}: fine\n"));
}

#[test]
fn without_xen_nothing_is_touched() {
    if Path::new("/sys/hypervisor/type").exists() {
        return;
    }
    let (folder, config) = folder_with("");
    let state = folder.path().join("state");
    std::fs::write(&config, format!("state-directory = {state:?}\n")).unwrap();
    let line = refusal(&["run", "--config", &config]);
    assert!(
        line.starts_with("/sys/hypervisor/type says nothing"),
        "{line}"
    );
    assert!(
        line.contains("remedy: boot this machine under Xen"),
        "{line}"
    );
    assert!(!state.exists());

    let output = xenblkd(&["check", "--config", &config]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("MISSING"));
    let output = xenblkd(&["check", "--json", "--config", &config]);
    assert_eq!(output.status.code(), Some(1));
    let findings: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(findings[0]["subject"], "xen");
    assert_eq!(findings[0]["verdict"], "missing");
}

#[test]
fn status_needs_a_daemon() {
    let (folder, config) = folder_with("");
    let state = folder.path().join("state");
    std::fs::write(&config, format!("state-directory = {state:?}\n")).unwrap();
    let line = refusal(&["status", "--config", &config]);
    assert!(
        line.contains("no xenblkd is running; start it with"),
        "{line}"
    );
}

#[test]
fn a_wrong_command_line_is_exit_code_2() {
    let long = "x".repeat(100_000);
    let wrong: [&[&str]; 15] = [
        &[],
        &[""],
        &["serve"],
        &["run", "--jobs"],
        &["run", "--config"],
        &["run", "--config", "/a", "--config", "/b"],
        &["run", "/etc/xenblkd/xenblkd.toml"],
        &["status", "--json", "--json=1"],
        &["completions"],
        &["completions", "cmd"],
        &["completions", &long],
        &["worker"],
        &["worker", "--channel-fd", "3"],
        &["worker", "--channel-fd", "-1"],
        &["worker", "--channel-fd", "0", "--log-level", "loud"],
    ];
    for arguments in wrong {
        let output = xenblkd(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert_eq!(stdout(&output), "", "{arguments:?}");
    }
}

#[test]
fn arguments_need_not_be_text() {
    let name = std::ffi::OsStr::from_bytes(b"/\xff\n\xfe.toml");
    let output = Command::new(env!("CARGO_BIN_EXE_xenblkd"))
        .args([std::ffi::OsStr::new("check-config"), "--config".as_ref()])
        .arg(name)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stdout(&output), "");
}

#[test]
fn a_worker_started_by_hand_says_so_and_ends() {
    let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    ours.write_all(b"status\n").unwrap();
    drop(ours);
    for input in [Stdio::null(), Stdio::from(OwnedFd::from(theirs))] {
        let output = Command::new(env!("CARGO_BIN_EXE_xenblkd"))
            .args(["worker", "--channel-fd", "0"])
            .stdin(input)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(!output.stderr.is_empty());
    }
}

#[test]
fn every_shell_completes_the_public_commands() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let output = xenblkd(&["completions", shell]);
        assert!(output.status.success());
        let script = stdout(&output);
        assert!(script.contains("check-config"), "{shell}");
    }
}
