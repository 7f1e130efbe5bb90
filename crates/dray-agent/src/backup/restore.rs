//! An image made of a backup: a file of its own, with an id and a line of its own, that gets its name
//! when all of it is durable. A restore that fails leaves nothing. One that is killed leaves a note. By that the
//! next start removes what is incomplete; a file that has its name already becomes the image, unless somebody has
//! begun to use it since: then it is named.

use crate::agent::Agent;
use crate::jobs::Job;
use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_backup::{Backup, Content, Manifest, PIECE_BYTES, Repository, StreamOptions};
use dray_files::StatePath;
use dray_files::unix_ms;
use dray_host::abort;
use dray_host::lineage::random_id;
use dray_host::record::{ImageRecord, MODE, file_system_below};
use dray_host::refusals::path_error;
use dray_host::stamp::FileStamp;
use dray_image::{ImageNames, locks};
use dray_net::pace::Pacer;
use dray_provider::destination::failed;
use dray_types::ImageId;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Names of notes of restores under way end so.
const NOTE: &str = ".restore";

/// The note of a restore under way.
#[derive(Serialize, Deserialize)]
struct Note {
    /// Where the image will be.
    path: PathBuf,
    /// How its file looks when all of it is durable, before it gets its name.
    #[serde(default)]
    whole: Option<FileStamp>,
    /// The number of the file system that its folder was on.
    #[serde(default)]
    file_system: Option<u64>,
}

impl Note {
    /// Of an image that will be at `path`.
    fn new(path: &Path, whole: Option<FileStamp>) -> Self {
        Self { path: path.to_owned(), whole, file_system: file_system_below(path) }
    }

    /// Refuses to look for what the restore has left where another file system is: it lies on the one that is not
    /// mounted.
    fn check_mounted(&self, names: &ImageNames) -> io::Result<()> {
        // Where the pool is not there nobody can tell.
        self.path.parent().map_or(Ok(()), |dir| dir.metadata().map(drop))?;
        let now = file_system_below(&self.path);
        if self.file_system.zip(now).is_none_or(|(then, now)| then == now) {
            return Ok(());
        }
        // The same one may have got another number.
        let found = names.found().map_err(io::Error::other)?;
        let is_its = |whole: &FileStamp| {
            FileStamp::of(&self.path).is_ok_and(|now| now.file.is_same(&whole.file))
        };
        if found.partial || self.whole.as_ref().is_some_and(is_its) {
            return Ok(());
        }
        let why = format!(
            "{} lay on another file system: is that of its pool mounted?",
            self.path.display()
        );
        Err(io::Error::other(why))
    }
}

/// The backup that is meant: the newest one of the image, or of the generation whose number is given
/// or whose id begins so. The image is named by its id or by its name when it was backed up.
///
/// # Errors
/// `NotFound`; `Invalid` when several images or generations are meant.
pub fn choose(
    what: &str,
    (repository, backups): (&str, Vec<Backup>),
    image: &str,
    generation: Option<&str>,
) -> ApiResult<Backup> {
    let of_image: Vec<Backup> = backups.into_iter().filter(|b| is_of(b, image)).collect();
    let not_found = |why: String| {
        let hint = format!("`dray backups list {repository}` lists them");
        Refusal::new(ErrorKind::NotFound, what, why).hint(hint)
    };
    let Some(newest) = of_image.last() else {
        return Err(not_found(format!("there is no backup of an image '{image}'")));
    };
    if of_image.iter().any(|backup| backup.info.image != newest.info.image) {
        let why = format!("there are backups of several images called '{image}'");
        return Err(Refusal::new(ErrorKind::Invalid, what, why)
            .hint("give its id, which `dray backups --json` shows"));
    }
    // Digits alone are a number, as long as there is such a generation.
    let number = generation.and_then(|given| given.parse().ok());
    let has = |number: &u64| of_image.iter().any(|b| b.info.generation.number == *number);
    let number = number.filter(has);
    let meant = |backup: &&Backup| {
        let at = backup.info.generation;
        match number {
            Some(number) => at.number == number,
            None => generation.is_none_or(|given| at.id.to_string().starts_with(given)),
        }
    };
    let meant: Vec<&Backup> = of_image.iter().filter(meant).collect();
    let first = meant.iter().max_by_key(|backup| (backup.number, backup.info.taken_unix_ms));
    let Some(&found) = first else {
        let given = generation.unwrap_or_default();
        return Err(not_found(format!("no backup of '{image}' is of generation '{given}'")));
    };
    let several = meant.iter().any(|other| other.info.generation != found.info.generation);
    if generation.is_some() && several {
        let why = "several generations have this number or id";
        return Err(Refusal::new(ErrorKind::Invalid, what, why)
            .hint("give more digits of the generation's id"));
    }
    Ok(found.clone())
}

/// Whether a backup is of the image called so, or with this id.
pub fn is_of(backup: &Backup, image: &str) -> bool {
    backup.info.name == image || backup.info.image.to_string() == image
}

/// What is restored, and how.
pub struct Restoring<'a> {
    /// For errors.
    pub what: &'a str,
    /// The backup.
    pub manifest: &'a Manifest,
    /// The new image's name.
    pub name: &'a str,
    /// The pool; the first one when absent.
    pub pool: Option<&'a str>,
    /// The limit of what is written.
    pub pacer: &'a Pacer,
    /// The job that counts the progress and can be cancelled.
    pub job: &'a Job,
}

/// A file under way; dropping it removes it.
struct Partial {
    names: ImageNames,
    note: StatePath,
    done: bool,
}

impl Drop for Partial {
    fn drop(&mut self) {
        let removed = if self.done { Ok(()) } else { self.names.remove_partial() };
        let removed = removed.map_err(std::io::Error::other);
        if let Err(why) = removed.and_then(|()| self.note.remove()) {
            tracing::warn!(%why, "cannot remove the files of a failed restore; the next start \
                                  removes them");
        }
    }
}

impl Agent {
    /// Makes an image; its path and the bytes that were written.
    ///
    /// # Errors
    /// What keeps it from being made; nothing is left behind then.
    pub fn restore_image(
        &self,
        repository: &Repository,
        restoring: &Restoring<'_>,
    ) -> ApiResult<(PathBuf, u64)> {
        let Restoring { what, manifest, name, .. } = *restoring;
        let path = self.restore_path(restoring)?;
        let disk = |why: dray_image::Error| super::moment::disk_error(what, &why);
        let io = |why: std::io::Error| Refusal::new(ErrorKind::Io, what, why);
        let names = ImageNames::of(&path).map_err(disk)?;
        let note = self.store.backups().join(format!("{name}{NOTE}"));
        self.store.backups().make_dirs().map_err(io)?;
        refuse_existing(what, &names, &note)?;
        note.put(&Note::new(&path, None)).map_err(io)?;
        let mut partial = Partial { names, note, done: false };
        abort::step("Restore-Create");
        let making = self.registry.hold_new_files();
        partial.names.create_partial(manifest.info().bytes).map_err(disk)?;
        drop(making);
        let file = partial.names.open_partial().map_err(disk)?;
        let written = fill(repository, restoring, &file)?;
        file.sync_all().map_err(io)?;
        let whole = Some(FileStamp::of_open(&file).map_err(io)?);
        partial.note.put(&Note::new(&path, whole)).map_err(io)?;
        abort::step("Restore-Finish");
        partial.names.finish_partial(MODE).map_err(disk)?;
        partial.done = true;
        abort::step("Restore-Register");
        if let Err(why) = self.register_restored(name, &path, manifest.info().bytes) {
            let _ = self.registry.at(&path).remove();
            return Err(io(why));
        }
        Ok((path, written))
    }

    fn restore_path(&self, restoring: &Restoring<'_>) -> ApiResult<PathBuf> {
        let Restoring { what, name, .. } = *restoring;
        let pool = match restoring.pool {
            Some(name) => self.config.pool(name),
            None => self.config.pools.first(),
        };
        let Some(pool) = pool else {
            let why = "there is no such pool";
            return Err(Refusal::new(ErrorKind::NotFound, what, why)
                .hint("the configuration lists the pools of this host"));
        };
        if pool.kind == dray_host::pool::PoolKind::Devices {
            let why = format!("pool '{}' holds devices", pool.name);
            return Err(Refusal::new(ErrorKind::Unsupported, what, why)
                .hint("restore into a pool of files, and copy the image to the device"));
        }
        if self.registry.get(name).is_some() {
            let why = format!("an image named '{name}' exists already");
            return Err(Refusal::new(ErrorKind::Conflict, what, why).hint("choose another --as"));
        }
        pool.image_path(name).map_err(|why| path_error(what, why))
    }

    /// The file of `bytes` at `path`, which has all that was restored, becomes the image `name`.
    fn register_restored(&self, name: &str, path: &Path, bytes: u64) -> io::Result<()> {
        let id = ImageId(random_id()?);
        let record = ImageRecord::owned(name.to_owned(), id, path.to_owned(), bytes);
        let file = self.registry.open_file(&record).map_err(io::Error::other)?;
        self.registry.add(record, file)?;
        tracing::info!(image = name, at = unix_ms(), "restored a backup");
        Ok(())
    }

    /// Ends the restores that a kill has interrupted. What cannot be done now is told, and tried again by the next
    /// start.
    pub(crate) fn end_restores(&self) {
        let folder = self.store.backups();
        let notes = match folder.entries(NOTE) {
            Ok(notes) => notes,
            Err(why) if why.kind() == std::io::ErrorKind::NotFound => return,
            Err(why) => {
                let what = "the files of interrupted restores stay";
                return self.troubles.note("restore", what, why, "restart the agent to try again");
            }
        };
        for note in notes {
            if let Err(why) = self.end_restore(&note) {
                let key = format!("restore.{}", note.display());
                let what = "the files of an interrupted restore stay";
                let hint = format!(
                    "the next start tries again; remove {} if its file does not exist any more",
                    note.display()
                );
                self.troubles.note(key, what, why, hint);
            }
        }
    }

    fn end_restore(&self, note: &StatePath) -> io::Result<()> {
        let known: Note = note.get()?;
        let Note { path, whole, .. } = &known;
        let names = ImageNames::of(path).map_err(std::io::Error::other)?;
        // An image may have come under this name since, and what lies there is its own. Its record says
        // so, also one that cannot be read.
        let name = note.stem().unwrap_or_default();
        let is_another = self.store.images().join(format!("{name}.json")).exists()?
            || self.registry.all().iter().any(|entry| entry.record().path == *path);
        if !is_another {
            known.check_mounted(&names)?;
            names.remove_partial().map_err(std::io::Error::other)?;
            self.finish_named(name, path, whole.as_ref())?;
        }
        note.remove()
    }

    /// A restore was killed when its file had its name, and no image was there yet: it becomes one.
    fn finish_named(&self, name: &str, path: &Path, whole: Option<&FileStamp>) -> io::Result<()> {
        let now = match FileStamp::of(path) {
            Ok(now) => Some(now),
            Err(why) if why.kind() == io::ErrorKind::NotFound => None,
            Err(why) => return Err(why),
        };
        let shown = path.display();
        // Another file may have come there, whoever made it.
        let is_its = |(now, whole): &(FileStamp, &FileStamp)| now.file.is_same(&whole.file);
        let Some((now, whole)) = now.zip(whole).filter(is_its) else {
            tracing::info!(path = %shown, "a restore was interrupted, and left no file");
            return Ok(());
        };
        let user = locks::probe(path).map_err(io::Error::other)?;
        if user.is_none() && now.has_same_content(whole) {
            // It may be the base of an overlay by now, so it is not removed.
            return self.register_restored(name, path, path.metadata()?.len());
        }
        let what = format!("an interrupted restore has left {shown}, and it is no image of dray");
        let why = user
            .map_or("another program has written to it since".to_owned(), |user| user.to_string());
        let hint = format!("use `dray images add {name} {shown}`, or remove the file");
        self.troubles.note(format!("restore.{name}"), what, why, hint);
        Ok(())
    }
}

fn refuse_existing(what: &str, names: &ImageNames, note: &StatePath) -> ApiResult<()> {
    let found = names.found().map_err(|why| super::moment::disk_error(what, &why))?;
    let is_noted = note.exists().map_err(|why| Refusal::new(ErrorKind::Io, what, why))?;
    if found.image || found.partial || is_noted {
        let why = format!("{} exists already, or is being made", names.image().display());
        return Err(Refusal::new(ErrorKind::Conflict, what, why).hint("choose another --as"));
    }
    Ok(())
}

/// Writes every piece that is not zeros; the file is a hole.
fn fill(repository: &Repository, restoring: &Restoring<'_>, file: &File) -> ApiResult<u64> {
    let Restoring { what, manifest, pacer, job, .. } = *restoring;
    let reader = repository.reader(manifest);
    let bytes = manifest.info().bytes;
    job.change(0, |shown| shown.bytes_total = bytes);
    let (mut written, mut outcome) = (0, Ok(()));
    reader.stream(
        std::iter::once(0..reader.piece_count()),
        StreamOptions::default(),
        |ix, content| {
            let step = (|| {
                if job.is_cancelled() {
                    return Err(Refusal::new(
                        ErrorKind::Cancelled,
                        what,
                        "the operator cancelled it",
                    ));
                }
                let content = content.map_err(|why| failed(what, &why))?;
                if let Content::Data(data) = &content {
                    let offset = ix * PIECE_BYTES as u64;
                    let put = file.write_all_at(data, offset);
                    put.map_err(|why| {
                        super::moment::disk_error(what, &dray_image::Error::io("writing it", why))
                    })?;
                    written += data.len() as u64;
                    pacer.take(data.len() as u64);
                }
                job.change(0, |shown| {
                    shown.bytes_done = (shown.bytes_done + PIECE_BYTES as u64).min(bytes);
                    shown.stored_bytes = written;
                });
                Ok(())
            })();
            match step {
                Ok(()) => ControlFlow::Continue(()),
                Err(why) => {
                    outcome = Err(why);
                    ControlFlow::Break(())
                }
            }
        },
    );
    outcome.map(|()| written)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_backup::{Consistency, Info, Key, MemoryStore, WriterOptions};
    use dray_types::{Ancestor, GenerationId};
    use std::sync::Arc;

    /// A repository with a backup of each image and generation.
    fn backups(all: &[(u128, &str, u64, u128)]) -> Vec<Backup> {
        let repository = Repository::create(Arc::new(MemoryStore::default()), &Key::None).unwrap();
        for (nth, &(image, name, number, id)) in all.iter().enumerate() {
            let image = ImageId(image);
            let options = WriterOptions { threads: 0, ..WriterOptions::default() };
            let writer = repository.writer(image, 4096, None, options).unwrap();
            let info = Info {
                image,
                name: name.to_owned(),
                bytes: 4096,
                generation: Ancestor { id: GenerationId(id), number },
                parent: None,
                ancestors: Vec::new(),
                // Their hosts' clocks are of no use.
                taken_unix_ms: 100 - nth as u64,
                host: "hosta".to_owned(),
                consistency: Consistency::Crash,
            };
            writer.finish(info).unwrap();
        }
        repository.all().unwrap().backups
    }

    #[test]
    fn a_backup_is_chosen_by_number_or_id_and_else_the_newest() {
        let id = |first: u128| first << 120 | 7;
        let all =
            [(1, "a", 1, id(0x2b)), (1, "a", 2, id(0x3c)), (1, "a", 3, id(0x3d)), (2, "b", 1, 9)];
        let choose = |image: &str, generation: Option<&str>| {
            let chosen = super::choose("x", ("nas", backups(&all)), image, generation);
            chosen.map(|backup| backup.info.generation.number).map_err(|why| why.kind)
        };
        assert_eq!(choose("a", None), Ok(3));
        assert_eq!(choose("a", Some("2")), Ok(2), "and not the id that begins with 2");
        assert_eq!(choose("a", Some("3c")), Ok(2));
        assert_eq!(choose("a", Some("2b")), Ok(1));
        assert_eq!(choose("a", Some("ff")), Err(ErrorKind::NotFound));
        assert_eq!(choose("c", None), Err(ErrorKind::NotFound));
        assert_eq!(choose(&ImageId(2).to_string(), None), Ok(1));
        let several = [(1, "a", 1, 5), (2, "a", 1, 6)];
        let why = super::choose("x", ("nas", backups(&several)), "a", None).unwrap_err();
        assert_eq!(why.kind, ErrorKind::Invalid);
        let alike = [(1, "a", 1, id(0xab)), (1, "a", 2, id(0xac))];
        let why = super::choose("x", ("nas", backups(&alike)), "a", Some("a")).unwrap_err();
        assert_eq!(why.kind, ErrorKind::Invalid);
    }

    /// The folder below a mount point has nothing of it: what the restore has left lies on the pool.
    #[test]
    fn what_a_restore_has_left_is_looked_for_on_its_own_file_system() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.raw");
        let names = ImageNames::of(&path).unwrap();
        let known = Note::new(&path, None);
        assert!(known.file_system.is_some() && known.check_mounted(&names).is_ok());
        let file_system = known.file_system.map(|number| number + 1);
        let other = Note { file_system, ..Note::new(&path, None) };
        assert!(other.check_mounted(&names).is_err());
        names.create_partial(4096).unwrap();
        assert!(other.check_mounted(&names).is_ok(), "its number has changed");
        let old = serde_json::json!({ "path": path });
        let old: Note = serde_json::from_value(old).unwrap();
        assert!(old.check_mounted(&names).is_ok());
        let away = Note::new(&dir.path().join("away/r.raw"), None);
        assert!(away.check_mounted(&names).is_err());
    }
}
