//! The pages of one ring's requests and what is granted of them. A persistent frontend keeps a grant for
//! as long as the backend keeps it mapped, as Linux does: it looks at each answer and now and then at
//! those it doesn't use. Any other ends every grant at its answer, and then the backend must be through
//! with it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use xenblk_grants::fake::{FakeDomain, Gfn, StillMapped};
use xenblk_grants::{DomId, GrantRef};

/// How often Linux revokes unused grants that the backend has unmapped.
const PURGE_INTERVAL: Duration = Duration::from_secs(10);

/// A page no request uses.
#[derive(Clone, Copy, Debug)]
struct Idle {
    page: Gfn,
    grant: Option<GrantRef>,
}

#[derive(Debug)]
pub(super) struct Pool {
    domain: FakeDomain,
    backend: DomId,
    persistent: bool,
    /// Granted ones at the front, where they are taken from, as in Linux.
    idle: VecDeque<Idle>,
    /// Of the request answered last, whose data was not looked at yet.
    answered: Vec<Idle>,
    purged: Instant,
}

impl Pool {
    pub(super) fn new(domain: FakeDomain, backend: DomId, persistent: bool) -> Self {
        Self {
            domain,
            backend,
            persistent,
            idle: VecDeque::new(),
            answered: Vec::new(),
            purged: Instant::now(),
        }
    }

    /// A page and its grant; none when the guest's memory or grants are used up. Persistent grants are
    /// never read-only, since the next request may want the page for anything.
    pub(super) fn take(&mut self, readonly: bool) -> Option<(Gfn, GrantRef)> {
        let idle = match self.idle.pop_front() {
            Some(idle) => idle,
            None => Idle {
                page: self.domain.alloc_page()?,
                grant: None,
            },
        };
        let readonly = readonly && !self.persistent;
        let grant = idle
            .grant
            .or_else(|| self.domain.grant(idle.page, self.backend, readonly));
        if grant.is_none() {
            self.idle.push_back(idle);
        }
        Some((idle.page, grant?))
    }

    /// The request that used a page is over. The page can't be taken before [`Self::reuse`].
    pub(super) fn end(&mut self, page: Gfn, grant: GrantRef) -> Result<(), StillMapped> {
        let kept = match self.domain.end_access(grant) {
            Ok(()) => None,
            Err(_) if self.persistent => Some(grant),
            Err(still_mapped) => return Err(still_mapped),
        };
        self.answered.push(Idle { page, grant: kept });
        Ok(())
    }

    /// Lets the pages of ended requests be taken.
    pub(super) fn reuse(&mut self) {
        for idle in self.answered.drain(..) {
            if idle.grant.is_some() {
                self.idle.push_front(idle);
            } else {
                self.idle.push_back(idle);
            }
        }
    }

    /// Some idle page is granted, so [`Self::purge`] will have to look.
    pub(super) fn holds_grants(&self) -> bool {
        self.idle.front().is_some_and(|idle| idle.grant.is_some())
    }

    /// When it is time to: ends the idle grants that the backend has unmapped.
    pub(super) fn purge(&mut self) {
        if !self.holds_grants() || self.purged.elapsed() < PURGE_INTERVAL {
            return;
        }
        self.purged = Instant::now();
        let Self { domain, idle, .. } = self;
        for idle in idle.iter_mut() {
            idle.grant = idle
                .grant
                .filter(|&grant| domain.end_access(grant).is_err());
        }
        idle.make_contiguous()
            .sort_by_key(|idle| idle.grant.is_none());
    }

    /// How long until the next [`Self::purge`] at most.
    pub(super) fn patience(&self) -> Option<Duration> {
        self.holds_grants()
            .then(|| PURGE_INTERVAL.saturating_sub(self.purged.elapsed()))
    }

    /// Frees what isn't granted; what is, has to wait for the backend.
    pub(super) fn into_granted(mut self) -> Vec<(Gfn, GrantRef)> {
        self.reuse();
        let mut granted = Vec::new();
        for idle in self.idle {
            match idle.grant {
                Some(grant) => granted.push((idle.page, grant)),
                None => self.domain.free_page(idle.page),
            }
        }
        granted
    }
}

#[cfg(test)]
mod tests {
    use xenblk_grants::Access;
    use xenblk_grants::fake::{FakeXen, grant_table};

    use super::*;

    #[test]
    fn a_persistent_pool_keeps_exactly_what_the_backend_keeps_mapped() {
        let xen = FakeXen::start().unwrap();
        let domain = xen.domain(DomId(1), 16).unwrap();
        let table = grant_table(xen.host().unwrap().open_gntdev().unwrap()).unwrap();
        let mut pool = Pool::new(domain.clone(), DomId(0), true);
        let (mapped_page, mapped_grant) = pool.take(true).unwrap();
        let (page, grant) = pool.take(false).unwrap();
        let mapping = table
            .map(DomId(1), &[mapped_grant], Access::ReadWrite)
            .unwrap();
        for (page, grant) in [(mapped_page, mapped_grant), (page, grant)] {
            pool.end(page, grant).unwrap();
        }
        pool.reuse();
        assert_eq!(pool.take(false), Some((mapped_page, mapped_grant)));
        assert_eq!(domain.end_access(grant), Ok(()), "it was revoked");

        pool.end(mapped_page, mapped_grant).unwrap();
        pool.reuse();
        drop(mapping);
        pool.purge();
        assert!(pool.holds_grants(), "it is not time yet");
        pool.purged -= PURGE_INTERVAL;
        pool.purge();
        assert!(!pool.holds_grants());
        assert_eq!(pool.into_granted(), []);
    }

    #[test]
    fn any_other_pool_insists_on_the_end_of_the_mapping() {
        let xen = FakeXen::start().unwrap();
        let domain = xen.domain(DomId(1), 16).unwrap();
        let table = grant_table(xen.host().unwrap().open_gntdev().unwrap()).unwrap();
        let mut pool = Pool::new(domain, DomId(0), false);
        let (page, grant) = pool.take(true).unwrap();
        assert!(table.map(DomId(1), &[grant], Access::ReadWrite).is_err());
        let mapping = table.map(DomId(1), &[grant], Access::ReadOnly).unwrap();
        assert_eq!(pool.end(page, grant), Err(StillMapped));
        drop(mapping);
        assert_eq!(pool.end(page, grant), Ok(()));
    }
}
