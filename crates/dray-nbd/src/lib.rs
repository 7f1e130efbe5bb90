//! An NBD server for [`dray_image::Image`]s, and a [`client`] for other servers on this host. Nothing
//! else: it knows no migration, no agent and no file. It is a front end of `dray_serve`. QEMU, `qemu-img`, libnbd clients, fio and the
//! kernel can use the server.
//!
//! # A request's way
//! `listener` accepts, `server` starts a thread for the connection. `negotiation` carries the
//! options that `option` parses and `dialogue` answers, perhaps changing the `channel` for
//! `tls`; exports are asked for at `dray_serve`'s door, which may hold a client. Then its attachments note who
//! uses which, and `connection` receives requests (`inbound`, `request`) and does at once what
//! needs no waiting; its replies (`reply`) are collected (`batch`) while more requests are
//! already here; before it sleeps it looks on for a moment (`patience`). Whatever would wait, for the disk or the network, is a `job` for one of the
//! connection's workers (`dray_serve`), and flushes have a worker of their own: a guest's flush never waits
//! behind reads of missing blocks. All replies leave through one `writer`.
//!
//! # Leaving
//! A server that leaves, or ends the connections to an export, answers what it has begun and drops
//! the rest without a word. Clients take every error for the image's and give it to their guest;
//! what is not answered they send again.
//!
//! # Long reads in one piece
//! A simple reply, and one chunk with `DF`, cannot be taken back once its header is out. When it is
//! longer than [`limits::JOB_PIECE`] the range is read twice, piece by piece: first to know that
//! every byte can be read and is here, then to send it. What waits or fails does so before the
//! header, like any read. Should a second reading fail all the same, the connection is cut.
//!
//! # What is spoken
//! Fixed newstyle negotiation with `EXPORT_NAME`, `LIST`, `INFO`, `GO`, `ABORT`, `STARTTLS`,
//! `STRUCTURED_REPLY` and the metadata context `base:allocation`; `READ` (with `DF`), `WRITE`,
//! `FLUSH`, `TRIM`, `CACHE`, `WRITE_ZEROES`, `BLOCK_STATUS`, `DISC`, `FUA` everywhere, several
//! connections to one export. Not spoken: oldstyle, extended headers, resize.
//!
//! Every limit is in [`limits`] and [`dray_serve::limits`].

#![forbid(unsafe_code)]

mod batch;
mod buffer;
mod channel;
pub mod client;
mod connection;
mod dialogue;
#[cfg(test)]
mod fuzz;
mod inbound;
mod job;
pub mod limits;
mod listener;
mod negotiation;
mod option;
mod patience;
mod peer;
mod proto;
mod reply;
mod request;
mod roster;
mod server;
mod session;
mod tls;
mod writer;

pub use server::{Server, ServerHandle};
pub use tls::{GuestList, Leave, Tls};
