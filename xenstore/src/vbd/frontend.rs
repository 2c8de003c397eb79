//! What a frontend publishes before state Initialised: protocol, queues, rings, event channels. All of
//! it is guest-controlled text. Read in two round trips, each key once; counts are bounded before
//! anything is allocated for them.

use std::collections::HashSet;

use super::{KeyError, ReadError, decimal};
use crate::client::{Client, Tx};

/// What this backend advertises, hence what a frontend may ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// `multi-queue-max-queues`, at least 1.
    pub max_queues: u32,
    /// `max-ring-page-order`: rings of up to `1 << order` pages, at most 4.
    pub max_ring_page_order: u32,
    /// `feature-max-indirect-segments`.
    pub max_indirect_segments: u32,
    /// What a frontend without `protocol` speaks; the specification says native.
    pub default_protocol: Protocol,
}

/// The ABI of the ring's contents (protocols.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// `x86_32-abi`
    X86_32,
    /// `x86_64-abi`
    X86_64,
    /// `arm-abi`
    Arm,
}

impl Protocol {
    /// What this machine's own kernels speak.
    pub const NATIVE: Self = if cfg!(any(target_arch = "aarch64", target_arch = "arm")) {
        Self::Arm
    } else if cfg!(target_arch = "x86") {
        Self::X86_32
    } else {
        Self::X86_64
    };

    /// The value of the `protocol` key.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::X86_32 => "x86_32-abi",
            Self::X86_64 => "x86_64-abi",
            Self::Arm => "arm-abi",
        }
    }

    fn parse(value: &[u8]) -> Option<Self> {
        let all = [Self::X86_32, Self::X86_64, Self::Arm];
        all.into_iter()
            .find(|protocol| protocol.as_str().as_bytes() == value)
    }
}

/// A frontend's parameters, in range by construction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrontendRings {
    /// Layout of requests and responses.
    pub protocol: Protocol,
    /// Pages of each ring: a power of two, at most `1 << max_ring_page_order`.
    pub pages: u32,
    /// 1 to `max_queues` of them; every grant and every port occurs once.
    pub queues: Vec<QueueKeys>,
    /// `feature-persistent`: the frontend would keep grants mapped.
    pub persistent: bool,
}

/// One queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueKeys {
    /// Grants of the ring's pages, in order.
    pub ring_refs: Vec<u32>,
    /// The frontend's unbound port.
    pub event_channel: u32,
}

/// Reads a frontend's parameters from its directory, each key once. Call it only when its state is
/// Initialised or Connected: before that, keys may be half written or left over.
pub async fn read_frontend(
    client: &Client,
    tx: Tx,
    frontend: &str,
    limits: &Limits,
) -> Result<FrontendRings, ReadError> {
    let in_directory = |keys: &[String]| -> Vec<String> {
        keys.iter().map(|key| format!("{frontend}/{key}")).collect()
    };
    let first = client.read_many(tx, &in_directory(&Shape::keys())).await?;
    let shape = Shape::parse(&first, limits)?;
    let keys = shape.ring_keys();
    let second = client.read_many(tx, &in_directory(&keys)).await?;
    Ok(shape.rings(&keys, second)?)
}

/// The keys that say which other keys there are.
#[derive(Debug)]
struct Shape {
    protocol: Protocol,
    order: u32,
    /// `ring-page-order` is there: Linux then names a single page `ring-ref0`.
    order_present: bool,
    queues: u32,
    persistent: bool,
}

const PROTOCOL: &str = "protocol";
const ORDER: &str = "ring-page-order";
const PAGES: &str = "num-ring-pages";
const QUEUES: &str = "multi-queue-num-queues";
const PERSISTENT: &str = "feature-persistent";

impl Shape {
    fn keys() -> [String; 5] {
        [PROTOCOL, ORDER, PAGES, QUEUES, PERSISTENT].map(str::to_owned)
    }

    fn parse(values: &[Option<Vec<u8>>], limits: &Limits) -> Result<Self, KeyError> {
        let value = |index: usize| present(values.get(index));
        let protocol = match value(0) {
            None => limits.default_protocol,
            Some(value) => Protocol::parse(value).ok_or_else(|| {
                KeyError::new(PROTOCOL, Some(value), "x86_32-abi, x86_64-abi or arm-abi")
            })?,
        };
        let order = number(ORDER, value(1), 0, limits.max_ring_page_order)?;
        let order_present = order.is_some();
        let order = order.unwrap_or(0);
        // In range: an order above 4 is not advertised, see `Limits`.
        let pages = 1_u32.checked_shl(order).unwrap_or(u32::MAX);
        number(PAGES, value(2), pages, pages)?;
        let queues = number(QUEUES, value(3), 1, limits.max_queues)?.unwrap_or(1);
        // Anything but 1 is a no: nothing depends on it but speed.
        let persistent = value(4) == Some(b"1".as_slice());
        Ok(Self {
            protocol,
            order,
            order_present,
            queues,
            persistent,
        })
    }

    fn pages(&self) -> u32 {
        1_u32.checked_shl(self.order).unwrap_or(u32::MAX)
    }

    /// The keys of all rings: for each queue its event channel, then its pages.
    fn ring_keys(&self) -> Vec<String> {
        let mut keys = Vec::new();
        for queue in 0..self.queues {
            let prefix = if self.queues > 1 {
                format!("queue-{queue}/")
            } else {
                String::new()
            };
            keys.push(format!("{prefix}event-channel"));
            match (self.order, self.order_present) {
                // One page has two spellings. The likelier one first: the other may be left over
                // from an earlier frontend.
                (0, false) => {
                    keys.extend(["ring-ref", "ring-ref0"].map(|k| format!("{prefix}{k}")));
                }
                (0, true) => keys.extend(["ring-ref0", "ring-ref"].map(|k| format!("{prefix}{k}"))),
                _ => keys.extend((0..self.pages()).map(|page| format!("{prefix}ring-ref{page}"))),
            }
        }
        keys
    }

    /// From the values of [`ring_keys`](Self::ring_keys).
    fn rings(
        &self,
        keys: &[String],
        values: Vec<Option<Vec<u8>>>,
    ) -> Result<FrontendRings, KeyError> {
        let mut pairs = keys
            .iter()
            .zip(values.into_iter().map(|v| v.filter(|v| !v.is_empty())));
        let mut queues = Vec::new();
        let mut ports = Unique::new("a port of its own for each queue");
        let mut grants = Unique::new("a grant of its own for each ring page");
        for _ in 0..self.queues {
            let event_channel = ports.take(pairs.next())?;
            let mut ring_refs = Vec::new();
            if self.order == 0 {
                let (first, second) = (pairs.next(), pairs.next());
                let first_missing = first.as_ref().is_none_or(|(_, value)| value.is_none());
                let second_there = second.as_ref().is_some_and(|(_, value)| value.is_some());
                ring_refs.push(grants.take(if first_missing && second_there {
                    second
                } else {
                    first
                })?);
            } else {
                for _ in 0..self.pages() {
                    ring_refs.push(grants.take(pairs.next())?);
                }
            }
            queues.push(QueueKeys {
                ring_refs,
                event_channel,
            });
        }
        let (protocol, persistent) = (self.protocol, self.persistent);
        Ok(FrontendRings {
            protocol,
            pages: self.pages(),
            queues,
            persistent,
        })
    }
}

/// Mandatory numbers that must differ from each other.
struct Unique {
    seen: HashSet<u32>,
    expected: &'static str,
}

impl Unique {
    fn new(expected: &'static str) -> Self {
        Self {
            seen: HashSet::new(),
            expected,
        }
    }

    fn take(&mut self, pair: Option<(&String, Option<Vec<u8>>)>) -> Result<u32, KeyError> {
        let (key, value) = pair.map_or(("", None), |(key, value)| (key.as_str(), value));
        let number = number(key, value.as_deref(), 0, u32::MAX)?
            .ok_or_else(|| KeyError::new(key, None, "a decimal number"))?;
        if !self.seen.insert(number) {
            return Err(KeyError::new(key, value.as_deref(), self.expected));
        }
        Ok(number)
    }
}

/// Absent and empty are the same: GRUB empties its keys where others remove them.
fn present(value: Option<&Option<Vec<u8>>>) -> Option<&[u8]> {
    value?.as_deref().filter(|value| !value.is_empty())
}

fn number(key: &str, value: Option<&[u8]>, min: u32, max: u32) -> Result<Option<u32>, KeyError> {
    let Some(text) = value else { return Ok(None) };
    match decimal(text) {
        Some(number) if (min..=max).contains(&number) => Ok(Some(number)),
        _ => {
            let expected = match (min, max) {
                (0, u32::MAX) => "a decimal number".to_owned(),
                (min, max) if min == max => format!("{min}"),
                (min, max) => format!("{min} to {max}"),
            };
            Err(KeyError::new(key, Some(text), expected))
        }
    }
}

#[cfg(test)]
#[path = "frontend_tests.rs"]
mod tests;
