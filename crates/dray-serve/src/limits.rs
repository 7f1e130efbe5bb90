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

/// A worker without work for this long ends; a burst is long over by then.
pub const WORKER_IDLE: Duration = Duration::from_secs(5);
