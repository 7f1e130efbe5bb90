//! Whether a file is as the agents of this host have left it, or another program has written to it since.
//!
//! An agent that is stopped in order notes how a file looks. One that is killed cannot. Instead, each file has a
//! heartbeat beside its record: the agent touches it once a second for as long as it has the file open. What was
//! changed later than the last touch, another program has changed, also while an agent ran that did not have the file
//! open. An agent opens such a file only after it has drawn the consequence and made that durable. Until then it does
//! not touch the heartbeat, and every later agent sees the same, whatever becomes of this one. A touch takes no room,
//! so that a full state directory changes nothing.
//!
//! The heartbeat of an image also says when its file was changed as far as the agent has seen. A file that was changed
//! earlier, by more than what a power cut takes back, is an older one: its storage was put back. The agent looks at the
//! files apart from the touches: a look waits for the storage of the image, which may hang. Of an image that comes, a
//! record says which blocks are here; before it does, the heartbeat says when the file was changed at least, because
//! that is durable by then ([`Heartbeat::keep`]): a file that was changed earlier has not those blocks.

use dray_files::StatePath;
use dray_files::files::{BOOT_LEN, Cache, Kind, Look, StateFile};
use parking_lot::Mutex;
use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// How often heartbeats are to be touched.
pub const EVERY: Duration = Duration::from_secs(1);
/// How often the files are to be looked at: well within [`LOST`].
pub const LOOK_EVERY: Duration = Duration::from_secs(10);
/// An agent that is busy touches a heartbeat late, and what it was writing when it died may end after it, in seconds.
const LATE: i64 = 4;
/// A power cut, or a failure of the device below the heartbeat alone, takes back what the file system had not written
/// down by then, in seconds.
const LOST: i64 = 60;

const MAGIC: &[u8; 8] = b"DRAYBEA3";
const SEEN_AT: usize = MAGIC.len() + BOOT_LEN;
const KEPT_AT: usize = SEEN_AT + 16;
const SUM_AT: usize = KEPT_AT + 16;
const LEN: usize = SUM_AT + 8;

/// Seconds since 1970, and nanoseconds.
type When = (i64, i64);

/// A file that this agent has open. It is touched until this is dropped.
#[derive(Debug)]
pub struct Heartbeat {
    file: Box<dyn StateFile>,
    last: Mutex<When>,
    watched: Option<Arc<Watched>>,
}

/// The file that an agent has open, and when it was changed as far as that is written down.
#[derive(Debug)]
struct Watched {
    /// The names that it may have.
    names: Vec<StatePath>,
    inode: u64,
    id: [u8; BOOT_LEN],
    times: Mutex<Times>,
}

/// When a file was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Times {
    /// As far as an agent has seen.
    seen: When,
    /// At least: it was durable then.
    kept: When,
}

impl Heartbeat {
    fn beat(&self) -> io::Result<()> {
        let mut last = self.last.lock();
        *last = self.file.touch(*last)?;
        Ok(())
    }

    /// Writes down, in place, what `change` makes of when the file was changed. Whatever the clock did: who has the file
    /// open takes it as it is.
    fn note(&self, watched: &Watched, change: impl FnOnce(Times) -> Times) -> io::Result<()> {
        let mut times = watched.times.lock();
        let now = change(*times);
        if now != *times {
            self.file.write_at(&encode(&watched.id, now), 0)?;
            *times = now;
            // The write has set the time of change to that of the clock.
            self.beat()?;
        }
        Ok(())
    }

    /// When the file was changed; none where it cannot be found. Waits for its storage.
    pub(crate) fn changed(&self) -> Option<(i64, i64)> {
        self.watched.as_ref()?.find().map(|(_, look)| look.touched)
    }

    /// A file that was changed before this time is another one: it is durable that the file was changed then. To be
    /// called before a record says what is in it.
    ///
    /// # Errors
    /// What the file system reports: an older file may not be told then.
    pub(crate) fn keep(&self, at: (i64, i64)) -> io::Result<()> {
        let Some(watched) = &self.watched else { return Ok(()) };
        self.note(watched, |times| Times { kept: at, ..times })
    }
}

impl Watched {
    /// Where the file is, and how it looks; none where it cannot be found. Waits for its storage.
    fn find(&self) -> Option<(&StatePath, Look)> {
        let mut looks = self.names.iter().filter_map(|name| Some((name, name.look().ok()?)));
        looks.find(|(_, look)| look.inode == self.inode)
    }
}

/// Looks at the file of a heartbeat, if that is still held then.
fn look_at(heartbeat: &Weak<Heartbeat>) -> io::Result<()> {
    let watched = heartbeat.upgrade().and_then(|held| held.watched.clone());
    let Some(watched) = watched else { return Ok(()) };
    // The heartbeat is not held meanwhile: whoever closes the file ends it.
    let Some((_, now)) = watched.find() else { return Ok(()) };
    let seen = |times: Times| Times { seen: now.touched, kept: times.kept.min(now.touched) };
    heartbeat.upgrade().map_or(Ok(()), |held| held.note(&watched, seen))
}

/// The heartbeats of this agent.
#[derive(Debug, Default)]
pub struct Heartbeats(Mutex<Vec<Weak<Heartbeat>>>);

impl Heartbeats {
    /// Makes the heartbeat at `path`, durably, of a file that this agent has made or found good, and that is watched
    /// under these `names`.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn make(&self, path: &StatePath, names: &[StatePath]) -> io::Result<Arc<Heartbeat>> {
        path.replace(&encode(&cache_of(path)?.id(), Times::default()))?;
        self.begin(path, names)
    }

    /// This agent has the file open from now on, whose heartbeat is at `path`. What was changed until now counts as
    /// done by agents. When it is changed is watched under these `names`, of which it has the first that is there.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn begin(&self, path: &StatePath, names: &[StatePath]) -> io::Result<Arc<Heartbeat>> {
        let (file, before) = (path.open()?, path.look()?.changed);
        let (id, bytes) = (cache_of(path)?.id(), file.read()?);
        let found = names.iter().find_map(|name| name.look().ok());
        let known = decode(&bytes).map_or_else(Times::default, |beat| beat.times);
        // It is taken as it is, also if it is an older one.
        let times = found
            .map_or(known, |look| Times { seen: look.touched, kept: known.kept.min(look.touched) });
        let now = encode(&id, times);
        // In place, into room that is there.
        if bytes != now {
            file.write_at(&now, 0)?;
        }
        let watched = found.map(|look| {
            let times = Mutex::new(times);
            Arc::new(Watched { names: names.to_vec(), inode: look.inode, id, times })
        });
        let last = Mutex::new(file.touch(before)?);
        let heartbeat = Arc::new(Heartbeat { last, file, watched });
        self.0.lock().push(Arc::downgrade(&heartbeat));
        Ok(heartbeat)
    }

    /// Touches all of them. To be called every [`EVERY`].
    pub fn beat(&self) {
        for heartbeat in self.held().iter().filter_map(Weak::upgrade) {
            if let Err(why) = heartbeat.beat() {
                tracing::debug!(%why, "cannot touch a heartbeat");
            }
        }
    }

    /// Looks at the files of all of them, and waits for their storage. To be called every [`LOOK_EVERY`].
    pub fn look(&self) {
        for heartbeat in self.held() {
            if let Err(why) = look_at(&heartbeat) {
                tracing::debug!(%why, "cannot write down when a file was changed");
            }
        }
    }

    fn held(&self) -> Vec<Weak<Heartbeat>> {
        let mut all = self.0.lock();
        all.retain(|one| one.strong_count() > 0);
        all.clone()
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
    let Some(Beat { id: boot, .. }) = decode(&bytes) else { return Ok(false) };
    let now = cache_of(path)?;
    // Earlier versions name the boot alone.
    let grace = if boot == now.id() || boot == now.boot { LATE } else { LOST };
    let until = (last.0.saturating_add(grace), last.1);
    Ok(file.changed <= until && file.touched <= until)
}

/// Whether a file, which looks like that now, is older than an agent has seen it, by its heartbeat at `path`: it is one
/// of before, as when its storage was put back. Within what a power cut takes back nobody can say so of what was not
/// [kept](Heartbeat::keep).
///
/// # Errors
/// What the file system reports, other than that there is no heartbeat.
pub fn is_put_back(path: &StatePath, file: &Look) -> io::Result<bool> {
    let bytes = match path.read() {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(false),
        read => read?,
    };
    let Times { seen, kept } = decode(&bytes).map_or_else(Times::default, |beat| beat.times);
    let least = kept.max((seen.0.saturating_sub(LOST), seen.1));
    Ok(file.kind == Kind::File && file.touched < least)
}

fn encode(id: &[u8; BOOT_LEN], times: Times) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(LEN);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(id);
    for (seconds, nanos) in [times.seen, times.kept] {
        bytes.extend_from_slice(&seconds.to_le_bytes());
        bytes.extend_from_slice(&nanos.to_le_bytes());
    }
    let sum = xxh3_64(&bytes);
    bytes.extend_from_slice(&sum.to_le_bytes());
    bytes
}

/// For how long what is written beside a heartbeat is there, durable or not.
fn cache_of(path: &StatePath) -> io::Result<Cache> {
    Cache::of(&**path.files(), path.path().parent().unwrap_or(path.path()))
}

/// What a heartbeat says.
struct Beat {
    /// The boot, and the life of the file system, in which it was begun last.
    id: [u8; BOOT_LEN],
    /// When the file was changed.
    times: Times,
}

fn decode(bytes: &[u8]) -> Option<Beat> {
    let (head, sum) = bytes.split_at_checked(bytes.len().checked_sub(8)?)?;
    if xxh3_64(head).to_le_bytes() != sum {
        return None;
    }
    let (id, times) = head.strip_prefix(MAGIC)?.split_at_checked(BOOT_LEN)?;
    let number = |at: usize| Some(i64::from_le_bytes(times.get(at..at + 8)?.try_into().ok()?));
    let when = |at: usize| Some((number(at)?, number(at + 8)?));
    let times = Times { seen: when(0)?, kept: when(16)? };
    Some(Beat { id: id.try_into().ok()?, times })
}

#[cfg(test)]
mod tests;
