//! The contracts of [`Target`] and [`Upkeep`], held against every implementation.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use xenblk_grants::Slab;

use super::script::disk::ScriptedDisk;
use super::serve::{self, Target};
use super::upkeep::{self, Upkeep};
use super::{FENCES, OpenMode, OpenedTarget, TargetSpec, open};
use crate::flusher::wire::Chore;
use crate::worker::engine::{Engine, Event, Io, SlabKey, Source, Tag};

const SIZE: u64 = 4 << 20;
const LIMIT: Option<Duration> = Some(Duration::from_secs(30));

/// Two descriptions of a target, driven as a worker and as a flusher drive theirs.
struct Driven {
    target: Box<dyn Target>,
    upkeep: Box<dyn Upkeep>,
    slab: SlabKey,
    engine: Engine,
}

impl Driven {
    fn new(opened: &OpenedTarget, fence: u64) -> Self {
        let (worker, fds) = opened.incarnation().unwrap();
        let target = serve::attach(&worker, fds, fence).unwrap();
        let (worker, fds) = opened.incarnation().unwrap();
        let upkeep = upkeep::attach(&worker, fds, fence).unwrap();
        let mut engine = Engine::new().unwrap();
        let slab = engine.add_slab(Slab::reserve(4 << 20).unwrap());
        let mut driven = Self {
            target,
            upkeep,
            slab,
            engine,
        };
        driven.watch();
        driven
    }

    fn watch(&mut self) {
        if let Some(fd) = self.target.watched() {
            self.engine.poll(fd, Source::Target(0));
        }
    }

    fn start(&mut self, request: usize, io: Io) {
        self.target
            .start(&mut self.engine, Tag { ring: 0, request }, io);
    }

    fn done(&mut self) -> (usize, Io, Result<(), Errno>) {
        loop {
            match self.engine.next() {
                Some(Event::Done { tag, io, result }) => return (tag.request, io, result),
                Some(Event::Woken { result, .. }) => {
                    result.unwrap();
                    self.target.readable(&mut self.engine).unwrap();
                    self.watch();
                }
                None => self.engine.enter(true, LIMIT).unwrap(),
            }
        }
    }

    fn run(&mut self, io: Io) -> (Io, Result<(), Errno>) {
        self.start(7, io);
        let (request, io, result) = self.done();
        assert_eq!(request, 7);
        (io, result)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let mut buffer = self.engine.lend(self.slab, data.len() as u32).unwrap();
        self.engine.bytes_mut(&mut buffer).copy_from_slice(data);
        match self.run(Io::Write { offset, buffer }) {
            (Io::Write { buffer, .. }, result) => {
                self.engine.release(buffer);
                result
            }
            (other, _) => panic!("{other:?}"),
        }
    }

    fn discard(&mut self, offset: u64, len: u64) -> Result<(), Errno> {
        let secure = false;
        self.upkeep.perform(Chore::Discard {
            offset,
            len,
            secure,
        })
    }

    fn read(&mut self, offset: u64, len: u32) -> Result<Vec<u8>, Errno> {
        let mut buffer = self.engine.lend(self.slab, len).unwrap();
        self.engine.bytes_mut(&mut buffer).fill(0x5a);
        match self.run(Io::Read { offset, buffer }) {
            (Io::Read { buffer, .. }, result) => {
                let data = self.engine.bytes(&buffer).to_vec();
                self.engine.release(buffer);
                result.map(|()| data)
            }
            (other, _) => panic!("{other:?}"),
        }
    }
}

/// A target of every kind, with whether it keeps data and what holds it in place.
fn targets(mode: OpenMode) -> Vec<(OpenedTarget, bool, Box<dyn Send>)> {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("disk.img");
    File::create(&image).unwrap().set_len(SIZE).unwrap();
    let open = |spec: String| open(&TargetSpec::parse(&spec).unwrap(), mode).unwrap();
    let file = open(format!("raw:{}", image.display()));

    let script = tempfile::tempdir().unwrap();
    let socket = script.path().join("script");
    let disk = ScriptedDisk::listen(&socket, SIZE).unwrap();
    let scripted = open(format!("script:{}", socket.display()));
    let (stop, stopped) = crossbeam::channel::bounded::<()>(0);
    let author = std::thread::spawn(move || {
        while stopped.try_recv() != Err(crossbeam::channel::TryRecvError::Disconnected) {
            if let Some(op) = disk.next(Duration::from_millis(10)) {
                op.go().unwrap();
            }
        }
    });
    vec![
        (file, true, Box::new(dir)),
        (open(format!("memory:{SIZE}")), true, Box::new(())),
        (open(format!("null:{SIZE}")), false, Box::new(())),
        (scripted, true, Box::new((script, stop, author))),
    ]
}

#[test]
fn what_was_written_is_read_up_to_the_last_sector() {
    for (opened, keeps, _held) in targets(OpenMode::default()) {
        let mut disk = Driven::new(&opened, 0);
        let sector: Vec<u8> = (0..512u32).map(|i| i as u8 ^ 0x33).collect();
        let large: Vec<u8> = (0..1u32 << 20).map(|i| (i / 512 + i) as u8).collect();
        for (offset, data) in [(0, &sector), (SIZE - 512, &sector), (512 * 1001, &large)] {
            disk.write(offset, data).unwrap();
            let back = disk.read(offset, data.len() as u32).unwrap();
            let expected = if keeps {
                data.clone()
            } else {
                vec![0; data.len()]
            };
            assert!(back == expected, "{opened} at {offset}");
        }
        assert_eq!(
            disk.read(1024, 512).unwrap(),
            [0; 512],
            "{opened}: between the writes"
        );
        disk.upkeep.perform(Chore::Flush).unwrap();
    }
}

#[test]
fn another_description_of_the_same_target_sees_the_same_bytes() {
    for (opened, keeps, _held) in targets(OpenMode::default()) {
        let (mut one, mut two) = (Driven::new(&opened, 0), Driven::new(&opened, 1));
        one.write(4096, &[9; 1024]).unwrap();
        one.upkeep.perform(Chore::Flush).unwrap();
        assert_eq!(
            two.read(4096, 1024).unwrap()[0],
            if keeps { 9 } else { 0 },
            "{opened}"
        );
    }
}

#[test]
fn every_operation_comes_back_once_with_its_tag() {
    for (opened, keeps, _held) in targets(OpenMode::default()) {
        let mut disk = Driven::new(&opened, 0);
        for request in 0..256 {
            let mut buffer = disk.engine.lend(disk.slab, 512).unwrap();
            disk.engine.bytes_mut(&mut buffer).fill(request as u8);
            disk.start(
                request,
                Io::Write {
                    offset: request as u64 * 512,
                    buffer,
                },
            );
        }
        let mut seen = [false; 256];
        for _ in 0..256 {
            let (request, io, result) = disk.done();
            result.unwrap();
            assert!(!std::mem::replace(&mut seen[request], true));
            match io {
                Io::Write { offset, buffer } if offset == request as u64 * 512 => {
                    disk.engine.release(buffer);
                }
                other => panic!("{other:?}"),
            }
        }
        let all = disk.read(0, 256 * 512).unwrap();
        for (i, byte) in all.iter().enumerate() {
            assert_eq!(*byte, if keeps { (i / 512) as u8 } else { 0 }, "{opened}");
        }
        let free = disk.engine.slab(disk.slab).unwrap().free_pages();
        assert_eq!(free, 1024, "{opened}: every buffer came back");
    }
}

#[test]
fn a_discarded_range_reads_as_zeroes_and_its_neighbours_stay() {
    for (opened, keeps, _held) in targets(OpenMode::default()) {
        assert!(opened.capabilities().discard);
        let mut disk = Driven::new(&opened, 0);
        disk.write(0, &[7; 65536]).unwrap();
        disk.discard(8192, 4096 * 3).unwrap();
        disk.discard(SIZE - 4096, 4096).unwrap();
        let back = disk.read(0, 65536).unwrap();
        for (i, byte) in back.iter().enumerate() {
            let zero = !keeps || (8192..8192 + 4096 * 3).contains(&i);
            assert_eq!(*byte, if zero { 0 } else { 7 }, "{opened} at {i}");
        }
        disk.read(SIZE - 512, 512).expect("the size is as before");
    }
}

#[test]
fn a_read_only_target_changes_nothing_whatever_it_is_asked() {
    for (opened, keeps, _held) in targets(OpenMode { readonly: true }) {
        assert!(opened.capabilities().readonly);
        let mut disk = Driven::new(&opened, 0);
        if keeps {
            disk.write(0, &[1; 512]).unwrap_err();
            disk.discard(0, 4096).unwrap_err();
        }
        disk.upkeep.perform(Chore::Flush).unwrap();
        assert_eq!(disk.read(0, 512).unwrap(), [0; 512], "{opened}");
    }
}

#[test]
fn the_fence_lasts_as_long_as_the_description() {
    for readonly in [false, true] {
        for (opened, keeps, _held) in targets(OpenMode { readonly }) {
            let one = Driven::new(&opened, 3);
            let Driven { target, upkeep, .. } = Driven::new(&opened, 3);
            assert_eq!(opened.fence_free(3).unwrap(), !keeps, "{opened}");
            assert!(opened.fence_free(4).unwrap(), "{opened}: another's");
            let others = [opened.fences_free(0..3), opened.fences_free(4..FENCES)];
            assert!(others.map(Result::unwrap) == [true; 2], "{opened}");
            assert_eq!(opened.fences_free(0..FENCES).unwrap(), !keeps, "{opened}");
            for rest in [Box::new(one) as Box<dyn std::any::Any>, Box::new(target)] {
                drop(rest);
                assert_eq!(
                    opened.fence_free(3).unwrap(),
                    !keeps,
                    "{opened}: one is left"
                );
            }
            drop(upkeep);
            assert!(opened.fence_free(3).unwrap(), "{opened}");
        }
    }
}

#[test]
fn a_transfer_that_ends_early_is_an_error_and_never_half_a_success() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&[3; 8192]).unwrap();
    let opened = open_path(file.path(), false).unwrap();
    let mut disk = Driven::new(&opened, 0);
    assert_eq!(disk.read(4096, 4096).unwrap(), [3; 4096]);
    file.as_file().set_len(6144).unwrap();
    assert_eq!(disk.read(4096, 4096), Err(Errno::IO));
    assert_eq!(disk.read(8192, 512), Err(Errno::IO));
    assert_eq!(disk.read(4096, 2048).unwrap(), [3; 2048]);
}

fn open_path(path: &Path, readonly: bool) -> Result<OpenedTarget, super::TargetError> {
    open(
        &TargetSpec::parse(&format!("raw:{}", path.display())).unwrap(),
        OpenMode { readonly },
    )
}

#[test]
fn what_is_no_disk_is_refused_in_one_line_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let make = |name, len| {
        File::create(at(name))
            .unwrap()
            .write_all(&vec![0x11; len])
            .unwrap();
    };
    make("empty", 0);
    make("short", 511);
    make("odd", 1025);
    rustix::fs::mknodat(
        rustix::fs::CWD,
        at("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    for (path, expected) in [
        (at("missing"), "No such file"),
        (at("empty"), "0 bytes long; expected a multiple of 512"),
        (at("short"), "511 bytes long; expected a multiple of 512"),
        (at("odd"), "1025 bytes long; expected a multiple of 512"),
        (
            at("fifo"),
            "is a FIFO; expected a regular file or a block device",
        ),
        (at("socket"), "is a socket; expected"),
        (dir.path().into(), "is a directory; expected"),
        ("/dev/null".into(), "is a character device; expected"),
    ] {
        for readonly in [false, true] {
            let message = open_path(&path, readonly).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
            assert!(
                message.starts_with(&path.display().to_string()),
                "{message}"
            );
            assert_eq!(message.lines().count(), 1, "{message}");
        }
    }
    assert!(!at("missing").exists(), "nothing is created");
    let mut odd = Vec::new();
    File::open(at("odd"))
        .unwrap()
        .read_to_end(&mut odd)
        .unwrap();
    assert_eq!(odd, vec![0x11; 1025], "nothing is truncated");
}

#[test]
fn an_incarnation_is_the_file_that_was_opened_whatever_its_name_leads_to() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, [1; 4096]).unwrap();
    let opened = open_path(&path, false).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, [2; 4096]).unwrap();
    assert_eq!(Driven::new(&opened, 0).read(0, 512).unwrap(), [1; 512]);
    let _held = opened.incarnation().unwrap();
    assert!(
        opened.fences_free(0..FENCES).unwrap(),
        "a description of its own holds nothing"
    );
}

#[test]
fn a_script_decides_order_and_outcome() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("script");
    let script = ScriptedDisk::listen(&socket, SIZE).unwrap();
    let spec = TargetSpec::parse(&format!("script:{}", socket.display())).unwrap();
    let opened = open(&spec, OpenMode::default()).unwrap();
    let mut disk = Driven::new(&opened, 0);
    for request in 0..3 {
        let buffer = disk.engine.lend(disk.slab, 512).unwrap();
        disk.start(
            request,
            Io::Write {
                offset: request as u64 * 4096,
                buffer,
            },
        );
    }
    let ops: Vec<_> = (0..3)
        .map(|_| script.next(LIMIT.unwrap()).unwrap())
        .collect();
    assert_eq!(
        ops.iter().map(|op| op.ask.offset).collect::<Vec<_>>(),
        [0, 4096, 8192]
    );
    let mut expected = [Ok(()), Err(Errno::NOSPC), Ok(())];
    for op in ops.into_iter().rev() {
        let request = (op.ask.offset / 4096) as usize;
        if request == 1 { op.fail(28) } else { op.go() }.unwrap();
        let (done, _, result) = disk.done();
        assert_eq!(
            (done, result),
            (request, std::mem::replace(&mut expected[request], Ok(())))
        );
    }
    script.file().write_all_at(&[6; 512], 0).unwrap();
    let buffer = disk.engine.lend(disk.slab, 512).unwrap();
    disk.start(4, Io::Read { offset: 0, buffer });
    drop(script);
    loop {
        match disk.engine.next() {
            Some(Event::Woken { .. }) => {
                assert!(
                    disk.target.readable(&mut disk.engine).is_err(),
                    "the test is gone"
                );
            }
            Some(Event::Done { tag, result, .. }) => {
                assert_eq!((tag.request, result), (4, Err(Errno::IO)));
                break;
            }
            None => disk.engine.enter(true, LIMIT).unwrap(),
        }
    }
    let lost = Err(Errno::IO);
    assert_eq!(disk.write(0, &[0; 512]), lost, "nothing starts any more");
    assert_eq!(disk.upkeep.perform(Chore::Flush), lost);
}

/// A secure discard that was carried out as a plain one would be a lie.
#[test]
fn what_cannot_discard_securely_refuses_to() {
    for (opened, keeps, _held) in targets(OpenMode::default()) {
        assert!(!opened.capabilities().secure_discard, "{opened}");
        let mut disk = Driven::new(&opened, 0);
        disk.write(0, &[7; 4096]).unwrap();
        let (offset, len, secure) = (0, 4096, true);
        let chore = Chore::Discard {
            offset,
            len,
            secure,
        };
        if keeps {
            let refused = Err(Errno::OPNOTSUPP);
            assert_eq!(disk.upkeep.perform(chore), refused, "{opened}");
            assert_eq!(disk.read(0, 4096).unwrap(), [7; 4096], "{opened}");
        }
    }
}
