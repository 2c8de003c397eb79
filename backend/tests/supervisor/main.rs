//! The supervisor against a mocked Xen host: a real store server, a mocked hypervisor, small guests, and
//! workers as threads or processes. Needs neither root nor Xen. Waiting is bounded but never measured.

mod control;
mod guest;
mod hostile;
mod hotplug;
mod lifecycle;
mod restart;
mod script;
mod teardown;
mod workers;
mod world;
