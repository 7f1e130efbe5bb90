//! The messages, frames and versions of the protocol between agents. This crate turns bytes into
//! values and back; it does no I/O.
//!
//! A migration uses one control stream and several data streams between the agents, and one stream
//! for guest memory; each is a TLS connection of its own that begins with a [`hello`]. On the
//! control stream length-prefixed [`control`] messages flow both ways; on a data stream [`frame`]s
//! flow from the source to the target. Everything a peer sends is bounded before it is read (I7).
//! `docs/reference/protocol.md` describes the same byte by byte.

#![forbid(unsafe_code)]

pub mod control;
pub mod error;
pub mod frame;
pub mod hello;
pub mod replica;
pub mod request;
pub mod store;

pub use control::{
    Envelope, HandedOver, ImageHandover, ImageOffer, MapHash, Open, TargetImage, TargetState,
    ToSource, ToTarget,
};
pub use error::WireError;
pub use frame::{Encoding, FrameHeader, FrameKind};
pub use hello::{Hello, HelloReply, StreamKind, VERSION_MAX, VERSION_MIN};
