//! The keys of blkfront: what it writes for its rings, in its profile's order, and what it reads when the
//! backend is connected, with the defaults of Linux 6 (drivers/block/xen-blkfront.c, blkfront_connect).

use xenblk_ring::Abi;
use xenblk_ring::layout::MAX_DIRECT_SEGMENTS;
use xenblk_xenstore::xenbus::State;
use xenblk_xenstore::{Client, Error, Tx};

use super::profile::{Key, Negotiation, Profile};
use super::ring::Manners;
use crate::disk::DiskInfo;

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

/// Publishes the rings as the profile does.
pub(super) async fn write_rings(
    store: &Client,
    directory: &str,
    negotiation: &Negotiation,
    rings: &[RingKeys],
) -> Result<(), Error> {
    let nodes = ring_nodes(negotiation, rings);
    let nodes = nodes
        .into_iter()
        .map(|(key, value)| (format!("{directory}/{key}"), value));
    let nodes: Vec<(String, String)> = nodes.collect();
    if !negotiation.transaction {
        return store.write_many(Tx::NONE, &nodes).await;
    }
    store
        .transact(async |store, tx| store.write_many(tx, &nodes).await)
        .await
}

fn ring_nodes(negotiation: &Negotiation, rings: &[RingKeys]) -> Vec<(String, String)> {
    let pages = rings.first().map_or(1, |ring| ring.ring_refs.len());
    let mut nodes: Vec<(String, String)> = Vec::new();
    let of_a_ring = |key: &Key| matches!(key, Key::RingRef | Key::EventChannel);
    for keys in negotiation
        .keys
        .chunk_by(|one, other| of_a_ring(one) && of_a_ring(other))
    {
        match keys[0] {
            Key::RingPageOrder if pages > 1 => {
                nodes.push(("ring-page-order".into(), pages.ilog2().to_string()));
            }
            Key::NumRingPages if pages > 1 => {
                nodes.push(("num-ring-pages".into(), pages.to_string()));
            }
            Key::MultiQueueNumQueues if rings.len() > 1 || negotiation.always_num_queues => {
                nodes.push(("multi-queue-num-queues".into(), rings.len().to_string()));
            }
            Key::RingPageOrder | Key::NumRingPages | Key::MultiQueueNumQueues => {}
            Key::RingRef | Key::EventChannel => {
                for (number, ring) in rings.iter().enumerate() {
                    let several = rings.len() > 1;
                    let prefix = several.then(|| format!("queue-{number}/"));
                    ring.put(&mut nodes, &prefix.unwrap_or_default(), keys);
                }
            }
            Key::Protocol => nodes.push(("protocol".into(), Abi::NATIVE.protocol().into())),
            Key::Extra => nodes.extend(negotiation.extra.clone()),
        }
    }
    nodes
}

impl RingKeys {
    fn put(&self, nodes: &mut Vec<(String, String)>, prefix: &str, keys: &[Key]) {
        for key in keys {
            if *key == Key::EventChannel {
                let port = self.event_channel.to_string();
                nodes.push((format!("{prefix}event-channel"), port));
                continue;
            }
            let several = self.ring_refs.len() > 1;
            for (page, gref) in self.ring_refs.iter().enumerate() {
                let suffix = if several {
                    page.to_string()
                } else {
                    String::new()
                };
                nodes.push((format!("{prefix}ring-ref{suffix}"), gref.to_string()));
            }
        }
    }
}

/// The disk as the connected backend describes it, the segments a request may have, and what becomes of
/// grants.
pub(super) async fn read_device(
    store: &Client,
    backend: &str,
    profile: &Profile,
    queues: usize,
) -> Result<(DiskInfo, usize, Manners), NegotiationError> {
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
    let persistent = optional(store, backend, "feature-persistent", 0).await? != 0;
    let segments = profile.requests.segments.min(indirect as usize);
    let disk = DiskInfo {
        size: sectors.saturating_mul(512),
        sector_size,
        physical_sector_size: physical as u32,
        // VDISK_READONLY of blkif.h
        readonly: info & 4 != 0,
        flush,
        discard: discard && profile.requests.discard,
        queues,
    };
    let segments = segments.max(MAX_DIRECT_SEGMENTS);
    Ok((disk, segments, Manners::new(profile, persistent)))
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

    fn written(profile: &str, queues: u32, pages: u32) -> Vec<String> {
        let rings: Vec<RingKeys> = (0..queues)
            .map(|queue| RingKeys {
                ring_refs: (8 + queue * pages..).take(pages as usize).collect(),
                event_channel: 40 + queue,
            })
            .collect();
        let profile = Profile::named(profile).unwrap();
        let nodes = ring_nodes(&profile.negotiation, &rings);
        nodes
            .into_iter()
            .map(|(path, value)| format!("{path}={value}"))
            .collect()
    }

    #[test]
    fn one_queue_with_one_page_uses_the_oldest_names() {
        let expected = [
            "ring-ref=8",
            "event-channel=40",
            "protocol=x86_64-abi",
            "feature-persistent=1",
        ];
        assert_eq!(written("linux6", 1, 1), expected);
        assert_eq!(written("linux3.11", 1, 1), expected);
        assert_eq!(written("freebsd14", 1, 1), expected[..3]);
    }

    #[test]
    fn two_queues_with_two_pages_in_the_order_of_linux() {
        let expected = [
            "ring-page-order=1",
            "multi-queue-num-queues=2",
            "queue-0/ring-ref0=8",
            "queue-0/ring-ref1=9",
            "queue-0/event-channel=40",
            "queue-1/ring-ref0=10",
            "queue-1/ring-ref1=11",
            "queue-1/event-channel=41",
            "protocol=x86_64-abi",
            "feature-persistent=1",
        ];
        assert_eq!(written("linux6", 2, 2), expected);
    }

    #[test]
    fn windows_names_its_event_channel_first_and_always_counts_its_queues() {
        let expected = ["event-channel=40", "ring-ref=8", "multi-queue-num-queues=1"];
        assert_eq!(written("win9", 1, 1)[..3], expected);
    }

    #[test]
    fn freebsd_gives_the_number_of_pages_twice() {
        let expected = [
            "ring-ref0=8",
            "ring-ref1=9",
            "num-ring-pages=2",
            "ring-page-order=1",
            "event-channel=40",
            "protocol=x86_64-abi",
        ];
        assert_eq!(written("freebsd14", 1, 2), expected);
    }
}
