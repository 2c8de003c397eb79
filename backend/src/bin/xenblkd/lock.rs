//! One daemon per host: a lock held for the process' life, which says who holds it.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, bail};
use rustix::fs::FlockOperation;
use rustix::io::Errno;

/// Held until dropped, or until the process ends in any way. Not inherited by workers: the descriptor
/// is close-on-exec.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Makes `folder` (0700) if it isn't there, and takes the lock in it.
    pub(crate) fn take(folder: &Path) -> anyhow::Result<Self> {
        let made = DirBuilder::new().mode(0o700).create(folder);
        match made {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(error).with_context(|| format!("cannot make {}", folder.display()));
            }
            _ => {}
        }
        let path = folder.join("lock");
        let shown = path.display();
        let mut options = OpenOptions::new();
        options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600);
        let mut file = options
            .open(&path)
            .with_context(|| format!("cannot open {shown}"))?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => bail!(
                "another xenblkd ({}) already serves this host: it holds {shown}; stop that one first \
                 (systemctl stop xenblkd)",
                owner(&mut file)
            ),
            Err(error) => return Err(error).with_context(|| format!("cannot lock {shown}")),
        }
        let write = |file: &mut File| {
            file.set_len(0)?;
            file.rewind()?;
            writeln!(file, "{}", std::process::id())
        };
        write(&mut file).with_context(|| format!("cannot write {shown}"))?;
        Ok(Self { _file: file })
    }
}

/// Who wrote the file: the holder, unless it has only just taken the lock.
fn owner(file: &mut File) -> String {
    let mut text = String::new();
    let read = file.take(16).read_to_string(&mut text);
    match text.trim().parse::<u32>() {
        Ok(pid) if read.is_ok() => format!("pid {pid}"),
        _ => "just starting".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_is_told_who_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let first = Lock::take(&state).unwrap();
        let refused = Lock::take(&state).unwrap_err().to_string();
        let expected = format!(
            "another xenblkd (pid {}) already serves this host",
            std::process::id()
        );
        assert!(refused.starts_with(&expected), "{refused}");
        drop(first);
        Lock::take(&state).unwrap();
    }

    #[test]
    fn what_is_in_the_way_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("missing/state");
        let refused = format!("{:#}", Lock::take(&state).unwrap_err());
        assert!(
            refused.starts_with(&format!("cannot make {}: ", state.display())),
            "{refused}"
        );
    }
}
