//! Shared pages: both holders see the same words, and nobody can pull them away.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use xenblk_grants::{Access, SharedPages};

fn words(pages: &SharedPages) -> &[AtomicU64] {
    pages.as_ref()
}

#[test]
fn both_holders_see_the_same_words() {
    let (here, fd) = SharedPages::create("test-journal", 8192).unwrap();
    let there = SharedPages::map(&fd, 8192, Access::ReadWrite).unwrap();
    let reader = SharedPages::map(&fd, 8192, Access::ReadOnly).unwrap();
    assert_eq!((words(&here).len(), here.len()), (1024, 8192));
    words(&here)[1023].store(7, Ordering::Relaxed);
    assert_eq!(words(&there)[1023].load(Ordering::Relaxed), 7);
    assert_eq!((reader.load(1023), reader.load(1024)), (Some(7), None));
    assert!(words(&reader).is_empty(), "a store would kill the process");
}

#[test]
fn the_size_cannot_change() {
    let (_, fd) = SharedPages::create("test-journal", 8192).unwrap();
    assert!(rustix::fs::ftruncate(&fd, 4096).is_err());
    assert!(rustix::fs::ftruncate(&fd, 16384).is_err());
    assert!(
        SharedPages::map(&fd, 8193, Access::ReadOnly).is_err(),
        "longer than it is"
    );
}

#[test]
fn a_descriptor_that_could_shrink_is_refused() {
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let unsealed: OwnedFd = rustix::fs::memfd_create("test-unsealed", flags).unwrap();
    rustix::fs::ftruncate(&unsealed, 8192).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(8192).unwrap();
    for fd in [unsealed.as_fd(), file.as_fd()] {
        assert!(SharedPages::map(fd, 4096, Access::ReadWrite).is_err());
    }
}
