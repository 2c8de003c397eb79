//! `xenblk-sim profiles`: what can be given to `--profile`.

use std::io::{Write, stdout};
use std::process::ExitCode;

use xenblk_tests::frontend::{IndirectGrants, Profile};

use crate::session::Result;
use crate::table;

pub(crate) fn run() -> Result<ExitCode> {
    let rows: Vec<Vec<String>> = Profile::all().iter().map(row).collect();
    let heads = [
        "profile",
        "rings",
        "segments",
        "grants",
        "segment pages",
        "discard",
    ];
    let mut out = stdout().lock();
    table::write(&mut out, &heads, &rows)?;
    writeln!(out)?;
    for profile in Profile::all() {
        writeln!(out, "{}: {}", profile.name, profile.summary)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn row(profile: &Profile) -> Vec<String> {
    let grants = &profile.grants;
    let data = match (grants.persistent, grants.readonly_writes) {
        (true, _) => "persistent",
        (false, true) => "a request, read-only",
        (false, false) => "a request",
    };
    let indirect = match grants.indirect {
        IndirectGrants::LikeData => "as data",
        IndirectGrants::Readonly => "a request, read-only",
        IndirectGrants::Once => "for good, read-only",
    };
    vec![
        profile.name.into(),
        format!("{} of {}", profile.rings.usual, profile.rings.most),
        profile.requests.segments.to_string(),
        data.into(),
        indirect.into(),
        if profile.requests.discard {
            "yes"
        } else {
            "no"
        }
        .into(),
    ]
}
