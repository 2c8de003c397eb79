//! The NBD export against a client of our own, hostile ones included, and against nbdinfo and qemu-io
//! where they are installed. The disk is memory: rings are other tests' business.

mod client;
mod disk;
mod hostile;
mod peers;

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use xenblk_tests::disk::{DiskInfo, IoError};
use xenblk_tests::nbd::{self, Export, Server};

use client::{
    ACK, Client, DISC, ERR_INVALID, ERR_TOO_BIG, ERR_UNKNOWN, ERR_UNSUP, FLUSH, FUA, INFO,
    OPT_ABORT, OPT_EXPORT_NAME, OPT_GO, OPT_INFO, OPT_LIST, READ, SERVER, TRIM, WRITE,
    WRITE_ZEROES, go_data,
};
use disk::{MemoryDisk, Seen, info};

const EPERM: u32 = 1;
const EIO: u32 = 5;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const ENOTSUP: u32 = 95;
const ESHUTDOWN: u32 = 108;

const MIB: u64 = 1 << 20;

/// A served disk; `server` is taken by tests that shut it down themselves.
struct Served {
    server: Server,
    disk: Arc<MemoryDisk>,
    path: PathBuf,
    /// Removed last.
    _folder: tempfile::TempDir,
}

fn serve(info: DiskInfo) -> Served {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nbd.sock");
    let disk = MemoryDisk::new(info);
    let exports = vec![
        Export {
            name: "xvda".into(),
            disk: disk.clone(),
        },
        Export {
            name: "xvdb".into(),
            disk: MemoryDisk::new(disk::info(4096)),
        },
    ];
    Served {
        server: nbd::serve(&path, exports).unwrap(),
        disk,
        path,
        _folder: folder,
    }
}

#[test]
fn negotiation_tells_size_flags_and_block_sizes() {
    let served = serve(info(MIB));
    let told = Client::dial(&served.path, 3).choose("xvda");
    assert_eq!(told.size, MIB);
    // has flags, flush, FUA, trim, write zeroes, multi-conn
    assert_eq!(told.flags, 0b1_0110_1101);
    assert_eq!(told.blocks, [512, 4096, 32 << 20]);
    assert_eq!(Client::dial(&served.path, 1).choose("xvdb").size, 4096);
}

#[test]
fn negotiation_offers_only_what_the_disk_does() {
    let bare = DiskInfo {
        flush: false,
        discard: false,
        ..info(MIB)
    };
    let readonly = DiskInfo {
        readonly: true,
        physical_sector_size: 16384,
        ..info(MIB)
    };
    assert_eq!(
        Client::dial(&serve(bare).path, 3).choose("").flags,
        0b1_0100_0001
    );
    let told = Client::dial(&serve(readonly).path, 3).choose("");
    assert_eq!((told.flags, told.blocks[1]), (0b1_0000_0011, 16384));
}

#[test]
fn list_info_and_abort_follow_the_protocol() {
    let served = serve(info(MIB));
    let mut client = Client::dial(&served.path, 3);
    client.option(OPT_LIST, &[]);
    assert_eq!(
        client.option_reply(OPT_LIST),
        (SERVER, b"\0\0\0\x04xvda".to_vec())
    );
    assert_eq!(
        client.option_reply(OPT_LIST),
        (SERVER, b"\0\0\0\x04xvdb".to_vec())
    );
    assert_eq!(client.option_reply(OPT_LIST), (ACK, vec![]));
    client.option(OPT_INFO, &go_data("xvdb"));
    assert_eq!(client.option_reply(OPT_INFO).0, INFO);
    assert_eq!(client.option_reply(OPT_INFO).0, INFO);
    assert_eq!(client.option_reply(OPT_INFO).0, ACK);
    client.option(OPT_ABORT, &[]);
    assert_eq!(client.option_reply(OPT_ABORT), (ACK, vec![]));
    client.assert_closed();
}

#[test]
fn what_is_not_offered_is_refused_and_the_client_may_go_on() {
    let served = serve(info(MIB));
    let mut client = Client::dial(&served.path, 3);
    // STARTTLS, STRUCTURED_REPLY, LIST and SET_META_CONTEXT, EXTENDED_HEADERS, PEEK_EXPORT, unknown
    for code in [5, 8, 9, 10, 11, 4, 0xffff_ffff] {
        client.option(code, b"anything");
        assert_eq!(client.option_reply(code).0, ERR_UNSUP, "option {code}");
    }
    client.option(OPT_GO, &go_data("nothing"));
    assert_eq!(client.option_reply(OPT_GO).0, ERR_UNKNOWN);
    for malformed in [
        &b""[..],
        b"\0\0",
        b"\0\0\0\x09xvda\0\0",
        b"\xff\xff\xff\xff",
        b"\0\0\0\0\0\x02\0\0",
    ] {
        client.option(OPT_GO, malformed);
        assert_eq!(client.option_reply(OPT_GO).0, ERR_INVALID, "{malformed:?}");
    }
    client.option(OPT_LIST, b"x");
    assert_eq!(client.option_reply(OPT_LIST).0, ERR_INVALID);
    client.option(OPT_GO, &vec![0; 100_000]);
    assert_eq!(client.option_reply(OPT_GO).0, ERR_TOO_BIG);
    client.choose("xvda");
    assert_eq!(client.read(0, 512), [0x5a; 512]);
}

#[test]
fn export_name_of_old_clients_works() {
    let served = serve(info(MIB));
    for (flags, padding) in [(0, 124), (1, 124), (3, 0)] {
        let mut client = Client::dial(&served.path, flags);
        client.option(OPT_EXPORT_NAME, b"xvda");
        assert_eq!(u64::from_be_bytes(client.take()), MIB);
        assert_eq!(u16::from_be_bytes(client.take()), 0b1_0110_1101);
        let mut zeroes = vec![1; padding];
        client.stream.read_exact(&mut zeroes).unwrap();
        assert_eq!(zeroes, vec![0; padding]);
        assert_eq!(client.read(512, 512), [0x5a; 512]);
    }
    let mut client = Client::dial(&served.path, 3);
    client.option(OPT_EXPORT_NAME, b"nothing");
    client.assert_closed();
}

#[test]
fn each_command_reaches_the_disk_as_what_it_means() {
    let served = serve(info(8 * MIB));
    let mut client = Client::go(&served.path);
    assert_eq!(client.ask(WRITE, 0, 1024, 512, &[7; 512]), 0);
    assert_eq!(client.ask(WRITE, FUA, 4096, 512, &[8; 512]), 0);
    assert_eq!(client.ask(FLUSH, 0, 0, 0, &[]), 0);
    assert_eq!(client.ask(TRIM, FUA, 0, 512, &[]), 0);
    assert_eq!(
        client.read(0, 2048),
        [vec![0; 512], vec![0x5a; 512], vec![7; 512], vec![0x5a; 512]].concat()
    );
    assert_eq!(client.read(4096, 512), [8; 512]);
    // In three pieces, the hole flag (no hole) accepted, durable at the end.
    assert_eq!(
        client.ask(WRITE_ZEROES, FUA | 2, 512, (2 << 20) + 512, &[]),
        0
    );
    assert_eq!(client.read(512, (2 << 20) + 512), vec![0; (2 << 20) + 512]);
    assert_eq!(client.read(1024 + (2 << 20), 512), [0x5a; 512]);
    let modifying: Vec<Seen> = served
        .disk
        .seen()
        .into_iter()
        .filter(|seen| !matches!(seen, Seen::Read(..)))
        .collect();
    assert_eq!(
        modifying,
        [
            Seen::Write(1024, 512),
            Seen::Write(4096, 512),
            Seen::Flush,
            Seen::Flush,
            Seen::Discard(0, 512),
            Seen::Flush,
            Seen::Write(512, 1 << 20),
            Seen::Write(512 + MIB, 1 << 20),
            Seen::Write(512 + 2 * MIB, 512),
            Seen::Flush,
        ]
    );
}

#[test]
fn requests_outside_the_disk_or_its_sectors_get_the_protocols_errors() {
    let served = serve(info(MIB));
    let mut client = Client::go(&served.path);
    let end = MIB;
    for (command, offset, len, error) in [
        (READ, end, 512, EINVAL),
        (READ, end - 512, 1024, EINVAL),
        (READ, u64::MAX - 511, 512, EINVAL),
        (READ, 1, 512, EINVAL),
        (READ, 0, 100, EINVAL),
        (READ, 0, 0, EINVAL),
        (READ, 0, u32::MAX - 511, EINVAL),
        (WRITE_ZEROES, end, 512, ENOSPC),
        (WRITE_ZEROES, 0, u32::MAX - 511, ENOSPC),
        (WRITE_ZEROES, 3, 512, EINVAL),
        (TRIM, end - 512, 1024, EINVAL),
        (TRIM, 0, 1, EINVAL),
        (5, 0, 512, EINVAL),
        (0xffff, 0, 0, EINVAL),
    ] {
        assert_eq!(
            client.ask(command, 0, offset, len, &[]),
            error,
            "{command} {offset} {len}"
        );
    }
    // A refused WRITE's data is skipped: the next request is still understood.
    assert_eq!(client.ask(WRITE, 0, end, 512, &[1; 512]), ENOSPC);
    assert_eq!(
        client.ask(WRITE, 0, u64::MAX - 511, 1024, &[1; 1024]),
        ENOSPC
    );
    assert_eq!(client.ask(WRITE, 0, 7, 512, &[1; 512]), EINVAL);
    assert_eq!(client.ask(WRITE, 1 << 7, 0, 512, &[1; 512]), EINVAL);
    assert_eq!(client.ask(READ, 1 << 1, 0, 512, &[]), EINVAL);
    assert_eq!(served.disk.seen(), [], "none of them reached the disk");
    assert_eq!(client.read(end - 512, 512), [0x5a; 512]);
}

#[test]
fn a_readonly_or_plain_disk_refuses_the_rest() {
    let served = serve(DiskInfo {
        readonly: true,
        ..info(MIB)
    });
    let mut client = Client::go(&served.path);
    assert_eq!(client.ask(WRITE, 0, 0, 512, &[1; 512]), EPERM);
    assert_eq!(client.ask(TRIM, 0, 0, 512, &[]), EPERM);
    assert_eq!(client.ask(WRITE_ZEROES, 0, 0, 512, &[]), EPERM);
    assert_eq!(client.read(0, 512), [0x5a; 512]);

    let served = serve(DiskInfo {
        flush: false,
        discard: false,
        ..info(MIB)
    });
    let mut client = Client::go(&served.path);
    assert_eq!(client.ask(FLUSH, 0, 0, 0, &[]), EINVAL);
    assert_eq!(client.ask(TRIM, 0, 0, 512, &[]), EINVAL);
    assert_eq!(client.ask(WRITE, FUA, 0, 512, &[1; 512]), EINVAL);
    assert_eq!(client.ask(WRITE, 0, 0, 512, &[1; 512]), 0);
}

#[test]
fn the_disks_errors_reach_the_client_and_it_goes_on() {
    let served = serve(info(MIB));
    let mut client = Client::go(&served.path);
    for (error, errno) in [
        (IoError::Error, EIO),
        (IoError::NotSupported, ENOTSUP),
        (IoError::Invalid, EINVAL),
        (IoError::Gone, ESHUTDOWN),
    ] {
        served.disk.fail(Some(error));
        assert_eq!(client.ask(READ, 0, 0, 512, &[]), errno);
        assert_eq!(client.ask(WRITE, FUA, 0, 512, &[1; 512]), errno);
    }
    served.disk.fail(None);
    assert_eq!(client.read(0, 512), [0x5a; 512]);
    assert!(
        !served.disk.seen().contains(&Seen::Flush),
        "a failed FUA write is not flushed"
    );
}

#[test]
fn requests_in_flight_are_answered_in_the_order_they_complete() {
    let served = serve(info(MIB));
    served.disk.hold();
    let mut client = Client::go(&served.path);
    for cookie in 0..3 {
        client.request(FLUSH, 0, cookie, 0, 0);
        // The next must arrive after this one for the indices below to mean what they say.
        served.disk.wait_held(usize::try_from(cookie).unwrap() + 1);
    }
    for (index, cookie) in [(1, 1), (1, 2), (0, 0)] {
        served.disk.complete(index);
        assert_eq!(client.reply(), (cookie, 0));
    }
}

#[test]
fn one_connection_uses_every_queue() {
    let served = serve(info(MIB));
    let mut client = Client::go(&served.path);
    for _ in 0..8 {
        client.read(0, 512);
    }
    let mut queues: Vec<usize> = served.disk.hints().iter().map(|hint| hint % 4).collect();
    queues.sort_unstable();
    assert_eq!(queues, [0, 0, 1, 1, 2, 2, 3, 3]);
}

#[test]
fn a_flush_on_one_connection_is_seen_by_others_disk() {
    let served = serve(info(MIB));
    let (mut one, mut other) = (Client::go(&served.path), Client::go(&served.path));
    assert_eq!(one.ask(WRITE, 0, 0, 512, &[3; 512]), 0);
    assert_eq!(other.ask(FLUSH, 0, 0, 0, &[]), 0);
    assert_eq!(other.read(0, 512), [3; 512]);
}

#[test]
fn the_socket_is_private_and_never_replaces_a_file() {
    let served = serve(info(MIB));
    let mode = std::fs::metadata(&served.path)
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    let error = nbd::serve(&served.path, vec![]).unwrap_err().to_string();
    let path = served.path.display();
    assert_eq!(
        error,
        format!("{path}: exists already; expected a socket path that is free")
    );
    Client::go(&served.path).read(0, 512);

    let long = served.path.with_file_name("x".repeat(200));
    let error = nbd::serve(&long, vec![]).unwrap_err().to_string();
    let long = long.display();
    assert_eq!(
        error,
        format!("{long}: is too long; expected a socket path of at most 107 bytes")
    );
    assert_eq!(
        served.server.uri("xvda"),
        format!("nbd+unix:///xvda?socket={path}")
    );
}

#[test]
fn shutdown_answers_what_is_in_flight_and_removes_the_socket() {
    let Served {
        server,
        disk,
        path,
        _folder,
    } = serve(info(MIB));
    disk.hold();
    let mut client = Client::go(&path);
    client.request(WRITE, FUA, 9, 0, 512);
    client.send(&[4; 512]);
    disk.wait_held(1);
    let stopping = std::thread::spawn(move || server.shutdown(Duration::from_secs(3600)));
    disk.complete(0);
    disk.wait_held(1);
    disk.complete(0);
    assert_eq!(client.reply(), (9, 0));
    client.assert_closed();
    assert_eq!(stopping.join().unwrap(), 0);
    assert!(!path.exists());
    assert_eq!(disk.seen(), [Seen::Write(0, 512), Seen::Flush]);
}

#[test]
fn shutdown_cuts_a_disk_that_never_answers() {
    let Served {
        server,
        disk,
        path,
        _folder,
    } = serve(info(MIB));
    disk.hold();
    let mut client = Client::go(&path);
    client.request(READ, 0, 1, 0, 512);
    disk.wait_held(1);
    assert_eq!(server.shutdown(Duration::ZERO), 1);
    client.assert_closed();
}

#[test]
fn shutdown_leaves_a_file_that_took_the_sockets_place() {
    let Served {
        server,
        path,
        _folder,
        ..
    } = serve(info(MIB));
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "not ours").unwrap();
    server.shutdown(Duration::ZERO);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "not ours");
}

#[test]
fn disconnecting_ends_only_that_connection() {
    let served = serve(info(MIB));
    let (mut one, mut other) = (Client::go(&served.path), Client::go(&served.path));
    one.request(DISC, 0, 0, 0, 0);
    one.assert_closed();
    assert_eq!(other.read(0, 512), [0x5a; 512]);
}
