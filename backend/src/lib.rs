//! The daemon as a library: supervisor, workers and targets. The binaries around it only parse their
//! command line and call in here.

pub mod channel;
pub mod control;
pub mod message;
pub mod stats;
pub mod supervisor;
pub mod target;
pub mod worker;
