//! The keys of blkfront: what it writes for its rings and what it reads when the backend is connected,
//! in the order and with the defaults of Linux 6 (drivers/block/xen-blkfront.c, talk_to_blkback and
//! blkfront_connect).

use xenblk_ring::Abi;
use xenblk_ring::layout::MAX_DIRECT_SEGMENTS;
use xenblk_xenstore::xenbus::State;
use xenblk_xenstore::{Client, Error, Tx};

use crate::disk::DiskInfo;

/// Linux's `max_indirect_segments`: 128 KiB a request.
pub(super) const INDIRECT_SEGMENTS: usize = 32;

/// A ring as the backend finds it in XenStore.
#[derive(Clone, Debug)]
pub(super) struct RingKeys {
    pub(super) ring_refs: Vec<u32>,
    pub(super) event_channel: u32,
}

/// Why the frontend gave up; `xenbus_dev_fatal` in Linux.
#[derive(Debug, thiserror::Error)]
pub enum NegotiationError {
    /// XenStore failed.
    #[error("XenStore: {0}")]
    Store(#[from] Error),
    /// A key Linux insists on.
    #[error("{path}: {found}, expected a decimal number")]
    Key {
        /// The key.
        path: String,
        /// What is there.
        found: String,
    },
    /// The backend did not follow a reset.
    #[error("{path}: {found} after 5 s, expected {expected}")]
    State {
        /// Its state node.
        path: String,
        /// What is there.
        found: State,
        /// What a kernel waits for.
        expected: State,
    },
    /// Rings or threads could not be made.
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

/// What the backend offers before the rings are made.
pub(super) struct Transport {
    pub(super) queues: u32,
    pub(super) ring_order: u32,
}

/// Reads the offer at InitWait and takes the lesser of it and what we want.
pub(super) async fn read_transport(
    store: &Client,
    backend: &str,
    wanted: &Transport,
) -> Result<Transport, NegotiationError> {
    let order = optional(store, backend, "max-ring-page-order", 0).await?;
    let queues = optional(store, backend, "multi-queue-max-queues", 1).await?;
    Ok(Transport {
        queues: wanted.queues.min(queues as u32).max(1),
        ring_order: wanted.ring_order.min(order as u32),
    })
}

/// Publishes the rings in one transaction, in Linux's order.
pub(super) async fn write_rings(
    store: &Client,
    directory: &str,
    rings: &[RingKeys],
) -> Result<(), Error> {
    let nodes = ring_nodes(directory, rings);
    store
        .transact(async |store, tx| store.write_many(tx, &nodes).await)
        .await
}

fn ring_nodes(directory: &str, rings: &[RingKeys]) -> Vec<(String, String)> {
    let mut nodes = Vec::new();
    let mut put = |key: String, value: String| nodes.push((format!("{directory}/{key}"), value));
    let pages = rings.first().map_or(1, |ring| ring.ring_refs.len());
    if pages > 1 {
        put("ring-page-order".into(), pages.ilog2().to_string());
    }
    if rings.len() > 1 {
        put("multi-queue-num-queues".into(), rings.len().to_string());
    }
    for (number, ring) in rings.iter().enumerate() {
        let prefix = if rings.len() > 1 {
            format!("queue-{number}/")
        } else {
            String::new()
        };
        for (page, gref) in ring.ring_refs.iter().enumerate() {
            let suffix = if pages > 1 {
                page.to_string()
            } else {
                String::new()
            };
            put(format!("{prefix}ring-ref{suffix}"), gref.to_string());
        }
        put(
            format!("{prefix}event-channel"),
            ring.event_channel.to_string(),
        );
    }
    put("protocol".into(), Abi::NATIVE.protocol().into());
    put("feature-persistent".into(), "0".into());
    nodes
}

/// The disk as the connected backend describes it, and the segments a request may have.
pub(super) async fn read_device(
    store: &Client,
    backend: &str,
    queues: usize,
) -> Result<(DiskInfo, usize), NegotiationError> {
    let sectors = required(store, backend, "sectors").await?;
    let info = required(store, backend, "info").await?;
    let sector_size = required(store, backend, "sector-size").await? as u32;
    let physical = optional(
        store,
        backend,
        "physical-sector-size",
        u64::from(sector_size),
    )
    .await?;
    let flush = optional(store, backend, "feature-flush-cache", 0).await? != 0;
    let discard = optional(store, backend, "feature-discard", 0).await? != 0;
    let indirect = optional(store, backend, "feature-max-indirect-segments", 0).await?;
    let segments = INDIRECT_SEGMENTS
        .min(indirect as usize)
        .max(MAX_DIRECT_SEGMENTS);
    let disk = DiskInfo {
        size: sectors.saturating_mul(512),
        sector_size,
        physical_sector_size: physical as u32,
        // VDISK_READONLY of blkif.h
        readonly: info & 4 != 0,
        flush,
        discard,
        queues,
    };
    Ok((disk, segments))
}

async fn required(store: &Client, backend: &str, key: &str) -> Result<u64, NegotiationError> {
    let path = format!("{backend}/{key}");
    match store.read_optional(Tx::NONE, &path).await? {
        Some(value) => decimal(path, &value),
        None => Err(NegotiationError::Key {
            path,
            found: "missing".into(),
        }),
    }
}

async fn optional(
    store: &Client,
    backend: &str,
    key: &str,
    default: u64,
) -> Result<u64, NegotiationError> {
    let path = format!("{backend}/{key}");
    match store.read_optional(Tx::NONE, &path).await? {
        Some(value) => decimal(path, &value),
        None => Ok(default),
    }
}

fn decimal(path: String, value: &[u8]) -> Result<u64, NegotiationError> {
    let text = String::from_utf8_lossy(value);
    text.parse().map_err(|_| NegotiationError::Key {
        path,
        found: format!("{text:?}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(queues: u32, pages: u32) -> Vec<String> {
        let rings: Vec<RingKeys> = (0..queues)
            .map(|queue| RingKeys {
                ring_refs: (8 + queue * pages..).take(pages as usize).collect(),
                event_channel: 40 + queue,
            })
            .collect();
        let nodes = ring_nodes("d", &rings);
        nodes
            .into_iter()
            .map(|(path, value)| format!("{path}={value}"))
            .collect()
    }

    #[test]
    fn one_queue_with_one_page_uses_the_oldest_names() {
        let expected = [
            "d/ring-ref=8",
            "d/event-channel=40",
            "d/protocol=x86_64-abi",
            "d/feature-persistent=0",
        ];
        assert_eq!(written(1, 1), expected);
    }

    #[test]
    fn two_queues_with_two_pages_in_the_order_of_linux() {
        let expected = [
            "d/ring-page-order=1",
            "d/multi-queue-num-queues=2",
            "d/queue-0/ring-ref0=8",
            "d/queue-0/ring-ref1=9",
            "d/queue-0/event-channel=40",
            "d/queue-1/ring-ref0=10",
            "d/queue-1/ring-ref1=11",
            "d/queue-1/event-channel=41",
            "d/protocol=x86_64-abi",
            "d/feature-persistent=0",
        ];
        assert_eq!(written(2, 2), expected);
    }
}
