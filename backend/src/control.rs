//! The control socket's language: one JSON object a line, a request answered by one response. Both
//! sides use these types: the supervisor to answer, the simulator and `xenblkd status` to ask.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::stats::Snapshot;

/// Longest line either side reads, newline included; a status of some thousand rings fits.
pub const MAX_RESPONSE_BYTES: u64 = 4 << 20;

/// Longest request line the supervisor reads, newline included.
pub const MAX_REQUEST_BYTES: usize = 1024;

/// What can be asked, for example `{"status":{}}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Every disk and ring with its counters.
    Status {},
    /// Which daemon this is.
    Version {},
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Response {
    /// Answer to [`Request::Status`].
    Status(Status),
    /// Answer to [`Request::Version`].
    Version {
        /// The crate's version.
        version: String,
    },
    /// The request was not understood; one line says what was expected.
    Error(String),
}

/// Everything the supervisor serves, ordered by domain and device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// One entry per backend directory.
    pub disks: Vec<DiskStatus>,
}

/// One vbd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStatus {
    /// The frontend's domain.
    pub domid: u16,
    /// The virtual device number.
    pub devid: u32,
    /// `params` of the backend directory: what the disk serves.
    pub params: String,
    /// The backend's XenBus state, by name.
    pub state: String,
    /// Capacity in bytes; absent until the target is open.
    pub size: Option<u64>,
    /// The guest may not write.
    pub readonly: bool,
    /// What is wrong with the device, as in its `error` node.
    pub error: Option<String>,
    /// For how many seconds it has been waiting for the storage to end the requests of a frontend that has
    /// let go, or of an earlier daemon; absent while it isn't. Until then the disk isn't closed.
    pub waiting_seconds: Option<u64>,
    /// The rings being served; empty unless connected.
    pub rings: Vec<RingStatus>,
}

/// One ring of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingStatus {
    /// Queue number within the disk.
    pub queue: u32,
    /// Number of the worker that owns it.
    pub worker: u32,
    /// That worker's process; absent for a thread.
    pub pid: Option<u32>,
    /// What the ring has done since it was attached.
    pub counters: Snapshot,
}

/// Asks the supervisor listening on `path`, blocking until it answers.
pub fn ask(path: &Path, request: Request) -> io::Result<Response> {
    let mut socket = UnixStream::connect(path)?;
    let mut line = serde_json::to_vec(&request)?;
    line.push(b'\n');
    socket.write_all(&line)?;
    let mut answer = String::new();
    BufReader::new(socket.take(MAX_RESPONSE_BYTES)).read_line(&mut answer)?;
    if !answer.ends_with('\n') {
        let reason = "the daemon closed the connection within its answer";
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason));
    }
    Ok(serde_json::from_str(&answer)?)
}
