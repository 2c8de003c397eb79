//! Numbers and layouts of the NBD protocol (the NBD project's `doc/proto.md`); all integers are
//! big-endian. Nothing here does I/O.

/// "NBDMAGIC", the server's first word.
pub(super) const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT", the server's second word and the head of every option.
pub(super) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub(super) const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(super) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;

/// Handshake flags; the client answers with the same bits.
pub(super) const FIXED_NEWSTYLE: u16 = 1 << 0;
pub(super) const NO_ZEROES: u16 = 1 << 1;

/// Transmission flags.
pub(super) mod flag {
    pub(in crate::nbd) const HAS_FLAGS: u16 = 1 << 0;
    pub(in crate::nbd) const READ_ONLY: u16 = 1 << 1;
    pub(in crate::nbd) const SEND_FLUSH: u16 = 1 << 2;
    pub(in crate::nbd) const SEND_FUA: u16 = 1 << 3;
    pub(in crate::nbd) const SEND_TRIM: u16 = 1 << 5;
    pub(in crate::nbd) const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub(in crate::nbd) const CAN_MULTI_CONN: u16 = 1 << 8;
}

/// Options a client may send; what is not here is answered ERR_UNSUP.
pub(super) mod option {
    pub(in crate::nbd) const EXPORT_NAME: u32 = 1;
    pub(in crate::nbd) const ABORT: u32 = 2;
    pub(in crate::nbd) const LIST: u32 = 3;
    pub(in crate::nbd) const INFO: u32 = 6;
    pub(in crate::nbd) const GO: u32 = 7;
}

/// Types of option replies.
pub(super) mod reply {
    pub(in crate::nbd) const ACK: u32 = 1;
    pub(in crate::nbd) const SERVER: u32 = 2;
    pub(in crate::nbd) const INFO: u32 = 3;
    pub(in crate::nbd) const ERR_UNSUP: u32 = (1 << 31) | 1;
    pub(in crate::nbd) const ERR_INVALID: u32 = (1 << 31) | 3;
    pub(in crate::nbd) const ERR_UNKNOWN: u32 = (1 << 31) | 6;
    pub(in crate::nbd) const ERR_TOO_BIG: u32 = (1 << 31) | 9;
}

/// Types of information in an `INFO` reply.
pub(super) mod info {
    pub(in crate::nbd) const EXPORT: u16 = 0;
    pub(in crate::nbd) const BLOCK_SIZE: u16 = 3;
}

/// Commands of the transmission phase.
pub(super) mod command {
    pub(in crate::nbd) const READ: u16 = 0;
    pub(in crate::nbd) const WRITE: u16 = 1;
    pub(in crate::nbd) const DISC: u16 = 2;
    pub(in crate::nbd) const FLUSH: u16 = 3;
    pub(in crate::nbd) const TRIM: u16 = 4;
    pub(in crate::nbd) const WRITE_ZEROES: u16 = 6;
}

/// Flags of a command.
pub(super) const CMD_FUA: u16 = 1 << 0;
/// Of WRITE_ZEROES: don't make a hole. We never do.
pub(super) const CMD_NO_HOLE: u16 = 1 << 1;

/// Error numbers of a simple reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Errno {
    Perm = 1,
    Io = 5,
    Invalid = 22,
    NoSpace = 28,
    NotSupported = 95,
    Shutdown = 108,
}

/// A request's header, decoded but not judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) flags: u16,
    pub(super) command: u16,
    /// Opaque; echoed in the reply.
    pub(super) cookie: u64,
    pub(super) offset: u64,
    pub(super) len: u32,
}

/// Bytes of a request's header.
pub(super) const REQUEST_BYTES: usize = 28;

impl Request {
    /// `None` if the magic is wrong: the stream is out of step and can't be followed any more.
    pub(super) fn decode(bytes: &[u8; REQUEST_BYTES]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (flags, rest) = rest.split_first_chunk()?;
        let (command, rest) = rest.split_first_chunk()?;
        let (cookie, rest) = rest.split_first_chunk()?;
        let (offset, rest) = rest.split_first_chunk()?;
        let (len, _) = rest.split_first_chunk()?;
        (u32::from_be_bytes(*magic) == REQUEST_MAGIC).then_some(Self {
            flags: u16::from_be_bytes(*flags),
            command: u16::from_be_bytes(*command),
            cookie: u64::from_be_bytes(*cookie),
            offset: u64::from_be_bytes(*offset),
            len: u32::from_be_bytes(*len),
        })
    }
}

/// The head of a simple reply; a successful READ's data follows it.
pub(super) fn simple_reply(cookie: u64, error: Option<Errno>) -> [u8; 16] {
    let mut bytes = [0; 16];
    let (magic, rest) = bytes.split_at_mut(4);
    let (errno, rest) = rest.split_at_mut(4);
    magic.copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    errno.copy_from_slice(&error.map_or(0, |errno| errno as u32).to_be_bytes());
    rest.copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// One option reply, whole.
pub(super) fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(20 + data.len());
    bytes.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    bytes.extend_from_slice(&option.to_be_bytes());
    bytes.extend_from_slice(&kind.to_be_bytes());
    bytes.extend_from_slice(&len.to_be_bytes());
    bytes.extend_from_slice(data);
    bytes
}

/// Data of INFO and GO: the export's name and the wanted kinds of information, which are ignored
/// because every kind we have is always sent. `None` if the lengths don't fit together.
pub(super) fn decode_go(data: &[u8]) -> Option<&[u8]> {
    let (len, rest) = data.split_first_chunk()?;
    let (name, rest) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(*len)).ok()?)?;
    let (count, wanted) = rest.split_first_chunk()?;
    (wanted.len() == 2 * usize::from(u16::from_be_bytes(*count))).then_some(name)
}
