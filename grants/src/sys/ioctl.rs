//! One ioctl with a pointer argument. What the pointer must point to is each caller's business.
#![expect(unsafe_code, reason = "ioctls")]
// UNSAFETY: the kernel reads and writes what the argument points to; its layout is in `abi`.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::BorrowedFd;

use rustix::ioctl::{Ioctl, IoctlOutput, Opcode};

/// Issues `opcode` on `fd`; the device's return value, which some calls use for a result.
///
/// # Safety
/// `arg` points to what `opcode` expects, with everything it refers to, valid for reads and writes for
/// the length of the call.
pub(super) unsafe fn ioctl(
    fd: BorrowedFd<'_>,
    opcode: Opcode,
    arg: *mut c_void,
) -> io::Result<c_int> {
    // SAFETY: the caller vouches for `arg`; `Call` passes both on unchanged.
    Ok(unsafe { rustix::ioctl::ioctl(fd, Call { opcode, arg }) }?)
}

struct Call {
    opcode: Opcode,
    arg: *mut c_void,
}

// SAFETY: the argument is the caller's pointer, for which `ioctl`'s caller vouches; the output is
// the return value alone, and nothing is assumed about the memory after the call.
unsafe impl Ioctl for Call {
    type Output = c_int;

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.opcode
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.arg
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<c_int> {
        Ok(out)
    }
}
