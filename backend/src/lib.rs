//! The daemon as a library: supervisor, workers and targets. The binaries around it only parse their
//! command line and call in here.

pub mod channel;
pub mod control;
mod flusher;
mod inflight;
pub mod message;
mod plan;
pub mod stats;
pub mod supervisor;
mod syscalls;
pub mod target;
pub mod worker;
