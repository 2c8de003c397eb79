//! Frontends as they are, as they leave things behind, and as they should not be.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

fn limits() -> Limits {
    Limits {
        max_queues: 4,
        max_ring_page_order: 4,
        max_indirect_segments: 256,
        default_protocol: Protocol::X86_64,
    }
}

/// A frontend's directory that counts how often each key is read.
#[derive(Default)]
struct Directory {
    nodes: HashMap<String, Vec<u8>>,
    reads: HashMap<String, u32>,
}

impl Directory {
    fn new(text: &str) -> Self {
        let pair = |word: &str| {
            let (key, value) = word.split_once('=').unwrap();
            (key.to_owned(), value.as_bytes().to_vec())
        };
        Self {
            nodes: text.split_whitespace().map(pair).collect(),
            ..Self::default()
        }
    }

    fn get(&mut self, keys: &[String]) -> Vec<Option<Vec<u8>>> {
        for key in keys {
            *self.reads.entry(key.clone()).or_default() += 1;
        }
        keys.iter()
            .map(|key| self.nodes.get(key).cloned())
            .collect()
    }

    /// As `read_frontend` does it, without a store.
    fn parse(&mut self, limits: &Limits) -> Result<FrontendRings, KeyError> {
        let shape = Shape::parse(&self.get(&Shape::keys()), limits)?;
        let keys = shape.ring_keys();
        let values = self.get(&keys);
        shape.rings(&keys, values)
    }
}

fn parse(text: &str) -> Result<FrontendRings, String> {
    Directory::new(text)
        .parse(&limits())
        .map_err(|error| error.to_string())
}

/// (pages, [(ring refs, port)])
type Seen = (u32, Vec<(Vec<u32>, u32)>);

fn seen(text: &str) -> Result<Seen, String> {
    let rings = parse(text)?;
    let queues = rings
        .queues
        .into_iter()
        .map(|queue| (queue.ring_refs, queue.event_channel));
    Ok((rings.pages, queues.collect()))
}

#[test]
fn real_frontends() {
    for (name, text, expected) in [
        (
            "GRUB",
            "protocol=x86_64-abi ring-ref=8 event-channel=15",
            (1, vec![(vec![8], 15)]),
        ),
        (
            "Linux with two queues",
            "multi-queue-num-queues=2 queue-0/ring-ref=8 queue-0/event-channel=15 \
             queue-1/ring-ref=9 queue-1/event-channel=16",
            (1, vec![(vec![8], 15), (vec![9], 16)]),
        ),
        (
            "FreeBSD with four pages",
            "ring-ref0=8 ring-ref1=9 ring-ref2=10 ring-ref3=11 num-ring-pages=4 ring-page-order=2 \
             event-channel=15",
            (4, vec![(vec![8, 9, 10, 11], 15)]),
        ),
        (
            "Windows with one queue says so",
            "multi-queue-num-queues=1 ring-ref=8 event-channel=15",
            (1, vec![(vec![8], 15)]),
        ),
        (
            "order 0, Linux spelling",
            "ring-page-order=0 ring-ref0=8 event-channel=1",
            (1, vec![(vec![8], 1)]),
        ),
        (
            "order 0, tapback spelling",
            "ring-page-order=0 ring-ref=8 event-channel=1",
            (1, vec![(vec![8], 1)]),
        ),
        (
            "only ring-ref0",
            "ring-ref0=8 event-channel=1 num-ring-pages=1",
            (1, vec![(vec![8], 1)]),
        ),
        (
            "ring-ref0 left over",
            "ring-ref=8 ring-ref0=77 event-channel=1",
            (1, vec![(vec![8], 1)]),
        ),
        (
            "ring-ref left over",
            "ring-page-order=0 ring-ref0=8 ring-ref=77 event-channel=1",
            (1, vec![(vec![8], 1)]),
        ),
        (
            "queue directories left over",
            "ring-ref=8 event-channel=1 queue-0/ring-ref=70 queue-0/event-channel=71",
            (1, vec![(vec![8], 1)]),
        ),
        (
            "emptied by GRUB, then one queue",
            "multi-queue-num-queues= ring-page-order= num-ring-pages= ring-ref0= protocol= \
             feature-persistent= ring-ref=8 event-channel=1",
            (1, vec![(vec![8], 1)]),
        ),
    ] {
        assert_eq!(seen(text), Ok(expected), "{name}");
    }
}

#[test]
fn protocol_and_persistence() {
    let base = "ring-ref=8 event-channel=1";
    for (key, protocol) in [
        ("", Protocol::X86_64),
        ("protocol=x86_32-abi", Protocol::X86_32),
        ("protocol=x86_64-abi", Protocol::X86_64),
        ("protocol=arm-abi", Protocol::Arm),
    ] {
        assert_eq!(parse(&format!("{base} {key}")).unwrap().protocol, protocol);
    }
    for (key, persistent) in [
        ("", false),
        ("feature-persistent=0", false),
        ("feature-persistent=1", true),
    ] {
        assert_eq!(
            parse(&format!("{base} {key}")).unwrap().persistent,
            persistent
        );
    }
}

/// What is written, and what is said about it.
const REFUSED: &[(&str, &str)] = &[
    ("", "event-channel is missing, expected a decimal number"),
    (
        "event-channel=1",
        "ring-ref is missing, expected a decimal number",
    ),
    (
        "event-channel= ring-ref=8",
        "event-channel is missing, expected a decimal number",
    ),
    (
        "event-channel=-1 ring-ref=8",
        "event-channel is \"-1\", expected a decimal number",
    ),
    (
        "event-channel=1 ring-ref=2abc",
        "ring-ref is \"2abc\", expected a decimal number",
    ),
    (
        "event-channel=1 ring-ref=4294967296",
        "ring-ref is \"4294967296\", expected a decimal number",
    ),
    (
        "ring-page-order=5",
        "ring-page-order is \"5\", expected 0 to 4",
    ),
    (
        "ring-page-order=31",
        "ring-page-order is \"31\", expected 0 to 4",
    ),
    (
        "ring-page-order=-1",
        "ring-page-order is \"-1\", expected 0 to 4",
    ),
    (
        "ring-page-order=99999999999",
        "ring-page-order is \"99999999999\", expected 0 to 4",
    ),
    (
        "ring-page-order=1 num-ring-pages=3",
        "num-ring-pages is \"3\", expected 2",
    ),
    ("num-ring-pages=4", "num-ring-pages is \"4\", expected 1"),
    (
        "ring-page-order=1 event-channel=1 ring-ref0=8",
        "ring-ref1 is missing, expected a decimal number",
    ),
    (
        "ring-page-order=1 event-channel=1 ring-ref0=8 ring-ref1=8",
        "ring-ref1 is \"8\", expected a grant of its own for each ring page",
    ),
    (
        "multi-queue-num-queues=0",
        "multi-queue-num-queues is \"0\", expected 1 to 4",
    ),
    (
        "multi-queue-num-queues=5",
        "multi-queue-num-queues is \"5\", expected 1 to 4",
    ),
    (
        "multi-queue-num-queues=4000000000",
        "multi-queue-num-queues is \"4000000000\", expected 1 to 4",
    ),
    (
        "multi-queue-num-queues=2 ring-ref=8 event-channel=1",
        "queue-0/event-channel is missing, expected a decimal number",
    ),
    (
        "multi-queue-num-queues=2 queue-0/ring-ref=8 queue-0/event-channel=15 \
             queue-1/ring-ref=8 queue-1/event-channel=16",
        "queue-1/ring-ref is \"8\", expected a grant of its own for each ring page",
    ),
    (
        "multi-queue-num-queues=2 queue-0/ring-ref=8 queue-0/event-channel=15 \
             queue-1/ring-ref=9 queue-1/event-channel=15",
        "queue-1/event-channel is \"15\", expected a port of its own for each queue",
    ),
    (
        "protocol=x86_64",
        "protocol is \"x86_64\", expected x86_32-abi, x86_64-abi or arm-abi",
    ),
];

#[test]
fn refusals_name_key_value_and_expectation() {
    for (text, message) in REFUSED {
        assert_eq!(parse(text), Err((*message).to_owned()), "{text}");
    }
}

#[test]
fn each_key_is_read_once_and_no_more_than_the_limits_allow() {
    let mut text = "multi-queue-num-queues=4 ring-page-order=4".to_owned();
    for queue in 0..4 {
        text += &format!(" queue-{queue}/event-channel={queue}");
        for page in 0..16 {
            text += &format!(" queue-{queue}/ring-ref{page}={}", queue * 16 + page);
        }
    }
    let mut directory = Directory::new(&text);
    let rings = directory.parse(&limits()).unwrap();
    assert_eq!((rings.pages, rings.queues.len()), (16, 4));
    assert_eq!(rings.queues[3].ring_refs, (48..64).collect::<Vec<_>>());
    assert!(directory.reads.values().all(|reads| *reads == 1));
    assert_eq!(directory.reads.len(), 5 + 4 * 17);
}

proptest! {
    /// Any values at all: in range or an error, never a panic, never more reads than the limits allow.
    #[test]
    fn garbage_is_refused_or_in_range(
        values in prop::collection::hash_map(
            prop::sample::select(vec![
                PROTOCOL, ORDER, PAGES, QUEUES, PERSISTENT, "ring-ref", "ring-ref0", "ring-ref1",
                "event-channel", "queue-0/ring-ref", "queue-0/event-channel", "queue-1/ring-ref",
                "queue-1/event-channel",
            ]),
            prop_oneof![
                "[0-9]{0,3}".prop_map(String::into_bytes),
                prop::collection::vec(any::<u8>(), 0..100),
            ],
            0..14,
        ),
    ) {
        let nodes = values.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        let mut directory = Directory { nodes, ..Directory::default() };
        if let Ok(rings) = directory.parse(&limits()) {
            prop_assert!((1..=4).contains(&rings.queues.len()));
            prop_assert!(rings.pages.is_power_of_two() && rings.pages <= 16);
            for queue in &rings.queues {
                prop_assert_eq!(queue.ring_refs.len(), rings.pages as usize);
            }
        }
        prop_assert!(directory.reads.len() <= 5 + 4 * 17);
    }
}
