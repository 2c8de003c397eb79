//! The contract suite on the mocked hypervisor, and what only a mock can show.

mod contract;

use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::{Errno, retry_on_intr};
use xenblk_grants::fake::{
    self, FakeDomain, FakeHost, FakeXen, Gfn, PortInfo, PortState, Snapshot, StillMapped,
};
use xenblk_grants::{
    Access, CopyOp, CopyStatus, Direction, DomId, EventChannels, GrantRef, GrantTable, MapError,
    Port, Slab, XEN_PAGE_SIZE,
};

use contract::{Guest, Host, next, now, pattern};

contract!(Mock::start());

const GUEST: DomId = DomId(5);

struct Mock {
    xen: FakeXen,
    host: FakeHost,
}

impl Mock {
    fn start() -> Self {
        let xen = FakeXen::start().unwrap();
        let host = xen.host().unwrap();
        Self { xen, host }
    }
}

impl Host for Mock {
    fn guest(&self) -> Box<dyn Guest> {
        let domain = self.xen.domain(GUEST, 400).unwrap();
        Box::new(MockGuest {
            domain,
            pages: RefCell::default(),
        })
    }
    fn grant_table(&self) -> Box<dyn GrantTable> {
        fake::grant_table(self.host.open_gntdev().unwrap()).unwrap()
    }
    fn event_channels(&self) -> Box<dyn EventChannels> {
        fake::event_channels(self.host.open_evtchn(DomId(0)).unwrap()).unwrap()
    }
    fn no_domain(&self) -> DomId {
        DomId(4242)
    }
}

struct MockGuest {
    domain: FakeDomain,
    pages: RefCell<HashMap<GrantRef, Gfn>>,
}

impl Guest for MockGuest {
    fn domid(&self) -> DomId {
        self.domain.domid()
    }
    fn grant(&self, readonly: bool) -> GrantRef {
        let page = self.domain.alloc_page().unwrap();
        let gref = self.domain.grant(page, DomId(0), readonly).unwrap();
        self.pages.borrow_mut().insert(gref, page);
        gref
    }
    fn end_access(&self, gref: GrantRef) -> bool {
        let ended = self.domain.end_access(gref).is_ok();
        if ended && let Some(page) = self.pages.borrow_mut().remove(&gref) {
            self.domain.free_page(page);
        }
        ended
    }
    fn read(&self, gref: GrantRef) -> Vec<u8> {
        let mut bytes = vec![0; XEN_PAGE_SIZE];
        assert!(self.domain.read(self.pages.borrow()[&gref], 0, &mut bytes));
        bytes
    }
    fn write(&self, gref: GrantRef, bytes: &[u8]) {
        assert!(self.domain.write(self.pages.borrow()[&gref], 0, bytes));
    }
    fn alloc_unbound(&self) -> Port {
        self.domain.alloc_unbound(DomId(0)).unwrap()
    }
    fn notify(&self, port: Port) {
        self.domain.notify(port);
    }
    fn close(&self, port: Port) {
        self.domain.close(port);
    }
    fn took_event(&self, port: Port, expected: bool) -> bool {
        took_event(&self.domain.port_fd(port).unwrap(), expected)
    }
}

fn took_event(fd: &OwnedFd, expected: bool) -> bool {
    let mut readable = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)];
    let wait = Timespec {
        tv_sec: if expected { 10 } else { 0 },
        tv_nsec: 0,
    };
    retry_on_intr(|| rustix::event::poll(&mut readable, Some(&wait))).unwrap();
    rustix::io::read(fd, &mut [0; 8]).is_ok()
}

/// One granted page and a slab to copy it to.
fn one_page(domain: &FakeDomain) -> (Gfn, GrantRef) {
    let page = domain.alloc_page().unwrap();
    (page, domain.grant(page, DomId(0), false).unwrap())
}

fn copy_one(table: &dyn GrantTable, dom: DomId, gref: GrantRef) -> CopyStatus {
    let mut slab = Slab::reserve(XEN_PAGE_SIZE).unwrap();
    let mut ops = [CopyOp::new(gref, 0, 4096, 0, Direction::FromGuest)];
    table.copy(dom, &mut slab, &mut ops).unwrap();
    ops[0].status
}

#[test]
fn the_snapshot_shows_mappings_and_both_ends_of_every_port() {
    let mock = Mock::start();
    let domain = mock.xen.domain(GUEST, 10).unwrap();
    let (table, events) = (mock.grant_table(), mock.event_channels());
    let (_, gref) = one_page(&domain);
    let (bound, unbound) = (
        domain.alloc_unbound(DomId(0)).unwrap(),
        domain.alloc_unbound(DomId(3)).unwrap(),
    );
    let mapping = table.map(GUEST, &[gref, gref], Access::ReadWrite).unwrap();
    let local = events.bind_interdomain(GUEST, bound).unwrap();
    let backend = |state| PortInfo {
        domid: DomId(0),
        port: local,
        state,
    };
    let guest = |port, state| PortInfo {
        domid: GUEST,
        port,
        state,
    };
    let other = guest(unbound, PortState::Unbound { remote: DomId(3) });
    let expected = Snapshot {
        mappings: [(GUEST, 2)].into(),
        maps: 1,
        ports: vec![
            backend(PortState::Interdomain {
                remote: GUEST,
                port: bound,
            }),
            guest(
                bound,
                PortState::Interdomain {
                    remote: DomId(0),
                    port: local,
                },
            ),
            other,
        ],
        zombies: vec![],
    };
    assert_eq!(mock.xen.snapshot(), expected);
    drop((mapping, table));
    domain.close(bound);
    let ports = vec![backend(PortState::Unbound { remote: GUEST }), other];
    assert_eq!(
        mock.xen.snapshot(),
        Snapshot {
            ports,
            ..Snapshot::default()
        }
    );
    drop(events);
    assert_eq!(
        mock.xen.snapshot(),
        Snapshot {
            ports: vec![other],
            ..Snapshot::default()
        }
    );
}

#[test]
fn a_dead_domain_is_a_zombie_until_its_last_mapping_is_gone() {
    let mock = Mock::start();
    let domain = mock.xen.domain(GUEST, 10).unwrap();
    let (table, events) = (mock.grant_table(), mock.event_channels());
    let (page, gref) = one_page(&domain);
    domain.write(page, 0, &pattern(9));
    let port = domain.alloc_unbound(DomId(0)).unwrap();
    let waiting = domain.port_fd(port).unwrap();
    let local = events.bind_interdomain(GUEST, port).unwrap();
    let mapping = table.map(GUEST, &[gref], Access::ReadWrite).unwrap();

    mock.xen.kill_domain(GUEST);
    assert!(domain.is_dead() && took_event(&waiting, true));
    assert_eq!(mock.xen.snapshot().zombies, [GUEST]);
    let mut bytes = vec![0; XEN_PAGE_SIZE];
    mapping.copy_out(0, &mut bytes).unwrap();
    assert_eq!(bytes, pattern(9), "still readable");
    let again = table
        .map(GUEST, &[gref], Access::ReadWrite)
        .expect("a zombie can still be mapped");
    assert_eq!(copy_one(&*table, GUEST, gref), CopyStatus::BAD_DOMAIN);
    events.notify(local).expect("silent");
    let errno = |error: std::io::Error| error.raw_os_error();
    let bind = || errno(events.bind_interdomain(GUEST, port).unwrap_err());
    assert_eq!(bind(), Some(Errno::INVAL.raw_os_error()));
    assert_eq!(
        errno(domain.alloc_unbound(DomId(0)).unwrap_err()),
        Some(Errno::SRCH.raw_os_error())
    );

    drop(mapping);
    assert_eq!(mock.xen.snapshot().zombies, [GUEST]);
    drop(again);
    assert_eq!(mock.xen.snapshot().zombies, []);
    assert_eq!(bind(), Some(Errno::SRCH.raw_os_error()));
    let refused = table.map(GUEST, &[gref], Access::ReadWrite);
    assert!(matches!(refused, Err(MapError::Refused)));

    // The number may be used again, and devices that knew the old domain see the new one.
    let reborn = mock.xen.domain(GUEST, 10).unwrap();
    let (page, gref) = one_page(&reborn);
    assert_eq!(copy_one(&*table, GUEST, gref), CopyStatus::OKAY);
    let mapping = table.map(GUEST, &[gref], Access::ReadWrite).unwrap();
    reborn.write(page, 0, &pattern(4));
    mapping.copy_out(0, &mut bytes).unwrap();
    assert_eq!(bytes, pattern(4));
}

#[test]
fn grants_and_ports_for_another_domain_are_refused() {
    let mock = Mock::start();
    let domain = mock.xen.domain(GUEST, 10).unwrap();
    let table = mock.grant_table();
    let page = domain.alloc_page().unwrap();
    let foreign = domain.grant(page, DomId(7), false).unwrap();
    assert_eq!(copy_one(&*table, GUEST, foreign), CopyStatus::GENERAL_ERROR);
    let refused = table.map(GUEST, &[foreign], Access::ReadOnly);
    assert!(matches!(refused, Err(MapError::Refused)));
    let beyond = domain.grant(Gfn(1 << 20), DomId(0), false).unwrap();
    assert_eq!(copy_one(&*table, GUEST, beyond), CopyStatus::BAD_PAGE);
    assert_eq!(domain.end_access(beyond), Ok(()));

    let port = domain.alloc_unbound(DomId(7)).unwrap();
    let error = mock
        .event_channels()
        .bind_interdomain(GUEST, port)
        .unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::INVAL.raw_os_error()));
    let port = domain.alloc_unbound(DomId(0)).unwrap();
    let restricted = |to| fake::event_channels(mock.host.open_evtchn(to).unwrap()).unwrap();
    let error = restricted(DomId(6))
        .bind_interdomain(GUEST, port)
        .unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::ACCESS.raw_os_error()));
    restricted(GUEST).bind_interdomain(GUEST, port).unwrap();
}

#[test]
fn faults_hit_the_call_they_name() {
    let mock = Mock::start();
    let domain = mock.xen.domain(GUEST, 10).unwrap();
    let table = mock.grant_table();
    let (_, gref) = one_page(&domain);
    let map = || table.map(GUEST, &[gref], Access::ReadWrite);
    mock.xen.faults().fail_map(2);
    assert!(map().is_ok());
    assert!(matches!(map(), Err(MapError::Refused)));
    assert!(map().is_ok());

    mock.xen.faults().fail_copy(3, CopyStatus::EAGAIN);
    let statuses = [(); 4].map(|()| copy_one(&*table, GUEST, gref));
    let ok = CopyStatus::OKAY;
    assert_eq!(statuses, [ok, ok, CopyStatus::EAGAIN, ok]);

    mock.xen.faults().limit_maptrack(2);
    let (one, two) = (map().unwrap(), map().unwrap());
    assert!(matches!(map(), Err(MapError::Refused)));
    assert_eq!(
        copy_one(&*table, GUEST, gref),
        ok,
        "a copy needs no maptrack entry"
    );
    drop(one);
    let three = map().unwrap();
    drop((two, three));
    assert_eq!(domain.end_access(gref), Ok(()));
}

#[test]
fn a_page_cannot_be_taken_back_while_it_is_copied() {
    let mock = Mock::start();
    let domain = mock.xen.domain(GUEST, 10).unwrap();
    let (page, gref) = one_page(&domain);
    domain.write(page, 0, &pattern(1));
    let (faults, fd) = (mock.xen.faults(), mock.host.open_gntdev().unwrap());
    faults.hold_copies(true);
    let copy = std::thread::spawn(move || copy_one(&*fake::grant_table(fd).unwrap(), GUEST, gref));
    while faults.copies_held() == 0 {
        std::thread::yield_now();
    }
    assert_eq!(domain.end_access(gref), Err(StillMapped));
    // Brute force: the copy in flight ends well, because the page itself is still there; the next doesn't.
    domain.revoke(gref);
    faults.hold_copies(false);
    assert_eq!(copy.join().unwrap(), CopyStatus::OKAY);
    assert_eq!(
        copy_one(&*mock.grant_table(), GUEST, gref),
        CopyStatus::GENERAL_ERROR
    );
}

#[test]
fn one_grant_copied_mapped_and_ended_by_many_at_once_ends_unused() {
    let mock = Mock::start();
    let domain = mock.xen.domain(GUEST, 10).unwrap();
    let (page, gref) = one_page(&domain);
    domain.write(page, 0, &pattern(1));
    let devices: Vec<_> = (0..4).map(|_| mock.host.open_gntdev().unwrap()).collect();
    std::thread::scope(|scope| {
        for fd in devices {
            let domain = &domain;
            scope.spawn(move || {
                let table = fake::grant_table(fd).unwrap();
                for _ in 0..300 {
                    assert_eq!(copy_one(&*table, GUEST, gref), CopyStatus::OKAY);
                    let mapping = table.map(GUEST, &[gref], Access::ReadWrite).unwrap();
                    assert_eq!(domain.end_access(gref), Err(StillMapped));
                    drop(mapping);
                }
            });
        }
    });
    assert_eq!(mock.xen.snapshot(), Snapshot::default());
    assert_eq!(domain.end_access(gref), Ok(()));
}

#[test]
fn a_full_event_queue_delays_events_and_loses_none() {
    let mock = Mock::start();
    let domain = mock.xen.domain(GUEST, 10).unwrap();
    let events = mock.event_channels();
    let (one, two) = (
        domain.alloc_unbound(DomId(0)).unwrap(),
        domain.alloc_unbound(DomId(0)).unwrap(),
    );
    let noisy = events.bind_interdomain(GUEST, one).unwrap();
    // Far more than a socket holds: write without reading, so that the port is queued every time.
    for _ in 0..2000 {
        events.unmask(noisy).unwrap();
        mock.xen.snapshot();
        domain.notify(one);
    }
    let quiet = events.bind_interdomain(GUEST, two).unwrap();
    let (mut noisy_seen, mut quiet_seen) = (0, 0);
    while let Some(port) = next(&*events) {
        noisy_seen += usize::from(port == noisy);
        quiet_seen += usize::from(port == quiet);
    }
    assert!((1..2000).contains(&noisy_seen), "bounded: {noisy_seen}");
    assert_eq!(quiet_seen, 1);
    events.unmask(noisy).unwrap();
    mock.xen.snapshot();
    assert_eq!(now(&*events), None);
}

#[test]
fn a_device_outlives_the_hypervisor_only_as_an_error() {
    let mock = Mock::start();
    let domain = mock.xen.domain(GUEST, 10).unwrap();
    let (table, events) = (mock.grant_table(), mock.event_channels());
    let (_, gref) = one_page(&domain);
    let port = domain.alloc_unbound(DomId(0)).unwrap();
    let local = events.bind_interdomain(GUEST, port).unwrap();
    let mapping = table.map(GUEST, &[gref], Access::ReadWrite).unwrap();
    drop(mock);
    assert!(matches!(
        table.map(GUEST, &[gref], Access::ReadWrite),
        Err(MapError::Io(_))
    ));
    assert!(events.bind_interdomain(GUEST, port).is_err());
    assert!(events.unmask(local).is_err());
    domain.notify(port);
    drop((mapping, events));
}

#[test]
fn a_guest_runs_out_of_pages_and_grants_without_harm() {
    let mock = Mock::start();
    let domain = mock.xen.domain(GUEST, 20).unwrap();
    let ring = domain.alloc_pages(16).unwrap();
    let rest: Vec<_> = std::iter::from_fn(|| domain.alloc_page()).collect();
    assert_eq!(rest.len(), 4);
    assert_eq!(domain.alloc_pages(2), None);
    domain.words(ring, 16).as_ref()[16 * 1024 - 1].store(7, std::sync::atomic::Ordering::Relaxed);
    let mut last = [0; 4];
    assert!(domain.read(Gfn(ring.0 + 15), 4092, &mut last));
    assert_eq!(u32::from_ne_bytes(last), 7);
    assert!(domain.words(ring, 1 << 30).as_ref().is_empty());
    assert!(!domain.read(ring, 4093, &mut last) && !domain.write(Gfn(u32::MAX), 0, &last));

    let grefs: Vec<_> = std::iter::from_fn(|| domain.grant(ring, DomId(0), false)).collect();
    assert_eq!(grefs.len(), 512 - 8);
    grefs
        .iter()
        .for_each(|&gref| domain.end_access(gref).unwrap());
    assert_eq!(
        domain.end_access(grefs[0]),
        Ok(()),
        "ending twice frees once"
    );
    let again: Vec<_> = std::iter::from_fn(|| domain.grant(ring, DomId(0), false)).collect();
    assert_eq!(again.len(), grefs.len());
}
