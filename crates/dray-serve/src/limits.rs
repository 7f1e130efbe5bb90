//! Limits of all front ends, with their reasons.

use std::time::Duration;

/// A client is held this long, in all, while its export cannot be had for a cause that may pass by
/// itself: longer than a file system takes to be mounted at boot, and less than people wait.
pub const OPEN_PATIENCE: Duration = Duration::from_secs(30);

/// A client that is held asks again this often: cheap for the registry, and hardly longer than a
/// person would notice.
pub const OPEN_AGAIN: Duration = Duration::from_millis(200);

/// Requests of one connection that wait for a worker or are with one. QEMU keeps 16 under way,
/// libnbd clients 64; at the limit the connection is not read until one is done.
pub const MAX_DEFERRED: usize = 1024;

/// Bytes those requests may hold in memory: two of the longest NBD writes, or a thousand of usual
/// length.
pub const MAX_DEFERRED_BYTES: u64 = 128 << 20;

/// At the limit, the connection's thread looks this often whether its client is still there: rare
/// enough to cost nothing, and a client that comes back waits for it.
pub const CROWDED_LOOK: Duration = Duration::from_millis(100);

/// Worker threads of one connection. They start only when a request must wait, and must be more
/// than the requests QEMU lets wait for missing blocks (16), so that others still get through.
pub const MAX_WORKERS: usize = 64;

/// Bytes that requests of all connections of one export may hold, and those of all exports. Each connection may have one
/// request beyond that, so that it gets on.
pub const BYTES_OF_EXPORT: u64 = 256 << 20;
/// See [`BYTES_OF_EXPORT`].
pub const BYTES_OF_ALL: u64 = 2 << 30;

/// Worker threads of all connections of one export, and of all exports. Each connection may have one beyond that.
pub const THREADS_OF_EXPORT: usize = 256;
/// See [`THREADS_OF_EXPORT`].
pub const THREADS_OF_ALL: usize = 2048;

/// Connections of one export at the same time, those among them that are over and have requests that nobody can end: those
/// of blocks that are missing, and whose source is lost.
pub const CONNECTIONS_OF_EXPORT: usize = 128;

/// A worker without work for this long ends; a burst is long over by then.
pub const WORKER_IDLE: Duration = Duration::from_secs(5);
