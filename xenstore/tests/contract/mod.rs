//! What our client and any xenstored promise each other. Run against the in-memory server and, where
//! they are set up, against Debian's C and OCaml daemons.

use std::path::Path;
use std::time::Duration;

use xenblk_xenstore::vbd::{self, BackendPath, Believed, Kind, Limits, Outcome, Protocol};
use xenblk_xenstore::xenbus::State;
use xenblk_xenstore::{Access, Client, Error, Event, Events, Permission, Tx};

/// Runs every case on one server. The store is left as it was found.
pub(crate) async fn run(socket: &Path) {
    let (client, _) = Client::connect(socket).await.expect("connect");
    let _ = client.rm(Tx::NONE, "/xenblk").await;
    values(&client).await;
    tree(&client).await;
    long_directory(&client).await;
    refusals(&client).await;
    permissions(&client).await;
    transactions(socket, &client).await;
    watches(socket).await;
    domains(socket).await;
    device(socket, &client).await;
    client.rm(Tx::NONE, "/xenblk").await.expect("clean up");
}

async fn values(client: &Client) {
    let every_byte: Vec<u8> = (0..=255).collect();
    for value in [b"".as_slice(), b"1", b"a\0b\0", &every_byte, &[0xff; 2000]] {
        client
            .write(Tx::NONE, "/xenblk/value", value)
            .await
            .expect("write");
        assert_eq!(
            client.read(Tx::NONE, "/xenblk/value").await.as_deref(),
            Ok(value)
        );
    }
    assert_eq!(
        client.read(Tx::NONE, "/xenblk/none").await,
        Err(Error::NoEntry)
    );
    assert_eq!(
        client.read_optional(Tx::NONE, "/xenblk/none").await,
        Ok(None)
    );
    let nodes: Vec<_> = (0..300)
        .map(|n| (format!("/xenblk/many/{n}"), n.to_string()))
        .collect();
    client
        .write_many(Tx::NONE, &nodes)
        .await
        .expect("write_many");
    let mut paths: Vec<_> = nodes.iter().map(|node| node.0.clone()).collect();
    paths.push("/xenblk/none".to_owned());
    let values = client.read_many(Tx::NONE, &paths).await.expect("read_many");
    let expected: Vec<_> = nodes
        .iter()
        .map(|node| Some(node.1.clone().into_bytes()))
        .chain([None])
        .collect();
    assert_eq!(values, expected);
}

async fn tree(client: &Client) {
    client
        .write(Tx::NONE, "/xenblk/tree/a/b/c", "deep")
        .await
        .expect("parents are made");
    assert_eq!(
        client.read(Tx::NONE, "/xenblk/tree/a").await,
        Ok(Vec::new())
    );
    client
        .mkdir(Tx::NONE, "/xenblk/tree/a/b/c")
        .await
        .expect("mkdir of a node there is");
    assert_eq!(
        client.read(Tx::NONE, "/xenblk/tree/a/b/c").await,
        Ok(b"deep".to_vec())
    );
    client
        .mkdir(Tx::NONE, "/xenblk/tree/z")
        .await
        .expect("mkdir");
    let mut names = client
        .directory(Tx::NONE, "/xenblk/tree")
        .await
        .expect("directory");
    names.sort();
    assert_eq!(names, ["a", "z"]);
    assert_eq!(
        client.directory(Tx::NONE, "/xenblk/tree/z").await,
        Ok(Vec::new())
    );
    client.rm(Tx::NONE, "/xenblk/tree/a").await.expect("rm");
    assert_eq!(
        client.read(Tx::NONE, "/xenblk/tree/a/b/c").await,
        Err(Error::NoEntry)
    );
    client
        .rm(Tx::NONE, "/xenblk/tree/a")
        .await
        .expect("rm of a missing child");
    assert_eq!(
        client.rm(Tx::NONE, "/xenblk/no/such").await,
        Err(Error::NoEntry)
    );
    assert_eq!(
        client.directory(Tx::NONE, "/xenblk/none").await,
        Err(Error::NoEntry)
    );
}

/// Above 4096 bytes: the C daemon says E2BIG and gives parts, the OCaml one a single long reply.
async fn long_directory(client: &Client) {
    let nodes: Vec<_> = (0..900)
        .map(|n| (format!("/xenblk/long/entry-{n:04}"), String::new()))
        .collect();
    client
        .write_many(Tx::NONE, &nodes)
        .await
        .expect("write_many");
    let mut names = client
        .directory(Tx::NONE, "/xenblk/long")
        .await
        .expect("directory");
    names.sort();
    let expected: Vec<_> = (0..900).map(|n| format!("entry-{n:04}")).collect();
    assert_eq!(names, expected);
    client.rm(Tx::NONE, "/xenblk/long").await.expect("rm");
}

/// Refused here, unsent: the connection goes on.
async fn refusals(client: &Client) {
    let long = format!("/{}", "a".repeat(3072));
    for path in ["", "/xenblk/a\0evil", long.as_str()] {
        assert!(matches!(
            client.write(Tx::NONE, path, "x").await,
            Err(Error::BadPath(_))
        ));
        assert!(matches!(
            client.watch(path, "t").await,
            Err(Error::BadPath(_))
        ));
    }
    assert!(matches!(
        client.watch("/xenblk", "a\0b").await,
        Err(Error::BadPath(_))
    ));
    let big = vec![0; 4097 - "/xenblk/big".len() - 1];
    assert_eq!(
        client.write(Tx::NONE, "/xenblk/big", &big).await,
        Err(Error::TooBig)
    );
    assert_eq!(
        client.read(Tx::NONE, "/xenblk/big").await,
        Err(Error::NoEntry)
    );
    // And by the server.
    assert_eq!(
        client.read(Tx::NONE, "/xenblk//big").await,
        Err(Error::Invalid)
    );
}

async fn permissions(client: &Client) {
    let perms = [
        Permission::new(0, Access::None),
        Permission::new(3, Access::Read),
    ];
    client
        .write(Tx::NONE, "/xenblk/perms", "x")
        .await
        .expect("write");
    client
        .set_perms(Tx::NONE, "/xenblk/perms", &perms)
        .await
        .expect("set_perms");
    assert_eq!(
        client.get_perms(Tx::NONE, "/xenblk/perms").await.as_deref(),
        Ok(perms.as_slice())
    );
    client
        .write(Tx::NONE, "/xenblk/perms/child", "x")
        .await
        .expect("write");
    let inherited = client.get_perms(Tx::NONE, "/xenblk/perms/child").await;
    assert_eq!(inherited.as_deref(), Ok(perms.as_slice()));
}

async fn transactions(socket: &Path, client: &Client) {
    let (other, _) = Client::connect(socket).await.expect("connect");
    let path = "/xenblk/tx/n";
    client.write(Tx::NONE, path, "0").await.expect("write");

    let tx = client.begin().await.expect("begin");
    client.write(tx, path, "1").await.expect("write");
    assert_eq!(client.read(tx, path).await, Ok(b"1".to_vec()));
    assert_eq!(
        other.read(Tx::NONE, path).await,
        Ok(b"0".to_vec()),
        "not visible before commit"
    );
    client.commit(tx).await.expect("commit");
    assert_eq!(other.read(Tx::NONE, path).await, Ok(b"1".to_vec()));

    let tx = client.begin().await.expect("begin");
    client.rm(tx, path).await.expect("rm");
    client.abort(tx).await.expect("abort");
    assert_eq!(
        other.read(Tx::NONE, path).await,
        Ok(b"1".to_vec()),
        "aborted"
    );
    // ENOENT from the C daemon, EIO from the OCaml one.
    assert!(client.commit(tx).await.is_err(), "gone after abort");

    let tx = client.begin().await.expect("begin");
    client.read(tx, path).await.expect("read");
    other.write(Tx::NONE, path, "2").await.expect("write");
    client.write(tx, path, "3").await.expect("write");
    assert_eq!(client.commit(tx).await, Err(Error::Again), "conflict");
    assert_eq!(
        other.read(Tx::NONE, path).await,
        Ok(b"2".to_vec()),
        "nothing was changed"
    );

    // Two clients count to 40 together: every lost update would show.
    client.write(Tx::NONE, path, "0").await.expect("write");
    let (a, b) = tokio::join!(count(client, path), count(&other, path));
    assert_eq!((a, b), (Ok(()), Ok(())));
    assert_eq!(client.read(Tx::NONE, path).await, Ok(b"40".to_vec()));

    let failed: Result<(), Error> = client
        .transact(async |client: Client, tx| {
            client.write(tx, path, "lost").await?;
            Err(Error::Invalid)
        })
        .await;
    assert_eq!(failed, Err(Error::Invalid));
    assert_eq!(
        client.read(Tx::NONE, path).await,
        Ok(b"40".to_vec()),
        "failed body was aborted"
    );
}

async fn count(client: &Client, path: &str) -> Result<(), Error> {
    for _ in 0..20 {
        client
            .transact(async |client: Client, tx| {
                let text = client.read(tx, path).await?;
                let number = vbd::decimal(&text).expect("a number");
                client.write(tx, path, (number + 1).to_string()).await
            })
            .await?;
    }
    Ok(())
}

/// The next event. The time-out is for a test that would otherwise hang.
pub(crate) async fn next(events: &mut Events) -> (String, String) {
    let event = tokio::time::timeout(Duration::from_secs(30), events.next()).await;
    match event.expect("an event").expect("open stream") {
        Event::Watch { path, token } => (path, token),
        Event::Disconnected { reason } => panic!("disconnected: {reason}"),
    }
}

async fn expect(events: &mut Events, path: &str, token: &str) {
    assert_eq!(next(events).await, (path.to_owned(), token.to_owned()));
}

async fn watches(socket: &Path) {
    let (client, mut events) = Client::connect(socket).await.expect("connect");
    client
        .write(Tx::NONE, "/xenblk/w/below/leaf", "1")
        .await
        .expect("write");
    client.watch("/xenblk/w", "to ken").await.expect("watch");
    expect(&mut events, "/xenblk/w", "to ken").await;
    assert_eq!(
        client.watch("/xenblk/w", "to ken").await,
        Err(Error::Exists)
    );
    client
        .write(Tx::NONE, "/xenblk/w/below/leaf", "1")
        .await
        .expect("write");
    expect(&mut events, "/xenblk/w/below/leaf", "to ken").await;

    // In a transaction: nothing until it is committed.
    let tx = client.begin().await.expect("begin");
    client
        .write(tx, "/xenblk/w/inside", "1")
        .await
        .expect("write");
    client
        .write(Tx::NONE, "/xenblk/w/below/leaf", "2")
        .await
        .expect("write");
    expect(&mut events, "/xenblk/w/below/leaf", "to ken").await;
    client.commit(tx).await.expect("commit");
    expect(&mut events, "/xenblk/w/inside", "to ken").await;

    // Removing a directory is heard by a watch on a node below it.
    client
        .watch("/xenblk/w/below/leaf", "leaf")
        .await
        .expect("watch");
    expect(&mut events, "/xenblk/w/below/leaf", "leaf").await;
    client.rm(Tx::NONE, "/xenblk/w/below").await.expect("rm");
    let mut heard = [next(&mut events).await, next(&mut events).await];
    heard.sort();
    assert_eq!(
        heard[0],
        ("/xenblk/w/below".to_owned(), "to ken".to_owned())
    );
    assert_eq!(
        heard[1],
        ("/xenblk/w/below/leaf".to_owned(), "leaf".to_owned())
    );

    // No longer heard after unwatch, not even what waits already.
    client
        .write(Tx::NONE, "/xenblk/w/waiting", "1")
        .await
        .expect("write");
    client
        .unwatch("/xenblk/w", "to ken")
        .await
        .expect("unwatch");
    assert_eq!(
        client.unwatch("/xenblk/w", "to ken").await,
        Err(Error::NoEntry)
    );
    client
        .write(Tx::NONE, "/xenblk/w/unheard", "1")
        .await
        .expect("write");
    relative_watch(&client, &mut events).await;
    client.reset_watches().await.expect("reset_watches");
}

/// Answers in relative paths.
async fn relative_watch(client: &Client, events: &mut Events) {
    client.watch("xenblk-relative", "rel").await.expect("watch");
    expect(events, "xenblk-relative", "rel").await;
    client
        .write(Tx::NONE, "/local/domain/0/xenblk-relative/x", "1")
        .await
        .expect("write");
    expect(events, "xenblk-relative/x", "rel").await;
    assert_eq!(
        client.read(Tx::NONE, "xenblk-relative/x").await,
        Ok(b"1".to_vec())
    );
    client.rm(Tx::NONE, "xenblk-relative").await.expect("rm");
    expect(events, "xenblk-relative", "rel").await;
}

async fn domains(socket: &Path) {
    let (client, mut events) = Client::connect(socket).await.expect("connect");
    assert_eq!(
        client.get_domain_path(7).await,
        Ok("/local/domain/7".to_owned())
    );
    assert_eq!(client.is_domain_introduced(0).await, Ok(true));
    assert_eq!(client.is_domain_introduced(7).await, Ok(false));
    client.watch("@introduceDomain", "in").await.expect("watch");
    expect(&mut events, "@introduceDomain", "in").await;
    client.watch("@releaseDomain", "out").await.expect("watch");
    expect(&mut events, "@releaseDomain", "out").await;
    client.introduce(7, 1, 9).await.expect("introduce");
    expect(&mut events, "@introduceDomain", "in").await;
    assert_eq!(client.is_domain_introduced(7).await, Ok(true));
    client.release(7).await.expect("release");
    expect(&mut events, "@releaseDomain", "out").await;
    assert_eq!(client.is_domain_introduced(7).await, Ok(false));
}

const DEVICE: BackendPath = BackendPath {
    kind: Kind::Vbd,
    domid: 7,
    devid: 51712,
};
const LIMITS: Limits = Limits {
    max_queues: 4,
    max_ring_page_order: 4,
    max_indirect_segments: 256,
    default_protocol: Protocol::X86_64,
};

async fn write_all(client: &Client, directory: &str, keys: &[(&str, &str)]) {
    for (key, value) in keys {
        client
            .write(Tx::NONE, &format!("{directory}/{key}"), value)
            .await
            .expect("write");
    }
}

/// The vbd keys as a whole: what a toolstack and a two-queue frontend write, read and answered.
async fn device(socket: &Path, client: &Client) {
    let (other, _) = Client::connect(socket).await.expect("connect");
    let directory = DEVICE.to_string();
    let keys = [
        ("frontend", "/xenblk/front"),
        ("frontend-id", "7"),
        ("params", "raw:/a b"),
        ("mode", "w"),
        ("online", "1"),
        ("state", "1"),
    ];
    write_all(&other, &directory, &keys).await;
    let keys = vbd::read_backend(client, Tx::NONE, &DEVICE)
        .await
        .expect("backend keys");
    assert_eq!(
        (keys.frontend.as_str(), keys.readonly),
        ("/xenblk/front", false)
    );
    assert_eq!(keys.params.as_deref(), Some("raw:/a b"));

    let believed = Believed {
        state: State::Initialising,
        online: true,
    };
    let transport = vbd::transport_keys(&LIMITS);
    let outcome = vbd::publish(client, &DEVICE, believed, &transport, State::InitWait).await;
    assert_eq!(outcome, Ok(Outcome::Written));
    let read = client
        .read(Tx::NONE, &DEVICE.key("multi-queue-max-queues"))
        .await;
    assert_eq!(read, Ok(b"4".to_vec()));

    frontend(&other, client).await;

    let report = async |text| vbd::report_hotplug_error(client, &DEVICE, text).await;
    assert_eq!(report("no such file").await, Ok(()));
    let told = other.read(Tx::NONE, &DEVICE.key("hotplug-error")).await;
    assert_eq!(told, Ok(b"no such file".to_vec()));

    // The toolstack takes the device away first: the late write changes nothing.
    write_all(&other, &directory, &[("online", "0"), ("state", "5")]).await;
    let believed = Believed {
        state: State::InitWait,
        online: true,
    };
    let outcome = vbd::publish(client, &DEVICE, believed, &[], State::Connected).await;
    let now = Believed {
        state: State::Closing,
        online: false,
    };
    assert_eq!(outcome, Ok(Outcome::Changed(now)));
    other.rm(Tx::NONE, &directory).await.expect("rm");
    let outcome = vbd::publish(client, &DEVICE, now, &[], State::Closed).await;
    assert_eq!(outcome, Ok(Outcome::Gone));
    assert_eq!(report("too late").await, Ok(()));
    assert_eq!(
        client.read(Tx::NONE, &DEVICE.key("state")).await,
        Err(Error::NoEntry)
    );
}

async fn frontend(other: &Client, client: &Client) {
    let keys = [
        ("multi-queue-num-queues", "2"),
        ("queue-0/ring-ref", "8"),
        ("queue-0/event-channel", "15"),
        ("queue-1/ring-ref", "9"),
        ("queue-1/event-channel", "16"),
        ("protocol", "x86_64-abi"),
        ("state", "3"),
    ];
    write_all(other, "/xenblk/front", &keys).await;
    let state = vbd::read_state(client, Tx::NONE, "/xenblk/front").await;
    assert_eq!(state, Ok(Some(State::Initialised)));
    let rings = vbd::read_frontend(client, Tx::NONE, "/xenblk/front", &LIMITS).await;
    let rings = rings.expect("frontend keys");
    assert_eq!(rings.queues.len(), 2);
    assert_eq!(
        (&rings.queues[1].ring_refs, rings.queues[1].event_channel),
        (&vec![9], 16)
    );
}
