//! A host without Xen: hypervisor, XenStore, toolstack and guests in this process, the backend in others.
//! A blocking face for the simulator and for tests; what its parts do is in their modules.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::{self, Runtime};
use xenblk_grants::DomId;
use xenblk_grants::fake::{FakeDomain, FakeXen};
use xenblk_xenstore::fake::Server;
use xenblk_xenstore::xenbus::State;
use xenblk_xenstore::{Client, Error as StoreError, Events};

use crate::backend::{Backend, Sockets};
use crate::frontend::{Config, Disk, Frontend, NegotiationError};
use crate::scratch::Scratch;
use crate::toolstack::{self, DiskSpec, PATIENCE, ToolstackError, Vbd};

/// Why something in the world did not work.
#[derive(Debug, thiserror::Error)]
pub enum WorldError {
    /// A socket, thread or process could not be made.
    #[error("{doing}: {source}")]
    Io {
        /// What was tried.
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// XenStore failed.
    #[error("XenStore: {0}")]
    Store(#[from] StoreError),
    /// The toolstack gave up on a disk.
    #[error(transparent)]
    Toolstack(#[from] ToolstackError),
    /// The frontend gave up before it was connected.
    #[error("{vbd}: {source}")]
    Negotiation {
        /// Which disk.
        vbd: Vbd,
        /// Why.
        source: NegotiationError,
    },
    /// The disk did not get connected.
    #[error("{vbd}: {reason}")]
    NotConnected {
        /// Which disk.
        vbd: Vbd,
        /// The guest's reason and the backend's.
        reason: String,
    },
    /// The backend closed a disk but kept pages of its guest.
    #[error("{vbd}: the closed backend still maps {leaked} granted pages")]
    Leak {
        /// Which disk.
        vbd: Vbd,
        /// Pages.
        leaked: usize,
    },
}

/// Pages a domain of the mocked hypervisor can have; a guest that needs more waits for its own answers.
const MOST_PAGES: usize = 1 << 22;

fn doing(doing: &'static str) -> impl FnOnce(io::Error) -> WorldError {
    move |source| WorldError::Io { doing, source }
}

/// What the host is made of.
#[derive(Clone, Debug)]
pub struct Options {
    /// The program whose subcommands `supervisor` and `worker` are the backend.
    pub program: PathBuf,
    /// Storage cores.
    pub workers: u32,
}

impl Options {
    /// `program` with as many workers as a host of this size has by default: a core is left to others.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
        Self {
            program: program.into(),
            workers: cores.saturating_sub(1).max(1),
        }
    }
}

/// The host. Dropping it ends the backend and removes every socket.
#[derive(Debug)]
pub struct World {
    /// Ends first: its guests' connections and memory are the other fields'.
    backend: Option<Backend>,
    options: Options,
    runtime: Runtime,
    xen: FakeXen,
    store: Server,
    toolstack: Client,
    guests: u16,
    /// Disks whose requests must fail if the backend dies.
    disks: Arc<Mutex<Vec<Weak<Disk>>>>,
    directory: Scratch,
}

/// A guest without disks yet.
#[derive(Debug)]
pub struct Guest {
    domain: FakeDomain,
    config: Config,
}

impl Guest {
    /// Its number.
    pub fn domid(&self) -> u16 {
        self.domain.domid().0
    }
}

/// A disk of a guest, connected when it was attached.
#[derive(Debug)]
pub struct Attached {
    /// Which.
    pub vbd: Vbd,
    frontend: Frontend,
}

impl Attached {
    /// The frontend, for its status and a reset.
    pub fn frontend(&self) -> &Frontend {
        &self.frontend
    }
}

impl World {
    /// Starts everything, the backend too.
    pub fn start(options: Options) -> Result<Self, WorldError> {
        let directory = Scratch::new().map_err(doing("making a directory for the sockets"))?;
        let runtime = runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("guest-xenbus")
            .enable_all()
            .build()
            .map_err(doing("starting the guests' runtime"))?;
        let xen = FakeXen::start().map_err(doing("starting the mocked hypervisor"))?;
        let listening = xen.listen(&directory.path().join("hypervisor"));
        listening.map_err(doing("listening for the mocked hypervisor's users"))?;
        let store = Server::start().map_err(doing("starting the XenStore server"))?;
        let listening = store.listen(directory.path().join("xenstore"));
        listening.map_err(doing("listening for XenStore clients"))?;
        let (toolstack, _) = connect_as(&runtime, &store, 0)?;
        runtime.block_on(toolstack::init_dom0(&toolstack))?;
        let mut world = Self {
            backend: None,
            options,
            runtime,
            xen,
            store,
            toolstack,
            guests: 0,
            disks: Arc::default(),
            directory,
        };
        world.start_backend()?;
        Ok(world)
    }

    /// Starts a backend where there is none, for example after the last one was killed.
    pub fn start_backend(&mut self) -> Result<(), WorldError> {
        self.backend = None;
        let control = self.control();
        // Left behind by a backend that was killed.
        let _ = std::fs::remove_file(&control);
        let sockets = Sockets {
            store: &self.directory.path().join("xenstore"),
            hypervisor: &self.directory.path().join("hypervisor"),
            control: &control,
        };
        let disks = Arc::clone(&self.disks);
        let died = move |status| {
            let reason = format!("the backend died ({status})");
            eprintln!("host: {reason}; its disks are gone");
            for disk in disks.lock().drain(..).filter_map(|disk| disk.upgrade()) {
                disk.kill(reason.clone());
            }
        };
        let backend = Backend::spawn(&self.options.program, sockets, self.options.workers, died);
        self.backend = Some(backend.map_err(doing("starting the backend"))?);
        Ok(())
    }

    /// The backend's process, if one was started.
    pub fn backend(&self) -> Option<&Backend> {
        self.backend.as_ref()
    }

    /// The backend's control socket.
    pub fn control(&self) -> PathBuf {
        self.directory.path().join("control")
    }

    /// Where this host's sockets are; removed with it.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The hypervisor, for its snapshot and faults.
    pub fn xen(&self) -> &FakeXen {
        &self.xen
    }

    /// Runs `future` on the world's runtime.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// Starts `task` on the world's runtime; it is dropped with the world.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(task);
    }

    /// Makes a guest with memory for `disks` disks.
    pub fn guest(&mut self, config: Config, disks: usize) -> Result<Guest, WorldError> {
        self.guests += 1;
        let domid = self.guests;
        let pages = (config.pages_per_disk() * disks).min(MOST_PAGES);
        let domain = self
            .xen
            .domain(DomId(domid), pages)
            .map_err(doing("making a domain"))?;
        self.runtime
            .block_on(toolstack::create_domain(&self.toolstack, domid))?;
        self.store
            .introduce(domid)
            .map_err(doing("introducing a domain"))?;
        Ok(Guest { domain, config })
    }

    /// Adds disk number `index` to the guest and waits until the guest uses it.
    pub fn attach(
        &self,
        guest: &Guest,
        index: u32,
        spec: &DiskSpec,
    ) -> Result<(Attached, Arc<Disk>), WorldError> {
        let vbd = Vbd::nth(guest.domid(), index);
        let attached = self.plug(guest, vbd, spec);
        if attached.is_err() {
            self.runtime
                .block_on(toolstack::remove_nodes(&self.toolstack, vbd))?;
        }
        attached
    }

    fn plug(
        &self,
        guest: &Guest,
        vbd: Vbd,
        spec: &DiskSpec,
    ) -> Result<(Attached, Arc<Disk>), WorldError> {
        let waiter = self.connect_as(0)?;
        let store = self.connect_as(guest.domid())?;
        self.runtime.block_on(async {
            toolstack::add_disk(&self.toolstack, vbd, spec).await?;
            toolstack::wait_for_backend(waiter, vbd, State::InitWait).await?;
            let frontend = Frontend::probe(vbd, guest.config, guest.domain.clone(), store)
                .await
                .map_err(|source| WorldError::Negotiation { vbd, source })?;
            let disk = self.connected(vbd, &frontend).await?;
            Ok((Attached { vbd, frontend }, disk))
        })
    }

    /// Waits for a frontend, and registers its disk as the backend's.
    async fn connected(&self, vbd: Vbd, frontend: &Frontend) -> Result<Arc<Disk>, WorldError> {
        match frontend.connected(PATIENCE).await {
            Ok(disk) => {
                self.disks.lock().push(Arc::downgrade(&disk));
                Ok(disk)
            }
            Err(reason) => {
                let error = toolstack::backend_error(&self.toolstack, vbd).await?;
                let reason = error.map_or(reason.clone(), |text| format!("{reason}: {text}"));
                Err(WorldError::NotConnected { vbd, reason })
            }
        }
    }

    /// Lets the guest close and connect again, as a kernel started by kexec does; its new disk.
    pub fn reset(&self, attached: &Attached) -> Result<Arc<Disk>, WorldError> {
        self.runtime.block_on(async {
            attached.frontend.reset().await;
            self.connected(attached.vbd, &attached.frontend).await
        })
    }

    /// Takes a disk away as `xl block-detach` does: waits until the backend has closed, then removes the
    /// nodes.
    pub fn detach(&self, attached: Attached) -> Result<(), WorldError> {
        let waiter = self.connect_as(0)?;
        let vbd = attached.vbd;
        self.runtime.block_on(async {
            toolstack::request_removal(&self.toolstack, vbd).await?;
            toolstack::wait_for_backend(waiter, vbd, State::Closed).await?;
            let leaked = attached.frontend.remove("it was detached").await;
            toolstack::remove_nodes(&self.toolstack, vbd).await?;
            if leaked > 0 {
                Err(WorldError::Leak { vbd, leaked })
            } else {
                Ok(())
            }
        })
    }

    /// Takes a disk away without asking a backend that may not be there, as `xl block-detach --force` does.
    pub fn detach_by_force(&self, attached: Attached) -> Result<(), WorldError> {
        self.runtime.block_on(async {
            attached.frontend.remove("it was detached by force").await;
            Ok(toolstack::remove_nodes(&self.toolstack, attached.vbd).await?)
        })
    }

    /// Ends the backend in order; false if it had to be killed or failed.
    pub fn stop_backend(&mut self) -> bool {
        self.backend
            .take()
            .is_none_or(|mut backend| backend.stop(PATIENCE))
    }

    fn connect_as(&self, domid: u16) -> Result<(Client, Events), WorldError> {
        connect_as(&self.runtime, &self.store, domid)
    }
}

fn connect_as(
    runtime: &Runtime,
    store: &Server,
    domid: u16,
) -> Result<(Client, Events), WorldError> {
    let _entered = runtime.enter();
    let stream = store.connect_as(domid).and_then(|stream| {
        stream.set_nonblocking(true)?;
        tokio::net::UnixStream::from_std(stream)
    });
    Ok(Client::from_stream(
        stream.map_err(doing("connecting to XenStore"))?,
    ))
}

/// How long requests in flight may take when a disk is given up.
pub const DRAIN: Duration = Duration::from_secs(10);
