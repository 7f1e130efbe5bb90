//! One peer's part of the store: a folder of its own, what it takes, and what stays of what is deleted.
//!
//! What the peer deletes is renamed to `.deleted/` in its folder, and goes when it has lain there for long
//! enough. Until then it counts: otherwise a peer could fill the disk by writing and deleting.

use super::StoreRules;
use dray_backup::{Error, Kind, LocalStore, Put, Result, Store};
use parking_lot::{Mutex, MutexGuard};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Where deleted objects lie. No name of an object begins with a dot.
pub(super) const DELETED: &str = ".deleted";
/// Marks of writers that are at work. They hold no content, and their writers remove them.
const MARKS: &str = "sessions/";
/// Pause between two looks for what has lain among the deleted for long enough.
const SWEEP: Duration = Duration::from_secs(60);

/// What a peer has in the store.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
struct Usage {
    bytes: u64,
    objects: u64,
}

/// The folder of one peer.
#[derive(Debug)]
pub struct Shelf {
    /// Its objects.
    pub objects: LocalStore,
    folder: PathBuf,
    rules: StoreRules,
    usage: Mutex<(Usage, Instant)>,
}

impl Shelf {
    /// The folder, which is made if it is not there; what is in it is counted.
    ///
    /// # Errors
    /// `Unavailable`.
    pub fn open(folder: &Path, rules: StoreRules) -> Result<Self> {
        let objects = LocalStore::open(folder)?;
        let shelf = Self {
            objects,
            folder: folder.to_owned(),
            rules,
            usage: Mutex::new((Usage::default(), Instant::now())),
        };
        shelf.sweep(&mut shelf.usage.lock())?;
        Ok(shelf)
    }

    fn failed(&self, what: &str, why: io::Error) -> Error {
        Error::unavailable(format!("{what} {}", self.folder.display()), why)
    }

    /// Removes what was deleted long ago, and counts what there is.
    fn sweep(&self, usage: &mut MutexGuard<'_, (Usage, Instant)>) -> Result<()> {
        let mut found = Usage::default();
        let until = SystemTime::now() - self.rules.keep_deleted;
        walk(&self.folder.join(DELETED), &mut |path, meta| {
            if deleted_at(path).is_none_or(|at| at <= until) {
                return fs::remove_file(path);
            }
            found.add(meta.len());
            Ok(())
        })
        .map_err(|why| self.failed("cannot look at what was deleted in", why))?;
        for object in self.objects.list("")? {
            found.add(object.bytes);
        }
        **usage = (found, Instant::now());
        Ok(())
    }

    /// Removes what was deleted long ago.
    ///
    /// # Errors
    /// `Unavailable`.
    pub(super) fn look(&self) -> Result<()> {
        self.sweep(&mut self.usage.lock())
    }

    /// Sets room for an object aside, before any of its bytes is written.
    fn reserve(&self, bytes: u64) -> Result<()> {
        let mut usage = self.usage.lock();
        if usage.1.elapsed() >= SWEEP && !self.fits(usage.0, bytes) {
            self.sweep(&mut usage)?;
        }
        if !self.fits(usage.0, bytes) {
            let Usage { bytes: have, objects } = usage.0;
            let most = self.rules.max_bytes.map_or("any number of".to_owned(), |n| n.to_string());
            let what = format!(
                "the store is full for this host: it has {objects} objects of {have} bytes there, with \
                 what was deleted less than {} s ago, and may have {} of {most} bytes",
                self.rules.keep_deleted.as_secs(),
                self.rules.max_objects,
            );
            return Err(Error::new(Kind::Denied, what));
        }
        usage.0.add(bytes);
        Ok(())
    }

    fn fits(&self, usage: Usage, bytes: u64) -> bool {
        let most = self.rules.max_bytes.unwrap_or(u64::MAX);
        usage.objects < self.rules.max_objects && usage.bytes.saturating_add(bytes) <= most
    }

    /// Creates an object, if there is room for it.
    ///
    /// # Errors
    /// `Denied` when there is none; what the store says.
    pub fn put_new(&self, name: &str, bytes: &[u8]) -> Result<Put> {
        let len = bytes.len() as u64;
        self.reserve(len)?;
        let put = self.objects.put_new(name, bytes);
        // One that has failed may be there: it counts until the next look.
        if matches!(put, Ok(Put::Existed)) {
            self.usage.lock().0.take(len);
        }
        put
    }

    /// Deletes an object as the rules say.
    ///
    /// # Errors
    /// `Denied` when nothing may be deleted; what the store says.
    pub fn delete(&self, name: &str) -> Result<()> {
        if !self.objects.exists(name)? {
            return Ok(());
        }
        if name.starts_with(MARKS) || self.rules.keep_deleted.is_zero() && !self.rules.append_only {
            let len = fs::metadata(self.folder.join(name)).map_or(0, |meta| meta.len());
            self.objects.delete(name)?;
            self.usage.lock().0.take(len);
            return Ok(());
        }
        if self.rules.append_only {
            let what = "the store is append-only: it deletes nothing";
            return Err(Error::new(Kind::Denied, what.to_owned()));
        }
        self.put_away(name).map_err(|why| self.failed("cannot delete in", why))
    }

    /// Renames a deleted object, durably in both folders.
    fn put_away(&self, name: &str) -> io::Result<()> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (from, to) = (self.folder.join(name), self.folder.join(DELETED));
        let to = to.join(format!("{name}.{}", now.as_millis()));
        let folders = [from.parent(), to.parent()].map(|folder| folder.unwrap_or(&self.folder));
        fs::create_dir_all(folders[1])?;
        match fs::rename(&from, &to) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(()),
            renamed => renamed?,
        }
        folders.iter().try_for_each(|folder| fs::File::open(folder)?.sync_all())
    }
}

impl Usage {
    fn add(&mut self, bytes: u64) {
        self.objects = self.objects.saturating_add(1);
        self.bytes = self.bytes.saturating_add(bytes);
    }

    fn take(&mut self, bytes: u64) {
        self.objects = self.objects.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

/// When a file among the deleted was deleted, as its name says.
fn deleted_at(path: &Path) -> Option<SystemTime> {
    let ms = path.file_name()?.to_str()?.rsplit_once('.')?.1.parse().ok()?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms))
}

/// Every file below `folder`.
fn walk(
    folder: &Path,
    each: &mut impl FnMut(&Path, &fs::Metadata) -> io::Result<()>,
) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        // Of a link only the link itself counts, wherever it leads.
        let Ok(meta) = entry.metadata() else { continue };
        match meta.is_dir() {
            true => walk(&entry.path(), each)?,
            false => each(&entry.path(), &meta)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(max_bytes: u64, max_objects: u64) -> StoreRules {
        let keep_deleted = Duration::from_secs(3600);
        StoreRules { append_only: false, keep_deleted, max_bytes: Some(max_bytes), max_objects }
    }

    #[test]
    fn room_is_counted_and_counted_again_at_the_next_start() {
        let dir = tempfile::tempdir().unwrap();
        let shelf = Shelf::open(dir.path(), rules(100, 3)).unwrap();
        assert_eq!(shelf.put_new("a", &[0; 60]).unwrap(), Put::Created);
        assert_eq!(shelf.put_new("a", &[0; 40]).unwrap(), Put::Existed);
        assert_eq!(shelf.put_new("b", &[0; 41]).unwrap_err().kind(), Kind::Denied);
        assert!(!shelf.objects.exists("b").unwrap());
        // What is deleted still takes its room, also after a restart.
        shelf.delete("a").unwrap();
        shelf.delete("a").unwrap();
        assert!(shelf.objects.list("").unwrap().is_empty());
        let shelf = Shelf::open(dir.path(), rules(100, 3)).unwrap();
        assert_eq!(shelf.put_new("b", &[0; 41]).unwrap_err().kind(), Kind::Denied);
        shelf.put_new("b", &[0; 40]).unwrap();
        let shelf = Shelf::open(dir.path(), rules(1000, 2)).unwrap();
        assert_eq!(shelf.put_new("c", &[]).unwrap_err().kind(), Kind::Denied, "objects");
    }

    #[test]
    fn what_was_deleted_goes_after_its_time_and_not_before() {
        let dir = tempfile::tempdir().unwrap();
        let shelf = Shelf::open(dir.path(), rules(100, 9)).unwrap();
        shelf.put_new("packs/1", b"content").unwrap();
        shelf.delete("packs/1").unwrap();
        let names = |dir: &Path| -> Vec<_> {
            fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
        };
        let folder = dir.path().join(".deleted/packs");
        assert_eq!(fs::read(&names(&folder)[0]).unwrap(), b"content");
        Shelf::open(dir.path(), rules(100, 9)).unwrap();
        assert_eq!(names(&folder).len(), 1);
        let soon = StoreRules { keep_deleted: Duration::ZERO, ..rules(100, 9) };
        let shelf = Shelf::open(dir.path(), soon).unwrap();
        assert!(names(&folder).is_empty());
        assert_eq!(shelf.usage.lock().0, Usage::default());
    }

    #[test]
    fn an_append_only_store_deletes_nothing_but_the_marks_of_writers() {
        let dir = tempfile::tempdir().unwrap();
        let rules = StoreRules { append_only: true, ..rules(100, 9) };
        let shelf = Shelf::open(dir.path(), rules).unwrap();
        shelf.put_new("packs/1", b"content").unwrap();
        shelf.put_new("sessions/1/renewed-1", b"").unwrap();
        assert_eq!(shelf.delete("packs/1").unwrap_err().kind(), Kind::Denied);
        shelf.delete("sessions/1/renewed-1").unwrap();
        assert_eq!(shelf.objects.list("").unwrap().len(), 1);
    }
}
