//! The keys of a virtual block device (blkif.h, "Backend XenBus Nodes" and "Frontend XenBus Nodes"):
//! names, strict parsing, and the few store accesses that need more than one key at once.
//!
//! Domid and paths come from the backend directory only; `device-type` too. The frontend's directory
//! is written by the guest and gives nothing but ring parameters.

mod backend;
mod frontend;
mod publish;

use std::fmt;

pub use backend::{BackendKeys, read_backend};
pub use frontend::{FrontendRings, Limits, Protocol, QueueKeys, read_frontend};
pub use publish::{
    Believed, DeviceProperties, DiscardProperties, Outcome, device_keys, publish, read_believed,
    read_state, report_error, report_hotplug_error, report_target_open, transport_keys,
};

use crate::error::{Error, escape};

/// The name the toolstack gives our kind of device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// `vbd`, what libxl writes for a `phy` disk.
    Vbd,
    /// `vbd3`, what xapi writes.
    Vbd3,
}

impl Kind {
    /// The directory's name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Vbd => "vbd",
            Self::Vbd3 => "vbd3",
        }
    }

    /// The directory of all devices of this kind, relative to the backend domain's home. Watch it.
    #[must_use]
    pub fn root(self) -> String {
        format!("backend/{}", self.as_str())
    }
}

/// One device's backend directory, `backend/<kind>/<domid>/<devid>`: relative, so that it works in a
/// driver domain too. The only source of a device's domid and number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BackendPath {
    /// `vbd` or `vbd3`.
    pub kind: Kind,
    /// The frontend's domain.
    pub domid: u16,
    /// The virtual device number; an opaque name to a backend.
    pub devid: u32,
}

impl BackendPath {
    /// From the path of a watch event at or below a device's directory, relative or absolute
    /// (`/local/domain/<n>/backend/…`). Returns what follows the directory as well (`"state"`, `""`).
    /// `None` for anything else, such as the kind's root or a directory that is not a number.
    #[must_use]
    pub fn parse(path: &str) -> Option<(Self, &str)> {
        let relative = match path.strip_prefix("/local/domain/") {
            Some(rest) => rest.split_once('/')?.1,
            None => path,
        };
        let (kind, rest) = relative.strip_prefix("backend/")?.split_once('/')?;
        let kind = [Kind::Vbd, Kind::Vbd3]
            .into_iter()
            .find(|known| known.as_str() == kind)?;
        let (domid, rest) = rest.split_once('/')?;
        let (devid, leaf) = rest.split_once('/').unwrap_or((rest, ""));
        let domid = u16::try_from(decimal(domid.as_bytes())?).ok()?;
        Some((
            Self {
                kind,
                domid,
                devid: decimal(devid.as_bytes())?,
            },
            leaf,
        ))
    }

    /// The path of one of the directory's keys.
    #[must_use]
    pub fn key(&self, name: &str) -> String {
        format!("{self}/{name}")
    }

    /// Where xenbus drivers leave a message for the administrator.
    #[must_use]
    pub fn error_key(&self) -> String {
        format!("error/{self}/error")
    }
}

impl fmt::Display for BackendPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "backend/{}/{}/{}",
            self.kind.as_str(),
            self.domid,
            self.devid
        )
    }
}

/// A key that can't be used: which, what it says (escaped and cut), what it should say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyError {
    /// The key, relative to its directory.
    pub key: String,
    /// Its value, made harmless; `None`: missing or empty.
    pub value: Option<String>,
    /// What was expected.
    pub expected: String,
}

impl KeyError {
    fn new(key: &str, value: Option<&[u8]>, expected: impl Into<String>) -> Self {
        Self {
            key: key.to_owned(),
            value: value.map(escape),
            expected: expected.into(),
        }
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(value) => write!(f, "{} is \"{value}\", expected {}", self.key, self.expected),
            None => write!(f, "{} is missing, expected {}", self.key, self.expected),
        }
    }
}

impl std::error::Error for KeyError {}

/// Why a device's keys could not be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// A key is unusable: the device can't connect until it is written again.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] Error),
}

/// A decimal number as XenStore keys carry it: digits only, no sign, blank or NUL, at most `u32::MAX`.
#[must_use]
pub fn decimal(text: &[u8]) -> Option<u32> {
    // Ten digits hold every u32; leading zeros beyond that are somebody's joke.
    if text.is_empty() || text.len() > 10 {
        return None;
    }
    text.iter().try_fold(0_u32, |value, byte| {
        let digit = byte.checked_sub(b'0').filter(|digit| *digit < 10)?;
        value.checked_mul(10)?.checked_add(u32::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_are_strict() {
        for (text, number) in [
            ("0", Some(0)),
            ("8", Some(8)),
            ("0008", Some(8)),
            ("4294967295", Some(u32::MAX)),
            ("4294967296", None),
            ("99999999999", None),
            ("00000000001", None),
            ("", None),
            ("+1", None),
            ("-1", None),
            (" 1", None),
            ("1 ", None),
            ("1\n", None),
            ("1\0", None),
            ("0x1", None),
            ("2abc", None),
            ("\u{661}", None),
        ] {
            assert_eq!(decimal(text.as_bytes()), number, "{text:?}");
        }
    }

    #[test]
    fn backend_paths() {
        let device = BackendPath {
            kind: Kind::Vbd,
            domid: 1,
            devid: 51712,
        };
        for (path, expected) in [
            ("backend/vbd/1/51712", Some((device, ""))),
            ("backend/vbd/1/51712/state", Some((device, "state"))),
            (
                "/local/domain/3/backend/vbd/1/51712/a/b",
                Some((device, "a/b")),
            ),
            (
                "backend/vbd3/1/51712/x",
                Some((
                    BackendPath {
                        kind: Kind::Vbd3,
                        ..device
                    },
                    "x",
                )),
            ),
            ("backend/vbd", None),
            ("backend/vbd/1", None),
            ("backend/vbd/1/", None),
            ("backend/vbd/1/xvda", None),
            ("backend/vbd/70000/1", None),
            ("backend/qdisk/1/51712", None),
            ("backend/vbdx/1/51712", None),
            ("/local/domain/3", None),
            ("@releaseDomain", None),
        ] {
            assert_eq!(BackendPath::parse(path), expected, "{path}");
        }
        assert_eq!(device.key("state"), "backend/vbd/1/51712/state");
        assert_eq!(device.error_key(), "error/backend/vbd/1/51712/error");
        assert_eq!(BackendPath::parse(&device.to_string()), Some((device, "")));
    }

    #[test]
    fn a_message_carries_no_raw_guest_bytes() {
        let value = [b"\x1b[31m\n\xff".as_slice(), &[b'a'; 4000]].concat();
        let error = KeyError::new("protocol", Some(&value), "x86_64-abi").to_string();
        assert!(
            error.starts_with("protocol is \"\\x1b[31m\\n\\xffaaa"),
            "{error}"
        );
        assert!(
            error.ends_with("aaa... (4007 bytes)\", expected x86_64-abi"),
            "{error}"
        );
        assert!(error.len() < 200 && error.is_ascii(), "{error}");
    }
}
