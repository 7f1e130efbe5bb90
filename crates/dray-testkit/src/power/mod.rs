//! Power cuts of real disks. A machine ([`machine`]) with two hosts' agents and a client of their
//! images runs in QEMU on one disk ([`disk`]) all of whose writes and flushes QEMU logs ([`log`]). For
//! any moment of that log [`cut`] makes the disk as a power cut may have left it; the machine is booted
//! on it, and [`judge`] compares what the images hold then with what the client was promised before
//! that moment ([`promises`]), without asking dray.
//!
//! The client's notes lie on the same disk, so one log orders them and what the agents write. They are
//! read from the log and never flushed: a flush of theirs would make durable what an agent forgot to.

pub mod cut;
pub mod disk;
pub mod judge;
pub mod log;
pub mod machine;
pub mod promises;

pub use cut::Cut;
pub use log::Log;
