//! Bytes that no client of ours would send: the hypervisor goes on serving the others.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use proptest::prelude::*;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType,
};
use xenblk_grants::fake::{self, FakeHost, FakeXen, Snapshot};
use xenblk_grants::{Access, DomId};

const GUEST: DomId = DomId(5);

fn connect(path: &Path) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

/// Sends a datagram, perhaps as a call; true if it could be sent.
fn throw(socket: impl AsFd, bytes: &[u8], answer_to: Option<BorrowedFd<'_>>) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if let Some(fd) = &answer_to {
        assert!(control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd))));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags).is_ok()
}

/// A client that behaves is served.
fn works(xen: &FakeXen, host: &FakeHost) {
    let domain = xen.domain(GUEST, 10).unwrap();
    let page = domain.alloc_page().unwrap();
    let gref = domain.grant(page, DomId(0), false).unwrap();
    let table = fake::grant_table(host.open_gntdev().unwrap()).unwrap();
    let mapping = table.map(GUEST, &[gref], Access::ReadWrite).unwrap();
    let events = fake::event_channels(host.open_evtchn(GUEST).unwrap()).unwrap();
    events
        .bind_interdomain(GUEST, domain.alloc_unbound(DomId(0)).unwrap())
        .unwrap();
    drop((mapping, table, events));
    xen.kill_domain(GUEST);
    assert_eq!(xen.snapshot(), Snapshot::default());
}

/// Datagrams that resemble requests more often than chance would have it.
fn datagram() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof![0u32..10, Just(5), Just(u32::MAX), any::<u32>()];
    let words = prop::collection::vec(word, 0..20);
    prop_oneof![
        words.prop_map(|words| words.into_iter().flat_map(u32::to_ne_bytes).collect()),
        prop::collection::vec(any::<u8>(), 0..50),
        (0usize..40_000).prop_map(|len| vec![5; len]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn garbage_harms_only_its_sender(
        datagrams in prop::collection::vec((0usize..3, any::<bool>(), datagram()), 1..40)
    ) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("hypervisor");
        let xen = FakeXen::start().unwrap();
        xen.listen(&path).unwrap();
        let host = FakeHost::connect(&path).unwrap();
        let victim = xen.domain(DomId(1), 4).unwrap();
        victim.alloc_unbound(DomId(0)).unwrap();
        let page = victim.alloc_page().unwrap();
        victim.grant(page, DomId(0), false).unwrap();
        let sockets =
            [connect(&path), host.open_gntdev().unwrap(), host.open_evtchn(DomId(0)).unwrap()];
        // Answers go where nobody reads, or to something that is no socket.
        let (nobody, _reads) =
            std::os::unix::net::UnixDatagram::pair().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        for (number, (socket, call, bytes)) in datagrams.iter().enumerate() {
            let to = if number % 3 == 0 { null.as_fd() } else { nobody.as_fd() };
            throw(&sockets[*socket], bytes, call.then_some(to));
        }
        xen.kill_domain(DomId(1));
        drop(sockets);
        works(&xen, &host);
    }
}

#[test]
fn a_client_that_never_stops_sending_does_not_stop_the_others() {
    let xen = FakeXen::start().unwrap();
    let host = xen.host().unwrap();
    let flooding = host.open_evtchn(DomId(0)).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                throw(&flooding, &[1; 4096], None);
            }
        });
        (0..10).for_each(|_| works(&xen, &host));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn answers_nobody_reads_are_lost_and_the_rest_is_served() {
    let xen = FakeXen::start().unwrap();
    let host = xen.host().unwrap();
    let gntdev = host.open_gntdev().unwrap();
    let (full, _unread) = std::os::unix::net::UnixDatagram::pair().unwrap();
    for _ in 0..5000 {
        // Unmap of a handle that doesn't exist, the shortest way to an answer.
        throw(
            &gntdev,
            &[6u32, 77].map(u32::to_ne_bytes).concat(),
            Some(full.as_fd()),
        );
    }
    works(&xen, &host);
}

#[test]
fn a_connection_that_closes_at_once_is_forgotten() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hypervisor");
    let xen = FakeXen::start().unwrap();
    xen.listen(&path).unwrap();
    for _ in 0..500 {
        drop(connect(&path));
    }
    works(&xen, &FakeHost::connect(&path).unwrap());
    assert!(xen.listen(&path).is_err(), "the path is taken");
}
