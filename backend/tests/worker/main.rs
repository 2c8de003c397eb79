//! A worker end to end, in a thread: simulated frontends on the mocked hypervisor, real io_uring.

mod attack;
mod beginning;
mod ending;
mod flushing;
mod hostile;
mod persistent;
mod service;
mod sharing;
mod steady;
mod world;
