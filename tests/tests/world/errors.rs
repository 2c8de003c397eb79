//! A target that fails: the guest sees ERROR for that request and goes on.

use xenblkd::target::script::OpKind;
use xenblkd::target::script::disk::ScriptedDisk;

use super::*;

const ENOSPC: i32 = 28;
const EIO: i32 = 5;

/// Answers every operation on a thread: `fate` names an errno, or none to let it go.
fn answer(disk: ScriptedDisk, fate: impl Fn(OpKind, u64) -> Option<i32> + Send + 'static) {
    std::thread::spawn(move || {
        while let Some(op) = disk.next(PATIENCE) {
            // A ring that is gone needs no answer.
            let _ = match fate(op.ask.op, op.ask.offset) {
                Some(errno) => op.fail(errno),
                None => op.go(),
            };
        }
    });
}

#[test]
fn a_full_disk_and_a_bad_sector_fail_their_requests_only() {
    let mut world = world();
    let socket = world.directory().join("script");
    let scripted = ScriptedDisk::listen(&socket, MIB).unwrap();
    answer(scripted, |op, offset| match (op, offset) {
        (OpKind::Write, 8192) => Some(ENOSPC),
        (OpKind::Read, 65536) => Some(EIO),
        _ => None,
    });
    let guest = world.guest(linux(2, 0), 1).unwrap();
    let spec = spec(format!("script:{}", socket.display()));
    let (attached, disk) = world.attach(&guest, 0, &spec).unwrap();
    assert_eq!(write(&disk, 0, 4096, vec![1; 4096]), Ok(()));
    assert_eq!(write(&disk, 0, 8192, vec![2; 4096]), Err(IoError::Error));
    assert_eq!(read(&disk, 1, 65536, 512), Err(IoError::Error));
    assert_eq!(write(&disk, 1, 12288, vec![3; 4096]), Ok(()));
    let mut expected = vec![1; 4096];
    expected.extend([0; 4096]);
    expected.extend([3; 4096]);
    assert_eq!(read(&disk, 0, 4096, 12288).unwrap(), expected);
    world.detach(attached).unwrap();
}

#[test]
fn after_a_failed_flush_nothing_more_is_written() {
    let mut world = world();
    let socket = world.directory().join("script");
    let scripted = ScriptedDisk::listen(&socket, MIB).unwrap();
    answer(scripted, |op, _| (op == OpKind::Flush).then_some(EIO));
    let guest = world.guest(linux(2, 0), 1).unwrap();
    let spec = spec(format!("script:{}", socket.display()));
    let (_attached, disk) = world.attach(&guest, 0, &spec).unwrap();
    assert_eq!(write(&disk, 0, 0, vec![1; 512]), Ok(()));
    assert_eq!(
        flush(&disk),
        Ok(()),
        "Linux reports a failed empty flush as done"
    );
    assert_eq!(write(&disk, 0, 512, vec![2; 512]), Err(IoError::Error));
    assert_eq!(read(&disk, 1, 0, 512).unwrap(), vec![1; 512], "reads go on");
}

#[test]
fn an_image_that_cannot_be_served_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = world();
    let guest = world.guest(linux(1, 0), 1).unwrap();
    let missing = folder.path().join("missing.img");
    let error = world
        .attach(&guest, 0, &raw(&missing))
        .unwrap_err()
        .to_string();
    assert!(error.contains("missing.img"), "{error}");
    assert!(!error.contains('\n'), "{error}");
    assert!(!missing.exists());
    // The place is free again.
    let path = image(folder.path(), "disk.img", MIB);
    let (attached, disk) = world.attach(&guest, 0, &raw(&path)).unwrap();
    assert_eq!(write(&disk, 0, 0, vec![1; 512]), Ok(()));
    world.detach(attached).unwrap();
}
