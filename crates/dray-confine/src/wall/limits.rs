//! How much a tool may use.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io;

/// Bytes of memory. The caches of a chain of sixteen qcow2 images take half of a gibibyte; libraries,
/// stacks and glibc's arenas, which are mostly reserved and not used, the more.
const MEMORY: u64 = 16 << 30;
/// Longest file that it may write: its log, which is in memory.
const FILE: u64 = 1 << 20;
/// Open descriptors: one a layer, and some of its own for each thread.
const DESCRIPTORS: u64 = 1024;
/// Threads: QEMU's pool has at most 64, and one for each processor at the start.
const THREADS: u64 = 512;

/// Sets the limits. The number of threads is counted for a user, and so only set when this process is
/// `alone` in being its own.
pub(super) fn set(alone: bool) -> io::Result<()> {
    lower(Resource::Core, 0)?;
    lower(Resource::As, MEMORY)?;
    lower(Resource::Fsize, FILE)?;
    lower(Resource::Nofile, DESCRIPTORS)?;
    lower(Resource::Memlock, 0)?;
    lower(Resource::Msgqueue, 0)?;
    if alone {
        lower(Resource::Nproc, THREADS)?;
    }
    Ok(())
}

fn lower(resource: Resource, most: u64) -> io::Result<()> {
    let most = getrlimit(resource).maximum.map_or(most, |limit| limit.min(most));
    Ok(setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })?)
}
