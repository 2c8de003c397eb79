//! The blkif protocol: request and response layouts, the ring that carries them, when to notify, and
//! the journal that makes every consumed request survive the process serving it.
//!
//! It does no I/O, reads no clock, starts no thread and logs nothing: it is handed the shared pages as
//! words ([`Words`]) and the journal's memory ([`JournalWords`]), and says what to do. Mapping grants,
//! moving data and sending events are left to the callers.

#![forbid(unsafe_code)]
// Every byte handled here was written by a guest.
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss
)]

#[cfg(not(target_endian = "little"))]
compile_error!("blkif as specified here is little-endian, and so is every machine Xen runs on");

mod abi;
mod back;
#[cfg(feature = "front")]
mod encode;
#[cfg(feature = "front")]
mod front;
pub mod journal;
pub mod layout;
#[cfg(feature = "front")]
mod probe;
mod recover;
mod request;
mod response;
mod segment;
mod slot;
mod token;
mod words;

pub use abi::Abi;
pub use back::{AttachError, BackRing, Corrupt, Counters, NoSegmentTable, Published};
#[cfg(feature = "front")]
pub use encode::encode_indirect_page;
#[cfg(feature = "front")]
pub use front::{FrontRing, RingFull};
pub use journal::{JournalIdentity, JournalWords, journal_bytes};
#[cfg(feature = "front")]
pub use probe::{HeapWords, ProbeWords, heap_words};
pub use recover::RecoverError;
pub use request::{
    BarrierRequest, DiscardRequest, FlushRequest, IndirectRequest, Reason, Request, RequestError,
    RwOp, RwRequest, WriteData,
};
pub use response::{Response, Status};
pub use segment::{DirectSegments, PageSegments, Segment, decode_indirect_page};
pub use slot::RawSlot;
pub use token::Token;
pub use words::Words;
