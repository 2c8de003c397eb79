//! Event channels live here beside the grants because the two always travel together: the same
//! `/dev/xen` devices, the same opener, the same mock. This crate holds every Xen device call of
//! the backend behind two small traits ([`GrantTable`], [`EventChannels`]), the memory those calls
//! act on ([`Slab`], [`Window`], [`Mapping`], [`SharedPages`]), the grants a ring keeps mapped
//! ([`persistent`]), and, with feature `fake`, a hypervisor that
//! needs no Xen (`fake::FakeXen`).
//!
//! It leaves to others: what a request means (the ring crate), who opens a device and hands it on
//! (the supervisor), when a grant is copied, mapped or given back (the worker).
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

mod buddy;
mod events;
#[cfg(feature = "fake")]
pub mod fake;
mod mapping;
mod memory;
pub mod persistent;
mod shared;
mod slab;
pub mod sys;
mod table;
mod window;

use std::fmt;

pub use events::EventChannels;
pub use mapping::{Mapping, OutOfRange};
pub use shared::SharedPages;
pub use slab::{Run, Slab};
pub use table::{Access, CopyOp, CopyStatus, Direction, GrantTable, MapError};
pub use window::{Chunk, MAX_CHUNK, StillThere, Window};

/// Size of a granted page in bytes. Always 4096, whatever the host's page size.
pub const XEN_PAGE_SIZE: usize = 4096;

/// A domain's number, as in `/local/domain/<domid>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DomId(pub u16);

/// A grant reference: an index into the grant table of the domain that owns the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantRef(pub u32);

/// An event channel's port, local to one domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Port(pub u32);

impl fmt::Display for DomId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for GrantRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
