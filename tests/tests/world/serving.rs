//! What a guest gets from a healthy backend.

use xenblk_xenstore::{Client, Tx};

use super::*;

#[test]
fn four_rings_fill_a_file_and_the_file_holds_the_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), "disk.img", 16 * MIB);
    let mut world = world();
    let guest = world.guest(linux(4, 0), 1).unwrap();
    let (attached, disk) = world.attach(&guest, 0, &raw(&path)).unwrap();
    assert_eq!(disk.queues(), 4);

    let supervisor = world.backend().unwrap().pid().as_raw_nonzero().get();
    let workers = workers(&world.control());
    assert!(!workers.is_empty(), "no worker has a process");
    let ours = std::process::id() as i32;
    assert!(supervisor != ours && !workers.contains(&ours) && !workers.contains(&supervisor));
    let domid = xenblk_grants::DomId(guest.domid());
    assert_eq!(
        world.xen().snapshot().mappings.get(&domid),
        Some(&4),
        "the four ring pages"
    );

    let layout = verify(&disk, 16 * MIB, 1);
    flush(&disk).unwrap();
    // A worker counts after it has notified, so its figures may come a moment after the answer.
    let rings = eventually("nothing in flight on four rings", || {
        let rings = status(&world.control()).disks.swap_remove(0).rings;
        let idle = rings.iter().all(|ring| ring.counters.in_flight == 0);
        (rings.len() == 4 && idle).then_some(rings)
    });
    for ring in &rings {
        let counted = &ring.counters;
        assert!(
            counted.reads > 0 && counted.writes > 0 && counted.indirect > 0,
            "{ring:?}"
        );
        assert_eq!(counted.errors, 0, "{ring:?}");
    }
    world.detach(attached).unwrap();
    wait_until_let_go(&world);
    assert!(
        world.xen().snapshot().ports.is_empty(),
        "{:?}",
        world.xen().snapshot()
    );
    assert!(world.stop_backend(), "the backend did not end in order");
    assert_file_holds(&path, &layout);
}

#[test]
fn sixteen_rings_of_sixteen_pages() {
    let mut world = world();
    let guest = world.guest(linux(16, 4), 1).unwrap();
    let (attached, disk) = world.attach(&guest, 0, &spec("memory:8M")).unwrap();
    assert_eq!(disk.queues(), 16);
    verify(&disk, 8 * MIB, 2);
    world.detach(attached).unwrap();
    wait_until_let_go(&world);
}

#[test]
fn one_ring_and_requests_larger_than_a_ring_takes_at_once() {
    let mut world = world();
    let guest = world.guest(linux(1, 0), 1).unwrap();
    let (attached, disk) = world.attach(&guest, 0, &spec("memory:16M")).unwrap();
    let pattern = Pattern { seed: 3 };
    // Neither end lies on a page, and the ring's 32 entries take 4 MiB.
    let (sector, len) = (3, 9 * MIB as usize + 512);
    let mut data = vec![0; len];
    pattern.fill(sector, 1, &mut data);
    write(&disk, 0, sector * 512, data).unwrap();
    let back = read(&disk, 0, sector * 512, len as u32).unwrap();
    pattern.check(sector, 1, &back).unwrap();
    assert_eq!(
        read(&disk, 0, 0, 1536).unwrap(),
        vec![0; 1536],
        "written beside the range"
    );
    world.detach(attached).unwrap();
}

#[test]
fn discarded_sectors_of_a_file_read_as_zeroes() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), "disk.img", 4 * MIB);
    let mut world = world();
    let guest = world.guest(linux(2, 0), 1).unwrap();
    let (attached, disk) = world.attach(&guest, 0, &raw(&path)).unwrap();
    write(&disk, 0, 0, vec![0xa5; 2 * MIB as usize]).unwrap();
    let (offset, len) = (MIB, MIB);
    let discarded = disk
        .request(1, Op::Discard { offset, len }, PATIENCE)
        .unwrap();
    discarded.unwrap();
    assert_eq!(read(&disk, 0, MIB, 4096).unwrap(), vec![0; 4096]);
    assert_eq!(read(&disk, 0, MIB - 4096, 4096).unwrap(), vec![0xa5; 4096]);
    world.detach(attached).unwrap();
}

#[test]
fn a_read_only_disk_refuses_writes_and_the_file_stays_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), "disk.img", MIB);
    std::fs::write(&path, vec![7; MIB as usize]).unwrap();
    let mut world = world();
    let guest = world.guest(linux(2, 0), 1).unwrap();
    let readonly = DiskSpec {
        readonly: true,
        ..raw(&path)
    };
    let (attached, disk) = world.attach(&guest, 0, &readonly).unwrap();
    assert!(xenblk_tests::disk::GuestDisk::info(&*disk).readonly);
    assert_eq!(write(&disk, 0, 0, vec![8; 4096]), Err(IoError::Error));
    assert_eq!(read(&disk, 1, 0, 4096).unwrap(), vec![7; 4096]);
    world.detach(attached).unwrap();
    assert!(std::fs::read(&path).unwrap().iter().all(|&byte| byte == 7));
}

#[test]
fn disks_and_guests_do_not_mix() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = world();
    let first = world.guest(linux(2, 0), 2).unwrap();
    let second = world.guest(linux(3, 1), 1).unwrap();
    let mut disks = Vec::new();
    for (guest, index, seed) in [(&first, 0, 10), (&first, 1, 11), (&second, 0, 12)] {
        let path = image(folder.path(), &format!("{seed}.img"), 8 * MIB);
        let (attached, disk) = world.attach(guest, index, &raw(&path)).unwrap();
        disks.push((attached, disk, path, seed));
    }
    let layouts: Vec<Layout> = std::thread::scope(|scope| {
        let passes: Vec<_> = disks
            .iter()
            .map(|(_, disk, _, seed)| scope.spawn(|| verify(disk, 8 * MIB, *seed)))
            .collect();
        passes
            .into_iter()
            .map(|pass| pass.join().unwrap())
            .collect()
    });
    for ((attached, _, path, _), layout) in disks.into_iter().zip(layouts) {
        world.detach(attached).unwrap();
        assert_file_holds(&path, &layout);
    }
    wait_until_let_go(&world);
}

#[test]
fn a_guest_that_resets_its_disk_gets_a_new_connection() {
    let mut world = world();
    let guest = world.guest(linux(4, 0), 1).unwrap();
    let (attached, old) = world.attach(&guest, 0, &spec("memory:1M")).unwrap();
    write(&old, 0, 4096, vec![1; 512]).unwrap();
    let new = world.reset(&attached).unwrap();
    assert_eq!(write(&old, 0, 0, vec![2; 512]), Err(IoError::Gone));
    assert_eq!(read(&new, 3, 4096, 512).unwrap(), vec![1; 512]);
    let mut disk = new;
    for _ in 0..20 {
        // Requests that race with the end of their disk are answered too: `write` insists.
        disk = std::thread::scope(|scope| {
            for queue in 0..4 {
                let disk = Arc::clone(&disk);
                scope.spawn(move || while write(&disk, queue, 0, vec![3; 512]).is_ok() {});
            }
            world.reset(&attached).unwrap()
        });
    }
    world.detach(attached).unwrap();
    wait_until_let_go(&world);
}

/// What `xenstore-ls` shows of the two directories on a real host (Xen 4.17, xl, Linux 6.1), with this
/// backend's offer.
#[test]
fn the_store_looks_as_on_a_real_host() {
    let mut world = world();
    let guest = world.guest(linux(2, 1), 1).unwrap();
    let (attached, _disk) = world.attach(&guest, 0, &spec("null:1G")).unwrap();
    let nodes = world.block_on(async {
        let socket = world.directory().join("xenstore");
        let (store, _events) = Client::connect(socket).await.unwrap();
        let mut nodes = Vec::new();
        for directory in [
            "/local/domain/0/backend/vbd/1/51712",
            "/local/domain/1/device/vbd/51712",
        ] {
            list(&store, directory, &mut nodes).await;
        }
        nodes
    });
    // Numbers that depend on what the guest did before are only checked to be numbers.
    let numbered = |node: &String| node.contains("ring-ref") || node.contains("event-channel");
    let (numbers, nodes): (Vec<String>, Vec<String>) = nodes.into_iter().partition(numbered);
    assert_eq!(numbers.len(), 6, "{numbers:?}");
    for node in &numbers {
        let (_, value) = node.split_once('=').unwrap();
        assert!(
            value.parse::<u32>().is_ok_and(|number| number > 0),
            "{node}"
        );
    }
    let expected = [
        "backend/vbd/1/51712/bootable=1",
        "backend/vbd/1/51712/dev=xvda",
        "backend/vbd/1/51712/device-type=disk",
        "backend/vbd/1/51712/discard-alignment=0",
        "backend/vbd/1/51712/discard-enable=1",
        "backend/vbd/1/51712/discard-granularity=512",
        "backend/vbd/1/51712/discard-secure=0",
        "backend/vbd/1/51712/feature-barrier=0",
        "backend/vbd/1/51712/feature-discard=1",
        "backend/vbd/1/51712/feature-flush-cache=1",
        "backend/vbd/1/51712/feature-max-indirect-segments=256",
        "backend/vbd/1/51712/feature-persistent=1",
        "backend/vbd/1/51712/frontend-id=1",
        "backend/vbd/1/51712/frontend=/local/domain/1/device/vbd/51712",
        "backend/vbd/1/51712/info=0",
        "backend/vbd/1/51712/max-ring-page-order=4",
        "backend/vbd/1/51712/mode=w",
        "backend/vbd/1/51712/multi-queue-max-queues=16",
        "backend/vbd/1/51712/online=1",
        "backend/vbd/1/51712/params=null:1G",
        "backend/vbd/1/51712/physical-sector-size=512",
        "backend/vbd/1/51712/removable=0",
        "backend/vbd/1/51712/script=block-xenblkd",
        "backend/vbd/1/51712/sector-size=512",
        "backend/vbd/1/51712/sectors=2097152",
        "backend/vbd/1/51712/specification=xen",
        "backend/vbd/1/51712/state=4",
        "backend/vbd/1/51712/target-status=open",
        "backend/vbd/1/51712/type=phy",
        "device/vbd/51712/backend-id=0",
        "device/vbd/51712/backend=/local/domain/0/backend/vbd/1/51712",
        "device/vbd/51712/device-type=disk",
        "device/vbd/51712/feature-persistent=1",
        "device/vbd/51712/multi-queue-num-queues=2",
        "device/vbd/51712/protocol=x86_64-abi",
        "device/vbd/51712/queue-0=",
        "device/vbd/51712/queue-1=",
        "device/vbd/51712/ring-page-order=1",
        "device/vbd/51712/state=4",
        "device/vbd/51712/trusted=1",
        "device/vbd/51712/virtual-device=51712",
    ];
    assert_eq!(nodes, expected);
    world.detach(attached).unwrap();
}

/// Every node below `directory` as `path=value`, without the domain in front, sorted.
async fn list(store: &Client, directory: &str, nodes: &mut Vec<String>) {
    let mut left = vec![directory.to_owned()];
    let mut found = Vec::new();
    while let Some(path) = left.pop() {
        for child in store.directory(Tx::NONE, &path).await.unwrap() {
            let path = format!("{path}/{child}");
            let value = store.read(Tx::NONE, &path).await.unwrap();
            let short = path.splitn(5, '/').last().unwrap();
            found.push(format!("{short}={}", String::from_utf8(value).unwrap()));
            left.push(path);
        }
    }
    found.sort();
    nodes.append(&mut found);
}
