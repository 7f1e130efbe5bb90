//! The engine's records in a migration's journal, and the folder they live in.

use super::intent::SourceIntent;
use super::intents::SOURCE_INTENTS;
use crate::abort;
use crate::store::Store;
use dray_files::StatePath;
use dray_files::files::Kind;
use dray_image::journal::Journal;
use dray_types::MigrationId;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::marker::PhantomData;
use std::path::Path;

/// Room for records to come that is taken when a journal is opened: an attempt, its end and what
/// ownership needs take less than 100 bytes each, so a full disk stops no decision.
const RESERVE: u64 = 64 << 10;

/// What names a migration of either side: without one there is none.
const INTENTS: [&str; 2] = [SOURCE_INTENT, TARGET_INTENT];

/// Which end of a migration this host is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// Its images go away.
    Source,
    /// They come.
    Target,
}

impl End {
    /// Name of its intent in the migration's folder.
    pub fn intent(self) -> &'static str {
        match self {
            Self::Source => SOURCE_INTENT,
            Self::Target => TARGET_INTENT,
        }
    }

    fn journal(self) -> &'static str {
        match self {
            Self::Source => SOURCE_JOURNAL,
            Self::Target => TARGET_JOURNAL,
        }
    }

    fn other(self) -> Self {
        match self {
            Self::Source => Self::Target,
            Self::Target => Self::Source,
        }
    }
}

/// Name of a source's intent in the migration's folder.
pub const SOURCE_INTENT: &str = "source.json";
/// Name of a target's.
pub const TARGET_INTENT: &str = "target.json";
/// Name of a source's journal.
pub const SOURCE_JOURNAL: &str = "source.journal";
/// Name of a target's.
pub const TARGET_JOURNAL: &str = "target.journal";

/// Name of what is known to be present at a target of the image at this place in the migration's order.
pub fn present_name(index: usize) -> String {
    format!("present-{index}")
}

/// What an intent's name ends in when its migration is void.
const VOID: &str = "void";

/// What a source's intent's name ends in when the migration never begins, or never again, and its target
/// has not heard that yet.
const CANCELLED: &str = "cancelled";

/// The folder of one migration.
#[derive(Clone, Debug)]
pub struct Folder(StatePath);

impl Folder {
    /// Makes the folder of `migration`.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn create(store: &Store, migration: MigrationId) -> io::Result<Self> {
        let folder = Self::of(store, migration);
        folder.0.make_dirs()?;
        Ok(folder)
    }

    /// Makes the folder of `migration` and its intent; a folder that cannot hold even that goes. No host is
    /// both ends of one migration.
    ///
    /// # Errors
    /// That this host is its other end, or what the file system reports.
    pub fn begin(
        store: &Store,
        migration: MigrationId,
        end: End,
        intent: &impl Serialize,
    ) -> io::Result<Self> {
        if Self::of(store, migration).holds(end.other())? {
            let why = "this host is the other end of a migration with this id";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
        }
        let folder = Self::create(store, migration)?;
        let path = folder.file(end.intent());
        let Err(why) = path.put(intent) else { return Ok(folder) };
        if matches!(path.exists(), Ok(false)) {
            // The failure that is told is the first one.
            let _ = folder.remove(end);
        }
        Err(why)
    }

    /// The folder of `migration`, which may not be there.
    pub fn of(store: &Store, migration: MigrationId) -> Self {
        Self(store.migrations().join(migration.to_string()))
    }

    /// The folders of all migrations that have an intent of this name.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn all(store: &Store, intent: &str) -> io::Result<Vec<Self>> {
        let mut found = Vec::new();
        for path in store.migrations().entries("")? {
            // One that cannot be looked at may have it: whoever reads it fails for it alone, and tries again.
            if path.join(intent).exists().unwrap_or(true) {
                found.push(Self(path));
            }
        }
        Ok(found)
    }

    /// The migrations away of which a target may still want an answer from the copies here, with the images that
    /// they move.
    ///
    /// # Errors
    /// What the file system reports, or that an intent cannot be read.
    pub fn all_away(store: &Store) -> io::Result<Vec<(MigrationId, SourceIntent)>> {
        let folders = Self::all(store, SOURCE_INTENT)?;
        let read = |folder: Self| {
            let intent: SourceIntent = folder.file(SOURCE_INTENT).get()?;
            Ok((intent.migration, intent))
        };
        folders.into_iter().map(read).collect()
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Whether it exists.
    ///
    /// # Errors
    /// What the file system reports.
    pub(crate) fn is_there(&self) -> io::Result<bool> {
        self.0.exists()
    }

    /// Whether this end has, or had, something in it.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn holds(&self, end: End) -> io::Result<bool> {
        let known = any([self.file(end.intent()), self.void_file(end.intent())])?;
        Ok(known || (end == End::Source && self.cancelled_file().exists()?))
    }

    /// The migration that its name says it is of.
    pub fn migration(&self) -> Option<MigrationId> {
        self.path().file_name()?.to_str()?.parse().ok()
    }

    /// A file in the folder.
    pub fn file(&self, name: &str) -> StatePath {
        self.0.join(name)
    }

    /// Removes what this end has in the folder, and the folder unless it is the other end's too; it may be
    /// gone already. The intent goes first, durably: one without its journal would be taken for a
    /// migration that has not begun. What a crash leaves behind goes with [`sweep`](Self::sweep).
    ///
    /// # Errors
    /// What the file system reports.
    pub fn remove(&self, end: End) -> io::Result<()> {
        if !self.0.exists()? {
            return Ok(());
        }
        self.remove_intents(end)?;
        if self.holds(end.other())? {
            return self.file(end.journal()).remove();
        }
        abort::before(|| vec!["RemoveFolder".to_owned()]);
        self.0.remove_folder()
    }

    /// Removes the folder of a void migration whose images nobody can claim any more; one that goes on
    /// keeps it.
    ///
    /// # Errors
    /// What the file system reports.
    pub(crate) fn remove_void(&self) -> io::Result<()> {
        if self.has_intent()? {
            return Ok(());
        }
        self.remove(End::Target)?;
        self.remove(End::Source)
    }

    /// From here on a restart no longer knows the migration as this end of it, durably.
    ///
    /// # Errors
    /// What the file system reports.
    pub(crate) fn remove_intents(&self, end: End) -> io::Result<()> {
        self.file(end.intent()).remove()?;
        self.void_file(end.intent()).remove()?;
        if end == End::Source { self.cancelled_file().remove() } else { Ok(()) }
    }

    /// The source never begins the migration, or never again, durably: no restart brings it back, and what
    /// is left tells its target so. It takes no room, and can be repeated.
    ///
    /// # Errors
    /// What the file system reports; the migration then is as before, or cancelled.
    pub fn set_cancelled(&self) -> io::Result<()> {
        if !self.0.exists()? {
            return Ok(());
        }
        abort::step("SetCancelled");
        match self.file(SOURCE_INTENT).rename(&self.cancelled_file()) {
            Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(why),
            _ => self.cancelled_file().sync_parent()?,
        }
        // It has room of its own that nobody needs any more; who cannot give it back keeps it.
        let _ = self.is_cancelled().and_then(|cancelled| match cancelled {
            true => self.file(SOURCE_JOURNAL).remove(),
            false => Ok(()),
        });
        Ok(())
    }

    /// No power cut undoes any more that it is cancelled.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn settle_cancelled(&self) -> io::Result<()> {
        self.cancelled_file().sync_parent()
    }

    /// It begins after all: a cancel of it has failed, perhaps when its file already had that name.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn take_back_cancelled(&self) -> io::Result<()> {
        let file = self.cancelled_file();
        if file.exists()? { file.remove() } else { Ok(()) }
    }

    /// The intent of a migration that never begins, or never again, and of which its target has not heard
    /// that.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn cancelled<T: DeserializeOwned>(&self) -> io::Result<Option<T>> {
        if self.is_cancelled()? { self.cancelled_file().peek().map(Some) } else { Ok(None) }
    }

    /// Whether it is one of those. One that has an intent is not: it has begun since.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn is_cancelled(&self) -> io::Result<bool> {
        Ok(self.cancelled_file().exists()? && !self.file(SOURCE_INTENT).exists()?)
    }

    fn cancelled_file(&self) -> StatePath {
        self.file(SOURCE_INTENT).with_extension(CANCELLED)
    }

    /// The folders of migrations whose targets have not heard that they never begin.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn all_cancelled(store: &Store) -> io::Result<Vec<Self>> {
        let folders = store.migrations().entries("")?.into_iter().map(Self);
        Ok(folders.filter(|folder| folder.is_cancelled().unwrap_or(false)).collect())
    }

    /// The migration is void, durably: no restart brings it back, and what its folder says stays for
    /// those who claim its images. It takes no room, and can be repeated.
    ///
    /// # Errors
    /// What the file system reports; the migration then is as before, or void.
    pub fn set_void(&self) -> io::Result<()> {
        if !self.0.exists()? {
            return Ok(());
        }
        for intent in INTENTS {
            match self.file(intent).rename(&self.void_file(intent)) {
                Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(why),
                _ => {}
            }
        }
        self.file(VOID).sync_parent()
    }

    /// Whether the migration is void and its images are still to be claimed.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn is_void(&self) -> io::Result<bool> {
        Ok(!self.has_intent()? && any(INTENTS.map(|intent| self.void_file(intent)))?)
    }

    fn has_intent(&self) -> io::Result<bool> {
        any(INTENTS.map(|intent| self.file(intent)))
    }

    /// The folders of void migrations whose images are still to be claimed.
    ///
    /// # Errors
    /// What the file system reports.
    pub(crate) fn voids(store: &Store) -> io::Result<Vec<Self>> {
        let mut found = Vec::new();
        for folder in store.migrations().entries("")?.into_iter().map(Self) {
            if folder.is_void()? {
                found.push(folder);
            }
        }
        Ok(found)
    }

    /// Whether it is the folder of `migration`.
    pub fn is_of(&self, migration: MigrationId) -> bool {
        self.path().file_name().is_some_and(|name| name.to_string_lossy() == migration.to_string())
    }

    /// The intent called `name`, whether the migration is void or not.
    ///
    /// # Errors
    /// What the file system reports.
    pub(crate) fn intent_file(&self, name: &str) -> io::Result<StatePath> {
        let void = self.void_file(name);
        Ok(if void.exists()? { void } else { self.file(name) })
    }

    fn void_file(&self, intent: &str) -> StatePath {
        self.file(intent).with_extension(VOID)
    }

    /// Whether what named the migration is not there, and something else is left of it: a crash came while the
    /// folder was removed, or the intent was lost, which [`Registry::may_need`](crate::registry::Registry) tells.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn lacks_intent(&self) -> io::Result<bool> {
        Ok(self.is_nameless()? && self.0.entries("")?.iter().any(|file| !is_draft(file)))
    }

    /// Whether it is a folder, and nothing in it names a migration.
    fn is_nameless(&self) -> io::Result<bool> {
        let is_folder = self.0.exists()? && self.0.look()?.kind == Kind::Folder;
        Ok(is_folder && !self.has_intent()? && !self.is_void()? && !self.is_cancelled()?)
    }

    /// The end whose intent a folder [lacks](Self::lacks_intent), as far as the rest of it tells.
    pub(crate) fn end_without_intent(&self) -> End {
        let left = [SOURCE_JOURNAL, SOURCE_INTENTS].map(|name| self.file(name));
        if any(left).unwrap_or(false) { End::Source } else { End::Target }
    }

    /// The folders that lack their intent.
    ///
    /// # Errors
    /// What the file system reports.
    pub(crate) fn all_without_intent(store: &Store) -> io::Result<Vec<Self>> {
        let folders = store.migrations().entries("")?.into_iter().map(Self);
        Ok(folders.filter(|folder| folder.lacks_intent().unwrap_or(false)).collect())
    }

    /// Removes what a migration to here has made in the folder, and not the intent: it is as it was before it was
    /// begun. What is the other end's stays.
    ///
    /// # Errors
    /// What the file system reports.
    pub(crate) fn remove_all_but_intents(&self) -> io::Result<()> {
        if !self.0.exists()? {
            return Ok(());
        }
        if self.holds(End::Source)? {
            return self.file(TARGET_JOURNAL).remove();
        }
        let is_intent =
            |file: &StatePath| INTENTS.iter().any(|intent| file.path() == self.file(intent).path());
        self.0.entries("")?.iter().filter(|file| !is_intent(file)).try_for_each(StatePath::remove)
    }

    /// Removes the folders that have no intent: a crash came while they were made or removed. One with more in it
    /// than that stays while it `may_be_needed`: then it is the intent that was lost.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn sweep(
        store: &Store,
        may_be_needed: impl Fn(&Self) -> io::Result<bool>,
    ) -> io::Result<()> {
        let swept = store.migrations().entries("")?.into_iter().map(Self).map(|folder| {
            if folder.is_nameless()? && !(folder.lacks_intent()? && may_be_needed(&folder)?) {
                folder.0.remove_folder()?;
            }
            Ok(())
        });
        // Each is tried, whatever becomes of the others.
        swept.fold(Ok(()), Result::and)
    }
}

/// Whether a crash has left the file while it was written, before it had its name.
fn is_draft(file: &StatePath) -> bool {
    file.path().extension().is_some_and(|extension| extension == "new")
}

fn any(paths: [StatePath; 2]) -> io::Result<bool> {
    Ok(paths[0].exists()? || paths[1].exists()?)
}

/// A journal of records of one type.
pub struct Log<R> {
    journal: Journal,
    records: PhantomData<R>,
}

impl<R: Serialize + DeserializeOwned> Log<R> {
    /// Opens or makes the journal at `path` and returns what it holds.
    ///
    /// # Errors
    /// What the file system reports, or that the journal is damaged.
    pub fn open(path: &StatePath) -> io::Result<(Self, Vec<R>)> {
        let (mut journal, payloads) = Journal::open(path).map_err(named)?;
        if let Err(why) = journal.reserve(RESERVE) {
            // A file system without such a thing, or a full one: then each record is as it comes.
            tracing::debug!(%why, "cannot reserve room for later records");
        }
        let records = payloads
            .iter()
            .map(|payload| postcard::from_bytes(payload).map_err(io::Error::other))
            .collect::<io::Result<_>>()?;
        Ok((Self { journal, records: PhantomData }, records))
    }

    /// Appends records; they are durable together on return.
    ///
    /// # Errors
    /// What the file system reports. They are then certainly not there, unless it
    /// [is unsure](Self::is_unsure).
    pub fn append(&mut self, records: &[R]) -> io::Result<()> {
        let payloads = records
            .iter()
            .map(|record| postcard::to_allocvec(record).map_err(io::Error::other))
            .collect::<io::Result<Vec<_>>>()?;
        let slices: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
        self.journal.append_all(&slices).map_err(named)
    }

    /// Whether nobody knows if what was last appended is durable. The next append decides: then it
    /// is not there.
    pub fn is_unsure(&self) -> bool {
        self.journal.is_unsure()
    }
}

/// An error of the kind that callers decide on.
fn named(why: dray_image::Error) -> io::Error {
    let kind = match why.kind {
        dray_image::ErrorKind::NoSpace => io::ErrorKind::StorageFull,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_death_while_a_folder_goes_leaves_no_migration() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        for end in [End::Source, End::Target] {
            let intent = end.intent();
            let folder = Folder::create(&store, MigrationId(7)).unwrap();
            folder.file(intent).put(&1).unwrap();
            Log::<u8>::open(&folder.file("journal")).unwrap().0.append(&[1]).unwrap();
            Folder::sweep(&store, |_| Ok(false)).unwrap();
            assert_eq!(Folder::all(&store, intent).unwrap().len(), 1);
            folder.set_void().unwrap();
            folder.set_void().unwrap();
            Folder::sweep(&store, |_| Ok(false)).unwrap();
            assert!(folder.is_void().unwrap());
            assert!(folder.intent_file(intent).unwrap().exists().unwrap());
            assert_eq!(Folder::all(&store, intent).unwrap().len(), 0);
            folder.remove_intents(end).unwrap();
            assert!(!folder.is_void().unwrap());
            assert!(folder.file("journal").exists().unwrap());
            assert_eq!(Folder::all(&store, intent).unwrap().len(), 0);
            Folder::sweep(&store, |_| Ok(false)).unwrap();
            assert!(!folder.is_there().unwrap());
            folder.remove(end).unwrap();
        }
    }

    #[test]
    fn one_end_removes_nothing_of_the_other() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        for end in [End::Source, End::Target] {
            let other = end.other();
            let folder = Folder::begin(&store, MigrationId(7), end, &1).unwrap();
            let begun = Folder::begin(&store, MigrationId(7), other, &2).map(drop);
            assert_eq!(begun.unwrap_err().kind(), io::ErrorKind::AlreadyExists);
            // As an older version may have left it.
            folder.file(other.intent()).put(&2).unwrap();
            for journal in [end.journal(), other.journal()] {
                Log::<u8>::open(&folder.file(journal)).unwrap().0.append(&[1]).unwrap();
            }
            for _ in 0..2 {
                folder.remove(other).unwrap();
                Folder::sweep(&store, |_| Ok(false)).unwrap();
                assert!(!folder.holds(other).unwrap() && folder.holds(end).unwrap());
                assert!(!folder.file(other.journal()).exists().unwrap());
                assert!(folder.file(end.journal()).exists().unwrap());
            }
            folder.remove(end).unwrap();
            assert!(!folder.is_there().unwrap());
        }
    }

    #[test]
    fn an_end_that_is_void_or_cancelled_keeps_the_folder_from_the_other() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let folder = Folder::begin(&store, MigrationId(7), End::Source, &1).unwrap();
        for hide in [Folder::set_cancelled, Folder::set_void] {
            hide(&folder).unwrap();
            assert!(Folder::begin(&store, MigrationId(7), End::Target, &2).is_err());
            folder.remove(End::Target).unwrap();
            assert!(folder.holds(End::Source).unwrap());
            folder.remove(End::Source).unwrap();
            Folder::begin(&store, MigrationId(7), End::Source, &1).unwrap();
        }
    }

    #[test]
    fn a_cancelled_migration_is_remembered_until_it_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let folder = Folder::create(&store, MigrationId(7)).unwrap();
        folder.set_cancelled().unwrap();
        assert!(!folder.is_cancelled().unwrap(), "nothing was begun");
        folder.file(SOURCE_INTENT).put(&1).unwrap();
        assert_eq!(folder.cancelled::<u8>().unwrap(), None);
        for _ in 0..2 {
            folder.set_cancelled().unwrap();
            Folder::sweep(&store, |_| Ok(false)).unwrap();
            assert_eq!(folder.cancelled().unwrap(), Some(1));
            assert!(Folder::all(&store, SOURCE_INTENT).unwrap().is_empty());
            assert_eq!(Folder::all_cancelled(&store).unwrap().len(), 1);
        }
        // A cancel that has failed behind its rename, and a migration that begins after that.
        folder.file(SOURCE_INTENT).put(&2).unwrap();
        assert_eq!(folder.cancelled::<u8>().unwrap(), None, "what has an intent goes on");
        assert!(Folder::all_cancelled(&store).unwrap().is_empty());
        folder.take_back_cancelled().unwrap();
        folder.take_back_cancelled().unwrap();
        folder.set_cancelled().unwrap();
        assert_eq!(folder.cancelled().unwrap(), Some(2));
        folder.remove(End::Source).unwrap();
        assert!(Folder::all_cancelled(&store).unwrap().is_empty());
        folder.set_cancelled().unwrap();
        assert!(!folder.is_there().unwrap());
    }

    #[test]
    fn what_is_no_folder_of_a_migration_is_left_alone_and_stops_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        std::fs::write(store.migrations().join("a stray file"), "x").unwrap();
        let folder = Folder::create(&store, MigrationId(7)).unwrap();
        folder.file("journal").create().unwrap();
        Folder::sweep(&store, |_| Ok(false)).unwrap();
        assert!(!folder.is_there().unwrap());
        assert!(store.migrations().join("a stray file").exists().unwrap());
        assert!(Folder::all(&store, SOURCE_INTENT).unwrap().is_empty());
    }
}
