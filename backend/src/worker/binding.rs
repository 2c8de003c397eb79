//! Rings whose port can't be bound yet. A port stays bound until the process that had it is gone, which
//! a stuck request can delay for as long as the storage takes; so it is tried without limit, each time
//! without waiting, and only the supervisor's detach gives it up. The kernel's answer to a port that never
//! was is the same.

use std::time::{Duration, Instant};

use super::Worker;
use super::attach::{Binding, Unbound};
use crate::message::{Left, Report, RingId};

/// First and longest pause between two attempts: the usual wait is a few milliseconds.
const PAUSE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// After so long somebody may want to know.
const TELL_AFTER: Duration = Duration::from_secs(1);

struct Waiting {
    unbound: Box<Unbound>,
    since: Instant,
    pause: Duration,
    next: Instant,
    told: bool,
}

/// See the module's head.
#[derive(Default)]
pub(super) struct Unbounds(Vec<Waiting>);

impl Unbounds {
    /// Takes a ring in, to be tried at once.
    pub(super) fn add(&mut self, unbound: Unbound) {
        let now = Instant::now();
        self.0.push(Waiting {
            unbound: Box::new(unbound),
            since: now,
            pause: PAUSE.0,
            next: now,
            told: false,
        });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn contains(&self, ring: RingId) -> bool {
        self.0.iter().any(|waiting| waiting.unbound.id() == ring)
    }

    /// How long until one has to be tried again.
    pub(super) fn due(&self) -> Option<Duration> {
        let next = self.0.iter().map(|waiting| waiting.next).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    fn remove(&mut self, ring: RingId) -> Option<Box<Unbound>> {
        let at = self
            .0
            .iter()
            .position(|waiting| waiting.unbound.id() == ring)?;
        Some(self.0.swap_remove(at).unbound)
    }

    /// Any ring that is here.
    pub(super) fn first(&self) -> Option<RingId> {
        self.0.first().map(|waiting| waiting.unbound.id())
    }
}

impl Worker {
    /// Gives a ring up, and reports that it is gone whether it was waiting for its port or not: then it failed
    /// to attach, and the supervisor hadn't heard of that yet.
    pub(super) fn give_up(&mut self, ring: RingId) {
        let Some(unbound) = self.unbound.remove(ring) else {
            return self.detached(ring, Left::default());
        };
        let span = unbound.span().clone();
        span.in_scope(|| self.detached(ring, unbound.close()));
    }

    /// Tries to bind the ports whose time has come; the rings of those that are bound are served from now on.
    pub(super) fn bind_due(&mut self) {
        if self.unbound.is_empty() {
            return;
        }
        let now = Instant::now();
        for mut waiting in std::mem::take(&mut self.unbound.0) {
            if waiting.next > now {
                self.unbound.0.push(waiting);
                continue;
            }
            let (ring, at) = (waiting.unbound.id(), self.free_place());
            match waiting.unbound.bind(&mut self.engine, at) {
                Binding::Bound(service) => {
                    self.reports.push_back(Report::Attached { ring });
                    self.serve(at, *service);
                }
                Binding::Failed(reason) => {
                    self.reports
                        .push_back(Report::AttachFailed { ring, reason });
                }
                Binding::Busy(unbound, reason) => {
                    waiting.unbound = unbound;
                    if !waiting.told && now.duration_since(waiting.since) >= TELL_AFTER {
                        waiting.told = true;
                        waiting
                            .unbound
                            .span()
                            .in_scope(|| tracing::debug!("{reason}"));
                        self.reports.push_back(Report::Unbound { ring, reason });
                    }
                    waiting.next = now + waiting.pause;
                    waiting.pause = (waiting.pause * 2).min(PAUSE.1);
                    self.unbound.0.push(waiting);
                }
            }
        }
    }
}
