//! The client: one connection to a xenstored, shared by any number of callers.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::error::{Error, escape};
use crate::events::{Events, Shared};
use crate::permission::Permission;
use crate::pump::{Answer, Command, Effect, Pump, Undo, transaction_id};
use crate::transport::Transport;
use crate::wire::{MAX_ABSOLUTE_PATH, MAX_REQUEST, Op};

/// Requests in flight on one connection; more callers wait their turn.
const MAX_IN_FLIGHT: usize = 64;
/// How often [`Client::transact`] runs its body before it gives up with [`Error::Again`].
const MAX_ATTEMPTS: u32 = 64;
/// How often a directory that changes while it is read in parts is started again.
const MAX_DIRECTORY_RESTARTS: u32 = 16;
/// Longest child list assembled from parts, in bytes.
const MAX_DIRECTORY: usize = 1 << 20;

/// A transaction on one connection, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tx(u32);

impl Tx {
    /// Outside any transaction.
    pub const NONE: Self = Self(0);
}

/// A handle on a connection; clones share it. The connection closes when the last clone is dropped.
///
/// Every method may be cancelled by dropping its future: a request already sent is still carried out,
/// and a watch or transaction whose answer nobody awaits any more is closed again. Paths are absolute,
/// or relative to `/local/domain/<own domid>`; an empty path or one with a NUL is refused unsent.
#[derive(Debug, Clone)]
pub struct Client {
    commands: mpsc::UnboundedSender<Command>,
    in_flight: Arc<Semaphore>,
    events: Arc<Shared>,
}

type Receiver = oneshot::Receiver<Result<Answer, Error>>;

impl Client {
    /// Connects to the daemon's socket, usually `/run/xenstored/socket`, or to the kernel's device,
    /// `/dev/xen/xenbus`: what `path` leads to decides.
    pub async fn connect(path: impl AsRef<Path>) -> Result<(Self, Events), Error> {
        let transport = Transport::connect(path.as_ref()).await;
        Ok(Self::start(
            transport.map_err(|error| Error::connect(&error))?,
        ))
    }

    /// Speaks the protocol over a connected stream. Needs a tokio runtime, on which the pump runs.
    #[must_use]
    pub fn from_stream(stream: UnixStream) -> (Self, Events) {
        Self::start(Transport::Socket(stream))
    }

    /// Speaks to an open xenbus device, which must be non-blocking. Needs a tokio runtime.
    pub fn from_device(device: File) -> Result<(Self, Events), Error> {
        let transport = Transport::device(device).map_err(|error| Error::connect(&error))?;
        Ok(Self::start(transport))
    }

    fn start(transport: Transport) -> (Self, Events) {
        let (commands, receiver) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared::default());
        let pump = Pump::new(transport, Arc::clone(&shared), commands.downgrade());
        tokio::spawn(pump.run(receiver));
        let in_flight = Arc::new(Semaphore::new(MAX_IN_FLIGHT));
        (
            Self {
                commands,
                in_flight,
                events: Arc::clone(&shared),
            },
            Events { shared },
        )
    }

    /// The node's value: bytes, not text; may be empty.
    pub async fn read(&self, tx: Tx, path: &str) -> Result<Vec<u8>, Error> {
        self.call(Op::READ, tx, path_payload(path)?).await
    }

    /// As [`read`](Self::read), with a missing node as `None`.
    pub async fn read_optional(&self, tx: Tx, path: &str) -> Result<Option<Vec<u8>>, Error> {
        optional(self.read(tx, path).await)
    }

    /// Reads many nodes in one round trip; a missing node is `None`. Each is read exactly once.
    pub async fn read_many(&self, tx: Tx, paths: &[String]) -> Result<Vec<Option<Vec<u8>>>, Error> {
        let mut answers = Vec::with_capacity(paths.len());
        for path in paths {
            answers.push(
                self.submit(Op::READ, tx, path_payload(path)?, Effect::None)
                    .await?,
            );
        }
        let mut values = Vec::with_capacity(paths.len());
        for answer in answers {
            values.push(optional(
                self.answer(answer).await.map(|answer| answer.payload),
            )?);
        }
        Ok(values)
    }

    /// Sets the node's value, creating it and missing parents.
    pub async fn write(&self, tx: Tx, path: &str, value: impl AsRef<[u8]>) -> Result<(), Error> {
        let payload = write_payload(path, value.as_ref())?;
        self.call(Op::WRITE, tx, payload).await.map(drop)
    }

    /// Writes many nodes in one round trip and in this order. On an error some may have been written:
    /// use a transaction where that matters.
    pub async fn write_many(&self, tx: Tx, nodes: &[(String, String)]) -> Result<(), Error> {
        let mut answers = Vec::with_capacity(nodes.len());
        for (path, value) in nodes {
            let payload = write_payload(path, value.as_bytes())?;
            answers.push(self.submit(Op::WRITE, tx, payload, Effect::None).await?);
        }
        for answer in answers {
            self.answer(answer).await?;
        }
        Ok(())
    }

    /// Creates an empty node and missing parents; an existing node is left as it is.
    pub async fn mkdir(&self, tx: Tx, path: &str) -> Result<(), Error> {
        self.call(Op::MKDIR, tx, path_payload(path)?)
            .await
            .map(drop)
    }

    /// Removes the node and everything below it. Removing a missing child of an existing node is fine.
    pub async fn rm(&self, tx: Tx, path: &str) -> Result<(), Error> {
        self.call(Op::RM, tx, path_payload(path)?).await.map(drop)
    }

    /// Names of the node's children, however many: in parts where the server needs it.
    pub async fn directory(&self, tx: Tx, path: &str) -> Result<Vec<String>, Error> {
        let list = match self.call(Op::DIRECTORY, tx, path_payload(path)?).await {
            Err(Error::TooBig) => self.directory_in_parts(tx, path).await?,
            list => list?,
        };
        names(&list)
    }

    /// DIRECTORY_PART (xenstore.txt): `gencnt NUL child NUL …`, from a byte offset into the whole list.
    /// An empty child name ends it. A new generation count means the list changed: from the start.
    async fn directory_in_parts(&self, tx: Tx, path: &str) -> Result<Vec<u8>, Error> {
        for _ in 0..MAX_DIRECTORY_RESTARTS {
            let mut list: Vec<u8> = Vec::new();
            let mut generation: Option<Vec<u8>> = None;
            loop {
                let mut payload = path_payload(path)?;
                payload.extend_from_slice(list.len().to_string().as_bytes());
                payload.push(0);
                let part = match self.call(Op::DIRECTORY_PART, tx, payload).await {
                    Err(Error::NotSupported) => return Err(Error::TooBig),
                    part => part?,
                };
                let end = part.iter().position(|byte| *byte == 0);
                let (count, rest) = end
                    .and_then(|end| Some((part.get(..end)?, part.get(end..)?.get(1..)?)))
                    .ok_or(Error::Malformed("directory part without a generation"))?;
                if generation.get_or_insert_with(|| count.to_vec()) != count {
                    break;
                }
                list.extend_from_slice(rest);
                if rest == b"\0" || rest.ends_with(b"\0\0") {
                    list.pop();
                    return Ok(list);
                }
                if rest.is_empty() {
                    return Err(Error::Malformed("empty directory part"));
                }
                if list.len() > MAX_DIRECTORY {
                    return Err(Error::TooBig);
                }
            }
        }
        Err(Error::Again)
    }

    /// The node's permissions, owner first.
    pub async fn get_perms(&self, tx: Tx, path: &str) -> Result<Vec<Permission>, Error> {
        let payload = self.call(Op::GET_PERMS, tx, path_payload(path)?).await?;
        let list = payload.strip_suffix(b"\0").unwrap_or(&payload);
        list.split(|byte| *byte == 0)
            .map(|text| Permission::parse(text).ok_or(Error::Malformed("permission entry")))
            .collect()
    }

    /// Replaces the node's permissions; the first entry names the owner.
    pub async fn set_perms(&self, tx: Tx, path: &str, perms: &[Permission]) -> Result<(), Error> {
        let mut payload = path_payload(path)?;
        for permission in perms {
            payload.extend_from_slice(permission.to_string().as_bytes());
            payload.push(0);
        }
        self.call(Op::SET_PERMS, tx, payload).await.map(drop)
    }

    /// Watches a node and everything below it, or a special name (`@introduceDomain`,
    /// `@releaseDomain`). One event comes at once, whether or not the node exists.
    pub async fn watch(&self, path: &str, token: &str) -> Result<(), Error> {
        let effect = Effect::Watch(path.to_owned(), token.to_owned());
        let receiver = self
            .submit(Op::WATCH, Tx::NONE, watch_payload(path, token)?, effect)
            .await?;
        disarm(self.answer(receiver).await?);
        Ok(())
    }

    /// Removes a watch. Events that still wait for its token are dropped, unless another watch has the
    /// same token.
    pub async fn unwatch(&self, path: &str, token: &str) -> Result<(), Error> {
        let effect = Effect::Unwatch(path.to_owned(), token.to_owned());
        let payload = watch_payload(path, token)?;
        let receiver = self.submit(Op::UNWATCH, Tx::NONE, payload, effect).await?;
        self.answer(receiver).await.map(drop)
    }

    /// Removes every watch and transaction this connection has on the server; over the kernel's device,
    /// which others share, [`Error::NotSupported`]. Events that still come
    /// from before are delivered.
    pub async fn reset_watches(&self) -> Result<(), Error> {
        self.call(Op::RESET_WATCHES, Tx::NONE, vec![0])
            .await
            .map(drop)
    }

    /// Opens a transaction. Prefer [`transact`](Self::transact), which can't leave one open.
    pub async fn begin(&self) -> Result<Tx, Error> {
        let receiver = self
            .submit(Op::TRANSACTION_START, Tx::NONE, vec![0], Effect::Begin)
            .await?;
        let answer = self.answer(receiver).await?;
        let id = transaction_id(&answer.payload).ok_or(Error::Malformed("transaction id"))?;
        disarm(answer);
        Ok(Tx(id))
    }

    /// Commits. [`Error::Again`]: a conflict; nothing was changed and the transaction is gone.
    pub async fn commit(&self, tx: Tx) -> Result<(), Error> {
        self.call(Op::TRANSACTION_END, tx, b"T\0".to_vec())
            .await
            .map(drop)
    }

    /// Ends the transaction without changing anything.
    pub async fn abort(&self, tx: Tx) -> Result<(), Error> {
        self.call(Op::TRANSACTION_END, tx, b"F\0".to_vec())
            .await
            .map(drop)
    }

    /// Runs `body` in a transaction and commits. On a conflict everything is run again from fresh
    /// reads, a bounded number of times, then [`Error::Again`]. When `body` fails, or the future is
    /// dropped, the transaction is aborted.
    pub async fn transact<T, E, F, B>(&self, mut body: F) -> Result<T, E>
    where
        E: From<Error>,
        F: FnMut(Self, Tx) -> B,
        B: Future<Output = Result<T, E>>,
    {
        for _ in 0..MAX_ATTEMPTS {
            let tx = self.begin().await?;
            let open = Undo::new(self.commands.clone(), Undo::abort(tx.0));
            let value = body(self.clone(), tx).await?;
            let committed = self.commit(tx).await;
            // Only now: cancelled while the commit still waited for its turn, it must be aborted.
            // After a commit that was carried out, the abort meets ENOENT.
            open.disarm();
            match committed {
                Ok(()) => return Ok(value),
                Err(Error::Again) => tokio::task::yield_now().await,
                Err(error) => return Err(error.into()),
            }
        }
        Err(Error::Again.into())
    }

    /// The home of a domain, usually `/local/domain/<domid>`.
    pub async fn get_domain_path(&self, domid: u16) -> Result<String, Error> {
        let payload = format!("{domid}\0").into_bytes();
        let path = self.call(Op::GET_DOMAIN_PATH, Tx::NONE, payload).await?;
        let path = path.strip_suffix(b"\0").unwrap_or(&path);
        String::from_utf8(path.to_vec()).map_err(|_| Error::Malformed("domain path"))
    }

    /// Whether the server knows the domain.
    pub async fn is_domain_introduced(&self, domid: u16) -> Result<bool, Error> {
        let payload = format!("{domid}\0").into_bytes();
        match self
            .call(Op::IS_DOMAIN_INTRODUCED, Tx::NONE, payload)
            .await?
            .first()
        {
            Some(b'T') => Ok(true),
            Some(b'F') => Ok(false),
            _ => Err(Error::Malformed("T or F expected")),
        }
    }

    /// Makes a domain known to the server; toolstacks do this. `port` is its event channel.
    pub async fn introduce(&self, domid: u16, frame: u64, port: u32) -> Result<(), Error> {
        let payload = format!("{domid}\0{frame}\0{port}\0").into_bytes();
        self.call(Op::INTRODUCE, Tx::NONE, payload).await.map(drop)
    }

    /// Makes the server forget a domain.
    pub async fn release(&self, domid: u16) -> Result<(), Error> {
        let payload = format!("{domid}\0").into_bytes();
        self.call(Op::RELEASE, Tx::NONE, payload).await.map(drop)
    }

    async fn call(&self, op: Op, tx: Tx, payload: Vec<u8>) -> Result<Vec<u8>, Error> {
        let receiver = self.submit(op, tx, payload, Effect::None).await?;
        Ok(self.answer(receiver).await?.payload)
    }

    /// Hands a request to the pump, in the order of the calls.
    async fn submit(
        &self,
        op: Op,
        tx: Tx,
        payload: Vec<u8>,
        effect: Effect,
    ) -> Result<Receiver, Error> {
        if payload.len() > MAX_REQUEST {
            return Err(Error::TooBig);
        }
        // The semaphore is never closed; the error is there for the type.
        let permit = Arc::clone(&self.in_flight).acquire_owned().await;
        let permit = permit.map_err(|_| self.disconnected())?;
        let (reply, receiver) = oneshot::channel();
        let command = Command {
            op,
            transaction: tx.0,
            payload,
            effect,
            reply: Some(reply),
            permit: Some(permit),
        };
        self.commands
            .send(command)
            .map_err(|_| self.disconnected())?;
        Ok(receiver)
    }

    async fn answer(&self, receiver: Receiver) -> Result<Answer, Error> {
        receiver.await.map_err(|_| self.disconnected())?
    }

    fn disconnected(&self) -> Error {
        Error::Disconnected(self.events.reason())
    }
}

fn disarm(answer: Answer) {
    if let Some(undo) = answer.undo {
        undo.disarm();
    }
}

fn optional(value: Result<Vec<u8>, Error>) -> Result<Option<Vec<u8>>, Error> {
    match value {
        Err(Error::NoEntry) => Ok(None),
        value => value.map(Some),
    }
}

/// `path NUL`. A NUL inside would let a path part end the path early and become part of the value.
fn path_payload(path: &str) -> Result<Vec<u8>, Error> {
    if path.is_empty() || path.len() > MAX_ABSOLUTE_PATH || path.contains('\0') {
        return Err(Error::BadPath(escape(path.as_bytes())));
    }
    let mut payload = path.as_bytes().to_vec();
    payload.push(0);
    Ok(payload)
}

fn write_payload(path: &str, value: &[u8]) -> Result<Vec<u8>, Error> {
    let mut payload = path_payload(path)?;
    payload.extend_from_slice(value);
    Ok(payload)
}

fn watch_payload(path: &str, token: &str) -> Result<Vec<u8>, Error> {
    let mut payload = path_payload(path)?;
    if token.contains('\0') {
        return Err(Error::BadPath(escape(token.as_bytes())));
    }
    payload.extend_from_slice(token.as_bytes());
    payload.push(0);
    Ok(payload)
}

/// A child list: names, each followed by a NUL. Names are ASCII by the server's rules.
fn names(list: &[u8]) -> Result<Vec<String>, Error> {
    let list = list.strip_suffix(b"\0").unwrap_or(list);
    if list.is_empty() {
        return Ok(Vec::new());
    }
    list.split(|byte| *byte == 0)
        .map(|name| String::from_utf8(name.to_vec()).map_err(|_| Error::Malformed("child name")))
        .collect()
}
