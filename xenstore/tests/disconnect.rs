//! The client when the server goes away or talks nonsense: every pending call ends at once, and the
//! event stream says why.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use xenblk_xenstore::{Client, Error, Event, Tx};

/// A server that reads one request and answers with `bytes`, then stays silent or hangs up.
async fn answer(
    bytes: &[u8],
    hang_up: bool,
) -> (String, Result<Vec<u8>, Error>, Result<Vec<u8>, Error>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let (client, mut events) = Client::from_stream(ours);
    let other = client.clone();
    let first = tokio::spawn(async move { other.read(Tx::NONE, "/first").await });
    let other = client.clone();
    let second = tokio::spawn(async move { other.read(Tx::NONE, "/second").await });
    let mut requests = [0; 16 + 7 + 16 + 8];
    theirs.read_exact(&mut requests).await.unwrap();
    theirs.write_all(bytes).await.unwrap();
    let _open = if hang_up {
        drop(theirs);
        None
    } else {
        Some(theirs)
    };
    // The time-out is for a client that would wait for ever.
    let event = tokio::time::timeout(Duration::from_secs(30), events.next()).await;
    let Ok(Some(Event::Disconnected { reason })) = event else {
        panic!("the stream must end with Disconnected, not {event:?}")
    };
    assert_eq!(events.next().await, None);
    let results = (first.await.unwrap(), second.await.unwrap());
    let late = client.read(Tx::NONE, "/late").await;
    assert_eq!(
        late,
        Err(Error::Disconnected(reason.clone())),
        "later calls fail at once"
    );
    (reason, results.0, results.1)
}

fn packet(op: u32, request: u32, payload: &[u8]) -> Vec<u8> {
    let words = [op, request, 0, u32::try_from(payload.len()).unwrap()];
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend_from_slice(payload);
    bytes
}

#[tokio::test]
async fn hang_up_fails_every_pending_call() {
    let (reason, first, second) = answer(b"", true).await;
    assert_eq!(reason, "closed by xenstored");
    let gone = Err(Error::Disconnected(reason));
    assert_eq!((first, second), (gone.clone(), gone));
}

#[tokio::test]
async fn an_answer_before_the_end_counts() {
    let (_, first, second) = answer(&packet(2, 1, b"value"), true).await;
    assert_eq!(first, Ok(b"value".to_vec()));
    assert!(matches!(second, Err(Error::Disconnected(_))));
}

#[tokio::test]
async fn nonsense_ends_the_connection_with_its_reason() {
    for (bytes, expected) in [
        (
            packet(2, 99, b""),
            "answer to request 99, which is not pending",
        ),
        (packet(1, 1, b""), "request of type 2 answered by 1"),
        (packet(15, 0, b"no-nul"), "malformed watch event \"no-nul\""),
        (
            vec![2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff],
            "packet of 4294967295 bytes, at most 1048576 are accepted",
        ),
    ] {
        let (reason, first, _) = answer(&bytes, false).await;
        assert_eq!(reason, expected);
        assert!(first.is_err());
    }
}

#[tokio::test]
async fn errors_keep_their_kind() {
    let (_, first, second) = answer(
        &[packet(16, 2, b"EAGAIN\0"), packet(16, 1, b"E\x1b[31m\0")].concat(),
        true,
    )
    .await;
    assert_eq!(first, Err(Error::Os("E\\x1b[31m".to_owned())));
    assert_eq!(second, Err(Error::Again));
}

#[tokio::test]
async fn the_connection_closes_with_the_last_client() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let (client, mut events) = Client::from_stream(ours);
    drop(client);
    assert_eq!(theirs.read(&mut [0; 1]).await.unwrap(), 0);
    assert!(matches!(
        events.next().await,
        Some(Event::Disconnected { .. })
    ));
}

/// The directory changes while it is read in parts: read again from the start.
#[tokio::test]
async fn parts_of_different_generations_are_not_mixed() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let (client, _events) = Client::from_stream(ours);
    let server = tokio::spawn(async move {
        let answers: [(&[u8], &[u8]); 5] = [
            (b"/d\0", b"E2BIG\0"),
            (b"/d\x000\0", b"1\0old\0"),
            (b"/d\x004\0", b"2\0x\0\0"),
            (b"/d\x000\0", b"2\0new\0"),
            (b"/d\x004\0", b"2\0er\0\0"),
        ];
        for (request, (expected, payload)) in (1..).zip(answers) {
            let mut bytes = vec![0; 16 + expected.len()];
            theirs.read_exact(&mut bytes).await.unwrap();
            assert_eq!(&bytes[16..], expected, "request {request}");
            let op = if request == 1 { 16 } else { 22 };
            theirs
                .write_all(&packet(op, request, payload))
                .await
                .unwrap();
        }
    });
    assert_eq!(
        client.directory(Tx::NONE, "/d").await,
        Ok(vec!["new".to_owned(), "er".to_owned()])
    );
    server.await.unwrap();
}
