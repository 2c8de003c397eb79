//! Each rule against input that keeps it and input that breaks it.

use std::collections::BTreeMap;

use crate::rules;
use crate::source::{Function, Source};

fn one(wrong: &[String]) -> &str {
    assert_eq!(wrong.len(), 1, "{wrong:?}");
    &wrong[0]
}

#[test]
fn siblings_that_import_each_other_are_found() {
    let mut uses = BTreeMap::from([
        (
            "xenblk-ring".to_owned(),
            vec!["loom".to_owned(), "xenblk-ring".to_owned()],
        ),
        ("xenblkd".to_owned(), vec!["xenblk-ring".to_owned()]),
    ]);
    assert!(rules::imports(&uses).is_empty());
    uses.insert("xenblk-grants".to_owned(), vec!["xenblk-ring".to_owned()]);
    assert_eq!(
        one(&rules::imports(&uses)),
        "xenblk-grants: may not use xenblk-ring"
    );
    uses.remove("xenblk-grants");
    uses.insert("newcomer".to_owned(), vec![]);
    assert!(one(&rules::imports(&uses)).starts_with("newcomer: not in MAY_USE"));
}

#[test]
fn unsafe_is_found_in_code_only() {
    let quiet = r##"
        #![forbid(unsafe_code)]
        // unsafe { } /* unsafe */
        /* unsafe /* nested unsafe */ unsafe */
        const A: &str = "unsafe \" unsafe"; const B: &str = r#"unsafe " unsafe"#;
        fn f<'a>(x: &'a u8) -> char { '"' } // "
        const C: &[u8] = br"unsafe"; const D: char = 'é'; const E: u8 = b'\''; // unsafe
    "##;
    assert!(rules::unsafe_code("a.rs", &Source::new(quiet), &[]).is_empty());
    let loud = format!("{quiet}\nfn g() {{ unsafe {{ h() }} }}");
    let wrong = rules::unsafe_code("a.rs", &Source::new(&loud), &[("b.rs", ""), ("a/", "")]);
    assert_eq!(one(&wrong), "a.rs:9: unsafe is not allowed in this file");
    for place in ["a/", "a/b.rs"] {
        let wrong = rules::unsafe_code("a/b.rs", &Source::new(&loud), &[(place, "")]);
        assert_eq!(
            one(&wrong),
            "a/b.rs:9: unsafe without a // SAFETY: comment above it"
        );
    }
    let documented = "// SAFETY: the caller's\n// promise.\nlet x = call(\n    unsafe { f() },\n);";
    assert!(rules::unsafe_code("a.rs", &Source::new(documented), &[("a.rs", "")]).is_empty());
}

#[test]
fn missing_lints_are_found() {
    let five = "#![deny(\n    clippy::unwrap_used,\n    clippy::expect_used,\n    clippy::panic,\n\
                clippy::indexing_slicing,\n    clippy::arithmetic_side_effects,";
    let all = format!("{five}\n    clippy::cast_possible_truncation\n)]");
    assert!(rules::missing_lints("a.rs", &all).is_empty());
    let wrong = rules::missing_lints("a.rs", &format!("{five})]"));
    assert_eq!(
        one(&wrong),
        "a.rs: doesn't deny clippy::cast_possible_truncation"
    );
    assert_eq!(rules::missing_lints("a.rs", "").len(), 6);
}

fn function(name: &str, lines: usize) -> String {
    format!(
        "fn {name}(a: [u8; 3]) -> [u8; 3]\nwhere\n    (): Sized,\n{{\n{}}}\n",
        "    f();\n".repeat(lines - 5)
    )
}

#[test]
fn functions_are_measured_from_fn_to_brace() {
    let text = format!(
        "trait T {{ fn none(&self); }}\n{}",
        function("measured", 10)
    );
    let expected = Function {
        name: "measured".into(),
        first: 2,
        last: 11,
    };
    assert_eq!(Source::new(&text).functions(), [expected]);
}

#[test]
fn long_functions_are_found_unless_they_say_why() {
    let at_most = function("fits", rules::FUNCTION_LINES);
    assert!(rules::lengths("a/src/b.rs", &Source::new(&at_most)).is_empty());
    let long = function("long", rules::FUNCTION_LINES + 1);
    let wrong = rules::lengths("a/src/b.rs", &Source::new(&long));
    assert!(one(&wrong).starts_with("a/src/b.rs:1: long has 81 lines, at most 80"));
    let excused = format!("// LONG: a table\n#[test]\n{long}");
    assert!(rules::lengths("a/src/b.rs", &Source::new(&excused)).is_empty());
}

#[test]
fn long_files_are_found_and_test_modules_do_not_count() {
    let fits = "const A: u8 = 0;\n".repeat(rules::FILE_LINES);
    let tests = format!("#[cfg(test)]\nmod tests {{\n{fits}}}\n");
    let text = format!("{fits}{tests}");
    assert!(rules::lengths("a/src/b.rs", &Source::new(&text)).is_empty());
    let long = format!("{tests}{fits}fn one() {{}}\n");
    let wrong = rules::lengths("a/src/b.rs", &Source::new(&long));
    assert_eq!(
        one(&wrong),
        "a/src/b.rs: 601 lines outside tests, at most 600"
    );
    for path in ["a/tests/b.rs", "a/src/b/tests.rs", "tests/tests/a/b.rs"] {
        assert!(
            rules::lengths(path, &Source::new(&long)).is_empty(),
            "{path}"
        );
    }
    assert_eq!(
        rules::lengths("tests/src/b.rs", &Source::new(&long)).len(),
        1
    );
}

#[test]
fn empty_names_are_found() {
    assert!(rules::names("ring/src/baseline.rs").is_empty());
    for path in [
        "ring/src/util.rs",
        "ring/src/common/mod.rs",
        "helpers/Cargo.toml",
        "a/misc",
    ] {
        assert!(one(&rules::names(path)).starts_with(path), "{path}");
    }
}

#[test]
fn allow_is_found_and_expect_is_not() {
    let good = "#[expect(clippy::x, reason = \"y\")]\n// #[allow(x)]\n";
    assert!(rules::bare_allow("a.rs", &Source::new(good)).is_empty());
    for bad in ["#[allow(clippy::x)]", "#![allow(dead_code)]"] {
        let wrong = rules::bare_allow("a.rs", &Source::new(bad));
        assert!(one(&wrong).starts_with("a.rs:1: use #[expect"));
    }
}

#[test]
fn machine_paths_are_found() {
    let name = ["/", "ro", "ot/x"].concat();
    for good in [
        "/dev/xen/gntdev /run/xenblkd network/ home/",
        "$to#",
        "\"$to\"#",
        "${to}#",
    ] {
        let text = good.replace('#', &name);
        assert!(rules::machine_paths("a", &text).is_empty(), "{text}");
    }
    for bad in ["\n#", "a #", "cd \"#\"", "to=#", "raw:#"] {
        assert_eq!(
            rules::machine_paths("a", &bad.replace('#', &name)).len(),
            1,
            "{bad}"
        );
    }
}

#[test]
fn commands_that_do_not_exist_are_found() {
    let binaries = ["xenblk-sim".to_owned()];
    let is_script = |name: &str| name == "tests/clients/run";
    let check = |text: &str| rules::commands("R.md", text, &binaries, is_script);
    let good = "cargo run --bin nothing\n```sh\ncargo run --release --bin xenblk-sim -- serve\n\
                $ tests/clients/run\ncargo test --workspace\n```\n";
    assert!(check(good).is_empty());
    assert_eq!(
        one(&check("```\ncargo run --bin other\n```")),
        "R.md:2: there is no binary other"
    );
    assert_eq!(
        one(&check("```\ncargo run\n```")),
        "R.md:2: cargo run without --bin"
    );
    let wrong = check("```sh\n$ tests/other/run --fast\n```");
    assert_eq!(
        one(&wrong),
        "R.md:2: tests/other/run is not an executable file"
    );
    assert_eq!(
        rules::links("[a](docs/a.md#b) [c](https://x.y) [d](#e)"),
        ["docs/a.md"]
    );
}
