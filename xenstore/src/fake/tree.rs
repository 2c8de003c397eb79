//! The node tree and transactions on it.
//!
//! A transaction works on private copies of the nodes it has touched and remembers the generation each
//! had then. Commit succeeds if none of them has another generation now, so what commits is
//! serializable; otherwise EAGAIN and nothing changes. Reading counts as touching.

use std::collections::{BTreeSet, HashMap};

use super::path::{child, split};
use super::{Errno, PRIVILEGED, quota};
use crate::permission::{Access, Permission};

#[derive(Debug, Clone)]
pub(super) struct Node {
    pub(super) value: Vec<u8>,
    /// Never empty; the first is the owner's.
    pub(super) perms: Vec<Permission>,
    pub(super) children: BTreeSet<String>,
    pub(super) generation: u64,
}

/// A change watches are told about, when it is committed.
#[derive(Debug, Clone)]
pub(super) struct Change {
    pub(super) path: String,
    /// Gone together with an ancestor: only watches on exactly this node hear of it.
    pub(super) exact: bool,
    /// The node's permissions before and after: a domain that may read by neither hears nothing.
    pub(super) perms: Vec<Permission>,
    pub(super) old_perms: Vec<Permission>,
}

#[derive(Debug)]
pub(super) struct Tree {
    nodes: HashMap<String, Node>,
    generation: u64,
    /// Nodes by owner, for the quota.
    owned: HashMap<u16, usize>,
}

/// What a transaction has touched.
#[derive(Debug, Default)]
pub(super) struct Transaction {
    touched: HashMap<String, Touched>,
    changes: Vec<Change>,
}

#[derive(Debug)]
struct Touched {
    /// Generation when first touched; `None`: there was no such node.
    base: Option<u64>,
    node: Option<Node>,
    written: bool,
}

/// The tree as one request of one domain sees it, inside a transaction or not.
pub(super) struct View<'a> {
    pub(super) tree: &'a mut Tree,
    pub(super) transaction: Option<&'a mut Transaction>,
    pub(super) domid: u16,
    /// Filled outside a transaction only.
    pub(super) changes: Vec<Change>,
}

impl Tree {
    pub(super) fn new() -> Self {
        let root = Node {
            value: Vec::new(),
            perms: vec![Permission::new(PRIVILEGED, Access::None)],
            children: BTreeSet::new(),
            generation: 0,
        };
        let nodes = HashMap::from([("/".to_owned(), root)]);
        Self {
            nodes,
            generation: 0,
            owned: HashMap::new(),
        }
    }

    fn next_generation(&mut self) -> u64 {
        self.generation = self.generation.saturating_add(1);
        self.generation
    }

    fn set(&mut self, path: String, node: Option<Node>) {
        let new = node.as_ref().and_then(|node| owner(&node.perms));
        let old = match node {
            Some(node) => self.nodes.insert(path, node),
            None => self.nodes.remove(&path),
        };
        if let Some(old) = old.and_then(|node| owner(&node.perms)) {
            let count = self.owned.entry(old).or_default();
            *count = count.saturating_sub(1);
        }
        if let Some(new) = new {
            let count = self.owned.entry(new).or_default();
            *count = count.saturating_add(1);
        }
    }

    /// Applies a transaction, or EAGAIN; the changes it made are for the watches.
    pub(super) fn commit(&mut self, transaction: Transaction) -> Result<Vec<Change>, Errno> {
        let unchanged = |(path, touched): (&String, &Touched)| {
            self.nodes.get(path).map(|node| node.generation) == touched.base
        };
        if !transaction.touched.iter().all(unchanged) {
            return Err(Errno::EAGAIN);
        }
        for (path, touched) in transaction.touched {
            if touched.written {
                self.set(path, touched.node);
            }
        }
        Ok(transaction.changes)
    }
}

impl View<'_> {
    /// The node, remembered as touched by the transaction if there is one.
    fn look(&mut self, path: &str) -> Result<Option<&Node>, Errno> {
        let Some(transaction) = self.transaction.as_deref_mut() else {
            return Ok(self.tree.nodes.get(path));
        };
        let known = transaction.touched.len();
        if !transaction.touched.contains_key(path) {
            if self.domid != PRIVILEGED && known >= quota::TRANSACTION_NODES {
                return Err(Errno::ENOSPC);
            }
            let node = self.tree.nodes.get(path).cloned();
            let base = node.as_ref().map(|node| node.generation);
            let touched = Touched {
                base,
                node,
                written: false,
            };
            transaction.touched.insert(path.to_owned(), touched);
        }
        Ok(transaction
            .touched
            .get(path)
            .and_then(|touched| touched.node.as_ref()))
    }

    fn put(&mut self, path: &str, node: Option<Node>) -> Result<(), Errno> {
        self.look(path)?;
        let generation = self.tree.next_generation();
        let node = node.map(|node| Node { generation, ..node });
        match self.transaction.as_deref_mut() {
            None => self.tree.set(path.to_owned(), node),
            Some(transaction) => {
                if let Some(touched) = transaction.touched.get_mut(path) {
                    touched.node = node;
                    touched.written = true;
                }
            }
        }
        Ok(())
    }

    /// Changes a node in place: anything but its owner, which `put` counts.
    fn edit<T>(&mut self, path: &str, change: impl FnOnce(&mut Node) -> T) -> Result<T, Errno> {
        self.look(path)?;
        let generation = self.tree.next_generation();
        let node = match self.transaction.as_deref_mut() {
            None => self.tree.nodes.get_mut(path),
            Some(transaction) => transaction.touched.get_mut(path).and_then(|touched| {
                touched.written = true;
                touched.node.as_mut()
            }),
        };
        let node = node.ok_or(Errno::ENOENT)?;
        node.generation = generation;
        Ok(change(node))
    }

    fn changed(&mut self, change: Change) {
        match self.transaction.as_deref_mut() {
            None => self.changes.push(change),
            Some(transaction) => transaction.changes.push(change),
        }
    }

    /// The node, if the domain may do `wanted` with it. Missing: ENOENT, or EACCES where the nearest
    /// ancestor there is doesn't allow `wanted` (a guest can't probe what it can't read).
    pub(super) fn get(&mut self, path: &str, wanted: Access) -> Result<&Node, Errno> {
        let domid = self.domid;
        let mut at = path;
        loop {
            if let Some(node) = self.look(at)? {
                if !permits(&node.perms, domid, wanted) {
                    return Err(Errno::EACCES);
                }
                break;
            }
            at = split(at).ok_or(Errno::ENOENT)?.0;
        }
        if at != path {
            return Err(Errno::ENOENT);
        }
        self.look(path)?.ok_or(Errno::ENOENT)
    }

    /// WRITE and MKDIR (`value` is `None`).
    pub(super) fn write(&mut self, path: &str, value: Option<&[u8]>) -> Result<(), Errno> {
        if self.domid != PRIVILEGED && value.is_some_and(|value| value.len() > quota::VALUE) {
            return Err(Errno::ENOSPC);
        }
        match (self.get(path, Access::Write), value) {
            (Ok(_), None) => return Ok(()),
            (Ok(_), Some(_)) => {}
            (Err(Errno::ENOENT), _) => self.create(path)?,
            (Err(error), _) => return Err(error),
        }
        let value = value.unwrap_or_default().to_vec();
        let perms = self.edit(path, |node| {
            node.value = value;
            node.perms.clone()
        })?;
        self.changed(Change {
            path: path.to_owned(),
            exact: false,
            perms,
            old_perms: Vec::new(),
        });
        Ok(())
    }

    /// Makes a node and its missing parents. They inherit the permissions of the nearest node there
    /// is, but belong to the guest that makes them. The caller has checked that it may.
    fn create(&mut self, path: &str) -> Result<(), Errno> {
        let mut missing = vec![path];
        let mut parent = split(path).ok_or(Errno::EINVAL)?.0;
        while self.look(parent)?.is_none() {
            missing.push(parent);
            parent = split(parent).ok_or(Errno::EINVAL)?.0;
        }
        let mut perms = self
            .look(parent)?
            .map(|node| node.perms.clone())
            .unwrap_or_default();
        if let (true, Some(first)) = (self.domid != PRIVILEGED, perms.first_mut()) {
            first.domid = self.domid;
            self.check_quota(missing.len())?;
        }
        let node = Node {
            value: Vec::new(),
            perms,
            children: BTreeSet::new(),
            generation: 0,
        };
        for path in missing.iter().rev() {
            let (parent, name) = split(path).ok_or(Errno::EINVAL)?;
            self.edit(parent, |node| node.children.insert(name.to_owned()))?;
            self.put(path, Some(node.clone()))?;
        }
        Ok(())
    }

    fn check_quota(&self, more: usize) -> Result<(), Errno> {
        let has = self.tree.owned.get(&self.domid).copied().unwrap_or(0);
        let uncommitted = self.transaction.as_ref().map_or(0, |transaction| {
            transaction
                .touched
                .values()
                .filter(|touched| touched.written)
                .count()
        });
        if has.saturating_add(uncommitted).saturating_add(more) > quota::NODES {
            return Err(Errno::ENOSPC);
        }
        Ok(())
    }

    /// RM: the node and everything below it.
    pub(super) fn remove(&mut self, path: &str) -> Result<(), Errno> {
        let (parent, name) = split(path).ok_or(Errno::EINVAL)?;
        match self.get(path, Access::Write).map(drop) {
            Ok(()) => {}
            // Already gone is fine, if its parent exists.
            Err(Errno::ENOENT) if self.look(parent)?.is_some() => return Ok(()),
            Err(error) => return Err(error),
        }
        self.edit(parent, |node| node.children.remove(name))?;
        let mut doomed = vec![path.to_owned()];
        while let Some(at) = doomed.pop() {
            let Some(node) = self.look(&at)?.cloned() else {
                continue;
            };
            doomed.extend(node.children.iter().map(|name| child(&at, name)));
            self.put(&at, None)?;
            let exact = at != path;
            self.changed(Change {
                path: at,
                exact,
                perms: node.perms,
                old_perms: Vec::new(),
            });
        }
        Ok(())
    }

    /// SET_PERMS: the owner's right; a guest can't give a node away.
    pub(super) fn set_perms(&mut self, path: &str, perms: Vec<Permission>) -> Result<(), Errno> {
        let new = owner(&perms).ok_or(Errno::EINVAL)?;
        let node = self.get(path, Access::Write)?.clone();
        if self.domid != PRIVILEGED {
            let own = Some(self.domid);
            if owner(&node.perms) != own {
                return Err(Errno::EACCES);
            }
            if Some(new) != own {
                return Err(Errno::EPERM);
            }
        }
        let old_perms = node.perms.clone();
        self.put(
            path,
            Some(Node {
                perms: perms.clone(),
                ..node
            }),
        )?;
        self.changed(Change {
            path: path.to_owned(),
            exact: false,
            perms,
            old_perms,
        });
        Ok(())
    }
}

fn owner(perms: &[Permission]) -> Option<u16> {
    perms.first().map(|first| first.domid)
}

/// Domain 0 and the owner may do everything, others what their own entry or else the first one says.
pub(super) fn permits(perms: &[Permission], domid: u16, wanted: Access) -> bool {
    let Some((first, others)) = perms.split_first() else {
        return domid == PRIVILEGED;
    };
    if domid == PRIVILEGED || domid == first.domid {
        return true;
    }
    let entry = others
        .iter()
        .find(|entry| entry.domid == domid)
        .unwrap_or(first);
    (!wanted.reads() || entry.access.reads()) && (!wanted.writes() || entry.access.writes())
}
