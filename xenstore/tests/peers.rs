//! Our client against Debian's real daemons. `tests/peers/run` sets them up; without it these tests
//! say that they are skipped, or fail if `XENBLK_XENSTORE_PEERS=required`.

mod contract;

use std::path::Path;

/// The socket in `variable`, or `None` with a line that says why nothing is tested.
fn peer(variable: &str) -> Option<String> {
    let socket = std::env::var(variable).ok();
    if socket.is_none() {
        assert_ne!(
            std::env::var("XENBLK_XENSTORE_PEERS").as_deref(),
            Ok("required"),
            "{variable} is not set: run tests/peers/run"
        );
        eprintln!("skipped: {variable} is not set, tests/peers/run sets it up");
    }
    socket
}

async fn check(name: &str, variable: &str) {
    let Some(socket) = peer(variable) else { return };
    contract::run(Path::new(&socket)).await;
    eprintln!("{name} at {socket}: the client's contract holds");
}

#[tokio::test]
async fn debian_c_xenstored() {
    check("C xenstored", "XENBLK_XENSTORED_C").await;
}

#[tokio::test]
async fn debian_ocaml_xenstored() {
    check("OCaml xenstored", "XENBLK_XENSTORED_OCAML").await;
}
