//! The queue between the pump and whoever handles watch events.
//!
//! A guest that rewrites a watched node as fast as it can must cost bounded memory (XSA-349): equal
//! events wait once, values are never queued, and when too many different paths wait, a watch's events
//! shrink to one for the watched path itself, which tells its owner to look at everything below.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Different events that may wait before they are shrunk to one per watch.
const MAX_WAITING: usize = 4096;

/// What the connection reports without being asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Something at or below a watched path changed (or the watch has just been registered).
    Watch {
        /// The changed node, in the form the watch was given: relative for a relative watch. At or
        /// below the watched path, or a special name such as `@releaseDomain`.
        path: String,
        /// The token given to [`Client::watch`](crate::Client::watch).
        token: String,
    },
    /// The connection is gone. Every pending call has failed; this is the last event.
    Disconnected {
        /// One line for the administrator.
        reason: String,
    },
}

/// The receiving end. Dropping it is allowed: the connection goes on and its events are discarded.
#[derive(Debug)]
pub struct Events {
    pub(crate) shared: Arc<Shared>,
}

impl Events {
    /// The next event; `None` after [`Event::Disconnected`] has been delivered. Cancellation-safe.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            let wake = self.shared.wake.notified();
            if let Some(event) = self.shared.queue.lock().pop() {
                return event;
            }
            wake.await;
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Shared {
    queue: Mutex<Queue>,
    wake: Notify,
}

impl Shared {
    /// Registers a watch, so that its events are accepted.
    pub(crate) fn add_watch(&self, path: &str, token: &str) {
        self.queue
            .lock()
            .watches
            .entry(token.to_owned())
            .or_default()
            .insert(path.to_owned());
    }

    /// Forgets a watch; events waiting for a token that has no watch left are dropped.
    pub(crate) fn remove_watch(&self, path: &str, token: &str) {
        let mut queue = self.queue.lock();
        if let Some(paths) = queue.watches.get_mut(token) {
            paths.remove(path);
            if paths.is_empty() {
                queue.watches.remove(token);
                queue.drop_token(token);
            }
        }
    }

    pub(crate) fn push(&self, path: String, token: String) {
        if self.queue.lock().push(path, token) {
            self.wake.notify_one();
        }
    }

    /// Ends the stream; the first reason stays.
    pub(crate) fn disconnect(&self, reason: &str) {
        self.queue
            .lock()
            .end
            .get_or_insert_with(|| reason.to_owned());
        self.wake.notify_one();
    }

    /// Why the connection ended, or a stand-in when it is only about to.
    pub(crate) fn reason(&self) -> String {
        self.queue
            .lock()
            .end
            .clone()
            .unwrap_or_else(|| "connection closed".to_owned())
    }
}

#[derive(Debug, Default)]
struct Queue {
    order: VecDeque<(String, String)>,
    waiting: HashSet<(String, String)>,
    /// Watched paths by token.
    watches: HashMap<String, HashSet<String>>,
    end: Option<String>,
    ended: bool,
}

impl Queue {
    /// `None`: nothing yet. `Some(None)`: the stream has ended.
    fn pop(&mut self) -> Option<Option<Event>> {
        if let Some(event) = self.order.pop_front() {
            self.waiting.remove(&event);
            let (path, token) = event;
            return Some(Some(Event::Watch { path, token }));
        }
        if self.ended {
            return Some(None);
        }
        let reason = self.end.clone()?;
        self.ended = true;
        Some(Some(Event::Disconnected { reason }))
    }

    fn push(&mut self, path: String, token: String) -> bool {
        let Some(watched) = self.watches.get(&token) else {
            return false;
        };
        if self.order.len() < MAX_WAITING {
            return self.enqueue((path, token));
        }
        let watched: Vec<String> = watched.iter().cloned().collect();
        self.drop_token(&token);
        for path in watched {
            self.enqueue((path, token.clone()));
        }
        true
    }

    fn enqueue(&mut self, event: (String, String)) -> bool {
        let new = self.waiting.insert(event.clone());
        if new {
            self.order.push_back(event);
        }
        new
    }

    fn drop_token(&mut self, token: &str) {
        self.order.retain(|event| event.1 != token);
        self.waiting.retain(|event| event.1 != token);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(shared: &Shared) -> Vec<(String, String)> {
        let mut queue = shared.queue.lock();
        let mut seen = Vec::new();
        while let Some(Some(Event::Watch { path, token })) = queue.pop() {
            seen.push((path, token));
        }
        seen
    }

    fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
        expected
            .iter()
            .map(|(path, token)| ((*path).to_owned(), (*token).to_owned()))
            .collect()
    }

    #[test]
    fn equal_events_wait_once_and_order_is_kept() {
        let shared = Shared::default();
        shared.add_watch("/a", "t");
        for path in ["/a/1", "/a/2", "/a/1", "/a/2"] {
            shared.push(path.to_owned(), "t".to_owned());
        }
        assert_eq!(waiting(&shared), pairs(&[("/a/1", "t"), ("/a/2", "t")]));
        shared.push("/a/1".to_owned(), "t".to_owned());
        assert_eq!(
            waiting(&shared),
            pairs(&[("/a/1", "t")]),
            "delivered events come again"
        );
    }

    #[test]
    fn an_unwatched_token_is_heard_no_more() {
        let shared = Shared::default();
        shared.add_watch("/a", "t");
        shared.add_watch("/b", "t");
        shared.add_watch("/a", "other");
        for token in ["t", "other", "never"] {
            shared.push("/a/1".to_owned(), token.to_owned());
        }
        shared.remove_watch("/a", "t");
        shared.push("/b/1".to_owned(), "t".to_owned());
        assert_eq!(
            waiting(&shared),
            pairs(&[("/a/1", "t"), ("/a/1", "other"), ("/b/1", "t")]),
            "the token still has a watch"
        );
        shared.push("/b/1".to_owned(), "t".to_owned());
        shared.remove_watch("/b", "t");
        shared.push("/b/2".to_owned(), "t".to_owned());
        assert_eq!(waiting(&shared), []);
    }

    #[test]
    fn too_many_shrink_to_the_watched_paths_of_the_token() {
        let shared = Shared::default();
        for (path, token) in [("/a", "t"), ("/b", "t"), ("/c", "u")] {
            shared.add_watch(path, token);
        }
        shared.push("/c".to_owned(), "u".to_owned());
        for n in 0..3 * MAX_WAITING {
            shared.push(format!("/a/{n}"), "t".to_owned());
            assert!(shared.queue.lock().order.len() <= MAX_WAITING + 2);
        }
        let mut seen = waiting(&shared);
        assert!(seen.len() <= MAX_WAITING);
        seen.truncate(3);
        seen.sort();
        assert_eq!(seen, pairs(&[("/a", "t"), ("/b", "t"), ("/c", "u")]));
    }
}
