//! What the backend writes: the keys of each step, and `state` as a compare-and-set.

use super::{BackendPath, Limits};
use crate::client::{Client, Tx};
use crate::error::Error;
use crate::xenbus::State;

/// `info`: VDISK_CDROM.
const INFO_CDROM: u32 = 1;
/// `info`: VDISK_REMOVABLE.
const INFO_REMOVABLE: u32 = 2;
/// `info`: VDISK_READONLY.
const INFO_READONLY: u32 = 4;

/// The disk as the frontend will see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceProperties {
    /// Size in 512-byte sectors, whatever `sector_size` says.
    pub sectors: u64,
    /// Logical block size in bytes, 512 unless the administrator insists.
    pub sector_size: u32,
    /// Physical block size in bytes.
    pub physical_sector_size: u32,
    /// Refuses every operation that modifies.
    pub readonly: bool,
    /// Is a CD.
    pub cdrom: bool,
    /// Medium can change.
    pub removable: bool,
    /// FLUSH_DISKCACHE is served.
    pub flush: bool,
    /// Grants stay mapped for a frontend that keeps them (`feature-persistent`).
    pub persistent: bool,
    /// DISCARD is served, with these parameters.
    pub discard: Option<DiscardProperties>,
}

/// `discard-granularity`, `discard-alignment` and `discard-secure`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiscardProperties {
    /// Smallest unit that is really freed, in bytes.
    pub granularity: u32,
    /// Offset of the first such unit, in bytes.
    pub alignment: u32,
    /// Data can be discarded so that it can't be had back.
    pub secure: bool,
}

type Keys = Vec<(&'static str, String)>;

/// Keys that must be there before InitWait: what a frontend needs to lay out its rings. Flush and
/// barrier too, because some (NetBSD) read them once, on first sight of the directory; every target
/// answers a flush. `feature-barrier` is written even when 0: an older value may be there.
#[must_use]
pub fn transport_keys(limits: &Limits) -> Keys {
    vec![
        ("multi-queue-max-queues", limits.max_queues.to_string()),
        (
            "max-ring-page-order",
            limits.max_ring_page_order.to_string(),
        ),
        (
            "feature-max-indirect-segments",
            limits.max_indirect_segments.to_string(),
        ),
        ("feature-flush-cache", flag(true)),
        ("feature-barrier", flag(limits.max_queues == 1)),
    ]
}

/// Keys that must be there before Connected. A barrier orders the requests of its own ring only, so it
/// is offered to frontends with one queue.
#[must_use]
pub fn device_keys(device: &DeviceProperties, queues: u32) -> Keys {
    let info = [
        (device.cdrom, INFO_CDROM),
        (device.removable, INFO_REMOVABLE),
        (device.readonly, INFO_READONLY),
    ];
    let info = info
        .iter()
        .filter(|(set, _)| *set)
        .fold(0, |info, (_, bit)| info | bit);
    let mut keys = vec![
        ("sectors", device.sectors.to_string()),
        ("sector-size", device.sector_size.to_string()),
        (
            "physical-sector-size",
            device.physical_sector_size.to_string(),
        ),
        ("info", info.to_string()),
        ("feature-flush-cache", flag(device.flush)),
        ("feature-barrier", flag(device.flush && queues == 1)),
        ("feature-persistent", flag(device.persistent)),
        ("feature-discard", flag(device.discard.is_some())),
    ];
    if let Some(discard) = device.discard {
        keys.push(("discard-granularity", discard.granularity.to_string()));
        keys.push(("discard-alignment", discard.alignment.to_string()));
        keys.push(("discard-secure", flag(discard.secure)));
    }
    keys
}

fn flag(set: bool) -> String {
    u32::from(set).to_string()
}

/// What the backend directory said when the decision to write was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Believed {
    /// Its `state`.
    pub state: State,
    /// Its `online`.
    pub online: bool,
}

/// What became of a [`publish`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Written.
    Written,
    /// Nothing was written: this is how it is now. Decide again.
    Changed(Believed),
    /// Nothing was written: the directory is gone.
    Gone,
}

/// Writes `keys` and then `state` in one transaction, but only if the directory is still as believed:
/// a late write never brings back a removed directory or overrides a detach that has begun.
pub async fn publish(
    client: &Client,
    path: &BackendPath,
    believed: Believed,
    keys: &[(&'static str, String)],
    state: State,
) -> Result<Outcome, Error> {
    let mut nodes: Vec<_> = keys
        .iter()
        .map(|(key, value)| (path.key(key), value.clone()))
        .collect();
    nodes.push((path.key("state"), state.as_str().to_owned()));
    let nodes = &nodes;
    client
        .transact(async |client: Client, tx| {
            let Some(now) = read_believed(&client, tx, path).await? else {
                return Ok(Outcome::Gone);
            };
            if now != believed {
                return Ok(Outcome::Changed(now));
            }
            client.write_many(tx, nodes).await?;
            Ok(Outcome::Written)
        })
        .await
}

/// The backend directory's `state` and `online`; `None` when the directory is gone. Without `online`
/// the device counts as going away, as in Linux.
pub async fn read_believed(
    client: &Client,
    tx: Tx,
    path: &BackendPath,
) -> Result<Option<Believed>, Error> {
    let values = client
        .read_many(tx, &[path.key("state"), path.key("online")])
        .await?;
    let mut values = values.into_iter();
    let Some(state) = values.next().flatten() else {
        return Ok(None);
    };
    let online = values.next().flatten();
    let online = online.as_deref() == Some(b"1");
    Ok(Some(Believed {
        state: State::parse(&state),
        online,
    }))
}

/// The `state` below a directory, ours or a frontend's; `None` when there is none.
pub async fn read_state(client: &Client, tx: Tx, directory: &str) -> Result<Option<State>, Error> {
    let value = client
        .read_optional(tx, &format!("{directory}/state"))
        .await?;
    Ok(value.as_deref().map(State::parse))
}

/// Leaves a message where administrators and toolstacks look for it (`error/<backend path>/error`).
pub async fn report_error(client: &Client, path: &BackendPath, text: &str) -> Result<(), Error> {
    client.write(Tx::NONE, &path.error_key(), text).await
}

/// Tells our hotplug script that the target is open, in `target-status`. Nothing is written if the
/// directory is gone.
pub async fn report_target_open(client: &Client, path: &BackendPath) -> Result<(), Error> {
    write_if_there(client, path, "target-status", "open").await
}

/// Leaves the reason where the toolstack shows it to whoever attaches the disk: `hotplug-error` in the
/// backend directory. Nothing is written if the directory is gone, which would bring it back.
pub async fn report_hotplug_error(
    client: &Client,
    path: &BackendPath,
    text: &str,
) -> Result<(), Error> {
    write_if_there(client, path, "hotplug-error", text).await
}

async fn write_if_there(
    client: &Client,
    path: &BackendPath,
    key: &str,
    value: &str,
) -> Result<(), Error> {
    client
        .transact(async |client: Client, tx| {
            if read_believed(&client, tx, path).await?.is_none() {
                return Ok(());
            }
            client.write(tx, &path.key(key), value).await
        })
        .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vbd::Protocol;

    fn text(keys: &[(&'static str, String)]) -> String {
        keys.iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn transport() {
        let mut limits = Limits {
            max_queues: 4,
            max_ring_page_order: 4,
            max_indirect_segments: 256,
            default_protocol: Protocol::NATIVE,
        };
        assert_eq!(
            text(&transport_keys(&limits)),
            "multi-queue-max-queues=4 max-ring-page-order=4 feature-max-indirect-segments=256 \
             feature-flush-cache=1 feature-barrier=0"
        );
        limits.max_queues = 1;
        assert!(text(&transport_keys(&limits)).ends_with("feature-barrier=1"));
    }

    #[test]
    fn device() {
        let mut device = DeviceProperties {
            sectors: 1 << 33,
            sector_size: 512,
            physical_sector_size: 4096,
            readonly: false,
            cdrom: false,
            removable: false,
            flush: true,
            persistent: false,
            discard: None,
        };
        assert_eq!(
            text(&device_keys(&device, 2)),
            "sectors=8589934592 sector-size=512 physical-sector-size=4096 info=0 \
             feature-flush-cache=1 feature-barrier=0 feature-persistent=0 feature-discard=0"
        );
        device.discard = Some(DiscardProperties {
            secure: false,
            granularity: 4096,
            alignment: 512,
        });
        (device.readonly, device.cdrom, device.persistent) = (true, true, true);
        let keys = text(&device_keys(&device, 1));
        assert!(
            keys.contains(" info=5 ")
                && keys.contains(" feature-persistent=1 ")
                && keys.contains(" feature-barrier=1 "),
            "{keys}"
        );
        assert!(keys.ends_with(
            "feature-discard=1 discard-granularity=4096 discard-alignment=512 discard-secure=0"
        ));
    }
}
