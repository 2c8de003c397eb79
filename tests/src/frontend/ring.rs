//! One ring of the guest: its pages and port, the requests in flight on it, and the grants each of them
//! gave. As strict as Linux 6, whatever the profile: what the backend must not do is a [`Violation`].
//! Threads and waiting are `queue`'s, pages and grants between requests `pool`'s.

use std::io;

use xenblk_grants::fake::{DomainWords, FakeDomain, Gfn};
use xenblk_grants::{DomId, GrantRef, Port};
use xenblk_ring::layout::{MAX_INDIRECT_PAGES, OP_DISCARD, OP_FLUSH_DISKCACHE};
use xenblk_ring::{
    Abi, DirectSegments, DiscardRequest, FlushRequest, FrontRing, IndirectRequest, Request,
    Response, RwOp, RwRequest, Segment, Status, encode_indirect_page,
};

use super::negotiate::RingKeys;
use super::pool::Pool;
use super::profile::{Ids, IndirectGrants, Profile};
use super::source::{GuestBuffer, Io, IoKind, SECTORS_PER_PAGE};

/// A ring as it is offered to the backend: pages granted, port allocated, nobody using it.
#[derive(Debug)]
pub(super) struct RingParts {
    first_page: Gfn,
    pub(super) pages: usize,
    grefs: Vec<GrantRef>,
    pub(super) port: Port,
    /// SHARED_RING_INIT was done on it.
    pub(super) front: FrontRing<DomainWords>,
    /// Of a ring that isn't used any more: other pages that the backend may not have let go.
    granted: Vec<(Gfn, GrantRef)>,
}

impl RingParts {
    /// Allocates, initialises and grants `1 << order` pages to `backend`.
    pub(super) fn new(domain: &FakeDomain, backend: DomId, order: u32) -> io::Result<Self> {
        let pages = 1 << order;
        let exhausted =
            || io::Error::new(io::ErrorKind::OutOfMemory, "the guest's memory is used up");
        let first_page = domain.alloc_pages(pages).ok_or_else(exhausted)?;
        let words = domain.words(first_page, pages);
        let front = FrontRing::init(words, Abi::NATIVE, pages as u32).map_err(io::Error::other)?;
        let grefs = (first_page.0..)
            .take(pages)
            .map(|page| {
                domain
                    .grant(Gfn(page), backend, false)
                    .ok_or_else(exhausted)
            })
            .collect::<io::Result<_>>()?;
        let port = domain.alloc_unbound(backend)?;
        Ok(Self {
            first_page,
            pages,
            grefs,
            port,
            front,
            granted: Vec::new(),
        })
    }

    pub(super) fn keys(&self) -> RingKeys {
        RingKeys {
            ring_refs: self.grefs.iter().map(|gref| gref.0).collect(),
            event_channel: self.port.0,
        }
    }

    /// Takes everything back; returns how many pages the backend still maps. Those are never reused.
    pub(super) fn release(self, domain: &FakeDomain) -> usize {
        domain.close(self.port);
        let mut mapped = 0;
        let ring = (self.first_page.0..).map(Gfn).zip(self.grefs);
        for (page, gref) in ring.chain(self.granted) {
            match domain.end_access(gref) {
                Ok(()) => domain.free_page(page),
                Err(_) => mapped += 1,
            }
        }
        mapped
    }
}

/// What the backend did wrong; Linux disables the device for each of these.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    #[error("rsp_prod ran past the ring")]
    Ring,
    #[error("response to id {id:#x}, which is not in flight")]
    Id { id: u64 },
    #[error("response to id {id} names operation {found}, expected {expected}")]
    Operation { id: u64, found: u8, expected: u8 },
    #[error("grant {gref} of id {id} is still in use at its response")]
    StillMapped { id: u64, gref: GrantRef },
    #[error("response to id {id} has status {status}")]
    Status { id: u64, status: i16 },
}

/// What a request in flight holds.
#[derive(Debug, Default)]
struct Shadow {
    /// The request and whose it is; none while the id is free.
    request: Option<(Io, Owner)>,
    /// What the response must echo.
    operation: u8,
    /// The data: page and its granted part.
    pages: Vec<(Gfn, Segment)>,
    /// The page of segment descriptors of an indirect request, or of all of this slot's.
    indirect: Option<(Gfn, GrantRef)>,
}

/// What a profile and its backend agreed on for one connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manners {
    pub(super) persistent: bool,
    pub(super) readonly_writes: bool,
    pub(super) indirect: IndirectGrants,
    pub(super) ids: Ids,
}

impl Manners {
    /// `offered`: the backend has `feature-persistent`.
    pub(super) fn new(profile: &Profile, offered: bool) -> Self {
        Self {
            persistent: profile.grants.persistent && offered,
            readonly_writes: profile.grants.readonly_writes,
            indirect: profile.grants.indirect,
            ids: profile.requests.ids,
        }
    }
}

/// Where Linux and Windows on x86 have their heaps; structures stand 128 bytes apart.
const HEAP: u64 = 0xffff_8880_0000_0000;
const STRUCTURE: u64 = 128;

impl Ids {
    fn of(self, slot: usize) -> u64 {
        match self {
            Self::Index => slot as u64,
            Self::Pointer => HEAP + slot as u64 * STRUCTURE,
        }
    }

    fn slot(self, id: u64) -> Option<usize> {
        let slot = match self {
            Self::Index => id,
            Self::Pointer => id.checked_sub(HEAP)? / STRUCTURE,
        };
        usize::try_from(slot)
            .ok()
            .filter(|&slot| self.of(slot) == id)
    }
}

/// Which of a queue's sources a request came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    Inbox,
    Job,
}

/// A request that was answered; to be given to [`GuestRing::recycle`] once its data was looked at.
pub(super) struct Answer {
    slot: usize,
    pub(super) io: Io,
    pub(super) owner: Owner,
    pub(super) status: Status,
    pages: Vec<(Gfn, Segment)>,
}

impl Answer {
    pub(super) fn buffer<'a>(&'a self, domain: &'a FakeDomain) -> GuestBuffer<'a> {
        GuestBuffer {
            domain,
            pages: &self.pages,
        }
    }
}

/// A ring in use, owned by its queue's thread.
#[derive(Debug)]
pub(super) struct GuestRing {
    pub(super) parts: RingParts,
    domain: FakeDomain,
    manners: Manners,
    shadows: Vec<Shadow>,
    /// LIFO, as Linux's: slots and their ids are reused at once.
    free_slots: Vec<usize>,
    pub(super) pool: Pool,
}

impl GuestRing {
    pub(super) fn new(
        parts: RingParts,
        domain: FakeDomain,
        backend: DomId,
        manners: Manners,
    ) -> Self {
        let entries = Abi::NATIVE.entries(parts.pages as u32) as usize;
        Self {
            parts,
            pool: Pool::new(domain.clone(), backend, manners.persistent),
            domain,
            manners,
            shadows: std::iter::repeat_with(Shadow::default)
                .take(entries)
                .collect(),
            free_slots: (0..entries).rev().collect(),
        }
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free_slots.is_empty()
    }

    /// Nothing is in flight, so nothing will be answered.
    pub(super) fn is_idle(&self) -> bool {
        self.free_slots.len() == self.shadows.len()
    }

    /// Puts one request on the ring without publishing it; `fill` writes a WRITE's data. To be called
    /// only while there [is room](Self::has_room). False: the guest's memory or its grants, which all
    /// rings share, are used up; nothing was done, and it is to be tried again when some were given back.
    pub(super) fn push(
        &mut self,
        io: Io,
        owner: Owner,
        fill: impl FnOnce(&GuestBuffer<'_>),
    ) -> Result<bool, Violation> {
        let Some(slot) = self.free_slots.pop() else {
            return Ok(false);
        };
        let mut shadow = std::mem::take(&mut self.shadows[slot]);
        let id = self.manners.ids.of(slot);
        let Some(request) = self.prepare(id, &io, &mut shadow, fill) else {
            // The backend has never heard of it, or maps it from earlier.
            let _ = self.end_grants(&mut shadow);
            self.pool.reuse();
            self.shadows[slot] = shadow;
            self.free_slots.push(slot);
            return Ok(false);
        };
        shadow.operation = match request {
            Request::Rw(RwRequest { op, .. }) | Request::Indirect(IndirectRequest { op, .. }) => {
                op.operation()
            }
            Request::Discard(_) => OP_DISCARD,
            _ => OP_FLUSH_DISKCACHE,
        };
        shadow.request = Some((io, owner));
        self.shadows[slot] = shadow;
        // There are as many slots here as entries, and one is free only once its entry is.
        self.parts
            .front
            .push(&request.encode(Abi::NATIVE))
            .map_err(|_| Violation::Ring)?;
        Ok(true)
    }

    /// Grants the request's pages and puts it into words. None: memory or grants are used up.
    fn prepare(
        &mut self,
        id: u64,
        io: &Io,
        shadow: &mut Shadow,
        fill: impl FnOnce(&GuestBuffer<'_>),
    ) -> Option<Request> {
        let (sector, nr_sectors) = (io.sector, io.sectors);
        let op = match io.kind {
            IoKind::Read => RwOp::Read,
            IoKind::Write => RwOp::Write,
            IoKind::Flush => return Some(Request::Flush(FlushRequest { id, data: None })),
            IoKind::Discard => {
                let secure = false;
                return Some(Request::Discard(DiscardRequest {
                    id,
                    sector,
                    nr_sectors,
                    secure,
                }));
            }
        };
        let mut at = sector;
        let readonly = op == RwOp::Write && self.manners.readonly_writes;
        while at < sector + nr_sectors {
            let (page, gref) = self.pool.take(readonly)?;
            let first = at % SECTORS_PER_PAGE;
            let last = (first + sector + nr_sectors - at).min(SECTORS_PER_PAGE) - 1;
            shadow
                .pages
                .push((page, Segment::new(gref.0, first as u8, last as u8)?));
            at += last - first + 1;
        }
        let segments: Vec<Segment> = shadow.pages.iter().map(|&(_, segment)| segment).collect();
        let request = match DirectSegments::new(&segments) {
            Some(segments) => Request::Rw(RwRequest {
                id,
                op,
                sector,
                segments,
            }),
            None => {
                let readonly = self.manners.indirect != IndirectGrants::LikeData;
                let (page, gref) = match shadow.indirect {
                    Some(kept) => kept,
                    None => self.pool.take(readonly)?,
                };
                shadow.indirect = Some((page, gref));
                self.domain.write(page, 0, &encode_indirect_page(&segments));
                let mut grefs = [0; MAX_INDIRECT_PAGES];
                grefs[0] = gref.0;
                let count = u16::try_from(segments.len()).ok()?;
                Request::Indirect(IndirectRequest::new(id, op, sector, count, grefs).ok()?)
            }
        };
        if io.kind == IoKind::Write {
            fill(&GuestBuffer {
                domain: &self.domain,
                pages: &shadow.pages,
            });
        }
        Some(request)
    }

    /// Ends the grants of a request that is over or was not sent, but for a page of segment descriptors
    /// that is granted for good. The data stays readable until the pool may [reuse](Pool::reuse) it.
    fn end_grants(&mut self, shadow: &mut Shadow) -> Result<(), GrantRef> {
        let data = shadow
            .pages
            .iter()
            .map(|&(page, segment)| (page, GrantRef(segment.gref())));
        let indirect = match self.manners.indirect {
            IndirectGrants::Once => None,
            IndirectGrants::LikeData | IndirectGrants::Readonly => shadow.indirect.take(),
        };
        let mut ended = data.chain(indirect);
        ended.try_for_each(|(page, gref)| self.pool.end(page, gref).map_err(|_| gref))
    }

    /// The next response, checked, its grants taken back; none when there is none.
    pub(super) fn take(&mut self) -> Result<Option<Answer>, Violation> {
        let response = self.parts.front.take().map_err(|_| Violation::Ring)?;
        let Some(Response { id, op, status }) = response else {
            return Ok(None);
        };
        let slot = self.manners.ids.slot(id);
        let slot = slot.filter(|&slot| slot < self.shadows.len());
        let slot = slot.ok_or(Violation::Id { id })?;
        let mut shadow = std::mem::take(&mut self.shadows[slot]);
        let (io, owner) = shadow.request.take().ok_or(Violation::Id { id })?;
        if op != shadow.operation {
            return Err(Violation::Operation {
                id,
                found: op,
                expected: shadow.operation,
            });
        }
        self.end_grants(&mut shadow)
            .map_err(|gref| Violation::StillMapped { id, gref })?;
        let status = Status::from_wire(status).ok_or(Violation::Status { id, status })?;
        let pages = std::mem::take(&mut shadow.pages);
        self.shadows[slot] = shadow;
        Ok(Some(Answer {
            slot,
            io,
            owner,
            status,
            pages,
        }))
    }

    /// Frees the answered request's slot and pages.
    pub(super) fn recycle(&mut self, mut answer: Answer) {
        self.pool.reuse();
        answer.pages.clear();
        self.shadows[answer.slot].pages = answer.pages;
        self.free_slots.push(answer.slot);
    }

    /// Every request that was not answered, when the disk is gone. Their pages stay granted: the backend
    /// may still use them.
    pub(super) fn abandon(&mut self) -> Vec<(Io, Owner)> {
        let mut unanswered = Vec::new();
        for shadow in &mut self.shadows {
            let data = shadow.pages.drain(..);
            let data = data.map(|(page, segment)| (page, GrantRef(segment.gref())));
            self.parts
                .granted
                .extend(data.chain(shadow.indirect.take()));
            unanswered.extend(shadow.request.take());
        }
        unanswered
    }

    /// Gives the idle pages back to the guest's kernel, and the ring with what the backend may still map to
    /// whoever closes it.
    pub(super) fn into_parts(self) -> RingParts {
        let mut parts = self.parts;
        parts.granted.extend(self.pool.into_granted());
        parts
    }
}
