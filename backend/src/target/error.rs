//! Why a target can't be used: one line each, naming the value and what was expected.

use std::io;

/// Nothing was created, truncated or kept open.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The text names no target.
    #[error("target {value:?}: expected {expected}")]
    Spec {
        /// As given.
        value: String,
        /// What would have been accepted.
        expected: &'static str,
    },
    /// A system call failed.
    #[error("{value}: can't {doing}: {source}")]
    Io {
        /// Path of the target.
        value: String,
        /// The step, as it reads after "can't".
        doing: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The path leads to something else than a disk.
    #[error("{value}: is a {found}; expected a regular file or a block device")]
    Kind {
        /// Path of the target.
        value: String,
        /// What it is.
        found: &'static str,
    },
    /// No disk can have this size.
    #[error("{value}: is {size} bytes long; expected a multiple of 512, at least 512")]
    Size {
        /// Path of the target.
        value: String,
        /// Its size in bytes.
        size: u64,
    },
    /// The other end of a script socket said something else than its greeting.
    #[error("{value}: no test's script answers there: {problem}")]
    Script {
        /// Path of the socket.
        value: String,
        /// What came instead.
        problem: String,
    },
}
