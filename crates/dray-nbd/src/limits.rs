//! Every limit of the protocol and its sockets, with its reason; what all front ends share is in
//! [`dray_serve::limits`].

use std::time::Duration;

/// Longest read or write: what libnbd sends at most and other servers take, twice what the protocol
/// calls portable and QEMU sends. No request is held in memory as a whole because of it.
pub const MAX_PAYLOAD: u32 = 64 << 20;

/// A refused write's payload is read and thrown away up to this size, so that the client gets its
/// error; a longer one can only be an attack or a client gone astray and ends the connection.
pub const MAX_DISCARDED_PAYLOAD: u32 = 2 * MAX_PAYLOAD;

/// Longest option payload that is looked at. The protocol's longest strings are 4 KiB; a metadata
/// query may hold several.
pub const MAX_OPTION: u32 = 64 << 10;

/// A longer option is skipped up to this length and answered "too big"; beyond it the connection
/// ends.
pub const MAX_SKIPPED_OPTION: u32 = 1 << 20;

/// Longest name or description: the protocol's own limit on strings.
pub const MAX_STRING: usize = 4096;

/// Options in one negotiation. Real clients send fewer than ten; an endless stream of options would
/// hold a connection's slot without ever using an export.
pub const MAX_OPTIONS: u32 = 256;

/// Queries in one metadata option; more than any client has, and few enough to answer at once.
pub const MAX_META_QUERIES: u32 = 64;

/// A negotiation takes no longer than this: it is a handful of round trips, and a silent client
/// must not keep a slot.
pub const NEGOTIATION_TIME: Duration = Duration::from_secs(30);

/// Connections to one listener. Each costs a thread and its buffers; QEMU opens one for a disk,
/// multi-connection clients about four.
pub const MAX_CONNECTIONS: usize = 512;

/// Connections from one address that use no export yet and have shown no certificate. A client opens a handful at
/// once; whoever opens more and says nothing must leave room for others.
pub const MAX_STRANGERS: usize = 64;

/// Requests that wait are done in pieces of this size, and hold no more memory than a piece: long
/// enough for a disk to be at its best, short enough that a connection's workers' buffers stay small.
pub const JOB_PIECE: u32 = 1 << 20;

/// Extents in one block status reply: 32 KiB on the wire. A client that needs more asks again.
pub const MAX_EXTENTS: usize = 4096;

/// Bytes received at a time: sixteen 4 KiB writes with room to spare, so that a full queue of small
/// requests costs one system call.
pub const RECEIVE_BUFFER: usize = 256 << 10;

/// A write shorter than this goes to the image from the receive buffer; a longer one gets a buffer
/// of its own, filled by the kernel without a copy in between.
pub const LARGE_WRITE: usize = 64 << 10;

/// Replies are collected while more requests are already here, up to this size.
pub const REPLY_BATCH: usize = 128 << 10;

/// A long structured read is answered in pieces of this size: a piece stays in the processor's
/// cache between the read and the send, and the client takes it while the next is being read.
pub const READ_PIECE: usize = 256 << 10;

/// A long write goes to the image in pieces of this size as it comes in, for the same reasons.
pub const WRITE_PIECE: usize = 256 << 10;

/// Send buffer of a unix socket: room for a queue of replies, so that the server does not sleep in
/// `send` while the client still works on the last one.
pub const UNIX_SEND_BUFFER: usize = 1 << 20;

/// The receiver looks for the next request this long before it sleeps: what a sleep and a wake-up
/// cost on a processor that has gone idle, so that looking in vain at worst doubles that.
pub const PATIENCE: Duration = Duration::from_micros(50);

/// A client that keeps the receiver waiting is looked for only once in this many times: the cost
/// disappears, and a client that becomes busy is still noticed within milliseconds.
pub const MAX_LOOKS_SKIPPED: u32 = 256;

/// Idle buffers a connection keeps for its next large requests.
pub const KEPT_BUFFERS: usize = 16;

/// A buffer above this size is given back at once: rare, and too much to keep.
pub const KEPT_BUFFER_SIZE: usize = 2 << 20;

/// A clean shutdown waits this long for requests under way, then cuts the connections: a read of a
/// missing block may have nobody left to answer it.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);
