//! What every way to an image shares: which images are served, who is attached to which, and the threads
//! that do requests that wait. It knows no protocol. A front end (NBD is one, in `dray-nbd`) speaks to its
//! clients, asks here for images, and does its requests on them.
//!
//! # A front end
//! * It asks for an image at the [`Door`], which may hold the client for a while.
//! * It notes with [`Attachments::attach`] that a client uses the image, before the client can send a
//!   request, and with [`Attachment::ends`] that no request begins any more.
//! * It does at once what [`dray_image::Image`]'s `try_…` calls can do without waiting, and hands the rest
//!   to the [`Workers`] of the connection. Flushes have a thread of their own there.
//! * It tells the image of its client with [`dray_image::Image::look_at`], when the client comes and when
//!   it has gone.
//! * While it is open the agent has it in a list as a [`FrontEnd`].
//!
//! [`socket`] makes the sockets that front ends of this host listen on.
//! `tests/null.rs` is a whole one, without a protocol.

#![forbid(unsafe_code)]

mod attachments;
mod client;
mod door;
mod export;
mod front;
pub mod limits;
mod share;
pub mod socket;
mod worker;

pub use attachments::{Attachment, Attachments, ClientLink};
pub use client::{Client, Process};
pub use door::{Access, Closed, Door};
pub use export::{ExportError, ExportInfo, Exports};
pub use front::{FrontEnd, FrontEnds};
pub use share::Share;
pub use worker::{Flushed, Job, Session, Workers};
