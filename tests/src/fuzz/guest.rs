//! A guest's whole behaviour against a worker: it writes slots and segment pages, moves indices, revokes
//! and grants again, dies or goes. Beside it on the same worker stands a guest that only wants its data.

use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use xenblk_grants::fake::{DomainWords, FakeDomain, FakeHost, FakeXen, Gfn};
use xenblk_grants::{DomId, GrantRef, Port, SharedPages};
use xenblk_ring::layout::{REQ_PROD, RSP_PROD, SLOT_BYTES_64, SLOT_BYTES_X86_32};
use xenblk_ring::{
    Abi, DirectSegments, FrontRing, RawSlot, Request, RwOp, RwRequest, Segment, Words,
    journal_bytes,
};
use xenblkd::channel::{Message, SupervisorEnd, thread_pair};
use xenblkd::message::{Attach, Command, HostKind, Left, Persistent, Report, RingId, VERSION};
use xenblkd::stats;
use xenblkd::target::{OpenMode, OpenedTarget, TargetSpec, open};

use super::Input;

/// Whatever takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(20);
const BACKEND: DomId = DomId(0);
const HOSTILE: DomId = DomId(5);
const HONEST: DomId = DomId(6);
/// Pages that are granted writable, read-only, and as lists of segments.
const PAGES: usize = 4;
/// What the read-only ones hold.
const CANARY: u8 = 0xcc;

thread_local! {
    static HOST: RefCell<Option<Host>> = const { RefCell::new(None) };
}

/// One guest's life, its actions taken from `data`.
pub(super) fn actions(data: &[u8]) {
    HOST.with_borrow_mut(|host| {
        let host = host.get_or_insert_with(Host::start);
        host.host_guest(&mut Input(data));
    });
}

fn must<T, E: std::fmt::Debug>(what: &str, result: Result<T, E>) -> T {
    result.unwrap_or_else(|error| unreachable!("{what}: {error:?}"))
}

/// Hypervisor, worker and the honest guest; these stay.
struct Host {
    xen: FakeXen,
    devices: FakeHost,
    supervisor: SupervisorEnd,
    honest: Option<Honest>,
    next_ring: u64,
}

impl Host {
    fn start() -> Self {
        let (supervisor, end) = must("a channel", thread_pair());
        // Ends with its supervisor.
        std::thread::spawn(move || xenblkd::worker::run(end));
        let xen = must("a hypervisor", FakeXen::start());
        let mut host = Self {
            devices: must("its devices", xen.host()),
            xen,
            supervisor,
            honest: None,
            next_ring: 1,
        };
        host.send(Command::Hello {
            version: VERSION,
            fence: 0,
        });
        assert!(matches!(host.report(), Report::Ready { .. }));
        let guest = must("a guest", host.xen.domain(HONEST, 64));
        let terms = Terms {
            abi: Abi::NATIVE,
            pages: 1,
            readonly: false,
            flusher: true,
            persistent: true,
        };
        let ring = host.attach(&guest, terms, &disk());
        host.honest = Some(Honest::new(guest, ring));
        host
    }

    fn send(&self, command: impl Into<Message<Command>>) {
        must("the worker", self.supervisor.send(command));
    }

    fn report(&self) -> Report {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(message) = must("the worker lives", self.supervisor.try_recv()) {
                return message.body;
            }
            assert!(Instant::now() < deadline, "the worker hangs");
            readable(&self.supervisor);
        }
    }

    fn attach(&mut self, guest: &FakeDomain, terms: Terms, disk: &OpenedTarget) -> Ring {
        let id = RingId(self.next_ring);
        self.next_ring += 1;
        let ring = Ring::new(guest, id, terms);
        let bytes = journal_bytes(terms.abi.entries(terms.pages));
        let (_, journal) = must("a journal", SharedPages::create("journal", bytes));
        let (_, page) = must("statistics", SharedPages::create("stats", stats::BYTES));
        let (target, target_fds) = must("a target", disk.incarnation());
        let attach = Attach {
            ring: id,
            domid: guest.domid().0,
            devid: 51712,
            queue: 0,
            queues: 1,
            protocol: terms.abi.protocol().into(),
            ring_refs: ring.refs.iter().map(|gref| gref.0).collect(),
            event_channel: ring.port.0,
            max_indirect_segments: 256,
            bounce_bytes: 2 << 20,
            persistent: terms.persistent.then_some(PERSISTENT),
            readonly: terms.readonly,
            discard: true,
            secure_discard: false,
            host: HostKind::Fake,
            target,
            incarnation: 1,
        };
        let gntdev = must("a gntdev", self.devices.open_gntdev());
        let evtchn = must("an evtchn", self.devices.open_evtchn(guest.domid()));
        let mut fds = vec![gntdev, evtchn, journal, page];
        fds.extend(target_fds);
        let body = Command::Attach(Box::new(attach));
        self.send(Message { body, fds });
        let report = self.report();
        assert!(matches!(report, Report::Attached { .. }), "{report:?}");
        ring
    }

    fn host_guest(&mut self, input: &mut Input<'_>) {
        let (abi, pages) = (
            input.pick(&[Abi::X86_64, Abi::X86_32, Abi::Arm]),
            input.pick(&[1, 2]),
        );
        let (readonly, with) = (input.u8().is_multiple_of(8), input.u8());
        let terms = Terms {
            abi,
            pages,
            readonly,
            flusher: !with.is_multiple_of(8),
            persistent: with & 16 != 0,
        };
        let domain = must("a guest", self.xen.domain(HOSTILE, 64));
        let disk = disk();
        let ring = self.attach(&domain, terms, &disk);
        let mut hearing = Hearing {
            ring: ring.id,
            disk: terms.flusher.then_some(disk),
            flusher: None,
        };
        let mut guest = Guest::new(domain, ring, terms.abi);
        let mut alive = true;
        while alive && !input.is_empty() {
            match input.u8() {
                0xff => {
                    self.xen.kill_domain(HOSTILE);
                    alive = false;
                }
                0xf0..0xff => self.check_honest(),
                action => guest.act(action, input),
            }
            while let Some(message) = must("the worker lives", self.supervisor.try_recv()) {
                let left = hearing.hear(&self.supervisor, message.body);
                assert!(left.is_none(), "detached unasked");
            }
        }
        self.check_honest();
        let ring = hearing.ring;
        self.send(Command::Detach { ring });
        let left = loop {
            if let Some(left) = hearing.hear(&self.supervisor, self.report()) {
                break left;
            }
        };
        assert!(left.is_nothing(), "{left:?}");
        guest.assert_unharmed();
        drop(guest);
        if alive {
            self.xen.kill_domain(HOSTILE);
        }
        let snapshot = self.xen.snapshot();
        assert!(snapshot.zombies.is_empty(), "{snapshot:?}");
        assert!(!snapshot.mappings.contains_key(&HOSTILE), "{snapshot:?}");
        self.check_honest();
    }

    fn check_honest(&mut self) {
        if let Some(honest) = &mut self.honest {
            honest.check();
        }
    }
}

fn disk() -> OpenedTarget {
    let spec = must("a disk", TargetSpec::parse("memory:1M"));
    must("a disk", open(&spec, OpenMode::default()))
}

fn readable(fd: impl AsFd) {
    let limit = Timespec {
        tv_sec: 1,
        tv_nsec: 0,
    };
    // In vain or not: the caller looks again, and at the time.
    let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit));
}

/// Fewer grants than a guest has pages.
const PERSISTENT: Persistent = Persistent {
    max_grants: 8,
    window_pages: 64,
    purge_percent: 5,
    idle_seconds: 1,
};

#[derive(Clone, Copy)]
struct Terms {
    abi: Abi,
    pages: u32,
    readonly: bool,
    /// There is one to be had; flushes and discards fail where there is none.
    flusher: bool,
    /// Whether grants stay mapped.
    persistent: bool,
}

/// What the worker may say of one ring, and what it gets for it.
struct Hearing {
    ring: RingId,
    /// For the flusher; none if there is to be none.
    disk: Option<OpenedTarget>,
    flusher: Option<Flusher>,
}

impl Hearing {
    /// Gives a flusher to who wants one; what was left over, if that is what the report says.
    fn hear(&mut self, worker: &SupervisorEnd, report: Report) -> Option<Left> {
        let ring = self.ring;
        match report {
            Report::Detached { ring: it, left } if it == ring => return Some(left),
            Report::Failed { ring: it, .. } | Report::FlushFailed { ring: it, .. }
                if it == ring => {}
            Report::FlusherWanted { ring: it } if it == ring => {
                let (flusher, socket) = self.disk.as_ref().map(Flusher::start).unzip();
                self.flusher = flusher;
                let body = Command::Flusher { ring };
                let fds = socket.into_iter().collect();
                must("the worker", worker.send(Message { body, fds }));
            }
            other => unreachable!("{other:?}"),
        }
        None
    }
}

/// The disk's flusher, in a thread that ends with this and the ring.
struct Flusher {
    _supervisor: SupervisorEnd,
}

impl Flusher {
    /// With a ring's end of a connection to it.
    fn start(disk: &OpenedTarget) -> (Self, OwnedFd) {
        let (supervisor, end) = must("a channel", thread_pair());
        std::thread::spawn(move || xenblkd::worker::run(end));
        let (target, fds) = must("a target", disk.incarnation());
        let body = Command::HelloFlusher {
            version: VERSION,
            fence: 1,
            target,
        };
        must("the flusher", supervisor.send(Message { body, fds }));
        let (kind, flags) = (
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        );
        let pair = socketpair(AddressFamily::UNIX, kind, flags, None);
        let (ours, theirs) = must("a pair of sockets", pair);
        let (body, fds) = (Command::Serve, vec![theirs]);
        must("the flusher", supervisor.send(Message { body, fds }));
        let _supervisor = supervisor;
        (Self { _supervisor }, ours)
    }
}

/// A guest's end of one ring.
struct Ring {
    id: RingId,
    front: FrontRing<DomainWords>,
    refs: Vec<GrantRef>,
    port: Port,
    port_fd: OwnedFd,
}

impl Ring {
    fn new(guest: &FakeDomain, id: RingId, terms: Terms) -> Self {
        let pages = terms.pages as usize;
        let Some(first) = guest.alloc_pages(pages) else {
            unreachable!("a new guest has memory")
        };
        let grant = |page| guest.grant(Gfn(page), BACKEND, false);
        let refs = (first.0..).take(pages).filter_map(grant).collect();
        let port = must("a port", guest.alloc_unbound(BACKEND));
        let Some(port_fd) = guest.port_fd(port) else {
            unreachable!("it is open")
        };
        let front = FrontRing::init(guest.words(first, pages), terms.abi, terms.pages);
        Self {
            id,
            front: must("a ring", front),
            refs,
            port,
            port_fd,
        }
    }
}

#[derive(Clone, Copy)]
struct Page {
    gfn: Gfn,
    gref: GrantRef,
    readonly: bool,
}

impl Page {
    fn new(guest: &FakeDomain, readonly: bool, byte: u8) -> Self {
        let Some(gfn) = guest.alloc_page() else {
            unreachable!("few pages are used")
        };
        guest.write(gfn, 0, &[byte; 4096]);
        Self {
            gfn,
            gref: GrantRef(0),
            readonly,
        }
        .granted(guest)
    }

    fn granted(mut self, guest: &FakeDomain) -> Self {
        if let Some(gref) = guest.grant(self.gfn, BACKEND, self.readonly) {
            self.gref = gref;
        }
        self
    }
}

/// The one that does anything.
struct Guest {
    domain: FakeDomain,
    ring: Ring,
    abi: Abi,
    /// Writable, read-only, lists of segments.
    pages: Vec<Page>,
}

impl Guest {
    fn new(domain: FakeDomain, ring: Ring, abi: Abi) -> Self {
        let page = |kind: usize| Page::new(&domain, kind > 0, if kind == 1 { CANARY } else { 0 });
        let pages = (0..3 * PAGES).map(|n| page(n / PAGES)).collect();
        Self {
            domain,
            ring,
            abi,
            pages,
        }
    }

    fn act(&mut self, action: u8, input: &mut Input<'_>) {
        let words = self.ring.front.words();
        match action % 12 {
            0 => {
                let slot = RawSlot::from_bytes(&input.array());
                // A full ring takes no more.
                let _ = self.ring.front.push(&slot);
            }
            1..4 => {
                let slot = self.sensible_slot(input);
                let _ = self.ring.front.push(&slot);
            }
            4 => {
                let _ = self.ring.front.publish();
                self.domain.notify(self.ring.port);
            }
            5 => words.store(usize::from(input.u16()) % words.word_count(), input.u32()),
            6 => words.store_release(
                REQ_PROD,
                words.load(RSP_PROD).wrapping_add(input.u32() % 80),
            ),
            7 => {
                let at = usize::from(input.u16() % 256) * 8;
                let gref = self.gref(input).to_le_bytes();
                let page = self.pages[2 * PAGES + usize::from(input.u8()) % PAGES];
                self.domain.write(page.gfn, at, &gref);
                self.domain.write(page.gfn, at + 4, &input.array::<2>());
            }
            8 => self.regrant(input, FakeDomain::revoke),
            9 => self.regrant(input, |domain, gref| {
                // Refused while it is in use; then there are two grants of the page.
                let _ = domain.end_access(gref);
            }),
            10 => {
                // As many as there are; a ring written to at random has any number of them.
                for _ in 0..64 {
                    if !matches!(self.ring.front.take(), Ok(Some(_))) {
                        break;
                    }
                }
                let _ = self.ring.front.final_check();
            }
            _ => std::thread::yield_now(),
        }
    }

    /// A page is taken back, or torn away, and granted anew.
    fn regrant(&mut self, input: &mut Input<'_>, end: impl Fn(&FakeDomain, GrantRef)) {
        let at = usize::from(input.u8()) % self.pages.len();
        end(&self.domain, self.pages[at].gref);
        self.pages[at] = self.pages[at].granted(&self.domain);
    }

    /// Mostly one that is granted; also the ring's own, and numbers of any kind.
    fn gref(&self, input: &mut Input<'_>) -> u32 {
        match usize::from(input.u8()) {
            at if at < 200 => self.pages[at % self.pages.len()].gref.0,
            at if at < 210 => self.ring.refs[0].0,
            at if at < 230 => at as u32,
            _ => input.u32(),
        }
    }

    /// A request that gets further than its first check more often than not.
    fn sensible_slot(&self, input: &mut Input<'_>) -> RawSlot {
        let mut bytes = [0; SLOT_BYTES_64];
        let (id, sector, list, size) = match self.abi {
            Abi::X86_32 => (4, 12, 20, SLOT_BYTES_X86_32),
            Abi::X86_64 | Abi::Arm => (8, 16, 24, SLOT_BYTES_64),
        };
        let operation = input.pick(&[0, 1, 0, 1, 6, 6, 6, 2, 3, 5]);
        bytes[0] = operation;
        bytes[id..id + 8].copy_from_slice(&input.array::<8>());
        bytes[sector..sector + 8].copy_from_slice(&u64::from(input.u16() % 2100).to_le_bytes());
        if operation == 6 {
            bytes[1] = input.u8() % 3;
            bytes[2..4].copy_from_slice(&(input.u16() % 260).to_le_bytes());
            let grefs = list + 4;
            let gref = self.pages[2 * PAGES + usize::from(input.u8()) % PAGES].gref;
            bytes[grefs..grefs + 4].copy_from_slice(&gref.0.to_le_bytes());
        } else if operation == 5 {
            bytes[1] = input.u8() % 2;
            bytes[list..list + 8].copy_from_slice(&u64::from(input.u16()).to_le_bytes());
        } else {
            let count = input.u8() % 13;
            bytes[1] = count;
            for at in (list..size).step_by(8).take(count.into()) {
                bytes[at..at + 4].copy_from_slice(&self.gref(input).to_le_bytes());
                let sectors = input.u8();
                bytes[at + 4..at + 6].copy_from_slice(&[sectors % 8, sectors / 8 % 9]);
            }
        }
        RawSlot::from_bytes(&bytes)
    }

    /// What was granted read-only is as it was.
    fn assert_unharmed(&self) {
        for page in &self.pages[PAGES..2 * PAGES] {
            let mut bytes = [0; 4096];
            self.domain.read(page.gfn, 0, &mut bytes);
            assert!(bytes == [CANARY; 4096], "a page granted read-only changed");
        }
    }
}

/// Reads back what it wrote, each time.
struct Honest {
    domain: FakeDomain,
    ring: Ring,
    page: Page,
    rounds: u64,
}

impl Honest {
    fn new(domain: FakeDomain, ring: Ring) -> Self {
        let page = Page::new(&domain, false, 0);
        Self {
            domain,
            ring,
            page,
            rounds: 0,
        }
    }

    fn check(&mut self) {
        self.rounds += 1;
        let secret = self
            .rounds
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .to_le_bytes();
        let data: Vec<u8> = secret.into_iter().cycle().take(4096).collect();
        self.domain.write(self.page.gfn, 0, &data);
        self.request(RwOp::Write);
        self.domain.write(self.page.gfn, 0, &[0; 4096]);
        self.request(RwOp::Read);
        let mut back = vec![0; 4096];
        self.domain.read(self.page.gfn, 0, &mut back);
        assert!(back == data, "the honest guest's data");
    }

    fn request(&mut self, op: RwOp) {
        let segments = Segment::new(self.page.gref.0, 0, 7);
        let Some(segments) = segments.and_then(|segment| DirectSegments::new(&[segment])) else {
            unreachable!("a whole page")
        };
        let request = Request::Rw(RwRequest {
            id: self.rounds,
            op,
            sector: self.rounds % 200 * 8,
            segments,
        });
        must("room", self.ring.front.push(&request.encode(Abi::NATIVE)));
        if self.ring.front.publish() {
            self.domain.notify(self.ring.port);
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(response) = must("a sound ring", self.ring.front.take()) {
                assert_eq!((response.id, response.status), (self.rounds, 0));
                return;
            }
            if !must("a sound ring", self.ring.front.final_check()) {
                assert!(Instant::now() < deadline, "the honest guest starves");
                readable(&self.ring.port_fd);
                let _ = rustix::io::read(&self.ring.port_fd, &mut [0; 8]);
            }
        }
    }
}
