//! What a ring asks of `/dev/xen/evtchn`.

use std::io;
use std::os::fd::BorrowedFd;

use crate::{DomId, Port};

/// One event-channel device, owned by one ring; closing it closes its ports.
///
/// Events arrive by reading [`as_fd`](Self::as_fd) (non-blocking): whole ports of 4 bytes in
/// native order, EAGAIN when there is none. A port that has been queued stays masked until it is
/// written back, by [`unmask`](Self::unmask) or by a plain write of the same 4 bytes; events in
/// between are remembered as one. Writing without having read re-enables the port as well, so a
/// port may then stand in the queue twice.
pub trait EventChannels {
    /// Connects a new local port to the unbound port `remote` of `dom` and makes it pending at once,
    /// since events may have been lost while nobody was bound. EINVAL: `remote` is closed, reserved
    /// for another domain or still bound (also for a moment after its last user died: retry).
    /// ESRCH: no such domain. EACCES: the device is restricted to another domain.
    fn bind_interdomain(&self, dom: DomId, remote: Port) -> io::Result<Port>;

    /// Sends an event. Dropped silently when the other end is closed; ENOTCONN when `port` isn't one
    /// of this device's.
    fn notify(&self, port: Port) -> io::Result<()>;

    /// Lets `port` be queued again; if an event came meanwhile it is queued now.
    fn unmask(&self, port: Port) -> io::Result<()>;

    /// Closes `port`; the other end becomes unbound. Unknown ports are ignored.
    fn unbind(&self, port: Port);

    /// The descriptor that yields pending ports.
    fn as_fd(&self) -> BorrowedFd<'_>;
}
