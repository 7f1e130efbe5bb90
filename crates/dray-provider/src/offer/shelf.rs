//! One peer's part of the store: a folder of its own, what it takes, and what stays of what is deleted.
//!
//! What the peer deletes is put away in its folder, and goes when it has lain there for long enough. Until
//! then it counts: otherwise a peer could fill the disk by writing and deleting.

use super::StoreRules;
use dray_backup::store::check_name;
use dray_backup::{Error, Kind, LocalStore, Put, Result, SESSIONS, Store};
use parking_lot::Mutex;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

/// Where deleted objects lie. No name of an object begins with a dot.
pub(super) const DELETED: &str = ".deleted";
/// Pause between two looks for what has lain among the deleted for long enough.
const SWEEP: Duration = Duration::from_secs(60);
/// Most parts of a name. Repositories use three, and a folder of theirs. Folders are not counted, so this bounds
/// how many there are for each object.
const MAX_PARTS: usize = 8;

/// What a peer has in the store.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
struct Usage {
    bytes: u64,
    objects: u64,
}

/// What is known of a peer's usage. Where it is not exact it says too much, until the next look.
#[derive(Default, Debug)]
struct Count {
    /// What is there.
    there: Usage,
    /// What has room set aside, and is not there yet.
    under_way: Usage,
    /// What has come since the look that runs now began: that look may have missed it.
    since: Usage,
    /// When the last look ended. Nothing is known before the first.
    looked: Option<Instant>,
}

/// The folder of one peer.
#[derive(Debug)]
pub struct Shelf {
    /// Its objects.
    pub objects: LocalStore,
    rules: StoreRules,
    count: Mutex<Count>,
    /// Held during a look; `count` is not, so that nobody else waits for it.
    looking: Mutex<()>,
    /// Held while the peer is given a list.
    pub(super) listing: Mutex<()>,
    /// Held during a deletion: what is measured is what is removed.
    deleting: Mutex<()>,
}

impl Shelf {
    /// The folder, which is made if it is not there. What is in it is counted when it matters.
    ///
    /// # Errors
    /// `Unavailable`.
    pub fn open(folder: &Path, rules: StoreRules) -> Result<Self> {
        Ok(Self {
            objects: LocalStore::open(folder)?,
            rules,
            count: Mutex::default(),
            looking: Mutex::default(),
            listing: Mutex::default(),
            deleting: Mutex::default(),
        })
    }

    /// Removes what was deleted long ago, and counts what there is.
    ///
    /// # Errors
    /// `Unavailable`.
    pub(super) fn look(&self) -> Result<()> {
        self.look_unless(|_| false)
    }

    fn look_unless(&self, needless: impl Fn(&Count) -> bool) -> Result<()> {
        let _looking = self.looking.lock();
        {
            let mut count = self.count.lock();
            // Somebody else may have looked while this one waited.
            if needless(&count) {
                return Ok(());
            }
            count.since = Usage::default();
        }
        let mut found = Usage::default();
        // A time before 1970 is one at which nothing was deleted.
        let until = SystemTime::now().checked_sub(self.rules.keep_deleted);
        let until = until.unwrap_or(SystemTime::UNIX_EPOCH);
        self.objects.sweep(until, &mut |len| found.add(len))?;
        self.objects.measure(&mut |len| found.add(len))?;
        let mut count = self.count.lock();
        found.add_all(count.since);
        count.there = found;
        count.looked = Some(Instant::now());
        Ok(())
    }

    /// Sets room for an object of this name aside, before any of its bytes is written.
    fn reserve(&self, name: &str, bytes: u64) -> Result<()> {
        let enough = |count: &Count| match count.looked {
            Some(at) => at.elapsed() < SWEEP || self.fits(count, bytes),
            None => false,
        };
        let known = enough(&self.count.lock());
        if !known {
            self.look_unless(enough)?;
        }
        let mut count = self.count.lock();
        if self.fits(&count, bytes) {
            count.under_way.add(bytes);
            return Ok(());
        }
        Err(Error::new(Kind::Denied, self.full(name, count.all())))
    }

    fn full(&self, name: &str, have: Usage) -> String {
        let StoreRules { keep_deleted, max_bytes, max_objects, .. } = &self.rules;
        let most = max_bytes.map_or(String::new(), |most| format!(" of at most {most}"));
        format!(
            "cannot store {name}: the store is full for this host, which has {} of at most {max_objects} objects and \
             {}{most} bytes there, with what was deleted less than {} s ago; remove old backups, or have max_objects \
             or quota raised in [backup_store] there",
            have.objects,
            have.bytes,
            keep_deleted.as_secs(),
        )
    }

    fn fits(&self, count: &Count, bytes: u64) -> bool {
        let (all, most) = (count.all(), self.rules.max_bytes.unwrap_or(u64::MAX));
        all.objects < self.rules.max_objects && all.bytes.saturating_add(bytes) <= most
    }

    /// Creates an object, if there is room for it.
    ///
    /// # Errors
    /// `Denied` when there is none; what the store says.
    pub fn put_new(&self, name: &str, bytes: &[u8]) -> Result<Put> {
        check_name(name)?;
        if name.split('/').count() > MAX_PARTS {
            let what = format!(
                "cannot store {name}: its name has more than the {MAX_PARTS} parts that this store takes; use a \
                 folder with fewer parts in dray://HOST/FOLDER"
            );
            return Err(Error::new(Kind::Invalid, what));
        }
        let len = bytes.len() as u64;
        self.reserve(name, len)?;
        let put = self.objects.put_new(name, bytes);
        if put.is_err() {
            self.objects.tidy(name);
        }
        let mut count = self.count.lock();
        count.under_way.take(len);
        // One that has failed may be there: it counts until the next look.
        if !matches!(put, Ok(Put::Existed)) {
            count.there.add(len);
            count.since.add(len);
        }
        put
    }

    /// Deletes an object as the rules say.
    ///
    /// # Errors
    /// `Denied` when nothing may be deleted; what the store says.
    pub fn delete(&self, name: &str) -> Result<()> {
        let _deleting = self.deleting.lock();
        let Some(len) = self.objects.length(name)? else { return Ok(()) };
        let at_once = self.rules.keep_deleted.is_zero() && !self.rules.append_only;
        if at_once || len == 0 && is_mark(name) {
            if let Some(len) = self.objects.remove(name)? {
                self.count.lock().there.take(len);
            }
        } else if self.rules.append_only {
            let what = format!(
                "cannot delete {name}: the store is append-only; remove old backups on the host that has it"
            );
            return Err(Error::new(Kind::Denied, what));
        } else {
            self.objects.put_away(name)?;
        }
        self.objects.tidy(name);
        Ok(())
    }
}

/// Whether this is the mark of a writer that is at work, of a repository in any folder. Such an object is empty,
/// and its writer removes it: [FOLDER/]sessions/SESSION/MARK.
fn is_mark(name: &str) -> bool {
    let mut parts = name.rsplit('/').skip(1);
    let session = parts.next().unwrap_or_default();
    let folder = parts.next().unwrap_or_default();
    session.len() == 32
        && session.bytes().all(|b| b.is_ascii_hexdigit())
        && folder == SESSIONS.trim_end_matches('/')
}

impl Count {
    fn all(&self) -> Usage {
        let mut all = self.there;
        all.add_all(self.under_way);
        all
    }
}

impl Usage {
    fn add(&mut self, bytes: u64) {
        self.add_all(Self { bytes, objects: 1 });
    }

    fn add_all(&mut self, more: Self) {
        self.objects = self.objects.saturating_add(more.objects);
        self.bytes = self.bytes.saturating_add(more.bytes);
    }

    fn take(&mut self, bytes: u64) {
        self.objects = self.objects.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

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
        Shelf::open(dir.path(), rules(100, 9)).unwrap().look().unwrap();
        assert_eq!(names(&folder).len(), 1);
        let soon = StoreRules { keep_deleted: Duration::ZERO, ..rules(100, 9) };
        let shelf = Shelf::open(dir.path(), soon).unwrap();
        shelf.look().unwrap();
        assert!(!folder.exists());
        assert_eq!(shelf.count.lock().all(), Usage::default());
    }

    #[test]
    fn an_append_only_store_deletes_nothing_but_the_marks_of_writers() {
        let dir = tempfile::tempdir().unwrap();
        let rules = StoreRules { append_only: true, ..rules(100, 9) };
        let shelf = Shelf::open(dir.path(), rules).unwrap();
        shelf.put_new("packs/1", b"content").unwrap();
        let session = format!("sessions/{:032x}", 7);
        let marks = [format!("{session}/renewed-1"), format!("team1/{session}/renewed-1")];
        for mark in &marks {
            shelf.put_new(mark, b"").unwrap();
            shelf.delete(mark).unwrap();
        }
        assert_eq!(shelf.objects.list("").unwrap().len(), 1);
        // What only looks like one stays, and so does what has content.
        shelf.put_new(&marks[0], b"content").unwrap();
        shelf.put_new("sessions/packs/1", b"").unwrap();
        for kept in ["packs/1", "sessions/packs/1", &marks[0]] {
            assert_eq!(shelf.delete(kept).unwrap_err().kind(), Kind::Denied, "{kept}");
        }
        assert_eq!(shelf.objects.list("").unwrap().len(), 3);
    }

    #[test]
    fn a_folder_is_not_deleted_and_goes_when_it_is_empty() {
        let dir = tempfile::tempdir().unwrap();
        let shelf = Shelf::open(dir.path(), rules(100, 9)).unwrap();
        shelf.put_new("vms/packs/1", b"content").unwrap();
        shelf.delete("vms").unwrap();
        shelf.delete("vms/packs").unwrap();
        shelf.look().unwrap();
        assert_eq!(shelf.objects.get("vms/packs/1", 9).unwrap(), b"content");
        shelf.delete("vms/packs/1").unwrap();
        assert!(!dir.path().join("vms").exists());
        let deep = ["a"; MAX_PARTS + 1].join("/");
        assert_eq!(shelf.put_new(&deep, b"").unwrap_err().kind(), Kind::Invalid);
        assert!(!dir.path().join("a").exists());
    }

    #[test]
    fn a_look_does_not_forget_the_room_of_uploads_under_way() {
        let dir = tempfile::tempdir().unwrap();
        let shelf = Shelf::open(dir.path(), rules(100, 9)).unwrap();
        shelf.reserve("a", 60).unwrap();
        shelf.look().unwrap();
        assert_eq!(shelf.reserve("b", 41).unwrap_err().kind(), Kind::Denied);
        shelf.reserve("b", 40).unwrap();
    }

    #[test]
    fn deletions_of_one_object_at_the_same_time_free_its_room_once() {
        let dir = tempfile::tempdir().unwrap();
        let at_once = StoreRules { keep_deleted: Duration::ZERO, ..rules(10_000, 1000) };
        let shelf = Shelf::open(dir.path(), at_once).unwrap();
        shelf.put_new("stays", &[0; 1000]).unwrap();
        for _ in 0..50 {
            shelf.put_new("a", &[0; 10]).unwrap();
            std::thread::scope(|scope| {
                (0..4).for_each(|_| drop(scope.spawn(|| shelf.delete("a").unwrap())));
            });
        }
        assert_eq!(shelf.count.lock().all(), Usage { bytes: 1000, objects: 1 });
    }

    #[test]
    fn a_refusal_says_what_failed_why_and_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let append_only = StoreRules { append_only: true, ..rules(100, 9) };
        let shelf = Shelf::open(dir.path(), append_only).unwrap();
        shelf.put_new("packs/1", &[0; 60]).unwrap();
        assert_eq!(
            shelf.put_new("packs/2", &[0; 41]).unwrap_err().to_string(),
            "cannot store packs/2: the store is full for this host, which has 1 of at most 9 objects and 60 of at \
             most 100 bytes there, with what was deleted less than 3600 s ago; remove old backups, or have \
             max_objects or quota raised in [backup_store] there"
        );
        assert_eq!(
            shelf.delete("packs/1").unwrap_err().to_string(),
            "cannot delete packs/1: the store is append-only; remove old backups on the host that has it"
        );
        assert_eq!(
            shelf.put_new("a/b/c/d/e/f/g/packs/1", b"").unwrap_err().to_string(),
            "cannot store a/b/c/d/e/f/g/packs/1: its name has more than the 8 parts that this store takes; use a \
             folder with fewer parts in dray://HOST/FOLDER"
        );
    }
}
