//! Which backend directories are ours, and who else may think so.

use std::path::PathBuf;

use xenblk_xenstore::vbd::Kind;

/// Where the kernel lists a backend of its own for the kind `vbd`: there while xen-blkback is loaded.
pub(super) const BLKBACK: &str = "/sys/bus/xen-backend/drivers/vbd";

/// The directories this supervisor serves.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) kind: Kind,
    blkback: Option<PathBuf>,
}

impl Claim {
    /// `blkback` exists while the kernel serves the same directories.
    pub(super) fn new(kind: Kind, blkback: Option<PathBuf>) -> Self {
        // The kernel has none for other kinds.
        let blkback = blkback.filter(|_| kind == Kind::Vbd);
        Self { kind, blkback }
    }

    /// One line with the remedy if somebody else answers these directories too. Looked at for every disk:
    /// a module can be loaded at any time.
    pub(super) fn rival(&self) -> Option<String> {
        let path = self.blkback.as_ref().filter(|path| path.exists())?;
        Some(format!(
            "the kernel's xen-blkback serves this disk ({} exists); shut down the guests it serves and rmmod \
             xen-blkback, or if it is built in, boot with initcall_blacklist=xen_blkif_init",
            path.display()
        ))
    }
}
