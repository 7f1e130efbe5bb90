//! Small values that are replaced as a whole: records of images, intents, notes.
//!
//! A value is JSON behind one line that says what it is, how long it is and what its checksum is, so
//! that a file that was cut off, filled with zeros or edited by hand is told from one that dray wrote.

use crate::files::{self, Files};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

/// What the first line begins with, and the version of what follows.
const MAGIC: &str = "dray-record 1";
/// Longest value; the longest that is written is a batch of a few hundred migrations.
pub const MAX_VALUE: usize = 16 << 20;
/// Longest first line.
const MAX_HEAD: usize = 64;

/// Replaces the value at `path`, durably: after a crash it is the old one or the new one.
///
/// # Errors
/// What the file system reports.
pub fn replace<T: Serialize>(files: &dyn Files, path: &Path, value: &T) -> io::Result<()> {
    let named = |why: io::Error| io::Error::new(why.kind(), format!("{}: {why}", path.display()));
    let bytes = encode(value).map_err(named)?;
    files::replace(files, path, &bytes).map(drop).map_err(named)
}

/// Reads what [`replace`] wrote; what is read outlives a power cut. For what is read at a start, and
/// acted upon.
///
/// # Errors
/// `NotFound` without a file, `InvalidData` for anything that [`replace`] has not written, or what the
/// file system reports.
pub fn read<T: DeserializeOwned>(files: &dyn Files, path: &Path) -> io::Result<T> {
    check_len(files, path)?;
    decode_from(path, &files::read_settled(files, path)?)
}

/// The same without making it durable: for what is only shown, or was made durable by this process.
///
/// # Errors
/// As [`read`].
pub fn look<T: DeserializeOwned>(files: &dyn Files, path: &Path) -> io::Result<T> {
    check_len(files, path)?;
    decode_from(path, &files::read(files, path)?)
}

/// A file of any length may lie where a record is expected.
fn check_len(files: &dyn Files, path: &Path) -> io::Result<()> {
    match files.look(path)?.len {
        len if len <= (MAX_VALUE + MAX_HEAD) as u64 => Ok(()),
        len => {
            Err(damaged(format!("{}: it has {len} bytes, more than any record", path.display())))
        }
    }
}

fn decode_from<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> io::Result<T> {
    decode(bytes).map_err(|why| damaged(format!("{}: {why}", path.display())))
}

fn encode<T: Serialize>(value: &T) -> io::Result<Vec<u8>> {
    let mut body = serde_json::to_vec_pretty(value)?;
    body.push(b'\n');
    if body.len() > MAX_VALUE {
        let why = format!("a value of {} bytes is longer than any may be", body.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    Ok(seal(&body))
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    serde_json::from_slice(unseal(bytes)?).map_err(io::Error::from)
}

/// The bytes of a file whose value is `body`.
pub fn seal(body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("{MAGIC} {} {:016x}\n", body.len(), xxh3_64(body)).into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// The value in the bytes of a file.
///
/// # Errors
/// `InvalidData`, with what is wrong with them.
pub fn unseal(bytes: &[u8]) -> io::Result<&[u8]> {
    let foreign = || damaged("it is not a record of dray");
    let end = bytes.iter().position(|&byte| byte == b'\n').ok_or_else(foreign)?;
    let (line, body) = (&bytes[..end], &bytes[end + 1..]);
    let line = std::str::from_utf8(line).ok().and_then(|line| line.strip_prefix(MAGIC));
    let mut words = line.ok_or_else(foreign)?.split_ascii_whitespace();
    let len = words.next().and_then(|word| word.parse::<usize>().ok());
    let sum = words.next().and_then(|word| u64::from_str_radix(word, 16).ok());
    if len != Some(body.len()) || body.len() > MAX_VALUE {
        return Err(damaged(format!("it is cut off: {} bytes are there", body.len())));
    }
    if sum != Some(xxh3_64(body)) {
        return Err(damaged("it is damaged: its checksum does not match"));
    }
    Ok(body)
}

fn damaged(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::RealFiles;

    #[test]
    fn what_was_replaced_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        replace(&RealFiles, &path, &vec![1, 2]).unwrap();
        replace(&RealFiles, &path, &vec![3]).unwrap();
        assert_eq!(read::<Vec<i32>>(&RealFiles, &path).unwrap(), [3]);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("dray-record 1 "), "{text}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
        let absent = read::<i32>(&RealFiles, &dir.path().join("b")).unwrap_err();
        assert_eq!(absent.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn nothing_that_was_damaged_is_believed() {
        let whole = encode(&("a name", 17, [true, false])).unwrap();
        assert!(decode::<(String, i32, [bool; 2])>(&whole).is_ok());
        for len in 0..whole.len() {
            assert!(decode::<serde_json::Value>(&whole[..len]).is_err(), "cut at {len}");
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 2;
            assert!(decode::<serde_json::Value>(&damaged).is_err(), "byte {at}");
        }
    }

    /// It may lie there by mistake or ill will, and is not read into memory first.
    #[test]
    fn a_file_that_is_longer_than_any_record_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
        for read in [read::<i32>, look::<i32>] {
            let why = read(&RealFiles, &path).unwrap_err();
            assert_eq!(why.kind(), io::ErrorKind::InvalidData);
            assert!(why.to_string().contains("more than any record"), "{why}");
        }
    }
}
