//! Images that QEMU has taken back as plain files: what is known of them, so that the next migration
//! sends only what was changed.
//!
//! **Release.** (1) The note `released/ID.json` is durable, with the name of a dirty bitmap; (2) QEMU
//! gets a node for the file, the bitmap on it, and then the pivot; (3) the image's line of generations
//! is written beside the note, with what was changed while dray served it; (4) the note says that the
//! file is QEMU's; (5) the image is forgotten here.
//!
//! **Adoption.** (1) The image is registered with the line of (3), and tracks; (2) the pivot; (3) the
//! bitmap is read ([`absorb`]) and what it names counts as changed in the open generation, durably;
//! (4) the note goes; (5) QEMU closes the old node, and with it the bitmap.
//!
//! **Who sees which write.** The node carries its bitmap before anything can be written to it. A
//! mirror's pivot writes to both nodes until it is complete, a reopen first drains what is under way:
//! so a write goes through dray, which tracks, or through the node, whose bitmap records, or both.
//! Dray tracks from before the second pivot, and the bitmap is read after it, when nobody writes to the
//! node. A write seen by both is named twice, which is harmless; there is none that is seen by nobody.
//!
//! **Whoever dies.** As long as there is a note of an image that is registered here, its line is
//! *suspect* ([`Line::suspect`]): everything counts as changed. So no crash between two steps can make
//! dray believe a line that lacks what QEMU wrote. The next command that looks at the VM sees where its
//! disk is and [settles](settle) it: on the file, the release is finished; on dray, the bitmap is read
//! or, after a release that never came to its pivot, the note goes.
//!
//! **What is not believed.** A bitmap that is not there, or does not record, or in another QEMU, a file
//! that is shorter than it was, a disk of another size: then the line goes on and everything counts as
//! changed. Holes count as changed as well: a file that was cut and has grown again has lost bits of
//! the bitmap, and has a hole there unless it was written, which the bitmap would tell. Another file
//! under the path is another image.

pub mod absorb;
pub mod settle;

use crate::lineage::{self, Line};
use crate::migration::abort;
use crate::migration::source::unix_ms;
use crate::registry::{CopyState, Entry, ImageRecord, Registry};
use crate::store;
use dray_engine::lineage::Lineage;
use dray_qemu::bitmap::PREFIX;
use dray_qemu::{LayerPlan, NewBitmap, Qmp};
use dray_types::{BlockSet, ImageId};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A QEMU process: not its successor on the same socket.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct QemuProcess {
    /// Its QMP socket.
    pub socket: PathBuf,
    /// The process at the other end of it.
    pub pid: i32,
    /// When that started, in clock ticks since the host's boot.
    pub started: u64,
}

/// When a process started, in clock ticks since the host's boot; none when there is no such process.
fn started(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in brackets, may hold anything; of what follows it the 20th field is the start.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

impl QemuProcess {
    /// The QEMU behind a connection; none where the system does not tell.
    pub fn of(qmp: &Qmp) -> Option<Self> {
        let pid = qmp.pid()?;
        Some(Self { socket: qmp.socket().to_owned(), pid, started: started(pid)? })
    }

    /// Whether it still runs.
    pub fn runs(&self) -> bool {
        started(self.pid) == Some(self.started)
    }

    fn is_process(&self, other: &Self) -> bool {
        (self.pid, self.started) == (other.pid, other.started)
    }
}

/// A file, whatever its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileId {
    /// The file system's device number.
    pub device: u64,
    /// The file's number in it.
    pub inode: u64,
}

impl FileId {
    fn of(path: &Path) -> io::Result<Self> {
        let meta = std::fs::metadata(path)?;
        Ok(Self { device: meta.dev(), inode: meta.ino() })
    }
}

/// The note of an image that QEMU has taken back, or is about to.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Released {
    /// Its record here, as it was.
    pub image: ImageRecord,
    /// Its file.
    pub file: FileId,
    /// The file's length in bytes before the pivot.
    pub len: u64,
    /// How it got to its file; its nodes are not on QEMU's command line.
    pub plan: LayerPlan,
    /// The QEMU that has it.
    pub qemu: QemuProcess,
    /// The dirty bitmap on its node; none when nobody tracks what is written.
    pub bitmap: Option<String>,
    /// Whether the file is QEMU's beyond doubt.
    pub done: bool,
    /// Milliseconds since 1970 at the release.
    pub since_unix_ms: u64,
    /// The file was made of an image when that had arrived: it is another one, without generations.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub made: bool,
}

impl Released {
    /// Whether what is written to it is tracked now, as far as can be told without asking QEMU.
    pub fn is_tracked(&self) -> bool {
        self.bitmap.is_some() && self.qemu.runs()
    }

    /// Whether there is a line of generations to go on with.
    pub fn has_line(&self) -> bool {
        !self.image.read_only && !self.image.device && !self.made
    }
}

/// Why a disk was not released.
#[derive(Debug)]
pub enum NotReleased {
    /// QEMU could not.
    Qemu(dray_qemu::Error),
    /// What has to be durable is not.
    Store(io::Error),
}

impl fmt::Display for NotReleased {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qemu(why) => why.fmt(f),
            Self::Store(why) => write!(f, "cannot note a released image: {why}"),
        }
    }
}

impl From<io::Error> for NotReleased {
    fn from(why: io::Error) -> Self {
        Self::Store(why)
    }
}

/// The notes of the state directory.
#[derive(Clone, Debug)]
pub struct Notes(PathBuf);

impl Notes {
    /// The notes in this folder.
    pub fn in_folder(folder: PathBuf) -> Self {
        Self(folder)
    }

    fn path(&self, id: ImageId) -> PathBuf {
        self.0.join(format!("{id}.json"))
    }

    /// Where the line of a released image is.
    pub fn line_path(&self, id: ImageId) -> PathBuf {
        self.0.join(format!("{id}.line"))
    }

    /// Writes a note; durable on return.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn put(&self, note: &Released) -> io::Result<()> {
        store::replace_json(&self.path(note.image.id), note)
    }

    /// The note of an image.
    pub fn of(&self, id: ImageId) -> Option<Released> {
        let path = self.path(id);
        if !path.exists() {
            return None;
        }
        let read = store::read_settled(&path);
        read.inspect_err(|why| tracing::warn!(%why, "cannot read the note of a released image"))
            .ok()
    }

    /// Whether there is a note of an image, also one that cannot be read.
    pub fn knows(&self, id: ImageId) -> bool {
        self.path(id).exists()
    }

    /// All notes that can be read.
    pub fn all(&self) -> Vec<Released> {
        let paths = store::entries(&self.0, ".json").unwrap_or_default();
        paths.iter().filter_map(|path| store::read_json(path).ok()).collect()
    }

    /// The released image whose file is at `path`: the same file, under the same name.
    pub fn at(&self, path: &Path) -> Option<Released> {
        let file = FileId::of(path).ok()?;
        self.all()
            .into_iter()
            .find(|note| note.done && note.image.path == path && note.file == file)
    }

    /// What this process has taken back.
    pub fn of_process(&self, process: &QemuProcess) -> Vec<Released> {
        self.all().into_iter().filter(|note| note.done && note.qemu.is_process(process)).collect()
    }

    /// How this process has taken the file at `path` back.
    pub fn of_file(&self, process: &QemuProcess, path: &Path) -> Option<Released> {
        self.of_process(process).into_iter().find(|note| note.image.path == path)
    }

    /// The line of a released image.
    pub fn lineage(&self, id: ImageId) -> Option<Lineage> {
        lineage::last_known(&self.line_path(id)).ok()?
    }

    /// Removes a note; it may be gone already. It goes before the line: without it nobody looks for one.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn remove(&self, id: ImageId) -> io::Result<()> {
        store::remove(&self.path(id))?;
        store::remove(&self.line_path(id))
    }

    /// Another image is at `path` from now on, or the same one under another id. Of a file that is only
    /// read each QEMU that runs on it has a note of its own.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn remove_others(&self, path: &Path, id: ImageId) -> io::Result<()> {
        let read = |note: &Released| note.image.read_only && note.qemu.runs();
        let others = self.all().into_iter().filter(|note| note.image.path == path && !read(note));
        others
            .map(|note| note.image.id)
            .filter(|&other| other != id)
            .try_for_each(|id| self.remove(id))
    }

    /// Removes the notes of which nobody can make use: of files that are gone, and of backing images
    /// whose QEMU has ended. One that cannot be removed is in nobody's way.
    pub fn sweep(&self) {
        let useless = |note: &Released| {
            let gone = FileId::of(&note.image.path).is_ok_and(|now| now != note.file)
                || is_gone(&note.image.path);
            gone || (!note.has_line() && !note.qemu.runs())
        };
        for note in self.all().into_iter().filter(useless) {
            if let Err(why) = self.remove(note.image.id) {
                tracing::warn!(image = note.image.name, %why, "cannot forget a released image");
            }
        }
    }
}

/// Whether a file is gone from a directory that is there. One whose whole directory is gone may come
/// back: its file system is not mounted yet.
fn is_gone(path: &Path) -> bool {
    let dir = path.parent().is_some_and(|dir| dir.is_dir());
    dir && matches!(path.try_exists(), Ok(false))
}

impl Registry {
    /// What a release has to note, durably: step 1. The note of an earlier try goes on. Nothing where
    /// QEMU's command line tells how the disk was before, and nobody has an earlier generation of it.
    fn begin_release(
        &self,
        qmp: &Qmp,
        plan: &LayerPlan,
        entry: &Entry,
    ) -> io::Result<Option<Released>> {
        let record = entry.record();
        let has_past = entry.line().is_some_and(|line| line.lineage().has_past());
        let told = record.adopted.as_ref().is_some_and(|adopted| !adopted.noted);
        if told && !has_past {
            return Ok(None);
        }
        let qemu =
            QemuProcess::of(qmp).ok_or_else(|| io::Error::other("qemu's process is not known"))?;
        if let Some(known) =
            self.released.of(record.id).filter(|known| known.qemu.is_process(&qemu))
        {
            return Ok(Some(known));
        }
        let bitmap = match has_past && !record.read_only && !record.device {
            true => Some(format!("{PREFIX}{}", lineage::random_generation()?)),
            false => None,
        };
        let path = record.current_path().map_err(io::Error::other)?;
        let note = Released {
            file: FileId::of(&path)?,
            len: std::fs::metadata(&path)?.len(),
            plan: plan.clone(),
            qemu,
            bitmap,
            done: false,
            since_unix_ms: unix_ms(),
            made: false,
            image: ImageRecord { adopted: None, migration: None, ..record },
        };
        self.released.put(&note)?;
        Ok(Some(note))
    }

    /// Notes how QEMU has a disk whose file was made here, which its command line does not tell.
    ///
    /// # Errors
    /// What the file system or the store reports, or that QEMU's process is not known.
    pub(crate) fn note_made(
        &self,
        qmp: &Qmp,
        plan: &LayerPlan,
        image: ImageRecord,
    ) -> io::Result<()> {
        let qemu =
            QemuProcess::of(qmp).ok_or_else(|| io::Error::other("qemu's process is not known"))?;
        let (path, plan, since_unix_ms) = (plan.path(), plan.clone(), unix_ms());
        let (file, len) = (FileId::of(&path)?, std::fs::metadata(&path)?.len());
        let (bitmap, made, done) = (None, true, true);
        let note = Released { image, file, len, plan, qemu, bitmap, done, since_unix_ms, made };
        self.released.put(&note)?;
        self.released.remove_others(&path, note.image.id)
    }

    /// Gives a disk back to QEMU, up to where only the image's record is left to be forgotten. Can be
    /// repeated. On failure the disk is on dray, unless the error is of the store: then it may be
    /// either, its line is suspect, and the release wants to be repeated.
    ///
    /// # Errors
    /// What QEMU or the store reports.
    pub async fn release(
        &self,
        qmp: &Qmp,
        plan: &LayerPlan,
        entry: &Entry,
    ) -> Result<dray_qemu::Released, NotReleased> {
        abort::step("ReleaseNote");
        let Some(note) = self.begin_release(qmp, plan, entry)? else {
            return dray_qemu::release(qmp, plan).await.map_err(NotReleased::Qemu);
        };
        if let Some(line) = entry.line() {
            line.suspect();
        }
        let bitmap = note.bitmap.as_ref().map(|name| NewBitmap::new(name.clone(), note.len));
        abort::step("ReleasePivot");
        let released = dray_qemu::release_tracked(qmp, plan, bitmap.as_ref()).await;
        let released = match released {
            Ok(released) => released,
            Err(why) => {
                // The guest is on dray as before, and so is every write.
                if why.kind() != dray_qemu::ErrorKind::NotUndone {
                    self.undo_release(entry)?;
                }
                return Err(NotReleased::Qemu(why));
            }
        };
        self.end_release(entry, note, released.tracked)?;
        Ok(released)
    }

    /// The disk is on its file: steps 3 and 4.
    fn end_release(&self, entry: &Entry, note: Released, tracked: bool) -> io::Result<()> {
        abort::step("ReleaseLine");
        let id = note.image.id;
        if let Some(line) = entry.line().filter(|_| note.has_line()) {
            Line::create(&self.released.line_path(id), line.lineage(), entry.disk.history())?;
        }
        abort::step("ReleaseDone");
        let bitmap = note.bitmap.clone().filter(|_| tracked);
        self.released.put(&Released { bitmap, done: true, ..note })?;
        self.released.remove_others(&entry.record().path, id)?;
        abort::step("ReleaseForget");
        Ok(())
    }

    /// The disk is still on dray, and was all the time: what dray tracked is everything.
    fn undo_release(&self, entry: &Entry) -> io::Result<()> {
        self.released.remove(entry.record().id)?;
        if let Some(line) = entry.line() {
            line.trust();
        }
        Ok(())
    }

    /// The released image whose file is at `path`, with its line and what dray knows to be changed in the
    /// open generation; none while it is served here.
    pub fn known_at(&self, path: &Path) -> Option<(Released, Lineage, BlockSet)> {
        let note = self.released.at(path).filter(Released::has_line)?;
        let line = self.released.line_path(note.image.id);
        let (lineage, changed) = lineage::last_state(&line).ok()??;
        let served = self.get(&note.image.name).is_some_and(|e| e.record().id == note.image.id);
        (!served && note.image.state == CopyState::Owner).then_some((note, lineage, changed))
    }
}

#[cfg(test)]
mod tests;
