//! A file that an agent made for an image that was to come, and of which it knew nothing yet when it died.
//!
//! The file is made before its record, which names it. A crash between the two leaves a file that nobody knows,
//! in the way of the next image of that name. It goes when it is certain that it is one: nothing that is durable
//! here has its path, it is as an agent makes it (a regular file of no bytes, which nobody may open), and no
//! other program has it locked. So a file with anything in it is never touched.

use super::Registry;
use crate::folder::intent::TargetIntent;
use crate::folder::log::{Folder, TARGET_INTENT};
use crate::record::ImageRecord;
use dray_files::files::{Kind, Look};
use dray_image::{FileOptions, Hold, ImageNames, QemuLocks};
use parking_lot::MutexGuard;
use std::io;
use std::path::Path;

impl Registry {
    /// Who makes the incomplete file of an image holds this until the file has a length or a record: until then it
    /// looks like one that a dead agent has left.
    pub fn hold_new_files(&self) -> MutexGuard<'_, ()> {
        self.making.lock()
    }

    /// Removes what a dead agent has left at the place of the incomplete file of an image that comes, if it is that
    /// beyond doubt. Who calls [holds the new files](Self::hold_new_files).
    ///
    /// # Errors
    /// What the file system reports when it is removed.
    pub(super) fn remove_leftover(&self, coming: &ImageRecord) -> io::Result<()> {
        let names = self.names(coming)?;
        let path = self.at(&names.partial());
        // Where that cannot be told, the file stays in the way.
        if !path.exists()? || !self.is_leftover(coming, &names).unwrap_or(false) {
            return Ok(());
        }
        names.remove_partial().map_err(io::Error::other)?;
        tracing::info!(path = %path.path().display(),
            "removed an empty file that an agent had made for an image just before it died");
        Ok(())
    }

    fn is_leftover(&self, coming: &ImageRecord, names: &ImageNames) -> io::Result<bool> {
        let path = names.partial();
        let is_new = self.store.images().files().link(&path).is_none()
            && is_as_made(&self.at(&path).look()?);
        Ok(is_new && !self.is_named(coming)? && self.is_unlocked(&path))
    }

    /// Whether a record or a migration to here names an image at this path, or may.
    fn is_named(&self, coming: &ImageRecord) -> io::Result<bool> {
        let has_name = self.path_of(&coming.name).exists()?;
        let has_path = self.all_records().iter().any(|record| record.path == coming.path);
        // Of a record that cannot be read nobody knows the path.
        let unread = self
            .all_closed()
            .iter()
            .any(|(name, closed)| closed.absent.is_none() && self.get(name).is_none());
        if has_name || has_path || unread {
            return Ok(true);
        }
        for folder in Folder::all(&self.store, TARGET_INTENT)? {
            // One that cannot be read may name it.
            let Ok(intent) = folder.file(TARGET_INTENT).get::<TargetIntent>() else {
                return Ok(true);
            };
            if intent.images.iter().any(|image| image.path == coming.path) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether no other program has locked the file, as another agent does that has an image in it.
    fn is_unlocked(&self, path: &Path) -> bool {
        let options = FileOptions { write: true, direct: false, export_len: None };
        let Ok(file) = self.opener().open_closed(path, options) else { return false };
        // There are no locks on a simulated disk.
        file.as_file().is_none_or(|image| QemuLocks::take(image.file(), path, Hold::Owner).is_ok())
    }
}

/// Whether a file looks as one that was just made for an image.
fn is_as_made(look: &Look) -> bool {
    look.kind == Kind::File && look.len == 0 && look.mode & 0o7777 == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::intent::Settings;
    use crate::folder::log::End;
    use crate::registry::surroundings::tests::Plain;
    use crate::store::Store;
    use dray_image::ErrorKind;
    use dray_types::{BLOCK_SIZE, ImageId, MigrationId};
    use dray_wire::ImageOffer;
    use std::fs::{File, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;
    use std::sync::Arc;

    const NAME: &str = "disk";
    const MIGRATION: MigrationId = MigrationId(5);

    /// A host at which an agent has died when it had made the file of an image.
    struct Host(tempfile::TempDir);

    impl Host {
        fn new() -> Self {
            let host = Self(tempfile::tempdir().unwrap());
            host.names().create_partial(0).unwrap();
            host
        }

        fn path(&self) -> PathBuf {
            self.0.path().join(NAME)
        }

        fn names(&self) -> ImageNames {
            ImageNames::of(&self.path()).unwrap()
        }

        fn store(&self) -> Store {
            Store::open(&self.0.path().join("state")).unwrap()
        }

        fn start(&self) -> Arc<Registry> {
            Registry::load(self.store(), Arc::new(Plain)).unwrap()
        }

        fn coming(&self, name: &str) -> ImageRecord {
            ImageRecord::coming(&offer(name), self.path(), MIGRATION)
        }

        /// What the next prepare is told.
        fn prepare(&self) -> Result<(), String> {
            let made = self.start().make_partial(self.coming(NAME));
            made.map(drop).map_err(|why| why.to_string())
        }

        /// It is refused, and the file stays.
        fn stays(&self, what: &str) {
            let why = self.prepare().expect_err(what);
            assert!(why.contains("exists already; move it away"), "{what}: {why}");
            assert!(self.names().partial().symlink_metadata().is_ok(), "{what}");
        }
    }

    fn offer(name: &str) -> ImageOffer {
        let len = 16 * BLOCK_SIZE;
        ImageOffer { id: ImageId(7), name: name.to_owned(), len, read_only: false }
    }

    #[test]
    fn a_file_that_was_made_and_not_recorded_is_not_in_the_way() {
        let host = Host::new();
        host.prepare().unwrap();
        assert!(host.names().partial().exists());
        assert_eq!(host.start().all_records().len(), 1);
    }

    #[test]
    fn what_is_not_as_an_agent_makes_it_stays() {
        let host = Host::new();
        let file = File::options().write(true).open(host.names().partial());
        let Ok(file) = file else { return println!("skipped: who is not root cannot open it") };
        file.set_len(1).unwrap();
        host.stays("it has a byte");
        file.set_len(0).unwrap();
        file.set_permissions(Permissions::from_mode(0o600)).unwrap();
        host.stays("its mode is another one");
        file.set_permissions(Permissions::from_mode(0o0)).unwrap();
        let aside = host.0.path().join("aside");
        std::fs::rename(host.names().partial(), &aside).unwrap();
        std::os::unix::fs::symlink(&aside, host.names().partial()).unwrap();
        host.stays("it is a link");
    }

    #[test]
    fn what_another_program_has_locked_stays() {
        let host = Host::new();
        let file = File::options().read(true).write(true).open(host.names().partial());
        let Ok(file) = file else { return println!("skipped: who is not root cannot open it") };
        let locks = QemuLocks::take(&file, &host.path(), Hold::Owner).unwrap();
        host.stays("another agent has it");
        drop((locks, file));
        host.prepare().unwrap();
    }

    #[test]
    fn what_a_record_names_stays() {
        let host = Host::new();
        let record = host.coming("other");
        host.start().path_of("other").put(&record).unwrap();
        host.stays("an image of another name has the path");
        std::fs::write(host.start().path_of("other").path(), "{").unwrap();
        host.stays("a record cannot be read");
    }

    #[test]
    fn what_a_migration_names_stays() {
        let host = Host::new();
        let image = crate::folder::intent::TargetImageIntent {
            offer: offer(NAME),
            path: host.path(),
            zeroed: true,
            replica: None,
            refused: None,
            in_place: None,
            qcow2: false,
        };
        let intent = TargetIntent {
            migration: MIGRATION,
            peer: "hosta".into(),
            images: vec![image],
            settings: Settings::default(),
            guest: None,
            qemu: None,
            started_unix_ms: 0,
        };
        let folder = Folder::begin(&host.store(), MIGRATION, End::Target, &intent).unwrap();
        host.stays("its record is lost");
        folder.file(TARGET_INTENT).put(&1).unwrap();
        host.stays("its intent cannot be read");
    }

    /// An image's own name is taken: that is told as before.
    #[test]
    fn an_image_that_is_there_keeps_others_from_coming() {
        let host = Host::new();
        File::create(host.path()).unwrap();
        let made = host.start().make_partial(host.coming(NAME)).map(drop).unwrap_err();
        let inner = made.get_ref().and_then(|why| why.downcast_ref::<dray_image::Error>());
        assert_eq!(inner.map(|why| why.kind), Some(ErrorKind::InUse));
    }
}
