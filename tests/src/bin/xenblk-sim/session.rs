//! What the commands have in common: a world with one guest, told in time when somebody wants it to end.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;
use xenblk_tests::disk::{GuestDisk, IoError, Op};
use xenblk_tests::frontend::{Config, Disk};
use xenblk_tests::toolstack::DiskSpec;
use xenblk_tests::world::{Attached, DRAIN, Guest, Options, World};
use xenblkd::control::{Request, Response, RingStatus, ask};
use xenblkd::target::{OpenMode, TargetSpec, open};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Refuses an image the backend would refuse, before anything is started; touches nothing.
pub(crate) fn check_image(image: &str, readonly: bool) -> Result<()> {
    open(&TargetSpec::parse(image)?, OpenMode { readonly })?;
    Ok(())
}

/// SIGINT, SIGTERM or SIGHUP came. Made before anything that has to be taken away again, and once for a
/// whole command, so that there is no moment at which a signal is fatal or forgotten.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt {
    pub(crate) stop: Arc<AtomicBool>,
    came: Arc<Notify>,
}

impl Interrupt {
    /// Takes the signals from here on. They are waited for on a thread of their own, for as long as the
    /// process lives.
    pub(crate) fn install() -> std::io::Result<Self> {
        let runtime = runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let mut signals = {
            let _entered = runtime.enter();
            [
                signal(SignalKind::interrupt())?,
                signal(SignalKind::terminate())?,
                signal(SignalKind::hangup())?,
            ]
        };
        let interrupt = Self::default();
        let this = interrupt.clone();
        thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                let [interrupt, terminate, hangup] = &mut signals;
                runtime.block_on(async {
                    tokio::select! {
                        _ = interrupt.recv() => {}
                        _ = terminate.recv() => {}
                        _ = hangup.recv() => {}
                    }
                });
                this.stop.store(true, Ordering::Relaxed);
                this.came.notify_one();
            })?;
        Ok(interrupt)
    }

    /// Waits for it.
    pub(crate) fn wait(&self, world: &World) {
        world.block_on(self.came.notified());
    }

    pub(crate) fn came(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// A world and its only guest.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) world: World,
    guest: Guest,
    disks: Vec<(Attached, Arc<Disk>)>,
}

impl Session {
    /// Starts everything for a guest of up to `disks` disks.
    pub(crate) fn start(config: Config, disks: usize) -> Result<Self> {
        let mut world = World::start(Options::new("/proc/self/exe"))?;
        let guest = world.guest(config, disks)?;
        Ok(Self {
            world,
            guest,
            disks: Vec::new(),
        })
    }

    /// Gives the guest its next disk.
    pub(crate) fn attach(&mut self, image: &str, readonly: bool) -> Result<Arc<Disk>> {
        let spec = DiskSpec {
            params: image.into(),
            readonly,
            discard: true,
        };
        let (attached, disk) = self
            .world
            .attach(&self.guest, self.disks.len() as u32, &spec)?;
        self.disks.push((attached, Arc::clone(&disk)));
        Ok(disk)
    }

    /// The rings of the first disk as the backend's control socket tells of them.
    pub(crate) fn rings(&self) -> Result<Vec<RingStatus>> {
        let status = match ask(&self.world.control(), Request::Status {})? {
            Response::Status(status) => status,
            other => {
                return Err(format!("the backend answered {other:?}, expected its status").into());
            }
        };
        let disk = status
            .disks
            .into_iter()
            .next()
            .ok_or("the backend names no disk")?;
        Ok(disk.rings)
    }

    /// Pages of the guest that the backend has mapped.
    pub(crate) fn mapped(&self) -> usize {
        let snapshot = self.world.xen().snapshot();
        snapshot.mappings.values().sum()
    }

    pub(crate) fn domid(&self) -> u16 {
        self.guest.domid()
    }

    /// Flushes and detaches every disk. All are tried; the first problem is reported.
    pub(crate) fn detach(&mut self) -> Result<()> {
        let mut first = None;
        for (attached, disk) in self.disks.drain(..) {
            let vbd = attached.vbd;
            let flushed = flush(&disk).map_err(|problem| format!("{vbd}: {problem}").into());
            let detached = if disk.gone().is_some() {
                self.world.detach_by_force(attached)
            } else {
                self.world.detach(attached)
            };
            first = first.or(flushed.err()).or(detached.err().map(Box::from));
        }
        first.map_or(Ok(()), Err)
    }

    /// [`detach`](Self::detach), then ends the backend.
    pub(crate) fn end(mut self) -> Result<()> {
        let detached = self.detach();
        let stopped = self.world.stop_backend();
        detached?;
        if stopped {
            Ok(())
        } else {
            Err("the backend did not end in order".into())
        }
    }
}

fn flush(disk: &Disk) -> std::result::Result<(), String> {
    if disk.info().readonly {
        return Ok(());
    }
    match disk.request(0, Op::Flush, DRAIN) {
        Some(Ok(_)) => Ok(()),
        Some(Err(IoError::Gone)) => Err(disk.gone().unwrap_or("the disk is gone").into()),
        Some(Err(error)) => Err(format!("flush: {error}")),
        None => Err(format!("no answer to a flush within {DRAIN:?}")),
    }
}
