//! The two ways to XenStore: xenstored's Unix socket, and the kernel's `/dev/xen/xenbus`
//! (xenbus_dev_frontend.c), through which a driver domain reaches a xenstored elsewhere. Bytes only;
//! what they mean is the pump's business.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

use crate::wire::Packet;

/// O_NONBLOCK of every Linux that Xen runs on (asm-generic/fcntl.h).
const NONBLOCK: i32 = 0o4000;

/// A connection. Reading and writing may go on at the same time, and either may be cancelled without
/// losing bytes.
#[derive(Debug)]
pub(crate) enum Transport {
    Socket(UnixStream),
    /// Polled for reading only: the device never says that it can be written, because it always can.
    Device(AsyncFd<File>),
}

impl Transport {
    /// The kind follows from what is there: a character device or a socket.
    pub(crate) async fn connect(path: &Path) -> io::Result<Self> {
        if std::fs::metadata(path)?.file_type().is_char_device() {
            let mut options = OpenOptions::new();
            options.read(true).write(true).custom_flags(NONBLOCK);
            return Self::device(options.open(path)?);
        }
        Ok(Self::Socket(UnixStream::connect(path).await?))
    }

    /// An open, non-blocking xenbus device.
    #[expect(
        deprecated,
        reason = "its successor is unsafe for types that change their descriptor; a File doesn't"
    )]
    pub(crate) fn device(file: File) -> io::Result<Self> {
        Ok(Self::Device(AsyncFd::with_interest(
            file,
            Interest::READABLE,
        )?))
    }

    pub(crate) fn is_device(&self) -> bool {
        matches!(self, Self::Device(_))
    }

    /// At least one byte, or 0 at the end.
    pub(crate) async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Socket(stream) => loop {
                stream.readable().await?;
                match stream.try_read(buffer) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    done => return done,
                }
            },
            Self::Device(device) => {
                device
                    .async_io(Interest::READABLE, |mut file| file.read(buffer))
                    .await
            }
        }
    }

    /// Writes from the front of `packets`, which are whole, and returns how many bytes went. To the
    /// device goes exactly one packet a call: it acts on a message when its last byte comes and forgets
    /// whatever follows in the same write. An error from the device is about that packet.
    pub(crate) async fn write(&self, packets: &[u8]) -> io::Result<usize> {
        match self {
            Self::Socket(stream) => loop {
                stream.writable().await?;
                match stream.try_write(packets) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    done => return done,
                }
            },
            Self::Device(device) => {
                let first = packets.get(..Packet::length(packets)).unwrap_or(packets);
                // Never EAGAIN: a watch waits for xenstored, everything else is queued in the kernel.
                let written = device.get_ref().write(first)?;
                if written == first.len() {
                    Ok(written)
                } else {
                    Err(io::ErrorKind::WriteZero.into())
                }
            }
        }
    }
}
