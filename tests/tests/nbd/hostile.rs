//! Clients that lie, flood, stall or talk nonsense: they harm their own connection at most.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use xenblk_tests::disk::{DiskInfo, Done, GuestDisk, Op};
use xenblk_tests::nbd::{self, Export, MAX_CONNECTIONS, MAX_PAYLOAD, MAX_REQUESTS};

use crate::client::{Client, FLUSH, OPT_GO, READ, WRITE, go_data, request};
use crate::disk::{MemoryDisk, info};
use crate::{MIB, Served, serve};

/// How long anything may take before a test fails; nothing is measured with it.
const PATIENCE: Duration = Duration::from_secs(60);

/// A well-behaved client is served as if nothing had happened.
fn assert_serves(served: &Served) {
    assert_eq!(Client::go(&served.path).read(0, 512), [0x5a; 512]);
}

#[test]
fn broken_negotiations_end_the_connection_alone() {
    let served = serve(info(MIB));
    Client::dial(&served.path, 0xffff_fffc).assert_closed();
    let option =
        |code: u32, len: u32| [&b"IHAVEOPT"[..], &code.to_be_bytes(), &len.to_be_bytes()].concat();
    for bytes in [
        b"NOTANOPTION!!!!!".to_vec(),
        option(OPT_GO, u32::MAX),
        option(3, 1 << 30),
        option(9, (1 << 20) + 1),
    ] {
        let mut client = Client::dial(&served.path, 3);
        client.send(&bytes);
        client.assert_closed();
    }
    assert_serves(&served);
}

#[test]
fn endless_options_are_cut_off() {
    let served = serve(info(MIB));
    let mut client = Client::dial(&served.path, 3);
    for _ in 0..64 {
        client.option(3, b"x");
        client.option_reply(3);
    }
    client.assert_closed();
    assert_serves(&served);
}

#[test]
fn a_stream_out_of_step_ends_the_connection_alone() {
    let served = serve(info(MIB));
    for bytes in [
        vec![0; 28],
        request(WRITE, 0, 1, 0, MAX_PAYLOAD + 1),
        request(WRITE, 0, 1, 0, u32::MAX),
    ] {
        let mut client = Client::go(&served.path);
        client.send(&bytes);
        client.assert_closed();
    }
    // Gone in the middle of a header, and of a WRITE's data.
    let mut client = Client::go(&served.path);
    client.send(&request(READ, 0, 1, 0, 512)[..13]);
    drop(client);
    let mut client = Client::go(&served.path);
    client.send(&request(WRITE, 0, 1, 0, 4096));
    client.send(&[1; 1000]);
    drop(client);
    assert_serves(&served);
    assert_eq!(served.disk.seen().len(), 1, "half a WRITE is none");
}

/// xorshift64*: repeatable nonsense.
struct Nonsense(u64);

impl Nonsense {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next().to_be_bytes()[0]).collect()
    }
}

#[test]
fn nonsense_at_any_point_harms_nobody_else() {
    let served = serve(info(MIB));
    let mut nonsense = Nonsense(0x9e37_79b9_7f4a_7c15);
    for round in 0..200 {
        let mut stream = UnixStream::connect(&served.path).unwrap();
        let mut valid = [0, 0, 0, 3].to_vec();
        if round % 2 == 0 {
            valid.extend(b"IHAVEOPT");
            valid.extend(OPT_GO.to_be_bytes());
            valid.extend(u32::try_from(go_data("").len()).unwrap().to_be_bytes());
            valid.extend(go_data(""));
            valid.extend(request(FLUSH, 0, 5, 0, 0));
        }
        // A valid conversation, cut or bent at some byte.
        let at = usize::try_from(nonsense.next()).unwrap() % valid.len();
        let len = usize::try_from(nonsense.next()).unwrap() % 100;
        valid.truncate(at);
        valid.extend(nonsense.bytes(len));
        // The server may have hung up already.
        let _ = stream.write_all(&valid);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
    }
    assert_serves(&served);
}

#[test]
fn more_connections_than_allowed_are_closed_at_once() {
    let served = serve(info(MIB));
    let mut open: Vec<Client> = (0..MAX_CONNECTIONS)
        .map(|_| Client::dial(&served.path, 3))
        .collect();
    let mut refused = UnixStream::connect(&served.path).unwrap();
    assert_eq!(refused.read_to_end(&mut Vec::new()).unwrap_or(0), 0);
    open.truncate(1);
    // The others' threads end on their own time; a place is free again then.
    loop {
        let mut stream = UnixStream::connect(&served.path).unwrap();
        if stream.read_exact(&mut [0; 18]).is_ok() {
            break;
        }
    }
}

#[test]
fn a_flood_of_requests_is_held_to_the_bound() {
    let served = serve(info(MIB));
    served.disk.hold();
    let mut client = Client::go(&served.path);
    let total = u64::from(MAX_REQUESTS) + 100;
    for cookie in 0..total {
        client.request(FLUSH, 0, cookie, 0, 0);
    }
    served.disk.wait_held(MAX_REQUESTS as usize);
    for _ in 0..total {
        served.disk.wait_held(1);
        served.disk.complete(0);
        assert_eq!(client.reply().1, 0);
    }
    assert_eq!(served.disk.peak(), MAX_REQUESTS as usize);
}

/// What the kernel has queued of a dead client's requests is not carried out for nobody.
#[test]
fn a_client_that_leaves_takes_its_unread_requests_along() {
    let served = serve(info(MIB));
    served.disk.hold();
    let mut client = Client::go(&served.path);
    let many: Vec<u8> = (0..1000)
        .flat_map(|cookie| request(READ, 0, cookie, 0, 512))
        .collect();
    client.send(&many);
    served.disk.wait_held(MAX_REQUESTS as usize);
    drop(client);
    for _ in 0..MAX_REQUESTS {
        served.disk.wait_held(1);
        served.disk.complete(0);
    }
    assert_eq!(served.server.shutdown(PATIENCE), 0, "not done");
    assert_eq!(served.disk.seen().len(), MAX_REQUESTS as usize);
}

/// Counts the bytes that were asked of it against those that the client has begun to take.
struct Counting {
    disk: Arc<MemoryDisk>,
    asked: AtomicU64,
    taken: Arc<AtomicU64>,
}

impl GuestDisk for Counting {
    fn info(&self) -> DiskInfo {
        self.disk.info()
    }

    fn submit(&self, hint: usize, op: Op, done: Done) {
        let asked = self.asked.fetch_add(MIB, Ordering::SeqCst) + MIB;
        // One more: a reply that lies in the socket's buffer, written but not taken.
        let bound = self.taken.load(Ordering::SeqCst) + u64::from(MAX_PAYLOAD) + MIB;
        assert!(asked <= bound, "{asked} bytes asked for, {bound} allowed");
        self.disk.submit(hint, op, done);
    }
}

#[test]
fn a_client_that_does_not_read_fills_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nbd.sock");
    let memory = MemoryDisk::new(info(MIB));
    let taken = Arc::new(AtomicU64::new(0));
    let disk = Arc::new(Counting {
        disk: memory.clone(),
        asked: AtomicU64::new(0),
        taken: taken.clone(),
    });
    let _server = nbd::serve(
        &path,
        vec![Export {
            name: "slow".into(),
            disk,
        }],
    )
    .unwrap();
    let mut client = Client::go(&path);
    let mebibyte = u32::try_from(MIB).unwrap();
    for cookie in 0..100 {
        client.request(READ, 0, cookie, 0, mebibyte);
    }
    memory.wait_seen((MAX_PAYLOAD / mebibyte) as usize);
    let mut data = vec![0; mebibyte as usize];
    for _ in 0..100 {
        taken.fetch_add(MIB, Ordering::SeqCst);
        assert_eq!(client.reply().1, 0);
        client.stream.read_exact(&mut data).unwrap();
    }
    assert_eq!(memory.seen().len(), 100);
}
