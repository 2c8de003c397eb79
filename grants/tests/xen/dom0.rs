//! Dom0 as a guest of itself.
#![expect(
    unsafe_code,
    reason = "ioctls and a mapping of /dev/xen/gntalloc, which the library has no use for"
)]
// UNSAFETY: the structures are those of xen/gntalloc.h and xen/evtchn.h; a page is mapped until the
// guest gives it up, and only through the methods here.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::ptr;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::retry_on_intr;
use rustix::mm::{MapFlags, ProtFlags};
use xenblk_grants::{
    CopyOp, Direction, DomId, EventChannels, GrantRef, GrantTable, Port, Slab, XEN_PAGE_SIZE, sys,
};

use crate::contract::{Guest, Host};

/// This domain.
const SELF: DomId = DomId(0);

pub(crate) struct Dom0;

impl Host for Dom0 {
    fn guest(&self) -> Box<dyn Guest> {
        Box::new(Loopback {
            gntalloc: device("/dev/xen/gntalloc"),
            evtchn: device(sys::EVTCHN),
            pages: RefCell::default(),
            events: RefCell::default(),
        })
    }
    fn grant_table(&self) -> Box<dyn GrantTable> {
        sys::grant_table(sys::open_gntdev().unwrap())
    }
    fn event_channels(&self) -> Box<dyn EventChannels> {
        sys::event_channels(sys::open_evtchn(SELF).unwrap())
    }
    fn no_domain(&self) -> DomId {
        DomId(4242)
    }
}

struct Loopback {
    gntalloc: File,
    evtchn: File,
    pages: RefCell<HashMap<GrantRef, Page>>,
    /// Ports read from the device that nobody has asked for yet.
    events: RefCell<HashSet<u32>>,
}

struct Page {
    at: *mut c_void,
    index: u64,
}

#[repr(C)]
struct AllocGref {
    domid: u16,
    flags: u16,
    count: u32,
    index: u64,
    gref: u32,
}

#[repr(C)]
struct DeallocGref {
    index: u64,
    count: u32,
}

const ALLOC_GREF: libc::c_ulong = 0x0018_4705;
const DEALLOC_GREF: libc::c_ulong = 0x0010_4706;
const BIND_UNBOUND_PORT: libc::c_ulong = 0x0004_4502;
const UNBIND: libc::c_ulong = 0x0004_4503;
const NOTIFY: libc::c_ulong = 0x0004_4504;
const WRITABLE: u16 = 1;

fn device(path: &str) -> File {
    let mut options = OpenOptions::new();
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    options.read(true).write(true).open(path).unwrap()
}

fn ioctl<T>(device: &File, opcode: libc::c_ulong, arg: &mut T) -> i32 {
    // SAFETY: each opcode above is used with its own structure; none of them refers to other memory.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), opcode, ptr::from_mut(arg)) };
    assert!(
        result >= 0,
        "{opcode:#x}: {}",
        std::io::Error::last_os_error()
    );
    result
}

/// Whether a page can be copied from: what it says of a grant nobody has mapped is whether it exists.
fn is_granted(gref: GrantRef) -> bool {
    let table = sys::grant_table(sys::open_gntdev().unwrap());
    let mut slab = Slab::reserve(XEN_PAGE_SIZE).unwrap();
    let mut op = [CopyOp::new(gref, 0, 1, 0, Direction::FromGuest)];
    table.copy(SELF, &mut slab, &mut op).unwrap();
    op[0].status.is_okay()
}

impl Guest for Loopback {
    fn domid(&self) -> DomId {
        SELF
    }

    fn grant(&self, readonly: bool) -> GrantRef {
        let mut arg = AllocGref {
            domid: SELF.0,
            flags: if readonly { 0 } else { WRITABLE },
            count: 1,
            index: 0,
            gref: 0,
        };
        ioctl(&self.gntalloc, ALLOC_GREF, &mut arg);
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let file = &self.gntalloc;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let at = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                XEN_PAGE_SIZE,
                prot,
                MapFlags::SHARED,
                file,
                arg.index,
            )
        }
        .unwrap();
        let (gref, index) = (GrantRef(arg.gref), arg.index);
        self.pages.borrow_mut().insert(gref, Page { at, index });
        gref
    }

    /// The device doesn't say whether a grant could be ended; one that couldn't is ended later, by a
    /// timer of the kernel, once nobody maps it.
    fn end_access(&self, gref: GrantRef) -> bool {
        let Some(page) = self.pages.borrow_mut().remove(&gref) else {
            return (0..100).any(|_| {
                std::thread::sleep(Duration::from_millis(100));
                !is_granted(gref)
            });
        };
        // SAFETY: mapped by `grant`, and out of the table since.
        unsafe { rustix::mm::munmap(page.at, XEN_PAGE_SIZE) }.unwrap();
        let mut arg = DeallocGref {
            index: page.index,
            count: 1,
        };
        ioctl(&self.gntalloc, DEALLOC_GREF, &mut arg);
        !is_granted(gref)
    }

    fn read(&self, gref: GrantRef) -> Vec<u8> {
        let at = self.pages.borrow()[&gref].at.cast::<u8>();
        // SAFETY: a mapped page; nobody writes it while the suite looks.
        unsafe { std::slice::from_raw_parts(at, XEN_PAGE_SIZE) }.to_vec()
    }

    fn write(&self, gref: GrantRef, bytes: &[u8]) {
        assert!(bytes.len() <= XEN_PAGE_SIZE);
        let at = self.pages.borrow()[&gref].at.cast::<u8>();
        // SAFETY: a mapped page, long enough.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
    }

    fn alloc_unbound(&self) -> Port {
        let port = ioctl(&self.evtchn, BIND_UNBOUND_PORT, &mut u32::from(SELF.0));
        Port(u32::try_from(port).unwrap())
    }

    fn notify(&self, port: Port) {
        ioctl(&self.evtchn, NOTIFY, &mut { port.0 });
        // An event takes a moment to reach its device, also one of this domain.
        std::thread::sleep(Duration::from_millis(20));
    }

    fn close(&self, port: Port) {
        ioctl(&self.evtchn, UNBIND, &mut { port.0 });
    }

    fn took_event(&self, port: Port, expected: bool) -> bool {
        let wait = Timespec {
            tv_sec: if expected { 10 } else { 0 },
            tv_nsec: 50_000_000,
        };
        let mut events = self.events.borrow_mut();
        let mut readable = [PollFd::new(&self.evtchn, PollFlags::IN)];
        retry_on_intr(|| rustix::event::poll(&mut readable, Some(&wait))).unwrap();
        let mut ports = [0; 4096];
        while let Ok(bytes @ 1..) = rustix::io::read(&self.evtchn, &mut ports) {
            for port in ports[..bytes].as_chunks::<4>().0 {
                events.insert(u32::from_ne_bytes(*port));
            }
            rustix::io::write(&self.evtchn, &ports[..bytes]).unwrap();
        }
        events.remove(&port.0)
    }
}
