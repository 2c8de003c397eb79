//! XenStore: bytes on the wire in both directions, and values of a device's keys.

use std::cell::OnceCell;

use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};
use xenblk_xenstore::fake::Server;
use xenblk_xenstore::vbd::{self, BackendPath, Kind, Limits, Protocol};
use xenblk_xenstore::wire::{MAX_REPLY, MAX_REQUEST, Parser};
use xenblk_xenstore::{Client, Tx};

use super::Input;

fn runtime() -> Runtime {
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.unwrap_or_else(|error| unreachable!("a runtime: {error}"))
}

/// Bytes as a server gets them, cut into pieces: the same packets come out however they are cut. Then as
/// a client gets them in answer to what it asks.
pub(super) fn wire(data: &[u8]) {
    let mut input = Input(data);
    let chunk = usize::from(input.u8()).max(1);
    let bytes = input.0;
    for limit in [MAX_REQUEST, MAX_REPLY] {
        let whole = packets(limit, bytes, bytes.len().max(1));
        assert_eq!(packets(limit, bytes, chunk), whole);
    }
    thread_local! {
        static RUNTIME: Runtime = runtime();
    }
    RUNTIME.with(|runtime| runtime.block_on(replies(bytes)));
}

fn packets(limit: usize, bytes: &[u8], chunk: usize) -> (Vec<Vec<u8>>, bool) {
    let mut parser = Parser::new(limit);
    let mut packets = Vec::new();
    for mut part in bytes.chunks(chunk) {
        loop {
            match parser.advance(&mut part) {
                Ok(Some(packet)) => {
                    assert!(packet.payload.len() <= limit);
                    let mut again = Vec::new();
                    assert_eq!(packet.encode(&mut again), Ok(()));
                    packets.push(again);
                }
                Ok(None) => break,
                Err(_) => return (packets, false),
            }
        }
    }
    (packets, true)
}

/// Every question gets some answer, and the client ends with its connection.
async fn replies(bytes: &[u8]) {
    let Ok((ours, mut theirs)) = UnixStream::pair() else {
        unreachable!("a pair of sockets")
    };
    let (client, mut events) = Client::from_stream(ours);
    let sent = theirs.write_all(bytes).await;
    // Only if the client closed it, which a packet it can't follow makes it do.
    let _ = (sent, theirs.shutdown().await);
    let path = "/local/domain/1/device";
    let _ = client.read(Tx::NONE, path).await;
    let _ = client.directory(Tx::NONE, path).await;
    let _ = client.get_perms(Tx::NONE, path).await;
    let _ = client.begin().await;
    let _ = client.is_domain_introduced(1).await;
    let _ = client.get_domain_path(1).await;
    let _ = client.watch(path, "token").await;
    drop(theirs);
    while events.next().await.is_some() {}
}

struct Store {
    runtime: Runtime,
    client: Client,
    _server: Server,
}

const FRONTEND_KEYS: [&str; 16] = [
    "protocol",
    "ring-page-order",
    "num-ring-pages",
    "multi-queue-num-queues",
    "feature-persistent",
    "ring-ref",
    "ring-ref0",
    "ring-ref1",
    "event-channel",
    "queue-0/ring-ref",
    "queue-0/ring-ref0",
    "queue-0/event-channel",
    "queue-1/ring-ref",
    "queue-1/event-channel",
    "state",
    "queue-1",
];

const BACKEND_KEYS: [&str; 12] = [
    "frontend",
    "frontend-id",
    "params",
    "mode",
    "discard-enable",
    "device-type",
    "removable",
    "script",
    "hotplug-status",
    "physical-device",
    "physical-device-path",
    "state",
];

const FRONTEND: &str = "/local/domain/1/device/vbd/51712";

/// Values of the keys that guest and toolstack write: refused with a text, or within what was offered.
pub(super) fn keys(data: &[u8]) {
    thread_local! {
        static STORE: OnceCell<Store> = const { OnceCell::new() };
    }
    STORE.with(|store| {
        let store = store.get_or_init(|| {
            let runtime = runtime();
            let Ok(server) = Server::start() else {
                unreachable!("a server")
            };
            let client = runtime.block_on(async {
                let stream = server.connect_as(0).ok()?;
                stream.set_nonblocking(true).ok()?;
                Some(Client::from_stream(UnixStream::from_std(stream).ok()?).0)
            });
            let Some(client) = client else {
                unreachable!("a connection")
            };
            Store {
                runtime,
                client,
                _server: server,
            }
        });
        store.runtime.block_on(store.check(&mut Input(data)));
    });
}

impl Store {
    async fn check(&self, input: &mut Input<'_>) {
        let path = BackendPath {
            kind: Kind::Vbd,
            domid: 1,
            devid: 51712,
        };
        // Gone, or not there yet.
        let _ = self.client.rm(Tx::NONE, FRONTEND).await;
        let _ = self.client.rm(Tx::NONE, &path.to_string()).await;
        while !input.is_empty() {
            let which = usize::from(input.u8());
            let len = usize::from(input.u8());
            let value = input.bytes(len);
            let name = if which < 128 {
                format!("{FRONTEND}/{}", FRONTEND_KEYS[which % FRONTEND_KEYS.len()])
            } else {
                path.key(BACKEND_KEYS[which % BACKEND_KEYS.len()])
            };
            let written = self.client.write(Tx::NONE, &name, value).await;
            assert_eq!(written, Ok(()), "{name}");
        }
        let limits = Limits {
            max_queues: 4,
            max_ring_page_order: 1,
            max_indirect_segments: 256,
            default_protocol: Protocol::NATIVE,
        };
        match vbd::read_frontend(&self.client, Tx::NONE, FRONTEND, &limits).await {
            Ok(rings) => {
                assert!((1..=4).contains(&rings.queues.len()));
                assert!((1..=2).contains(&rings.pages));
                for queue in &rings.queues {
                    assert_eq!(queue.ring_refs.len(), rings.pages as usize);
                }
            }
            Err(error) => assert_readable(&error.to_string()),
        }
        match vbd::read_backend(&self.client, Tx::NONE, &path).await {
            Ok(keys) => assert!(keys.frontend.starts_with('/')),
            Err(error) => assert_readable(&error.to_string()),
        }
        for directory in [FRONTEND, &path.to_string()] {
            if let Err(error) = vbd::read_state(&self.client, Tx::NONE, directory).await {
                assert_readable(&error.to_string());
            }
        }
    }
}

/// Nothing of a value reaches a log or terminal as it is.
fn assert_readable(text: &str) {
    // What is quoted is cut at 64 bytes, of which each may take four.
    assert!(!text.is_empty() && text.len() < 64 * 4 + 150, "{text:?}");
    assert!(
        text.bytes().all(|byte| (b' '..=b'~').contains(&byte)),
        "{text:?}"
    );
}
