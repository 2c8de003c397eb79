//! The temporary directory of one host. A simulator that is killed can't remove its own, so the next one
//! does: a directory belongs to the dead if nobody holds the lock on the file in it.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

const PREFIX: &str = "xenblk-";
const LOCK: &str = "lock";

/// A directory for nobody but us, removed when dropped.
#[derive(Debug)]
pub(crate) struct Scratch {
    directory: TempDir,
    /// Locked; closed, and with that unlocked, with the process.
    _lock: File,
}

impl Scratch {
    /// Makes one where temporary files belong, and removes those that dead processes of this user left.
    pub(crate) fn new() -> io::Result<Self> {
        let place = std::env::temp_dir();
        // Whatever can't be removed is no reason not to start.
        let _ = remove_stale(&place);
        Self::within(&place)
    }

    fn within(place: &Path) -> io::Result<Self> {
        let directory = tempfile::Builder::new()
            .prefix(PREFIX)
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(place)?;
        // It is locked before it has the name that others look for.
        let early = directory.path().join("new");
        let lock = File::create_new(&early)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        std::fs::rename(early, directory.path().join(LOCK))?;
        Ok(Self {
            directory,
            _lock: lock,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }
}

fn remove_stale(place: &Path) -> io::Result<()> {
    let us = rustix::process::getuid().as_raw();
    for entry in std::fs::read_dir(place)?.flatten() {
        let named = entry.file_name().to_string_lossy().starts_with(PREFIX);
        // Not through a symlink.
        let Ok(metadata) = entry.metadata() else {
            continue;
        };
        if !named || !metadata.is_dir() || metadata.uid() != us {
            continue;
        }
        let Ok(lock) = File::open(entry.path().join(LOCK)) else {
            continue;
        };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_directories_that_nobody_holds_are_removed() {
        let place = tempfile::tempdir().unwrap();
        let dead = Scratch::within(place.path()).unwrap();
        let left = dead.path().to_owned();
        std::fs::write(left.join("disk.img"), "x").unwrap();
        let Scratch { directory, _lock } = dead;
        let _ = directory.keep();
        drop(_lock);
        let alive = Scratch::within(place.path()).unwrap();
        let foreign = place.path().join("xenblk-clients");
        std::fs::create_dir(&foreign).unwrap();

        remove_stale(place.path()).unwrap();
        assert!(!left.exists());
        assert!(alive.path().exists() && foreign.exists());
    }
}
