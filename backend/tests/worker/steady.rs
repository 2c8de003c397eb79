//! What a worker does without once it has seen its guests' pages: every call that changes its address
//! space, which would take a lock that all rings of the worker share, and on Xen flush other CPUs. The
//! kernel counts: one such call, and the worker is dead.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

use crate::persistent::{Keeper, terms};
use crate::world::World;

/// Where a watched worker's process finds its test.
pub(crate) const SOCKET: &str = "XENBLKD_TEST_STEADY";

/// In the worker's process: waits, beside the worker, to be told when the calls end.
pub(crate) fn watch() {
    let Some(socket) = std::env::var_os(SOCKET) else {
        return;
    };
    std::thread::spawn(move || {
        let mut test = UnixStream::connect(socket).unwrap();
        test.read_exact(&mut [0]).unwrap();
        let calls = [
            libc::SYS_mmap,
            libc::SYS_munmap,
            libc::SYS_mprotect,
            libc::SYS_mremap,
            libc::SYS_madvise,
            libc::SYS_brk,
        ];
        let rules: BTreeMap<_, _> = calls.map(|call| (call, Vec::new())).into();
        let (others, these) = (SeccompAction::Allow, SeccompAction::KillProcess);
        let machine = std::env::consts::ARCH.try_into().unwrap();
        let filter = SeccompFilter::new(rules, others, these, machine).unwrap();
        let program: BpfProgram = filter.try_into().unwrap();
        seccompiler::apply_filter_all_threads(&program).unwrap();
        test.write_all(&[1]).unwrap();
        // Until the test is over: a thread that ends gives its stack back.
        let _ = test.read(&mut [0]);
    });
}

#[test]
fn a_persistent_frontend_costs_no_mapping_and_no_memory_once_its_pages_are_known() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("steady");
    let listener = UnixListener::bind(&socket).unwrap();
    let mut world = World::watched_at(&socket);
    let (mut worker, _) = listener.accept().unwrap();
    let mut keeper = Keeper::new(&world, &terms(1056));
    for _ in 0..20 {
        keeper.round();
    }
    worker.write_all(&[1]).unwrap();
    worker.read_exact(&mut [0]).unwrap();
    for _ in 0..100 {
        keeper.round();
    }
    drop(keeper);
    // It can't end by itself any more.
    world.kill();
    world.join().unwrap_err();
}
