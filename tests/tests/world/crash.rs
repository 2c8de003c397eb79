//! kill -9 in the middle of writes: the hypervisor gets everything back, the guest's requests end, what was
//! answered is on the disk, and the next connection serves it.

use rustix::process::{Pid, Signal, kill_process};
use xenblk_tests::frontend::Status as FrontendStatus;
use xenblk_tests::world::Attached;

use super::*;

const SIZE: u64 = 32 * MIB;
/// One write.
const BLOCK: usize = 8192;
const PATTERN: Pattern = Pattern { seed: 99 };

/// Writes ascending blocks on every ring, one at a time, until the disk is gone; returns those answered OK.
/// `kill` runs once every ring has some answers.
fn write_until_gone(disk: &Arc<Disk>, kill: impl FnOnce()) -> Vec<u64> {
    let blocks = SIZE / BLOCK as u64;
    let queues = disk.queues() as u64;
    let answered: Vec<AtomicU64> = (0..queues).map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        let writers: Vec<_> = answered
            .iter()
            .zip(0..)
            .map(|(answered, queue)| {
                let disk = Arc::clone(disk);
                scope.spawn(move || {
                    let mut written = Vec::new();
                    for block in (queue..blocks).step_by(queues as usize).cycle() {
                        let mut data = vec![0; BLOCK];
                        PATTERN.fill(sector(block), 1, &mut data);
                        match write(&disk, queue as usize, block * BLOCK as u64, data) {
                            Ok(()) => written.push(block),
                            Err(IoError::Gone) => return written,
                            Err(other) => panic!("block {block}: {other}"),
                        }
                        answered.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    }
                    unreachable!("the blocks go round")
                })
            })
            .collect();
        eventually("writes on every ring", || {
            let some = |count: &AtomicU64| count.load(std::sync::atomic::Ordering::Relaxed) >= 20;
            answered.iter().all(some).then_some(())
        });
        kill();
        writers
            .into_iter()
            .flat_map(|writer| writer.join().unwrap())
            .collect()
    })
}

fn sector(block: u64) -> u64 {
    block * (BLOCK / 512) as u64
}

/// Every answered block is there; no sector holds anything but its own data or zeroes.
fn assert_never_wrong(path: &Path, written: &[u64]) {
    let mut file = File::open(path).unwrap();
    for &block in written {
        let data = bytes_at(&mut file, block * BLOCK as u64, BLOCK);
        PATTERN
            .check(sector(block), 1, &data)
            .unwrap_or_else(|mismatch| panic!("an answered write is lost: {mismatch}"));
    }
    let data = bytes_at(&mut file, 0, SIZE as usize);
    for (number, bytes) in (0..).zip(data.chunks_exact(512)) {
        if bytes.iter().any(|&byte| byte != 0) {
            PATTERN.check(number, 1, bytes).unwrap();
        }
    }
}

fn assert_serves_again(world: &World, attached: &Attached, path: &Path, written: &[u64]) {
    let disk = world.reset(attached).unwrap();
    let block = written[0];
    let data = read(&disk, 1, block * BLOCK as u64, BLOCK as u32).unwrap();
    PATTERN.check(sector(block), 1, &data).unwrap();
    let layout = verify(&disk, SIZE, 5);
    flush(&disk).unwrap();
    assert_file_holds(path, &layout);
}

#[test]
fn a_killed_worker_takes_only_its_rings_connections_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), "disk.img", SIZE);
    let mut world = world();
    let guest = world.guest(linux(4, 0), 1).unwrap();
    let (attached, disk) = world.attach(&guest, 0, &raw(&path)).unwrap();
    let written = write_until_gone(&disk, || {
        for pid in workers(&world.control()) {
            kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        }
    });
    eventually("the frontend closed", || {
        match attached.frontend().status() {
            FrontendStatus::Gone(_) => Some(()),
            _ => None,
        }
    });
    wait_until_let_go(&world);
    assert_never_wrong(&path, &written);
    assert_serves_again(&world, &attached, &path, &written);
    world.detach(attached).unwrap();
    wait_until_let_go(&world);
}

#[test]
fn after_a_killed_supervisor_a_new_one_serves_the_guest() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), "disk.img", SIZE);
    let mut world = world();
    let guest = world.guest(linux(4, 0), 1).unwrap();
    let (attached, disk) = world.attach(&guest, 0, &raw(&path)).unwrap();
    let written = write_until_gone(&disk, || world.backend().unwrap().kill());
    assert_eq!(read(&disk, 0, 0, 512), Err(IoError::Gone));
    wait_until_let_go(&world);
    assert_never_wrong(&path, &written);

    world.start_backend().unwrap();
    assert_serves_again(&world, &attached, &path, &written);
    world.detach(attached).unwrap();
    wait_until_let_go(&world);
}

#[test]
fn a_disk_left_by_a_dead_backend_can_be_removed_by_force() {
    let mut world = world();
    let guest = world.guest(linux(2, 0), 1).unwrap();
    let (attached, disk) = world.attach(&guest, 0, &spec("memory:1M")).unwrap();
    world.backend().unwrap().kill();
    eventually("the disk is gone", || disk.gone().map(drop));
    world.detach_by_force(attached).unwrap();
    wait_until_let_go(&world);
    assert!(world.xen().snapshot().ports.is_empty());
}
