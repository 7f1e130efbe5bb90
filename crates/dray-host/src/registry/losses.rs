//! What a guest is still to be told after a restart: that writes of its may be lost.
//!
//! A small file for each image that may be written, made before it is needed and written in place: a
//! full state directory must not be the reason why a loss is forgotten. What is owed counts within the boot that
//! wrote it; with the host the guest has stopped too. That the image's file has lost writes counts for as long as the
//! file does. While it cannot be read the image stays closed.

use dray_files::StatePath;
use dray_files::files::BOOT_LEN;
use dray_files::files::StateFile;
use dray_image::{Error, ImageFile, Loss, LossLog, Past};
use std::io;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Length of the file in bytes: a sector, which a crash does not tear. All zeros when nothing was lost.
const LEN: usize = 512;
/// Where its checksum is, of all before it.
const SUM: usize = LEN - size_of::<u64>();
/// Where it says what is known of the notes beside it; the text ends before.
const NOTES: usize = SUM - 1;
/// The notes are in doubt. Otherwise they are of a process that came after the loss.
const IN_DOUBT: u8 = 1;
/// Nothing is owed any more.
const SETTLED: u8 = 2;

/// It is not known what a guest is still to be told.
#[derive(Debug, thiserror::Error)]
#[error("cannot read what its guest is to be told: {path}: {why}")]
pub(super) struct Unread {
    /// The file that would say it.
    pub path: String,
    why: String,
}

struct LossFile {
    file: Box<dyn StateFile>,
    path: StatePath,
}

/// From now on losses of `image` are written down in the file at `path`. What it says of this boot is owed to the
/// guest.
///
/// # Errors
/// When the file cannot be read: a guest that was not told of a loss, and one that was told of none, would both
/// find what they must not.
pub(super) fn keep(image: &dyn ImageFile, path: &StatePath) -> io::Result<()> {
    let unknown = |why: io::Error| {
        let path = path.display().to_string();
        io::Error::new(why.kind(), Unread { path, why: why.to_string() })
    };
    if let Some((log, past)) = open(path).map_err(unknown)? {
        image.keep_losses(Arc::new(log), &past);
    }
    Ok(())
}

/// The file at `path`, whatever it was, says from now on that writes are lost, and that nobody is to be told.
///
/// # Errors
/// What the system reports.
pub(super) fn put_settled(path: &StatePath, why: &str) -> io::Result<()> {
    path.replace(&write(&path.files().boot()?, why, SETTLED)).map(drop)
}

/// Why writes are lost, as the file at `path` says.
///
/// # Errors
/// When it cannot be read.
pub(super) fn read_lost(path: &StatePath) -> io::Result<Option<String>> {
    let bytes = path.read()?;
    let bytes = bytes.as_slice().try_into().map_err(|why| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{}: {why}", path.display()))
    })?;
    Ok(read_past(bytes, &path.files().boot()?)?.lost)
}

/// Whether the file at `path` says of a loss, in whatever boot, that nobody is to be told any more.
pub(super) fn is_settled(path: &StatePath) -> bool {
    let bytes = path.read().unwrap_or_default();
    bytes.len() == LEN && (bytes[NOTES] == SETTLED || bytes.iter().all(|&byte| byte == 0))
}

/// Whether the file at `path` says of a loss, told or not.
pub(super) fn says_something(path: &StatePath) -> bool {
    let bytes = path.read().unwrap_or_default();
    <[u8; LEN]>::try_from(bytes.as_slice())
        .is_ok_and(|bytes| bytes != [0; LEN] && bytes[SUM..] == checksum(&bytes))
}

/// The file and what it says; none when there is no file and none can be made, so that it says nothing.
fn open(path: &StatePath) -> io::Result<Option<(LossFile, Past)>> {
    match open_or_make(path) {
        Ok(file) => LossFile::read(file, path).map(Some),
        Err(why) if matches!(path.exists(), Ok(false)) => {
            let path = path.display();
            tracing::warn!(%path, %why, "a restart will forget what a guest must be told of");
            Ok(None)
        }
        Err(why) => Err(why),
    }
}

fn open_or_make(path: &StatePath) -> io::Result<Box<dyn StateFile>> {
    let file = path.open_or_create()?;
    match file.len()? {
        // As long as it is from its first write on.
        len if len == LEN as u64 => {}
        // A crash, or a full directory, has come between.
        _ if path.read()?.iter().all(|&byte| byte == 0) => {
            file.write_at(&[0; LEN], 0)?;
            file.sync()?;
        }
        len => {
            let why = format!("it is damaged: it has {len} bytes instead of {LEN}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
    }
    Ok(file)
}

fn checksum(bytes: &[u8; LEN]) -> [u8; LEN - SUM] {
    xxh3_64(&bytes[..SUM]).to_le_bytes()
}

/// What the file says in the boot `boot`.
fn read_past(bytes: &[u8; LEN], boot: &[u8]) -> io::Result<Past> {
    if bytes.iter().all(|&byte| byte == 0) {
        return Ok(Past::default());
    }
    if bytes[SUM..] != checksum(bytes) {
        let why = "it is damaged: its checksum does not fit";
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    let text = &bytes[BOOT_LEN..NOTES];
    let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
    let why = String::from_utf8_lossy(&text[..end]).into_owned();
    let is_owed = bytes.starts_with(boot) && bytes[NOTES] != SETTLED;
    let loss = Loss { why: why.clone(), notes_in_doubt: bytes[NOTES] == IN_DOUBT };
    Ok(Past { owed: Some(loss).filter(|_| is_owed), lost: Some(why) })
}

/// A loss as the file holds it; the end of a text that is too long for it is cut off.
fn write_loss(boot: &[u8], loss: &Loss) -> [u8; LEN] {
    write(boot, &loss.why, if loss.notes_in_doubt { IN_DOUBT } else { 0 })
}

fn write(boot: &[u8], why: &str, notes: u8) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    let text = &why[..why.floor_char_boundary(NOTES - BOOT_LEN)];
    let parts = boot.iter().chain(text.as_bytes());
    bytes.iter_mut().zip(parts).for_each(|(byte, &of)| *byte = of);
    bytes[NOTES] = notes;
    let sum = checksum(&bytes);
    bytes[SUM..].copy_from_slice(&sum);
    bytes
}

impl LossFile {
    /// What an earlier process has left in the file, too.
    fn read(file: Box<dyn StateFile>, path: &StatePath) -> io::Result<(Self, Past)> {
        let mut bytes = [0; LEN];
        file.read_at(&mut bytes, 0)?;
        let past = read_past(&bytes, &path.files().boot()?)?;
        Ok((Self { file, path: path.clone() }, past))
    }

    fn boot(&self) -> dray_image::Result<[u8; BOOT_LEN]> {
        let boot = self.path.files().boot();
        boot.map_err(|why| Error::io("asking for the boot's id", why))
    }

    fn replace(&self, bytes: &[u8; LEN]) -> dray_image::Result<()> {
        let written = self.file.write_at(bytes, 0).and_then(|()| self.file.sync());
        written.map_err(|why| Error::io(format!("writing {}", self.path.display()), why))
    }
}

impl LossLog for LossFile {
    fn lost(&self, loss: &Loss) -> dray_image::Result<()> {
        self.replace(&write_loss(&self.boot()?, loss))
    }

    fn settled(&self, why: &str) -> dray_image::Result<()> {
        self.replace(&write(&self.boot()?, why, SETTLED))
    }

    fn begun_anew(&self) -> dray_image::Result<()> {
        self.replace(&[0; LEN])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_files::files::sim::{Fault, SimDisk};

    /// Told too much, a guest gives up what it has; told too little, it keeps what is lost.
    #[test]
    fn what_cannot_be_read_is_not_guessed() {
        let root = std::path::Path::new("/");
        let disk = SimDisk::new(1, &[root]);
        let path = StatePath::new(Arc::new(disk.files()), root.join("disk.lost"));
        let owed = || open(&path).map(|found| found.unwrap().1.owed);
        assert!(owed().unwrap().is_none());
        let loss = Loss { why: "the pool is full".to_owned(), notes_in_doubt: true };
        open(&path).unwrap().unwrap().0.lost(&loss).unwrap();
        for call in [1, 2] {
            disk.plan(disk.looks() + call, Fault::Unread);
            owed().expect_err("a look");
            assert_eq!(owed().unwrap().as_ref(), Some(&loss), "look {call}");
        }
    }

    #[test]
    fn what_is_owed_survives_the_process_and_what_was_lost_the_boot() {
        let dir = tempfile::tempdir().unwrap();
        let path = StatePath::real(dir.path().join("disk.lost"));
        let (log, past) = open(&path).unwrap().unwrap();
        assert_eq!(past, Past::default());
        // A path may be as long as it likes: what is known of the notes is not cut off with it.
        for (why, len) in
            [("the pool is full", 16), (&*"long ".repeat(LEN), 467), (&*"é".repeat(LEN), 466)]
        {
            for notes_in_doubt in [true, false] {
                log.lost(&Loss { why: why.to_owned(), notes_in_doubt }).unwrap();
                let owed = open(&path).unwrap().unwrap().1.owed.unwrap();
                assert_eq!(owed, Loss { why: why[..len].to_owned(), notes_in_doubt });
            }
        }
        // That the file has lost writes outlives that everybody has heard of it.
        log.settled("the pool is full").unwrap();
        let lost = Past { owed: None, lost: Some("the pool is full".to_owned()) };
        assert_eq!(open(&path).unwrap().unwrap().1, lost);
        log.begun_anew().unwrap();
        assert_eq!(open(&path).unwrap().unwrap().1, Past::default());
        let loss = Loss { why: "the pool is full".to_owned(), notes_in_doubt: true };
        let mut bytes = write_loss(&[b'x'; BOOT_LEN], &loss);
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(open(&path).unwrap().unwrap().1, lost, "of another boot");
        std::fs::write(&path, []).unwrap();
        assert_eq!(open(&path).unwrap().unwrap().1, Past::default(), "torn when it was made");
        std::fs::write(&path, &bytes[..100]).unwrap();
        assert!(open(&path).err().unwrap().to_string().contains("damaged"));
        std::fs::write(&path, bytes).unwrap();
        bytes[0] = b'y';
        std::fs::write(&path, bytes).unwrap();
        assert!(open(&path).err().unwrap().to_string().contains("damaged"));
    }
}
