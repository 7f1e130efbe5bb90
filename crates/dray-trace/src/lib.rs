//! Block traces: what a guest read and wrote, and when.
//!
//! * [`record`]: one access. [`error`]: what can be wrong with a file.
//! * [`read`]: CSV, blktrace text and fio iologs, plain or zstd, told apart by their contents.
//! * [`mod@write`]: CSV, zstd by the name of the file.
//! * [`analyse`]: locality and popularity as the scheduling literature measures them.
//! * [`generate`]: loads of several kinds of servers, from a seed.
//! * [`rng`]: the small generator that simulations and loads draw from.
//!
//! Traces are streams: nothing here holds a whole trace in memory.

#![forbid(unsafe_code)]

pub mod analyse;
pub mod error;
pub mod generate;
pub mod read;
pub mod record;
pub mod rng;
pub mod write;

pub use error::TraceError;
pub use read::Reader;
pub use record::{Op, Record};
pub use rng::Rng;
pub use write::Writer;
