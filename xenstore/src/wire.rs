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
    /// Bytes of the packet at the front of `bytes`; all of them if its header is not complete.
    pub(crate) fn length(bytes: &[u8]) -> usize {
        let length = words(bytes).and_then(|(.., length)| usize::try_from(length).ok());
        length.map_or(bytes.len(), |length| length.saturating_add(HEADER_BYTES))
    }

    /// The request number of the packet at the front of `bytes`.
    pub(crate) fn request_of(bytes: &[u8]) -> Option<u32> {
        words(bytes).map(|(_, request, ..)| request)
    }

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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(parser: &mut Parser, mut input: &[u8]) -> Vec<Packet> {
        let mut packets = Vec::new();
        while let Some(packet) = parser.advance(&mut input).unwrap() {
            packets.push(packet);
        }
        assert!(input.is_empty());
        packets
    }

    fn packets() -> Vec<Packet> {
        let packet = |op, payload: &[u8]| Packet {
            op,
            request: 0x0403_0201,
            transaction: 7,
            payload: payload.to_vec(),
        };
        vec![
            packet(Op::READ, b"/a\0"),
            packet(Op::WRITE, b""),
            packet(Op::ERROR, b"ENOENT\0"),
        ]
    }

    #[test]
    fn header_is_four_little_endian_words() {
        let mut bytes = Vec::new();
        packets()[0].encode(&mut bytes).unwrap();
        assert_eq!(bytes, b"\x02\0\0\0\x01\x02\x03\x04\x07\0\0\0\x03\0\0\0/a\0");
    }

    #[test]
    fn every_split_in_three_gives_the_same_packets() {
        let mut bytes = Vec::new();
        for packet in packets() {
            packet.encode(&mut bytes).unwrap();
        }
        for first in 0..=bytes.len() {
            for second in first..=bytes.len() {
                let mut parser = Parser::new(MAX_REQUEST);
                let mut seen = Vec::new();
                for part in [&bytes[..first], &bytes[first..second], &bytes[second..]] {
                    seen.extend(all(&mut parser, part));
                }
                assert_eq!(seen, packets(), "split at {first} and {second}");
            }
        }
    }

    #[test]
    fn a_length_above_the_limit_is_refused_before_any_payload() {
        for (length, fits) in [
            (4096, true),
            (4097, false),
            (u32::MAX, false),
            (1 << 31, false),
        ] {
            let mut header = vec![0; 12];
            header.extend_from_slice(&u32::to_le_bytes(length));
            let result = Parser::new(MAX_REQUEST).advance(&mut header.as_slice());
            assert_eq!(result.is_ok(), fits, "{length}");
        }
    }

    #[test]
    fn memory_follows_the_bytes_not_the_claim() {
        let mut header = vec![0; 12];
        header.extend_from_slice(&(1_u32 << 20).to_le_bytes());
        let mut parser = Parser::new(MAX_REPLY);
        assert_eq!(parser.advance(&mut header.as_slice()), Ok(None));
        assert_eq!(parser.advance(&mut [1, 2, 3].as_slice()), Ok(None));
        assert!(parser.payload.capacity() < 4096);
    }

    proptest! {
        #[test]
        fn any_packets_survive_any_chunking(
            packets in prop::collection::vec(
                (any::<u32>(), any::<u32>(), any::<u32>(), prop::collection::vec(any::<u8>(), 0..200)),
                0..8,
            ),
            chunk in 1_usize..64,
        ) {
            let packets: Vec<_> = packets
                .into_iter()
                .map(|(op, request, transaction, payload)| {
                    Packet { op: Op(op), request, transaction, payload }
                })
                .collect();
            let mut bytes = Vec::new();
            for packet in &packets {
                packet.encode(&mut bytes).unwrap();
            }
            let mut parser = Parser::new(MAX_REQUEST);
            let seen: Vec<_> = bytes.chunks(chunk).flat_map(|part| all(&mut parser, part)).collect();
            prop_assert_eq!(seen, packets);
        }

        #[test]
        fn garbage_never_panics_and_stays_bounded(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            let mut parser = Parser::new(100);
            let mut input = bytes.as_slice();
            while let Ok(Some(packet)) = parser.advance(&mut input) {
                prop_assert!(packet.payload.len() <= 100);
            }
        }
    }
}
