//! A guest domain with simulated frontends on one side, a supervisor's end on the other, and between
//! them a worker in a thread.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command as Process, Stdio};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use xenblk_grants::fake::{DomainWords, FakeDomain, FakeHost, FakeXen, Gfn};
use xenblk_grants::{Access, DomId, GrantRef, Port, SharedPages};
use xenblk_ring::{
    Abi, BarrierRequest, DirectSegments, DiscardRequest, FlushRequest, FrontRing, IndirectRequest,
    RawSlot, Request, Response, RwOp, RwRequest, Segment, WriteData, encode_indirect_page,
    journal_bytes,
};
use xenblkd::channel::{Message, SupervisorEnd, process_pair, thread_pair};
use xenblkd::message::{Attach, Command, HostKind, Persistent, Report, RingId, VERSION};
use xenblkd::stats::{self, Reader, Snapshot};
use xenblkd::target::{OpenMode, OpenedTarget, TargetSpec, open};

use crate::steady;

/// How long anything may take before a test fails; nothing is measured with it.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
/// Set in a worker's process.
pub(crate) const WORKER_PROCESS: &str = "XENBLKD_TEST_WORKER";
/// A small quota, so that it is used up.
pub(crate) const PERSISTENT: Persistent = Persistent {
    max_grants: 64,
    window_pages: 128,
    purge_percent: 5,
    idle_seconds: 60,
};
pub(crate) const GUEST: DomId = DomId(5);
const NEIGHBOUR: DomId = DomId(6);
const BACKEND: DomId = DomId(0);

pub(crate) fn readable(fd: impl AsFd, limit: Duration) -> bool {
    let fd = fd.as_fd();
    let limit = Timespec {
        tv_sec: limit.as_secs() as i64,
        tv_nsec: limit.subsec_nanos().into(),
    };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)).unwrap() > 0
}

/// Where the worker runs.
enum Worker {
    Thread(JoinHandle<Result<(), String>>),
    Process(Child),
}

pub(crate) struct World {
    pub(crate) xen: FakeXen,
    host: FakeHost,
    pub(crate) guest: FakeDomain,
    /// `None` once the supervisor is dead.
    pub(crate) supervisor: Option<SupervisorEnd>,
    worker: Option<Worker>,
    next_ring: std::cell::Cell<u64>,
}

/// How a ring is negotiated.
#[derive(Clone)]
pub(crate) struct Terms {
    pub(crate) abi: Abi,
    pub(crate) pages: u32,
    pub(crate) readonly: bool,
    pub(crate) discard: bool,
    /// Whether the worker is given a flusher before it asks for one.
    pub(crate) flusher: bool,
    pub(crate) bounce_bytes: u64,
    pub(crate) max_indirect: u16,
    pub(crate) persistent: Option<Persistent>,
}

impl Terms {
    pub(crate) const DEFAULT: Self = Self {
        abi: Abi::X86_64,
        pages: 1,
        readonly: false,
        discard: true,
        flusher: true,
        bounce_bytes: 4 << 20,
        max_indirect: 256,
        persistent: None,
    };
}

impl Default for Terms {
    fn default() -> Self {
        Self::DEFAULT
    }
}

pub(crate) fn disk(spec: &str) -> OpenedTarget {
    open(&TargetSpec::parse(spec).unwrap(), OpenMode::default()).unwrap()
}

impl World {
    pub(crate) fn new() -> Self {
        let (supervisor, end) = thread_pair().unwrap();
        let worker = std::thread::spawn(move || xenblkd::worker::run(end));
        Self::around(supervisor, Worker::Thread(worker))
    }

    /// The worker is another process: this executable, which then runs
    /// [`a_worker_process`](crate::ending::a_worker_process) only.
    pub(crate) fn in_a_process() -> Self {
        Self::in_the_process(Process::new(std::env::current_exe().unwrap()))
    }

    /// A worker that asks at `socket` when to do without new mappings: see [`steady`](crate::steady).
    pub(crate) fn watched_at(socket: &Path) -> Self {
        let mut process = Process::new(std::env::current_exe().unwrap());
        process.env(steady::SOCKET, socket);
        Self::in_the_process(process)
    }

    fn in_the_process(mut process: Process) -> Self {
        let (supervisor, end) = process_pair().unwrap();
        let child = process
            .args(["--exact", "ending::a_worker_process", "--nocapture"])
            .env(WORKER_PROCESS, "1")
            .stdin(Stdio::from(end))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self::around(supervisor, Worker::Process(child))
    }

    /// The worker is a thread that believes to be a process, logs to `lines`, and says on `levels` how much it
    /// has been asked to log.
    pub(crate) fn logging(lines: Arc<File>, levels: Sender<tracing::Level>) -> Self {
        let (supervisor, end) = process_pair().unwrap();
        let log = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::DEBUG)
            .with_ansi(false)
            .with_writer(lines)
            .finish();
        let set_level = move |level| levels.send(level).unwrap();
        let worker = std::thread::spawn(move || {
            let main = || xenblkd::worker::main(end, Box::new(set_level));
            let code = tracing::subscriber::with_default(log, main);
            (code == std::process::ExitCode::SUCCESS)
                .then_some(())
                .ok_or_else(|| "failed".to_owned())
        });
        Self::around(supervisor, Worker::Thread(worker))
    }

    fn around(supervisor: SupervisorEnd, worker: Worker) -> Self {
        let xen = FakeXen::start().unwrap();
        let host = xen.host().unwrap();
        let guest = xen.domain(GUEST, 8192).unwrap();
        let next_ring = std::cell::Cell::new(1);
        let (supervisor, worker) = (Some(supervisor), Some(worker));
        let world = Self {
            xen,
            host,
            guest,
            supervisor,
            worker,
            next_ring,
        };
        world.command(Command::Hello {
            version: VERSION,
            fence: 0,
        });
        assert!(matches!(world.report(), Report::Ready { version: VERSION }));
        world
    }

    /// The worker's process.
    pub(crate) fn pid(&self) -> u32 {
        match &self.worker {
            Some(Worker::Process(child)) => child.id(),
            _ => panic!("not a process"),
        }
    }

    /// Ends the worker's process as a crash does.
    pub(crate) fn kill(&mut self) {
        match &mut self.worker {
            Some(Worker::Process(child)) => child.kill().unwrap(),
            _ => panic!("not a process"),
        }
    }

    pub(crate) fn command(&self, command: impl Into<Message<Command>>) {
        self.supervisor.as_ref().unwrap().send(command).unwrap();
    }

    pub(crate) fn report(&self) -> Report {
        self.report_within(LIMIT)
            .expect("the worker has nothing to say")
    }

    pub(crate) fn report_within(&self, limit: Duration) -> Option<Report> {
        let supervisor = self.supervisor.as_ref().unwrap();
        loop {
            if let Some(message) = supervisor.try_recv().unwrap() {
                return Some(message.body);
            }
            if !readable(supervisor, limit) {
                return None;
            }
        }
    }

    /// What the worker returned.
    pub(crate) fn join(&mut self) -> Result<(), String> {
        match self.worker.take().unwrap() {
            Worker::Thread(thread) => thread.join().unwrap(),
            Worker::Process(mut child) => {
                let status = child.wait().unwrap();
                if status.success() {
                    Ok(())
                } else {
                    Err(status.to_string())
                }
            }
        }
    }

    /// Another guest, whose rings this worker serves too.
    pub(crate) fn neighbour(&self) -> FakeDomain {
        self.xen.domain(NEIGHBOUR, 1024).unwrap()
    }

    /// A frontend's ring and the message that hands it to a worker.
    pub(crate) fn offer(
        &self,
        target: &OpenedTarget,
        terms: &Terms,
    ) -> (Front, Attach, Vec<OwnedFd>) {
        self.offer_of(&self.guest, target, terms)
    }

    fn offer_of(
        &self,
        guest: &FakeDomain,
        target: &OpenedTarget,
        terms: &Terms,
    ) -> (Front, Attach, Vec<OwnedFd>) {
        let ring = RingId(self.next_ring.replace(self.next_ring.get() + 1));
        let first = guest.alloc_pages(terms.pages as usize).unwrap();
        let refs: Vec<GrantRef> = (0..terms.pages)
            .map(|n| guest.grant(Gfn(first.0 + n), BACKEND, false).unwrap())
            .collect();
        let words = guest.words(first, terms.pages as usize);
        let port = guest.alloc_unbound(BACKEND).unwrap();
        let journal_size = journal_bytes(terms.abi.entries(terms.pages));
        let (_, journal) = SharedPages::create("journal", journal_size).unwrap();
        let (_, statistics) = SharedPages::create("statistics", stats::BYTES).unwrap();
        let page = SharedPages::map(&statistics, stats::BYTES, Access::ReadOnly).unwrap();
        let (worker_target, target_fds) = target.incarnation().unwrap();
        let attach = Attach {
            ring,
            domid: guest.domid().0,
            devid: 51712,
            queue: 0,
            queues: 1,
            protocol: terms.abi.protocol().into(),
            ring_refs: refs.iter().map(|gref| gref.0).collect(),
            event_channel: port.0,
            max_indirect_segments: terms.max_indirect,
            bounce_bytes: terms.bounce_bytes,
            persistent: terms.persistent,
            readonly: terms.readonly,
            discard: terms.discard,
            secure_discard: false,
            host: HostKind::Fake,
            target: worker_target,
            incarnation: 1,
        };
        let gntdev = self.host.open_gntdev().unwrap();
        let evtchn = self.host.open_evtchn(guest.domid()).unwrap();
        let mut fds = vec![gntdev, evtchn, journal, statistics];
        fds.extend(target_fds);
        let front = Front {
            id: ring,
            ring: FrontRing::init(words, terms.abi, terms.pages).unwrap(),
            abi: terms.abi,
            guest: guest.clone(),
            port,
            port_fd: guest.port_fd(port).unwrap(),
            refs,
            stats: Reader::new(page),
            asked: HashMap::new(),
            flusher: None,
            next_id: 0x1234_5678_9abc_0000,
        };
        (front, attach, fds)
    }

    pub(crate) fn attach(&self, target: &OpenedTarget, terms: &Terms) -> Front {
        self.attach_of(&self.guest, target, terms)
    }

    pub(crate) fn attach_of(
        &self,
        guest: &FakeDomain,
        target: &OpenedTarget,
        terms: &Terms,
    ) -> Front {
        let (mut front, attach, fds) = self.offer_of(guest, target, terms);
        self.command(Message {
            body: Command::Attach(Box::new(attach)),
            fds,
        });
        if terms.flusher {
            self.give_flusher(&mut front, target);
        }
        let report = self.report();
        assert!(
            matches!(report, Report::Attached { ring } if ring == front.id),
            "{report:?}"
        );
        front
    }

    /// Gives a ring a flusher of its own.
    pub(crate) fn give_flusher(&self, front: &mut Front, target: &OpenedTarget) {
        let flusher = Flusher::start(target);
        self.connect(front, &flusher);
        front.flusher = Some(flusher);
    }

    /// Connects a ring to a flusher.
    pub(crate) fn connect(&self, front: &Front, flusher: &Flusher) {
        let body = Command::Flusher { ring: front.id };
        let fds = vec![flusher.socket()];
        self.command(Message { body, fds });
    }

    /// Detaches a ring whose I/O can end, and checks that nothing of it is left anywhere.
    pub(crate) fn detach(&self, front: Front) {
        self.command(Command::Detach { ring: front.id });
        let report = self.report();
        assert!(
            matches!(report, Report::Detached { ring, left } if ring == front.id && left.is_nothing()),
            "{report:?}"
        );
        front.assert_gone();
    }

    pub(crate) fn mapped(&self) -> usize {
        self.xen.snapshot().mappings.values().sum()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.supervisor = None;
        if std::thread::panicking() {
            if let Some(Worker::Process(child)) = &mut self.worker {
                let _ = child.kill();
            }
        } else if self.worker.is_some() {
            self.join().unwrap();
        }
    }
}

/// A target's flusher in a thread of its own.
pub(crate) struct Flusher(SupervisorEnd);

impl Flusher {
    pub(crate) fn start(target: &OpenedTarget) -> Self {
        let (supervisor, end) = thread_pair().unwrap();
        std::thread::spawn(move || xenblkd::worker::run(end));
        let (worker_target, fds) = target.incarnation().unwrap();
        let body = Command::HelloFlusher {
            version: VERSION,
            fence: 1000,
            target: worker_target,
        };
        supervisor.send(Message { body, fds }).unwrap();
        Self(supervisor)
    }

    /// A ring's end of a new connection.
    fn socket(&self) -> OwnedFd {
        let (ours, theirs) = flusher_sockets();
        let body = Command::Serve;
        let fds = vec![theirs];
        self.0.send(Message { body, fds }).unwrap();
        ours
    }
}

/// A ring's end of a connection to a flusher, and the flusher's.
pub(crate) fn flusher_sockets() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

/// A granted page of the guest.
#[derive(Clone, Copy)]
pub(crate) struct Page {
    pub(crate) gfn: Gfn,
    pub(crate) gref: GrantRef,
}

impl Page {
    pub(crate) fn whole(self) -> Segment {
        self.part(0, 7)
    }

    pub(crate) fn part(self, first: u8, last: u8) -> Segment {
        Segment::new(self.gref.0, first, last).unwrap()
    }
}

/// One queue of a strict frontend: an answer with another id or operation than asked for fails the
/// test.
pub(crate) struct Front {
    pub(crate) id: RingId,
    pub(crate) ring: FrontRing<DomainWords>,
    pub(crate) abi: Abi,
    guest: FakeDomain,
    pub(crate) port: Port,
    port_fd: OwnedFd,
    pub(crate) refs: Vec<GrantRef>,
    stats: Reader,
    /// A flusher for this ring alone. It ends with this and the ring.
    flusher: Option<Flusher>,
    /// Operations by id, as their responses have to echo them.
    asked: HashMap<u64, u8>,
    next_id: u64,
}

pub(crate) const OKAY: i16 = 0;
pub(crate) const ERROR: i16 = -1;
pub(crate) const NOT_SUPPORTED: i16 = -2;

impl Front {
    pub(crate) fn stats(&self) -> Snapshot {
        self.stats.snapshot()
    }

    pub(crate) fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub(crate) fn page(&self, readonly: bool) -> Page {
        let gfn = self.guest.alloc_page().unwrap();
        Page {
            gfn,
            gref: self.guest.grant(gfn, BACKEND, readonly).unwrap(),
        }
    }

    pub(crate) fn filled(&self, byte: u8) -> Page {
        let page = self.page(true);
        assert!(self.guest.write(page.gfn, 0, &[byte; 4096]));
        page
    }

    pub(crate) fn bytes(&self, page: Page) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        assert!(self.guest.read(page.gfn, 0, &mut bytes));
        bytes
    }

    /// The guest takes a page back; it must not be in use any more.
    pub(crate) fn take_back(&self, page: Page) {
        self.guest
            .end_access(page.gref)
            .expect("still in use after the response");
        self.guest.free_page(page.gfn);
    }

    pub(crate) fn rw(&mut self, op: RwOp, sector: u64, segments: &[Segment]) -> Request {
        let segments = DirectSegments::new(segments).unwrap();
        Request::Rw(RwRequest {
            id: self.id(),
            op,
            sector,
            segments,
        })
    }

    pub(crate) fn flush(&mut self, data: Option<(u64, Segment)>) -> Request {
        Request::Flush(FlushRequest {
            id: self.id(),
            data: through(data),
        })
    }

    pub(crate) fn barrier(&mut self, data: Option<(u64, Segment)>) -> Request {
        Request::Barrier(BarrierRequest {
            id: self.id(),
            data: through(data),
        })
    }

    pub(crate) fn discard(&mut self, sector: u64, nr_sectors: u64) -> Request {
        Request::Discard(DiscardRequest {
            id: self.id(),
            sector,
            nr_sectors,
            secure: false,
        })
    }

    /// An indirect request and the page its segments are in.
    pub(crate) fn indirect(
        &mut self,
        op: RwOp,
        sector: u64,
        segments: &[Segment],
    ) -> (Request, Page) {
        let page = self.page(true);
        assert!(
            self.guest
                .write(page.gfn, 0, &encode_indirect_page(segments))
        );
        // The grefs that aren't needed are rubbish, as frontends leave them.
        let mut grefs = [0xdead_beef; 8];
        grefs[0] = page.gref.0;
        let count = segments.len() as u16;
        let request = IndirectRequest::new(self.id(), op, sector, count, grefs).unwrap();
        (Request::Indirect(request), page)
    }

    /// The same indirect request under a new id.
    pub(crate) fn again(&mut self, request: &Request) -> Request {
        match *request {
            Request::Indirect(mut indirect) => {
                indirect.id = self.id();
                Request::Indirect(indirect)
            }
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn push(&mut self, request: &Request) -> u64 {
        let (id, op) = match request {
            Request::Rw(rw) => (rw.id, rw.op.operation()),
            Request::Indirect(indirect) => (indirect.id, indirect.op.operation()),
            Request::Barrier(barrier) => (barrier.id, 2),
            Request::Flush(flush) => (flush.id, 3),
            Request::Discard(discard) => (discard.id, 5),
        };
        self.push_raw(&request.encode(self.abi), id, op);
        id
    }

    /// Whatever `slot` says; its response has to echo `id` and `op`.
    pub(crate) fn push_raw(&mut self, slot: &RawSlot, id: u64, op: u8) {
        self.asked.insert(id, op);
        self.ring.push(slot).unwrap();
    }

    pub(crate) fn kick(&mut self) {
        if self.ring.publish() {
            self.guest.notify(self.port);
        }
    }

    /// Responses that are there, or come within `limit`.
    pub(crate) fn take(&mut self, limit: Duration) -> Vec<Response> {
        loop {
            let mut taken = Vec::new();
            while let Some(response) = self.ring.take().unwrap() {
                let op = self
                    .asked
                    .remove(&response.id)
                    .expect("an id that was asked for, once");
                assert_eq!(response.op, op, "the response's operation");
                taken.push(response);
            }
            if !taken.is_empty() {
                return taken;
            }
            if self.ring.final_check().unwrap() {
                continue;
            }
            if !readable(&self.port_fd, limit) {
                return taken;
            }
            let _ = rustix::io::read(&self.port_fd, &mut [0u8; 8]);
        }
    }

    /// Requests not answered.
    pub(crate) fn in_flight(&self) -> usize {
        self.asked.len()
    }

    /// Whoever started the ring's flusher dies.
    pub(crate) fn lose_flushers_supervisor(&mut self) {
        self.flusher = None;
    }

    /// Waits for `count` responses of a guest that doesn't care what they say.
    pub(crate) fn swallow(&mut self, count: usize) {
        let mut taken = 0;
        while taken < count {
            if self.ring.take().unwrap().is_some() {
                taken += 1;
            } else if !self.ring.final_check().unwrap() {
                assert!(readable(&self.port_fd, LIMIT), "{taken} of {count} answers");
                let _ = rustix::io::read(&self.port_fd, &mut [0u8; 8]);
            }
        }
    }

    /// The test has taken the answers to `id` itself.
    pub(crate) fn forget(&mut self, id: u64) {
        self.asked.remove(&id);
    }

    /// Waits until everything asked for has been answered: statuses by id.
    pub(crate) fn settle(&mut self) -> HashMap<u64, i16> {
        let mut statuses = HashMap::new();
        while !self.asked.is_empty() {
            let taken = self.take(LIMIT);
            assert!(
                !taken.is_empty(),
                "{} requests were never answered",
                self.asked.len()
            );
            statuses.extend(taken.iter().map(|response| (response.id, response.status)));
        }
        statuses
    }

    /// Runs one request alone.
    pub(crate) fn run(&mut self, request: &Request) -> i16 {
        let id = self.push(request);
        self.kick();
        self.settle()[&id]
    }

    pub(crate) fn write(&mut self, sector: u64, byte: u8) -> i16 {
        let page = self.filled(byte);
        let request = self.rw(RwOp::Write, sector, &[page.whole()]);
        let status = self.run(&request);
        self.take_back(page);
        status
    }

    pub(crate) fn read(&mut self, sector: u64) -> Result<Vec<u8>, i16> {
        let page = self.page(false);
        let request = self.rw(RwOp::Read, sector, &[page.whole()]);
        let status = self.run(&request);
        let bytes = self.bytes(page);
        self.take_back(page);
        if status == OKAY {
            Ok(bytes)
        } else {
            Err(status)
        }
    }

    /// The ring's pages and port have been let go.
    pub(crate) fn assert_gone(self) {
        for gref in &self.refs {
            self.guest
                .end_access(*gref)
                .expect("a ring page is still mapped");
        }
        self.guest.close(self.port);
    }
}

fn through(data: Option<(u64, Segment)>) -> Option<WriteData> {
    data.map(|(sector, segment)| {
        let segments = DirectSegments::new(&[segment]).unwrap();
        WriteData { sector, segments }
    })
}
