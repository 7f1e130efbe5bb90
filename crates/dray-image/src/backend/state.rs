//! Images on a simulated disk: what real ones do, over the files that a test can take away.

use super::write_back::WriteBack;
use super::{FileImage, FileOptions, ImageFile, LossLog, OpenImages, Past};
use crate::image::{Joined, WriteBackError};
use crate::{
    Attempt, Client, Error, ErrorKind, Extent, ExtentKind, Geometry, Image, Result, ZeroMode,
};
use dray_files::files::{Files, StateFile};
use dray_types::BLOCK_SIZE;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Opens the images among these files.
#[derive(Clone, Debug)]
pub struct StateImages(pub Arc<dyn Files>);

impl OpenImages for StateImages {
    /// Nobody else is on a simulated disk.
    fn check_folder(&self, _path: &Path) -> std::io::Result<()> {
        Ok(())
    }

    fn open(&self, path: &Path, options: FileOptions) -> Result<Arc<dyn ImageFile>> {
        let context = || format!("opening image {}", path.display());
        let file = self.0.open(path).map_err(|why| Error::io(context(), why))?;
        let end = file.len().map_err(|why| Error::io(context(), why))?;
        Ok(Arc::new(StateImage {
            file,
            path: path.to_owned(),
            len: options.export_len.unwrap_or(end),
            write: options.write,
            write_back: WriteBack::default(),
        }))
    }

    fn open_closed(&self, path: &Path, options: FileOptions) -> Result<Arc<dyn ImageFile>> {
        self.open(path, options)
    }
}

/// An image in a file whose disk is simulated.
struct StateImage {
    file: Box<dyn StateFile>,
    path: PathBuf,
    len: u64,
    write: bool,
    write_back: WriteBack,
}

impl StateImage {
    fn fail(&self, what: &str, why: std::io::Error) -> Error {
        Error::io(format!("{what} image {}", self.path.display()), why)
    }

    fn check(&self, what: &str, offset: u64, len: u64) -> Result<()> {
        if offset.checked_add(len).is_some_and(|end| end <= self.len) {
            return Ok(());
        }
        let context = format!("{what} image {}", self.path.display());
        Err(Error::new(ErrorKind::OutOfRange, context, "the image ends before"))
    }

    fn sync_file(&self) -> Result<()> {
        self.file.sync().map_err(|why| self.fail("flushing", why))
    }
}

impl Image for StateImage {
    fn geometry(&self) -> Geometry {
        let (len, read_only) = (self.len, !self.write);
        Geometry { len, min_block: 1, preferred_block: BLOCK_SIZE as u32, read_only }
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        self.check("reading", offset, buf.len() as u64)?;
        let read = self.file.read_at(buf, offset).map_err(|why| self.fail("reading", why))?;
        buf[read..].fill(0);
        Ok(())
    }

    fn write_at(&self, data: &[u8], offset: u64, fua: bool) -> Result<()> {
        self.check("writing", offset, data.len() as u64)?;
        if !self.write {
            let context = format!("writing image {}", self.path.display());
            return Err(Error::new(ErrorKind::ReadOnly, context, "it is open for reading only"));
        }
        self.file.write_at(data, offset).map_err(|why| self.fail("writing", why))?;
        if fua { self.sync() } else { Ok(()) }
    }

    fn zero(&self, offset: u64, len: u64, _mode: ZeroMode, fua: bool) -> Result<()> {
        self.write_at(&vec![0; len as usize], offset, fua)
    }

    fn discard(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.zero(offset, len, ZeroMode::MayUnmap, fua)
    }

    fn flush(&self) -> Result<()> {
        self.write_back.guest(&self.path, || self.sync_file())
    }

    fn sync(&self) -> Result<()> {
        self.write_back.own(&self.path, || self.sync_file())
    }

    fn look_at(&self, client: &Arc<Client>) {
        self.write_back.look_at(&self.path, client);
    }

    fn write_back_error(&self) -> Option<WriteBackError> {
        self.write_back.error()
    }

    fn notes_begin_anew(&self) {
        self.write_back.notes_begin_anew();
    }

    fn extents(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Extent>> {
        let mut bytes = vec![0; len as usize];
        self.read_at(&mut bytes, offset)?;
        let mut joined = Joined::at_most(max);
        for piece in bytes.chunks(BLOCK_SIZE as usize) {
            let empty = piece.iter().all(|&byte| byte == 0);
            let kind = if empty { ExtentKind::Hole } else { ExtentKind::Data };
            if joined.extend(&[Extent { len: piece.len() as u64, kind }]).is_none() {
                break;
            }
        }
        Ok(joined.found())
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<Attempt> {
        self.read_at(buf, offset).map(|()| Attempt::Done)
    }

    fn try_write_at(&self, data: &[u8], offset: u64) -> Result<Attempt> {
        self.write_at(data, offset, false).map(|()| Attempt::Done)
    }
}

impl ImageFile for StateImage {
    fn path(&self) -> &Path {
        &self.path
    }

    fn file_len(&self) -> Result<u64> {
        self.file.len().map_err(|why| self.fail("measuring", why))
    }

    fn set_len(&self, len: u64) -> Result<()> {
        self.check("resizing", len, 0)?;
        self.file.set_len(len).map_err(|why| self.fail("resizing", why))
    }

    fn write_bulk(&self, data: &[u8], offset: u64) -> Result<()> {
        self.write_at(data, offset, false)
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.file_len()
    }

    fn keep_losses(&self, log: Arc<dyn LossLog>, past: &Past) {
        self.write_back.keep(log, past);
    }

    fn lost_writes(&self) -> Option<String> {
        self.write_back.lost()
    }

    fn begin_anew(&self) -> Result<()> {
        self.set_len(0)?;
        self.sync()?;
        self.write_back.begin_anew(&self.path)
    }

    fn owe_loss(&self, why: &Error) -> bool {
        self.write_back.owe_earlier(&self.path, why)
    }

    fn forget_losses(&self) {
        self.write_back.forget(&self.path);
    }

    fn guest_stops(&self, stops: bool) {
        self.write_back.guest_stops(stops);
    }

    fn untold_loss(&self) -> Option<WriteBackError> {
        self.write_back.untold()
    }

    fn as_file(&self) -> Option<&FileImage> {
        None
    }
}
