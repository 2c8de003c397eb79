//! The target of one device: chosen by the backend directory, opened off the supervisor's thread, kept
//! open from one frontend to the next.

use std::sync::Arc;
use std::time::Instant;

use tokio::task::JoinHandle;
use xenblk_xenstore::vbd::BackendKeys;
use xenblk_xenstore::xenbus::Target;

use crate::target::{self, OpenMode, OpenedTarget, TargetError, TargetSpec};

/// A device's target.
#[derive(Debug)]
pub(super) struct Disk {
    /// `params` and read-only, as it was (or is being) opened.
    chosen: Option<(Option<String>, bool)>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Not wanted, or no medium.
    Absent,
    Opening {
        task: JoinHandle<Result<OpenedTarget, TargetError>>,
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
        let choice = (keys.params.clone(), keys.readonly);
        if self.chosen.as_ref() == Some(&choice) {
            return;
        }
        self.stage = match &keys.params {
            Some(params) => open(params, keys.readonly),
            None if keys.cdrom => Stage::Absent,
            None => Stage::Failed("params is missing, expected what to serve".to_owned()),
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
            Ok(Err(error)) => Stage::Failed(error.to_string()),
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

fn open(params: &str, readonly: bool) -> Stage {
    match TargetSpec::parse(params) {
        Ok(spec) => {
            let task =
                tokio::task::spawn_blocking(move || target::open(&spec, OpenMode { readonly }));
            Stage::Opening {
                task,
                since: Instant::now(),
            }
        }
        Err(error) => Stage::Failed(error.to_string()),
    }
}
