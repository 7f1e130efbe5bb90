//! The network between agents: connections, control messages, runs of blocks, guest memory.
//!
//! Every connection is mutual TLS ([`crate::tls`]) and begins with a hello. What follows depends on
//! its kind: [`control`] messages of a migration, runs of blocks ([`send`], [`receive`]), guest
//! memory ([`tunnel`]), or one [`requests`] exchange. Tasks carry everything but the runs, which
//! have a thread per stream. What the bytes mean for a migration is decided elsewhere: here they
//! are only bounded, checked, moved and counted.

pub mod budget;
pub mod compress;
pub mod control;
pub mod dial;
pub mod error;
mod kept;
pub mod listen;
pub mod pace;
pub mod pki;
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
pub mod zeros;

pub use control::{ControlReceiver, ControlSender, ControlSettings, control_stream};
pub use dial::{DialSettings, dial};
pub use error::{NetError, NetErrorKind};
pub use kept::Kept;
pub use listen::{Incoming, ListenSettings, Listener};
pub use queue::{JobQueue, SendJob, SendKind};
pub use receive::{DataReceiver, RunSink};
pub use send::{Compression, DataSender, RunSource, SendEvents, SendSetup};
pub use silence::limit_for as silence_limit;
pub use stats::{NetStats, NetTotals};
pub use stream::{BlockingStream, Stream};

/// What this agent calls itself in a hello.
pub const AGENT: &str = concat!("dray/", env!("CARGO_PKG_VERSION"));

/// What this software can do beyond the protocol's versions; used as far as both sides can.
pub const FEATURES: [&str; 15] = [
    "zstd",
    dray_wire::control::FEATURE_BACKFILL_ORDER,
    dray_wire::control::FEATURE_BACKFILL_REUSE,
    dray_wire::control::FEATURE_BACKUP_GENERATIONS,
    dray_wire::control::FEATURE_BASIS,
    dray_wire::control::FEATURE_HURRY,
    dray_wire::control::FEATURE_JUMPS,
    dray_wire::control::FEATURE_REUSE,
    dray_wire::request::FEATURE_BASES,
    dray_wire::request::FEATURE_FATE,
    dray_wire::request::FEATURE_HOLDINGS,
    dray_wire::request::FEATURE_QCOW2,
    dray_wire::request::FEATURE_RETURN,
    dray_wire::request::FEATURE_SEED,
    dray_wire::request::FEATURE_SURVEY,
];
