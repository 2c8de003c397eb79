//! The daemon's command line. Each subcommand is a module or a few lines here; everything about serving
//! disks is in the library.

mod check;
mod cli;
mod config;
mod daemon;
mod lock;
mod logs;
mod status;

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, Parser};
use xenblkd::{channel, worker};

use cli::{Cli, Command, ConfigFile};
use config::{Config, DEFAULT_PATH, LogLevel};

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            // One line: causes are joined, none has lines of its own.
            eprintln!("xenblkd: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(ConfigFile { path }) => daemon::run(path.as_deref())?,
        Command::Check { config, json } => return check(&config, json),
        Command::CheckConfig(ConfigFile { path }) => {
            Config::load(path.as_deref())?;
            let shown = path
                .as_deref()
                .map_or(DEFAULT_PATH.into(), |path| path.display().to_string());
            print(&format!("{shown}: fine\n"))?;
        }
        Command::Status { config, json } => {
            let status = status::ask(&Config::load(config.path.as_deref())?.control())?;
            print(&if json {
                status::json(&status)? + "\n"
            } else {
                status::table(&status)
            })?;
        }
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "xenblkd", &mut script);
            print(&String::from_utf8_lossy(&script))?;
        }
        Command::Worker {
            log_level,
            channel_fd: _,
        } => {
            let level = logs::start(log_level);
            let channel = channel::inherited().context("no channel on standard input")?;
            let set_level = Box::new(move |new| level.set(LogLevel(new)));
            return Ok(worker::main(channel, set_level));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn check(file: &ConfigFile, json: bool) -> anyhow::Result<ExitCode> {
    let config = Config::load(file.path.as_deref())?;
    let findings = check::findings(&check::Root::new("/"), &config);
    if json {
        print(&(serde_json::to_string(&findings).context("cannot write JSON")? + "\n"))?;
    } else {
        print(&check::table(&findings))?;
    }
    Ok(if check::is_missing(&findings) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// Whoever reads may stop reading: that is no failure of ours.
fn print(text: &str) -> anyhow::Result<()> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).context("cannot print")
        }
        _ => Ok(()),
    }
}
