//! A guest with one disk: just enough of a frontend to go through every handshake and to see its data.

use std::collections::BTreeMap;

use xenblk_grants::fake::{DomainWords, FakeDomain, Gfn};
use xenblk_grants::{DomId, GrantRef, Port};
use xenblk_ring::{
    Abi, DirectSegments, FlushRequest, FrontRing, Request, RwOp, RwRequest, Segment,
};
use xenblk_xenstore::{Client, Error, Tx};

use crate::world::{World, bounded, frontend};

const BACKEND: DomId = DomId(0);
/// One request's data: eight sectors.
pub(crate) const PAGE: usize = 4096;

pub(crate) struct Guest {
    pub(crate) domid: u16,
    pub(crate) devid: u32,
    pub(crate) domain: FakeDomain,
    store: Client,
    queues: Vec<Queue>,
}

struct Queue {
    ring: FrontRing<DomainWords>,
    first: Gfn,
    grants: Vec<GrantRef>,
    port: Port,
    next_id: u64,
}

impl Guest {
    /// A new domain, known to hypervisor and store.
    pub(crate) async fn new(world: &World, domid: u16, devid: u32) -> Self {
        let domain = world.xen.domain(DomId(domid), 256).unwrap();
        world.server.introduce(domid).unwrap();
        Self::in_domain(world, domain, devid)
    }

    /// Another disk of the same domain.
    pub(crate) fn in_domain(world: &World, domain: FakeDomain, devid: u32) -> Self {
        let domid = domain.domid().0;
        let stream = world.server.connect_as(domid).unwrap();
        stream.set_nonblocking(true).unwrap();
        let stream = tokio::net::UnixStream::from_std(stream).unwrap();
        let (store, _) = Client::from_stream(stream);
        Self {
            domid,
            devid,
            domain,
            store,
            queues: Vec::new(),
        }
    }

    /// Makes fresh rings and returns the keys that describe them, as Linux writes them.
    pub(crate) fn make_rings(&mut self, queues: usize, order: u32) -> BTreeMap<String, String> {
        assert!(self.queues.is_empty(), "the old rings are still there");
        let mut keys = BTreeMap::new();
        keys.insert("protocol".to_owned(), "x86_64-abi".to_owned());
        keys.insert("feature-persistent".to_owned(), "0".to_owned());
        if order > 0 {
            keys.insert("ring-page-order".to_owned(), order.to_string());
        }
        if queues > 1 {
            keys.insert("multi-queue-num-queues".to_owned(), queues.to_string());
        }
        for number in 0..queues {
            let queue = self.make_queue(1 << order);
            let prefix = if queues > 1 {
                format!("queue-{number}/")
            } else {
                String::new()
            };
            keys.insert(format!("{prefix}event-channel"), queue.port.0.to_string());
            if order == 0 {
                keys.insert(format!("{prefix}ring-ref"), queue.grants[0].0.to_string());
            } else {
                for (page, gref) in queue.grants.iter().enumerate() {
                    keys.insert(format!("{prefix}ring-ref{page}"), gref.0.to_string());
                }
            }
            self.queues.push(queue);
        }
        keys
    }

    fn make_queue(&self, pages: u32) -> Queue {
        let first = self.domain.alloc_pages(pages as usize).unwrap();
        let page = |index| Gfn(first.0 + index);
        let grants = (0..pages)
            .map(|index| self.domain.grant(page(index), BACKEND, false).unwrap())
            .collect();
        let words = self.domain.words(first, pages as usize);
        let ring = FrontRing::init(words, Abi::X86_64, pages).unwrap();
        let port = self.domain.alloc_unbound(BACKEND).unwrap();
        Queue {
            ring,
            first,
            grants,
            port,
            next_id: 0,
        }
    }

    /// Ends every grant, as a strict frontend does once the backend is Closed: fails if one is mapped.
    pub(crate) fn free_rings(&mut self) {
        for queue in self.queues.drain(..) {
            for (gref, index) in queue.grants.into_iter().zip(0..) {
                self.domain
                    .end_access(gref)
                    .expect("a ring page is still mapped");
                self.domain.free_page(Gfn(queue.first.0 + index));
            }
            self.domain.close(queue.port);
        }
    }

    /// Writes keys and state in one transaction.
    pub(crate) async fn publish(&self, keys: &BTreeMap<String, String>, state: &str) {
        let root = &frontend(self.domid, self.devid);
        let written: Result<(), Error> = self
            .store
            .transact(async |store: Client, tx| {
                // An earlier connection may have had more of them.
                for stale in ["multi-queue-num-queues", "ring-page-order"] {
                    store.rm(tx, &format!("{root}/{stale}")).await?;
                }
                for (key, value) in keys {
                    store.write(tx, &format!("{root}/{key}"), value).await?;
                }
                store.write(tx, &format!("{root}/state"), state).await
            })
            .await;
        written.unwrap();
    }

    pub(crate) async fn set_state(&self, state: &str) {
        self.write_key("state", state).await;
    }

    pub(crate) async fn write_key(&self, key: &str, value: impl AsRef<[u8]>) {
        let node = format!("{}/{key}", frontend(self.domid, self.devid));
        self.store.write(Tx::NONE, &node, value).await.unwrap();
    }

    pub(crate) async fn remove_key(&self, key: &str) {
        let node = format!("{}/{key}", frontend(self.domid, self.devid));
        self.store.rm(Tx::NONE, &node).await.unwrap();
    }

    /// Connects as Linux does once the backend waits: rings, state 3, backend 4, state 4.
    pub(crate) async fn connect(&mut self, world: &World, queues: usize, order: u32) {
        world.reaches(self.domid, self.devid, "2").await;
        let keys = self.make_rings(queues, order);
        self.publish(&keys, "3").await;
        self.connected(world).await;
    }

    /// Waits for the backend and shows state 4.
    pub(crate) async fn connected(&mut self, world: &World) {
        world.reaches(self.domid, self.devid, "4").await;
        self.set_state("4").await;
    }

    /// Lets go of the disk, waiting for each answer, and checks that nothing is mapped any more.
    pub(crate) async fn close(&mut self, world: &World) {
        self.set_state("5").await;
        world.reaches(self.domid, self.devid, "5").await;
        self.finish_closing(world).await;
    }

    /// The second half of [`close`](Self::close), for a backend that is Closing already.
    pub(crate) async fn finish_closing(&mut self, world: &World) {
        self.set_state("6").await;
        world.reaches(self.domid, self.devid, "6").await;
        self.free_rings();
    }

    /// Writes a page of `fill` at page `page` of the disk through every queue, each its own byte more, and
    /// reads all of it back through the next queue.
    pub(crate) async fn check_data(&mut self, page: u64, fill: u8) {
        let queues = self.queues.len();
        for queue in 0..queues {
            let data = [fill.wrapping_add(queue as u8); PAGE];
            self.write(queue, page + queue as u64, &data).await.unwrap();
        }
        self.flush(0).await.unwrap();
        for queue in 0..queues {
            let data = self
                .read((queue + 1) % queues, page + queue as u64)
                .await
                .unwrap();
            assert!(
                data == [fill.wrapping_add(queue as u8); PAGE],
                "wrong data on queue {queue}"
            );
        }
    }

    pub(crate) async fn write(
        &mut self,
        queue: usize,
        page: u64,
        data: &[u8; PAGE],
    ) -> Result<(), i16> {
        let memory = self.domain.alloc_page().unwrap();
        assert!(self.domain.write(memory, 0, data));
        let result = self.transfer(queue, RwOp::Write, page, memory).await;
        self.domain.free_page(memory);
        result
    }

    pub(crate) async fn read(&mut self, queue: usize, page: u64) -> Result<[u8; PAGE], i16> {
        let memory = self.domain.alloc_page().unwrap();
        let result = self.transfer(queue, RwOp::Read, page, memory).await;
        let mut data = [0; PAGE];
        assert!(self.domain.read(memory, 0, &mut data));
        self.domain.free_page(memory);
        result.map(|()| data)
    }

    async fn transfer(
        &mut self,
        queue: usize,
        op: RwOp,
        page: u64,
        memory: Gfn,
    ) -> Result<(), i16> {
        let gref = self
            .domain
            .grant(memory, BACKEND, op == RwOp::Write)
            .unwrap();
        let segments = DirectSegments::new(&[Segment::new(gref.0, 0, 7).unwrap()]).unwrap();
        let id = self.next_id(queue);
        let result = self
            .request(
                queue,
                Request::Rw(RwRequest {
                    id,
                    op,
                    sector: page * 8,
                    segments,
                }),
                id,
            )
            .await;
        self.domain
            .end_access(gref)
            .expect("answered while the page is mapped");
        result
    }

    pub(crate) async fn flush(&mut self, queue: usize) -> Result<(), i16> {
        let id = self.next_id(queue);
        self.request(queue, Request::Flush(FlushRequest { id, data: None }), id)
            .await
    }

    fn next_id(&mut self, queue: usize) -> u64 {
        let queue = &mut self.queues[queue];
        queue.next_id += 1;
        queue.next_id
    }

    /// Puts a request on the ring and tells the backend, without waiting for the answer.
    pub(crate) fn submit(&mut self, queue: usize, request: &Request) {
        let queue = &mut self.queues[queue];
        queue.ring.push(&request.encode(Abi::X86_64)).unwrap();
        if queue.ring.publish() {
            self.domain.notify(queue.port);
        }
    }

    async fn request(&mut self, queue: usize, request: Request, id: u64) -> Result<(), i16> {
        self.submit(queue, &request);
        let ring = &mut self.queues[queue].ring;
        let response = async {
            loop {
                if let Some(response) = ring.take().unwrap() {
                    return response;
                }
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
        };
        let response = bounded("a response", response).await;
        assert_eq!(response.id, id);
        if response.status == 0 {
            Ok(())
        } else {
            Err(response.status)
        }
    }

    /// The shared words of a queue's ring, to do wrong with.
    pub(crate) fn ring_words(&self, queue: usize) -> &DomainWords {
        self.queues[queue].ring.words()
    }

    /// Wakes the backend whatever the ring says.
    pub(crate) fn kick(&self, queue: usize) {
        self.domain.notify(self.queues[queue].port);
    }
}
