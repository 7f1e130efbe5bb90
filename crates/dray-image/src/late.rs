//! [`Late`]: an image that is not there yet.

use crate::client::Client;
use crate::image::WriteBackError;
use crate::{Attempt, Error, ErrorKind, Extent, Geometry, Image, Result, ZeroMode};
use parking_lot::{Mutex, MutexGuard};
use std::sync::{Arc, OnceLock};

/// An image whose length is known and whose backing is attached once, later. Before that every call
/// fails with `Unavailable`: whoever puts a disk over it keeps that shut.
pub struct Late {
    geometry: Geometry,
    backing: OnceLock<Arc<dyn Image>>,
    /// Those that have come before the image.
    clients: Mutex<Vec<Arc<Client>>>,
}

impl Late {
    /// An image of this geometry.
    pub fn new(geometry: Geometry) -> Arc<Self> {
        Arc::new(Self { geometry, backing: OnceLock::new(), clients: Mutex::default() })
    }

    /// From now on this is the image.
    ///
    /// # Errors
    /// `Invalid` when there is one already, or when its length is not the one that is known.
    pub fn attach(&self, backing: Arc<dyn Image>) -> Result<()> {
        const WHAT: &str = "attaching an image that was waited for";
        let (known, is) = (self.geometry.len, backing.geometry().len);
        if known != is {
            let why = format!("it has {is} bytes, and should have {known}");
            return Err(Error::new(ErrorKind::Invalid, WHAT, &why));
        }
        let refused = |_| Error::new(ErrorKind::Invalid, WHAT, "it exists already");
        let mut clients = self.clients();
        self.backing.set(Arc::clone(&backing)).map_err(refused)?;
        clients.drain(..).for_each(|client| backing.look_at(&client));
        Ok(())
    }

    fn clients(&self) -> MutexGuard<'_, Vec<Arc<Client>>> {
        self.clients.lock()
    }

    /// True once the image is there.
    pub fn is_attached(&self) -> bool {
        self.backing.get().is_some()
    }

    fn backing(&self) -> Result<&dyn Image> {
        let backing = self.backing.get().map(|backing| &**backing);
        backing.ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, "using an image", "it does not exist yet")
        })
    }
}

impl Image for Late {
    fn geometry(&self) -> Geometry {
        self.backing.get().map_or(self.geometry, |backing| backing.geometry())
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        self.backing()?.read_at(buf, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64, fua: bool) -> Result<()> {
        self.backing()?.write_at(data, offset, fua)
    }

    fn zero(&self, offset: u64, len: u64, mode: ZeroMode, fua: bool) -> Result<()> {
        self.backing()?.zero(offset, len, mode, fua)
    }

    fn discard(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.backing()?.discard(offset, len, fua)
    }

    fn flush(&self) -> Result<()> {
        self.backing()?.flush()
    }

    fn sync(&self) -> Result<()> {
        self.backing()?.sync()
    }

    fn look_at(&self, client: &Arc<Client>) {
        let mut clients = self.clients();
        if let Some(backing) = self.backing.get() {
            return backing.look_at(client);
        }
        clients.retain(|one| !Arc::ptr_eq(one, client));
        if client.departure().is_none() {
            clients.push(Arc::clone(client));
        }
    }

    fn write_back_error(&self) -> Option<WriteBackError> {
        self.backing.get()?.write_back_error()
    }

    fn notes_begin_anew(&self) {
        if let Some(backing) = self.backing.get() {
            backing.notes_begin_anew();
        }
    }

    fn extents(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Extent>> {
        self.backing()?.extents(offset, len, max)
    }

    fn prefetch(&self, offset: u64, len: u64) -> Result<()> {
        self.backing()?.prefetch(offset, len)
    }

    fn start_writeback(&self, offset: u64, len: u64) -> Result<()> {
        self.backing()?.start_writeback(offset, len)
    }

    fn forget_cached(&self, offset: u64, len: u64) -> Result<()> {
        self.backing()?.forget_cached(offset, len)
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<Attempt> {
        self.backing()?.try_read_at(buf, offset)
    }

    fn try_write_at(&self, data: &[u8], offset: u64) -> Result<Attempt> {
        self.backing()?.try_write_at(data, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FileImage, FileOptions};

    #[test]
    fn everything_is_unavailable_until_the_image_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.raw");
        let options = FileOptions { write: true, ..FileOptions::default() };
        std::fs::write(&path, [1; 8192]).unwrap();
        let open = || Arc::new(FileImage::open(&path, options).unwrap());
        let (short, geometry) = (open(), open().geometry());
        std::fs::write(&path, [7; 4096]).unwrap();
        assert_eq!(open().geometry().len, 4096);
        let late = Late::new(Geometry { len: 4096, ..geometry });
        let mut buf = [0; 512];
        let failures = [
            late.read_at(&mut buf, 0),
            late.write_at(&buf, 0, false),
            late.zero(0, 512, ZeroMode::MayUnmap, false),
            late.discard(0, 512, false),
            late.flush(),
            late.sync(),
            late.extents(0, 512, 1).map(drop),
            late.prefetch(0, 512),
            late.start_writeback(0, 512),
            late.forget_cached(0, 512),
            late.try_read_at(&mut buf, 0).map(drop),
            late.try_write_at(&buf, 0).map(drop),
        ];
        for failure in failures {
            assert_eq!(failure.unwrap_err().kind, ErrorKind::Unavailable);
        }
        assert_eq!((late.geometry().len, late.is_attached()), (4096, false));
        assert_eq!(late.attach(short).unwrap_err().kind, ErrorKind::Invalid, "another length");
        late.attach(open()).unwrap();
        assert_eq!(late.attach(open()).unwrap_err().kind, ErrorKind::Invalid, "twice");
        late.read_at(&mut buf, 0).unwrap();
        assert_eq!((buf, late.is_attached()), ([7; 512], true));
    }
}
