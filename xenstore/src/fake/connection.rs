//! The server's sockets. One loop owns the [`Store`]; each connection has a task that cuts its bytes
//! into requests and one that writes what the store sends it.

use std::collections::HashMap;
use std::io;
use std::os::unix::net as blocking;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};

use super::store::{Connection, Output, Store};
use super::{Done, PRIVILEGED, quota};
use crate::wire::{MAX_REQUEST, Packet, Parser};

/// Requests of all connections that may wait for the store; more wait in their sockets.
const WAITING_REQUESTS: usize = 64;

#[derive(Debug)]
pub(super) enum Control {
    Listen(blocking::UnixListener, Done),
    Connect(u16, blocking::UnixStream, Done),
    Introduce(u16, Done),
    Release(u16, Done),
}

/// What the sockets' tasks tell the loop.
enum Incoming {
    Accepted(UnixStream),
    Request(Connection, Packet),
    Gone(Connection),
}

/// Where a connection's packets go.
struct Outbox {
    bytes: mpsc::UnboundedSender<Vec<u8>>,
    /// Bytes sent but not yet written.
    unread: Arc<AtomicUsize>,
    /// The two tasks: dropped sockets are what the client notices.
    tasks: [AbortHandle; 2],
}

struct Loop {
    store: Store,
    outboxes: HashMap<Connection, Outbox>,
    last: u64,
    incoming: mpsc::Sender<Incoming>,
    /// Ends with the loop, and with it every task.
    tasks: JoinSet<()>,
}

/// Serves until the last sender of `control` is dropped.
pub(super) async fn serve(mut control: mpsc::UnboundedReceiver<Control>) {
    let (incoming, mut requests) = mpsc::channel(WAITING_REQUESTS);
    let mut state = Loop {
        store: Store::new(),
        outboxes: HashMap::new(),
        last: 0,
        incoming,
        tasks: JoinSet::new(),
    };
    loop {
        tokio::select! {
            command = control.recv() => match command {
                Some(command) => state.control(command),
                None => return,
            },
            Some(incoming) = requests.recv() => match incoming {
                Incoming::Accepted(stream) => state.connect(PRIVILEGED, stream),
                Incoming::Request(connection, packet) => state.store.handle(connection, packet),
                Incoming::Gone(connection) => state.close(connection),
            },
            Some(_) = state.tasks.join_next() => {}
        }
        state.deliver();
    }
}

impl Loop {
    fn control(&mut self, command: Control) {
        let (result, done) = match command {
            Control::Listen(listener, done) => {
                let listener = UnixListener::from_std(listener);
                let result = listener.map(|listener| {
                    self.tasks.spawn(accept(listener, self.incoming.clone()));
                });
                (result, done)
            }
            Control::Connect(domid, stream, done) => {
                let stream = UnixStream::from_std(stream);
                (stream.map(|stream| self.connect(domid, stream)), done)
            }
            Control::Introduce(domid, done) => {
                self.store.introduce(domid);
                (Ok(()), done)
            }
            Control::Release(domid, done) => {
                let unknown = || io::Error::new(io::ErrorKind::NotFound, "no such domain");
                (self.store.release(domid).map_err(|_| unknown()), done)
            }
        };
        // Whoever asked may have gone.
        let _ = done.send(result);
    }

    fn connect(&mut self, domid: u16, stream: UnixStream) {
        self.last = self.last.saturating_add(1);
        let connection = Connection(self.last);
        let (reader, writer) = stream.into_split();
        let (bytes, receiver) = mpsc::unbounded_channel();
        let unread = Arc::new(AtomicUsize::new(0));
        let tasks = [
            self.tasks
                .spawn(read(connection, reader, self.incoming.clone())),
            self.tasks
                .spawn(write(writer, receiver, Arc::clone(&unread))),
        ];
        self.outboxes.insert(
            connection,
            Outbox {
                bytes,
                unread,
                tasks,
            },
        );
        self.store.connect(connection, domid);
    }

    fn close(&mut self, connection: Connection) {
        self.store.disconnect(connection);
        if let Some(outbox) = self.outboxes.remove(&connection) {
            for task in outbox.tasks {
                task.abort();
            }
        }
    }

    fn deliver(&mut self) {
        for output in self.store.take_output() {
            match output {
                Output::Close(connection) => self.close(connection),
                Output::Send(connection, packet) => {
                    let Some(outbox) = self.outboxes.get(&connection) else {
                        continue;
                    };
                    if !outbox.send(&packet) {
                        self.close(connection);
                    }
                }
            }
        }
    }
}

impl Outbox {
    /// `false`: this client does not read, or is gone.
    fn send(&self, packet: &Packet) -> bool {
        let mut bytes = Vec::new();
        if packet.encode(&mut bytes).is_err() {
            return false;
        }
        // One writer and one reader of the count, both on this thread: no order to keep.
        let before = self.unread.fetch_add(bytes.len(), Ordering::Relaxed);
        before < quota::UNREAD && self.bytes.send(bytes).is_ok()
    }
}

async fn accept(listener: UnixListener, incoming: mpsc::Sender<Incoming>) {
    while let Ok((stream, _)) = listener.accept().await {
        if incoming.send(Incoming::Accepted(stream)).await.is_err() {
            return;
        }
    }
}

async fn read(connection: Connection, mut reader: OwnedReadHalf, to: mpsc::Sender<Incoming>) {
    let mut parser = Parser::new(MAX_REQUEST);
    let mut chunk = vec![0; 8192];
    // A request that is too long can't be skipped, so it ends the connection, as in xenstored.
    'connection: while let Ok(count @ 1..) = reader.read(&mut chunk).await {
        let mut bytes = chunk.get(..count).unwrap_or_default();
        loop {
            match parser.advance(&mut bytes) {
                Ok(None) => break,
                Ok(Some(packet)) => {
                    if to
                        .send(Incoming::Request(connection, packet))
                        .await
                        .is_err()
                    {
                        return;
                    }
                }
                Err(_) => break 'connection,
            }
        }
    }
    let _ = to.send(Incoming::Gone(connection)).await;
}

async fn write(
    mut writer: OwnedWriteHalf,
    mut bytes: mpsc::UnboundedReceiver<Vec<u8>>,
    unread: Arc<AtomicUsize>,
) {
    while let Some(bytes) = bytes.recv().await {
        if writer.write_all(&bytes).await.is_err() {
            return;
        }
        unread.fetch_sub(bytes.len(), Ordering::Relaxed);
    }
}
