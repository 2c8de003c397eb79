//! The store under requests no client of ours would send.

use proptest::prelude::*;

use super::*;

const GUEST: Connection = Connection(1);
const TOOLSTACK: Connection = Connection(2);

fn store() -> Store {
    let mut store = Store::new();
    store.connect(GUEST, 5);
    store.connect(TOOLSTACK, PRIVILEGED);
    store
}

/// Handles a request; its reply must come first and exactly once.
fn ask(store: &mut Store, from: Connection, op: Op, transaction: u32, payload: &[u8]) -> Packet {
    let payload = payload.to_vec();
    store.handle(
        from,
        Packet {
            op,
            request: 9,
            transaction,
            payload,
        },
    );
    let mut output = store.take_output();
    let Output::Send(to, reply) = output.remove(0) else {
        panic!("no reply first")
    };
    assert_eq!((to, reply.request), (from, 9));
    assert!(reply.op == op || reply.op == Op::ERROR);
    for event in output {
        match event {
            Output::Send(_, packet) => assert_eq!(packet.op, Op::WATCH_EVENT),
            Output::Close(connection) => assert_eq!(connection, GUEST),
        }
    }
    reply
}

fn error(reply: &Packet) -> &str {
    if reply.op != Op::ERROR {
        return "";
    }
    str::from_utf8(&reply.payload)
        .unwrap()
        .trim_end_matches('\0')
}

#[test]
fn malformed_requests_get_an_errno() {
    let mut store = store();
    let long = [b"/".as_slice(), &[b'a'; 3072], b"\0"].concat();
    for (op, payload, expected) in [
        (Op::READ, b"".as_slice(), "EINVAL"),
        (Op::READ, b"/a", "EINVAL"),
        (Op::READ, b"\0", "EINVAL"),
        (Op::READ, b"//a\0", "EINVAL"),
        (Op::READ, b"/a/\0", "EINVAL"),
        (Op::READ, b"/a b\0", "EINVAL"),
        (Op::READ, b"/\xff\0", "EINVAL"),
        (Op::READ, &long, "EINVAL"),
        (Op::WRITE, b"/a", "EINVAL"),
        (Op::RM, b"/\0", "EINVAL"),
        (Op::WATCH, b"/a\0tok", "EINVAL"),
        (Op::WATCH, b"@other\0tok\0", "EINVAL"),
        (Op::UNWATCH, b"/a\0tok\0", "ENOENT"),
        (Op::SET_PERMS, b"/\0", "EINVAL"),
        (Op::SET_PERMS, b"/\0x5\0", "EINVAL"),
        (Op::SET_PERMS, b"/\0r99999\0", "EINVAL"),
        (Op::TRANSACTION_END, b"X\0", "EINVAL"),
        (Op::TRANSACTION_END, b"T\0", "ENOENT"),
        (Op::DIRECTORY_PART, b"/\0-1\0", "EINVAL"),
        (Op::GET_DOMAIN_PATH, b"+5\0", "EINVAL"),
        (Op::RELEASE, b"5\0", "ENOENT"),
        (Op(99), b"/\0", "ENOSYS"),
    ] {
        let reply = ask(&mut store, TOOLSTACK, op, 0, payload);
        assert_eq!(error(&reply), expected, "{op:?} {}", payload.escape_ascii());
    }
    let reply = ask(&mut store, TOOLSTACK, Op::READ, 77, b"/\0");
    assert_eq!(error(&reply), "ENOENT", "unknown transaction");
}

#[test]
fn a_guest_stops_at_its_quotas() {
    let mut store = store();
    ask(&mut store, TOOLSTACK, Op::WRITE, 0, b"/local/domain/5\0");
    ask(
        &mut store,
        TOOLSTACK,
        Op::SET_PERMS,
        0,
        b"/local/domain/5\0n5\0",
    );
    let mut made = 1;
    while error(&ask(
        &mut store,
        GUEST,
        Op::WRITE,
        0,
        format!("n{made}\0").as_bytes(),
    ))
    .is_empty()
    {
        made += 1;
        assert!(made <= quota::NODES);
    }
    assert_eq!(made, quota::NODES);
    assert_eq!(error(&ask(&mut store, GUEST, Op::RM, 0, b"n1\0")), "");
    assert_eq!(
        error(&ask(&mut store, GUEST, Op::WRITE, 0, b"again\0")),
        "",
        "freed by the removal"
    );

    let value = [b"n2\0".as_slice(), &vec![0; quota::VALUE + 1]].concat();
    assert_eq!(
        error(&ask(&mut store, GUEST, Op::WRITE, 0, &value)),
        "ENOSPC"
    );
    for _ in 0..quota::TRANSACTIONS {
        assert_eq!(
            error(&ask(&mut store, GUEST, Op::TRANSACTION_START, 0, b"\0")),
            ""
        );
    }
    assert_eq!(
        error(&ask(&mut store, GUEST, Op::TRANSACTION_START, 0, b"\0")),
        "ENOSPC"
    );
    for token in 0..quota::WATCHES {
        let watch = format!("x\0{token}\0");
        assert_eq!(
            error(&ask(&mut store, GUEST, Op::WATCH, 0, watch.as_bytes())),
            ""
        );
    }
    assert_eq!(
        error(&ask(&mut store, GUEST, Op::WATCH, 0, b"x\0more\0")),
        "E2BIG"
    );
    assert_eq!(
        error(&ask(&mut store, GUEST, Op::RESET_WATCHES, 0, b"\0")),
        ""
    );
    assert_eq!(
        error(&ask(&mut store, GUEST, Op::WATCH, 0, b"x\0more\0")),
        ""
    );
}

fn any_payload() -> impl Strategy<Value = Vec<u8>> {
    let path = prop::sample::select(vec![
        "/",
        "/a",
        "/a/b",
        "b",
        "/local/domain/5",
        "@releaseDomain",
    ]);
    let rest = prop::sample::select(vec!["", "tok\0", "0\0", "T\0", "n0\0r5\0", "\u{7f}"]);
    prop_oneof![
        3 => (path, rest).prop_map(|(path, rest)| format!("{path}\0{rest}").into_bytes()),
        1 => prop::sample::select(vec!["T\0", "F\0", "5\0", "5\0\x31\0\x31\0"])
            .prop_map(|text| text.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..40),
    ]
}

proptest! {
    #[test]
    fn anything_is_answered_exactly_once(
        requests in prop::collection::vec((any::<bool>(), 0_u32..25, 0_u32..4, any_payload()), 0..60),
    ) {
        let mut store = store();
        for (guest, op, transaction, payload) in requests {
            let from = if guest { GUEST } else { TOOLSTACK };
            if !store.sessions.contains_key(&from) {
                store.connect(from, 5);
            }
            ask(&mut store, from, Op(op), transaction, &payload);
        }
    }
}
