//! The XenStore wire format (xs_wire.h): a 16-byte header of four little-endian words and a payload.
//! No I/O here: bytes in, packets out, at any chunking, holding at most one packet.

/// Size of `struct xsd_sockmsg`.
pub const HEADER_BYTES: usize = 16;
/// XENSTORE_PAYLOAD_MAX: the longest payload a request may have.
pub const MAX_REQUEST: usize = 4096;
/// The longest reply accepted. oxenstored answers DIRECTORY in one message far above
/// XENSTORE_PAYLOAD_MAX; this bound only keeps a broken server from filling memory.
pub const MAX_REPLY: usize = 1 << 20;
/// XENSTORE_ABS_PATH_MAX.
pub const MAX_ABSOLUTE_PATH: usize = 3072;
/// XENSTORE_REL_PATH_MAX.
pub const MAX_RELATIVE_PATH: usize = 2048;

/// `enum xsd_sockmsg_type`. A newtype, so that an unknown number is data and not an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Op(pub u32);

#[expect(missing_docs, reason = "the names are those of xs_wire.h")]
impl Op {
    pub const DIRECTORY: Self = Self(1);
    pub const READ: Self = Self(2);
    pub const GET_PERMS: Self = Self(3);
    pub const WATCH: Self = Self(4);
    pub const UNWATCH: Self = Self(5);
    pub const TRANSACTION_START: Self = Self(6);
    pub const TRANSACTION_END: Self = Self(7);
    pub const INTRODUCE: Self = Self(8);
    pub const RELEASE: Self = Self(9);
    pub const GET_DOMAIN_PATH: Self = Self(10);
    pub const WRITE: Self = Self(11);
    pub const MKDIR: Self = Self(12);
    pub const RM: Self = Self(13);
    pub const SET_PERMS: Self = Self(14);
    pub const WATCH_EVENT: Self = Self(15);
    pub const ERROR: Self = Self(16);
    pub const IS_DOMAIN_INTRODUCED: Self = Self(17);
    pub const RESET_WATCHES: Self = Self(21);
    pub const DIRECTORY_PART: Self = Self(22);
}

/// One message, either direction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    /// What it is.
    pub op: Op,
    /// Chosen by the client, echoed in the reply; 0 in events.
    pub request: u32,
    /// Transaction, 0 for none.
    pub transaction: u32,
    /// Operation-specific bytes.
    pub payload: Vec<u8>,
}

impl Packet {
    /// Appends header and payload to `out`; a payload beyond [`MAX_REPLY`] is refused.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), Malformed> {
        let length = u32::try_from(self.payload.len()).unwrap_or(u32::MAX);
        if self.payload.len() > MAX_REPLY {
            return Err(Malformed {
                length,
                limit: MAX_REPLY,
            });
        }
        for word in [self.op.0, self.request, self.transaction, length] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.extend_from_slice(&self.payload);
        Ok(())
    }
}

/// A header promised more payload than the receiver accepts: the stream cannot be followed further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("packet of {length} bytes, at most {limit} are accepted")]
pub struct Malformed {
    /// What the header says.
    pub length: u32,
    /// What this side accepts.
    pub limit: usize,
}

/// Cuts a byte stream into packets. Memory grows with the bytes received, never with what a header
/// claims, and holds at most one packet.
#[derive(Debug)]
pub struct Parser {
    limit: usize,
    header: Vec<u8>,
    payload: Vec<u8>,
}

impl Parser {
    /// A parser that refuses payloads above `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            header: Vec::with_capacity(HEADER_BYTES),
            payload: Vec::new(),
        }
    }

    /// Takes bytes from the front of `input` until one packet is complete (`Some`, call again) or the
    /// input is used up (`None`). After an error the stream is lost.
    pub fn advance(&mut self, input: &mut &[u8]) -> Result<Option<Packet>, Malformed> {
        take(&mut self.header, HEADER_BYTES, input);
        let Some((op, request, transaction, length)) = words(&self.header) else {
            return Ok(None);
        };
        let wanted = usize::try_from(length).unwrap_or(usize::MAX);
        if wanted > self.limit {
            return Err(Malformed {
                length,
                limit: self.limit,
            });
        }
        take(&mut self.payload, wanted, input);
        if self.payload.len() < wanted {
            return Ok(None);
        }
        self.header.clear();
        let payload = std::mem::take(&mut self.payload);
        Ok(Some(Packet {
            op: Op(op),
            request,
            transaction,
            payload,
        }))
    }
}

/// Moves bytes from `input` to `buffer` until the buffer holds `wanted`.
fn take(buffer: &mut Vec<u8>, wanted: usize, input: &mut &[u8]) {
    let missing = wanted.saturating_sub(buffer.len()).min(input.len());
    if let Some((head, tail)) = input.split_at_checked(missing) {
        buffer.extend_from_slice(head);
        *input = tail;
    }
}

/// The header's four words, once all 16 bytes are there.
fn words(header: &[u8]) -> Option<(u32, u32, u32, u32)> {
    let word = |at: usize| {
        let bytes = header.get(at..)?.first_chunk::<4>()?;
        Some(u32::from_le_bytes(*bytes))
    };
    Some((word(0)?, word(4)?, word(8)?, word(12)?))
}
