//! Workers as processes of their own: this test program, started again by the supervisor.

use std::io::BufRead;

use xenblkd::control::RingStatus;
use xenblkd::supervisor::WorkerProgram;

use crate::guest::{Guest, PAGE};
use crate::world::{World, eventually};

const XVDA: u32 = 51712;

/// Set in a worker's command line only; libtest takes what follows `--` for further test names.
const CHANNEL: &str = "--channel-fd";

/// Before the folder in which a worker leaves a file for each level it is told to log at.
const LEVELS: &str = "--levels";

/// Not a test of its own: the worker's `main` when the supervisor starts this program.
#[test]
fn worker_process() {
    if std::env::args().any(|arg| arg == CHANNEL) {
        let channel = xenblkd::channel::inherited().unwrap();
        let levels = std::env::args().skip_while(|arg| arg != LEVELS).nth(1);
        let set_level = move |level: tracing::Level| {
            if let Some(folder) = &levels {
                let file = format!("{folder}/{}-{level}", std::process::id());
                std::fs::write(file, "").unwrap();
            }
        };
        let code = xenblkd::worker::main(channel, Box::new(set_level));
        std::process::exit(i32::from(code != std::process::ExitCode::SUCCESS));
    }
}

/// Starts `worker_process`, and only it.
fn this_program() -> WorkerProgram {
    let args = ["workers::worker_process", "--exact", "--nocapture", "--"];
    WorkerProgram::Process {
        path: "/proc/self/exe".into(),
        args: args.map(Into::into).to_vec(),
    }
}

#[tokio::test]
async fn every_worker_takes_a_new_log_level_also_those_to_come() {
    let mut world = World::new().await;
    let told = world.path("levels");
    std::fs::create_dir(&told).unwrap();
    let WorkerProgram::Process { path, mut args } = this_program() else {
        unreachable!()
    };
    args.extend([LEVELS.into(), told.clone().into()]);
    world.options.program = WorkerProgram::Process { path, args };
    world.start().await;
    world.attach(1, XVDA, "memory:1M", "w").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    guest.connect(&world, 1, 0).await;
    let takes = async |pid: u32, level: &str| {
        let file = told.join(format!("{pid}-{level}"));
        eventually(level, async || file.exists().then_some(())).await;
    };
    let first = rings(&world, 1).await[0].pid.unwrap();
    world.handle().set_log_level(tracing::Level::DEBUG);
    takes(first, "DEBUG").await;

    kill(first);
    world.reaches(1, XVDA, "5").await;
    guest.set_state("5").await;
    guest.finish_closing(&world).await;
    guest.set_state("1").await;
    guest.connect(&world, 1, 0).await;
    let second = rings(&world, 1).await[0].pid.unwrap();
    assert_ne!(first, second);
    takes(second, "DEBUG").await;
    world.handle().set_log_level(tracing::Level::WARN);
    takes(second, "WARN").await;
}

async fn rings(world: &World, domid: u16) -> Vec<RingStatus> {
    world.status(domid, XVDA).await.unwrap().rings
}

pub(crate) fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

fn is_alive(pid: u32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}")).exists()
}

#[tokio::test]
async fn a_killed_worker_takes_down_only_its_own_devices() {
    let mut world = World::new().await;
    world.options.program = this_program();
    world.start().await;
    let image = world.image("disk", 1 << 20);
    world.attach(1, XVDA, &image, "w").await;
    let mut hit = Guest::new(&world, 1, XVDA).await;
    hit.connect(&world, 2, 1).await;
    hit.check_data(0, 0x10).await;
    let before = rings(&world, 1).await;
    let pids: Vec<u32> = before.iter().map(|ring| ring.pid.unwrap()).collect();
    assert_ne!(
        pids[0], pids[1],
        "a disk's queues are spread over the workers"
    );

    // A disk with one ring, on the worker that lives on.
    let (mut spared, mut number) = (None, 2);
    while spared.is_none() {
        world.attach(number, XVDA, "memory:1M", "w").await;
        let mut guest = Guest::new(&world, number, XVDA).await;
        guest.connect(&world, 1, 0).await;
        if rings(&world, number).await[0].pid == Some(pids[1]) {
            spared = Some(guest);
        }
        number += 1;
        assert!(number < 40, "every disk went to the same worker");
    }
    let mut spared = spared.unwrap();

    kill(pids[0]);
    world.reaches(1, XVDA, "5").await;
    let error = world.error(1, XVDA).await;
    assert!(
        error.contains("worker") && error.contains("died") && error.contains("SIGKILL"),
        "{error}"
    );
    spared.check_data(0, 0x20).await;
    assert!(
        hit.read(1, 0).await.unwrap() == [0x10; PAGE],
        "the other ring goes on until the frontend closes"
    );
    hit.set_state("5").await;
    hit.finish_closing(&world).await;
    world.assert_nothing_held(1);

    hit.set_state("1").await;
    hit.connect(&world, 2, 0).await;
    assert!(hit.read(0, 0).await.unwrap() == [0x10; PAGE]);
    hit.check_data(8, 0x30).await;
    let after = rings(&world, 1).await;
    assert_ne!(after[0].pid, before[0].pid, "a fresh worker");
    assert_eq!(after[1].pid, before[1].pid);

    let pids: Vec<u32> = after.iter().map(|ring| ring.pid.unwrap()).collect();
    world.stop().await;
    assert!(
        pids.iter().all(|pid| !is_alive(*pid)),
        "workers end with their supervisor"
    );
    world.assert_nothing_held(1);
}

/// What a request that outlives its worker leaves behind: a lock on the target beyond its data, where the
/// workers' fences are. A process of its own, because closing any descriptor of the image, as the
/// supervisor in this one does, would end a lock of ours.
struct Stuck(std::process::Child);

const LOCK: &str = "--lock";
const LOCKED: &str = "the image is locked";

/// Not a test of its own: holds the lock of a [`Stuck`].
#[test]
fn lock_process() {
    let Some(image) = std::env::args().skip_while(|arg| arg != LOCK).nth(1) else {
        return;
    };
    let file = std::fs::File::open(image).unwrap();
    rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::NonBlockingLockShared).unwrap();
    println!("{LOCKED}");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
}

impl Stuck {
    fn on(image: &str) -> Self {
        let mut command = std::process::Command::new("/proc/self/exe");
        command.args([
            "workers::lock_process",
            "--exact",
            "--nocapture",
            "--",
            LOCK,
            image,
        ]);
        let piped = std::process::Stdio::piped;
        let mut child = command.stdin(piped()).stdout(piped()).spawn().unwrap();
        let output = std::io::BufReader::new(child.stdout.take().unwrap());
        assert!(
            output
                .lines()
                .map_while(Result::ok)
                .any(|line| line.contains(LOCKED))
        );
        Self(child)
    }

    fn ends(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Closing goes on, but Closed is not written before the stuck request has ended.
async fn closed_only_after(world: &World, guest: &mut Guest, stuck: Stuck) {
    world.reaches(1, XVDA, "5").await;
    guest.set_state("5").await;
    guest.set_state("6").await;
    world.nothing_held(1).await;
    eventually("the status says that it waits", async || {
        let disk = world.status(1, XVDA).await?;
        disk.waiting_seconds.map(drop)
    })
    .await;
    for _ in 0..50 {
        // Time enough for a supervisor that does not wait; one that does can't fail this.
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        let state = world.backend_key(1, XVDA, "state").await;
        assert_eq!(
            state.as_deref(),
            Some("5"),
            "a late write could still reach the image"
        );
    }
    stuck.ends();
    guest.finish_closing(world).await;
}

#[tokio::test]
async fn closed_waits_for_what_a_dead_worker_left_in_the_storage() {
    let mut world = World::new().await;
    world.options.program = this_program();
    world.start().await;
    let image = world.image("disk", 1 << 20);
    world.attach(1, XVDA, &image, "w").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    guest.connect(&world, 1, 0).await;
    let pid = rings(&world, 1).await[0].pid.unwrap();
    let stuck = Stuck::on(&image);
    kill(pid);
    closed_only_after(&world, &mut guest, stuck).await;

    // The same, found by a supervisor that knows nothing of the worker.
    guest.set_state("1").await;
    guest.connect(&world, 1, 0).await;
    world.crash().await;
    world.nothing_held(1).await;
    let stuck = Stuck::on(&image);
    world.start().await;
    closed_only_after(&world, &mut guest, stuck).await;
    guest.set_state("1").await;
    guest.connect(&world, 1, 0).await;
    guest.check_data(0, 0x10).await;
}

#[tokio::test]
async fn workers_of_a_dead_supervisor_end_by_themselves() {
    let mut world = World::new().await;
    world.options.program = this_program();
    world.start().await;
    world.attach(1, XVDA, "memory:1M", "w").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    guest.connect(&world, 2, 0).await;
    let pids: Vec<u32> = rings(&world, 1)
        .await
        .iter()
        .map(|ring| ring.pid.unwrap())
        .collect();
    world.crash().await;
    world.nothing_held(1).await;
    for pid in pids {
        // Nobody waits for it here, so it may stay a zombie of this program.
        let stat = format!("/proc/{pid}/stat");
        let gone = async || {
            std::fs::read_to_string(&stat)
                .map_or(true, |stat| stat.contains(") Z "))
                .then_some(())
        };
        eventually("the worker is gone", gone).await;
    }
}

#[tokio::test]
async fn a_worker_that_cannot_start_fails_its_device() {
    connects_in_vain("/nonexistent/worker", "cannot start worker").await;
}

#[tokio::test]
async fn a_worker_that_ends_at_once_fails_its_device() {
    let world = connects_in_vain("/bin/false", "died").await;
    world.assert_nothing_held(1);
}

/// A guest asks for rings whose worker is `program`: its device fails with an error that contains `reason`.
async fn connects_in_vain(program: &str, reason: &str) -> World {
    let mut world = World::new().await;
    world.options.program = WorkerProgram::Process {
        path: program.into(),
        args: Vec::new(),
    };
    world.start().await;
    world.attach(1, XVDA, "memory:1M", "w").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    world.reaches(1, XVDA, "2").await;
    let keys = guest.make_rings(1, 0);
    guest.publish(&keys, "3").await;
    world.reaches(1, XVDA, "5").await;
    let error = world.error(1, XVDA).await;
    assert!(error.contains(reason), "{error}");
    guest.finish_closing(&world).await;
    world
}
