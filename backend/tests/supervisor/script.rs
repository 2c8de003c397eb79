//! The other end of a `script:` target: greets when the test says so, and lets everything pass.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use xenblkd::target::script::{GREETING, Greeting};

fn bound(path: &Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&socket, 16).unwrap();
    socket
}

/// Listens at `path` with a disk of one MiB. Connections wait until something is sent on the returned
/// channel, or it is dropped.
pub(crate) fn listen(path: &Path) -> Sender<()> {
    let socket = bound(path);
    let (go, gate) = channel();
    std::thread::spawn(move || serve(&socket, &gate));
    go
}

/// Listens at `path`, accepts nothing, and is gone when the returned sender is used or dropped.
pub(crate) fn hang_up(path: &Path) -> Sender<()> {
    let socket = bound(path);
    let (go, gate) = channel();
    std::thread::spawn(move || {
        let _: Result<(), _> = gate.recv();
        drop(socket);
    });
    go
}

fn serve(listener: &OwnedFd, gate: &Receiver<()>) {
    let disk = tempfile::tempfile().unwrap();
    disk.set_len(1 << 20).unwrap();
    let _ = gate.recv();
    // Kept open: a script target's disk fails when its script goes away.
    let mut connections = Vec::new();
    while let Ok(connection) = rustix::net::accept(listener) {
        let greeting = serde_json::to_vec(&Greeting {
            protocol: GREETING.to_owned(),
        })
        .unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [disk.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        rustix::net::sendmsg(
            &connection,
            &[IoSlice::new(&greeting)],
            &mut control,
            SendFlags::NOSIGNAL,
        )
        .unwrap();
        connections.push(connection);
    }
}
