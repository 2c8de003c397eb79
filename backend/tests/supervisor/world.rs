//! One mocked host: hypervisor, store, toolstack and the supervisor under test.

use std::future::Future;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use xenblk_grants::fake::{FakeXen, Snapshot};
use xenblk_xenstore::fake::Server;
use xenblk_xenstore::vbd::Kind;
use xenblk_xenstore::{Access, Client, Error, Permission, Tx};
use xenblkd::control::{self, DiskStatus, Request, Response};
use xenblkd::supervisor::{
    Handle, HostSource, Limits, Options, Supervisor, SupervisorError, WorkerProgram,
};

/// How long anything may take before the test gives up on it. Only a failure waits that long.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct World {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) xen: FakeXen,
    pub(crate) server: Server,
    /// Domain 0's view of the store.
    pub(crate) store: Client,
    pub(crate) options: Options,
    supervisor: Option<Running>,
}

struct Running {
    stop: Option<oneshot::Sender<()>>,
    handle: Handle,
    task: JoinHandle<Result<(), SupervisorError>>,
}

impl World {
    /// A host whose supervisor is not started yet.
    pub(crate) async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let xen = FakeXen::start().unwrap();
        xen.listen(&dir.path().join("xen")).unwrap();
        let server = Server::start().unwrap();
        server.listen(dir.path().join("xenstored")).unwrap();
        let (store, _) = Client::connect(dir.path().join("xenstored")).await.unwrap();
        store
            .write(Tx::NONE, "/local/domain/0/domid", "0")
            .await
            .unwrap();
        let options = Options {
            store: dir.path().join("xenstored"),
            host: HostSource::Fake(dir.path().join("xen")),
            program: WorkerProgram::Threads,
            workers: 2,
            control: Some(dir.path().join("control")),
            limits: Limits::default(),
            kind: Kind::Vbd,
            blkback: Some(dir.path().join("blkback")),
        };
        Self {
            dir,
            xen,
            server,
            store,
            options,
            supervisor: None,
        }
    }

    pub(crate) async fn started() -> Self {
        let mut world = Self::new().await;
        world.start().await;
        world
    }

    /// Starts the supervisor; returns once it answers on its control socket.
    pub(crate) async fn start(&mut self) {
        let (stop, stopped) = oneshot::channel();
        let shutdown = async {
            let _ = stopped.await;
        };
        let (options, (tell, handle)) = (self.options.clone(), oneshot::channel());
        let task = tokio::spawn(async {
            let supervisor = Supervisor::start(options).await?;
            let _ = tell.send(supervisor.handle());
            supervisor.run(shutdown).await;
            Ok(())
        });
        self.supervisor = Some(Running {
            stop: Some(stop),
            handle: handle.await.expect("the supervisor starts"),
            task,
        });
        let path = self.path("control");
        let answers = || std::os::unix::net::UnixStream::connect(&path).is_ok();
        eventually("the control socket", async || answers().then_some(())).await;
    }

    /// The running supervisor, for its process.
    pub(crate) fn handle(&self) -> &Handle {
        &self.supervisor.as_ref().unwrap().handle
    }

    /// Ends the supervisor as SIGTERM does.
    pub(crate) async fn stop(&mut self) {
        let mut running = self.supervisor.take().unwrap();
        drop(running.stop.take());
        tokio::time::timeout(PATIENCE, running.task)
            .await
            .unwrap()
            .unwrap()
            .unwrap();
    }

    /// Ends the supervisor as SIGKILL does: nothing of it runs any more, its channels are closed.
    pub(crate) async fn crash(&mut self) {
        let running = self.supervisor.take().unwrap();
        running.task.abort();
        assert!(running.task.await.unwrap_err().is_cancelled());
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A sparse image of `size` bytes; its path.
    pub(crate) fn image(&self, name: &str, size: u64) -> String {
        let path = self.path(name);
        std::fs::File::create(&path).unwrap().set_len(size).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// What `xl` writes for a disk, in one transaction; the domain's home is made on the way.
    pub(crate) async fn attach(&self, domid: u16, devid: u32, params: &str, mode: &str) {
        self.attach_with(domid, devid, params, mode, &[]).await;
    }

    /// As [`attach`](Self::attach), with more keys for the backend.
    pub(crate) async fn attach_with(
        &self,
        domid: u16,
        devid: u32,
        params: &str,
        mode: &str,
        more: &[(&str, &str)],
    ) {
        let (front, back) = (frontend(domid, devid), backend(domid, devid));
        let frontend_keys = [
            ("backend", back.as_str()),
            ("backend-id", "0"),
            ("state", "1"),
            ("virtual-device", "51712"),
        ];
        let id = domid.to_string();
        let backend_keys = [
            ("frontend", front.as_str()),
            ("frontend-id", &id),
            ("online", "1"),
            ("state", "1"),
            ("params", params),
            ("mode", mode),
            ("device-type", "disk"),
            ("discard-enable", "1"),
            ("removable", "0"),
        ];
        let guests = [
            Permission::new(domid, Access::None),
            Permission::new(0, Access::Read),
        ];
        let ours = [
            Permission::new(0, Access::None),
            Permission::new(domid, Access::Read),
        ];
        let (front, back) = (&front, &back);
        let written: Result<(), Error> = self
            .store
            .transact(async |store: Client, tx| {
                store.mkdir(tx, front).await?;
                store.set_perms(tx, front, &guests).await?;
                store.mkdir(tx, back).await?;
                store.set_perms(tx, back, &ours).await?;
                for (key, value) in frontend_keys {
                    let node = format!("{front}/{key}");
                    store.write(tx, &node, value).await?;
                    store.set_perms(tx, &node, &guests).await?;
                }
                for (key, value) in backend_keys.iter().chain(more) {
                    store.write(tx, &format!("{back}/{key}"), value).await?;
                }
                Ok(())
            })
            .await;
        written.unwrap();
    }

    /// What `xl block-detach` writes first.
    pub(crate) async fn ask_to_detach(&self, domid: u16, devid: u32) {
        let back = &backend(domid, devid);
        let written: Result<(), Error> = self
            .store
            .transact(async |store: Client, tx| {
                store.write(tx, &format!("{back}/online"), "0").await?;
                store.write(tx, &format!("{back}/state"), "5").await
            })
            .await;
        written.unwrap();
    }

    /// What the toolstack does last.
    pub(crate) async fn remove(&self, domid: u16, devid: u32) {
        for node in [frontend(domid, devid), backend(domid, devid)] {
            self.store.rm(Tx::NONE, &node).await.unwrap();
        }
    }

    pub(crate) async fn read(&self, node: &str) -> Option<String> {
        let value = self.store.read_optional(Tx::NONE, node).await.unwrap();
        value.map(|value| String::from_utf8(value).unwrap())
    }

    /// A key of the backend directory.
    pub(crate) async fn backend_key(&self, domid: u16, devid: u32, key: &str) -> Option<String> {
        self.read(&format!("{}/{key}", backend(domid, devid))).await
    }

    /// What a hotplug script, or the toolstack, writes later.
    pub(crate) async fn write_backend_keys(&self, domid: u16, devid: u32, keys: &[(&str, &str)]) {
        let directory = backend(domid, devid);
        for (key, value) in keys {
            let node = format!("{directory}/{key}");
            self.store.write(Tx::NONE, &node, value).await.unwrap();
        }
    }

    /// Waits until the backend's state is `state`.
    pub(crate) async fn reaches(&self, domid: u16, devid: u32, state: &str) {
        let what = format!("backend {domid}/{devid} at state {state}");
        eventually(&what, async || {
            let found = self.backend_key(domid, devid, "state").await;
            if found.as_deref() == Some(state) {
                Some(())
            } else {
                None
            }
        })
        .await;
    }

    /// The device's `error` node, as soon as there is one.
    pub(crate) async fn error(&self, domid: u16, devid: u32) -> String {
        let node = error_node(domid, devid);
        eventually(&node, async || self.read(&node).await).await
    }

    /// Waits until nothing of domain `domid` is mapped and no port is bound to it.
    pub(crate) async fn nothing_held(&self, domid: u16) {
        eventually("nothing mapped or bound", async || {
            (!holds(&self.xen.snapshot(), domid)).then_some(())
        })
        .await;
    }

    /// Asserts that nothing of domain `domid` is mapped and no port is bound to it, now.
    pub(crate) fn assert_nothing_held(&self, domid: u16) {
        let snapshot = self.xen.snapshot();
        assert!(!holds(&snapshot, domid), "{snapshot:?}");
    }

    /// Asks the supervisor on its control socket.
    pub(crate) async fn ask(&self, request: Request) -> Response {
        let path = self.path("control");
        tokio::task::spawn_blocking(move || control::ask(&path, request))
            .await
            .unwrap()
            .unwrap()
    }

    /// One disk as `status` shows it.
    pub(crate) async fn status(&self, domid: u16, devid: u32) -> Option<DiskStatus> {
        let Response::Status(status) = self.ask(Request::Status {}).await else {
            panic!("not a status")
        };
        status
            .disks
            .into_iter()
            .find(|disk| disk.domid == domid && disk.devid == devid)
    }
}

fn holds(snapshot: &Snapshot, domid: u16) -> bool {
    use xenblk_grants::fake::PortState;
    let bound = |port: &xenblk_grants::fake::PortInfo| {
        port.domid.0 == domid && matches!(port.state, PortState::Interdomain { .. })
    };
    snapshot.mappings.keys().any(|dom| dom.0 == domid) || snapshot.ports.iter().any(bound)
}

pub(crate) fn frontend(domid: u16, devid: u32) -> String {
    format!("/local/domain/{domid}/device/vbd/{devid}")
}

pub(crate) fn backend(domid: u16, devid: u32) -> String {
    format!("/local/domain/0/backend/vbd/{domid}/{devid}")
}

pub(crate) fn error_node(domid: u16, devid: u32) -> String {
    format!("/local/domain/0/error/backend/vbd/{domid}/{devid}/error")
}

/// Looks until `look` finds something.
pub(crate) async fn eventually<T>(what: &str, look: impl AsyncFn() -> Option<T>) -> T {
    let found = async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    bounded(what, found).await
}

/// Gives up on `future` only when it is certain to be stuck.
pub(crate) async fn bounded<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future)
        .await
        .unwrap_or_else(|_| panic!("waited too long for: {what}"))
}
