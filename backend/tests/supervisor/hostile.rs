//! What a guest publishes that can't be served: refused for that device alone, said in its error node.

use std::collections::BTreeMap;

use crate::guest::{Guest, PAGE};
use crate::world::{World, error_node};

const XVDA: u32 = 51712;

type Keys = BTreeMap<String, String>;

/// What is wrong, how the good keys of two queues become bad, and what the error has to name.
type Case = (&'static str, fn(&mut Keys), [&'static str; 2]);

fn set(keys: &mut Keys, key: &str, value: &str) {
    keys.insert(key.to_owned(), value.to_owned());
}

const CASES: [Case; 15] = [
    (
        "no port",
        |keys| drop(keys.remove("queue-1/event-channel")),
        ["queue-1/event-channel", "missing"],
    ),
    (
        "no ring",
        |keys| drop(keys.remove("queue-0/ring-ref")),
        ["queue-0/ring-ref", "missing"],
    ),
    (
        "empty ring",
        |keys| set(keys, "queue-0/ring-ref", ""),
        ["queue-0/ring-ref", "missing"],
    ),
    (
        "negative port",
        |keys| set(keys, "queue-0/event-channel", "-1"),
        ["queue-0/event-channel", "-1"],
    ),
    (
        "not decimal",
        |keys| set(keys, "queue-0/ring-ref", "0x8"),
        ["queue-0/ring-ref", "0x8"],
    ),
    (
        "trailing rubbish",
        |keys| set(keys, "queue-0/ring-ref", "8 "),
        ["queue-0/ring-ref", "\"8 \""],
    ),
    (
        "too large",
        |keys| set(keys, "queue-0/ring-ref", "4294967296"),
        ["queue-0/ring-ref", "4294967296"],
    ),
    (
        "no queues",
        |keys| set(keys, "multi-queue-num-queues", "0"),
        ["multi-queue-num-queues", "0"],
    ),
    (
        "many queues",
        |keys| set(keys, "multi-queue-num-queues", "4000000000"),
        ["multi-queue-num-queues", "4000000000"],
    ),
    (
        "huge order",
        |keys| set(keys, "ring-page-order", "31"),
        ["ring-page-order", "31"],
    ),
    (
        "negative order",
        |keys| set(keys, "ring-page-order", "-1"),
        ["ring-page-order", "-1"],
    ),
    (
        "endless order",
        |keys| set(keys, "ring-page-order", "99999999999"),
        ["ring-page-order", "99999999999"],
    ),
    (
        "protocol",
        |keys| set(keys, "protocol", "sparc-abi"),
        ["protocol", "sparc-abi"],
    ),
    (
        "one port twice",
        |keys| {
            let port = keys["queue-0/event-channel"].clone();
            set(keys, "queue-1/event-channel", &port);
        },
        ["queue-1/event-channel", "its own"],
    ),
    (
        "a value full of nonsense",
        |keys| set(keys, "protocol", &"\n\u{1b}[31m".repeat(300)),
        ["protocol", "\\n\\x1b[31m"],
    ),
];

#[tokio::test]
async fn bad_keys_are_refused_for_that_device_alone() {
    let world = World::started().await;
    world.attach(1, XVDA, "memory:1M", "w").await;
    world.attach(2, XVDA, "memory:1M", "w").await;
    let mut good = Guest::new(&world, 2, XVDA).await;
    good.connect(&world, 1, 0).await;
    let mut bad = Guest::new(&world, 1, XVDA).await;
    for (what, spoil, named) in CASES {
        world.reaches(1, XVDA, "2").await;
        let mut keys = bad.make_rings(2, 0);
        spoil(&mut keys);
        bad.publish(&keys, "3").await;
        world.reaches(1, XVDA, "5").await;
        let error = world.error(1, XVDA).await;
        for part in named {
            assert!(error.contains(part), "{what}: {error}");
        }
        assert!(
            error.len() < 512 && error.chars().all(|c| !c.is_control()),
            "{what}: {error}"
        );
        world.assert_nothing_held(1);

        bad.finish_closing(&world).await;
        for key in ["ring-page-order", "queue-0", "queue-1"] {
            bad.remove_key(key).await;
        }
        bad.set_state("1").await;
    }
    // None of it did harm, here or there.
    bad.connect(&world, 2, 0).await;
    bad.check_data(0, 0x44).await;
    assert_eq!(world.read(&error_node(1, XVDA)).await, None);
    good.check_data(0, 0x45).await;
}

#[tokio::test]
async fn unusable_grants_and_ports_are_refused() {
    let world = World::started().await;
    world.attach(1, XVDA, "memory:1M", "w").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    for key in ["queue-1/ring-ref", "queue-0/ring-ref"] {
        world.reaches(1, XVDA, "2").await;
        let mut keys = guest.make_rings(2, 0);
        set(&mut keys, key, "500");
        guest.publish(&keys, "3").await;
        world.reaches(1, XVDA, "5").await;
        let error = world.error(1, XVDA).await;
        assert!(error.contains("500"), "{error}");
        guest.finish_closing(&world).await;
        world.assert_nothing_held(1);
        guest.set_state("1").await;
    }
    // A port that doesn't exist may be one that isn't free yet, so it is asked for again and again; that
    // must not keep the frontend from thinking better of it.
    world.reaches(1, XVDA, "2").await;
    let mut keys = guest.make_rings(2, 0);
    set(&mut keys, "queue-1/event-channel", "4000");
    guest.publish(&keys, "3").await;
    guest.set_state("5").await;
    world.reaches(1, XVDA, "5").await;
    guest.finish_closing(&world).await;
    world.assert_nothing_held(1);
    guest.set_state("1").await;
    guest.connect(&world, 2, 0).await;
    guest.check_data(0, 0x46).await;
}

#[tokio::test]
async fn a_corrupt_ring_ends_its_own_connection_only() {
    let world = World::started().await;
    world.attach(1, XVDA, "memory:1M", "w").await;
    world.attach(2, XVDA, "memory:1M", "w").await;
    let mut good = Guest::new(&world, 2, XVDA).await;
    good.connect(&world, 2, 0).await;
    let mut bad = Guest::new(&world, 1, XVDA).await;
    bad.connect(&world, 2, 0).await;
    let req_prod = &bad.ring_words(1).as_ref()[0];
    req_prod.store(0x8000_0000, std::sync::atomic::Ordering::Release);
    bad.kick(1);
    world.reaches(1, XVDA, "5").await;
    let error = world.error(1, XVDA).await;
    assert!(error.contains("queue 1"), "{error}");
    // Its other ring is served until the frontend lets go.
    assert!(bad.read(0, 0).await.unwrap() == [0; PAGE]);
    bad.set_state("5").await;
    bad.finish_closing(&world).await;
    world.assert_nothing_held(1);
    bad.set_state("1").await;
    bad.connect(&world, 1, 0).await;
    bad.check_data(0, 0x47).await;
    good.check_data(0, 0x48).await;
}

/// It may be one that another process still has, so the device goes on, and says so.
#[tokio::test]
async fn a_port_that_is_not_to_be_had_is_shown_and_detached_from() {
    let world = World::started().await;
    world.attach(1, XVDA, "memory:1M", "w").await;
    let mut guest = Guest::new(&world, 1, XVDA).await;
    world.reaches(1, XVDA, "2").await;
    let mut keys = guest.make_rings(2, 0);
    set(&mut keys, "queue-1/event-channel", "4000");
    guest.publish(&keys, "3").await;
    let error = world.error(1, XVDA).await;
    assert!(
        error.starts_with("queue 1: can't bind event channel 4000: ")
            && error.ends_with("; trying on"),
        "{error}"
    );
    let status = world.status(1, XVDA).await.unwrap();
    assert_eq!(
        (status.state.as_str(), status.error),
        ("InitWait", Some(error))
    );
    world.ask_to_detach(1, XVDA).await;
    guest.set_state("5").await;
    guest.finish_closing(&world).await;
    world.assert_nothing_held(1);
}
