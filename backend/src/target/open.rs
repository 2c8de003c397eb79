//! Opening a target on the supervisor's side: its kind and size are checked here, and each worker
//! incarnation gets an open file description of its own, because the fence of a dead worker is the
//! lock that its description holds. Never creates, truncates or waits for anything.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, SeekFrom, StatxFlags};

use super::spec::Kind;
use super::{
    Capabilities, Geometry, SECTOR, TargetError, TargetSpec, WorkerTarget, WorkerTargetKind,
    device, script,
};
use crate::syscalls;

/// How a target is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenMode {
    /// Open read-only and refuse every operation that modifies.
    pub readonly: bool,
}

/// A target that was found good. Holds a descriptor for geometry and fences, never for I/O.
#[derive(Debug)]
pub struct OpenedTarget {
    name: String,
    base: Base,
    worker: WorkerTarget,
    capabilities: Capabilities,
}

#[derive(Debug)]
enum Base {
    Nothing,
    /// `direct`: the file takes O_DIRECT in units of 512 bytes.
    File {
        file: OwnedFd,
        direct: bool,
    },
    /// The file is what the test behind `socket` sent.
    Script {
        file: OwnedFd,
        socket: std::path::PathBuf,
    },
}

/// Opens what `spec` names and learns its geometry. Blocks for as long as the file system does.
pub fn open(spec: &TargetSpec, mode: OpenMode) -> Result<OpenedTarget, TargetError> {
    let name = spec.to_string();
    let (base, kind, geometry, discard_unit, mut capabilities) = match &spec.kind {
        Kind::Raw(path) => {
            let found = open_raw(path, mode)?;
            let base = Base::File {
                file: found.file,
                direct: found.direct,
            };
            (
                base,
                WorkerTargetKind::File,
                found.geometry,
                found.discard_unit,
                found.capabilities,
            )
        }
        Kind::Null(size) => {
            let capabilities = capabilities(512);
            (
                Base::Nothing,
                WorkerTargetKind::Null,
                sectors_of_512(*size),
                512,
                capabilities,
            )
        }
        Kind::Memory(size) => {
            let file = memory(&name, *size)?;
            let base = Base::File {
                file,
                direct: false,
            };
            (
                base,
                WorkerTargetKind::File,
                sectors_of_512(*size),
                512,
                capabilities(4096),
            )
        }
        Kind::Script(socket) => {
            let (_, file) = script::connect(socket)?;
            let size = size_of(&file, &name)?;
            let base = Base::Script {
                file,
                socket: socket.clone(),
            };
            (
                base,
                WorkerTargetKind::Script,
                sectors_of_512(size),
                512,
                capabilities(4096),
            )
        }
    };
    capabilities.readonly = mode.readonly;
    let worker = WorkerTarget {
        geometry,
        discard_unit,
        kind,
    };
    Ok(OpenedTarget {
        name,
        base,
        worker,
        capabilities,
    })
}

impl OpenedTarget {
    /// Size and units.
    pub fn geometry(&self) -> Geometry {
        self.worker.geometry
    }

    /// What the guest may be told.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// What one ring of one worker incarnation gets: parameters and descriptors for
    /// [`Attach`](crate::message::Attach), each a new open file description of the very file that was
    /// opened, whatever its path leads to by now.
    pub fn incarnation(&self) -> io::Result<(WorkerTarget, Vec<OwnedFd>)> {
        let fds = match &self.base {
            Base::Nothing => vec![],
            Base::File { file, direct } => {
                let direct = if *direct {
                    OFlags::DIRECT
                } else {
                    OFlags::empty()
                };
                vec![reopen(file, self.access() | direct)?]
            }
            Base::Script { socket, file } => {
                let (connection, _) = script::connect(socket).map_err(io::Error::other)?;
                vec![connection, reopen(file, self.access())?]
            }
        };
        Ok((self.worker.clone(), fds))
    }

    /// Whether no I/O of the process with this fence can still reach the target: it is gone, and so is
    /// every request it had under way. Poll this before its pages are reused or `Closed` is written.
    pub fn fence_free(&self, fence: u64) -> io::Result<bool> {
        self.fences_free(fence..fence + 1)
    }

    /// The same of all processes whose fences have one of these numbers, at least one.
    pub fn fences_free(&self, fences: Range<u64>) -> io::Result<bool> {
        match &self.base {
            Base::Nothing => Ok(true),
            Base::File { file, .. } | Base::Script { file, .. } => {
                syscalls::ofd_unlocked(file.as_fd(), FENCE + fences.start..FENCE + fences.end)
            }
        }
    }

    /// Major and minor number of the block device that was opened, if it is one.
    pub fn block_device(&self) -> io::Result<Option<(u32, u32)>> {
        let (Base::File { file, .. } | Base::Script { file, .. }) = &self.base else {
            return Ok(None);
        };
        let stat = rustix::fs::fstat(file)?;
        let block = device::is_block_device(&stat);
        let (major, minor) = (
            rustix::fs::major(stat.st_rdev),
            rustix::fs::minor(stat.st_rdev),
        );
        Ok(block.then_some((major, minor)))
    }

    fn access(&self) -> OFlags {
        if self.capabilities.readonly {
            OFlags::RDONLY
        } else {
            OFlags::RDWR
        }
    }
}

impl std::fmt::Display for OpenedTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

/// First byte of the fences: far beyond any data, so that no other program's range lock meets them.
const FENCE: u64 = 1 << 40;
/// Fences are numbered from 0 to this, excluded.
pub const FENCES: u64 = 1 << 40;

/// Takes the fence numbered `fence`: an open-file-description read lock (a read lock works on read-only
/// descriptors) that lasts until the last request using this description has ended.
pub(crate) fn take_fence(file: BorrowedFd<'_>, fence: u64) -> io::Result<()> {
    syscalls::ofd_read_lock(file, FENCE + fence)
}

struct Raw {
    file: OwnedFd,
    direct: bool,
    geometry: Geometry,
    discard_unit: u32,
    capabilities: Capabilities,
}

fn open_raw(path: &Path, mode: OpenMode) -> Result<Raw, TargetError> {
    let value = path.display().to_string();
    let at = |doing| {
        let value = value.clone();
        move |e: rustix::io::Errno| TargetError::Io {
            value,
            doing,
            source: e.into(),
        }
    };
    // O_PATH first: it opens nothing, so a FIFO can't block and a device isn't touched before its
    // type is known.
    let place = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .map_err(at("find it"))?;
    let stat = rustix::fs::fstat(&place).map_err(at("stat it"))?;
    let found = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile | FileType::BlockDevice => None,
        FileType::Directory => Some("directory"),
        FileType::Fifo => Some("FIFO"),
        FileType::Socket => Some("socket"),
        FileType::CharacterDevice => Some("character device"),
        _ => Some("thing of another kind"),
    };
    if let Some(found) = found {
        return Err(TargetError::Kind { value, found });
    }
    let (access, doing) = if mode.readonly {
        (OFlags::RDONLY, "open it for reading")
    } else {
        (OFlags::RDWR, "open it for reading and writing")
    };
    let file = reopen(&place, access).map_err(|source| TargetError::Io {
        value: value.clone(),
        doing,
        source,
    })?;
    let size = size_of(&file, &value)?;
    let direct = takes_direct(&file, size);
    let mut raw = Raw {
        direct,
        file,
        geometry: sectors_of_512(size),
        discard_unit: 512,
        capabilities: capabilities(u32::try_from(stat.st_blksize).unwrap_or(4096).max(512)),
    };
    if device::is_block_device(&stat) {
        let limits = device::limits(&raw.file, &stat).map_err(|source| TargetError::Io {
            value,
            doing: "read its sector size",
            source,
        })?;
        raw.geometry.physical_sector_size = limits.physical_sector;
        raw.discard_unit = limits.logical_sector;
        raw.capabilities = Capabilities {
            discard: limits.discard,
            secure_discard: limits.secure_discard,
            discard_alignment: limits.discard_alignment,
            ..capabilities(limits.discard_granularity)
        };
    }
    Ok(raw)
}

/// The capacity of a file or block device; only whole sectors make a disk.
fn size_of(file: &OwnedFd, value: &str) -> Result<u64, TargetError> {
    let size = rustix::fs::seek(file, SeekFrom::End(0)).map_err(|e| TargetError::Io {
        value: value.into(),
        doing: "measure it",
        source: e.into(),
    })?;
    if size < SECTOR || !size.is_multiple_of(SECTOR) {
        return Err(TargetError::Size {
            value: value.into(),
            size,
        });
    }
    Ok(size)
}

/// Whether O_DIRECT works in units of 512 bytes on page-aligned memory: what statx says where it says
/// anything (a file system may need more for writes than for reads), and one read as the proof.
fn takes_direct(file: &OwnedFd, size: u64) -> bool {
    let flags = rustix::fs::AtFlags::EMPTY_PATH;
    if let Ok(stat) = rustix::fs::statx(file, "", flags, StatxFlags::DIOALIGN)
        && StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::DIOALIGN)
        && !(1..=512).contains(&stat.stx_dio_offset_align)
    {
        return false;
    }
    let Ok(direct) = reopen(file, OFlags::RDONLY | OFlags::DIRECT) else {
        return false;
    };
    let mut memory = vec![0u8; 2 * 4096];
    let start = memory.as_ptr().align_offset(4096);
    let Some(page) = memory.get_mut(start..start + 512) else {
        return false;
    };
    rustix::io::pread(&direct, page, size - SECTOR).is_ok_and(|n| n == 512)
}

/// A new open file description of the same inode, however its name changed.
fn reopen(file: &OwnedFd, access: OFlags) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::open(
        path,
        access | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

fn memory(name: &str, size: u64) -> Result<OwnedFd, TargetError> {
    let fail = |doing| {
        move |e: rustix::io::Errno| TargetError::Io {
            value: name.into(),
            doing,
            source: e.into(),
        }
    };
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let file = rustix::fs::memfd_create("xenblkd-disk", flags).map_err(fail("allocate it"))?;
    rustix::fs::ftruncate(&file, size).map_err(fail("allocate it"))?;
    Ok(file)
}

fn sectors_of_512(size: u64) -> Geometry {
    Geometry {
        size,
        sector_size: 512,
        physical_sector_size: 512,
    }
}

fn capabilities(discard_granularity: u32) -> Capabilities {
    Capabilities {
        flush: true,
        discard: true,
        discard_granularity,
        discard_alignment: 0,
        secure_discard: false,
        readonly: false,
    }
}
