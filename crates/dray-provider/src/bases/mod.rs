//! Base images: read-only files that many disks are built on, and that many hosts have already.
//!
//! Such a file is used where it lies when it has the content of the image that would come
//! (the agent decides that). Its content is told by a digest ([`content`]), which takes as long as reading the file:
//! it is worked out once, on a thread of its own while somebody asks for it again and again, and
//! remembered beside how the file looked.

mod content;

use dray_backup::NEVER_CHANGES;
use dray_files::StatePath;
use dray_host::stamp::FileStamp;
use dray_types::{Ancestor, GenerationId, ImageId};
use dray_wire::request::ContentDigest;
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Files whose digest is remembered, those that were asked for last.
const MAX_KNOWN: usize = 256;
/// Files that are read at the same time; others wait.
const MAX_READERS: usize = 2;
/// Failures that nobody has asked for yet.
const MAX_FAILED: usize = 64;
/// Who wants a digest asks at least this often, or reading stops.
const PATIENCE: Duration = Duration::from_secs(20);

/// A file's digest, as it is remembered.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Known {
    stamp: FileStamp,
    /// In hexadecimal digits.
    digest: String,
}

/// How far a file's digest is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reading {
    /// It is being read, or waits for that.
    Running {
        /// Bytes that were looked at.
        done: u64,
        /// Its length in bytes.
        total: u64,
    },
    /// What the file holds as long as it looks like this.
    Ready(FileStamp, ContentDigest),
    /// It could not be read, or was changed meanwhile.
    Failed(String),
}

/// A file that is being read.
struct Job {
    total: u64,
    done: AtomicU64,
    asked: Mutex<Instant>,
}

impl Job {
    fn new(total: u64) -> Arc<Self> {
        Arc::new(Self { total, done: AtomicU64::new(0), asked: Mutex::new(Instant::now()) })
    }

    fn ask(&self) -> Reading {
        *self.asked.lock() = Instant::now();
        Reading::Running { done: self.done.load(Ordering::Relaxed), total: self.total }
    }

    /// How far it is; whether it shall go on.
    fn step(&self, done: u64) -> bool {
        self.done.store(done, Ordering::Relaxed);
        self.asked.lock().elapsed() < PATIENCE
    }
}

#[derive(Default)]
struct State {
    /// The one that was asked for last at the end.
    known: Vec<Known>,
    jobs: BTreeMap<PathBuf, Arc<Job>>,
    failed: BTreeMap<PathBuf, String>,
}

/// The digests of this host's files.
pub struct Digests {
    /// Where they are remembered. A file that is lost costs reading again.
    path: StatePath,
    state: Mutex<State>,
}

impl Digests {
    /// Those that are remembered at `path`; none when that cannot be read.
    pub fn open(path: StatePath) -> Arc<Self> {
        let mut known: Vec<Known> = path.peek().unwrap_or_default();
        known.truncate(MAX_KNOWN);
        Arc::new(Self { path, state: Mutex::new(State { known, ..State::default() }) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The digest of a file if it is known: nothing is read for it.
    pub fn known(&self, path: &Path) -> Option<(FileStamp, ContentDigest)> {
        let stamp = FileStamp::of(path).ok()?;
        Some((stamp, self.state().known(&stamp)?))
    }

    /// What backups know the file by, if its digest is known.
    pub fn identity(&self, path: &Path) -> Option<(ImageId, Ancestor)> {
        self.known(path).map(|(_, digest)| identity(&digest))
    }

    /// The digest of a file. Begins to read it, and asked again tells how far that is.
    pub fn ask(self: &Arc<Self>, path: &Path) -> Reading {
        let stamp = match FileStamp::of(path) {
            Ok(stamp) => stamp,
            Err(why) => return Reading::Failed(format!("{}: {why}", path.display())),
        };
        let mut state = self.state();
        if let Some(digest) = state.known(&stamp) {
            return Reading::Ready(stamp, digest);
        }
        if let Some(why) = state.failed.remove(path) {
            return Reading::Failed(why);
        }
        if let Some(job) = state.jobs.get(path) {
            return job.ask();
        }
        if state.jobs.len() >= MAX_READERS {
            return Reading::Running { done: 0, total: stamp.len };
        }
        let job = Job::new(stamp.len);
        match self.start(path, &job) {
            Err(why) => Reading::Failed(format!("cannot start a thread: {why}")),
            Ok(()) => {
                state.jobs.insert(path.to_owned(), Arc::clone(&job));
                job.ask()
            }
        }
    }

    fn start(self: &Arc<Self>, path: &Path, job: &Arc<Job>) -> io::Result<()> {
        let (this, path, job) = (Arc::clone(self), path.to_owned(), Arc::clone(job));
        let work = move || {
            let read = content::read(&path, |done| job.step(done));
            this.end(&path, read);
        };
        std::thread::Builder::new().name("dray-digest".to_owned()).spawn(work).map(drop)
    }

    fn end(&self, path: &Path, read: io::Result<(FileStamp, ContentDigest)>) {
        let mut state = self.state();
        state.jobs.remove(path);
        match read {
            Ok((stamp, digest)) => {
                state.remember(stamp, digest);
                // Written with the lock held: an older list must not replace a newer one.
                if let Err(why) = self.path.put(&state.known) {
                    tracing::debug!(%why, "cannot keep a digest: it is computed again after a \
                                           restart");
                }
            }
            // Whoever asks again begins it anew.
            Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
            Err(why) => {
                if state.failed.len() >= MAX_FAILED {
                    state.failed.clear();
                }
                state.failed.insert(path.to_owned(), why.to_string());
            }
        }
    }
}

impl State {
    fn known(&mut self, stamp: &FileStamp) -> Option<ContentDigest> {
        let at = self.known.iter().position(|known| known.stamp == *stamp)?;
        let known = self.known.remove(at);
        let digest = from_hex(&known.digest);
        // One that is none is forgotten.
        digest.inspect(|_| self.known.push(known))
    }

    fn remember(&mut self, stamp: FileStamp, digest: ContentDigest) {
        self.known.retain(|known| known.stamp != stamp);
        self.known.push(Known { stamp, digest: to_hex(&digest) });
        let old = self.known.len().saturating_sub(MAX_KNOWN);
        self.known.drain(..old);
    }
}

/// What backups know a base image by: an id, and the one generation that it will ever have. Both are made
/// of its content, so that every host and every disk that is built on it means the same one.
pub fn identity(digest: &ContentDigest) -> (ImageId, Ancestor) {
    let half = |from: usize| {
        let bytes = std::array::from_fn(|nth| digest[from + nth]);
        u128::from_be_bytes(bytes)
    };
    (ImageId(half(0)), Ancestor { id: GenerationId(half(16)), number: NEVER_CHANGES })
}

/// A digest in hexadecimal digits.
pub fn to_hex(digest: &ContentDigest) -> String {
    blake3::Hash::from_bytes(*digest).to_hex().to_string()
}

/// The digest with these hexadecimal digits.
pub fn from_hex(text: &str) -> Option<ContentDigest> {
    blake3::Hash::from_hex(text).ok().map(|hash| *hash.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_engine::lineage::FileIdentity;
    use std::os::unix::fs::FileExt;

    /// Asks until it is read.
    fn wait(digests: &Arc<Digests>, path: &Path) -> Reading {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            match digests.ask(path) {
                Reading::Running { .. } if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                reading => return reading,
            }
        }
    }

    #[test]
    fn a_file_is_read_once_and_again_when_it_was_changed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, store) = (dir.path().join("base"), dir.path().join("digests.json"));
        std::fs::write(&path, [5; 100_000]).unwrap();
        let digests = Digests::open(StatePath::real(&store));
        assert_eq!(digests.known(&path), None);
        let Reading::Ready(stamp, digest) = wait(&digests, &path) else { panic!("not read") };
        assert_eq!(digests.known(&path), Some((stamp, digest)));
        // Another process knows it without reading.
        let digests = Digests::open(StatePath::real(&store));
        assert_eq!(digests.ask(&path), Reading::Ready(stamp, digest));
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[6], 70_000).unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(digests.known(&path), None);
        let Reading::Ready(new, other) = wait(&digests, &path) else { panic!("not read") };
        assert!(new != stamp && other != digest);
        std::fs::write(&store, "[").unwrap();
        assert_eq!(Digests::open(StatePath::real(&store)).known(&path), None);
    }

    #[test]
    fn a_failure_is_told_once_and_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("base");
        let digests = Digests::open(StatePath::real(dir.path().join("digests.json")));
        assert!(matches!(digests.ask(&path), Reading::Failed(_)));
        std::fs::write(&path, [5; 100]).unwrap();
        digests.end(&path, Err(io::Error::other("a bad disk")));
        assert_eq!(digests.ask(&path), Reading::Failed("a bad disk".to_owned()));
        assert!(matches!(wait(&digests, &path), Reading::Ready(..)));
    }

    #[test]
    fn an_identity_is_made_of_the_content() {
        let digest = std::array::from_fn(|nth| nth as u8);
        let (image, generation) = identity(&digest);
        assert_eq!(image, ImageId(0x0001_0203_0405_0607_0809_0a0b_0c0d_0e0f));
        assert_eq!(generation.id, GenerationId(0x1011_1213_1415_1617_1819_1a1b_1c1d_1e1f));
        assert_eq!(generation.number, NEVER_CHANGES);
    }

    #[test]
    fn only_so_many_are_read_at_once_and_so_many_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let digests = Digests::open(StatePath::real(dir.path().join("digests.json")));
        let path = dir.path().join("base");
        std::fs::write(&path, [5; 100]).unwrap();
        for nth in 0..MAX_READERS {
            digests.state().jobs.insert(dir.path().join(nth.to_string()), Job::new(1));
        }
        assert_eq!(digests.ask(&path), Reading::Running { done: 0, total: 100 });
        assert!(!digests.state().jobs.contains_key(&path));
        let mut state = State::default();
        let stamp = FileStamp::of(&path).unwrap();
        let other = |inode| FileStamp { file: FileIdentity { inode, ..stamp.file }, ..stamp };
        for inode in 0..MAX_KNOWN as u64 {
            state.remember(other(inode), [inode as u8; 32]);
        }
        assert!(state.known(&other(0)).is_some());
        state.remember(stamp, [9; 32]);
        assert!(state.known(&other(0)).is_some() && state.known(&other(1)).is_none());
        assert_eq!(state.known.len(), MAX_KNOWN);
    }

    #[test]
    fn reading_that_nobody_waits_for_stops() {
        let job = Job::new(10);
        assert!(job.step(3));
        assert_eq!(job.ask(), Reading::Running { done: 3, total: 10 });
        if let Some(long_ago) = Instant::now().checked_sub(PATIENCE) {
            *job.asked.lock() = long_ago;
            assert!(!job.step(4));
        }
    }
}
