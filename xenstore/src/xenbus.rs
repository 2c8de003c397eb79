//! The XenBus handshake as a pure function: from what both `state` nodes say to the next thing to do.
//!
//! Facts in, one action out; the daemon carries it out, reads everything again and asks again until the
//! answer is [`Action::Wait`] or [`Action::Remove`]. Nothing here depends on which change woke it, so
//! merged, repeated or lost watch events do no harm.
//!
//! Rules (xenbus.h, and what frontends rely on): a frontend may show 3 or 4 at any time and both mean
//! "my parameters are published"; Closing is answered by Closing and Closed by Closed from every state;
//! after Closed the frontend may start again with Initialising as long as `online` is 1; a backend asked
//! to close before it was ever connected goes to Closed by itself.

use std::fmt;

/// `enum xenbus_state`, stored as a decimal string.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// 0, and whatever is not a state at all: a guest can write anything.
    Unknown = 0,
    /// 1: the directory is made, nothing is negotiated.
    Initialising = 1,
    /// 2: the backend's transport features are published.
    InitWait = 2,
    /// 3: the frontend's rings and event channels are published.
    Initialised = 3,
    /// 4: in use.
    Connected = 4,
    /// 5: the other side is asked to let go.
    Closing = 5,
    /// 6: nothing is mapped, bound or open any more.
    Closed = 6,
    /// 7: unused by block devices.
    Reconfiguring = 7,
    /// 8: unused by block devices.
    Reconfigured = 8,
}

impl State {
    /// All states, in the order of their numbers.
    pub const ALL: [Self; 9] = [
        Self::Unknown,
        Self::Initialising,
        Self::InitWait,
        Self::Initialised,
        Self::Connected,
        Self::Closing,
        Self::Closed,
        Self::Reconfiguring,
        Self::Reconfigured,
    ];

    /// From a `state` node. Never fails: what is not exactly a known number is [`State::Unknown`].
    #[must_use]
    pub fn parse(value: &[u8]) -> Self {
        let [digit] = value else { return Self::Unknown };
        let index = usize::from(digit.wrapping_sub(b'0'));
        Self::ALL.get(index).copied().unwrap_or(Self::Unknown)
    }

    /// The number, as it stands in the store.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "0",
            Self::Initialising => "1",
            Self::InitWait => "2",
            Self::Initialised => "3",
            Self::Connected => "4",
            Self::Closing => "5",
            Self::Closed => "6",
            Self::Reconfiguring => "7",
            Self::Reconfigured => "8",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({self:?})", self.as_str())
    }
}

/// Whether the disk behind the device can be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    /// Not opened yet.
    NotYet,
    /// Open, geometry known.
    Ready,
    /// Could not be opened, or no longer works.
    Failed,
}

/// Everything the next step depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Situation {
    /// The backend's `state`; `None`: its directory is gone.
    pub ours: Option<State>,
    /// The frontend's `state`; `None`: no such node, or its domain no longer exists.
    pub theirs: Option<State>,
    /// The backend's `online`: 0 when the toolstack is taking the device away.
    pub online: bool,
    /// The disk.
    pub target: Target,
    /// Workers hold rings of this device: pages mapped, ports bound.
    pub connected: bool,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Nothing, until something changes.
    Wait,
    /// Publish the transport keys and state InitWait.
    PublishInitWait,
    /// Read the frontend's keys, attach its rings, publish the device keys and state Connected.
    Connect,
    /// Write state Closing. Rings that are attached go on being served: a frontend still using the disk
    /// may stay connected for as long as it likes.
    Close,
    /// Finish what was consumed, unmap everything, close the ports (none of it if nothing is attached),
    /// then write `then`. With [`State::Closed`] and `online` 0 the target is released before that too:
    /// the toolstack may reuse the disk as soon as it sees Closed.
    Disconnect {
        /// [`State::Closed`] or [`State::InitWait`]; with InitWait publish the transport keys too.
        then: State,
    },
    /// The directory is gone: let go of everything, write nothing, forget the device.
    Remove,
}

/// The next action. Total: defined for every situation, whoever caused it.
#[must_use]
pub fn step(now: Situation) -> Action {
    let Some(ours) = now.ours else {
        return Action::Remove;
    };
    match now.theirs {
        Some(State::Closing) => frontend_closing(ours, now),
        Some(State::Closed) => closed(ours, now),
        None => frontend_absent(ours, now),
        Some(State::Initialising) => frontend_initialising(ours, now),
        Some(State::Initialised | State::Connected) => frontend_ready(ours, now),
        Some(State::Unknown | State::InitWait | State::Reconfiguring | State::Reconfigured) => {
            frontend_undefined(ours, now)
        }
    }
}

/// A frontend may open with Closing, against any state of ours, and spin until it is answered. Not
/// from Closed when the device is going away: the toolstack has seen Closed already.
fn frontend_closing(ours: State, now: Situation) -> Action {
    match ours {
        State::Closing => Action::Wait,
        State::Closed if now.connected => Action::Disconnect {
            then: State::Closed,
        },
        State::Closed if !now.online => Action::Wait,
        _ => Action::Close,
    }
}

fn closed(ours: State, now: Situation) -> Action {
    if ours == State::Closed && !now.connected {
        Action::Wait
    } else {
        Action::Disconnect {
            then: State::Closed,
        }
    }
}

/// Before a connection the frontend's directory may come later; after one its domain is dead.
fn frontend_absent(ours: State, now: Situation) -> Action {
    match ours {
        State::Unknown | State::Initialising | State::InitWait if !now.connected => {
            start(ours, now)
        }
        _ => closed(ours, now),
    }
}

/// The frontend has no rings (any more).
fn frontend_initialising(ours: State, now: Situation) -> Action {
    match ours {
        State::Closing => Action::Disconnect {
            then: State::Closed,
        },
        State::Closed if now.connected => Action::Disconnect {
            then: State::Closed,
        },
        State::Unknown | State::Initialising | State::InitWait if !now.connected => {
            start(ours, now)
        }
        State::Closed if now.online && now.target != Target::Failed => Action::PublishInitWait,
        State::Closed => Action::Wait,
        // It started over without closing: its old rings are dead memory, let go of them.
        _ if now.online => Action::Disconnect {
            then: State::InitWait,
        },
        _ => Action::Disconnect {
            then: State::Closed,
        },
    }
}

/// The frontend's rings are published.
fn frontend_ready(ours: State, now: Situation) -> Action {
    match ours {
        State::Closing => Action::Wait,
        State::Connected if now.connected && now.target != Target::Failed => Action::Wait,
        // Rings without workers: what they are owed is unknown, so they can't be served; or the disk
        // is gone. The frontend is asked to let go.
        State::Connected => Action::Close,
        State::Closed if now.connected => Action::Disconnect {
            then: State::Closed,
        },
        // Somebody else wrote our state: the rings held may not be the ones published now.
        _ if now.connected && now.online => Action::Disconnect {
            then: State::InitWait,
        },
        _ if now.connected => Action::Close,
        State::InitWait if !now.online => Action::Close,
        State::InitWait => match now.target {
            Target::Ready => Action::Connect,
            Target::NotYet => Action::Wait,
            Target::Failed => Action::Close,
        },
        State::Closed if now.online && now.target != Target::Failed => Action::PublishInitWait,
        State::Closed => Action::Wait,
        _ => start(ours, now),
    }
}

/// A value no frontend writes in earnest: keep what there is, finish what was begun.
fn frontend_undefined(ours: State, now: Situation) -> Action {
    match ours {
        State::Closing if !now.connected => Action::Disconnect {
            then: State::Closed,
        },
        State::Closed if now.connected => Action::Disconnect {
            then: State::Closed,
        },
        State::Connected if now.target == Target::Failed || !now.connected => Action::Close,
        State::Closing | State::Closed | State::Connected => Action::Wait,
        _ if now.connected => Action::Close,
        _ => start(ours, now),
    }
}

/// Nothing is connected and the frontend may come: be at InitWait, or give up.
fn start(ours: State, now: Situation) -> Action {
    match (ours, now.target) {
        (_, Target::Failed) => Action::Close,
        (State::InitWait, _) => Action::Wait,
        _ if now.online => Action::PublishInitWait,
        _ => Action::Wait,
    }
}

#[cfg(test)]
#[path = "xenbus_tests.rs"]
mod tests;
