//! The configuration file: what it may say, the defaults, and one line for everything it may not. What
//! the values mean to guests is `supervisor`'s; the shipped example documents each of them.

use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Deserialize;
use serde::de::{self, Deserializer, Unexpected, Visitor};
use xenblk_xenstore::vbd::Kind;
use xenblkd::supervisor::{Limits, MAX_WINDOW_PAGES, MAX_WORKERS, MERGE_ROOM};

/// Read if it exists and no other file is named.
pub(crate) const DEFAULT_PATH: &str = "/etc/xenblkd/xenblkd.toml";

/// Longest file that is read; the example is a tenth of it.
const MAX_BYTES: u64 = 64 << 10;

/// Longest name of the state directory: with `/control` and a NUL it has to fit into a socket's address, of
/// 108 bytes (unix(7)).
const MAX_STATE_DIRECTORY: usize = 108 - "/control".len() - 1;

/// Where xenstored listens, in the order they are looked for; the kernel's device is the way of a driver
/// domain, and of a dom0 whose xenstored runs in a domain of its own.
const STORES: [&str; 3] = [
    "/run/xenstored/socket",
    "/var/run/xenstored/socket",
    "/dev/xen/xenbus",
];

/// The whole file. What isn't in it has its default.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Config {
    /// How much is logged.
    pub(crate) log_level: LogLevel,
    /// The socket or device of XenStore; looked for if absent.
    xenstore: Option<AbsolutePath>,
    /// Which backend directories are served.
    backend_kind: BackendKind,
    /// The folder of the lock and the control socket.
    state_directory: StateDirectory,
    /// Storage cores; absent: one less than the CPUs online.
    workers: Option<Bounded<1, MAX_WORKERS>>,
    /// What is offered to guests.
    limits: LimitsTable,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
struct LimitsTable {
    max_queues: Bounded<1, 16>,
    max_ring_page_order: Bounded<0, 4>,
    max_indirect_segments: Bounded<11, 256>,
    bounce_kib_per_ring: Bounded<1024, 1_048_576>,
    max_persistent_grants: Bounded<0, 4096>,
    persistent_window_pages: Bounded<64, MAX_WINDOW_PAGES>,
    persistent_purge_percent: Bounded<1, 100>,
    persistent_idle_seconds: Bounded<0, 86_400>,
    maptrack_entries: Bounded<0, 16_777_216>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            log_level: LogLevel(tracing::Level::INFO),
            xenstore: None,
            backend_kind: BackendKind(Kind::Vbd),
            state_directory: StateDirectory("/run/xenblkd".into()),
            workers: None,
            limits: LimitsTable::default(),
        }
    }
}

impl Default for LimitsTable {
    fn default() -> Self {
        let limits = Limits::default();
        let kib = u32::try_from(limits.bounce_bytes >> 10).unwrap_or(u32::MAX);
        Self {
            max_queues: Bounded(limits.max_queues),
            max_ring_page_order: Bounded(limits.max_ring_page_order),
            max_indirect_segments: Bounded(u32::from(limits.max_indirect_segments)),
            bounce_kib_per_ring: Bounded(kib),
            max_persistent_grants: Bounded(limits.max_persistent_grants),
            persistent_window_pages: Bounded(limits.persistent_window_pages),
            persistent_purge_percent: Bounded(limits.persistent_purge_percent),
            persistent_idle_seconds: Bounded(limits.persistent_idle_seconds),
            maptrack_entries: Bounded(limits.maptrack_entries),
        }
    }
}

impl Config {
    /// From `named`, or from the usual place. Only the latter may be missing.
    pub(crate) fn load(named: Option<&Path>) -> Result<Self, ConfigError> {
        let path = named.unwrap_or(Path::new(DEFAULT_PATH));
        match read(path) {
            Ok(text) => Self::parse(path, &text),
            Err(error) if error.kind() == io::ErrorKind::NotFound && named.is_none() => {
                Ok(Self::default())
            }
            Err(error) => Err(ConfigError::Unreadable {
                path: path.to_owned(),
                error,
            }),
        }
    }

    /// Where the file is said to be matters to errors only.
    fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text).map_err(|error| {
            let before = error
                .span()
                .and_then(|span| text.get(..span.start))
                .unwrap_or_default();
            // The parser's message may have lines of its own ("expected ..."); ours is one line.
            let problem = error.message().trim().replace('\n', ", ");
            ConfigError::Wrong {
                path: path.to_owned(),
                line: before.matches('\n').count() + 1,
                problem,
            }
        })?;
        let window = config.limits.persistent_window_pages.0;
        let least = config.limits.max_persistent_grants.0 + MERGE_ROOM;
        if window < least {
            return Err(ConfigError::SmallWindow {
                path: path.to_owned(),
                window,
                least,
            });
        }
        Ok(config)
    }

    /// XenStore's socket or device. With nothing configured, the first that exists below `root`; the
    /// first of all if none does, so that messages name a path.
    pub(crate) fn xenstore(&self, root: &Path) -> PathBuf {
        if let Some(AbsolutePath(path)) = &self.xenstore {
            return path.clone();
        }
        let exists = |path: &&str| root.join(path.trim_start_matches('/')).exists();
        STORES.into_iter().find(exists).unwrap_or(STORES[0]).into()
    }

    /// Which backend directories are served.
    pub(crate) fn kind(&self) -> Kind {
        self.backend_kind.0
    }

    /// The folder of the lock and the control socket.
    pub(crate) fn state_directory(&self) -> &Path {
        &self.state_directory.0
    }

    /// Where `status` asks.
    pub(crate) fn control(&self) -> PathBuf {
        self.state_directory().join("control")
    }

    /// Storage cores.
    pub(crate) fn workers(&self) -> u32 {
        let cpus = || std::thread::available_parallelism().map_or(1, usize::from);
        let cores = || {
            u32::try_from(cpus() - 1)
                .unwrap_or(MAX_WORKERS)
                .clamp(1, MAX_WORKERS)
        };
        self.workers.map_or_else(cores, |workers| workers.0)
    }

    /// What is offered to guests.
    pub(crate) fn limits(&self) -> Limits {
        let table = &self.limits;
        Limits {
            max_queues: table.max_queues.0,
            max_ring_page_order: table.max_ring_page_order.0,
            max_indirect_segments: u16::try_from(table.max_indirect_segments.0).unwrap_or(u16::MAX),
            bounce_bytes: u64::from(table.bounce_kib_per_ring.0) << 10,
            max_persistent_grants: table.max_persistent_grants.0,
            persistent_window_pages: table.persistent_window_pages.0,
            persistent_purge_percent: table.persistent_purge_percent.0,
            persistent_idle_seconds: table.persistent_idle_seconds.0,
            maptrack_entries: table.maptrack_entries.0,
        }
    }

    /// Keys that `new` changes and that a running daemon can't take up.
    pub(crate) fn needs_restart(&self, new: &Self) -> Vec<&'static str> {
        let changed = [
            ("xenstore", self.xenstore != new.xenstore),
            ("backend-kind", self.backend_kind != new.backend_kind),
            (
                "state-directory",
                self.state_directory != new.state_directory,
            ),
            ("workers", self.workers() != new.workers()),
        ];
        changed
            .into_iter()
            .filter(|(_, changed)| *changed)
            .map(|(key, _)| key)
            .collect()
    }
}

/// The text of a file that may be anything, a device without end included.
fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    fs::File::open(path)?
        .take(MAX_BYTES + 1)
        .read_to_string(&mut text)?;
    if text.len() as u64 > MAX_BYTES {
        let reason = format!("it is longer than {MAX_BYTES} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, reason));
    }
    Ok(text)
}

/// Why there is no configuration. One line each.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("cannot read {}: {error}; expected a readable TOML file", path.display())]
    Unreadable { path: PathBuf, error: io::Error },
    #[error(
        "{}: persistent-window-pages is {window}, expected at least {least}: max-persistent-grants and \
         {MERGE_ROOM} more",
        path.display()
    )]
    SmallWindow {
        path: PathBuf,
        window: u32,
        least: u32,
    },
    #[error("{}:{line}: {problem}", path.display())]
    Wrong {
        path: PathBuf,
        line: usize,
        problem: String,
    },
}

/// `error`, `warn`, `info`, `debug` or `trace`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogLevel(pub(crate) tracing::Level);

impl LogLevel {
    const NAMES: [&str; 5] = ["error", "warn", "info", "debug", "trace"];
}

impl FromStr for LogLevel {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str = "expected error, warn, info, debug or trace";
        // tracing's own parser takes numbers and capitals too; one spelling is enough.
        if !Self::NAMES.contains(&text) {
            return Err(EXPECTED);
        }
        text.parse().map(Self).map_err(|_| EXPECTED)
    }
}

impl fmt::Display for LogLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.as_str().to_ascii_lowercase())
    }
}

impl<'de> Deserialize<'de> for LogLevel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let expected = "error, warn, info, debug or trace";
        text.parse()
            .map_err(|_| de::Error::invalid_value(Unexpected::Str(&text), &expected))
    }
}

/// `vbd` or `vbd3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BackendKind(Kind);

impl<'de> Deserialize<'de> for BackendKind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let known = [Kind::Vbd, Kind::Vbd3];
        if let Some(kind) = known.into_iter().find(|kind| kind.as_str() == text) {
            return Ok(Self(kind));
        }
        let expected: &dyn de::Expected = if text == "qdisk" {
            &"vbd or vbd3: for a qdisk, libxl starts QEMU, which would serve the same disk"
        } else {
            &"vbd or vbd3"
        };
        Err(de::Error::invalid_value(Unexpected::Str(&text), expected))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct AbsolutePath(PathBuf);

impl<'de> Deserialize<'de> for AbsolutePath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        if !text.starts_with('/') || text.contains('\0') {
            return Err(de::Error::invalid_value(
                Unexpected::Str(&text),
                &"an absolute path",
            ));
        }
        Ok(Self(text.into()))
    }
}

/// An absolute path short enough for the socket in it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct StateDirectory(PathBuf);

impl<'de> Deserialize<'de> for StateDirectory {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let AbsolutePath(path) = AbsolutePath::deserialize(deserializer)?;
        let length = path.as_os_str().len();
        if length > MAX_STATE_DIRECTORY {
            let expected = format!(
                "an absolute path of at most {MAX_STATE_DIRECTORY} bytes, for a socket's is short"
            );
            return Err(de::Error::invalid_length(length, &expected.as_str()));
        }
        Ok(Self(path))
    }
}

/// An integer from `MIN` to `MAX`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bounded<const MIN: u32, const MAX: u32>(u32);

impl<'de, const MIN: u32, const MAX: u32> Deserialize<'de> for Bounded<MIN, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Range<const MIN: u32, const MAX: u32>;
        impl<const MIN: u32, const MAX: u32> Visitor<'_> for Range<MIN, MAX> {
            type Value = u32;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "an integer from {MIN} to {MAX}")
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<u32, E> {
                let fits = u32::try_from(value)
                    .ok()
                    .filter(|value| (MIN..=MAX).contains(value));
                fits.ok_or_else(|| E::invalid_value(Unexpected::Signed(value), &self))
            }
        }
        deserializer.deserialize_i64(Range::<MIN, MAX>).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHIPPED: &str = include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../packaging/xenblkd.toml"
    ));

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(Path::new("F"), text).map_err(|error| error.to_string())
    }

    #[test]
    fn an_empty_file_is_the_defaults() {
        let config = parse("").unwrap();
        assert_eq!(config, Config::default());
        assert_eq!(config.limits(), Limits::default());
        assert_eq!(config.control(), Path::new("/run/xenblkd/control"));
    }

    /// Every key of the example is commented out with its default: once as shipped, once uncommented.
    #[test]
    fn the_shipped_example_documents_the_defaults() {
        assert_eq!(parse(SHIPPED).unwrap(), Config::default());
        let live: String = SHIPPED
            .lines()
            .map(|line| match line.strip_prefix('#') {
                Some(setting) if setting.starts_with(|c: char| c.is_ascii_lowercase()) => setting,
                _ => line,
            })
            .flat_map(|line| [line, "\n"])
            .collect();
        let mut config = parse(&live).unwrap();
        // These two are looked for and counted where they are absent.
        assert_eq!(config.xenstore.take().unwrap().0, Path::new(STORES[0]));
        assert_eq!(config.workers.take(), Some(Bounded(3)));
        assert_eq!(config, Config::default());
        let keys = live
            .lines()
            .filter(|line| !line.starts_with('#') && line.contains('='));
        assert_eq!(
            keys.count(),
            14,
            "a key is missing from the example, or from this count"
        );
    }

    #[test]
    fn values_arrive() {
        let config = parse(
            "log-level = \"debug\"\nxenstore = \"/x\"\nbackend-kind = \"vbd3\"\nstate-directory = \"/s\"\nworkers = 2\n[limits]\n\
             max-queues = 3\nmax-ring-page-order = 0\nmax-indirect-segments = 32\nbounce-kib-per-ring = 4096\n\
             max-persistent-grants = 100\npersistent-window-pages = 132\npersistent-purge-percent = 50\n\
             persistent-idle-seconds = 0\nmaptrack-entries = 1000\n",
        )
        .unwrap();
        assert_eq!(config.log_level.to_string(), "debug");
        assert_eq!(config.xenstore(Path::new("/")), Path::new("/x"));
        assert_eq!(config.kind(), Kind::Vbd3);
        assert_eq!(config.state_directory(), Path::new("/s"));
        assert_eq!(config.workers(), 2);
        let expected = Limits {
            max_queues: 3,
            max_ring_page_order: 0,
            max_indirect_segments: 32,
            bounce_bytes: 4 << 20,
            max_persistent_grants: 100,
            persistent_window_pages: 132,
            persistent_purge_percent: 50,
            persistent_idle_seconds: 0,
            maptrack_entries: 1000,
        };
        assert_eq!(config.limits(), expected);
    }

    #[test]
    fn limits_of_persistent_grants_are_checked() {
        let cases = [
            (
                "[limits]\nmax-persistent-grants = 4097",
                "F:2: invalid value: integer `4097`, expected an integer from 0 to 4096",
            ),
            (
                "[limits]\npersistent-purge-percent = 0",
                "F:2: invalid value: integer `0`, expected an integer from 1 to 100",
            ),
            (
                "[limits]\npersistent-idle-seconds = 86401",
                "F:2: invalid value: integer `86401`, expected an integer from 0 to 86400",
            ),
            (
                "[limits]\nmaptrack-entries = -1",
                "F:2: invalid value: integer `-1`, expected an integer from 0 to 16777216",
            ),
            (
                "[limits]\npersistent-window-pages = 40000",
                "F:2: invalid value: integer `40000`, expected an integer from 64 to 32768",
            ),
            (
                "[limits]\npersistent-window-pages = 1087",
                "F: persistent-window-pages is 1087, expected at least 1088: max-persistent-grants and 32 more",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(parse(text).unwrap_err(), expected, "{text:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_said_with_line_and_expectation() {
        let cases = [
            (
                "log-level = \"loud\"",
                "F:1: invalid value: string \"loud\", expected error, warn, info, debug or trace",
            ),
            (
                "\n\nworker = 2",
                "F:3: unknown field `worker`, expected one of `log-level`, `xenstore`, `backend-kind`, `state-directory`, `workers`, `limits`",
            ),
            (
                "workers = 0",
                "F:1: invalid value: integer `0`, expected an integer from 1 to 256",
            ),
            (
                "workers = -1",
                "F:1: invalid value: integer `-1`, expected an integer from 1 to 256",
            ),
            (
                "workers = \"2\"",
                "F:1: invalid type: string \"2\", expected an integer from 1 to 256",
            ),
            (
                "xenstore = \"socket\"",
                "F:1: invalid value: string \"socket\", expected an absolute path",
            ),
            (
                "[limits]\nmax-ring-page-order = 5",
                "F:2: invalid value: integer `5`, expected an integer from 0 to 4",
            ),
            (
                "[limits]\nmax-queues = 17",
                "F:2: invalid value: integer `17`, expected an integer from 1 to 16",
            ),
            (
                "[limits]\nmax-indirect-segments = 257",
                "F:2: invalid value: integer `257`, expected an integer from 11 to 256",
            ),
            (
                "[limits]\nbounce-kib-per-ring = 4",
                "F:2: invalid value: integer `4`, expected an integer from 1024 to 1048576",
            ),
            (
                "[limit]\n",
                "F:1: unknown field `limit`, expected one of `log-level`, `xenstore`, `backend-kind`, `state-directory`, `workers`, `limits`",
            ),
            (
                "backend-kind = \"tap\"",
                "F:1: invalid value: string \"tap\", expected vbd or vbd3",
            ),
            (
                "backend-kind = \"qdisk\"",
                "F:1: invalid value: string \"qdisk\", expected vbd or vbd3: for a qdisk, libxl starts QEMU, \
                 which would serve the same disk",
            ),
            ("workers = 1\nworkers = 1", "F:2: duplicate key"),
        ];
        for (text, expected) in cases {
            assert_eq!(parse(text).unwrap_err(), expected, "{text:?}");
        }
        let unfinished = parse("workers = 1\nlog-level = ").unwrap_err();
        assert!(
            unfinished.starts_with("F:2: ") && !unfinished.contains('\n'),
            "{unfinished}"
        );
    }

    #[test]
    fn only_the_default_file_may_be_missing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("none.toml");
        let error = Config::load(Some(&path)).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("cannot read {}: No such file", path.display())),
            "{error}"
        );
    }

    #[test]
    fn a_file_may_be_anything() {
        let folder = tempfile::tempdir().unwrap();
        let garbage = folder.path().join("garbage");
        fs::write(&garbage, [0xff, 0, 0xfe]).unwrap();
        for (path, expected) in [
            (folder.path(), "Is a directory"),
            (Path::new("/dev/zero"), "it is longer than 65536 bytes"),
            (Path::new("/dev/null/x"), "Not a directory"),
            (&garbage, "stream did not contain valid UTF-8"),
        ] {
            let error = Config::load(Some(path)).unwrap_err().to_string();
            let start = format!("cannot read {}: {expected}", path.display());
            assert!(error.starts_with(&start), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn the_state_directory_has_room_for_a_socket() {
        let with = |length: usize| format!("state-directory = \"/{}\"", "x".repeat(length - 1));
        assert_eq!(
            parse(&with(100)).unwrap_err(),
            "F:1: invalid length 100, expected an absolute path of at most 99 bytes, for a socket's is short"
        );
        let control = parse(&with(99)).unwrap().control();
        std::os::unix::net::SocketAddr::from_pathname(control).unwrap();
    }

    #[test]
    fn xenstore_is_the_first_that_exists() {
        let root = tempfile::tempdir().unwrap();
        let config = Config::default();
        assert_eq!(config.xenstore(root.path()), Path::new(STORES[0]));
        fs::create_dir_all(root.path().join("dev/xen")).unwrap();
        fs::write(root.path().join("dev/xen/xenbus"), "").unwrap();
        assert_eq!(config.xenstore(root.path()), Path::new("/dev/xen/xenbus"));
        fs::create_dir_all(root.path().join("run/xenstored")).unwrap();
        fs::write(root.path().join("run/xenstored/socket"), "").unwrap();
        assert_eq!(
            config.xenstore(root.path()),
            Path::new("/run/xenstored/socket")
        );
    }

    #[test]
    fn a_reload_names_what_it_cannot_change() {
        let old = parse("workers = 1").unwrap();
        let new = parse(
            "workers = 2\nlog-level = \"debug\"\nstate-directory = \"/x\"\nbackend-kind = \"vbd3\"",
        )
        .unwrap();
        assert_eq!(
            old.needs_restart(&new),
            ["backend-kind", "state-directory", "workers"]
        );
        assert_eq!(old.needs_restart(&old), [""; 0]);
    }
}
