//! The fuzz targets as a program: `tests/fuzz/run` builds it with coverage and `--cfg fuzzing`, and then it
//! is libFuzzer with the target that `XENBLK_FUZZ_TARGET` names. Otherwise it runs that target on the files
//! it is given, for a debugger or a sanitizer.
#![cfg_attr(fuzzing, no_main)]

use std::process::exit;

use xenblk_tests::fuzz::{TARGETS, Target};

fn target() -> Target {
    let name = std::env::var("XENBLK_FUZZ_TARGET").unwrap_or_default();
    let target = TARGETS.into_iter().find(|target| target.name == name);
    target.unwrap_or_else(|| {
        let names = TARGETS.map(|target| target.name).join(", ");
        eprintln!("XENBLK_FUZZ_TARGET is {name:?}, expected one of {names}");
        exit(2)
    })
}

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    static TARGET: std::sync::LazyLock<Target> = std::sync::LazyLock::new(target);
    (TARGET.run)(data);
});

#[cfg(not(fuzzing))]
fn main() {
    let target = target();
    for path in std::env::args_os().skip(1) {
        match std::fs::read(&path) {
            Ok(data) => (target.run)(&data),
            Err(error) => {
                eprintln!("{}: {error}", path.to_string_lossy());
                exit(1)
            }
        }
    }
}
