//! What `xl` does to XenStore around a virtual disk, node for node as libxl 4.17 writes it, and its
//! waits. It runs no hotplug script: with `block-xenblkd` the backend opens what `params` names.

use std::fmt;
use std::time::Duration;

use tokio::time::timeout;
use xenblk_xenstore::xenbus::State;
use xenblk_xenstore::{Access, Client, Error, Event, Events, Permission, Tx, vbd};

/// libxl's LIBXL_INIT_TIMEOUT and LIBXL_DESTROY_TIMEOUT: how long a backend has for state 2 or 6.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// A virtual disk by its place: names both directories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vbd {
    /// The guest.
    pub domid: u16,
    /// `virtual-device`, for example 51712 for xvda.
    pub devid: u32,
}

impl Vbd {
    /// The disk number `index` (0 to 25) of a guest: xvda, xvdb and so on (xen-vbd-interface(7)).
    pub fn nth(domid: u16, index: u32) -> Self {
        Self {
            domid,
            devid: 202 << 8 | index << 4,
        }
    }

    /// xvda, xvdb and so on.
    pub fn name(self) -> String {
        let letter = (self.devid >> 4 & 0xf) as u8 + b'a';
        format!("xvd{}", char::from(letter))
    }

    /// The directory the backend and the toolstack share.
    pub fn backend_path(self) -> String {
        format!("/local/domain/0/backend/vbd/{}/{}", self.domid, self.devid)
    }

    /// The guest's own directory for the disk.
    pub fn frontend_path(self) -> String {
        format!("/local/domain/{}/device/vbd/{}", self.domid, self.devid)
    }
}

impl fmt::Display for Vbd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of domain {}", self.name(), self.domid)
    }
}

/// What a disk is to be, as in an xl disk specification.
#[derive(Clone, Debug)]
pub struct DiskSpec {
    /// `target=`: what `params` will hold, for example `raw:/var/disk.img`.
    pub params: String,
    /// `access=ro`.
    pub readonly: bool,
    /// `discard`.
    pub discard: bool,
}

/// Why the toolstack gave up.
#[derive(Debug, thiserror::Error)]
pub enum ToolstackError {
    /// XenStore failed.
    #[error("XenStore: {0}")]
    Store(#[from] Error),
    /// The backend did not get there in time.
    #[error("{vbd}: the backend is {found:?} after {PATIENCE:?}, expected {expected:?}{error}")]
    Timeout {
        /// Which disk.
        vbd: Vbd,
        /// The state asked for.
        expected: State,
        /// The state seen last; none if the directory is gone.
        found: Option<State>,
        /// The backend's `error` node, with a separator in front, or empty.
        error: String,
    },
}

/// What `xen-init-dom0` writes at boot.
pub async fn init_dom0(store: &Client) -> Result<(), Error> {
    store.write(Tx::NONE, "/local/domain/0/domid", "0").await?;
    store
        .write(Tx::NONE, "/local/domain/0/name", "Domain-0")
        .await
}

/// Makes the home directory of a new PV guest.
pub async fn create_domain(store: &Client, domid: u16) -> Result<(), Error> {
    let home = format!("/local/domain/{domid}");
    let uuid = format!("{:08x}-7873-4b64-8000-{domid:012x}", std::process::id());
    store
        .transact(async |store, tx| {
            let readable = [
                Permission::new(0, Access::None),
                Permission::new(domid, Access::Read),
            ];
            for node in [&home, &format!("{home}/device"), &format!("/vm/{uuid}")] {
                store.mkdir(tx, node).await?;
                store.set_perms(tx, node, &readable).await?;
            }
            store
                .write(tx, &format!("{home}/vm"), format!("/vm/{uuid}"))
                .await?;
            store
                .write(tx, &format!("{home}/name"), format!("guest{domid}"))
                .await?;
            store
                .write(tx, &format!("{home}/domid"), domid.to_string())
                .await?;
            store.write(tx, &format!("/vm/{uuid}/uuid"), &uuid).await
        })
        .await
}

/// Writes both directories of a disk in one transaction (libxl__device_generic_add).
pub async fn add_disk(store: &Client, vbd: Vbd, spec: &DiskSpec) -> Result<(), Error> {
    let (frontend, backend) = (vbd.frontend_path(), vbd.backend_path());
    let flag = |value: bool| if value { "1" } else { "0" };
    let (domid, devid) = (vbd.domid.to_string(), vbd.devid.to_string());
    let frontend_keys = [
        ("backend", backend.as_str()),
        ("backend-id", "0"),
        ("state", "1"),
        ("virtual-device", &devid),
        ("device-type", "disk"),
        ("trusted", "1"),
        ("protocol", xenblk_ring::Abi::NATIVE.protocol()),
    ];
    let name = vbd.name();
    let backend_keys = [
        ("frontend", frontend.as_str()),
        ("params", &spec.params),
        ("script", "block-xenblkd"),
        ("frontend-id", &domid),
        ("online", "1"),
        ("removable", "0"),
        ("bootable", "1"),
        ("state", "1"),
        ("dev", &name),
        ("type", "phy"),
        ("mode", if spec.readonly { "r" } else { "w" }),
        ("device-type", "disk"),
        ("discard-enable", flag(spec.discard)),
        ("specification", "xen"),
    ];
    let owned_by_guest = [
        Permission::new(vbd.domid, Access::None),
        Permission::new(0, Access::Read),
    ];
    let owned_by_us = [
        Permission::new(0, Access::None),
        Permission::new(vbd.domid, Access::Read),
    ];
    store
        .transact(async |store, tx| {
            fill(&store, tx, &frontend, &owned_by_guest, &frontend_keys).await?;
            fill(&store, tx, &backend, &owned_by_us, &backend_keys).await
        })
        .await
}

async fn fill(
    store: &Client,
    tx: Tx,
    directory: &str,
    perms: &[Permission],
    keys: &[(&str, &str)],
) -> Result<(), Error> {
    store.mkdir(tx, directory).await?;
    store.set_perms(tx, directory, perms).await?;
    for (key, value) in keys {
        store
            .write(tx, &format!("{directory}/{key}"), value)
            .await?;
    }
    Ok(())
}

/// Asks the backend to let go (libxl__initiate_device_generic_remove): online=0 and, unless it is closed
/// already, state=5, in one transaction.
pub async fn request_removal(store: &Client, vbd: Vbd) -> Result<(), Error> {
    let backend = vbd.backend_path();
    store
        .transact(async |store, tx| {
            let state = store.read_optional(tx, &format!("{backend}/state")).await?;
            let Some(state) = state else { return Ok(()) };
            store.write(tx, &format!("{backend}/online"), "0").await?;
            if state != b"6" {
                store.write(tx, &format!("{backend}/state"), "5").await?;
            }
            Ok(())
        })
        .await
}

/// Removes both directories, whether or not anybody let go.
pub async fn remove_nodes(store: &Client, vbd: Vbd) -> Result<(), Error> {
    for path in [vbd.frontend_path(), vbd.backend_path()] {
        match store.rm(Tx::NONE, &path).await {
            Ok(()) | Err(Error::NoEntry) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Waits until the backend's state is `expected`. Uses a connection of its own, whose only watch this is.
pub async fn wait_for_backend(
    (store, mut events): (Client, Events),
    disk: Vbd,
    expected: State,
) -> Result<(), ToolstackError> {
    let directory = disk.backend_path();
    let mut found = None;
    let reached = timeout(PATIENCE, async {
        store.watch(&format!("{directory}/state"), "wait").await?;
        while let Some(Event::Watch { .. }) = events.next().await {
            found = vbd::read_state(&store, Tx::NONE, &directory).await?;
            if found == Some(expected) {
                return Ok(());
            }
        }
        Err(Error::Disconnected("while waiting for the backend".into()))
    })
    .await;
    match reached {
        Ok(result) => result.map_err(ToolstackError::Store),
        Err(_) => {
            let error = backend_error(&store, disk).await?;
            let error = error.map_or(String::new(), |text| format!(": {text}"));
            Err(ToolstackError::Timeout {
                vbd: disk,
                expected,
                found,
                error,
            })
        }
    }
}

/// What the backend wrote to say what is wrong with a disk.
pub async fn backend_error(store: &Client, vbd: Vbd) -> Result<Option<String>, Error> {
    let path = format!(
        "/local/domain/0/error/backend/vbd/{}/{}/error",
        vbd.domid, vbd.devid
    );
    let text = store.read_optional(Tx::NONE, &path).await?;
    Ok(text.map(|text| String::from_utf8_lossy(&text).into_owned()))
}
