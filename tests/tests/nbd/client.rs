//! A small NBD client that can also say what a real one never would.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const DISC: u16 = 2;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const TRIM: u16 = 4;
pub(crate) const WRITE_ZEROES: u16 = 6;
pub(crate) const FUA: u16 = 1;

pub(crate) const OPT_EXPORT_NAME: u32 = 1;
pub(crate) const OPT_ABORT: u32 = 2;
pub(crate) const OPT_LIST: u32 = 3;
pub(crate) const OPT_INFO: u32 = 6;
pub(crate) const OPT_GO: u32 = 7;

pub(crate) const ACK: u32 = 1;
pub(crate) const SERVER: u32 = 2;
pub(crate) const INFO: u32 = 3;
pub(crate) const ERR_UNSUP: u32 = (1 << 31) | 1;
pub(crate) const ERR_INVALID: u32 = (1 << 31) | 3;
pub(crate) const ERR_UNKNOWN: u32 = (1 << 31) | 6;
pub(crate) const ERR_TOO_BIG: u32 = (1 << 31) | 9;

pub(crate) struct Client {
    pub(crate) stream: UnixStream,
}

/// What GO told.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) size: u64,
    pub(crate) flags: u16,
    /// Minimum, preferred and maximum block size.
    pub(crate) blocks: [u32; 3],
}

impl Client {
    /// Connects, checks the greeting and answers it with `flags`.
    pub(crate) fn dial(path: &Path, flags: u32) -> Self {
        let mut client = Self {
            stream: UnixStream::connect(path).unwrap(),
        };
        assert_eq!(client.take::<16>(), *b"NBDMAGICIHAVEOPT");
        assert_eq!(client.take::<2>(), [0, 3], "fixed newstyle, no zeroes");
        client.send(&flags.to_be_bytes());
        client
    }

    /// Connects to the default export and enters transmission.
    pub(crate) fn go(path: &Path) -> Self {
        let mut client = Self::dial(path, 3);
        client.choose("");
        client
    }

    pub(crate) fn choose(&mut self, name: &str) -> Told {
        self.option(OPT_GO, &go_data(name));
        let (kind, export) = self.option_reply(OPT_GO);
        assert_eq!((kind, &export[..2]), (INFO, &[0, 0][..]));
        let (kind, blocks) = self.option_reply(OPT_GO);
        assert_eq!((kind, &blocks[..2]), (INFO, &[0, 3][..]));
        assert_eq!(self.option_reply(OPT_GO), (ACK, vec![]));
        let block = |at: usize| u32::from_be_bytes(blocks[at..at + 4].try_into().unwrap());
        Told {
            size: u64::from_be_bytes(export[2..10].try_into().unwrap()),
            flags: u16::from_be_bytes(export[10..12].try_into().unwrap()),
            blocks: [block(2), block(6), block(10)],
        }
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub(crate) fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub(crate) fn option(&mut self, code: u32, data: &[u8]) {
        let mut bytes = b"IHAVEOPT".to_vec();
        bytes.extend(code.to_be_bytes());
        bytes.extend(u32::try_from(data.len()).unwrap().to_be_bytes());
        bytes.extend(data);
        self.send(&bytes);
    }

    /// The type and data of the next reply, which must be one to `code`.
    pub(crate) fn option_reply(&mut self, code: u32) -> (u32, Vec<u8>) {
        assert_eq!(self.take::<8>(), 0x0003_e889_0455_65a9_u64.to_be_bytes());
        assert_eq!(u32::from_be_bytes(self.take()), code);
        let kind = u32::from_be_bytes(self.take());
        let mut data = vec![0; u32::from_be_bytes(self.take()) as usize];
        self.stream.read_exact(&mut data).unwrap();
        (kind, data)
    }

    pub(crate) fn request(&mut self, command: u16, flags: u16, cookie: u64, offset: u64, len: u32) {
        self.send(&request(command, flags, cookie, offset, len));
    }

    /// Cookie and error of the next reply; data, if any, is left to read.
    pub(crate) fn reply(&mut self) -> (u64, u32) {
        assert_eq!(self.take::<4>(), 0x6744_6698_u32.to_be_bytes());
        let error = u32::from_be_bytes(self.take());
        (u64::from_be_bytes(self.take()), error)
    }

    /// One request, its data sent along, and the error of its reply.
    pub(crate) fn ask(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        len: u32,
        data: &[u8],
    ) -> u32 {
        self.request(command, flags, 77, offset, len);
        self.send(data);
        let (cookie, error) = self.reply();
        assert_eq!(cookie, 77);
        error
    }

    pub(crate) fn read(&mut self, offset: u64, len: u32) -> Vec<u8> {
        assert_eq!(self.ask(READ, 0, offset, len, &[]), 0);
        let mut data = vec![0; len as usize];
        self.stream.read_exact(&mut data).unwrap();
        data
    }

    /// The server has closed the connection: nothing but the end follows.
    pub(crate) fn assert_closed(mut self) {
        let mut rest = Vec::new();
        // Reset instead of end: the server closed with some of our bytes unread.
        let _ = self.stream.read_to_end(&mut rest);
        assert!(rest.is_empty(), "answered before the end: {rest:?}");
    }
}

pub(crate) fn request(command: u16, flags: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

pub(crate) fn go_data(name: &str) -> Vec<u8> {
    let mut data = u32::try_from(name.len()).unwrap().to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend(1_u16.to_be_bytes());
    data.extend(3_u16.to_be_bytes());
    data
}
