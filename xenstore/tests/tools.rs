//! Debian's xenstore-* programs against the in-memory server. They come from `tests/peers/run`
//! (`XENBLK_XENSTORE_TOOLS`) or from PATH (package xenstore-utils).

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use xenblk_xenstore::fake::Server;

struct Tools {
    socket: PathBuf,
    /// Where packages were unpacked, unless the tools are installed.
    root: Option<PathBuf>,
}

impl Tools {
    /// `None`, with a line that says so, where there are no tools and none are required.
    fn find(socket: &Path) -> Option<Self> {
        let root = std::env::var_os("XENBLK_XENSTORE_TOOLS").map(PathBuf::from);
        let tools = Self {
            socket: socket.to_owned(),
            root,
        };
        if tools
            .command("xenstore-ls", &[])
            .stderr(Stdio::null())
            .output()
            .is_ok()
        {
            return Some(tools);
        }
        assert_ne!(
            std::env::var("XENBLK_XENSTORE_PEERS").as_deref(),
            Ok("required"),
            "no xenstore-ls: run tests/peers/run or install xenstore-utils"
        );
        eprintln!("skipped: no xenstore-ls, tests/peers/run or package xenstore-utils has it");
        None
    }

    fn command(&self, name: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(name);
        if let Some(root) = &self.root {
            command = Command::new(root.join("usr/bin").join(name));
            let triple = format!("{}-linux-gnu", std::env::consts::ARCH);
            command.env("LD_LIBRARY_PATH", root.join("usr/lib").join(triple));
        }
        command
            .args(arguments)
            .env("XENSTORED_PATH", &self.socket)
            .stdin(Stdio::null());
        command
    }

    fn output(&self, name: &str, arguments: &[&str]) -> Output {
        self.command(name, arguments).output().unwrap()
    }

    /// Standard output of a run that must succeed.
    fn run(&self, name: &str, arguments: &[&str]) -> String {
        let output = self.output(name, arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name} {arguments:?}: {error}");
        String::from_utf8(output.stdout).unwrap()
    }
}

#[test]
fn debian_tools_are_served() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let server = Server::start().unwrap();
    server.listen(&socket).unwrap();
    let Some(tools) = Tools::find(&socket) else {
        return;
    };

    tools.run("xenstore-write", &["/a/b", "one", "/a/c/d", "two"]);
    assert_eq!(
        tools.run("xenstore-read", &["/a/b", "/a/c/d"]),
        "one\ntwo\n"
    );
    assert_eq!(tools.run("xenstore-list", &["/a"]), "b\nc\n");
    assert_eq!(
        tools.run("xenstore-ls", &["/a"]),
        "b = \"one\"\nc = \"\"\n d = \"two\"\n"
    );
    tools.run("xenstore-chmod", &["-r", "/a/c", "n0", "r5"]);
    let listing = tools.run("xenstore-ls", &["-f", "-p", "/a"]);
    let lines: Vec<_> = listing
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .collect();
    assert_eq!(lines[2], ["/a/c/d", "=", "\"two\"", "(n0,r5)"], "{listing}");
    tools.run("xenstore-exists", &["/a/b"]);
    assert!(
        !tools
            .output("xenstore-exists", &["/a/none"])
            .status
            .success()
    );
    let missing = tools.output("xenstore-read", &["/a/none"]);
    assert!(!missing.status.success());
    assert!(String::from_utf8_lossy(&missing.stderr).contains("couldn't read path /a/none"));

    // More children than one reply holds: libxenstore asks for parts.
    for n in 0..30 {
        let paths: Vec<_> = (0..30)
            .map(|m| format!("/long/entry-{n:02}-{m:02}-{}", "x".repeat(9)))
            .collect();
        let arguments: Vec<_> = paths.iter().flat_map(|path| [path.as_str(), "v"]).collect();
        tools.run("xenstore-write", &arguments);
    }
    assert_eq!(tools.run("xenstore-list", &["/long"]).lines().count(), 900);

    let mut watch = tools
        .command("xenstore-watch", &["-n", "2", "/a"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    assert_eq!(
        lines.next().unwrap().unwrap(),
        "/a",
        "fires once at registration"
    );
    tools.run("xenstore-write", &["/a/b", "three"]);
    assert_eq!(lines.next().unwrap().unwrap(), "/a/b");
    assert!(watch.wait().unwrap().success());

    tools.run("xenstore-rm", &["/a"]);
    assert!(!tools.output("xenstore-exists", &["/a/b"]).status.success());
    eprintln!("xenstore-ls -read -write -list -exists -chmod -watch -rm: served");
}
