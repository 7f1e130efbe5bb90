//! Notes of the images that QEMU has taken back as plain files: which file each is, and its line of
//! generations, so that the next migration sends only what was changed.
//!
//! As long as there is a note of an image that is registered here, its line is *suspect*
//! ([`ImageLineage::suspect`](crate::lineage::ImageLineage::suspect)): everything counts as changed.

use crate::lineage::{self};
use crate::process::QemuProcess;
use crate::record::ImageRecord;
use crate::stamp::identity_of;
use dray_engine::lineage::{FileIdentity, Lineage};
use dray_files::StatePath;
use dray_types::ImageId;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A file, whatever its name, in this boot of the host: the next one may number its file systems in another way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileId {
    /// The file system's device number.
    pub device: u64,
    /// Which file of it.
    pub file: FileIdentity,
}

impl FileId {
    /// The file at `path`.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn of(path: &Path) -> io::Result<Self> {
        let meta = std::fs::metadata(path)?;
        Ok(Self { device: meta.dev(), file: identity_of(&meta) })
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
    /// How it got to its file, as the hypervisor side needs it; its nodes are not on QEMU's command
    /// line.
    pub plan: Value,
    /// The QEMU that has it.
    pub qemu: QemuProcess,
    /// The dirty bitmap on its node; none when nobody tracks what is written.
    pub bitmap: Option<String>,
    /// The mark of the device that has it: as long as the device has the mark, nobody else has written to the file.
    /// Without it nobody believes the bitmap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mark: Option<u64>,
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

    /// Whether this is the file that QEMU has taken back. In another boot its file system may have another number; where
    /// it does not tell when a file was made, the number has to be the same.
    fn is_of(&self, file: &FileId) -> bool {
        let file_system = file.device == self.file.device
            || (!self.qemu.is_of_this_boot() && self.file.file.birth.is_some());
        file_system && file.file.is_same(&self.file.file)
    }

    /// Whether the file is gone from a directory that is there. One whose whole directory is gone may come back, and one
    /// whose directory is of another file system: its own is not mounted yet.
    fn is_gone(&self) -> bool {
        let path = &self.image.path;
        let dir = path.parent().and_then(|dir| std::fs::metadata(dir).ok());
        let own = dir.is_some_and(|dir| dir.is_dir() && dir.dev() == self.file.device);
        own && matches!(path.try_exists(), Ok(false))
    }

    /// Whether there is a line of generations to go on with.
    pub fn has_line(&self) -> bool {
        !self.image.read_only && !self.image.device && !self.made
    }
}

/// The notes of the state directory.
#[derive(Clone, Debug)]
pub struct Notes(StatePath);

impl Notes {
    /// The notes in this folder.
    pub(crate) fn in_folder(folder: StatePath) -> Self {
        Self(folder)
    }

    fn path(&self, id: ImageId) -> StatePath {
        self.0.join(format!("{id}.json"))
    }

    /// Where the line of a released image is.
    pub fn line_path(&self, id: ImageId) -> StatePath {
        self.0.join(format!("{id}.line"))
    }

    /// Writes a note; durable on return.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn put(&self, note: &Released) -> io::Result<()> {
        self.path(note.image.id).put(note)
    }

    /// The note of an image.
    pub fn of(&self, id: ImageId) -> Option<Released> {
        let path = self.path(id);
        match path.get() {
            Ok(note) => Some(note),
            Err(why) if why.kind() == io::ErrorKind::NotFound => None,
            Err(why) => {
                tracing::warn!(%why, "cannot read the note of a released image");
                None
            }
        }
    }

    /// Whether there is a note of an image, also one that cannot be read.
    pub fn knows(&self, id: ImageId) -> bool {
        // What cannot be told may be so: a line that is not trusted costs time only.
        self.path(id).exists().unwrap_or(true)
    }

    /// All notes that can be read.
    pub fn all(&self) -> Vec<Released> {
        let paths = self.0.entries(".json").unwrap_or_default();
        paths.iter().filter_map(|path| path.peek().ok()).collect()
    }

    /// The released image whose file is at `path`: the same file, under the same name.
    pub fn at(&self, path: &Path) -> Option<Released> {
        let file = FileId::of(path).ok()?;
        self.all()
            .into_iter()
            .find(|note| note.done && note.image.path == path && note.is_of(&file))
    }

    /// What this process has taken back, or was about to when an agent died: these nodes its command line
    /// does not tell.
    pub fn begun_by(&self, process: &QemuProcess) -> Vec<Released> {
        self.all().into_iter().filter(|note| note.qemu.is_process(process)).collect()
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
        self.path(id).remove()?;
        self.line_path(id).remove()
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
    pub(crate) fn sweep(&self) {
        let useless = |note: &Released| {
            let another = FileId::of(&note.image.path).is_ok_and(|now| !note.is_of(&now));
            another || note.is_gone() || (!note.has_line() && !note.qemu.runs())
        };
        for note in self.all().into_iter().filter(useless) {
            if let Err(why) = self.remove(note.image.id) {
                tracing::warn!(image = note.image.name, %why, "cannot forget a released image");
            }
        }
    }
}
