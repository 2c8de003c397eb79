//! The daemon as a library: supervisor, workers and targets. The binaries around it only parse their
//! command line and call in here.

pub mod channel;
pub mod control;
mod inflight;
pub mod message;
mod plan;
pub mod stats;
pub mod supervisor;
pub mod target;
pub mod worker;
