//! Whether a file is as the agents of this host have left it, or another program has written to it since.
//!
//! An agent that is stopped in order notes how a file looks. One that is killed cannot. Instead, each file has a
//! heartbeat beside its record: the agent touches it once a second for as long as it has the file open. What was
//! changed later than the last touch, another program has changed, also while an agent ran that did not have the file
//! open. An agent opens such a file only after it has drawn the consequence and made that durable. Until then it does
//! not touch the heartbeat, and every later agent sees the same, whatever becomes of this one. A touch takes no room,
//! so that a full state directory changes nothing.

use dray_files::StatePath;
use dray_files::files::{BOOT_LEN, Cache, Kind, Look, StateFile};
use parking_lot::Mutex;
use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// How often heartbeats are to be touched.
pub const EVERY: Duration = Duration::from_secs(1);
/// An agent that is busy touches a heartbeat late, and what it was writing when it died may end after it, in seconds.
const LATE: i64 = 4;
/// A power cut, or a failure of the device below the heartbeat alone, takes back what the file system had not written
/// down by then, in seconds.
const LOST: i64 = 60;

const MAGIC: &[u8; 8] = b"DRAYBEA1";
const SUM_AT: usize = MAGIC.len() + BOOT_LEN;
const LEN: usize = SUM_AT + 8;

/// A file that this agent has open. It is touched until this is dropped.
#[derive(Debug)]
pub struct Heartbeat {
    file: Box<dyn StateFile>,
    /// Seconds since 1970, and nanoseconds.
    last: Mutex<(i64, i64)>,
}

impl Heartbeat {
    fn beat(&self) -> io::Result<()> {
        let mut last = self.last.lock();
        *last = self.file.touch(*last)?;
        Ok(())
    }
}

/// The heartbeats of this agent.
#[derive(Debug, Default)]
pub struct Heartbeats(Mutex<Vec<Weak<Heartbeat>>>);

impl Heartbeats {
    /// Makes the heartbeat at `path`, durably, of a file that this agent has made or found good.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn make(&self, path: &StatePath) -> io::Result<Arc<Heartbeat>> {
        path.replace(&encode(&cache_of(path)?.id()))?;
        self.begin(path)
    }

    /// This agent has the file open from now on, whose heartbeat is at `path`. What was changed until now counts as
    /// done by agents.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn begin(&self, path: &StatePath) -> io::Result<Arc<Heartbeat>> {
        let (file, before) = (path.open()?, path.look()?.changed);
        let now = encode(&cache_of(path)?.id());
        // In place, into room that is there.
        if file.read()? != now {
            file.write_at(&now, 0)?;
        }
        let heartbeat = Arc::new(Heartbeat { last: Mutex::new(file.touch(before)?), file });
        self.0.lock().push(Arc::downgrade(&heartbeat));
        Ok(heartbeat)
    }

    /// Touches all of them. To be called every [`EVERY`].
    pub fn beat(&self) {
        let held: Vec<_> = {
            let mut all = self.0.lock();
            all.retain(|one| one.strong_count() > 0);
            all.iter().filter_map(Weak::upgrade).collect()
        };
        for heartbeat in held {
            if let Err(why) = heartbeat.beat() {
                tracing::debug!(%why, "cannot touch a heartbeat");
            }
        }
    }
}

/// Whether only agents have changed a file, which looks like that now, as far as its heartbeat at `path` tells. Without
/// one nobody can say so. Of a device the time says nothing.
///
/// # Errors
/// What the file system reports, other than that there is no heartbeat.
pub fn is_left(path: &StatePath, file: &Look) -> io::Result<bool> {
    if file.kind != Kind::File {
        return Ok(true);
    }
    let found = path.look().and_then(|beat| Ok((beat.changed, path.read()?)));
    let (last, bytes) = match found {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(false),
        found => found?,
    };
    let Some(boot) = decode(&bytes) else { return Ok(false) };
    let now = cache_of(path)?;
    // Earlier versions name the boot alone.
    let grace = if boot == now.id() || boot == now.boot { LATE } else { LOST };
    let until = (last.0.saturating_add(grace), last.1);
    Ok(file.changed <= until && file.touched <= until)
}

fn encode(boot: &[u8; BOOT_LEN]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(LEN);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(boot);
    let sum = xxh3_64(&bytes);
    bytes.extend_from_slice(&sum.to_le_bytes());
    bytes
}

/// For how long what is written beside a heartbeat is there, durable or not.
fn cache_of(path: &StatePath) -> io::Result<Cache> {
    Cache::of(&**path.files(), path.path().parent().unwrap_or(path.path()))
}

/// The boot, and the life of the file system, in which the heartbeat was begun last.
fn decode(bytes: &[u8]) -> Option<[u8; BOOT_LEN]> {
    let (head, sum) = bytes.get(..LEN)?.split_at(SUM_AT);
    let boot = head.strip_prefix(MAGIC)?.try_into().ok()?;
    (bytes.len() == LEN && xxh3_64(head).to_le_bytes() == sum).then_some(boot)
}

#[cfg(test)]
mod tests;
