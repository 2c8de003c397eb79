//! The task that owns the connection. It always reads, whatever its users do, so a slow watch handler
//! can't block a reply; it ends when the server goes, when every [`Client`](crate::Client) is dropped,
//! or at the first answer that makes no sense, and then every pending call fails at once.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::error::{Error, escape};
use crate::events::Shared;
use crate::transport::Transport;
use crate::wire::{MAX_REPLY, Op, Packet, Parser};

/// Stop taking commands while this many bytes wait for the server.
const MAX_UNSENT: usize = 64 * 1024;

/// What a request changes in the connection's own state.
#[derive(Debug, Clone)]
pub(crate) enum Effect {
    None,
    /// Opens a transaction.
    Begin,
    /// Registers (path, token).
    Watch(String, String),
    /// Removes (path, token).
    Unwatch(String, String),
}

/// One request on its way to the pump.
#[derive(Debug)]
pub(crate) struct Command {
    pub(crate) op: Op,
    pub(crate) transaction: u32,
    pub(crate) payload: Vec<u8>,
    pub(crate) effect: Effect,
    /// `None` for an undo, whose answer interests nobody.
    pub(crate) reply: Option<oneshot::Sender<Result<Answer, Error>>>,
    /// Bounds the requests in flight; given back when the answer comes.
    pub(crate) permit: Option<OwnedSemaphorePermit>,
}

/// A successful reply. If the caller was cancelled and drops it unseen, what the request opened is
/// closed again.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) payload: Vec<u8>,
    pub(crate) undo: Option<Undo>,
}

/// Sends its command when dropped, unless disarmed.
#[derive(Debug)]
pub(crate) struct Undo {
    commands: mpsc::UnboundedSender<Command>,
    command: Option<Command>,
}

impl Undo {
    pub(crate) fn new(commands: mpsc::UnboundedSender<Command>, command: Command) -> Self {
        Self {
            commands,
            command: Some(command),
        }
    }

    pub(crate) fn disarm(mut self) {
        self.command = None;
    }

    pub(crate) fn abort(transaction: u32) -> Command {
        Command {
            op: Op::TRANSACTION_END,
            transaction,
            payload: b"F\0".to_vec(),
            effect: Effect::None,
            reply: None,
            permit: None,
        }
    }

    fn unwatch(path: String, token: String) -> Command {
        let payload = [path.as_bytes(), b"\0", token.as_bytes(), b"\0"].concat();
        Command {
            op: Op::UNWATCH,
            transaction: 0,
            payload,
            effect: Effect::Unwatch(path, token),
            reply: None,
            permit: None,
        }
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if let Some(command) = self.command.take() {
            // A pump that is gone has nothing open any more.
            let _ = self.commands.send(command);
        }
    }
}

struct Pending {
    op: Op,
    effect: Effect,
    reply: Option<oneshot::Sender<Result<Answer, Error>>>,
    _permit: Option<OwnedSemaphorePermit>,
}

pub(crate) struct Pump {
    transport: Transport,
    unsent: Vec<u8>,
    parser: Parser,
    pending: HashMap<u32, Pending>,
    last_request: u32,
    events: Arc<Shared>,
    /// For undos only: it must not keep the pump alive when the last client is dropped.
    undo: mpsc::WeakUnboundedSender<Command>,
}

impl Pump {
    pub(crate) fn new(
        transport: Transport,
        events: Arc<Shared>,
        undo: mpsc::WeakUnboundedSender<Command>,
    ) -> Self {
        Self {
            transport,
            unsent: Vec::new(),
            parser: Parser::new(MAX_REPLY),
            pending: HashMap::new(),
            last_request: 0,
            events,
            undo,
        }
    }

    pub(crate) async fn run(mut self, mut commands: mpsc::UnboundedReceiver<Command>) {
        let reason = self.drive(&mut commands).await;
        // The reason first: callers woken by the drops below look it up.
        self.events.disconnect(&reason);
        self.pending.clear();
        commands.close();
        while commands.try_recv().is_ok() {}
    }

    async fn drive(&mut self, commands: &mut mpsc::UnboundedReceiver<Command>) -> String {
        let mut chunk = vec![0; 16 * 1024];
        loop {
            tokio::select! {
                read = self.transport.read(&mut chunk) => match read {
                    Ok(0) => return "closed by xenstored".to_owned(),
                    Ok(count) => {
                        let bytes = chunk.get(..count).unwrap_or_default();
                        if let Err(reason) = self.receive(bytes) {
                            return reason;
                        }
                    }
                    Err(error) => return error.to_string(),
                },
                written = self.transport.write(&self.unsent), if !self.unsent.is_empty() => match written {
                    Ok(0) => return "xenstored accepts no more bytes".to_owned(),
                    Ok(count) => drop(self.unsent.drain(..count.min(self.unsent.len()))),
                    Err(error) if self.transport.is_device() => self.refused(&error),
                    Err(error) => return error.to_string(),
                },
                command = commands.recv(), if self.unsent.len() < MAX_UNSENT => match command {
                    Some(command) => self.send(command),
                    None => return "no client left".to_owned(),
                },
            }
        }
    }

    fn send(&mut self, command: Command) {
        let Command {
            op,
            transaction,
            payload,
            effect,
            reply,
            permit,
        } = command;
        // Through the device it would reset the watches of the kernel's own drivers.
        if op == Op::RESET_WATCHES && self.transport.is_device() {
            if let Some(reply) = reply {
                let _ = reply.send(Err(Error::NotSupported));
            }
            return;
        }
        // An id still in use is possible only after 2^32 requests; in flight are a few dozen.
        loop {
            self.last_request = self.last_request.wrapping_add(1);
            if !self.pending.contains_key(&self.last_request) {
                break;
            }
        }
        let request = self.last_request;
        let packet = Packet {
            op,
            request,
            transaction,
            payload,
        };
        if packet.encode(&mut self.unsent).is_err() {
            if let Some(reply) = reply {
                let _ = reply.send(Err(Error::TooBig));
            }
            return;
        }
        // In the order the server will see, not that of its replies: a watch's first event may come
        // before its reply, and unwatch and watch of the same pair may both be under way.
        match &effect {
            Effect::Watch(path, token) => self.events.add_watch(path, token),
            Effect::Unwatch(path, token) => self.events.remove_watch(path, token),
            Effect::None | Effect::Begin => {}
        }
        self.pending.insert(
            request,
            Pending {
                op,
                effect,
                reply,
                _permit: permit,
            },
        );
    }

    /// The device refused the first of the unsent packets: a watch it could not register (there the
    /// kernel answers by the error of the write), or something it can't carry.
    fn refused(&mut self, error: &io::Error) {
        let first = Packet::length(&self.unsent).min(self.unsent.len());
        let packet: Vec<u8> = self.unsent.drain(..first).collect();
        let pending = Packet::request_of(&packet).and_then(|request| self.pending.remove(&request));
        if let Some(pending) = pending {
            self.fail(pending, Error::from_errno(error));
        }
    }

    fn fail(&self, pending: Pending, error: Error) {
        // EEXIST: the earlier registration stays.
        if let (Effect::Watch(path, token), false) = (&pending.effect, error == Error::Exists) {
            self.events.remove_watch(path, token);
        }
        if let Some(reply) = pending.reply {
            let _ = reply.send(Err(error));
        }
    }

    fn receive(&mut self, mut bytes: &[u8]) -> Result<(), String> {
        while let Some(packet) = self.parser.advance(&mut bytes).map_err(|e| e.to_string())? {
            if packet.op == Op::WATCH_EVENT {
                self.event(&packet.payload)?;
            } else {
                self.reply(packet)?;
            }
        }
        Ok(())
    }

    fn event(&self, payload: &[u8]) -> Result<(), String> {
        let mut parts = payload.split(|byte| *byte == 0);
        let (Some(path), Some(token)) = (parts.next(), parts.next()) else {
            return Err(format!("malformed watch event \"{}\"", escape(payload)));
        };
        // Both are ours or a node's name, so UTF-8; anything else belongs to no watch of ours.
        if let (Ok(path), Ok(token)) = (str::from_utf8(path), str::from_utf8(token)) {
            self.events.push(path.to_owned(), token.to_owned());
        }
        Ok(())
    }

    fn reply(&mut self, packet: Packet) -> Result<(), String> {
        let Some(pending) = self.pending.remove(&packet.request) else {
            return Err(format!(
                "answer to request {}, which is not pending",
                packet.request
            ));
        };
        if packet.op == Op::ERROR {
            self.fail(pending, Error::from_wire(&packet.payload));
            return Ok(());
        }
        if packet.op != pending.op {
            return Err(format!(
                "request of type {} answered by {}",
                pending.op.0, packet.op.0
            ));
        }
        let answer = self.succeed(packet.payload, pending.effect);
        if let Some(reply) = pending.reply {
            // A cancelled caller: the answer is dropped here, and with it goes its undo.
            let _ = reply.send(Ok(answer));
        }
        Ok(())
    }

    fn succeed(&self, payload: Vec<u8>, effect: Effect) -> Answer {
        let undo = match effect {
            Effect::None | Effect::Unwatch(..) => None,
            Effect::Begin => transaction_id(&payload).map(Undo::abort),
            Effect::Watch(path, token) => Some(Undo::unwatch(path, token)),
        };
        let undo = undo.and_then(|command| Some(Undo::new(self.undo.upgrade()?, command)));
        Answer { payload, undo }
    }
}

/// The id in a TRANSACTION_START reply; 0 would mean "none" and is refused.
pub(crate) fn transaction_id(payload: &[u8]) -> Option<u32> {
    let id = crate::vbd::decimal(payload.strip_suffix(b"\0").unwrap_or(payload))?;
    (id != 0).then_some(id)
}
