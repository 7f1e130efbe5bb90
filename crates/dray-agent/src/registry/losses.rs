//! What a guest is still to be told after a restart: that writes of its may be lost.
//!
//! A small file for each image that may be written, made before it is needed and written in place: a
//! full state directory must not be the reason why a loss is forgotten. It counts within the boot
//! that wrote it; with the host the guest has stopped too.

use dray_image::{Error, FileImage, LossLog, Result};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Length of the file in bytes: a sector, which a crash does not tear.
const LEN: usize = 512;
/// Length of the boot's id at the head of a loss.
const BOOT_LEN: usize = 36;

struct LossFile {
    file: File,
    path: PathBuf,
}

/// From now on losses of `image` are written down in the file at `path`, and what it says of this
/// boot is owed to the guest.
pub(super) fn keep(image: &FileImage, path: &Path) {
    match open(path) {
        Ok((log, owed)) => image.keep_losses(Arc::new(log), owed.as_deref()),
        Err(why) => {
            let path = path.display();
            tracing::warn!(%path, %why, "a restart will forget what a guest must be told of");
        }
    }
}

fn open(path: &Path) -> io::Result<(LossFile, Option<String>)> {
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
    let mut bytes = [0; LEN];
    let held = file.metadata()?.len() == LEN as u64;
    if held {
        file.read_exact_at(&mut bytes, 0)?;
    } else {
        file.write_all_at(&bytes, 0)?;
        file.sync_all()?;
    }
    let owed = bytes.strip_prefix(&*boot_id()?).map(|why| {
        let end = why.iter().position(|&byte| byte == 0).unwrap_or(why.len());
        String::from_utf8_lossy(&why[..end]).into_owned()
    });
    Ok((LossFile { file, path: path.to_owned() }, owed))
}

fn boot_id() -> io::Result<Vec<u8>> {
    let mut id = std::fs::read("/proc/sys/kernel/random/boot_id")?;
    id.truncate(BOOT_LEN);
    Ok(id)
}

impl LossFile {
    fn replace(&self, bytes: &[u8; LEN]) -> Result<()> {
        let written = self.file.write_all_at(bytes, 0).and_then(|()| self.file.sync_data());
        written.map_err(|why| Error::io(format!("writing {}", self.path.display()), why))
    }
}

impl LossLog for LossFile {
    fn lost(&self, why: &str) -> Result<()> {
        let boot = boot_id().map_err(|why| Error::io("asking for the boot's id", why))?;
        let mut bytes = [0; LEN];
        let text = boot.iter().chain(why.as_bytes());
        bytes.iter_mut().zip(text).for_each(|(byte, &of)| *byte = of);
        self.replace(&bytes)
    }

    fn settled(&self) -> Result<()> {
        self.replace(&[0; LEN])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_survives_the_process_and_not_the_boot() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.lost");
        let (log, owed) = open(&path).unwrap();
        assert!(owed.is_none());
        log.lost("the pool is full").unwrap();
        let (log, owed) = open(&path).unwrap();
        assert_eq!(owed.as_deref(), Some("the pool is full"));
        log.lost(&"long ".repeat(LEN)).unwrap();
        assert_eq!(open(&path).unwrap().1.map(|why| why.len()), Some(LEN - BOOT_LEN));
        log.settled().unwrap();
        assert!(open(&path).unwrap().1.is_none());
        let mut earlier = [b'x'; LEN];
        earlier[BOOT_LEN..].fill(b'y');
        std::fs::write(&path, earlier).unwrap();
        assert!(open(&path).unwrap().1.is_none(), "of another boot");
        std::fs::write(&path, &earlier[..100]).unwrap();
        assert!(open(&path).unwrap().1.is_none(), "torn when it was made");
    }
}
