//! Device holders in other processes, killed where it hurts: the hypervisor takes back what they held.
//!
//! A holder is this test binary again, running [`holder`] alone; its standard input is a socket on which
//! its descriptors arrive, as a worker's do, and on which it says how far it got.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use xenblk_grants::fake::{self, FakeDomain, FakeHost, FakeXen, Snapshot, StillMapped};
use xenblk_grants::{
    Access, CopyOp, CopyStatus, Direction, DomId, GrantRef, Port, Slab, XEN_PAGE_SIZE,
};

const GUEST: DomId = DomId(5);
const ROLE: &str = "XENBLK_TEST_HOLDER";

/// What a holder does before it says so and waits to be killed.
#[derive(Clone, Copy)]
enum Role {
    /// Maps the grant, twice, and binds the port.
    Hold,
    /// Copies the page to the guest; the fault table stops it in the middle.
    Copy,
}

struct Scene {
    xen: FakeXen,
    host: FakeHost,
    domain: FakeDomain,
    gref: GrantRef,
    port: Port,
    _directory: tempfile::TempDir,
}

impl Scene {
    fn set() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("hypervisor");
        let xen = FakeXen::start().unwrap();
        xen.listen(&path).unwrap();
        let host = FakeHost::connect(&path).unwrap();
        let domain = xen.domain(GUEST, 10).unwrap();
        let page = domain.alloc_page().unwrap();
        let gref = domain.grant(page, DomId(0), false).unwrap();
        let port = domain.alloc_unbound(DomId(0)).unwrap();
        Self {
            xen,
            host,
            domain,
            gref,
            port,
            _directory: directory,
        }
    }

    /// Starts a holder; the devices it gets are closed here.
    fn holder(&self, role: Role) -> (Child, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "holder", "--ignored", "--nocapture"])
            .env(ROLE, format!("{} {} {}", role as u8, self.gref, self.port))
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let devices = [
            self.host.open_gntdev().unwrap(),
            self.host.open_evtchn(GUEST).unwrap(),
        ];
        send_fds(&ours, &devices);
        (child, ours)
    }

    fn untouched(&self) -> Snapshot {
        let snapshot = self.xen.snapshot();
        assert_eq!(snapshot.ports.len(), 1, "the guest's port alone");
        snapshot
    }
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_killed_process_leaves_no_mapping_and_an_unbound_port() {
    let scene = Scene::set();
    let before = scene.untouched();
    let (child, mut told) = scene.holder(Role::Hold);
    assert_eq!(told.read(&mut [0; 1]).unwrap(), 1, "the holder got there");
    let held = scene.xen.snapshot();
    assert_eq!(held.mappings, [(GUEST, 2)].into());
    assert_eq!(held.ports.len(), 2);
    assert_eq!(scene.domain.end_access(scene.gref), Err(StillMapped));

    kill(child);
    assert_eq!(scene.xen.snapshot(), before, "0 mappings, unbound ports");
    // A successor binds the same port and finds it pending.
    let events = fake::event_channels(scene.host.open_evtchn(GUEST).unwrap()).unwrap();
    let local = events.bind_interdomain(GUEST, scene.port).unwrap();
    let mut port = [0; 4];
    assert_eq!(rustix::io::read(events.as_fd(), &mut port), Ok(4));
    assert_eq!(Port(u32::from_ne_bytes(port)), local);
    assert_eq!(scene.domain.end_access(scene.gref), Ok(()));
}

#[test]
fn a_dead_domain_is_gone_once_its_killed_holder_is() {
    let scene = Scene::set();
    let (child, mut told) = scene.holder(Role::Hold);
    assert_eq!(told.read(&mut [0; 1]).unwrap(), 1, "the holder got there");
    scene.xen.kill_domain(GUEST);
    assert_eq!(scene.xen.snapshot().zombies, [GUEST]);
    kill(child);
    assert_eq!(scene.xen.snapshot(), Snapshot::default());
}

#[test]
fn a_process_killed_in_the_middle_of_a_copy_leaves_the_grant_unused() {
    let scene = Scene::set();
    scene.xen.faults().hold_copies(true);
    let before = scene.untouched();
    let (child, _told) = scene.holder(Role::Copy);
    while scene.xen.faults().copies_held() == 0 {
        std::thread::yield_now();
    }
    assert_eq!(scene.domain.end_access(scene.gref), Err(StillMapped));
    kill(child);
    assert_eq!(scene.xen.snapshot(), before);
    scene.xen.faults().hold_copies(false);
    // The lock is free as well, for copies and for maps.
    let table = fake::grant_table(scene.host.open_gntdev().unwrap()).unwrap();
    let mut slab = Slab::reserve(XEN_PAGE_SIZE).unwrap();
    let mut ops = [CopyOp::new(scene.gref, 0, 4096, 0, Direction::FromGuest)];
    table.copy(GUEST, &mut slab, &mut ops).unwrap();
    assert_eq!(ops[0].status, CopyStatus::OKAY);
    drop(table.map(GUEST, &[scene.gref], Access::ReadWrite).unwrap());
    assert_eq!(scene.domain.end_access(scene.gref), Ok(()));
}

#[test]
fn a_mapping_survives_the_death_of_a_process_copying_the_same_page() {
    let scene = Scene::set();
    let table = fake::grant_table(scene.host.open_gntdev().unwrap()).unwrap();
    let mapping = table.map(GUEST, &[scene.gref], Access::ReadOnly).unwrap();
    scene.xen.faults().hold_copies(true);
    let (child, _told) = scene.holder(Role::Copy);
    while scene.xen.faults().copies_held() == 0 {
        std::thread::yield_now();
    }
    kill(child);
    assert_eq!(scene.xen.snapshot().mappings, [(GUEST, 1)].into());
    assert_eq!(scene.domain.end_access(scene.gref), Err(StillMapped));
    drop(mapping);
    assert_eq!(scene.domain.end_access(scene.gref), Ok(()));
}

#[test]
fn mappings_of_a_dead_process_wait_for_a_copy_of_the_same_page() {
    let scene = Scene::set();
    let before = scene.untouched();
    let (mapper, mut told) = scene.holder(Role::Hold);
    assert_eq!(told.read(&mut [0; 1]).unwrap(), 1, "the holder got there");
    scene.xen.faults().hold_copies(true);
    let (copier, _told) = scene.holder(Role::Copy);
    while scene.xen.faults().copies_held() == 0 {
        std::thread::yield_now();
    }
    kill(mapper);
    assert_eq!(scene.xen.snapshot().mappings, [(GUEST, 2)].into());
    kill(copier);
    assert_eq!(scene.xen.snapshot(), before);
    assert_eq!(scene.domain.end_access(scene.gref), Ok(()));
}

/// The other process. Not a test: it runs only when the tests above start it.
#[test]
#[ignore = "started by the tests of this file"]
fn holder() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let told = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let numbers: Vec<u32> = role
        .split(' ')
        .map(|number| number.parse().unwrap())
        .collect();
    let (gref, port) = (GrantRef(numbers[1]), Port(numbers[2]));
    let [gntdev, evtchn] = receive_fds(&told).try_into().unwrap();
    let table = fake::grant_table(gntdev).unwrap();
    let events = fake::event_channels(evtchn).unwrap();
    if numbers[0] == Role::Copy as u32 {
        let mut slab = Slab::reserve(XEN_PAGE_SIZE).unwrap();
        let mut ops = [CopyOp::new(gref, 0, 4096, 0, Direction::ToGuest)];
        table.copy(GUEST, &mut slab, &mut ops).unwrap();
        panic!("the copy wasn't stopped");
    }
    let mapping = table.map(GUEST, &[gref, gref], Access::ReadWrite).unwrap();
    events.bind_interdomain(GUEST, port).unwrap();
    (&told).write_all(b"!").unwrap();
    // Until killed; the end of the test's process ends it as well.
    let _ = (&told).read(&mut [0; 1]);
    drop((mapping, events));
}

fn send_fds(socket: &UnixStream, fds: &[OwnedFd]) {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let body = [IoSlice::new(b"!")];
    rustix::net::sendmsg(socket, &body, &mut control, SendFlags::empty()).unwrap();
}

fn receive_fds(socket: &UnixStream) -> Vec<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0; 1];
    let body = &mut [IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(socket, body, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    let received = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    received.flatten().collect()
}
