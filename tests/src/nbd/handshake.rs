//! Fixed newstyle negotiation, up to the moment where requests may be sent.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use super::wire::{self, info, option, reply};
use super::{Export, MAX_PAYLOAD, transmission_flags};
use crate::disk::DiskInfo;

/// Options a client may send before it chooses an export; real ones need fewer than ten.
const MAX_OPTIONS: usize = 64;
/// Longest option data that is looked at; an export name is at most 4096 bytes.
const MAX_OPTION_BYTES: usize = 8192;
/// Longest option data that is skipped and answered ERR_TOO_BIG; above it the client is cut off.
const MAX_SKIPPED_BYTES: usize = 1 << 20;
/// Preferred unit where the disk names a smaller one: a page.
const PREFERRED_BLOCK: u32 = 4096;

/// Talks to the client until it has chosen an export (`Some`) or said goodbye (`None`).
///
/// # Errors
/// The client broke the protocol, went silent or went away; close the connection.
pub(super) fn negotiate<'a>(
    mut stream: &UnixStream,
    exports: &'a [Export],
) -> io::Result<Option<&'a Export>> {
    let mut greeting = Vec::with_capacity(18);
    greeting.extend_from_slice(&wire::INIT_MAGIC.to_be_bytes());
    greeting.extend_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
    greeting.extend_from_slice(&(wire::FIXED_NEWSTYLE | wire::NO_ZEROES).to_be_bytes());
    stream.write_all(&greeting)?;
    let client = read_u32(stream)?;
    if client & !u32::from(wire::FIXED_NEWSTYLE | wire::NO_ZEROES) != 0 {
        return Err(protocol("unknown client flags"));
    }
    for _ in 0..MAX_OPTIONS {
        let Some((code, data)) = read_option(stream)? else {
            continue;
        };
        let answer = match code {
            option::EXPORT_NAME => {
                let export = find(exports, &data).ok_or_else(|| protocol("unknown export"))?;
                let padded = client & u32::from(wire::NO_ZEROES) == 0;
                stream.write_all(&export_name_reply(&export.disk.info(), padded))?;
                return Ok(Some(export));
            }
            option::ABORT => {
                stream.write_all(&wire::option_reply(code, reply::ACK, &[]))?;
                return Ok(None);
            }
            option::LIST => list(exports, &data),
            option::INFO | option::GO => match describe(code, exports, &data) {
                Ok((export, bytes)) => {
                    stream.write_all(&bytes)?;
                    if code == option::GO {
                        return Ok(Some(export));
                    }
                    continue;
                }
                Err(refusal) => refusal,
            },
            _ => refusal(code, reply::ERR_UNSUP, "not offered by this server"),
        };
        stream.write_all(&answer)?;
    }
    Err(protocol("too many options"))
}

/// One option's code and data. `None` if it was too long to look at, which has been answered.
fn read_option(mut stream: &UnixStream) -> io::Result<Option<(u32, Vec<u8>)>> {
    let mut magic = [0; 8];
    stream.read_exact(&mut magic)?;
    if u64::from_be_bytes(magic) != wire::OPTION_MAGIC {
        return Err(protocol("option without its magic"));
    }
    let code = read_u32(stream)?;
    let len = usize::try_from(read_u32(stream)?).unwrap_or(usize::MAX);
    if len > MAX_SKIPPED_BYTES {
        return Err(protocol("option data too long"));
    }
    if len > MAX_OPTION_BYTES {
        skip(stream, len as u64)?;
        stream.write_all(&refusal(
            code,
            reply::ERR_TOO_BIG,
            "option data above 8192 bytes",
        ))?;
        return Ok(None);
    }
    let mut data = vec![0; len];
    stream.read_exact(&mut data)?;
    Ok(Some((code, data)))
}

/// Reads and forgets `len` bytes.
pub(super) fn skip(stream: impl Read, len: u64) -> io::Result<()> {
    if io::copy(&mut stream.take(len), &mut io::sink())? == len {
        Ok(())
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

fn find<'a>(exports: &'a [Export], name: &[u8]) -> Option<&'a Export> {
    if name.is_empty() {
        return exports.first();
    }
    exports.iter().find(|export| export.name.as_bytes() == name)
}

/// EXPORT_NAME has no reply header: size and flags, and for old clients 124 zeroes.
fn export_name_reply(disk: &DiskInfo, padded: bool) -> Vec<u8> {
    let mut bytes = disk.size.to_be_bytes().to_vec();
    bytes.extend_from_slice(&transmission_flags(disk).to_be_bytes());
    if padded {
        bytes.extend_from_slice(&[0; 124]);
    }
    bytes
}

fn list(exports: &[Export], data: &[u8]) -> Vec<u8> {
    if !data.is_empty() {
        return refusal(option::LIST, reply::ERR_INVALID, "LIST carries no data");
    }
    let mut bytes = Vec::new();
    for export in exports {
        let len = u32::try_from(export.name.len()).unwrap_or(0);
        let mut entry = len.to_be_bytes().to_vec();
        entry.extend_from_slice(export.name.as_bytes());
        bytes.extend(wire::option_reply(option::LIST, reply::SERVER, &entry));
    }
    bytes.extend(wire::option_reply(option::LIST, reply::ACK, &[]));
    bytes
}

/// The replies to INFO and GO: size and flags, block sizes, acknowledgement; or the refusal.
fn describe<'a>(
    code: u32,
    exports: &'a [Export],
    data: &[u8],
) -> Result<(&'a Export, Vec<u8>), Vec<u8>> {
    let name = wire::decode_go(data).ok_or_else(|| {
        refusal(
            code,
            reply::ERR_INVALID,
            "lengths in the option don't add up",
        )
    })?;
    let export = find(exports, name)
        .ok_or_else(|| refusal(code, reply::ERR_UNKNOWN, "no export of this name; try LIST"))?;
    let disk = export.disk.info();
    let mut size = info::EXPORT.to_be_bytes().to_vec();
    size.extend_from_slice(&disk.size.to_be_bytes());
    size.extend_from_slice(&transmission_flags(&disk).to_be_bytes());
    let mut blocks = info::BLOCK_SIZE.to_be_bytes().to_vec();
    for bytes in [
        disk.sector_size,
        disk.physical_sector_size.max(PREFERRED_BLOCK),
        MAX_PAYLOAD,
    ] {
        blocks.extend_from_slice(&bytes.to_be_bytes());
    }
    let mut bytes = wire::option_reply(code, reply::INFO, &size);
    bytes.extend(wire::option_reply(code, reply::INFO, &blocks));
    bytes.extend(wire::option_reply(code, reply::ACK, &[]));
    Ok((export, bytes))
}

fn refusal(code: u32, kind: u32, text: &str) -> Vec<u8> {
    wire::option_reply(code, kind, text.as_bytes())
}

fn read_u32(mut stream: &UnixStream) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_be_bytes(bytes))
}

fn protocol(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
