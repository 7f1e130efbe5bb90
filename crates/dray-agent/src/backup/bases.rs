//! The base images under the images of a backup: the backup of a disk needs the images on which the
//! disk is built. A base image never changes, so a repository stores it once, under an id and a
//! generation that follow from its content, independent of its name and of the number of disks on
//! it.

use super::moment::disk_error;
use super::run::BackupRun;
use super::write::ImageWriter;
use crate::agent::Agent;
use dray_api::{ApiResult, BackedUp, ErrorKind, Refusal};
use dray_backup::{Consistency, Info};
use dray_files::unix_ms;
use dray_host::abort;
use dray_host::registry::Entry;
use dray_host::registry::real_path;
use dray_host::stamp::FileStamp;
use dray_image::{Disk, FileImage, FileOptions, Image, Snapshot, SpillFile};
use dray_provider::bases::{Reading, identity};
use dray_provider::destination::failed;
use dray_types::{Ancestor, BlockRange, BlockSet, ImageId};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How often a digest that is being worked out is asked for.
const EVERY: Duration = Duration::from_millis(100);

/// A base image.
pub struct Base {
    path: PathBuf,
    stamp: FileStamp,
    id: ImageId,
    generation: Ancestor,
}

impl Base {
    fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    fn whole(&self) -> BlockSet {
        [BlockRange::whole(self.stamp.len)].into_iter().collect()
    }
}

impl Agent {
    /// Backs up what these images are built on, as far as the repository does not have it. Returns all of it, too.
    ///
    /// # Errors
    /// Whatever keeps one of them from being backed up.
    pub fn back_up_bases(
        &self,
        run: &BackupRun<'_>,
        entries: &[Arc<Entry>],
    ) -> ApiResult<(Vec<BackedUp>, Vec<Base>)> {
        let (mut done, mut bases) = (Vec::new(), Vec::new());
        for path in self.all_base_paths(run.what, entries)? {
            let base = self.known_base(run, path)?;
            let known = run.repository.backups(base.id);
            let known = known.map_err(|why| failed(run.what, &why))?.backups;
            if known.iter().all(|backup| backup.info.generation != base.generation) {
                done.push(self.back_up_base(run, &base)?);
            }
            bases.push(base);
        }
        Ok((done, bases))
    }

    /// Refuses a backup whose images are built on something else by now than on what it has of their bases.
    ///
    /// # Errors
    /// On what, or what the file system reports.
    pub fn check_bases(&self, what: &str, entries: &[Arc<Entry>], bases: &[Base]) -> ApiResult<()> {
        let now = self.all_base_paths(what, entries)?;
        if !now.iter().eq(bases.iter().map(|base| &base.path)) {
            let why = "another program has changed what the images are built on meanwhile";
            return Err(Refusal::new(ErrorKind::Conflict, what, why)
                .hint("when nothing changes their chains any more, back them up again"));
        }
        bases.iter().try_for_each(|base| check_unchanged(what, base))
    }

    /// The files that any of the images is built on, in order.
    fn all_base_paths(&self, what: &str, entries: &[Arc<Entry>]) -> ApiResult<BTreeSet<PathBuf>> {
        let mut paths = BTreeSet::new();
        for entry in entries {
            paths.extend(self.base_paths(what, entry)?);
        }
        Ok(paths)
    }

    /// The files that an image is built on.
    fn base_paths(&self, what: &str, entry: &Entry) -> ApiResult<Vec<PathBuf>> {
        let record = entry.record();
        let Some(format) = record.format.as_deref().filter(|format| *format != "raw") else {
            return Ok(Vec::new());
        };
        let image = record.current_path().map_err(|why| Refusal::new(ErrorKind::Io, what, why))?;
        let mut paths = Vec::new();
        for path in self.backing_chain(what, &image, format)? {
            let path = real_path(&path).map_err(|why| Refusal::new(ErrorKind::Io, what, why))?;
            paths.push(path);
        }
        Ok(paths)
    }

    /// Waits until the file's digest is known.
    fn known_base(&self, run: &BackupRun<'_>, path: PathBuf) -> ApiResult<Base> {
        loop {
            if run.job.is_cancelled() {
                let why = "the operator cancelled it";
                return Err(Refusal::new(ErrorKind::Cancelled, run.what, why));
            }
            match self.digests.ask(&path) {
                Reading::Ready(stamp, digest) => {
                    let (id, generation) = identity(&digest);
                    return Ok(Base { path, stamp, id, generation });
                }
                Reading::Running { .. } => std::thread::sleep(EVERY),
                Reading::Failed(why) => {
                    return Err(Refusal::new(ErrorKind::Io, run.what, why));
                }
            }
        }
    }

    fn back_up_base(&self, run: &BackupRun<'_>, base: &Base) -> ApiResult<BackedUp> {
        let BackupRun { what, job, pacer, .. } = *run;
        let (name, len) = (base.name(), base.stamp.len);
        let nth = job.add(&name);
        let mut writer = run.writer(base.id, len, None)?;
        let snapshot = self.base_snapshot(base).map_err(|why| disk_error(what, &why))?;
        ImageWriter { what, len, writer: &mut writer, pacer, job, nth }.run(&snapshot)?;
        check_unchanged(what, base)?;
        let info = Info {
            image: base.id,
            name: name.clone(),
            bytes: len,
            generation: base.generation,
            parent: None,
            ancestors: vec![base.generation],
            taken_unix_ms: unix_ms(),
            host: self.config.name.clone(),
            consistency: Consistency::Crash,
        };
        abort::step("Backup-Base");
        let backup = writer.finish(info).map_err(|why| failed(what, &why))?;
        job.change(nth, |shown| shown.stored_bytes = backup.added_bytes);
        Ok(BackedUp {
            image: name,
            generation: base.generation.into(),
            parent: None,
            full_because: None,
            size: len,
            changed_bytes: len,
            stored_bytes: backup.added_bytes,
            kept_aside_bytes: 0,
        })
    }

    /// The file as a snapshot: nobody writes to it.
    fn base_snapshot(&self, base: &Base) -> dray_image::Result<Snapshot> {
        let direct = self.registry.is_direct(&base.path);
        let options = FileOptions { write: false, direct, export_len: None };
        let disk = Disk::new(Arc::new(FileImage::open(&base.path, options)?) as Arc<dyn Image>);
        let folder = base.path.parent().unwrap_or(Path::new("/"));
        let spill = Box::new(SpillFile::create(folder, base.stamp.len)?);
        let prepared = disk.prepare_snapshot(&base.whole(), spill)?;
        let quiet = disk.quiesce(Duration::ZERO)?;
        disk.snapshot(prepared, &quiet, &base.whole())
    }
}

/// Everything that was read is what the digest was made of.
fn check_unchanged(what: &str, base: &Base) -> ApiResult<()> {
    match FileStamp::of(&base.path) {
        Ok(stamp) if stamp.has_same_content(&base.stamp) => Ok(()),
        _ => {
            let why = format!("{} was changed during the backup", base.path.display());
            Err(Refusal::new(ErrorKind::Conflict, what, why).hint(
                "no program may write to a base image: the disks that are built on it would break",
            ))
        }
    }
}
