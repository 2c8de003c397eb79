//! What is installed beside the binary: the hotplug script on stores of two kinds, the unit, the package.
//! Programs that may be absent (systemd-analyze, dpkg-deb, Debian's xenstore tools) skip their test by a
//! line that says so; with `XENBLK_PEERS=required` they fail it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use xenblk_xenstore::fake::Server;

fn packaging(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../packaging")
        .join(name)
}

fn skip(what: &str) {
    assert_ne!(
        std::env::var("XENBLK_PEERS").as_deref(),
        Ok("required"),
        "{what} is not there"
    );
    eprintln!("skipped: {what} is not there");
}

/// A store that the programs xenstore-read and xenstore-write reach.
struct Store {
    folder: tempfile::TempDir,
    environment: Vec<(&'static str, String)>,
    _server: Option<Server>,
}

const BACKEND: &str = "/local/domain/0/backend/vbd/3/51712";

impl Store {
    /// Each node a file, the two programs a few lines of shell.
    fn in_files() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let programs = [
            ("xenstore-read", "cat -- \"$STORE/$1\""),
            (
                "xenstore-write",
                "[ \"$1\" = -- ] && shift; while [ $# -gt 0 ]; do mkdir -p \"$STORE/${1%/*}\"; printf %s \"$2\" >\"$STORE/$1\"; shift 2; done",
            ),
            ("logger", "exit 0"),
            // The script's patience, without the waiting.
            ("sleep", "exit 0"),
        ];
        for (name, body) in programs {
            let file = folder.path().join(name);
            fs::write(&file, format!("#!/bin/sh\n{body}\n")).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let path = format!("{}:/usr/bin:/bin", folder.path().display());
        let environment = vec![
            ("PATH", path),
            ("STORE", folder.path().display().to_string()),
        ];
        Self {
            folder,
            environment,
            _server: None,
        }
    }

    /// The in-memory server through Debian's programs.
    fn in_memory() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mut path = "/usr/bin:/bin:/usr/sbin".to_owned();
        let mut environment = Vec::new();
        if let Some(root) = std::env::var_os("XENBLK_XENSTORE_TOOLS").map(PathBuf::from) {
            path = format!("{}:{path}", root.join("usr/bin").display());
            let libraries = root
                .join("usr/lib")
                .join(format!("{}-linux-gnu", std::env::consts::ARCH));
            environment.push(("LD_LIBRARY_PATH", libraries.display().to_string()));
        }
        let there = path
            .split(':')
            .any(|folder| Path::new(folder).join("xenstore-write").exists());
        if !there {
            return None;
        }
        let socket = folder.path().join("socket");
        let server = Server::start().unwrap();
        server.listen(&socket).unwrap();
        environment.extend([
            ("PATH", path),
            ("XENSTORED_PATH", socket.display().to_string()),
        ]);
        Some(Self {
            folder,
            environment,
            _server: Some(server),
        })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("/usr/bin/env");
        command
            .env_clear()
            .envs(self.environment.iter().cloned())
            .arg(program)
            .stdin(Stdio::null());
        command
    }

    fn write(&self, key: &str, value: &str) {
        let node = format!("{BACKEND}/{key}");
        assert!(
            self.command("xenstore-write")
                .args(["--", &node, value])
                .status()
                .unwrap()
                .success()
        );
    }

    fn read(&self, key: &str) -> Option<String> {
        let mut command = self.command("xenstore-read");
        let output = command.arg(format!("{BACKEND}/{key}")).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        output
            .status
            .success()
            .then(|| text.trim_end_matches('\n').to_owned())
    }

    fn script(&self, path: &str, action: &str) -> Output {
        let mut command = self.command(packaging("block-xenblkd").to_str().unwrap());
        command
            .arg(action)
            .env("XENBUS_PATH", path)
            .output()
            .unwrap()
    }

    /// A device at InitWait with these `params`, whose target is open, and what `add` makes of it.
    fn add(&self, params: &str) -> Output {
        self.write("params", params);
        self.write("state", "2");
        self.write("target-status", "open");
        self.script(BACKEND, "add")
    }
}

fn both() -> impl Iterator<Item = Store> {
    let real = Store::in_memory();
    if real.is_none() {
        eprintln!("skipped: xenstore-write is not there, tests/peers/run has it");
    }
    [Some(Store::in_files()), real].into_iter().flatten()
}

#[test]
fn add_reports_connected_and_the_path_of_raw_targets_only() {
    for (params, path) in [
        ("/srv/a b.img", Some("/srv/a b.img")),
        ("raw:/srv/a.img", Some("/srv/a.img")),
        ("memory:64M", None),
        ("qcow2:/srv/a.qcow2", None),
    ] {
        for store in both() {
            let output = store.add(params);
            assert!(output.status.success(), "{params}: {output:?}");
            assert_eq!(
                store.read("hotplug-status").as_deref(),
                Some("connected"),
                "{params}"
            );
            assert_eq!(
                store.read("physical-device-path").as_deref(),
                path,
                "{params}"
            );
            assert_eq!(store.read("physical-device"), None, "{params}");
            assert_eq!(store.read("hotplug-error"), None, "{params}");
        }
    }
}

#[test]
fn params_are_never_evaluated() {
    for store in both() {
        let trap = store.folder.path().join("trap");
        let touch = format!("touch {}", trap.display());
        for text in [
            "$(X)",
            "`X`",
            "/a;X",
            "/a\nX",
            "/$(X)",
            "-n",
            "/a' X '",
            "raw:/\"; X; \"",
            "*",
            "/x:*/$HOME",
        ] {
            let output = store.add(&text.replace('X', &touch));
            assert!(output.status.success(), "{text:?}: {output:?}");
            assert!(!trap.exists(), "{text:?}");
            assert_eq!(store.read("hotplug-status").as_deref(), Some("connected"));
        }
        assert_eq!(
            store.read("physical-device-path").as_deref(),
            Some("/x:*/$HOME")
        );
    }
}

#[test]
fn the_daemons_reason_is_the_scripts() {
    for store in both() {
        store.write(
            "hotplug-error",
            "/srv/no.img: can't find it: No such file or directory",
        );
        let output = store.add("/srv/no.img");
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(store.read("hotplug-status").as_deref(), Some("error"));
        let told = "/srv/no.img: can't find it: No such file or directory";
        assert_eq!(store.read("hotplug-error").as_deref(), Some(told));
        assert_eq!(store.read("physical-device-path"), None);
    }
}

/// A server that doesn't answer, say.
#[test]
fn a_target_that_is_not_open_yet_is_not_connected() {
    let store = Store::in_files();
    store.write("params", "/srv/a.img");
    store.write("state", "2");
    assert_eq!(store.script(BACKEND, "add").status.code(), Some(1));
    assert_eq!(store.read("hotplug-status").as_deref(), Some("error"));
    let told = store.read("hotplug-error").unwrap();
    assert_eq!(told, "the target is still being opened after 30 seconds");
}

#[test]
fn without_a_daemon_the_script_gives_up_and_says_whom_to_look_for() {
    let store = Store::in_files();
    store.write("params", "/srv/a.img");
    store.write("state", "1");
    let output = store.script(BACKEND, "add");
    assert_eq!(output.status.code(), Some(1));
    let told = store.read("hotplug-error").unwrap();
    assert!(
        told.contains("is xenblkd running (systemctl status xenblkd)?"),
        "{told}"
    );
    for (state, reason) in [("6", "was closed"), ("", "directory is gone")] {
        let store = Store::in_files();
        store.write("state", state);
        assert_eq!(store.script(BACKEND, "add").status.code(), Some(1));
        assert!(store.read("hotplug-error").unwrap().contains(reason));
    }
}

#[test]
fn remove_and_misuse() {
    let store = Store::in_files();
    assert!(store.script(BACKEND, "remove").status.success());
    for (path, action) in [
        ("", "add"),
        (BACKEND, "online"),
        ("../../etc x", "add"),
        ("$(true)", "remove"),
    ] {
        let output = store.script(path, action);
        assert_eq!(output.status.code(), Some(1), "{path} {action}");
        assert!(
            String::from_utf8_lossy(&output.stderr).contains("expected"),
            "{output:?}"
        );
    }
    assert_eq!(store.read("hotplug-status"), None);
}

#[test]
fn the_unit_is_valid() {
    let analyze = |arguments: &[&str]| Command::new("systemd-analyze").args(arguments).output();
    if analyze(&["--version"]).is_err() {
        return skip("systemd-analyze");
    }
    let folder = tempfile::tempdir().unwrap();
    let unit = fs::read_to_string(packaging("xenblkd.service")).unwrap();
    // Neither is installed here: the binary, and the man page it looks up.
    let unit = unit.replace("/usr/sbin/xenblkd", env!("CARGO_BIN_EXE_xenblkd"));
    let unit = unit.replace("Documentation=man:xenblkd(8)\n", "");
    let file = folder.path().join("xenblkd.service");
    fs::write(&file, unit).unwrap();
    let output = analyze(&["verify", file.to_str().unwrap()]).unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!said.contains("xenblkd.service"), "{said}");
}

#[test]
fn the_package_has_everything_where_it_belongs() {
    if Command::new("dpkg-deb").arg("--version").output().is_err() {
        return skip("dpkg-deb");
    }
    let folder = tempfile::tempdir().unwrap();
    let build = Command::new(packaging("build-deb"))
        .args(["--binary", env!("CARGO_BIN_EXE_xenblkd")])
        .arg(folder.path())
        .output()
        .unwrap();
    assert!(build.status.success(), "{build:?}");
    let package = String::from_utf8(build.stdout).unwrap();
    let package = package.trim();
    let dpkg = |option: &str| {
        let output = Command::new("dpkg-deb")
            .args([option, package])
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let contents = dpkg("--contents");
    for (mode, file) in [
        ("-rwxr-xr-x", "usr/sbin/xenblkd"),
        ("-rw-r--r--", "lib/systemd/system/xenblkd.service"),
        ("-rw-r--r--", "etc/xenblkd/xenblkd.toml"),
        ("-rwxr-xr-x", "etc/xen/scripts/block-xenblkd"),
        ("-rw-r--r--", "lib/modprobe.d/xenblkd.conf"),
        ("-rw-r--r--", "usr/share/man/man8/xenblkd.8.gz"),
        (
            "-rw-r--r--",
            "usr/share/bash-completion/completions/xenblkd",
        ),
        ("-rw-r--r--", "usr/share/doc/xenblkd/operations.md"),
    ] {
        let line = contents
            .lines()
            .find(|line| line.ends_with(&format!(" ./{file}")));
        let line = line.unwrap_or_else(|| panic!("{file} is missing:\n{contents}"));
        assert!(line.starts_with(&format!("{mode} root/root ")), "{line}");
    }
    let info = dpkg("--info");
    assert!(
        info.contains(concat!("Version: ", env!("CARGO_PKG_VERSION"))),
        "{info}"
    );
    assert!(info.contains("Depends: libc6 (>= 2."), "{info}");
    let output = Command::new("dpkg-deb")
        .args(["--info", package, "conffiles"])
        .output()
        .unwrap();
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        "/etc/xenblkd/xenblkd.toml\n/etc/xen/scripts/block-xenblkd\n"
    );
}

/// Features are united over all packages that are built together, so this asks what is built alone.
#[test]
fn a_build_of_the_daemon_alone_has_nothing_of_the_mocked_world() {
    let features = |package: &str, arguments: &[&str]| {
        let output = Command::new(env!("CARGO"))
            .args([
                "tree",
                "--offline",
                "--package",
                "xenblkd",
                "--edges",
                "normal",
            ])
            .args(["--prefix", "none", "--format", "{p}: {f}"])
            .args(arguments)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let listed = String::from_utf8(output.stdout).unwrap();
        let line = listed.lines().find(|line| line.starts_with(package));
        let line = line.unwrap_or_else(|| panic!("{listed}"));
        line.rsplit_once(": ").unwrap().1.to_owned()
    };
    for package in ["xenblkd ", "xenblk-grants ", "xenblk-xenstore "] {
        assert_eq!(features(package, &[]), "", "{package}");
    }
    assert_eq!(features("xenblk-grants ", &["--features", "fake"]), "fake");
}
