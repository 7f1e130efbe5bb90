//! The one disk of such a machine: a file system for each host, and a part for notes.

use super::log::SECTOR;
use crate::guest::tools;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of a host's file system: some small images, and a journal of the smallest size.
const HOST: u64 = 48 << 20;
/// Bytes for notes.
const NOTES: u64 = 8 << 20;
/// Where the first partition begins.
const FIRST: u64 = 1 << 20;
/// The partition table's entries in the first sector, and the type of a Linux partition.
const TABLE: u64 = 446;
const LINUX: u8 = 0x83;

/// A host's part of the disk, in sectors.
#[must_use]
pub fn host(nth: u64) -> Range<u64> {
    let first = FIRST + nth * HOST;
    first / SECTOR..(first + HOST) / SECTOR
}

/// The part for notes, in sectors.
#[must_use]
pub fn notes() -> Range<u64> {
    let first = host(1).end;
    first..first + NOTES / SECTOR
}

/// Makes the disk; each host's file system holds what is in its folder.
///
/// # Errors
/// When the tools do not do it, or there is no room.
pub fn make(disk: &Path, folders: [&Path; 2]) -> io::Result<()> {
    let file = File::create(disk)?;
    file.set_len(notes().end * SECTOR)?;
    let mut table = [0; 66];
    for (nth, part) in [host(0), host(1), notes()].iter().enumerate() {
        let entry = &mut table[16 * nth..16 * (nth + 1)];
        entry[4] = LINUX;
        entry[8..12].copy_from_slice(&(part.start as u32).to_le_bytes());
        entry[12..16].copy_from_slice(&((part.end - part.start) as u32).to_le_bytes());
    }
    table[64..].copy_from_slice(&[0x55, 0xAA]);
    file.write_all_at(&table, TABLE)?;
    for (nth, folder) in folders.into_iter().enumerate() {
        let part = disk.with_extension("part");
        File::create(&part)?.set_len(HOST)?;
        let (from, to) = (text(folder), text(&part));
        // Nothing is left for the kernel to do later, which would write into a measured time.
        let later = "lazy_itable_init=0,lazy_journal_init=0,nodiscard";
        let args =
            ["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=4", "-E", later, "-d", from, to];
        tools::run("mke2fs", &args)?;
        insert(&part, &file, host(nth as u64).start * SECTOR)?;
        fs::remove_file(&part)?;
    }
    Ok(())
}

/// Takes a file out of a host's file system, which is mounted nowhere.
///
/// # Errors
/// When it is not there.
pub fn extract(disk: &Path, nth: u64, path: &str, to: &Path) -> io::Result<()> {
    let part = disk.with_extension("part");
    let source = File::open(disk)?;
    let mut bytes = vec![0; HOST as usize];
    source.read_exact_at(&mut bytes, host(nth).start * SECTOR)?;
    fs::write(&part, bytes)?;
    // debugfs says what is wrong and ends as if nothing were.
    if let Err(why) = fs::remove_file(to)
        && why.kind() != io::ErrorKind::NotFound
    {
        return Err(why);
    }
    let output = tools::run("debugfs", &["-R", &format!("dump {path} {}", text(to)), text(&part)])?;
    fs::remove_file(&part)?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !to.exists() || said.contains("not found") {
        return Err(io::Error::other(format!("{path} of host {nth}: {said}")));
    }
    Ok(())
}

/// Writes what a file holds into another one, at a place that holds zeros.
fn insert(from: &Path, to: &File, at: u64) -> io::Result<()> {
    let bytes = fs::read(from)?;
    let page = 4096;
    for (nth, chunk) in bytes.chunks(page).enumerate() {
        if chunk.iter().any(|byte| *byte != 0) {
            to.write_all_at(chunk, at + (nth * page) as u64)?;
        }
    }
    Ok(())
}

fn text(path: &Path) -> &str {
    path.to_str().expect("paths of tests are text")
}
