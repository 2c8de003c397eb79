//! The command line. What the subcommands do is elsewhere; their texts here and the man page say the
//! same.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::config::LogLevel;

/// Xen block backend in user space: serves guests' disks from files, block devices and more.
#[derive(Debug, Parser)]
#[command(name = "xenblkd", version, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve this domain's disks until told to stop
    Run(ConfigFile),
    /// Show what this host lacks to run xenblkd, and what to do about it
    Check {
        #[command(flatten)]
        config: ConfigFile,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Read the configuration and say what is wrong with it
    CheckConfig(ConfigFile),
    /// Show the disks and rings of the running daemon with their counters
    Status {
        #[command(flatten)]
        config: ConfigFile,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print a completion script for a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// One worker of a daemon, started by it
    #[command(hide = true)]
    Worker {
        #[arg(long, default_value_t = LogLevel(tracing::Level::INFO))]
        log_level: LogLevel,
        /// Always 0: the supervisor passes its channel as standard input
        #[arg(long, value_parser = clap::value_parser!(u8).range(0..=0))]
        channel_fd: u8,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct ConfigFile {
    /// Configuration file; it must exist. Default: /etc/xenblkd/xenblkd.toml, if that exists
    #[arg(long = "config", value_name = "FILE")]
    pub(crate) path: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_default_file_is_the_one_the_help_names() {
        let help = Cli::command()
            .find_subcommand_mut("run")
            .unwrap()
            .render_help()
            .to_string();
        assert!(help.contains(crate::config::DEFAULT_PATH), "{help}");
    }

    /// The man page has every subcommand and option that the help has.
    #[test]
    fn the_man_page_is_complete() {
        let page = include_str!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../packaging/xenblkd.8"
        ));
        let page = page.replace("\\-", "-");
        for command in Cli::command()
            .get_subcommands()
            .filter(|command| !command.is_hide_set())
        {
            assert!(
                page.contains(&format!(".B {}", command.get_name())),
                "{}",
                command.get_name()
            );
            for option in command.get_arguments().filter_map(clap::Arg::get_long) {
                assert!(page.contains(&format!("--{option}")), "{option}");
            }
        }
    }
}
