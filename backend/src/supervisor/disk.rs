//! The target of one device: chosen by the backend directory, opened off the supervisor's thread, kept
//! open from one frontend to the next.

use std::sync::Arc;
use std::time::Instant;

use tokio::task::JoinHandle;
use xenblk_xenstore::vbd::BackendKeys;
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
    /// The block device such a script has set up, and where it says that is.
    Device {
        number: (u32, u32),
        path: Option<String>,
    },
}

impl Source {
    fn of(keys: &BackendKeys) -> Self {
        match (&keys.script, keys.hotplug_status.as_deref()) {
            (None, _) => Self::Params(keys.params.clone()),
            (Some(_), _) if has_our_script(keys) => Self::Params(keys.params.clone()),
            (Some(_), Some("connected")) => {
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
            (Some(_), _) => Self::Awaited,
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
    pub(super) fn choose(&mut self, keys: &BackendKeys) {
        let choice = (Source::of(keys), keys.readonly);
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
        Source::of(&BackendKeys {
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
        })
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
        assert_eq!(source(foreign, Some("error"), None, None), Source::Awaited);
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
