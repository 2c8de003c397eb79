//! `xenblk-sim`: the backend without Xen. Hypervisor, XenStore and guests live in this process; it starts
//! itself again as supervisor and workers. Here only the command is chosen; the library does the work.
#![forbid(unsafe_code)]

mod backend;
mod cli;
mod demo;
mod load;
mod profiles;
mod serve;
mod session;
mod table;

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let result = match cli.command {
        None => demo::run(),
        Some(Command::Serve(args)) => serve::run(&args),
        Some(Command::Load(args)) => load::run(&args),
        Some(Command::Profiles) => profiles::run(),
        Some(Command::Supervisor(args)) => return backend::supervisor(args),
        Some(Command::Worker { channel_fd: _ }) => return backend::worker(),
    };
    match result {
        Ok(code) => code,
        Err(error) => fail(&*error),
    }
}

/// One line, even if a name in it has several.
fn fail(error: &dyn Error) -> ExitCode {
    let text = error.to_string().replace('\n', "\\n");
    eprintln!("xenblk-sim: {text}");
    ExitCode::FAILURE
}

/// Help and version as clap prints them; everything else in one line, without the usage.
fn usage(error: &clap::Error) -> ExitCode {
    if matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
    ) {
        // Whoever asked for help and closed the pipe has seen enough.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.render().to_string();
    let relevant = text.split("\n\nUsage:").next().unwrap_or(&text);
    let relevant = relevant.split("\n\nFor more").next().unwrap_or(relevant);
    let words: Vec<&str> = relevant
        .trim_start_matches("error: ")
        .split_whitespace()
        .collect();
    let _ = writeln!(std::io::stderr(), "xenblk-sim: {}", words.join(" "));
    ExitCode::from(2)
}
