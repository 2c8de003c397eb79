//! What the queues of one disk share: whether the disk is still alive, and a way to wake each queue's
//! thread. Once gone, a disk never comes back; a reconnect makes a new one.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use rustix::event::{EventfdFlags, eventfd};
use xenblk_ring::Status;

/// Wakes one queue's thread out of its `poll`.
#[derive(Debug)]
pub(super) struct Wake {
    event: OwnedFd,
    /// The thread is about to sleep or sleeps; only then is a write to `event` needed.
    sleeping: AtomicBool,
}

impl Wake {
    pub(super) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            event,
            sleeping: AtomicBool::new(false),
        })
    }

    /// To be called after whatever the thread should see was stored.
    pub(super) fn wake(&self) {
        // Pairs with the fence in `prepare`: either the thread's last look sees what was stored before
        // this call, or this load sees that the thread sleeps.
        fence(Ordering::SeqCst);
        if self.sleeping.swap(false, Ordering::Relaxed) {
            // The only possible failure is a counter at its maximum, which wakes as well.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Announces the sleep; the thread looks for work once more between this and `poll`.
    pub(super) fn prepare(&self) {
        self.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The thread is awake again.
    pub(super) fn awake(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.event, &mut count);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// The shared part of a connected disk.
#[derive(Debug)]
pub(super) struct Link {
    name: String,
    gone: OnceLock<String>,
    /// Cleared when the backend fails an empty flush: Linux reports success and stops flushing.
    flush: AtomicBool,
    pub(super) wakes: Vec<Wake>,
}

impl Link {
    pub(super) fn new(name: String, flush: bool, queues: usize) -> io::Result<Self> {
        let wakes = (0..queues)
            .map(|_| Wake::new())
            .collect::<io::Result<_>>()?;
        Ok(Self {
            name,
            gone: OnceLock::new(),
            flush: AtomicBool::new(flush),
            wakes,
        })
    }

    /// Ends the disk: every request in flight or to come fails. The first reason stays.
    pub(super) fn kill(&self, reason: String) {
        if self.gone.set(reason).is_ok() {
            self.wakes.iter().for_each(Wake::wake);
        }
    }

    /// As [`kill`](Self::kill), for a backend that broke the protocol: says so at once.
    pub(super) fn disable(&self, reason: String) {
        eprintln!("guest: {}: {reason}; the disk is disabled", self.name);
        self.kill(reason);
    }

    pub(super) fn gone(&self) -> Option<&str> {
        self.gone.get().map(String::as_str)
    }

    pub(super) fn flushes(&self) -> bool {
        self.flush.load(Ordering::Relaxed)
    }

    pub(super) fn stop_flushing(&self, status: Status) {
        if self.flush.swap(false, Ordering::Relaxed) {
            eprintln!(
                "guest: {}: a flush was answered {status:?}; no more are sent",
                self.name
            );
        }
    }
}
