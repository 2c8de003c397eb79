//! The rules, each a function from what is there to what is wrong with it. An empty answer is good.

use std::collections::BTreeMap;

use crate::source::Source;

/// Most lines of a file outside its test modules.
pub(crate) const FILE_LINES: usize = 600;
/// Most lines of a function without a `// LONG: reason`.
pub(crate) const FUNCTION_LINES: usize = 80;
/// How far above an `unsafe` its `// SAFETY:` may begin: a comment of several lines and a statement
/// that `unsafe` is only the end of.
const SAFETY_REACH: usize = 10;

/// Which of our crates each of our crates may use, for building and for testing alike.
pub(crate) const MAY_USE: [(&str, &[&str]); 5] = [
    ("xenblk-ring", &[]),
    ("xenblk-grants", &[]),
    ("xenblk-xenstore", &[]),
    (
        "xenblkd",
        &["xenblk-ring", "xenblk-grants", "xenblk-xenstore"],
    ),
    (
        "xenblk-tests",
        &["xenblk-ring", "xenblk-grants", "xenblk-xenstore", "xenblkd"],
    ),
];

/// `uses`: each member of the workspace with its dependencies of every kind.
pub(crate) fn imports(uses: &BTreeMap<String, Vec<String>>) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, dependencies) in uses {
        let Some((_, allowed)) = MAY_USE.iter().find(|(known, _)| known == name) else {
            wrong.push(format!("{name}: not in MAY_USE; say what it may import"));
            continue;
        };
        // A crate's tests may use the crate itself with more features.
        let ours = dependencies
            .iter()
            .filter(|one| *one != name && uses.contains_key(*one));
        for dependency in ours {
            if !allowed.contains(&dependency.as_str()) {
                wrong.push(format!("{name}: may not use {dependency}"));
            }
        }
    }
    wrong
}

/// `allowed`: files, or folders ending in `/`, where unsafe may stand.
pub(crate) fn unsafe_code(path: &str, source: &Source, allowed: &[(&str, &str)]) -> Vec<String> {
    let lines = source.lines_with("unsafe");
    let here = allowed
        .iter()
        .any(|(place, _)| match place.strip_suffix('/') {
            Some(_) => path.starts_with(place),
            None => path == *place,
        });
    let text: Vec<&str> = source.text.lines().collect();
    let mut wrong = Vec::new();
    for line in lines {
        if !here {
            wrong.push(format!("{path}:{line}: unsafe is not allowed in this file"));
            continue;
        }
        // `unsafe fn` states its contract under `# Safety`, which clippy demands.
        let declares =
            text[line - 1].contains("unsafe fn") || text[line - 1].contains("unsafe extern");
        let from = line.saturating_sub(1 + SAFETY_REACH);
        if !declares
            && !text[from..line]
                .iter()
                .any(|above| above.contains("// SAFETY:"))
        {
            wrong.push(format!(
                "{path}:{line}: unsafe without a // SAFETY: comment above it"
            ));
        }
    }
    wrong
}

/// Lints without which a guest's value could end in a panic.
pub(crate) fn missing_lints(path: &str, text: &str) -> Vec<String> {
    const NEEDED: [&str; 6] = [
        "clippy::unwrap_used",
        "clippy::expect_used",
        "clippy::panic",
        "clippy::indexing_slicing",
        "clippy::arithmetic_side_effects",
        "clippy::cast_possible_truncation",
    ];
    let denied = text
        .split("deny(")
        .nth(1)
        .and_then(|rest| rest.split(')').next())
        .unwrap_or("");
    NEEDED
        .iter()
        .filter(|lint| !denied.contains(*lint))
        .map(|lint| format!("{path}: doesn't deny {lint}"))
        .collect()
}

pub(crate) fn lengths(path: &str, source: &Source) -> Vec<String> {
    let mut wrong = Vec::new();
    let lines = source.production_lines();
    if lines > FILE_LINES && !is_test_file(path) {
        wrong.push(format!(
            "{path}: {lines} lines outside tests, at most {FILE_LINES}"
        ));
    }
    let text: Vec<&str> = source.text.lines().collect();
    for function in source.functions() {
        let lines = function.last - function.first + 1;
        let excused = text[function.first.saturating_sub(4)..function.first]
            .iter()
            .any(|above| above.trim_start().starts_with("// LONG: "));
        if lines > FUNCTION_LINES && !excused {
            wrong.push(format!(
                "{path}:{}: {} has {lines} lines, at most {FUNCTION_LINES}; look for the missing \
                 type, or say // LONG: why",
                function.first, function.name
            ));
        }
    }
    wrong
}

/// Files that hold nothing but tests.
fn is_test_file(path: &str) -> bool {
    let inside = path.split_once('/').map_or("", |(_, inside)| inside);
    inside.starts_with("tests/") || inside.contains("/tests/") || inside.ends_with("/tests.rs")
}

/// Names that say nothing about what is inside.
pub(crate) fn names(path: &str) -> Vec<String> {
    const EMPTY: [&str; 7] = [
        "util", "utils", "common", "helper", "helpers", "misc", "base",
    ];
    path.split('/')
        .map(|part| part.split('.').next().unwrap_or(part))
        .filter(|part| EMPTY.contains(part))
        .map(|part| format!("{path}: \"{part}\" doesn't say what is inside"))
        .collect()
}

/// `#[allow]` has no reason that a reader could check; `#[expect(…, reason = …)]` has.
pub(crate) fn bare_allow(path: &str, source: &Source) -> Vec<String> {
    let mut wrong = Vec::new();
    for (number, line) in source.code.lines().enumerate() {
        if line.contains("#[allow(") || line.contains("#![allow(") {
            let number = number + 1;
            wrong.push(format!(
                "{path}:{number}: use #[expect(lint, reason = \"...\")]"
            ));
        }
    }
    wrong
}

/// Paths that exist on one machine only.
pub(crate) fn machine_paths(path: &str, text: &str) -> Vec<String> {
    // In two parts, so that this file keeps the rule.
    const FOLDERS: [(&str, &str); 5] = [
        ("/wo", "rk/"),
        ("/ro", "ot/"),
        ("/ho", "me/"),
        ("../sha", "red"),
        (".lib", "rary"),
    ];
    let mut wrong = Vec::new();
    for (number, line) in text.lines().enumerate() {
        for (head, tail) in FOLDERS {
            let name = format!("{head}{tail}");
            let begins_path = |(at, _)| !ends_inside_a_path(&line[..at]);
            if line.match_indices(&name).any(begins_path) {
                let number = number + 1;
                wrong.push(format!(
                    "{path}:{number}: names {name}, a place of one machine"
                ));
            }
        }
    }
    wrong
}

/// A path goes on after this text, as after `$folder` or `"$folder"`.
fn ends_inside_a_path(before: &str) -> bool {
    let unquoted = before.trim_end_matches(['"', '\'', '`']);
    unquoted.ends_with(|c: char| c.is_alphanumeric() || "_-.}~".contains(c))
}

/// Commands in the fenced blocks of a document: `cargo run` must name one of `binaries`, and a script
/// must be an executable file, which `is_script` tells.
pub(crate) fn commands(
    path: &str,
    text: &str,
    binaries: &[String],
    is_script: impl Fn(&str) -> bool,
) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut fenced = false;
    for (number, line) in text.lines().enumerate() {
        if line.starts_with("```") {
            fenced = !fenced;
            continue;
        }
        let words: Vec<&str> = line.trim_start_matches("$ ").split_whitespace().collect();
        if !fenced || words.is_empty() {
            continue;
        }
        let problem = match words.as_slice() {
            ["cargo", "run", options @ ..] => {
                let bin = options.iter().skip_while(|word| **word != "--bin").nth(1);
                match bin {
                    Some(bin) if binaries.iter().any(|known| known == bin) => None,
                    Some(bin) => Some(format!("there is no binary {bin}")),
                    None => Some("cargo run without --bin".to_owned()),
                }
            }
            [script, ..] if looks_like_script(script) && !is_script(script) => {
                Some(format!("{script} is not an executable file"))
            }
            _ => None,
        };
        wrong.extend(problem.map(|problem| format!("{path}:{}: {problem}", number + 1)));
    }
    wrong
}

fn looks_like_script(word: &str) -> bool {
    ["tests/", "./", ".ci/"]
        .iter()
        .any(|start| word.starts_with(start))
}

/// Targets of a document's links that stay inside the repository.
pub(crate) fn links(text: &str) -> Vec<String> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
        .map(|target| target.split('#').next().unwrap_or(target))
        .filter(|target| !target.is_empty() && !target.contains("://"))
        .map(str::to_owned)
        .collect()
}
