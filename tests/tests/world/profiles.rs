//! Every profile through the whole stack: connect, verified I/O, what it has of flush and discard, a
//! reconnect, detach.

use xenblk_tests::disk::GuestDisk;

use super::*;

/// One that takes all of the largest request a profile makes, and more of them than a ring has entries.
const SIZE: u64 = 8 * MIB;

#[test]
fn every_profile_fills_a_file_and_lets_go_of_it() {
    let folder = tempfile::tempdir().unwrap();
    for (seed, profile) in (20..).zip(Profile::all()) {
        let path = image(folder.path(), profile.name, SIZE);
        let mut world = world();
        let config = Config {
            profile,
            queues: profile.rings.most.min(4),
            ring_order: profile.rings.max_order.min(1),
        };
        let guest = world.guest(config, 1).unwrap();
        let (attached, disk) = world.attach(&guest, 0, &raw(&path)).unwrap();
        assert_eq!(disk.queues(), config.queues as usize, "{}", profile.name);
        assert_eq!(disk.info().discard, profile.requests.discard);
        assert_eq!(disk.persistent(), profile.grants.persistent);
        verify(&disk, SIZE, seed);
        flush(&disk).unwrap();
        let (offset, len) = (MIB, MIB);
        let discarded = disk.request(0, Op::Discard { offset, len }, PATIENCE);
        let expected = if profile.requests.discard {
            Ok(Vec::new())
        } else {
            Err(IoError::NotSupported)
        };
        assert_eq!(discarded, Some(expected), "{}", profile.name);

        let disk = world.reset(&attached).unwrap();
        let layout = verify(&disk, SIZE, seed);
        flush(&disk).unwrap();
        let rings = status(&world.control()).disks.swap_remove(0).rings;
        for ring in rings {
            let counters = ring.counters;
            assert_eq!(counters.persistent_hits > 0, profile.grants.persistent);
            // Nothing is mapped for a single use.
            assert_eq!(counters.maps > 0, profile.grants.persistent);
        }
        world.detach(attached).unwrap();
        wait_until_let_go(&world);
        assert_file_holds(&path, &layout);
    }
}

#[test]
fn requests_are_as_large_as_profile_and_backend_have_it() {
    for (name, segments) in [
        ("linux6", 32),
        ("linux3.11", 32),
        ("win9", 256),
        ("freebsd14", 256),
    ] {
        let profile = Profile::named(name).unwrap();
        let mut world = world();
        let config = Config {
            profile,
            queues: 1,
            ring_order: 0,
        };
        let guest = world.guest(config, 1).unwrap();
        let (attached, disk) = world.attach(&guest, 0, &spec("memory:4M")).unwrap();
        assert_eq!(disk.limits().segments, segments, "{name}");
        let data = vec![segments as u8; segments * 4096];
        write(&disk, 0, 0, data.clone()).unwrap();
        assert_eq!(read(&disk, 0, 0, data.len() as u32).unwrap(), data);
        let ring = status(&world.control())
            .disks
            .swap_remove(0)
            .rings
            .remove(0);
        assert_eq!(
            (ring.counters.writes, ring.counters.indirect),
            (1, 2),
            "{name}"
        );
        world.detach(attached).unwrap();
    }
}
