//! The control socket.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use xenblkd::control::{Request, Response};

use crate::guest::Guest;
use crate::world::World;

const XVDA: u32 = 51712;

/// Sends bytes, reads one line.
async fn raw(path: PathBuf, bytes: &'static [u8]) -> Response {
    let talk = move || {
        let mut socket = UnixStream::connect(path).unwrap();
        // The rest of an endless line meets a closed connection.
        let _ = socket.write_all(bytes);
        let mut line = String::new();
        BufReader::new(socket).read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    };
    tokio::task::spawn_blocking(talk).await.unwrap()
}

#[tokio::test]
async fn status_shows_disks_and_what_their_rings_did() {
    let world = World::started().await;
    let image = world.image("disk", 1 << 20);
    world.attach(7, XVDA, &image, "w").await;
    world.attach(8, XVDA, "/nonexistent/disk", "r").await;
    let mut guest = Guest::new(&world, 7, XVDA).await;
    guest.connect(&world, 3, 0).await;
    guest.check_data(0, 1).await;
    world.error(8, XVDA).await;

    let mode = std::fs::metadata(world.path("control"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    let disk = world.status(7, XVDA).await.unwrap();
    assert_eq!(
        (disk.params.as_str(), disk.size, disk.readonly),
        (image.as_str(), Some(1 << 20), false)
    );
    assert_eq!((disk.state.as_str(), disk.error), ("Connected", None));
    assert_eq!(
        disk.rings.iter().map(|ring| ring.queue).collect::<Vec<_>>(),
        [0, 1, 2]
    );
    for ring in &disk.rings {
        assert_eq!(
            (ring.counters.reads, ring.counters.writes),
            (1, 1),
            "queue {}",
            ring.queue
        );
        assert_eq!(ring.counters.bytes_written, 4096);
        assert_eq!(ring.counters.in_flight, 0);
        assert_eq!(ring.pid, None, "a thread");
        assert!(ring.worker < 2);
    }
    assert_eq!(disk.rings[0].counters.flushes, 1);
    let bad = world.status(8, XVDA).await.unwrap();
    assert!(bad.readonly && bad.rings.is_empty() && bad.size.is_none());
    assert!(bad.error.unwrap().contains("/nonexistent/disk"));
}

#[tokio::test]
async fn anything_else_gets_one_clear_error() {
    let world = World::started().await;
    let version = world.ask(Request::Version {}).await;
    assert_eq!(
        version,
        Response::Version {
            version: env!("CARGO_PKG_VERSION").to_owned()
        }
    );
    static ENDLESS: [u8; 1 << 20] = [b'x'; 1 << 20];
    for rubbish in [
        &b"\n"[..],
        b"{}\n",
        b"status\n",
        b"{\"stop\":{}}\n",
        b"{\"status\":{\"of\":1}}\n",
        b"\xff\xfe\n",
        &ENDLESS,
    ] {
        let Response::Error(error) = raw(world.path("control"), rubbish).await else {
            panic!("understood")
        };
        assert!(
            error.starts_with("expected ") && !error.contains('\n'),
            "{error}"
        );
    }
    // And the next client is served.
    assert!(matches!(
        world.ask(Request::Status {}).await,
        Response::Status(_)
    ));
}

#[tokio::test]
async fn only_a_stale_socket_is_replaced() {
    let world = World::started().await;
    let refused = |path: PathBuf| {
        let mut options = world.options.clone();
        options.control = Some(path);
        async {
            xenblkd::supervisor::run(options, std::future::pending())
                .await
                .unwrap_err()
                .to_string()
        }
    };
    let error = refused(world.path("control")).await;
    assert!(
        error.contains("control") && error.contains("another daemon"),
        "{error}"
    );
    std::fs::write(world.path("file"), "precious").unwrap();
    let error = refused(world.path("file")).await;
    assert!(
        error.contains("file") && error.contains("not a socket"),
        "{error}"
    );
    assert_eq!(std::fs::read(world.path("file")).unwrap(), b"precious");
    let error = refused(world.path("no/such/dir")).await;
    assert!(error.contains("no/such/dir"), "{error}");

    let mut world = World::new().await;
    drop(UnixListener::bind(world.path("control")).unwrap());
    world.start().await;
    assert!(matches!(
        world.ask(Request::Status {}).await,
        Response::Status(_)
    ));
}

#[tokio::test]
async fn half_requests_floods_and_clients_that_never_read_keep_nobody_out() {
    /// As many as are served at the same time.
    const CLIENTS: usize = 16;
    let world = World::started().await;
    let path = world.path("control");
    let connect = || UnixStream::connect(&path).unwrap();
    for half in [&b"{\"status\""[..], b"", b"\xff"] {
        let mut client = connect();
        client.write_all(half).unwrap();
        // It goes away within its request.
    }
    // They never read: the answers stay with the daemon.
    let flood = b"{\"status\":{}}\n".repeat(64);
    let mut deaf: Vec<UnixStream> = (0..CLIENTS - 1).map(|_| connect()).collect();
    for client in &mut deaf {
        client.set_nonblocking(true).unwrap();
        while client.write(&flood).is_ok_and(|written| written > 0) {}
    }
    // As soon as it has noticed that the halves are gone.
    served(&path).await;
    // More than are served: closed without a word, and others can come when some have gone.
    let mut more: Vec<UnixStream> = (0..64).map(|_| connect()).collect();
    let closed = tokio::task::spawn_blocking(move || {
        let last = more.last_mut().unwrap();
        std::io::Read::read(last, &mut [0]).map(|read| read == 0)
    });
    let closed = crate::world::bounded("the last is closed", closed).await;
    assert!(closed.unwrap().unwrap_or(true));
    drop(deaf);
    served(&path).await;
}

/// Waits until a new client is served.
async fn served(path: &Path) {
    crate::world::eventually("a new client is served", async || {
        let path = path.to_owned();
        let ask = move || xenblkd::control::ask(&path, Request::Version {});
        tokio::task::spawn_blocking(ask).await.unwrap().ok()
    })
    .await;
}

#[tokio::test]
async fn a_socket_with_too_long_a_name_is_named() {
    let world = World::new().await;
    let mut options = world.options.clone();
    options.control = Some(world.path(&"x".repeat(200)));
    let error = xenblkd::supervisor::run(options, std::future::pending())
        .await
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("cannot listen on control socket /") && error.contains("SUN_LEN"),
        "{error}"
    );
}
