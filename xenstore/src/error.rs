//! What a XenStore call can fail with, and how foreign bytes are shown in messages.

use std::fmt::Write as _;
use std::io;

/// Longest piece of a foreign value that is repeated in a message, in bytes of the original.
const SHOWN: usize = 64;

/// Why a call failed. The errno names are those the daemon sends as text (xenstore.txt, "ERROR").
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// ENOENT: no such node, watch or transaction.
    #[error("no such entry")]
    NoEntry,
    /// EAGAIN: the transaction met a conflict and must be run again from its first read.
    #[error("transaction conflict")]
    Again,
    /// EACCES or EPERM: this domain may not do that.
    #[error("access denied")]
    Access,
    /// E2BIG: the request, value or reply is larger than the protocol or the server's quota allows.
    #[error("too big")]
    TooBig,
    /// EEXIST: the watch is already registered.
    #[error("already exists")]
    Exists,
    /// EINVAL: the server could not make sense of the request.
    #[error("invalid request")]
    Invalid,
    /// ENOSPC: a quota of the server is used up.
    #[error("quota exceeded")]
    Quota,
    /// ENOSYS: this server does not know the operation.
    #[error("not supported by this xenstored")]
    NotSupported,
    /// Any other errno name, escaped.
    #[error("xenstored answered {0}")]
    Os(String),
    /// The path is empty, longer than 3072 bytes or contains a NUL; nothing was sent.
    #[error("bad XenStore path \"{0}\"")]
    BadPath(String),
    /// The answer does not have the form the operation promises.
    #[error("malformed answer: {0}")]
    Malformed(&'static str),
    /// Connecting failed.
    #[error("connecting to xenstored: {0}")]
    Connect(String),
    /// The connection is gone; whether the request was carried out is unknown.
    #[error("disconnected from xenstored: {0}")]
    Disconnected(String),
}

impl Error {
    /// From the payload of an ERROR packet: an errno name, NUL-terminated.
    pub(crate) fn from_wire(payload: &[u8]) -> Self {
        match payload.strip_suffix(b"\0").unwrap_or(payload) {
            b"ENOENT" => Self::NoEntry,
            b"EAGAIN" => Self::Again,
            b"EACCES" | b"EPERM" => Self::Access,
            b"E2BIG" => Self::TooBig,
            b"EEXIST" => Self::Exists,
            b"EINVAL" => Self::Invalid,
            b"ENOSPC" => Self::Quota,
            b"ENOSYS" => Self::NotSupported,
            other => Self::Os(escape(other)),
        }
    }

    /// From the error of a write to the xenbus device.
    pub(crate) fn from_errno(error: &io::Error) -> Self {
        // Of the numbers that are the same on every Linux (asm-generic/errno-base.h).
        match error.raw_os_error() {
            Some(2) => Self::NoEntry,
            Some(11) => Self::Again,
            Some(1 | 13) => Self::Access,
            Some(7) => Self::TooBig,
            Some(17) => Self::Exists,
            Some(22) => Self::Invalid,
            Some(28) => Self::Quota,
            Some(38) => Self::NotSupported,
            _ => Self::Os(error.to_string()),
        }
    }

    pub(crate) fn connect(error: &io::Error) -> Self {
        Self::Connect(error.to_string())
    }
}

/// Foreign bytes made harmless for a message or log: escaped and cut to 64 bytes.
pub(crate) fn escape(bytes: &[u8]) -> String {
    let mut shown = String::new();
    for byte in bytes.iter().take(SHOWN) {
        // Writing to a String cannot fail.
        let _ = write!(shown, "{}", byte.escape_ascii());
    }
    if bytes.len() > SHOWN {
        let _ = write!(shown, "... ({} bytes)", bytes.len());
    }
    shown
}
