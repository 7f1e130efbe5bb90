//! An NBD server for [`dray_image::Image`]s, and a [`client`] for other servers on this host. Nothing
//! else: it knows no migration, no agent and no file. QEMU, `qemu-img`, libnbd clients, fio and the
//! kernel can use the server.
//!
//! # A request's way
//! `listener` accepts, `server` starts a thread for the connection. `negotiation` carries the
//! options that `option` parses and `dialogue` answers, perhaps changing the `channel` for
//! `tls`. Then `connection` receives requests (`inbound`, `request`) and does at once what
//! needs no waiting; its replies (`reply`) are collected (`batch`) while more requests are
//! already here; before it sleeps it looks on for a moment (`patience`). Whatever would wait, for the disk or the network, is a `job` for one of the
//! connection's `worker`s, and flushes have a worker of their own: a guest's flush never waits
//! behind reads of missing blocks. All replies leave through one `writer`.
//!
//! # What is spoken
//! Fixed newstyle negotiation with `EXPORT_NAME`, `LIST`, `INFO`, `GO`, `ABORT`, `STARTTLS`,
//! `STRUCTURED_REPLY` and the metadata context `base:allocation`; `READ` (with `DF`), `WRITE`,
//! `FLUSH`, `TRIM`, `CACHE`, `WRITE_ZEROES`, `BLOCK_STATUS`, `DISC`, `FUA` everywhere, several
//! connections to one export. Not spoken: oldstyle, extended headers, resize.
//!
//! Every limit is in [`limits`].

#![forbid(unsafe_code)]

mod batch;
mod buffer;
mod channel;
pub mod client;
mod connection;
mod dialogue;
mod export;
#[cfg(test)]
mod fuzz;
mod inbound;
mod job;
pub mod limits;
mod listener;
mod negotiation;
mod option;
mod patience;
mod proto;
mod reply;
mod request;
mod roster;
mod server;
mod session;
mod tls;
mod worker;
mod writer;

pub use export::{ExportError, ExportInfo, Exports};
pub use server::{Server, ServerHandle};
pub use tls::Tls;
