//! XenStore: the wire protocol, a client, the XenBus state machine and the keys of a virtual block
//! device.
//!
//! Everything read from a frontend's directory is written by a guest: values are read once, parsed
//! strictly and bounded before anything is allocated for them. What to do about a state change is
//! decided here ([`xenbus::step`]) and done in the daemon; rings, grants and event channels are known
//! only as numbers.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation
    )
)]

mod client;
mod error;
mod events;
#[cfg(feature = "fake")]
pub mod fake;
mod permission;
mod pump;
mod transport;
pub mod vbd;
pub mod wire;
pub mod xenbus;

pub use client::{Client, Tx};
pub use error::Error;
pub use events::{Event, Events};
pub use permission::{Access, Permission};
