//! The whole world in its production shape: guest, hypervisor and XenStore in this process, supervisor and
//! workers in others, started from `xenblk-sim`. Asserts order and outcome, never time; every wait ends
//! in a failure that says what did not come.

mod command;
mod crash;
mod errors;
mod profiles;
mod serving;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use xenblk_grants::fake::PortState;
use xenblk_tests::disk::{IoError, Op};
use xenblk_tests::frontend::{Config, Disk, Profile};
use xenblk_tests::pattern::Pattern;
use xenblk_tests::toolstack::DiskSpec;
use xenblk_tests::verify::{Layout, Options as VerifyOptions, Stage, run_stage};
use xenblk_tests::world::{Options, World};
use xenblkd::control::{Request, Response, Status, ask};

/// Long enough for a machine that does much else; reaching it is a failure.
const PATIENCE: Duration = Duration::from_secs(60);

const MIB: u64 = 1 << 20;

fn sim() -> PathBuf {
    env!("CARGO_BIN_EXE_xenblk-sim").into()
}

fn world() -> World {
    World::start(Options::new(sim())).unwrap()
}

fn linux(queues: u32, ring_order: u32) -> Config {
    Config {
        profile: Profile::linux6(),
        queues,
        ring_order,
    }
}

fn spec(params: impl Into<String>) -> DiskSpec {
    DiskSpec {
        params: params.into(),
        readonly: false,
        discard: true,
    }
}

/// A sparse image of `size` bytes in `folder`.
fn image(folder: &Path, name: &str, size: u64) -> PathBuf {
    let path = folder.join(name);
    File::create_new(&path).unwrap().set_len(size).unwrap();
    path
}

fn raw(path: &Path) -> DiskSpec {
    spec(format!("raw:{}", path.display()))
}

fn write(disk: &Disk, queue: usize, offset: u64, data: Vec<u8>) -> Result<(), IoError> {
    let answer = disk.request(queue, Op::Write { offset, data }, PATIENCE);
    answer.expect("no answer to a write").map(drop)
}

fn read(disk: &Disk, queue: usize, offset: u64, len: u32) -> Result<Vec<u8>, IoError> {
    let answer = disk.request(queue, Op::Read { offset, len }, PATIENCE);
    answer.expect("no answer to a read")
}

fn flush(disk: &Disk) -> Result<(), IoError> {
    disk.request(0, Op::Flush, PATIENCE)
        .expect("no answer to a flush")
        .map(drop)
}

fn bytes_at(file: &mut File, offset: u64, len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    file.seek(SeekFrom::Start(offset)).unwrap();
    file.read_exact(&mut data).unwrap();
    data
}

/// Runs every stage of a verifying pass; returns what is on the disk then.
fn verify(disk: &Disk, size: u64, seed: u64) -> Layout {
    let options = VerifyOptions {
        layout: Layout {
            pattern: Pattern { seed },
            sectors: size / 512,
        },
        depth: 8,
        progress: Arc::new(AtomicU64::new(0)),
        stop: Arc::new(AtomicBool::new(false)),
    };
    for stage in Stage::ALL {
        for (ring, outcome) in run_stage(disk, stage, &options).iter().enumerate() {
            let examples = &outcome.examples;
            assert_eq!(
                outcome.verify_errors(),
                0,
                "{stage:?}, ring {ring}: {examples:?}"
            );
            let idle = outcome.requests == 0 && stage != Stage::Overwrite;
            assert!(!idle, "{stage:?}: ring {ring} did nothing");
        }
    }
    options.layout
}

fn assert_file_holds(path: &Path, layout: &Layout) {
    let mut data = Vec::new();
    File::open(path).unwrap().read_to_end(&mut data).unwrap();
    assert_eq!(data.len() as u64, layout.sectors * 512);
    layout
        .check(0, &data)
        .unwrap_or_else(|mismatch| panic!("{}: {mismatch}", path.display()));
}

/// Waits until `condition` gives something.
fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(
            Instant::now() < deadline,
            "{what}: did not happen within {PATIENCE:?}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn status(control: &Path) -> Status {
    match ask(control, Request::Status {}).unwrap() {
        Response::Status(status) => status,
        other => panic!("expected a status, got {other:?}"),
    }
}

/// The workers' processes.
fn workers(control: &Path) -> Vec<i32> {
    let rings = status(control)
        .disks
        .into_iter()
        .flat_map(|disk| disk.rings);
    let mut pids: Vec<i32> = rings
        .filter_map(|ring| ring.pid)
        .map(|pid| pid as i32)
        .collect();
    pids.sort_unstable();
    pids.dedup();
    pids
}

/// The hypervisor shows nothing of the backend: no page mapped, no port of domain 0, the guests' unbound.
fn wait_until_let_go(world: &World) {
    eventually("nothing mapped and no port bound", || {
        let snapshot = world.xen().snapshot();
        let unbound = snapshot
            .ports
            .iter()
            .all(|port| port.domid.0 != 0 && matches!(port.state, PortState::Unbound { .. }));
        (snapshot.mappings.is_empty() && unbound).then_some(())
    });
}
