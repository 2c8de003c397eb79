//! The control socket: who may ask, how long a line may be, one answer a line. What is answered comes
//! from the status board.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tracing::{debug, warn};

use super::board::Board;
use super::{SupervisorError, io_error};
use crate::control::{MAX_REQUEST_BYTES, Request, Response};

/// Clients served at the same time; more are closed at once.
const MAX_CLIENTS: usize = 16;

/// A client that asks nothing, or reads nothing, for this long is closed.
const IDLE: Duration = Duration::from_secs(60);

/// The listening socket; its file goes with it.
#[derive(Debug)]
pub(super) struct ControlSocket {
    listener: UnixListener,
    path: PathBuf,
}

impl ControlSocket {
    /// Binds `path` with mode 0600. A socket nobody listens on any more, left by a killed supervisor, is
    /// replaced; anything else that exists is refused.
    pub(super) fn bind(path: &Path) -> Result<Self, SupervisorError> {
        let failed = |source| {
            io_error(
                format!("cannot listen on control socket {}", path.display()),
                source,
            )
        };
        remove_stale(path).map_err(failed)?;
        let listener = UnixListener::bind(path).map_err(failed)?;
        let socket = Self {
            listener,
            path: path.to_owned(),
        };
        // Until this line the mode is the umask's; every client's uid is checked all the same.
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
        Ok(socket)
    }

    /// Answers clients until dropped.
    pub(super) async fn serve(self, board: Arc<Board>) {
        let mut clients = JoinSet::new();
        loop {
            tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, _)) if clients.len() < MAX_CLIENTS && may_ask(&stream) => {
                        clients.spawn(serve_client(stream, Arc::clone(&board)));
                    }
                    Ok(_) => debug!("control client refused"),
                    Err(error) => {
                        // Out of descriptors, most likely: don't spin on it.
                        warn!(%error, "control socket cannot accept");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                },
                Some(_) = clients.join_next() => {}
            }
        }
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            debug!(%error, path = %self.path.display(), "control socket was already gone");
        }
    }
}

/// Removes a socket that refuses connections; leaves everything else alone.
fn remove_stale(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(meta) if !meta.file_type().is_socket() => {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "it exists and is not a socket",
            ));
        }
        Ok(_) => {}
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            "another daemon listens on it",
        )),
    }
}

/// Root and our own user.
fn may_ask(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    matches!(stream.peer_cred(), Ok(cred) if cred.uid() == 0 || cred.uid() == own)
}

async fn serve_client(stream: UnixStream, board: Arc<Board>) {
    let (read, mut write) = stream.into_split();
    let mut read = BufReader::new(read);
    loop {
        let mut line = Vec::new();
        let limit = MAX_REQUEST_BYTES as u64;
        let received =
            tokio::time::timeout(IDLE, (&mut read).take(limit).read_until(b'\n', &mut line)).await;
        if !matches!(received, Ok(Ok(1..))) {
            return;
        }
        let complete = line.ends_with(b"\n");
        let response = if complete {
            answer(&line, &board)
        } else {
            too_long()
        };
        let Ok(mut bytes) = serde_json::to_vec(&response) else {
            return;
        };
        bytes.push(b'\n');
        // One that doesn't read its answers is closed like one that doesn't ask.
        let written = tokio::time::timeout(IDLE, write.write_all(&bytes)).await;
        if !matches!(written, Ok(Ok(()))) || !complete {
            return;
        }
    }
}

fn too_long() -> Response {
    Response::Error(format!(
        "expected one JSON request in a line of at most {MAX_REQUEST_BYTES} bytes"
    ))
}

fn answer(line: &[u8], board: &Board) -> Response {
    match serde_json::from_slice(line) {
        Ok(Request::Status {}) => Response::Status(board.status()),
        Ok(Request::Version {}) => Response::Version {
            version: env!("CARGO_PKG_VERSION").to_owned(),
        },
        Err(error) => Response::Error(format!(
            r#"expected {{"status":{{}}}} or {{"version":{{}}}}: {error}"#
        )),
    }
}
