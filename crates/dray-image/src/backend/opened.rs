//! Image files as their owners know them, wherever they are: on this host, or on a simulated disk.

use super::{FileImage, FileOptions, LossLog, Past};
use crate::names::open_closed;
use crate::{Error, Image, Result, WriteBackError};
use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

/// An image in a file: beside what any [`Image`] can, what only its owner does with it.
pub trait ImageFile: Image {
    /// Where it is (or was, when it has been renamed since).
    fn path(&self) -> &Path;

    /// Length of the file in bytes, which of a growable image may be less than it exports; of a block
    /// device what it exports.
    ///
    /// # Errors
    /// What the system reports.
    fn file_len(&self) -> Result<u64>;

    /// Sets the file's length; on a growable image the exported length stays. A block device keeps
    /// its own.
    ///
    /// # Errors
    /// What the system reports; `OutOfRange` when it is more than is exported.
    fn set_len(&self, len: u64) -> Result<()>;

    /// Writes blocks that nobody reads soon, round the page cache where that can be done. No other
    /// write to the same blocks may be under way.
    ///
    /// # Errors
    /// As [`write_at`](Image::write_at).
    fn write_bulk(&self, data: &[u8], offset: u64) -> Result<()>;

    /// Bytes that the file takes on its file system; a block device takes its length.
    ///
    /// # Errors
    /// What the system reports.
    fn allocated_bytes(&self) -> Result<u64>;

    /// From now on it is written down in `log` that writes may be lost; an earlier process has left
    /// `past` there: what is owed a guest's flush will report.
    fn keep_losses(&self, log: Arc<dyn LossLog>, past: &Past);

    /// Why writes to it were lost since it was made, as far as is known: a sync under way may fail. The system still
    /// shows what was written, takes it for written down, and may forget it at any time: no comparison of what it
    /// shows, and no later sync, says that it is on the disk.
    fn lost_writes(&self) -> Option<String>;

    /// Gives up what it holds, and the room that it takes, durably: nothing of it was lost any more.
    ///
    /// # Errors
    /// What the system reports, or that it cannot be written down.
    fn begin_anew(&self) -> Result<()>;

    /// Writes of an earlier process are lost, which a guest's flush will report. Whether that is written down: otherwise
    /// a restart forgets it.
    fn owe_loss(&self, why: &Error) -> bool;

    /// What was lost so far was no guest's, who is about to come: its flushes do not report it.
    fn forget_losses(&self);

    /// While QEMU `stops` the guest, the flush that is told of a loss may be QEMU's own: that fails, and the
    /// guest hears nothing. When the guest goes on, such a loss is owed to it again.
    fn guest_stops(&self, stops: bool);

    /// The loss that the guest is still to be told, also one that a sync under way is about to meet: may
    /// block for as long as that takes. Only who serves the guest can tell it.
    fn untold_loss(&self) -> Option<WriteBackError>;

    /// The file or device of this host; none on a simulated disk.
    fn as_file(&self) -> Option<&FileImage>;
}

/// Opens image files.
pub trait OpenImages: Send + Sync + Debug {
    /// Refuses the folder of `path` if other users could exchange what lies in it.
    ///
    /// # Errors
    /// A [`dray_files::folders::Exchangeable`], or what the system reports.
    fn check_folder(&self, path: &Path) -> std::io::Result<()>;

    /// Opens the file or device at `path`.
    ///
    /// # Errors
    /// What the system reports; `Invalid` for something that is neither file nor block device.
    fn open(&self, path: &Path, options: FileOptions) -> Result<Arc<dyn ImageFile>>;

    /// Opens the file at `path`, which nobody but root may open.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    fn open_closed(&self, path: &Path, options: FileOptions) -> Result<Arc<dyn ImageFile>>;
}

/// Opens the image files of this host.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealImages;

impl OpenImages for RealImages {
    fn check_folder(&self, path: &Path) -> std::io::Result<()> {
        dray_files::folders::check_of(path)
    }

    fn open(&self, path: &Path, options: FileOptions) -> Result<Arc<dyn ImageFile>> {
        Ok(Arc::new(FileImage::open(path, options)?))
    }

    fn open_closed(&self, path: &Path, options: FileOptions) -> Result<Arc<dyn ImageFile>> {
        let file = open_closed(path, options.write)?;
        Ok(Arc::new(FileImage::from_file(file, path, options)?))
    }
}
