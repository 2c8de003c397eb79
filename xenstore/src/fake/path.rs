//! Node names as xenstored checks them.

use super::Errno;
use crate::wire::{MAX_ABSOLUTE_PATH, MAX_RELATIVE_PATH};

/// A domain's home, the base of its relative paths.
pub(super) fn home(domid: u16) -> String {
    format!("/local/domain/{domid}")
}

/// The absolute form of a path sent by domain `domid`.
pub(super) fn resolve(domid: u16, raw: &[u8]) -> Result<String, Errno> {
    let text = str::from_utf8(raw).map_err(|_| Errno::EINVAL)?;
    let limit = if text.starts_with('/') {
        MAX_ABSOLUTE_PATH
    } else {
        MAX_RELATIVE_PATH
    };
    let clean = text
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b"-/_@".contains(&byte));
    let trailing = text.len() > 1 && text.ends_with('/');
    if text.is_empty() || text.len() > limit || !clean || trailing || text.contains("//") {
        return Err(Errno::EINVAL);
    }
    if text.starts_with('/') {
        Ok(text.to_owned())
    } else {
        Ok(format!("{}/{text}", home(domid)))
    }
}

/// Parent and own name; `None` for the root.
pub(super) fn split(path: &str) -> Option<(&str, &str)> {
    let (parent, name) = path.rsplit_once('/')?;
    if name.is_empty() {
        return None;
    }
    Some((if parent.is_empty() { "/" } else { parent }, name))
}

/// The path of a child.
pub(super) fn child(parent: &str, name: &str) -> String {
    format!("{}/{name}", parent.trim_end_matches('/'))
}

/// Whether `path` is `root` or lies below it.
pub(super) fn within(path: &str, root: &str) -> bool {
    path.strip_prefix(root.trim_end_matches('/'))
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}
