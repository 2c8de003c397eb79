//! What every `GrantTable` and `EventChannels` must do, whatever is underneath. The same functions run on
//! the mocked hypervisor here and, given another [`Host`], on real Xen (as tried on Xen 4.17).

use std::io::ErrorKind;

use rustix::io::{Errno, retry_on_intr};
use xenblk_grants::{
    Access, CopyOp, CopyStatus, Direction, DomId, EventChannels, GrantRef, GrantTable, MAX_CHUNK,
    MapError, Port, Run, Slab, Window, XEN_PAGE_SIZE,
};

/// Where the suite runs.
pub(crate) trait Host {
    /// A guest with at least 400 free pages, of another domain or, in a loopback, of this one.
    fn guest(&self) -> Box<dyn Guest>;
    fn grant_table(&self) -> Box<dyn GrantTable>;
    fn event_channels(&self) -> Box<dyn EventChannels>;
    /// A domain that doesn't exist.
    fn no_domain(&self) -> DomId;
}

/// The other side, played by the test.
pub(crate) trait Guest {
    fn domid(&self) -> DomId;
    /// A new page, granted to us.
    fn grant(&self, readonly: bool) -> GrantRef;
    /// False: still in use.
    fn end_access(&self, gref: GrantRef) -> bool;
    fn read(&self, gref: GrantRef) -> Vec<u8>;
    fn write(&self, gref: GrantRef, bytes: &[u8]);
    /// A new port that we may bind.
    fn alloc_unbound(&self) -> Port;
    fn notify(&self, port: Port);
    fn close(&self, port: Port);
    /// Whether an event came since the last call; waits a while for one if `expected`.
    fn took_event(&self, port: Port, expected: bool) -> bool;
}

/// Runs every check of the suite against `$host`, an expression that makes a fresh [`Host`].
#[macro_export]
macro_rules! contract {
    ($host:expr; $($check:ident)*) => {
        $(#[test] fn $check() { $crate::contract::$check(&$host); })*
    };
    ($host:expr) => {
        $crate::contract! { $host;
            maps_in_order_and_shows_both_sides_the_same_bytes
            a_readonly_grant_maps_readonly_only
            one_bad_grant_fails_the_map_and_leaves_nothing_mapped
            a_grant_ends_only_when_the_last_mapping_is_gone
            a_map_needs_at_least_one_grant
            chunks_share_a_window_and_go_one_by_one
            a_refused_chunk_leaves_nothing_mapped_and_loses_no_page
            a_grant_mapped_twice_stays_in_use_until_both_are_gone
            copies_any_number_of_segments
            copies_exactly_the_bytes_asked_for
            a_copy_says_what_went_wrong_with_each_segment
            a_segment_that_leaves_its_page_fails_the_whole_copy
            a_mapped_page_can_be_copied
            binding_makes_the_port_pending
            a_port_stays_masked_until_it_is_written_back
            a_write_without_a_read_enables_the_port_again
            events_reach_the_guest
            binding_refuses_what_cannot_be_bound
            closing_the_device_lets_the_port_be_bound_again
            a_port_the_guest_closed_swallows_events
        }
    };
}

pub(crate) fn maps_in_order_and_shows_both_sides_the_same_bytes(host: &dyn Host) {
    let (guest, table) = (host.guest(), host.grant_table());
    for count in [1, 8, 32, 352] {
        let mut refs: Vec<_> = (0..count).map(|_| guest.grant(false)).collect();
        // Any order will do, so use one that no allocator would hand out.
        refs.reverse();
        refs.rotate_left(count / 3);
        for (page, &gref) in refs.iter().enumerate() {
            guest.write(gref, &pattern(page));
        }
        let mapping = table.map(guest.domid(), &refs, Access::ReadWrite).unwrap();
        assert_eq!(mapping.pages(), count);
        let mut bytes = vec![0; XEN_PAGE_SIZE];
        for (page, &gref) in refs.iter().enumerate() {
            mapping.copy_out(page * XEN_PAGE_SIZE, &mut bytes).unwrap();
            assert_eq!(bytes, pattern(page), "page {page} of {count}");
            mapping
                .copy_in(page * XEN_PAGE_SIZE, &pattern(page + 1))
                .unwrap();
            assert_eq!(guest.read(gref), pattern(page + 1));
        }
        drop(mapping);
        assert!(refs.iter().all(|&gref| guest.end_access(gref)));
    }
}

pub(crate) fn a_readonly_grant_maps_readonly_only(host: &dyn Host) {
    let (guest, table) = (host.guest(), host.grant_table());
    let (readonly, writable) = (guest.grant(true), guest.grant(false));
    guest.write(readonly, &pattern(1));
    let refused = table.map(guest.domid(), &[readonly], Access::ReadWrite);
    assert!(matches!(refused, Err(MapError::Refused)));
    let mapping = table
        .map(guest.domid(), &[readonly, writable], Access::ReadOnly)
        .unwrap();
    let mut bytes = vec![0; XEN_PAGE_SIZE];
    mapping.copy_out(0, &mut bytes).unwrap();
    assert_eq!(bytes, pattern(1));
    assert!(mapping.copy_in(0, &[1]).is_err());
    assert!(mapping.as_ref().is_empty(), "no words to store through");
    // A second, writable mapping of a page that is mapped read-only already.
    let second = table
        .map(guest.domid(), &[writable], Access::ReadWrite)
        .unwrap();
    second.copy_in(0, &pattern(2)).unwrap();
    mapping.copy_out(XEN_PAGE_SIZE, &mut bytes).unwrap();
    assert_eq!(bytes, pattern(2));
    drop(mapping);
    assert!(!guest.end_access(writable));
    drop(second);
    assert!(guest.end_access(writable) && guest.end_access(readonly));
}

pub(crate) fn one_bad_grant_fails_the_map_and_leaves_nothing_mapped(host: &dyn Host) {
    let (guest, table) = (host.guest(), host.grant_table());
    let good: Vec<_> = (0..31).map(|_| guest.grant(false)).collect();
    let ended = guest.grant(false);
    assert!(guest.end_access(ended));
    for bad in [GrantRef(0), GrantRef(u32::MAX), ended] {
        for at in [0, 15, 31] {
            let mut refs = good.clone();
            refs.insert(at, bad);
            let refused = table.map(guest.domid(), &refs, Access::ReadWrite);
            assert!(matches!(refused, Err(MapError::Refused)), "{bad:?} at {at}");
        }
    }
    let refused = table.map(host.no_domain(), &good, Access::ReadWrite);
    assert!(matches!(refused, Err(MapError::Refused)));
    assert!(good.iter().all(|&gref| guest.end_access(gref)));
}

pub(crate) fn a_grant_ends_only_when_the_last_mapping_is_gone(host: &dyn Host) {
    let (guest, table, other) = (host.guest(), host.grant_table(), host.grant_table());
    let gref = guest.grant(false);
    let twice = table
        .map(guest.domid(), &[gref, gref], Access::ReadWrite)
        .unwrap();
    let elsewhere = other.map(guest.domid(), &[gref], Access::ReadOnly).unwrap();
    assert!(!guest.end_access(gref));
    drop(twice);
    assert!(!guest.end_access(gref));
    drop(elsewhere);
    assert!(guest.end_access(gref));
}

pub(crate) fn a_map_needs_at_least_one_grant(host: &dyn Host) {
    let (guest, table) = (host.guest(), host.grant_table());
    let refused = table.map(guest.domid(), &[], Access::ReadWrite);
    assert!(matches!(refused, Err(MapError::Count { count: 0, .. })));
}

pub(crate) fn chunks_share_a_window_and_go_one_by_one(host: &dyn Host) {
    let (guest, table) = (host.guest(), host.grant_table());
    let mut window = Window::reserve(64).unwrap();
    let mut bytes = vec![0; XEN_PAGE_SIZE];
    // The second round maps over addresses that were given back.
    for round in 0..2 {
        let mut chunks = Vec::new();
        for count in [1, MAX_CHUNK, 7] {
            let refs: Vec<_> = (0..count).map(|_| guest.grant(false)).collect();
            for (page, &gref) in refs.iter().enumerate() {
                guest.write(gref, &pattern(page + count));
            }
            let chunk = table.map_chunk(&mut window, guest.domid(), &refs).unwrap();
            assert_eq!(chunk.pages(), count);
            chunks.push((chunk, refs));
        }
        for (chunk, refs) in chunks {
            for (page, &gref) in refs.iter().enumerate() {
                let at = page * XEN_PAGE_SIZE;
                assert!(window.copy_out(&chunk, at, &mut bytes));
                assert!(bytes == pattern(page + refs.len()), "page {page}, {round}");
                assert!(window.copy_in(&chunk, at + 512, &[0x5a; 1024]));
                let mut expected = pattern(page + refs.len());
                expected[512..1536].fill(0x5a);
                assert!(guest.read(gref) == expected);
                assert!(!guest.end_access(gref), "mapped");
            }
            let end = refs.len() * XEN_PAGE_SIZE;
            assert!(!window.copy_out(&chunk, end - 1, &mut [0; 2]));
            assert!(!window.copy_in(&chunk, usize::MAX, &[0]));
            table.unmap_chunk(&mut window, chunk).unwrap();
            assert!(refs.into_iter().all(|gref| guest.end_access(gref)));
        }
        assert_eq!(window.free_pages(), 64);
    }
}

pub(crate) fn a_refused_chunk_leaves_nothing_mapped_and_loses_no_page(host: &dyn Host) {
    let (guest, table) = (host.guest(), host.grant_table());
    let mut window = Window::reserve(MAX_CHUNK).unwrap();
    let good: Vec<_> = (1..MAX_CHUNK).map(|_| guest.grant(false)).collect();
    let (ended, readonly) = (guest.grant(false), guest.grant(true));
    assert!(guest.end_access(ended));
    for bad in [GrantRef(0), GrantRef(u32::MAX), ended, readonly] {
        let mut refs = good.clone();
        refs.insert(MAX_CHUNK / 2, bad);
        // Again and again: a map that failed takes nothing with it.
        for _ in 0..3 {
            let refused = table.map_chunk(&mut window, guest.domid(), &refs);
            assert!(matches!(refused, Err(MapError::Refused)), "{bad:?}");
            assert_eq!(window.free_pages(), MAX_CHUNK);
        }
        let chunk = table.map_chunk(&mut window, guest.domid(), &good).unwrap();
        let more = table.map_chunk(&mut window, guest.domid(), &good);
        assert!(matches!(more, Err(MapError::NoRoom)));
        table.unmap_chunk(&mut window, chunk).unwrap();
    }
    for refs in [vec![], vec![good[0]; MAX_CHUNK + 1]] {
        let refused = table.map_chunk(&mut window, guest.domid(), &refs);
        assert!(matches!(refused, Err(MapError::Count { .. })));
    }
    let refused = table.map_chunk(&mut window, host.no_domain(), &good);
    assert!(matches!(refused, Err(MapError::Refused)));
    assert!(good.into_iter().all(|gref| guest.end_access(gref)));
    assert!(guest.end_access(readonly));
}

/// What merging chunks relies on.
pub(crate) fn a_grant_mapped_twice_stays_in_use_until_both_are_gone(host: &dyn Host) {
    let (guest, table) = (host.guest(), host.grant_table());
    let mut window = Window::reserve(4).unwrap();
    let refs = [guest.grant(false), guest.grant(false)];
    let old = table
        .map_chunk(&mut window, guest.domid(), &refs[..1])
        .unwrap();
    let new = table.map_chunk(&mut window, guest.domid(), &refs).unwrap();
    assert!(window.copy_in(&old, 0, &pattern(4)));
    table.unmap_chunk(&mut window, old).unwrap();
    assert!(!guest.end_access(refs[0]));
    let mut bytes = vec![0; XEN_PAGE_SIZE];
    assert!(window.copy_out(&new, 0, &mut bytes) && bytes == pattern(4));
    let mut other = Window::reserve(4).unwrap();
    let foreign = table.unmap_chunk(&mut other, new).unwrap_err();
    assert!(!other.copy_out(&foreign.chunk, 0, &mut bytes));
    table.unmap_chunk(&mut window, foreign.chunk).unwrap();
    assert!(refs.into_iter().all(|gref| guest.end_access(gref)));
}

pub(crate) fn copies_any_number_of_segments(host: &dyn Host) {
    let (guest, table) = (host.guest(), host.grant_table());
    let (mut slab, mut run) = slab(352);
    for count in [1, 16, 64, 352] {
        let refs: Vec<_> = (0..count).map(|_| guest.grant(false)).collect();
        for (page, &gref) in refs.iter().enumerate() {
            guest.write(gref, &pattern(page));
        }
        let whole_pages = |direction| -> Vec<_> {
            let local = |page| run.offset() + page * XEN_PAGE_SIZE;
            let op = |(page, &gref)| CopyOp::new(gref, 0, 4096, local(page), direction);
            refs.iter().enumerate().map(op).collect()
        };
        let (mut out, mut back) = (
            whole_pages(Direction::FromGuest),
            whole_pages(Direction::ToGuest),
        );
        table.copy(guest.domid(), &mut slab, &mut out).unwrap();
        assert!(out.iter().all(|op| op.status.is_okay()));
        for (page, bytes) in slab
            .bytes_mut(&mut run)
            .chunks_mut(XEN_PAGE_SIZE)
            .enumerate()
        {
            if page < count {
                assert_eq!(bytes, pattern(page), "page {page} of {count}");
            }
            bytes.copy_from_slice(&pattern(page + 7));
        }
        table.copy(guest.domid(), &mut slab, &mut back).unwrap();
        for (page, &gref) in refs.iter().enumerate() {
            assert_eq!(guest.read(gref), pattern(page + 7));
            assert!(guest.end_access(gref));
        }
    }
}

pub(crate) fn copies_exactly_the_bytes_asked_for(host: &dyn Host) {
    let (guest, table) = (host.guest(), host.grant_table());
    let gref = guest.grant(false);
    let (mut slab, mut run) = slab(2);
    // Nothing, odd, a sector, across the slab's pages, the last bytes of the page.
    for (offset, len, local) in [
        (0, 0, 0),
        (4095, 0, 5),
        (3, 7, 1),
        (511, 1026, 9),
        (512, 512, 4000),
        (4089, 7, 8185),
    ] {
        let range = usize::from(offset)..usize::from(offset) + usize::from(len);
        let here = local..local + usize::from(len);
        guest.write(gref, &pattern(3));
        slab.bytes_mut(&mut run).fill(0xee);
        let mut ops = [CopyOp::new(
            gref,
            offset,
            len,
            run.offset() + local,
            Direction::FromGuest,
        )];
        table.copy(guest.domid(), &mut slab, &mut ops).unwrap();
        let mut expected = vec![0xee; 2 * XEN_PAGE_SIZE];
        expected[here.clone()].copy_from_slice(&pattern(3)[range.clone()]);
        assert!(slab.bytes(&run) == expected, "{offset}+{len} to {local}");

        slab.bytes_mut(&mut run)[here].fill(0x55);
        ops[0].direction = Direction::ToGuest;
        table.copy(guest.domid(), &mut slab, &mut ops).unwrap();
        let mut expected = pattern(3);
        expected[range].fill(0x55);
        assert!(guest.read(gref) == expected, "{offset}+{len} from {local}");
    }
}

pub(crate) fn a_copy_says_what_went_wrong_with_each_segment(host: &dyn Host) {
    let (guest, table) = (host.guest(), host.grant_table());
    let (readonly, ended, good) = (guest.grant(true), guest.grant(false), guest.grant(false));
    guest.write(good, &pattern(1));
    assert!(guest.end_access(ended));
    let (mut slab, run) = slab(5);
    let refs = [ended, GrantRef(u32::MAX), readonly, readonly, good];
    let mut ops = refs.map(|gref| CopyOp::new(gref, 0, 512, run.offset(), Direction::ToGuest));
    ops[3].direction = Direction::FromGuest;
    table.copy(guest.domid(), &mut slab, &mut ops).unwrap();
    let statuses = ops.map(|op| op.status);
    let expected = [
        CopyStatus::GENERAL_ERROR,
        CopyStatus::BAD_GNTREF,
        CopyStatus::GENERAL_ERROR,
        CopyStatus::OKAY,
        CopyStatus::OKAY,
    ];
    assert_eq!(statuses, expected);
    assert_eq!(guest.read(good)[..512], [0; 512]);
    assert_eq!(guest.read(good)[512..], pattern(1)[512..]);

    let mut ops = [CopyOp::new(
        good,
        0,
        512,
        run.offset(),
        Direction::FromGuest,
    )];
    table.copy(host.no_domain(), &mut slab, &mut ops).unwrap();
    assert_eq!(ops[0].status, CopyStatus::BAD_DOMAIN);
    assert!(
        guest.end_access(good) && guest.end_access(readonly),
        "no copy left a grant in use"
    );
}

pub(crate) fn a_segment_that_leaves_its_page_fails_the_whole_copy(host: &dyn Host) {
    let (guest, table) = (host.guest(), host.grant_table());
    let gref = guest.grant(false);
    guest.write(gref, &pattern(1));
    let (mut slab, run) = slab(2);
    for (offset, len) in [(4095, 2), (4096, 1), (0, 8192), (u16::MAX, u16::MAX)] {
        let mut ops = [
            CopyOp::new(gref, 0, 4096, run.offset(), Direction::FromGuest),
            CopyOp::new(gref, offset, len, run.offset(), Direction::FromGuest),
        ];
        let error = table.copy(guest.domid(), &mut slab, &mut ops).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{offset}+{len}");
        assert!(
            slab.bytes(&run).iter().all(|&byte| byte == 0),
            "nothing was copied"
        );
    }
    for local in [2 * XEN_PAGE_SIZE - 1, 2 * XEN_PAGE_SIZE, usize::MAX] {
        let mut ops = [CopyOp::new(gref, 0, 2, local, Direction::FromGuest)];
        assert!(
            table.copy(guest.domid(), &mut slab, &mut ops).is_err(),
            "beyond the slab: {local}"
        );
    }
}

pub(crate) fn a_mapped_page_can_be_copied(host: &dyn Host) {
    let (guest, table) = (host.guest(), host.grant_table());
    let gref = guest.grant(false);
    let mapping = table.map(guest.domid(), &[gref], Access::ReadOnly).unwrap();
    let (mut slab, mut run) = slab(1);
    slab.bytes_mut(&mut run).copy_from_slice(&pattern(5));
    let mut ops = [CopyOp::new(gref, 0, 4096, run.offset(), Direction::ToGuest)];
    table.copy(guest.domid(), &mut slab, &mut ops).unwrap();
    assert!(ops[0].status.is_okay());
    let mut bytes = vec![0; XEN_PAGE_SIZE];
    mapping.copy_out(0, &mut bytes).unwrap();
    assert_eq!(bytes, pattern(5));
    assert!(
        !guest.end_access(gref),
        "the copy left the mapping's claim alone"
    );
    drop(mapping);
    assert!(guest.end_access(gref));
}

pub(crate) fn binding_makes_the_port_pending(host: &dyn Host) {
    let (guest, events) = (host.guest(), host.event_channels());
    let local = events
        .bind_interdomain(guest.domid(), guest.alloc_unbound())
        .unwrap();
    assert_eq!(next(&*events), Some(local));
    assert_eq!(next(&*events), None);
}

pub(crate) fn a_port_stays_masked_until_it_is_written_back(host: &dyn Host) {
    let (guest, events) = (host.guest(), host.event_channels());
    let remote = guest.alloc_unbound();
    let local = events.bind_interdomain(guest.domid(), remote).unwrap();
    assert_eq!(next(&*events), Some(local));
    (0..3).for_each(|_| guest.notify(remote));
    assert_eq!(now(&*events), None, "masked");
    events.unmask(local).unwrap();
    assert_eq!(
        next(&*events),
        Some(local),
        "remembered, three events as one"
    );
    assert_eq!(now(&*events), None);
    events.unmask(local).unwrap();
    // A plain write does the same; foreign ports in it are skipped.
    rustix::io::write(
        events.as_fd(),
        &[local.0 + 1000, local.0].map(u32::to_ne_bytes).concat(),
    )
    .unwrap();
    guest.notify(remote);
    assert_eq!(next(&*events), Some(local), "at once");
}

pub(crate) fn a_write_without_a_read_enables_the_port_again(host: &dyn Host) {
    let (guest, events) = (host.guest(), host.event_channels());
    let remote = guest.alloc_unbound();
    let local = events.bind_interdomain(guest.domid(), remote).unwrap();
    events.unmask(local).unwrap();
    guest.notify(remote);
    assert_eq!(next(&*events), Some(local));
    assert_eq!(next(&*events), Some(local), "it stood in the queue twice");
    assert_eq!(now(&*events), None);
}

pub(crate) fn events_reach_the_guest(host: &dyn Host) {
    let (guest, events) = (host.guest(), host.event_channels());
    let (one, two) = (guest.alloc_unbound(), guest.alloc_unbound());
    let local = events.bind_interdomain(guest.domid(), one).unwrap();
    assert!(
        !guest.took_event(one, false),
        "binding tells the guest nothing"
    );
    events.notify(local).unwrap();
    events.notify(local).unwrap();
    assert!(guest.took_event(one, true));
    assert!(!guest.took_event(two, false));
    let foreign = events.notify(Port(local.0 + 1000)).unwrap_err();
    assert_eq!(foreign.raw_os_error(), Some(Errno::NOTCONN.raw_os_error()));
    events.unbind(local);
    let closed = events.notify(local).unwrap_err();
    assert_eq!(closed.raw_os_error(), Some(Errno::NOTCONN.raw_os_error()));
}

pub(crate) fn binding_refuses_what_cannot_be_bound(host: &dyn Host) {
    let (guest, events, other) = (host.guest(), host.event_channels(), host.event_channels());
    let remote = guest.alloc_unbound();
    let local = events.bind_interdomain(guest.domid(), remote).unwrap();
    let errno = |dom, port| {
        other
            .bind_interdomain(dom, port)
            .unwrap_err()
            .raw_os_error()
    };
    let (inval, srch) = (
        Some(Errno::INVAL.raw_os_error()),
        Some(Errno::SRCH.raw_os_error()),
    );
    assert_eq!(errno(guest.domid(), remote), inval, "busy");
    let closed = guest.alloc_unbound();
    guest.close(closed);
    assert_eq!(errno(guest.domid(), closed), inval, "closed");
    assert_eq!(errno(host.no_domain(), remote), srch);
    events.unbind(local);
    other
        .bind_interdomain(guest.domid(), remote)
        .expect("unbound again");
}

pub(crate) fn closing_the_device_lets_the_port_be_bound_again(host: &dyn Host) {
    let (guest, events, other) = (host.guest(), host.event_channels(), host.event_channels());
    let remote = guest.alloc_unbound();
    events.bind_interdomain(guest.domid(), remote).unwrap();
    drop(events);
    guest.notify(remote);
    // Closing is asynchronous when a process dies, and the daemon retries; so does this.
    let local = (0..1000).find_map(|_| {
        let bound = other.bind_interdomain(guest.domid(), remote).ok();
        if bound.is_none() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        bound
    });
    assert_eq!(next(&*other), Some(local.expect("never became unbound")));
    assert!(
        !guest.took_event(remote, false),
        "the guest noticed nothing"
    );
    guest.notify(remote);
    other.unmask(local.unwrap()).unwrap();
    assert_eq!(next(&*other), local);
}

pub(crate) fn a_port_the_guest_closed_swallows_events(host: &dyn Host) {
    let (guest, events) = (host.guest(), host.event_channels());
    let remote = guest.alloc_unbound();
    let local = events.bind_interdomain(guest.domid(), remote).unwrap();
    assert_eq!(next(&*events), Some(local));
    events.unmask(local).unwrap();
    guest.close(remote);
    assert_eq!(now(&*events), None, "no event tells us");
    events.notify(local).unwrap();
    events.unmask(local).unwrap();
}

/// A page no other page number has.
pub(crate) fn pattern(page: usize) -> Vec<u8> {
    (0..XEN_PAGE_SIZE)
        .map(|byte| (byte * 7 + byte / 256 + page * 31) as u8)
        .collect()
}

fn slab(pages: usize) -> (Slab, Run) {
    let mut slab = Slab::reserve(pages * XEN_PAGE_SIZE).unwrap();
    let run = slab.alloc(pages).unwrap();
    (slab, run)
}

/// The next pending port; waits a while for one.
pub(crate) fn next(events: &dyn EventChannels) -> Option<Port> {
    let fd = events.as_fd();
    let mut readable = [rustix::event::PollFd::from_borrowed_fd(
        fd,
        rustix::event::PollFlags::IN,
    )];
    let while_ = rustix::event::Timespec {
        tv_sec: 0,
        tv_nsec: 200_000_000,
    };
    retry_on_intr(|| rustix::event::poll(&mut readable, Some(&while_))).unwrap();
    now(events)
}

/// A port that is pending now.
pub(crate) fn now(events: &dyn EventChannels) -> Option<Port> {
    let mut port = [0; 4];
    match rustix::io::read(events.as_fd(), &mut port) {
        Ok(4) => Some(Port(u32::from_ne_bytes(port))),
        Err(Errno::AGAIN) => None,
        other => panic!("a read of an event-channel device gave {other:?}"),
    }
}
