//! The in-memory server: the contract every xenstored keeps, and what only it can show.

mod contract;

use std::io::Read as _;
use std::io::Write as _;

use proptest::prelude::*;
use xenblk_xenstore::fake::Server;
use xenblk_xenstore::{Access, Client, Error, Event, Events, Permission, Tx};

fn connect(server: &Server, domid: u16) -> (Client, Events) {
    let stream = server.connect_as(domid).unwrap();
    stream.set_nonblocking(true).unwrap();
    Client::from_stream(tokio::net::UnixStream::from_std(stream).unwrap())
}

/// A guest with a home of its own and a backend directory it may read.
async fn guest(server: &Server, toolstack: &Client) -> (Client, Events) {
    server.introduce(5).unwrap();
    for (path, perms) in [
        (
            "/local/domain/5",
            [Permission::new(5, Access::None)].as_slice(),
        ),
        (
            "/local/domain/0/backend/vbd/5/768",
            &[
                Permission::new(0, Access::None),
                Permission::new(5, Access::Read),
            ],
        ),
    ] {
        toolstack.mkdir(Tx::NONE, path).await.unwrap();
        toolstack.set_perms(Tx::NONE, path, perms).await.unwrap();
    }
    connect(server, 5)
}

const BACK: &str = "/local/domain/0/backend/vbd/5/768/state";

#[tokio::test]
async fn keeps_the_contract() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let server = Server::start().unwrap();
    server.listen(&socket).unwrap();
    assert!(
        server.listen(&socket).is_err(),
        "a path that exists is refused"
    );
    contract::run(&socket).await;
    drop(server);
    assert!(!socket.exists());
}

#[tokio::test]
async fn a_guest_writes_only_where_it_may() {
    let server = Server::start().unwrap();
    let (toolstack, _) = connect(&server, 0);
    let (guest, mut events) = guest(&server, &toolstack).await;
    toolstack.write(Tx::NONE, BACK, "2").await.unwrap();

    guest
        .write(Tx::NONE, "device/vbd/768/state", "1")
        .await
        .unwrap();
    let path = "/local/domain/5/device/vbd/768/state";
    assert_eq!(toolstack.read(Tx::NONE, path).await, Ok(b"1".to_vec()));
    let owner = toolstack.get_perms(Tx::NONE, path).await.unwrap()[0];
    assert_eq!(owner, Permission::new(5, Access::None));

    let shared = [
        Permission::new(0, Access::None),
        Permission::new(5, Access::Both),
    ];
    toolstack.mkdir(Tx::NONE, "/shared").await.unwrap();
    toolstack
        .set_perms(Tx::NONE, "/shared", &shared)
        .await
        .unwrap();
    guest.write(Tx::NONE, "/shared/mine", "1").await.unwrap();
    let owner = toolstack.get_perms(Tx::NONE, "/shared/mine").await.unwrap()[0];
    assert_eq!(owner.domid, 5, "what a guest makes is its own");

    assert_eq!(guest.read(Tx::NONE, BACK).await, Ok(b"2".to_vec()));
    for path in [BACK, "/local/domain/0/name", "/local/domain/5x", "/x"] {
        assert_eq!(
            guest.write(Tx::NONE, path, "9").await,
            Err(Error::Access),
            "{path}"
        );
        assert_eq!(guest.rm(Tx::NONE, path).await, Err(Error::Access), "{path}");
    }
    assert_eq!(
        guest.read(Tx::NONE, "/local/domain/6/secret").await,
        Err(Error::Access)
    );
    assert_eq!(guest.read(Tx::NONE, "missing").await, Err(Error::NoEntry));
    assert_eq!(
        guest.directory(Tx::NONE, "/local/domain").await,
        Err(Error::Access)
    );
    let give_away = [Permission::new(6, Access::Both)];
    assert_eq!(
        guest.set_perms(Tx::NONE, "device", &give_away).await,
        Err(Error::Access)
    );
    assert_eq!(guest.introduce(6, 1, 1).await, Err(Error::Access));

    // It hears of what it can read, and of nothing else.
    guest.watch(BACK, "back").await.unwrap();
    guest
        .watch("/local/domain/0/secret", "secret")
        .await
        .unwrap();
    assert_eq!(contract::next(&mut events).await.1, "back");
    assert_eq!(contract::next(&mut events).await.1, "secret");
    toolstack
        .write(Tx::NONE, "/local/domain/0/secret", "x")
        .await
        .unwrap();
    toolstack.write(Tx::NONE, BACK, "4").await.unwrap();
    assert_eq!(contract::next(&mut events).await.1, "back");
}

#[tokio::test]
async fn a_dead_domain_loses_its_connections_not_its_nodes() {
    let server = Server::start().unwrap();
    let (toolstack, mut heard) = connect(&server, 0);
    let (guest, mut events) = guest(&server, &toolstack).await;
    guest.write(Tx::NONE, "device", "x").await.unwrap();
    toolstack.watch("@releaseDomain", "out").await.unwrap();
    contract::next(&mut heard).await;
    server.release(5).unwrap();
    contract::next(&mut heard).await;
    assert!(matches!(
        events.next().await,
        Some(Event::Disconnected { .. })
    ));
    assert_eq!(events.next().await, None);
    assert!(matches!(
        guest.read(Tx::NONE, "device").await,
        Err(Error::Disconnected(_))
    ));
    assert_eq!(
        toolstack.read(Tx::NONE, "/local/domain/5/device").await,
        Ok(b"x".to_vec())
    );
    assert!(server.release(5).is_err(), "gone already");
}

/// The quota of 10 open transactions shows any that a cancelled caller would leave behind.
#[tokio::test]
async fn cancelled_calls_leave_nothing_open() {
    let server = Server::start().unwrap();
    let (toolstack, _) = connect(&server, 0);
    let (guest, mut events) = guest(&server, &toolstack).await;
    for _ in 0..30 {
        // Sent, then cancelled before the answer.
        assert!(poll_once(guest.begin()).is_none());
        assert!(poll_once(guest.watch("device", "gone")).is_none());
        // Cancelled inside, with the transaction open.
        let body = async |_: Client, _: Tx| std::future::pending::<Result<(), Error>>().await;
        tokio::select! {
            biased;
            _ = guest.transact(body) => unreachable!("the body never ends"),
            () = answered(&guest, 3) => {}
        }
    }
    answered(&guest, 1).await;
    let tx = guest.begin().await.expect("none of the 60 is still open");
    guest.abort(tx).await.unwrap();
    // Registered again: so it was unregistered.
    guest.watch("device", "gone").await.unwrap();
    guest.watch("device", "last").await.unwrap();
    loop {
        if contract::next(&mut events).await.1 == "last" {
            break;
        }
    }
}

/// A few round trips: what was sent before has been answered.
async fn answered(client: &Client, times: usize) {
    for _ in 0..times {
        client.is_domain_introduced(0).await.unwrap();
    }
}

fn poll_once<F: Future>(future: F) -> Option<F::Output> {
    let mut future = std::pin::pin!(future);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match future.as_mut().poll(&mut context) {
        std::task::Poll::Ready(output) => Some(output),
        std::task::Poll::Pending => None,
    }
}

/// XSA-349: a guest rewrites a watched node; whoever handles events is busy elsewhere.
#[tokio::test]
async fn undrained_events_coalesce_and_block_nobody() {
    let server = Server::start().unwrap();
    let (client, mut events) = connect(&server, 0);
    let (writer, _) = connect(&server, 0);
    client.watch("/flood", "f").await.unwrap();
    for _ in 0..20 {
        let nodes: Vec<_> = (0..500)
            .map(|_| ("/flood/state".to_owned(), "4".to_owned()))
            .collect();
        writer.write_many(Tx::NONE, &nodes).await.unwrap();
    }
    // The events of 10000 writes have gone by, because this answer comes after them.
    client.read(Tx::NONE, "/flood/state").await.unwrap();
    assert_eq!(
        contract::next(&mut events).await,
        ("/flood".to_owned(), "f".to_owned())
    );
    assert_eq!(
        contract::next(&mut events).await,
        ("/flood/state".to_owned(), "f".to_owned())
    );
    client.watch("/end", "end").await.unwrap();
    assert_eq!(contract::next(&mut events).await.1, "end");

    // So many different paths that they shrink to "look at everything below /flood".
    let nodes: Vec<_> = (0..5000)
        .map(|n| (format!("/flood/{n}"), String::new()))
        .collect();
    writer.write_many(Tx::NONE, &nodes).await.unwrap();
    client.read(Tx::NONE, "/flood/4999").await.unwrap();
    let mut seen = Vec::new();
    client.watch("/end", "end2").await.unwrap();
    loop {
        let (path, token) = contract::next(&mut events).await;
        if token == "end2" {
            break;
        }
        seen.push(path);
    }
    assert!(seen.len() < 5000, "{} events", seen.len());
    assert_eq!(seen[0], "/flood");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// A client that sends garbage loses its connection at most; everybody else is served.
    #[test]
    fn garbage_harms_only_its_sender(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let server = Server::start().unwrap();
        let mut bad = server.connect_as(5).unwrap();
        // The server may hang up in the middle.
        let _ = bad.write_all(&bytes);
        let _ = bad.shutdown(std::net::Shutdown::Write);
        let mut answers = Vec::new();
        let _ = bad.read_to_end(&mut answers);
        let mut good = server.connect_as(0).unwrap();
        // IS_DOMAIN_INTRODUCED 0
        good.write_all(b"\x11\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\x000\0").unwrap();
        let mut answer = [0; 18];
        good.read_exact(&mut answer).unwrap();
        prop_assert_eq!(&answer[16..], b"T\0");
    }
}
