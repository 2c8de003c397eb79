//! The server's state and what each request does to it. No I/O: packets in, packets and closings out.

use std::collections::{BTreeSet, HashMap};
use std::mem;

use super::path::{home, resolve, within};
use super::tree::{Change, Transaction, Tree, View, permits};
use super::{Errno, PRIVILEGED, quota};
use crate::permission::{Access, Permission};
use crate::wire::{MAX_REQUEST, Op, Packet};

/// Names a connection for as long as the server lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Connection(pub(super) u64);

/// What the sockets' side must do next, in this order.
#[derive(Debug)]
pub(super) enum Output {
    Send(Connection, Packet),
    Close(Connection),
}

#[derive(Debug)]
struct Session {
    domid: u16,
    transactions: HashMap<u32, Transaction>,
    watches: Vec<Watch>,
}

#[derive(Debug)]
struct Watch {
    path: String,
    /// Events are reported relative to the domain's home, as the watch was given.
    relative: bool,
    token: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct Store {
    tree: Tree,
    sessions: HashMap<Connection, Session>,
    domains: BTreeSet<u16>,
    last_transaction: u32,
    output: Vec<Output>,
}

impl Store {
    pub(super) fn new() -> Self {
        Self {
            tree: Tree::new(),
            sessions: HashMap::new(),
            domains: BTreeSet::from([PRIVILEGED]),
            last_transaction: 0,
            output: Vec::new(),
        }
    }

    pub(super) fn take_output(&mut self) -> Vec<Output> {
        mem::take(&mut self.output)
    }

    pub(super) fn connect(&mut self, connection: Connection, domid: u16) {
        let session = Session {
            domid,
            transactions: HashMap::new(),
            watches: Vec::new(),
        };
        self.sessions.insert(connection, session);
    }

    /// A connection is gone, and with it its watches and transactions.
    pub(super) fn disconnect(&mut self, connection: Connection) {
        self.sessions.remove(&connection);
    }

    pub(super) fn introduce(&mut self, domid: u16) {
        if self.domains.insert(domid) {
            self.fire_special("@introduceDomain");
        }
    }

    pub(super) fn release(&mut self, domid: u16) -> Result<(), Errno> {
        if domid == PRIVILEGED || !self.domains.remove(&domid) {
            return Err(Errno::ENOENT);
        }
        let gone: Vec<_> = self
            .sessions
            .iter()
            .filter(|(_, s)| s.domid == domid)
            .map(|(c, _)| *c)
            .collect();
        for connection in gone {
            self.disconnect(connection);
            self.output.push(Output::Close(connection));
        }
        self.fire_special("@releaseDomain");
        Ok(())
    }

    /// One request. Its reply comes first, then the events it causes.
    pub(super) fn handle(&mut self, connection: Connection, request: Packet) {
        let Some(domid) = self.sessions.get(&connection).map(|session| session.domid) else {
            return;
        };
        let Packet {
            op,
            request,
            transaction,
            payload,
        } = request;
        let mut changes = Vec::new();
        let reply = match op {
            Op::TRANSACTION_START => self.start(connection, transaction),
            Op::TRANSACTION_END => self.end(connection, transaction, &payload, &mut changes),
            Op::WATCH => self.watch(connection, domid, &payload),
            Op::UNWATCH => self.unwatch(connection, domid, &payload),
            Op::RESET_WATCHES => self.reset(connection),
            Op::INTRODUCE | Op::RELEASE => self.lifecycle(op, domid, &payload),
            Op::GET_DOMAIN_PATH => {
                number(&payload).map(|of| format!("{}\0", home(of)).into_bytes())
            }
            Op::IS_DOMAIN_INTRODUCED => number(&payload).map(|of| {
                if self.domains.contains(&of) {
                    b"T\0".to_vec()
                } else {
                    b"F\0".to_vec()
                }
            }),
            _ => self.access(connection, domid, transaction, op, &payload, &mut changes),
        };
        let (op_out, payload_out) = match reply {
            Ok(reply) => (op, reply),
            Err(errno) => (Op::ERROR, format!("{}\0", errno.0).into_bytes()),
        };
        let packet = Packet {
            op: op_out,
            request,
            transaction,
            payload: payload_out,
        };
        // INTRODUCE and RELEASE have fired already; their reply still comes first.
        let events = mem::take(&mut self.output);
        self.output.push(Output::Send(connection, packet));
        self.output.extend(events);
        if let (Op::WATCH, Op::WATCH) = (op, op_out) {
            self.first_event(connection, &payload);
        }
        self.fire(&changes);
    }

    /// The operations on nodes.
    fn access(
        &mut self,
        connection: Connection,
        domid: u16,
        transaction: u32,
        op: Op,
        payload: &[u8],
        changes: &mut Vec<Change>,
    ) -> Result<Vec<u8>, Errno> {
        let session = self.sessions.get_mut(&connection).ok_or(Errno::ENOENT)?;
        let transaction = match transaction {
            0 => None,
            id => Some(session.transactions.get_mut(&id).ok_or(Errno::ENOENT)?),
        };
        let mut view = View {
            tree: &mut self.tree,
            transaction,
            domid,
            changes: Vec::new(),
        };
        let reply = node_operation(&mut view, op, payload);
        changes.append(&mut view.changes);
        reply
    }

    fn start(&mut self, connection: Connection, transaction: u32) -> Result<Vec<u8>, Errno> {
        if transaction != 0 {
            return Err(Errno::EBUSY);
        }
        let session = self.sessions.get_mut(&connection).ok_or(Errno::ENOENT)?;
        if session.transactions.len() >= quota::TRANSACTIONS && session.domid != PRIVILEGED {
            return Err(Errno::ENOSPC);
        }
        loop {
            self.last_transaction = self.last_transaction.wrapping_add(1).max(1);
            if !session.transactions.contains_key(&self.last_transaction) {
                break;
            }
        }
        session
            .transactions
            .insert(self.last_transaction, Transaction::default());
        Ok(format!("{}\0", self.last_transaction).into_bytes())
    }

    fn end(
        &mut self,
        connection: Connection,
        transaction: u32,
        payload: &[u8],
        changes: &mut Vec<Change>,
    ) -> Result<Vec<u8>, Errno> {
        let commit = match payload {
            b"T\0" => true,
            b"F\0" => false,
            _ => return Err(Errno::EINVAL),
        };
        let session = self.sessions.get_mut(&connection).ok_or(Errno::ENOENT)?;
        let transaction = session
            .transactions
            .remove(&transaction)
            .ok_or(Errno::ENOENT)?;
        if commit {
            changes.append(&mut self.tree.commit(transaction)?);
        }
        ok()
    }

    fn watch(
        &mut self,
        connection: Connection,
        domid: u16,
        payload: &[u8],
    ) -> Result<Vec<u8>, Errno> {
        let (raw, token) = watch_arguments(payload)?;
        let watch = Watch {
            path: watch_path(domid, raw)?,
            relative: !raw.starts_with(b"/") && !raw.starts_with(b"@"),
            token: token.to_vec(),
        };
        let session = self.sessions.get_mut(&connection).ok_or(Errno::ENOENT)?;
        if session
            .watches
            .iter()
            .any(|old| old.path == watch.path && old.token == watch.token)
        {
            return Err(Errno::EEXIST);
        }
        if session.watches.len() >= quota::WATCHES && domid != PRIVILEGED {
            return Err(Errno::E2BIG);
        }
        session.watches.push(watch);
        ok()
    }

    /// Every watch fires once when it is registered, with the path as it was given.
    fn first_event(&mut self, connection: Connection, payload: &[u8]) {
        if let Ok((path, token)) = watch_arguments(payload) {
            self.output.push(event(connection, path, token));
        }
    }

    fn unwatch(
        &mut self,
        connection: Connection,
        domid: u16,
        payload: &[u8],
    ) -> Result<Vec<u8>, Errno> {
        let (raw, token) = watch_arguments(payload)?;
        let path = watch_path(domid, raw)?;
        let session = self.sessions.get_mut(&connection).ok_or(Errno::ENOENT)?;
        let before = session.watches.len();
        session
            .watches
            .retain(|watch| watch.path != path || watch.token != token);
        if session.watches.len() == before {
            Err(Errno::ENOENT)
        } else {
            ok()
        }
    }

    fn reset(&mut self, connection: Connection) -> Result<Vec<u8>, Errno> {
        let session = self.sessions.get_mut(&connection).ok_or(Errno::ENOENT)?;
        session.watches.clear();
        session.transactions.clear();
        ok()
    }

    fn lifecycle(&mut self, op: Op, domid: u16, payload: &[u8]) -> Result<Vec<u8>, Errno> {
        if domid != PRIVILEGED {
            return Err(Errno::EACCES);
        }
        // INTRODUCE's frame and port mean nothing here: domains come by socket.
        let of = number(payload)?;
        if op == Op::INTRODUCE {
            self.introduce(of);
        } else {
            self.release(of)?;
        }
        ok()
    }

    fn fire(&mut self, changes: &[Change]) {
        for change in changes {
            for (connection, session) in &self.sessions {
                let readable = permits(&change.perms, session.domid, Access::Read)
                    || permits(&change.old_perms, session.domid, Access::Read);
                for watch in session.watches.iter().filter(|_| readable) {
                    let hit = if change.exact {
                        watch.path == change.path
                    } else {
                        within(&change.path, &watch.path)
                    };
                    if hit {
                        let name = shown(watch, session.domid, &change.path);
                        self.output
                            .push(event(*connection, name.as_bytes(), &watch.token));
                    }
                }
            }
        }
    }

    /// `@introduceDomain` and `@releaseDomain` are for privileged watchers.
    fn fire_special(&mut self, name: &str) {
        for (connection, session) in &self.sessions {
            for watch in &session.watches {
                if session.domid == PRIVILEGED && watch.path == name {
                    self.output
                        .push(event(*connection, name.as_bytes(), &watch.token));
                }
            }
        }
    }
}

fn node_operation(view: &mut View<'_>, op: Op, payload: &[u8]) -> Result<Vec<u8>, Errno> {
    let (path, rest) = cut(payload)?;
    let path = &resolve(view.domid, path)?;
    match op {
        Op::READ => Ok(view.get(path, Access::Read)?.value.clone()),
        Op::WRITE => view.write(path, Some(rest)).and_then(|()| ok()),
        Op::MKDIR => view.write(path, None).and_then(|()| ok()),
        Op::RM => view.remove(path).and_then(|()| ok()),
        Op::DIRECTORY => {
            let list = children(view, path)?.0;
            if list.len() > MAX_REQUEST {
                Err(Errno::E2BIG)
            } else {
                Ok(list)
            }
        }
        Op::DIRECTORY_PART => directory_part(view, path, rest),
        Op::GET_PERMS => {
            let perms = &view.get(path, Access::Read)?.perms;
            Ok(perms
                .iter()
                .flat_map(|entry| format!("{entry}\0").into_bytes())
                .collect())
        }
        Op::SET_PERMS => {
            let list = rest.strip_suffix(b"\0").unwrap_or(rest);
            let perms: Option<Vec<_>> = list
                .split(|byte| *byte == 0)
                .map(Permission::parse)
                .collect();
            view.set_perms(path, perms.ok_or(Errno::EINVAL)?)
                .and_then(|()| ok())
        }
        _ => Err(Errno::ENOSYS),
    }
}

/// All child names, each with its NUL, and the node's generation.
fn children(view: &mut View<'_>, path: &str) -> Result<(Vec<u8>, u64), Errno> {
    let node = view.get(path, Access::Read)?;
    let list = node
        .children
        .iter()
        .flat_map(|name| format!("{name}\0").into_bytes())
        .collect();
    Ok((list, node.generation))
}

/// As many whole names from a byte offset as fit; an extra NUL after the last one.
fn directory_part(view: &mut View<'_>, path: &str, offset: &[u8]) -> Result<Vec<u8>, Errno> {
    let offset = crate::vbd::decimal(offset.strip_suffix(b"\0").unwrap_or(offset));
    let offset = usize::try_from(offset.ok_or(Errno::EINVAL)?).map_err(|_| Errno::EINVAL)?;
    let (list, generation) = children(view, path)?;
    let mut reply = format!("{generation}\0").into_bytes();
    let rest = list.get(offset..).unwrap_or_default();
    let mut taken = 0_usize;
    for name in rest.split_inclusive(|byte| *byte == 0) {
        if reply.len().saturating_add(name.len()) >= MAX_REQUEST {
            break;
        }
        reply.extend_from_slice(name);
        taken = taken.saturating_add(name.len());
    }
    if taken == rest.len() {
        reply.push(0);
    }
    Ok(reply)
}

fn ok() -> Result<Vec<u8>, Errno> {
    Ok(b"OK\0".to_vec())
}

fn event(to: Connection, path: &[u8], token: &[u8]) -> Output {
    let payload = [path, b"\0", token, b"\0"].concat();
    Output::Send(
        to,
        Packet {
            op: Op::WATCH_EVENT,
            request: 0,
            transaction: 0,
            payload,
        },
    )
}

/// The changed path as this watch reports it.
fn shown<'p>(watch: &Watch, domid: u16, path: &'p str) -> &'p str {
    if !watch.relative {
        return path;
    }
    let below = path
        .strip_prefix(&home(domid))
        .and_then(|rest| rest.strip_prefix('/'));
    below.unwrap_or(path)
}

/// The first NUL-terminated argument and what follows it.
fn cut(payload: &[u8]) -> Result<(&[u8], &[u8]), Errno> {
    let end = payload
        .iter()
        .position(|byte| *byte == 0)
        .ok_or(Errno::EINVAL)?;
    let (first, rest) = payload.split_at_checked(end).ok_or(Errno::EINVAL)?;
    Ok((first, rest.get(1..).unwrap_or_default()))
}

fn watch_arguments(payload: &[u8]) -> Result<(&[u8], &[u8]), Errno> {
    let (path, rest) = cut(payload)?;
    let (token, _) = cut(rest)?;
    Ok((path, token))
}

/// A watched path: a node, or a special name, which stands for itself.
fn watch_path(domid: u16, raw: &[u8]) -> Result<String, Errno> {
    match raw {
        b"@introduceDomain" | b"@releaseDomain" => Ok(String::from_utf8_lossy(raw).into_owned()),
        [b'@', ..] => Err(Errno::EINVAL),
        _ => resolve(domid, raw),
    }
}

/// A domid as the first argument.
fn number(payload: &[u8]) -> Result<u16, Errno> {
    let number = crate::vbd::decimal(cut(payload)?.0).ok_or(Errno::EINVAL)?;
    u16::try_from(number).map_err(|_| Errno::EINVAL)
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
