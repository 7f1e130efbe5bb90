//! The network between agents: connections, control messages, runs of blocks, guest memory.
//!
//! Every connection is mutual TLS ([`crate::tls`]) and begins with a hello. What follows depends on
//! its kind: [`control`] messages of a migration, runs of blocks ([`send`], [`receive`]), guest
//! memory ([`tunnel`]), or one [`requests`] exchange. Tasks carry everything but the runs, which
//! have a thread per stream. What the bytes mean for a migration is decided elsewhere: here they
//! are only bounded, checked, moved and counted.

pub mod bucket;
pub mod budget;
pub mod compress;
mod connections;
pub mod control;
pub mod dial;
pub mod error;
mod greeting;
mod kept;
pub mod listen;
pub mod memory;
pub mod pace;
pub mod pki;
pub mod probe;
pub mod questions;
pub mod queue;
pub mod receive;
pub mod requests;
pub mod send;
mod silence;
mod socket;
mod sockopt;
pub mod stats;
pub mod stream;
pub mod tls;
pub mod tunnel;
pub mod turns;
pub mod zeros;

pub use connections::{Opened, OtherEnd};
pub use control::{ControlReceiver, ControlSender, ControlSettings, control_stream};
pub use dial::{DialSettings, dial};
pub use error::{NetError, NetErrorKind};
pub use kept::Kept;
pub use listen::{Incoming, ListenSettings, Listener};
pub use memory::Memory;
pub use queue::{JobQueue, SendJob, SendKind};
pub use receive::{DataReceiver, RunSink};
pub use send::{Compression, DataSender, RunSource, SendEvents, SendSetup};
pub use silence::limit_for as silence_limit;
pub use stats::{NetStats, NetTotals};
pub use stream::{BlockingStream, Stream};

/// What this agent calls itself in a hello.
pub const AGENT: &str = concat!("dray/", env!("CARGO_PKG_VERSION"));

/// What streams may use as far as both sides want it.
pub const FEATURES: [&str; 2] = ["zstd", dray_wire::control::FEATURE_REUSE];
