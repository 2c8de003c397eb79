//! What one connection may hold at a time. The reader waits here, so a client that sends faster than
//! the disk answers, or does not read its replies, stops being read instead of filling memory.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::{MAX_PAYLOAD, MAX_REQUESTS};

struct Left {
    bytes: u32,
    requests: u32,
    /// Nobody waits for answers any more.
    closed: bool,
}

/// The allowance of one connection.
pub(super) struct Budget {
    left: Mutex<Left>,
    returned: Condvar,
}

impl Budget {
    pub(super) fn new() -> Arc<Self> {
        let left = Left {
            bytes: MAX_PAYLOAD,
            requests: MAX_REQUESTS,
            closed: false,
        };
        Arc::new(Self {
            left: Mutex::new(left),
            returned: Condvar::new(),
        })
    }

    /// Waits until one more request of `bytes` (at most [`MAX_PAYLOAD`]) fits; none once it is closed.
    pub(super) fn take(self: &Arc<Self>, bytes: u32) -> Option<Permit> {
        let bytes = bytes.min(MAX_PAYLOAD);
        let mut left = self.left.lock();
        while !left.closed && (left.requests == 0 || left.bytes < bytes) {
            self.returned.wait(&mut left);
        }
        if left.closed {
            return None;
        }
        left.requests -= 1;
        left.bytes -= bytes;
        Some(Permit {
            bytes,
            budget: Arc::clone(self),
        })
    }

    /// Ends the reading of requests. Shutting the socket down does not: what the kernel has queued of a
    /// client's requests can still be read, thousands of them.
    pub(super) fn close(&self) {
        self.left.lock().closed = true;
        self.returned.notify_one();
    }
}

/// Gives its share back when dropped: after the reply is written, or with a request that came to nothing.
pub(super) struct Permit {
    bytes: u32,
    budget: Arc<Budget>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut left = self.budget.left.lock();
        left.requests += 1;
        left.bytes += self.bytes;
        self.budget.returned.notify_one();
    }
}
