//! The mocked world around the backend: a simulated guest, its toolstack, and the suites that use them.
#![forbid(unsafe_code)]

pub mod backend;
pub mod disk;
pub mod frontend;
pub mod fuzz;
pub mod latency;
pub mod load;
pub mod nbd;
pub mod pattern;
mod scratch;
pub mod toolstack;
pub mod verify;
pub mod world;
