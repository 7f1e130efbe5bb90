//! What a guest is still to be told after a restart: that writes of its may be lost.
//!
//! A small file for each image that may be written, made before it is needed and written in place: a
//! full state directory must not be the reason why a loss is forgotten. One that cannot be read is told
//! like a loss. It counts within the boot
//! that wrote it; with the host the guest has stopped too.

use dray_files::StatePath;
use dray_files::files::BOOT_LEN;
use dray_files::files::StateFile;
use dray_image::{Error, ImageFile, Loss, LossLog, Result};
use std::io;
use std::sync::Arc;

/// Length of the file in bytes: a sector, which a crash does not tear.
const LEN: usize = 512;
/// Where it says what is known of the notes beside it; the text ends before.
const NOTES: usize = LEN - 1;
/// The notes are of a process that came after the loss. Anything else is what an older agent wrote, or
/// nothing: they are in doubt.
const ANEW: u8 = 1;

struct LossFile {
    /// None when it could not be opened: each use tries it again.
    file: Option<Box<dyn StateFile>>,
    path: StatePath,
}

/// From now on losses of `image` are written down in the file at `path`, and what it says of this
/// boot is owed to the guest.
pub(super) fn keep(image: &dyn ImageFile, path: &StatePath) {
    match open(path) {
        Ok((log, owed)) => image.keep_losses(Arc::new(log), owed.as_ref()),
        Err(why) => {
            let path = path.display();
            tracing::warn!(%path, %why, "a restart will forget what a guest must be told of");
        }
    }
}

fn open(path: &StatePath) -> io::Result<(LossFile, Option<Loss>)> {
    let file = match path.open_or_create() {
        Ok(file) => file,
        Err(why) if matches!(path.exists(), Ok(false)) => return Err(why),
        Err(why) => return Ok(unreadable(path, &why)),
    };
    let mut bytes = [0; LEN];
    if file.len()? == LEN as u64 {
        if let Err(why) = file.read_at(&mut bytes, 0) {
            return Ok(unreadable(path, &why));
        }
    } else {
        file.write_at(&bytes, 0)?;
        file.sync()?;
    }
    let owed = bytes.starts_with(&path.files().boot()?).then(|| read_loss(&bytes));
    Ok((LossFile { file: Some(file), path: path.clone() }, owed))
}

/// Nobody knows whether a guest is still to be told of a loss: it is told that there may be one.
fn unreadable(path: &StatePath, why: &io::Error) -> (LossFile, Option<Loss>) {
    let shown = path.display();
    tracing::warn!(path = %shown, %why, "cannot read what a guest is to be told: it is told of a loss");
    let owed = Loss { why: format!("{shown} cannot be read: {why}"), notes_in_doubt: true };
    (LossFile { file: None, path: path.clone() }, Some(owed))
}

fn read_loss(bytes: &[u8; LEN]) -> Loss {
    let text = &bytes[BOOT_LEN..NOTES];
    let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
    let why = String::from_utf8_lossy(&text[..end]).into_owned();
    Loss { why, notes_in_doubt: bytes[NOTES] != ANEW }
}

/// A loss as the file holds it; the end of a text that is too long for it is cut off.
fn write_loss(boot: &[u8], loss: &Loss) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    let text = &loss.why[..loss.why.floor_char_boundary(NOTES - BOOT_LEN)];
    let parts = boot.iter().chain(text.as_bytes());
    bytes.iter_mut().zip(parts).for_each(|(byte, &of)| *byte = of);
    bytes[NOTES] = if loss.notes_in_doubt { 0 } else { ANEW };
    bytes
}

impl LossFile {
    fn replace(&self, bytes: &[u8; LEN]) -> Result<()> {
        let write = |file: &dyn StateFile| file.write_at(bytes, 0).and_then(|()| file.sync());
        let written = match &self.file {
            Some(file) => write(&**file),
            None => self.path.open().and_then(|file| write(&*file)),
        };
        written.map_err(|why| Error::io(format!("writing {}", self.path.display()), why))
    }
}

impl LossLog for LossFile {
    fn lost(&self, loss: &Loss) -> Result<()> {
        let boot = self.path.files().boot();
        let boot = boot.map_err(|why| Error::io("asking for the boot's id", why))?;
        self.replace(&write_loss(&boot, loss))
    }

    fn settled(&self) -> Result<()> {
        self.replace(&[0; LEN])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_files::files::sim::{Fault, SimDisk};

    #[test]
    fn what_cannot_be_read_is_told_like_a_loss_until_it_is_settled() {
        let root = std::path::Path::new("/");
        let disk = SimDisk::new(1, &[root]);
        let path = StatePath::new(Arc::new(disk.files()), root.join("disk.lost"));
        assert!(open(&path).unwrap().1.is_none());
        for call in [1, 2] {
            disk.plan(disk.looks() + call, Fault::Unread);
            let (log, owed) = open(&path).unwrap();
            assert!(owed.is_some_and(|loss| loss.why.contains("cannot be read")), "look {call}");
            log.settled().unwrap();
            assert!(open(&path).unwrap().1.is_none());
        }
    }

    #[test]
    fn a_loss_survives_the_process_and_not_the_boot() {
        let dir = tempfile::tempdir().unwrap();
        let path = StatePath::real(dir.path().join("disk.lost"));
        let (log, owed) = open(&path).unwrap();
        assert!(owed.is_none());
        // A path may be as long as it likes: what is known of the notes is not cut off with it.
        for (why, len) in
            [("the pool is full", 16), (&*"long ".repeat(LEN), 475), (&*"é".repeat(LEN), 474)]
        {
            for notes_in_doubt in [true, false] {
                log.lost(&Loss { why: why.to_owned(), notes_in_doubt }).unwrap();
                let owed = open(&path).unwrap().1.unwrap();
                assert_eq!(owed, Loss { why: why[..len].to_owned(), notes_in_doubt });
            }
        }
        log.settled().unwrap();
        assert!(open(&path).unwrap().1.is_none());
        let mut earlier = [b'x'; LEN];
        earlier[BOOT_LEN..].fill(b'y');
        std::fs::write(&path, earlier).unwrap();
        assert!(open(&path).unwrap().1.is_none(), "of another boot");
        // An older agent had no place for what is known of the notes.
        earlier[..BOOT_LEN].copy_from_slice(&path.files().boot().unwrap());
        std::fs::write(&path, earlier).unwrap();
        assert!(open(&path).unwrap().1.is_some_and(|loss| loss.notes_in_doubt));
        std::fs::write(&path, &earlier[..100]).unwrap();
        assert!(open(&path).unwrap().1.is_none(), "torn when it was made");
    }
}
