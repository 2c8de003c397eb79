//! Every situation, and the conversations frontends really hold.

use proptest::prelude::*;

use super::*;

fn every_state() -> impl Iterator<Item = Option<State>> + Clone {
    State::ALL.into_iter().map(Some).chain([None])
}

fn every_situation() -> Vec<Situation> {
    let mut all = Vec::new();
    for ours in every_state() {
        for theirs in every_state() {
            for online in [false, true] {
                for target in [Target::NotYet, Target::Ready, Target::Failed] {
                    for connected in [false, true] {
                        all.push(Situation {
                            ours,
                            theirs,
                            online,
                            target,
                            connected,
                        });
                    }
                }
            }
        }
    }
    all
}

/// What the daemon's carrying out of `action` makes of `now`; checks what must hold for every action.
fn apply(now: Situation, action: Action) -> Situation {
    let ready = matches!(now.theirs, Some(State::Initialised | State::Connected));
    match action {
        Action::Wait | Action::Remove => now,
        Action::PublishInitWait => {
            assert!(now.online && !now.connected, "{now:?}");
            assert_ne!(now.target, Target::Failed, "{now:?}");
            Situation {
                ours: Some(State::InitWait),
                ..now
            }
        }
        Action::Connect => {
            assert!(now.online && ready && !now.connected, "{now:?}");
            assert_eq!(
                (now.target, now.ours),
                (Target::Ready, Some(State::InitWait)),
                "{now:?}"
            );
            Situation {
                ours: Some(State::Connected),
                connected: true,
                ..now
            }
        }
        Action::Close => {
            assert_ne!(now.ours, Some(State::Closing), "{now:?}");
            Situation {
                ours: Some(State::Closing),
                ..now
            }
        }
        Action::Disconnect { then } => {
            match then {
                State::Closed => {}
                State::InitWait => assert!(now.online, "{now:?}"),
                _ => panic!("{now:?} → {then}"),
            }
            Situation {
                ours: Some(then),
                connected: false,
                ..now
            }
        }
    }
}

/// Steps until nothing is left to do; a daemon that never comes to rest would spin.
fn settle(start: Situation) -> Situation {
    let mut now = start;
    for _ in 0..5 {
        match step(now) {
            Action::Wait | Action::Remove => return now,
            action => now = apply(now, action),
        }
    }
    panic!("{start:?} does not settle, is at {now:?}");
}

#[test]
fn every_situation_settles() {
    let all = every_situation();
    assert_eq!(all.len(), 1200);
    for now in all {
        let end = settle(now);
        let Some(ours) = end.ours else {
            assert_eq!(step(now), Action::Remove);
            continue;
        };
        assert_ne!(step(now), Action::Remove, "{now:?}");
        // Rings are held in Connected and Closing only.
        let may_hold = matches!(ours, State::Connected | State::Closing);
        assert!(!end.connected || may_hold, "{now:?} → {end:?}");
        // Connected is never left standing without them.
        assert!(
            ours != State::Connected || end.connected,
            "{now:?} → {end:?}"
        );
    }
}

#[test]
fn closing_and_closed_are_answered_from_every_state() {
    for now in every_situation() {
        let (Some(before), Some(theirs)) = (now.ours, now.theirs) else {
            continue;
        };
        let ours = settle(now).ours;
        match theirs {
            // After Closed with online 0 the toolstack has had its answer.
            State::Closing if before == State::Closed && (!now.online || now.connected) => {}
            State::Closing => assert_eq!(ours, Some(State::Closing), "{now:?}"),
            State::Closed => assert_eq!(ours, Some(State::Closed), "{now:?}"),
            State::Initialising if now.online && now.target != Target::Failed => {
                assert_eq!(ours, Some(State::InitWait), "{now:?}");
            }
            _ => {}
        }
    }
}

#[test]
fn states_3_and_4_of_the_frontend_are_the_same() {
    for now in every_situation() {
        let initialised = Situation {
            theirs: Some(State::Initialised),
            ..now
        };
        let connected = Situation {
            theirs: Some(State::Connected),
            ..now
        };
        assert_eq!(step(initialised), step(connected));
    }
}

#[test]
fn going_away_is_never_reversed() {
    for now in every_situation().into_iter().filter(|now| !now.online) {
        let ours = settle(now).ours;
        match now.ours {
            Some(State::Closing) => {
                assert!(
                    matches!(ours, Some(State::Closing | State::Closed)),
                    "{now:?}"
                );
            }
            // The toolstack may have seen it, and deletes the directory.
            Some(State::Closed) => assert_eq!(ours, Some(State::Closed), "{now:?}"),
            _ => {}
        }
    }
}

#[test]
fn a_close_before_any_connection_ends_by_itself() {
    for theirs in [Some(State::Initialising), Some(State::Closed), None] {
        for target in [Target::NotYet, Target::Ready, Target::Failed] {
            let ours = Some(State::Closing);
            let now = Situation {
                ours,
                theirs,
                online: false,
                target,
                connected: false,
            };
            assert_eq!(settle(now).ours, Some(State::Closed), "{now:?}");
        }
    }
}

/// A device whose frontend and toolstack write; returns our state after each of their writes.
struct Device(Situation);

impl Device {
    fn new() -> Self {
        Self(Situation {
            ours: Some(State::Initialising),
            theirs: Some(State::Initialising),
            online: true,
            target: Target::Ready,
            connected: false,
        })
    }

    fn front(&mut self, state: u8) -> (u8, bool) {
        self.0.theirs = Some(State::parse(&[b'0' + state]));
        self.settle()
    }

    fn settle(&mut self) -> (u8, bool) {
        self.0 = settle(self.0);
        (self.0.ours.unwrap() as u8, self.0.connected)
    }
}

#[test]
fn linux_connects_and_is_detached() {
    let mut device = Device::new();
    assert_eq!(device.settle(), (2, false));
    assert_eq!(device.front(3), (4, true));
    assert_eq!(device.front(4), (4, true));
    device.0.online = false;
    device.0.ours = Some(State::Closing);
    assert_eq!(
        device.settle(),
        (5, true),
        "a busy guest goes on using its disk"
    );
    assert_eq!(device.front(5), (5, true));
    assert_eq!(device.front(6), (6, false));
    assert_eq!(device.front(1), (6, false), "no way back when going away");
}

#[test]
fn the_target_may_come_last() {
    let mut device = Device::new();
    device.0.target = Target::NotYet;
    assert_eq!(device.settle(), (2, false));
    assert_eq!(device.front(3), (2, false));
    device.0.target = Target::Ready;
    assert_eq!(device.settle(), (4, true));
}

#[test]
fn kexec_minios_grub_and_windows_get_the_states_they_wait_for() {
    let mut device = Device::new();
    device.settle();
    // Windows begins with Closing against InitWait; kexec and EDK2 end with the same three.
    for (theirs, ours) in [
        (5, (5, false)),
        (6, (6, false)),
        (1, (2, false)),
        (3, (4, true)),
    ] {
        assert_eq!(device.front(theirs), ours);
    }
    for (theirs, ours) in [
        (4, (4, true)),
        (5, (5, true)),
        (6, (6, false)),
        (1, (2, false)),
    ] {
        assert_eq!(device.front(theirs), ours);
    }
    // mini-os jumps to 4; GRUB stays at 3, closes with 6 only and leaves 1 for the next system.
    assert_eq!(device.front(4), (4, true));
    for (theirs, ours) in [
        (6, (6, false)),
        (1, (2, false)),
        (3, (4, true)),
        (6, (6, false)),
    ] {
        assert_eq!(device.front(theirs), ours);
    }
    // From Closed straight to new rings.
    assert_eq!(device.front(4), (4, true));
}

#[test]
fn a_frontend_that_starts_over_without_closing_loses_its_old_rings() {
    let mut device = Device::new();
    assert_eq!(device.front(3), (4, true));
    assert_eq!(device.front(1), (2, false));
    assert_eq!(device.front(3), (4, true));
}

#[test]
fn a_dead_domain_is_let_go_of() {
    let mut device = Device::new();
    assert_eq!(device.front(3), (4, true));
    device.0.theirs = None;
    assert_eq!(device.settle(), (6, false));
    device.0.ours = None;
    assert_eq!(step(device.0), Action::Remove);
}

#[test]
fn a_failed_target_closes_and_stays_closed() {
    let mut device = Device::new();
    assert_eq!(device.front(3), (4, true));
    device.0.target = Target::Failed;
    assert_eq!(device.settle(), (5, true));
    assert_eq!(device.front(6), (6, false));
    assert_eq!(device.front(1), (6, false));
    device.0.target = Target::Ready;
    assert_eq!(device.settle(), (2, false), "the operator mended it");
}

#[test]
fn rings_that_lost_their_worker_are_closed_and_come_back_after_a_reconnect() {
    let mut device = Device::new();
    device.front(4);
    device.0.connected = false;
    assert_eq!(device.settle(), (5, false));
    for (theirs, ours) in [
        (5, (5, false)),
        (6, (6, false)),
        (1, (2, false)),
        (3, (4, true)),
    ] {
        assert_eq!(device.front(theirs), ours);
    }
}

#[test]
fn states_are_parsed_totally() {
    for (index, state) in State::ALL.into_iter().enumerate() {
        assert_eq!(State::parse(state.as_str().as_bytes()), state);
        assert_eq!(state as usize, index);
    }
    for garbage in [
        "",
        "9",
        "x",
        "04",
        "4 ",
        "4\0",
        "-1",
        "/",
        ":",
        "44444444444444444444",
    ] {
        assert_eq!(
            State::parse(garbage.as_bytes()),
            State::Unknown,
            "{garbage:?}"
        );
    }
}

proptest! {
    /// Whatever both sides write and however often we are looked at, the invariants of `apply` and
    /// `settle` hold, and a frontend that plays by the rules at the end is served.
    #[test]
    fn a_hostile_history_does_not_spoil_the_next_frontend(
        history in prop::collection::vec((0_u8..10, any::<bool>(), 0_u8..10), 0..40),
    ) {
        let mut device = Device::new();
        for (theirs, look, ours) in history {
            device.0.theirs = State::ALL.get(usize::from(theirs)).copied();
            // Now and then somebody writes our node.
            if let Some(ours) = State::ALL.get(usize::from(ours) * 4) {
                device.0.ours = Some(*ours);
            }
            if look {
                device.settle();
            }
        }
        device.front(5);
        prop_assert_eq!(device.front(6), (6, false));
        prop_assert_eq!(device.front(1), (2, false));
        prop_assert_eq!(device.front(3), (4, true));
    }
}
