//! The disk after a power cut: what was flushed is there, of what was not each write is there, or not,
//! or torn between two sectors.

use super::disk;
use super::log::{Entry, Log, SECTOR};
use crate::numbered::next;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Sectors of a file system's block, and how those of its journal begin.
const BLOCK_SECTORS: u64 = 8;
const JOURNAL: [u8; 4] = [0xC0, 0x3B, 0x39, 0x98];

/// A moment, and what the disk makes of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cut {
    /// How many entries of the log had been done.
    pub at: usize,
    /// Of the writes that were not flushed so many in a hundred survive as they are.
    pub survive: u64,
    /// Of the others so many in a hundred survive in part.
    pub torn: u64,
    /// Where that is drawn from.
    pub seed: u64,
    /// The only part of the disk, in sectors, that loses anything.
    pub part: Range<u64>,
}

impl Cut {
    /// Makes the disk: a copy of `base`, which is as it was when the log began.
    ///
    /// # Errors
    /// When a file cannot be read or written.
    pub fn apply(&self, log: &Log, base: &Path, to: &Path) -> io::Result<()> {
        copy_sparse(base, to)?;
        let disk = OpenOptions::new().write(true).open(to)?;
        let entries = &log.entries[..self.at];
        let durable = flushed(entries);
        let mut random = self.seed;
        for (nth, entry) in entries.iter().enumerate().filter(|(_, entry)| entry.count > 0) {
            let bytes = log.bytes(entry)?;
            let lost = nth >= durable && !entry.forced && self.part.contains(&entry.first);
            if !lost || next(&mut random) % 100 < self.survive {
                disk.write_all_at(&bytes, entry.first * SECTOR)?;
            } else if next(&mut random) % 100 < self.torn {
                tear(&disk, entry, &bytes, &mut random)?;
            }
        }
        Ok(())
    }

    /// Writes of the part that may be lost.
    #[must_use]
    pub fn unflushed(&self, log: &Log) -> usize {
        let entries = &log.entries[..self.at];
        let lost = entries[flushed(entries)..].iter();
        lost.filter(|entry| entry.count > 0 && self.part.contains(&entry.first)).count()
    }
}

/// How many of the entries, from the first on, the last flush among them has made durable.
fn flushed(entries: &[Entry]) -> usize {
    entries.iter().rposition(|entry| entry.flush).unwrap_or(0)
}

/// Half of the sectors survive: the first ones, the last ones, or any.
fn tear(disk: &File, entry: &Entry, bytes: &[u8], random: &mut u64) -> io::Result<()> {
    let (how, edge) = (next(random) % 3, next(random) % entry.count);
    let mut survives = false;
    for (nth, sector) in (0..).zip(bytes.chunks_exact(SECTOR as usize)) {
        let block = nth - nth % BLOCK_SECTORS;
        if nth == block || !is_whole(entry.first + block, &bytes[(block * SECTOR) as usize..]) {
            survives = match how {
                0 => nth < edge,
                1 => nth > edge,
                _ => next(random).is_multiple_of(2),
            };
        }
        if survives {
            disk.write_all_at(sector, (entry.first + nth) * SECTOR)?;
        }
    }
    Ok(())
}

/// Whether ext4 relies on getting all of this block or nothing: it writes its superblock past its
/// journal, and takes a torn commit block for damage.
fn is_whole(first: u64, block: &[u8]) -> bool {
    block.starts_with(&JOURNAL) || [0, 1].iter().any(|nth| disk::host(*nth).start == first)
}

/// Copies a file, its holes as holes.
///
/// # Errors
/// When a file cannot be read or written.
pub fn copy_sparse(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{SeekFrom, seek};
    let source = File::open(from)?;
    let len = source.metadata()?.len();
    let target = File::create(to)?;
    target.set_len(len)?;
    let mut at = 0;
    while let Ok(start) = seek(&source, SeekFrom::Data(at)) {
        let end = seek(&source, SeekFrom::Hole(start))?;
        let mut bytes = vec![0; (end - start) as usize];
        source.read_exact_at(&mut bytes, start)?;
        target.write_all_at(&bytes, start)?;
        at = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::tools;

    /// What QEMU logs while it does these commands on an empty disk, which `below` lies under.
    fn logged(dir: &Path, below: &str, commands: &[&str]) -> Log {
        let [disk, log] = ["disk", "log"].map(|name| dir.join(name));
        File::create(&disk).unwrap().set_len(1 << 20).unwrap();
        File::create(&log).unwrap();
        let free = r#""cache":{"no-flush":true}"#;
        let file =
            |path: &Path| format!(r#"{{"driver":"file","filename":"{}",{free}}}"#, path.display());
        let below = below.replace("FREE", free).replace("FILE", &file(&disk));
        let image = format!(
            r#"json:{{"driver":"blklogwrites","file":{below},"log":{},"log-sector-size":512}}"#,
            file(&log)
        );
        let slow = "throttle-group,id=slow,x-bps-write=131072,x-bps-write-max=131072";
        let mut args = vec!["--object", slow, "-t", "writeback", image.as_str()];
        commands.iter().for_each(|command| args.extend(["-c", command]));
        tools::run("qemu-io", &args).unwrap();
        Log::open(&log).unwrap()
    }

    fn flushes(log: &Log) -> Vec<usize> {
        (0..log.entries.len()).filter(|nth| log.entries[*nth].flush).collect()
    }

    #[test]
    fn what_was_flushed_survives_and_nothing_else_must() {
        if !tools::available(&["qemu-io"]) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let [base, out] = ["base", "out"].map(|name| dir.path().join(name));
        File::create(&base).unwrap().set_len(1 << 20).unwrap();
        let commands = [
            "write -P 1 0 4k",
            "flush",
            "write -P 2 0 8k",
            "write -P 3 64k 4k",
            "flush",
            "write -P 4 0 4k",
            "flush",
        ];
        let log = logged(dir.path(), "FILE", &commands);
        assert_eq!(flushes(&log), [1, 4, 6], "{:?}", log.entries);
        let cut = Cut { at: 4, survive: 0, torn: 0, seed: 1, part: 0..u64::MAX };
        let first = |cut: &Cut| {
            cut.apply(&log, &base, &out).unwrap();
            std::fs::read(&out).unwrap()[..8192].to_vec()
        };
        assert_eq!(cut.unflushed(&log), 2);
        assert_eq!(first(&cut), [[1; 4096], [0; 4096]].concat());
        assert_eq!(first(&Cut { survive: 100, ..cut.clone() }), [2; 8192]);
        assert_eq!(first(&Cut { part: 128..256, ..cut.clone() }), [2; 8192]);
        assert_eq!(first(&Cut { at: 5, ..cut.clone() }), [2; 8192]);
        let torn = first(&Cut { torn: 100, ..cut });
        assert!(torn.contains(&2) && torn != [2; 8192]);
    }

    /// A write that is under way when a flush is asked for is logged after it: the flush has not made
    /// it durable.
    #[test]
    fn a_flush_covers_what_was_done_before_it_was_asked_for() {
        if !tools::available(&["qemu-io"]) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let slow = r#"{"driver":"throttle","throttle-group":"slow",FREE,"file":FILE}"#;
        let commands = ["write 0 128k", "aio_write 128k 64k", "flush", "aio_flush", "flush"];
        let log = logged(dir.path(), slow, &commands);
        assert_eq!(flushes(&log), [1, 3], "{:?}", log.entries);
        assert_eq!(log.entries[2].first, 256);
    }
}
