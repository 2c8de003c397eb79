//! How workers and rings begin: what a worker's process asks of the kernel, what it logs, and a port that is
//! not to be had yet.

use std::io::{Read, Seek};
use std::sync::Arc;
use std::sync::mpsc::channel;

use xenblk_ring::RwOp;
use xenblkd::channel::Message;
use xenblkd::message::{Command, LogLevel, Report};

use crate::world::{Front, OKAY, Terms, World, disk};

/// Two rings of which the second can't have its port before the first is gone: as after a crash, while the
/// old process is not.
fn first_and_second(world: &World) -> (Front, Front) {
    let target = disk("memory:1M");
    let (second, mut message, fds) = world.offer(&target, &Terms::default());
    // The first takes the second's port.
    let (first, mut usurper, usurper_fds) = world.offer(&target, &Terms::default());
    usurper.event_channel = second.port.0;
    world.command(Message {
        body: Command::Attach(Box::new(usurper)),
        fds: usurper_fds,
    });
    assert!(matches!(world.report(), Report::Attached { ring } if ring == first.id));
    message.queue = 3;
    world.command(Message {
        body: Command::Attach(Box::new(message)),
        fds,
    });
    (first, second)
}

#[test]
fn a_port_that_is_still_bound_is_tried_until_it_is_free() {
    let world = World::new();
    let (first, mut second) = first_and_second(&world);
    let page = second.page(false);
    let request = second.rw(RwOp::Read, 0, &[page.whole()]);
    let id = second.push(&request);
    // Published, and the event goes to whoever has the port.
    let _ = second.ring.publish();
    // Meanwhile the worker serves others.
    let mut other = world.attach(&disk("memory:1M"), &Terms::default());
    assert_eq!(other.write(0, 1), OKAY);
    match world.report() {
        Report::Unbound { ring, reason } => {
            assert_eq!(ring, second.id);
            let port = second.port.0;
            assert!(
                reason.starts_with(&format!("can't bind event channel {port}: ")),
                "{reason}"
            );
        }
        report => panic!("{report:?}"),
    }
    world.detach(first);
    assert!(matches!(world.report(), Report::Attached { ring } if ring == second.id));
    assert_eq!(second.settle()[&id], OKAY);
    second.take_back(page);
    world.detach(second);
    world.detach(other);
}

#[test]
fn detaching_gives_up_a_port_that_never_comes() {
    let world = World::new();
    let (first, second) = first_and_second(&world);
    world.detach(second);
    assert_eq!(world.mapped(), 1, "the first one's ring");
    world.detach(first);
}

#[test]
fn the_workers_end_gives_up_a_port_that_never_comes() {
    let mut world = World::new();
    let (first, second) = first_and_second(&world);
    world.supervisor = None;
    world.join().unwrap();
    assert_eq!(world.mapped(), 0);
    second.assert_gone();
    first.assert_gone();
}

#[test]
fn lines_about_a_ring_name_it_and_the_level_can_be_changed() {
    let (levels_tx, levels) = channel();
    let file = Arc::new(tempfile::tempfile().unwrap());
    // A logger that is the only one is asked for its interest in a line by the thread that comes to the
    // line first; that may be another test's, which has none.
    let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::default());
    let world = World::logging(Arc::clone(&file), levels_tx);
    let (first, second) = first_and_second(&world);
    world.command(Command::LogLevel {
        level: LogLevel::Error,
    });
    assert_eq!(levels.recv().unwrap(), tracing::Level::ERROR);
    world.detach(second);
    world.detach(first);
    drop(world);
    let mut log = String::new();
    let mut file = &*file;
    file.rewind().unwrap();
    file.read_to_string(&mut log).unwrap();
    for queue in [3, 0] {
        let line = format!("ring{{domid=5 devid=51712 queue={queue}}}: ");
        let named = |text: &str| text.contains(&line) && text.ends_with("detached");
        assert!(log.lines().any(named), "{log}");
    }
}

/// The files of that name of the process' threads. The worker is one of them: the test harness has its own.
fn of_threads(pid: u32, name: &str) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let path = |task: std::fs::DirEntry| task.path().join(name);
    tasks
        .filter_map(|task| std::fs::read_to_string(path(task.ok()?)).ok())
        .collect()
}

/// A number of `/proc/.../status`.
fn field(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let word = line.and_then(|line| line.strip_prefix(':')?.split_whitespace().next());
    word.unwrap().parse().unwrap()
}

fn capabilities() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    u64::from_str_radix(line.unwrap().trim(), 16).unwrap()
}

#[test]
fn a_workers_process_locks_its_memory_and_belongs_to_the_io_path() {
    /// include/linux/sched.h
    const PF_MEMALLOC_NOIO: u64 = 0x0008_0000;
    const CAP_SYS_RESOURCE: u64 = 1 << 24;
    const CAP_IPC_LOCK: u64 = 1 << 14;
    let world = World::in_a_process();
    let terms = Terms {
        bounce_bytes: 256 << 20,
        ..Terms::default()
    };
    let front = world.attach(&disk("memory:1M"), &terms);
    let pid = world.pid();
    let threads = of_threads(pid, "status");
    assert!(
        threads
            .iter()
            .any(|status| field(status, "NoNewPrivs") == 1)
    );

    if capabilities() & CAP_SYS_RESOURCE == 0 {
        eprintln!("skipped: PR_SET_IO_FLUSHER needs CAP_SYS_RESOURCE");
    } else {
        let flags = |stat: &String| {
            let fields = stat.rsplit_once(") ").unwrap().1;
            fields.split(' ').nth(6).unwrap().parse::<u64>().unwrap()
        };
        let threads = of_threads(pid, "stat");
        assert!(
            threads
                .iter()
                .any(|stat| flags(stat) & PF_MEMALLOC_NOIO != 0)
        );
    }

    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let wanted = terms.bounce_bytes + (1 << 20);
    if capabilities() & CAP_IPC_LOCK == 0 && limit.is_some_and(|limit| limit < wanted) {
        eprintln!("skipped: RLIMIT_MEMLOCK is {limit:?}, less than {wanted}");
    } else {
        let locked = field(&threads[0], "VmLck") * 1024;
        assert!(locked >= terms.bounce_bytes, "{locked} bytes");
        // What hasn't been used is not in memory for all that.
        let resident = field(&threads[0], "VmRSS") * 1024;
        assert!(resident < locked / 2, "{resident} bytes");
    }
    world.detach(front);
}
