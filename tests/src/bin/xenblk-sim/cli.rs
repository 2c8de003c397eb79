//! The command line of `xenblk-sim`, and nothing else: every value is parsed and bounded here.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use xenblk_tests::frontend::{Config, Profile};
use xenblk_tests::load::Mode;

/// Serve disk images to a simulated Xen guest, without Xen.
///
/// Without a command: makes a sparse image, starts the backend and a simulated 4-queue Linux guest,
/// writes and verifies through them and prints what each ring did.
#[derive(Debug, Parser)]
#[command(version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve images to a guest and export the guest's disks over NBD until interrupted.
    Serve(Serve),
    /// Run a load from a simulated guest and print what each ring did.
    Load(Load),
    /// List the frontends a guest can have.
    Profiles,
    /// The backend's control plane, as started by this program.
    #[command(hide = true)]
    Supervisor(Supervisor),
    /// One storage core of the backend, as started by the supervisor.
    #[command(hide = true)]
    Worker {
        /// Always 0: the supervisor passes its channel as standard input.
        #[arg(long, value_parser = clap::value_parser!(u8).range(0..=0))]
        channel_fd: u8,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// Disk images: `[raw:]PATH`, `null:SIZE`, `memory:SIZE` or `script:SOCKET`; the guest sees them
    /// as xvda, xvdb, and so on.
    #[arg(required = true, num_args = 1..=26, value_name = "IMAGE")]
    pub(crate) images: Vec<String>,
    /// Unix socket for NBD, which must not exist; in a temporary directory if not given. With one
    /// image the export has the empty name, with several the exports are called xvda, xvdb, and so on.
    #[arg(long, value_name = "SOCK")]
    pub(crate) nbd: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) guest: GuestArgs,
    /// Rings the guest asks for; as many as its frontend usually does if not given.
    #[arg(long, value_name = "N", value_parser = number::<1, 16>)]
    pub(crate) queues: Option<u32>,
    /// Attach the disks read-only.
    #[arg(long)]
    pub(crate) readonly: bool,
}

/// What guest it is.
#[derive(Debug, Args)]
pub(crate) struct GuestArgs {
    /// Which frontend the guest runs; `xenblk-sim profiles` lists them.
    #[arg(long, value_name = "NAME", default_value = "linux6", value_parser = profile)]
    profile: &'static Profile,
    /// Pages of a ring as a power of two.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = number::<0, 4>)]
    ring_order: u32,
}

impl GuestArgs {
    /// This guest with `queues` rings, or as many as usual. The error is one line.
    pub(crate) fn config(&self, queues: Option<u32>) -> Result<Config, String> {
        let Self {
            profile,
            ring_order,
        } = *self;
        let (name, rings) = (profile.name, &profile.rings);
        let queues = queues.unwrap_or(rings.usual);
        if queues > rings.most {
            let most = rings.most;
            return Err(format!(
                "--queues {queues}: expected at most {most}, the rings of {name}"
            ));
        }
        if ring_order > rings.max_order {
            let most = rings.max_order;
            return Err(format!(
                "--ring-order {ring_order}: expected at most {most}, that of {name}"
            ));
        }
        Ok(Config {
            profile,
            queues,
            ring_order,
        })
    }
}

#[derive(Debug, Args)]
pub(crate) struct Load {
    /// Disk image as for `serve`; plain `null:` is a disk of 1 GiB that keeps nothing. Writing modes
    /// overwrite it.
    #[arg(value_name = "IMAGE")]
    pub(crate) image: String,
    /// Which requests: read, write, randread, randwrite, randrw.
    #[arg(
        long,
        value_name = "MODE",
        default_value = "randread",
        hide_possible_values = true
    )]
    pub(crate) rw: ModeName,
    /// Bytes of a request, a multiple of 512; suffixes k and M.
    #[arg(long, value_name = "BYTES", default_value = "4k", value_parser = block_size)]
    pub(crate) bs: u64,
    /// Requests in flight on each ring.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = number::<1, 512>)]
    pub(crate) iodepth: u32,
    #[command(flatten)]
    pub(crate) guest: GuestArgs,
    /// Rings the guest asks for, one run for each value; as many as its frontend usually does if not
    /// given.
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = number::<1, 16>)]
    pub(crate) queues: Vec<u32>,
    /// Seconds a run lasts.
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub(crate) runtime: Duration,
    /// Ends a run earlier, once it has moved so many bytes; suffixes k, M and G.
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub(crate) size: Option<u64>,
    /// One JSON object a run on standard output, instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Supervisor {
    /// XenStore's socket.
    #[arg(long)]
    pub(crate) store: PathBuf,
    /// The mocked hypervisor's socket.
    #[arg(long)]
    pub(crate) hypervisor: PathBuf,
    /// Where to listen for control requests.
    #[arg(long)]
    pub(crate) control: PathBuf,
    /// Storage cores.
    #[arg(long)]
    pub(crate) workers: u32,
}

/// [`Mode`] by fio's names.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ModeName {
    Read,
    Write,
    #[value(name = "randread")]
    RandRead,
    #[value(name = "randwrite")]
    RandWrite,
    #[value(name = "randrw")]
    RandRw,
}

impl From<ModeName> for Mode {
    fn from(name: ModeName) -> Self {
        match name {
            ModeName::Read => Self::Read,
            ModeName::Write => Self::Write,
            ModeName::RandRead => Self::RandRead,
            ModeName::RandWrite => Self::RandWrite,
            ModeName::RandRw => Self::RandRw,
        }
    }
}

fn profile(name: &str) -> Result<&'static Profile, String> {
    Profile::named(name).ok_or_else(|| {
        let names: Vec<&str> = Profile::all().iter().map(|profile| profile.name).collect();
        format!("expected one of {}", names.join(", "))
    })
}

fn number<const LEAST: u32, const MOST: u32>(text: &str) -> Result<u32, String> {
    let number = text.parse().ok();
    number
        .filter(|number| (LEAST..=MOST).contains(number))
        .ok_or_else(|| format!("expected a number from {LEAST} to {MOST}"))
}

/// A number of bytes with an optional suffix, powers of 1024.
fn bytes(text: &str) -> Result<u64, String> {
    let expected =
        || "expected a number of bytes above 0, for example 4096, 4k, 64M or 1G".to_owned();
    let (digits, shift) = match text.char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| expected())?;
    number
        .checked_mul(1 << shift)
        .filter(|&value| value > 0)
        .ok_or_else(expected)
}

/// [`bytes`] in whole sectors.
fn block_size(text: &str) -> Result<u64, String> {
    match bytes(text)? {
        value if value.is_multiple_of(512) => Ok(value),
        _ => Err("expected a multiple of 512".into()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 86_400.0 => Ok(Duration::from_secs_f64(value)),
        _ => Err("expected seconds above 0, at most 86400".into()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_and_times() {
        assert_eq!(bytes("4k"), Ok(4096));
        assert_eq!(bytes("3G"), Ok(3 << 30));
        assert_eq!(block_size("1536"), Ok(1536));
        for bad in [
            "",
            "k",
            "0",
            "-1",
            "4x",
            "1.5M",
            "99999999999999999999",
            "17179869184G",
        ] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
        assert!(block_size("1000").is_err());
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["0", "-1", "NaN", "inf", "86401", "x"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
