//! Replays what fuzzing has found worth keeping: the corpora, and every input that once showed a bug.

use std::path::{Path, PathBuf};

use xenblk_tests::fuzz::TARGETS;

fn folder(kind: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz")
        .join(kind)
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// The name of the file is the last thing said before a failure.
fn replay(name: &str) {
    let target = TARGETS
        .into_iter()
        .find(|target| target.name == name)
        .unwrap();
    let corpus = files(&folder("corpus").join(name));
    assert!(!corpus.is_empty(), "no corpus for {name}");
    for path in corpus
        .into_iter()
        .chain(files(&folder("regressions").join(name)))
    {
        eprintln!("{}", path.display());
        (target.run)(&std::fs::read(path).unwrap());
    }
    (target.run)(&[]);
}

macro_rules! replays {
    ($($name:ident),+) => {
        $(#[test]
        fn $name() {
            replay(stringify!($name));
        })+

        const REPLAYED: &[&str] = &[$(stringify!($name)),+];
    };
}

replays!(slot, ring, indirect, journal, wire, keys, control, guest);

#[test]
fn every_target_is_replayed_and_every_folder_is_a_targets() {
    assert_eq!(TARGETS.map(|target| target.name), REPLAYED);
    for kind in ["corpus", "regressions"] {
        for path in files(&folder(kind)) {
            let name = path.file_name().unwrap().to_str().unwrap();
            assert!(REPLAYED.contains(&name), "{}", path.display());
        }
    }
}
