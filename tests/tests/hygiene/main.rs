//! What no compiler checks about the tree: who may import whom, where unsafe may stand, how long
//! things may get, names, and that the documents tell the truth about commands. The rules themselves
//! are tested with input that breaks them.

mod broken;
mod rules;
mod source;

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use source::Source;

/// Where unsafe may stand, and why there is no way without it.
const UNSAFE_ALLOWED: &[(&str, &str)] = &[
    ("grants/src/sys/", "device ioctls"),
    (
        "grants/tests/xen/dom0.rs",
        "a guest's side of the real devices",
    ),
    (
        "grants/src/memory.rs",
        "the one owner of mmap: slabs, shared pages and mappings stand on it",
    ),
    (
        "grants/src/slab.rs",
        "byte views of runs, which their linear tokens keep apart",
    ),
    (
        "grants/src/window.rs",
        "grants mapped at addresses of our choice",
    ),
    ("grants/src/fake/", "shared memory of the mocked hypervisor"),
    (
        "backend/src/worker/engine.rs",
        "submission entries carry raw pointers to the kernel",
    ),
    (
        "backend/src/syscalls.rs",
        "range locks and discards have no safe wrapper",
    ),
];

/// Crates that hold no unsafe at all, by their first line of attributes.
const FORBID_UNSAFE: [&str; 3] = ["ring/src/lib.rs", "xenstore/src/lib.rs", "tests/src/lib.rs"];

/// Where guest data is parsed: the lints that keep it from panicking stand here.
const GUEST_FACING: [&str; 4] = [
    "ring/src/lib.rs",
    "grants/src/lib.rs",
    "xenstore/src/lib.rs",
    "backend/src/plan.rs",
];

fn root() -> PathBuf {
    let mut root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.pop();
    root
}

/// Every file of the tree that `keep` wants, by its path from the root; build output and git's own
/// files are not part of it.
fn files(keep: impl Fn(&Path) -> bool) -> Vec<(String, PathBuf)> {
    let root = root();
    let mut found = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                if !name.starts_with("target") && name != ".git" {
                    folders.push(path);
                }
            } else if keep(&path) {
                let short = path
                    .strip_prefix(&root)
                    .unwrap()
                    .to_string_lossy()
                    .into_owned();
                found.push((short, path));
            }
        }
    }
    assert!(!found.is_empty());
    found.sort();
    found
}

fn is_rust(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "rs")
}

fn is_markdown(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "md")
}

fn sources() -> Vec<(String, Source)> {
    files(is_rust)
        .into_iter()
        .map(|(short, path)| (short, Source::new(&std::fs::read_to_string(path).unwrap())))
        .collect()
}

fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--no-deps",
            "--offline",
            "--format-version",
            "1",
        ])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).unwrap()
}

fn text_of(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

#[track_caller]
fn assert_none(wrong: impl IntoIterator<Item = String>) {
    let wrong: Vec<String> = wrong.into_iter().collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn crates_import_only_what_they_may() {
    let metadata = metadata();
    let mut uses = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        let dependencies = package["dependencies"].as_array().unwrap();
        let names = dependencies
            .iter()
            .map(|dependency| text_of(&dependency["name"]))
            .collect();
        uses.insert(text_of(&package["name"]), names);
    }
    assert_eq!(
        uses.len(),
        rules::MAY_USE.len(),
        "members: {:?}",
        uses.keys()
    );
    assert_none(rules::imports(&uses));
}

#[test]
fn unsafe_stands_only_where_it_may_and_says_why() {
    assert_none(
        sources()
            .iter()
            .flat_map(|(path, source)| rules::unsafe_code(path, source, UNSAFE_ALLOWED)),
    );
    for path in FORBID_UNSAFE {
        let text = std::fs::read_to_string(root().join(path)).unwrap();
        assert!(
            text.contains("#![forbid(unsafe_code)]"),
            "{path}: forbid unsafe_code"
        );
    }
}

#[test]
fn guest_facing_code_rejects_what_can_panic() {
    for path in GUEST_FACING {
        let text = std::fs::read_to_string(root().join(path)).unwrap();
        assert_none(rules::missing_lints(path, &text));
    }
}

#[test]
fn files_and_functions_stay_short() {
    assert_none(
        sources()
            .iter()
            .flat_map(|(path, source)| rules::lengths(path, source)),
    );
}

#[test]
fn names_say_what_is_inside() {
    assert_none(
        files(|_| true)
            .iter()
            .flat_map(|(path, _)| rules::names(path)),
    );
}

#[test]
fn no_lint_is_allowed_without_a_reason() {
    let wrong: Vec<String> = sources()
        .iter()
        .flat_map(|(path, source)| rules::bare_allow(path, source))
        .collect();
    assert_none(wrong);
    for (path, file) in files(|path| path.ends_with("Cargo.toml")) {
        let text = std::fs::read_to_string(file).unwrap();
        let inherits = text.contains("[lints]\nworkspace = true");
        assert!(
            inherits || path == "Cargo.toml",
            "{path}: inherit the workspace's lints"
        );
    }
}

#[test]
fn no_place_of_one_machine_is_named() {
    let mut wrong = Vec::new();
    for (path, file) in files(|_| true) {
        // Binary files name no paths.
        if let Ok(text) = std::fs::read_to_string(file) {
            wrong.extend(rules::machine_paths(&path, &text));
        }
    }
    assert_none(wrong);
}

#[test]
fn documents_name_commands_and_files_that_exist() {
    let metadata = metadata();
    let packages = metadata["packages"].as_array().unwrap();
    let binaries: Vec<String> = packages
        .iter()
        .flat_map(|package| package["targets"].as_array().unwrap())
        .filter(|target| target["kind"][0] == "bin")
        .map(|target| text_of(&target["name"]))
        .collect();
    let is_script = |name: &str| {
        std::fs::metadata(root().join(name))
            .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o100 != 0)
    };
    let mut wrong = Vec::new();
    for (path, file) in files(is_markdown) {
        let text = std::fs::read_to_string(&file).unwrap();
        wrong.extend(rules::commands(&path, &text, &binaries, is_script));
        for link in rules::links(&text) {
            if !file.with_file_name(&link).exists() {
                wrong.push(format!("{path}: links to {link}, which doesn't exist"));
            }
        }
    }
    assert_none(wrong);
}
