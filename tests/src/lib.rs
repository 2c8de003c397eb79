//! The mocked world around the backend: a simulated guest, its toolstack, and the suites that use them.

pub mod disk;
pub mod nbd;
