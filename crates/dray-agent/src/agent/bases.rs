//! The target's side: whether a file that lies here can be what a base image would be.
//!
//! It can when it has the name, the length and the digest, and nobody writes to it. It is then opened
//! for reading only, under a name of its own in the registry, so that any number of migrations use it
//! at once; nothing that becomes of them changes the file or its name.

use crate::agent::Agent;
use dray_host::pool::{Pool, PoolKind};
use dray_host::record::{CopyState, ImageRecord};
use dray_host::refusals::random_id;
use dray_host::refusals::{Answer, conflict, failed, invalid, of_path, unknown_peer};
use dray_host::released::Released;
use dray_host::stamp::FileStamp;
use dray_image::{locks, names};
use dray_provider::bases::Reading;
use dray_types::{Epoch, ImageId, MigrationId};
use dray_wire::control::MAX_IMAGES;
use dray_wire::request::{BaseThere, ContentDigest, SoughtBase, WantedImage};
use std::path::{Path, PathBuf};

/// What to do about a file that is in the way.
const IN_THE_WAY: &str = "move that file away, or give the image another name with --name HERE=THERE \
                          and correct its name inside the disk with `qemu-img rebase -u`";

/// A file that is used where it lies.
#[derive(Clone, Debug)]
pub struct FileInPlace {
    /// Path of the file.
    pub path: PathBuf,
    /// How it looked when its content was told.
    pub stamp: FileStamp,
}

/// The length that QEMU shows of a file with `len` bytes: it counts whole sectors, and the rest of the last one reads
/// as zeros. That of a compressed qcow2 is seldom one.
fn shown_len(len: u64) -> u64 {
    const SECTOR: u64 = 512;
    len.checked_next_multiple_of(SECTOR).unwrap_or(len)
}

/// The name under which a migration uses such a file: several may have it at once.
pub fn export_name(name: &str, migration: MigrationId) -> String {
    format!("{name}.in-place-{:08x}", migration.0 as u32)
}

impl Agent {
    /// What lies here of images that a peer would send.
    pub(crate) fn bases_for(
        &self,
        peer: &str,
        pool: Option<&str>,
        images: &[SoughtBase],
    ) -> Answer<Vec<BaseThere>> {
        let known = self.config.peer(peer).ok_or_else(unknown_peer)?;
        let pool = self.config.pool_for(&known, pool).map_err(of_path)?;
        if images.len() > MAX_IMAGES {
            return Err(invalid(format!("more than {MAX_IMAGES} images at once")));
        }
        Ok(images.iter().map(|sought| self.base_there(pool, sought)).collect())
    }

    fn base_there(&self, pool: &Pool, sought: &SoughtBase) -> BaseThere {
        let Some(path) = self.shareable(pool, &sought.name) else { return BaseThere::Absent };
        let shown = path.display();
        let other = |what: String| BaseThere::Other { why: format!("{what}; {IN_THE_WAY}") };
        let len = match FileStamp::of(&path) {
            Ok(stamp) => stamp.len,
            Err(why) => return other(format!("{shown} cannot be examined: {why}")),
        };
        if shown_len(len) != sought.len {
            let wanted = sought.len;
            return other(format!(
                "{shown} exists and is another file: it has {len} bytes, the base image {wanted}"
            ));
        }
        let digest = match self.digests.ask(&path) {
            Reading::Running { done, total } => return BaseThere::Reading { done, total },
            Reading::Failed(why) => {
                let why =
                    format!("{shown} cannot be compared with the base image: {why}; try again");
                return BaseThere::Other { why };
            }
            Reading::Ready(_, digest) => digest,
        };
        if let Some(user) = writer(&path) {
            return other(format!("{shown} exists, and another program writes to it: {user}"));
        }
        match sought.digest {
            None => BaseThere::Read,
            Some(wanted) if wanted == digest => BaseThere::Same,
            Some(_) => other(format!(
                "{shown} exists and is another file: its content is not that of the base image"
            )),
        }
    }

    /// The plain file in `pool` that has this name; none where there is none, or where it is an image
    /// of dray's own that is more than a file to be read.
    fn shareable(&self, pool: &Pool, name: &str) -> Option<PathBuf> {
        if pool.kind != PoolKind::Files {
            return None;
        }
        let path = pool.image_path(name).ok()?;
        let plain = path.symlink_metadata().is_ok_and(|meta| meta.is_file());
        (plain && !self.is_more_than_a_base(&path)).then_some(path)
    }

    /// Whether the file is, or was, or becomes an image that somebody may write.
    fn is_more_than_a_base(&self, path: &Path) -> bool {
        let written = |record: &ImageRecord| {
            let here = record.path == path || record.current_path().is_ok_and(|at| at == path);
            here && !record.is_base()
        };
        let released = |note: &Released| {
            let same = |now: FileStamp| now.file.is_same(&note.file.file);
            !note.image.read_only && note.image.path == path && FileStamp::of(path).is_ok_and(same)
        };
        self.registry.all_records().iter().any(written)
            || self.registry.released.all().iter().any(released)
    }

    /// The file that a base image will be, if its content is known to be `digest`.
    ///
    /// # Errors
    /// That it is not any more, and what to do.
    pub(crate) fn base_in_place(
        &self,
        pool: &Pool,
        image: &WantedImage,
        digest: &ContentDigest,
    ) -> Answer<FileInPlace> {
        let changed = |name: &str| {
            conflict(format!("{name} was changed since it was compared")).hint("try again")
        };
        let path = self.shareable(pool, &image.name).ok_or_else(|| changed(&image.name))?;
        match self.digests.known(&path) {
            Some((stamp, known))
                if image.read_only && known == *digest && shown_len(stamp.len) == image.len =>
            {
                Ok(FileInPlace { path, stamp })
            }
            _ => Err(changed(&path.display().to_string())),
        }
    }

    /// Registers a file that lies here as an image of `migration`; the file is only opened to be read.
    ///
    /// # Errors
    /// That it was changed by now, or what the store reports.
    pub(crate) fn use_in_place(
        &self,
        migration: MigrationId,
        image: &WantedImage,
        lying: &FileInPlace,
    ) -> Answer<()> {
        // Its own: each QEMU that runs on the file is remembered by itself, and what backups call the
        // file is the same for all of them.
        let id = ImageId(random_id()?);
        let (name, path) = (export_name(&image.name, migration), lying.path.clone());
        let record = ImageRecord {
            mode: names::file_mode(&path).map_err(failed)?,
            read_only: true,
            in_place: Some(lying.stamp),
            state: CopyState::Incoming,
            epoch: Epoch(0),
            migration: Some(migration),
            ..ImageRecord::owned(name, id, path, image.len)
        };
        let file = self.registry.open_file(&record).map_err(failed)?;
        self.registry.add(record, file).map(drop).map_err(failed)
    }
}

/// Who has the file open for writing, as far as QEMU's locks tell.
fn writer(path: &Path) -> Option<String> {
    let user = locks::probe(path).ok()??;
    let writes = [locks::Permission::Write, locks::Permission::Resize];
    user.used.iter().any(|used| writes.contains(used)).then(|| user.to_string())
}
