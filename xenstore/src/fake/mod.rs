//! An in-memory xenstored that speaks the real protocol over Unix sockets. Tests and the simulator
//! only.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A running server; it ends when dropped.
#[derive(Debug)]
pub struct Server {}

impl Server {
    /// Starts an empty store on a thread of its own.
    pub fn start() -> io::Result<Self> {
        Ok(Self {})
    }

    /// Accepts connections at `path`, which must not exist; its clients are domain 0.
    pub fn listen(&self, _path: impl AsRef<Path>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// A connection of domain `domid`.
    pub fn connect_as(&self, _domid: u16) -> io::Result<UnixStream> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// A domain starts: `@introduceDomain` fires.
    pub fn introduce(&self, _domid: u16) {}

    /// A domain is gone: its connections close, `@releaseDomain` fires. Its nodes stay, as in Xen.
    pub fn release(&self, _domid: u16) {}
}
