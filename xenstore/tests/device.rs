//! The client over the kernel's device, played by a sequenced-packet socket: it keeps the borders of
//! writes, which the device insists on, and has an end that can refuse them. Behind it the in-memory
//! server.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;

use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use xenblk_xenstore::fake::Server;
use xenblk_xenstore::wire::{HEADER_BYTES, MAX_REQUEST};
use xenblk_xenstore::{Client, Error, Event, Events, Tx};

/// Our end, non-blocking, and the kernel's.
fn device() -> (File, OwnedFd) {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (ours, kernels) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::io::ioctl_fionbio(&kernels, false).unwrap();
    (ours.into(), kernels)
}

/// Passes on what the client writes, one whole message at a time, and what the server answers, in
/// pieces of any size. Ends with either side.
fn bridge(kernels: OwnedFd, server: UnixStream) {
    let mut from_client = File::from(kernels);
    let mut to_client = from_client.try_clone().unwrap();
    let (mut to_server, mut from_server) = (server.try_clone().unwrap(), server);
    thread::spawn(move || {
        let mut message = vec![0; 2 * (HEADER_BYTES + MAX_REQUEST)];
        while let Ok(length @ 1..) = from_client.read(&mut message) {
            let payload = u32::from_le_bytes(message[12..16].try_into().unwrap()) as usize;
            assert_eq!(length, HEADER_BYTES + payload, "one whole message a write");
            to_server.write_all(&message[..length]).unwrap();
        }
        to_server.shutdown(std::net::Shutdown::Both).unwrap();
    });
    thread::spawn(move || {
        let mut piece = [0; 7];
        while let Ok(length @ 1..) = from_server.read(&mut piece) {
            if to_client.write_all(&piece[..length]).is_err() {
                return;
            }
        }
        let _ = shutdown(&to_client, Shutdown::Both);
    });
}

fn connected() -> (Server, Client, Events) {
    let server = Server::start().unwrap();
    let (ours, kernels) = device();
    bridge(kernels, server.connect_as(0).unwrap());
    let (client, events) = Client::from_device(ours).unwrap();
    (server, client, events)
}

#[tokio::test]
async fn every_message_is_a_write_of_its_own() {
    let (_server, client, mut events) = connected();
    let nodes: Vec<_> = (0..200)
        .map(|n| (format!("/many/{n}"), "x".repeat(n)))
        .collect();
    client.write_many(Tx::NONE, &nodes).await.unwrap();
    let paths: Vec<_> = nodes.iter().map(|(path, _)| path.clone()).collect();
    let values = client.read_many(Tx::NONE, &paths).await.unwrap();
    let read: Vec<_> = values.into_iter().map(Option::unwrap).collect();
    assert!(
        read.iter()
            .zip(&nodes)
            .all(|(read, (_, written))| read == written.as_bytes())
    );
    client.watch("/many/3", "token").await.unwrap();
    let event = Event::Watch {
        path: "/many/3".to_owned(),
        token: "token".to_owned(),
    };
    assert_eq!(events.next().await, Some(event));
    let taken = client
        .transact(async |client: Client, tx| client.read(tx, "/many/2").await)
        .await;
    assert_eq!(taken.as_deref(), Ok(b"xx".as_slice()));
}

#[tokio::test]
async fn watches_of_the_kernel_are_left_alone() {
    let (_server, client, _events) = connected();
    assert_eq!(client.reset_watches().await, Err(Error::NotSupported));
}

/// The kernel answers a watch it can't register by failing the write, and goes on.
#[tokio::test]
async fn a_refused_write_fails_its_request_only() {
    let (ours, kernels) = device();
    let (client, mut events) = Client::from_device(ours).unwrap();
    shutdown(&kernels, Shutdown::Read).unwrap();
    for _ in 0..2 {
        let refused = client.watch("@releaseDomain", "token").await.unwrap_err();
        assert!(matches!(&refused, Error::Os(_)), "{refused:?}");
    }
    // Reading goes on all the same: an event in two pieces. Its watch was refused, so nobody is told,
    // and the end is what comes next.
    let mut kernels = File::from(kernels);
    kernels
        .write_all(&[15, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, b'a'])
        .unwrap();
    kernels.write_all(b"\0t\0").unwrap();
    drop(kernels);
    let Some(Event::Disconnected { reason }) = events.next().await else {
        panic!("expected the end");
    };
    assert_eq!(reason, "closed by xenstored");
}

#[tokio::test]
async fn the_end_of_the_device_is_told() {
    let (server, client, mut events) = connected();
    drop(server);
    assert!(matches!(
        events.next().await,
        Some(Event::Disconnected { .. })
    ));
    assert!(matches!(
        client.read(Tx::NONE, "/a").await,
        Err(Error::Disconnected(_))
    ));
}
