//! nbdinfo and qemu-io, which know the protocol better than we do. Skipped with a message where they
//! are not installed, unless `XENBLK_PEERS=required` says that they must be.

use std::process::{Command, Output};

use crate::disk::info;
use crate::{MIB, serve};

/// Runs `program`; `None` if it isn't installed.
fn run(program: &str, arguments: &[&str]) -> Option<Output> {
    match Command::new(program).args(arguments).output() {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let required =
                std::env::var_os("XENBLK_PEERS").is_some_and(|value| value == "required");
            assert!(
                !required,
                "{program} is not installed and XENBLK_PEERS=required"
            );
            eprintln!("skipped: {program} is not installed");
            None
        }
        Err(error) => panic!("{program}: {error}"),
    }
}

fn succeed(program: &str, arguments: &[&str]) -> Option<String> {
    let output = run(program, arguments)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Some(text)
}

#[test]
fn nbdinfo_understands_the_export() {
    let served = serve(info(8 * MIB));
    let uri = served.server.uri("xvda");
    let Some(text) = succeed("nbdinfo", &[&uri]) else {
        return;
    };
    for expected in [
        "protocol: newstyle-fixed without TLS",
        "export-size: 8388608",
        "can_multi_conn: true",
        "can_fua: true",
        "can_trim: true",
        "can_zero: true",
        "is_read_only: false",
        "block_size_minimum: 512",
        "block_size_preferred: 4096",
        "block_size_maximum: 33554432",
    ] {
        assert!(text.contains(expected), "{expected} not in {text}");
    }
    let list = succeed("nbdinfo", &["--list", &served.server.uri("")]).unwrap_or_default();
    assert!(
        list.contains("export=\"xvda\"") && list.contains("export=\"xvdb\""),
        "{list}"
    );
}

#[test]
fn qemu_io_reads_back_what_it_wrote() {
    let served = serve(info(8 * MIB));
    let uri = served.server.uri("xvda");
    let commands = [
        "write -P 0xab 0 64k",
        "flush",
        "read -P 0xab 0 64k",
        "write -f -P 0xcd 4k 4k",
        "read -P 0xcd 4k 4k",
        "discard 128k 64k",
        "write -z 256k 2M",
        "read -P 0 256k 2M",
    ];
    let mut arguments = vec!["-f", "raw"];
    for command in &commands {
        arguments.extend(["-c", command]);
    }
    arguments.push(&uri);
    let Some(text) = succeed("qemu-io", &arguments) else {
        return;
    };
    assert!(!text.contains("verification failed"), "{text}");
}
