//! The target of one device: chosen by the backend directory, opened off the supervisor's thread, kept
//! open from one frontend to the next.

use std::sync::Arc;
use std::time::Instant;

use tokio::task::JoinHandle;
use xenblk_xenstore::vbd::{BackendKeys, Kind};
use xenblk_xenstore::xenbus::Target;

use crate::target::{self, OpenMode, OpenedTarget, TargetSpec};

/// The hotplug script that leaves the target to us.
const OUR_SCRIPT: &str = "block-xenblkd";

/// Where the target is to be found.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Source {
    /// `params`, as it stands.
    Params(Option<String>),
    /// Somebody else's script has yet to set it up.
    Awaited,
    /// The script has failed, for this reason: the toolstack has given the disk up.
    Refused(String),
    /// The block device such a script has set up, and where it says that is.
    Device {
        number: (u32, u32),
        path: Option<String>,
    },
}

impl Source {
    fn of(kind: Kind, keys: &BackendKeys) -> Self {
        // xapi's scripts are not named in the directory.
        let scripted = keys.script.is_some() || kind == Kind::Vbd3;
        match keys.hotplug_status.as_deref() {
            Some("error") if scripted => Self::Refused(
                keys.hotplug_error
                    .clone()
                    .unwrap_or_else(|| "the hotplug script failed without a reason".to_owned()),
            ),
            _ if !scripted || has_our_script(keys) => Self::Params(keys.params.clone()),
            Some("connected") => {
                match (keys.physical_device, &keys.physical_device_path) {
                    (Some(number), path) => Self::Device {
                        number,
                        path: path.clone(),
                    },
                    (None, Some(path)) => Self::Params(Some(format!("raw:{path}"))),
                    // It had nothing to set up.
                    (None, None) => Self::Params(keys.params.clone()),
                }
            }
            _ => Self::Awaited,
        }
    }
}

fn has_our_script(keys: &BackendKeys) -> bool {
    keys.script.as_deref() == Some(OUR_SCRIPT)
}

/// Whether our script has yet to run: what is wrong with the target until then, it tells the toolstack.
pub(super) fn is_script_to_come(keys: &BackendKeys) -> bool {
    has_our_script(keys) && keys.hotplug_status.is_none()
}

/// Whether InitWait may be shown, as far as the toolstack's order goes: libxl runs its scripts only then,
/// xapi has run its own before, and hangs if InitWait is there first.
pub(super) fn is_set_up(kind: Kind, keys: &BackendKeys) -> bool {
    kind == Kind::Vbd || keys.hotplug_status.as_deref() == Some("connected")
}

/// A device's target.
#[derive(Debug)]
pub(super) struct Disk {
    /// As it was (or is being) opened; `true` for read-only.
    chosen: Option<(Source, bool)>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Not wanted, or no medium.
    Absent,
    Opening {
        task: JoinHandle<Result<OpenedTarget, String>>,
        since: Instant,
    },
    Open(Arc<OpenedTarget>),
    /// One line for the administrator.
    Failed(String),
}

impl Disk {
    pub(super) fn new() -> Self {
        Self {
            chosen: None,
            stage: Stage::Absent,
        }
    }

    /// Begins to open what the directory names, unless that is what there is already.
    pub(super) fn choose(&mut self, kind: Kind, keys: &BackendKeys) {
        let choice = (Source::of(kind, keys), keys.readonly);
        if self.chosen.as_ref() == Some(&choice) {
            return;
        }
        self.stage = match choice.0.clone() {
            Source::Params(Some(params)) => open(params, None, keys.readonly),
            Source::Params(None) if keys.cdrom => Stage::Absent,
            Source::Params(None) => {
                Stage::Failed("params is missing, expected what to serve".to_owned())
            }
            Source::Awaited => Stage::Absent,
            Source::Refused(reason) => Stage::Failed(reason),
            Source::Device { number, path } => {
                let (major, minor) = number;
                let path = path.unwrap_or_else(|| format!("/dev/block/{major}:{minor}"));
                open(format!("raw:{path}"), Some(number), keys.readonly)
            }
        };
        self.chosen = Some(choice);
    }

    /// Closes it, or gives up opening it.
    pub(super) fn release(&mut self) {
        *self = Self::new();
    }

    /// Lets a target that could not be opened be tried again.
    pub(super) fn forgive(&mut self) {
        if matches!(self.stage, Stage::Failed(_)) {
            self.release();
        }
    }

    /// Completes when an open that is under way has ended, never otherwise. Cancellation-safe.
    pub(super) async fn opened(&mut self) {
        let Stage::Opening { task, .. } = &mut self.stage else {
            return std::future::pending().await;
        };
        self.stage = match task.await {
            Ok(Ok(target)) => Stage::Open(Arc::new(target)),
            Ok(Err(reason)) => Stage::Failed(reason),
            Err(error) => Stage::Failed(format!("opening the target: {error}")),
        };
    }

    /// As the XenBus rules see it.
    pub(super) fn readiness(&self) -> Target {
        match &self.stage {
            Stage::Absent | Stage::Opening { .. } => Target::NotYet,
            Stage::Open(_) => Target::Ready,
            Stage::Failed(_) => Target::Failed,
        }
    }

    /// Since when it is being opened, if it is.
    pub(super) fn opening_since(&self) -> Option<Instant> {
        if let Stage::Opening { since, .. } = &self.stage {
            Some(*since)
        } else {
            None
        }
    }

    /// The target, if open.
    pub(super) fn target(&self) -> Option<&Arc<OpenedTarget>> {
        if let Stage::Open(target) = &self.stage {
            Some(target)
        } else {
            None
        }
    }

    /// Why there is none.
    pub(super) fn failure(&self) -> Option<&str> {
        if let Stage::Failed(reason) = &self.stage {
            Some(reason)
        } else {
            None
        }
    }
}

/// Opens off this thread what `text` names, and with `number` sees to it that it is that device: paths may
/// be given to another one at any time.
fn open(text: String, number: Option<(u32, u32)>, readonly: bool) -> Stage {
    let task = tokio::task::spawn_blocking(move || {
        let spec = TargetSpec::parse(&text).map_err(|error| error.to_string())?;
        let target =
            target::open(&spec, OpenMode { readonly }).map_err(|error| error.to_string())?;
        match number {
            None => Ok(target),
            Some(number) => verify(target, number),
        }
    });
    Stage::Opening {
        task,
        since: Instant::now(),
    }
}

fn verify(target: OpenedTarget, number: (u32, u32)) -> Result<OpenedTarget, String> {
    let found = target
        .block_device()
        .map_err(|error| format!("{target}: cannot stat it: {error}"))?;
    if found == Some(number) {
        return Ok(target);
    }
    let found = found.map_or_else(
        || "no block device".to_owned(),
        |(major, minor)| format!("block device {major}:{minor}"),
    );
    let (major, minor) = number;
    Err(format!(
        "{target}: is {found}, expected {major}:{minor}, which the hotplug script wrote to physical-device"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(
        script: Option<&str>,
        status: Option<&str>,
        device: Option<(u32, u32)>,
        path: Option<&str>,
    ) -> Source {
        source_of(Kind::Vbd, script, status, device, path)
    }

    fn source_of(
        kind: Kind,
        script: Option<&str>,
        status: Option<&str>,
        device: Option<(u32, u32)>,
        path: Option<&str>,
    ) -> Source {
        let keys = BackendKeys {
            frontend: "/f".to_owned(),
            params: Some("P".to_owned()),
            readonly: false,
            discard_enable: true,
            cdrom: false,
            removable: false,
            script: script.map(str::to_owned),
            hotplug_status: status.map(str::to_owned),
            physical_device: device,
            physical_device_path: path.map(str::to_owned),
            hotplug_error: status
                .filter(|status| *status == "error")
                .map(|_| "why".to_owned()),
        };
        Source::of(kind, &keys)
    }

    #[test]
    fn a_foreign_script_is_waited_for_and_ours_is_not() {
        let params = |text: &str| Source::Params(Some(text.to_owned()));
        let ours = Some(OUR_SCRIPT);
        assert_eq!(source(None, None, None, None), params("P"));
        assert_eq!(source(ours, None, None, None), params("P"));
        // Our script's own report, for QEMU, changes nothing.
        assert_eq!(
            source(ours, Some("connected"), Some((8, 0)), Some("/dev/sda")),
            params("P")
        );
        let foreign = Some("block");
        assert_eq!(source(foreign, None, None, None), Source::Awaited);
        assert_eq!(
            source(foreign, None, Some((7, 0)), Some("/dev/loop0")),
            Source::Awaited
        );
        let refused = Source::Refused("why".to_owned());
        assert_eq!(source(foreign, Some("error"), None, None), refused);
        assert_eq!(source(ours, Some("error"), None, None), refused);
        let device = |path: Option<&str>| Source::Device {
            number: (7, 0),
            path: path.map(str::to_owned),
        };
        let connected = Some("connected");
        assert_eq!(
            source(foreign, connected, Some((7, 0)), Some("/dev/loop0")),
            device(Some("/dev/loop0"))
        );
        assert_eq!(source(foreign, connected, Some((7, 0)), None), device(None));
        assert_eq!(
            source(foreign, connected, None, Some("/a:b")),
            params("raw:/a:b")
        );
        assert_eq!(source(foreign, connected, None, None), params("P"));
    }

    #[test]
    fn xapis_scripts_run_first_and_are_named_nowhere() {
        let of = |status, device, path| source_of(Kind::Vbd3, None, status, device, path);
        assert_eq!(of(None, None, None), Source::Awaited);
        let (number, path) = ((253, 2), None);
        assert_eq!(
            of(Some("connected"), Some(number), None),
            Source::Device { number, path }
        );
        assert_eq!(
            of(Some("connected"), None, None),
            Source::Params(Some("P".to_owned()))
        );
        assert_eq!(
            of(Some("error"), None, None),
            Source::Refused("why".to_owned())
        );
    }

    #[test]
    fn what_is_not_the_scripts_device_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(512).unwrap();
        let spec = TargetSpec::parse(file.path().to_str().unwrap()).unwrap();
        let target = target::open(&spec, OpenMode { readonly: true }).unwrap();
        let reason = verify(target, (7, 3)).unwrap_err();
        let expected =
            ": is no block device, expected 7:3, which the hotplug script wrote to physical-device";
        assert!(reason.ends_with(expected), "{reason}");
    }
}
