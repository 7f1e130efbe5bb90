//! Identifies a file's content by its digest. The [`FileStamp`] shows that the file has not changed
//! since.

use dray_host::stamp::FileStamp;
use dray_image::{FileImage, FileOptions, Image, runs};
use dray_net::zeros::{RunBuffer, is_zero};
use dray_types::{BLOCK_SIZE, BlockRange, MAX_RUN_BLOCKS};
use dray_wire::frame::PIECE_BLOCKS;
use dray_wire::request::ContentDigest;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Bytes of the pieces that are left out where they are zeros.
const PIECE_BYTES: usize = (PIECE_BLOCKS * BLOCK_SIZE) as usize;
/// Two changes closer together than this may leave a file with the same times.
const TICK: Duration = Duration::from_millis(100);

/// Reads the file at `path`: how it looks, and the digest of its content. `go_on` is told how many
/// bytes were looked at, and says whether anybody still wants to know.
///
/// # Errors
/// What the file system reports, that nobody waits any more, or that the file was changed meanwhile.
pub(super) fn read(
    path: &Path,
    go_on: impl FnMut(u64) -> bool,
) -> io::Result<(FileStamp, ContentDigest)> {
    std::thread::sleep(unsettled(&FileStamp::of(path)?));
    let image = open(path)?;
    if !image.file().metadata()?.is_file() {
        return Err(io::Error::other(format!("{} is not a regular file", path.display())));
    }
    let stamp = FileStamp::of_open(image.file())?;
    let digest = digest(&image, go_on)?;
    // Under this name, and of this file: it may have been replaced.
    if FileStamp::of_open(image.file())? != stamp || FileStamp::of(path)? != stamp {
        return Err(io::Error::other(format!("{} was changed while it was read", path.display())));
    }
    Ok((stamp, digest))
}

/// The time until a change of a file that looks so could no longer go unseen.
fn unsettled(stamp: &FileStamp) -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (seconds, nanos) = stamp.changed;
    let changed = Duration::new(seconds.try_into().unwrap_or(0), nanos.try_into().unwrap_or(0));
    // A clock that is behind the file system's is not waited for any longer.
    (changed + TICK).saturating_sub(now).min(TICK)
}

/// Past the page cache where that is possible: what guests have there stays.
fn open(path: &Path) -> io::Result<FileImage> {
    let direct = FileOptions { direct: true, ..FileOptions::default() };
    FileImage::open(path, direct)
        .or_else(|_| FileImage::open(path, FileOptions::default()))
        .map_err(io::Error::other)
}

/// The digest of an image's content: BLAKE3 over its length in bytes and, in order, the offset and the
/// bytes of each aligned piece of 64 KiB that is not all zeros; numbers are 8 bytes, little endian. So
/// a sparse file and a full one with the same bytes have the same digest, and holes are not read.
fn digest(image: &dyn Image, mut go_on: impl FnMut(u64) -> bool) -> io::Result<ContentDigest> {
    let len = image.geometry().len;
    let whole = BlockRange::whole(len);
    let mut hasher = blake3::Hasher::new();
    hasher.update(&len.to_le_bytes());
    let mut memory = RunBuffer::new(MAX_RUN_BLOCKS);
    for start in (0..whole.len).step_by(MAX_RUN_BLOCKS as usize) {
        if !go_on(start * BLOCK_SIZE) {
            return Err(io::Error::new(
                io::ErrorKind::Interrupted,
                "no host waits for it any more",
            ));
        }
        let run = BlockRange::new(start, MAX_RUN_BLOCKS).intersect(whole);
        if runs::data_blocks(image, run).is_ok_and(|data| data.is_empty()) {
            continue;
        }
        let bytes = memory.bytes(run.byte_len() as usize);
        runs::read_run(image, run, bytes).map_err(io::Error::other)?;
        let inside = (len - run.byte_offset()).min(run.byte_len()) as usize;
        let offsets = (run.byte_offset()..).step_by(PIECE_BYTES);
        for (offset, piece) in offsets.zip(bytes[..inside].chunks(PIECE_BYTES)) {
            if !is_zero(piece) {
                hasher.update(&offset.to_le_bytes());
                hasher.update(piece);
            }
        }
    }
    Ok(*hasher.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    /// A file of `len` bytes with these bytes at these offsets and holes between them.
    fn file(dir: &Path, name: &str, len: u64, parts: &[(u64, &[u8])]) -> std::path::PathBuf {
        let path = dir.join(name);
        let file = File::create(&path).unwrap();
        file.set_len(len).unwrap();
        parts.iter().for_each(|(offset, bytes)| file.write_all_at(bytes, *offset).unwrap());
        path
    }

    fn digest_of(path: &Path) -> ContentDigest {
        read(path, |_| true).unwrap().1
    }

    #[test]
    fn holes_and_zeros_are_the_same_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let len = (3 << 20) + 1500;
        let parts: &[(u64, &[u8])] = &[(70_000, b"content"), (len - 3, b"end")];
        let sparse = file(dir.path(), "sparse", len, parts);
        let bytes = std::fs::read(&sparse).unwrap();
        let full = file(dir.path(), "full", len, &[(0, &bytes)]);
        let digest = digest_of(&sparse);
        assert_eq!(digest_of(&full), digest);
        let others = [
            file(dir.path(), "moved", len, &[(70_000 + 65_536, b"content"), (len - 3, b"end")]),
            file(dir.path(), "shorter", len - 1, &[(70_000, b"content"), (len - 3, b"en")]),
            file(dir.path(), "longer", len + 1, parts),
            file(dir.path(), "other", len, &[(70_000, b"contend"), (len - 3, b"end")]),
            file(dir.path(), "without", len, &[(70_000, b"content")]),
        ];
        for other in others {
            assert_ne!(digest_of(&other), digest, "{}", other.display());
        }
    }

    #[test]
    fn a_digest_is_what_it_is_said_to_be() {
        let dir = tempfile::tempdir().unwrap();
        let path = file(dir.path(), "file", 200_000, &[(131_072, &[7; 68_928])]);
        let mut bytes = 200_000_u64.to_le_bytes().to_vec();
        for (offset, len) in [(131_072_u64, 65_536), (196_608, 3392)] {
            bytes.extend(offset.to_le_bytes());
            bytes.extend(vec![7; len]);
        }
        assert_eq!(digest_of(&path), *blake3::hash(&bytes).as_bytes());
    }

    #[test]
    fn what_is_changed_while_it_is_read_has_no_digest() {
        let dir = tempfile::tempdir().unwrap();
        let path = file(dir.path(), "file", 2 << 20, &[(0, b"x")]);
        // The same bytes, written into a part that was read before.
        let written = |done| {
            let file = File::options().write(true).open(&path).unwrap();
            file.write_all_at(b"x", 0).unwrap();
            done < 2 << 20
        };
        assert!(read(&path, written).unwrap_err().to_string().contains("was changed"));
        let replaced = |_| {
            file(dir.path(), "new", 2 << 20, &[(0, b"x")]);
            std::fs::rename(dir.path().join("new"), &path).unwrap();
            true
        };
        assert!(read(&path, replaced).unwrap_err().to_string().contains("was changed"));
        let why = read(&path, |done| done == 0).unwrap_err();
        assert_eq!(why.kind(), io::ErrorKind::Interrupted);
    }
}
