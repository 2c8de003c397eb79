//! The contract suite on the real devices of a dom0, which plays both ends: it grants pages to
//! itself through `/dev/xen/gntalloc` and binds its own ports. `tests/xen/run contract` boots one and
//! runs this there.

#[path = "../contract/mod.rs"]
mod contract;
mod dom0;

contract!(dom0::Dom0);
