//! Which frontend is simulated: a small file for each, in `tests/profiles`, says what it writes, which
//! requests it makes and what it grants. Facts about real frontends stand in those files only; what a
//! value makes the simulated one do, here and where it is used.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;
use xenblk_ring::layout::{MAX_INDIRECT_SEGMENTS, MAX_RING_ORDER};

/// Every profile's name and file.
const FILES: [(&str, &str); 4] = [
    ("linux6", include_str!("../../profiles/linux6.toml")),
    ("linux3.11", include_str!("../../profiles/linux3.11.toml")),
    ("win9", include_str!("../../profiles/win9.toml")),
    ("freebsd14", include_str!("../../profiles/freebsd14.toml")),
];

/// One frontend's manners.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Profile {
    /// What it is called.
    #[serde(skip)]
    pub name: &'static str,
    /// What it is, in one line.
    pub summary: String,
    pub(super) on_closing: OnClosing,
    pub(super) negotiation: Negotiation,
    /// How many rings it makes, and of what size.
    pub rings: Rings,
    /// What one request can be.
    pub requests: Requests,
    /// What it grants, and for how long.
    pub grants: Grants,
}

/// What a backend's Closing is answered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum OnClosing {
    /// Closed, whatever is in flight.
    Closed,
    /// Closing, then Closed.
    ClosingClosed,
}

/// What happens before Connected.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Negotiation {
    pub(super) start: Start,
    /// Its keys are written in one transaction, else one by one.
    pub(super) transaction: bool,
    /// What is written, in this order.
    pub(super) keys: Vec<Key>,
    /// `multi-queue-num-queues` is written for one ring too.
    #[serde(default)]
    pub(super) always_num_queues: bool,
    /// Further keys with their values.
    #[serde(default)]
    pub(super) extra: BTreeMap<String, String>,
}

/// When the rings are offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Start {
    /// As soon as the backend is in InitWait.
    AtInitWait,
    /// After a whole cycle of Closing, Closed and Initialising with the backend, whatever it was before.
    AfterClosing,
}

/// One of the keys a frontend publishes, or a group of them. Neighbours that every ring has are written
/// ring by ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Key {
    /// If the rings have several pages.
    RingPageOrder,
    /// The same as a number, in FreeBSD's key.
    NumRingPages,
    /// If there are several rings.
    MultiQueueNumQueues,
    RingRef,
    EventChannel,
    Protocol,
    /// [`Negotiation::extra`].
    Extra,
}

/// How many rings.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Rings {
    /// As it comes.
    pub usual: u32,
    /// At most, 16 being what the simulator has.
    pub most: u32,
    /// Pages of a ring at most, as a power of two.
    pub max_order: u32,
}

/// Which requests.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Requests {
    /// Segments of a request at most, if the backend offers so many; direct requests alone have 11.
    pub segments: usize,
    /// It has DISCARD.
    pub discard: bool,
    pub(super) ids: Ids,
}

/// What an id is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Ids {
    /// The number of the request's slot among the ring's.
    Index,
    /// The address of its structure in the guest's kernel.
    Pointer,
}

/// What the backend may touch.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Grants {
    /// Grants outlive their request if the backend offers that and keeps them mapped.
    pub persistent: bool,
    /// Pages to be written to the disk are granted read-only.
    pub readonly_writes: bool,
    /// Pages of segment descriptors.
    pub indirect: IndirectGrants,
}

/// How pages of segment descriptors are granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IndirectGrants {
    /// As data that is read, and from the same pages.
    LikeData,
    /// Read-only, for one request.
    Readonly,
    /// Read-only, one page for each slot, until the disk goes.
    Once,
}

impl Profile {
    /// Every profile.
    pub fn all() -> &'static [Self] {
        static ALL: LazyLock<Vec<Profile>> = LazyLock::new(|| {
            let profiles = FILES.iter().map(|(name, text)| parse(name, text));
            let profiles: Result<_, _> = profiles.collect();
            profiles.unwrap_or_else(|error: String| unreachable!("a test parses them all: {error}"))
        });
        &ALL
    }

    /// The profile called `name`.
    pub fn named(name: &str) -> Option<&'static Self> {
        Self::all().iter().find(|profile| profile.name == name)
    }

    /// xen-blkfront of Linux 5.16 and later.
    pub fn linux6() -> &'static Self {
        &Self::all()[0]
    }

    /// Pages of guest memory that one entry of a ring needs at most: data and descriptors of a request.
    pub(super) fn pages_per_entry(&self) -> usize {
        self.requests.segments.min(MAX_INDIRECT_SEGMENTS) + 1
    }
}

fn parse(name: &'static str, text: &str) -> Result<Profile, String> {
    let mut profile: Profile =
        toml::from_str(text).map_err(|error| format!("profile {name}: {error}"))?;
    profile.name = name;
    let rings = &profile.rings;
    if rings.usual == 0
        || rings.usual > rings.most
        || rings.most > 16
        || rings.max_order > MAX_RING_ORDER
    {
        return Err(format!(
            "profile {name}: {rings:?}, expected 1 to 16 rings and an order up to 4"
        ));
    }
    Ok(profile)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_a_profile_and_listed() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/profiles");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        files.sort();
        let mut listed: Vec<String> = FILES
            .iter()
            .map(|(name, _)| format!("{name}.toml"))
            .collect();
        listed.sort();
        assert_eq!(files, listed);
        for (name, text) in FILES {
            assert_eq!(parse(name, text).map(|profile| profile.name), Ok(name));
        }
        assert_eq!(Profile::linux6().name, "linux6");
    }

    #[test]
    fn a_profile_with_a_key_nobody_knows_or_too_many_rings_is_refused() {
        let (name, text) = FILES[0];
        let unknown = parse(name, &format!("{text}\nsecret = 1")).unwrap_err();
        assert!(unknown.contains("secret"), "{unknown}");
        let many = parse(name, &text.replace("most = 16", "most = 17")).unwrap_err();
        assert!(many.contains("expected 1 to 16 rings"), "{many}");
    }
}
