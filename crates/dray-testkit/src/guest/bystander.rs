//! Computes what an image must hold from its seed and the guest's own log of its writes, and
//! compares. Takes nothing from dray.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use dray_guest::content::{BLOCK, Base, SEQ_BASE, SEQ_LIMIT, Written, block_is};

use super::tools;

/// Mismatches listed by a failed check; more are only counted.
const MAX_LISTED: usize = 10;
/// Blocks read by one request.
const READ_BLOCKS: u64 = 256;

/// What somebody who watched only the guest knows about an image.
#[derive(Clone, Debug)]
pub struct Bystander {
    image: u64,
    seeded_blocks: u64,
    seq: Vec<u32>,
}

impl Bystander {
    /// An image of `size` bytes whose first `seeded` bytes hold seeded content, the rest zeros.
    pub fn new(image: u64, size: u64, seeded: u64) -> Self {
        let blocks = size / BLOCK as u64;
        Self { image, seeded_blocks: seeded / BLOCK as u64, seq: vec![SEQ_BASE; blocks as usize] }
    }

    /// The same image, to which nothing was written yet.
    pub fn unwritten(&self) -> Self {
        Self { seq: vec![SEQ_BASE; self.seq.len()], ..*self }
    }

    /// The `open` command for the guest.
    pub fn open_command(&self, disk: &str) -> String {
        let seeded = self.seeded_blocks * BLOCK as u64;
        format!("open disk={disk} image={} seeded={seeded}", self.image)
    }

    /// Creates the raw image as it is before the guest writes: sparse after the seeded part.
    pub fn create_raw(&self, path: &Path) -> io::Result<()> {
        let file = OpenOptions::new().create(true).truncate(true).write(true).open(path)?;
        file.set_len(self.seq.len() as u64 * BLOCK as u64)?;
        let mut buf = vec![0; READ_BLOCKS as usize * BLOCK];
        for first in (0..self.seeded_blocks).step_by(READ_BLOCKS as usize) {
            let count = READ_BLOCKS.min(self.seeded_blocks - first);
            let bytes = &mut buf[..count as usize * BLOCK];
            for (i, chunk) in bytes.chunks_exact_mut(BLOCK).enumerate() {
                Written { image: self.image, block: first + i as u64, seq: SEQ_BASE }.fill(chunk);
            }
            file.write_all_at(bytes, first * BLOCK as u64)?;
        }
        file.sync_all()
    }

    /// Takes the lines that the guest's `dump` printed for `disk`.
    pub fn apply_dump(&mut self, disk: &str, lines: &[String]) -> io::Result<()> {
        let bad = |line: &str| io::Error::other(format!("not a dump line: {line:?}"));
        let prefix = format!("D {disk} ");
        for line in lines {
            let Some(rest) = line.strip_prefix(&prefix) else { continue };
            let numbers: Vec<u64> =
                rest.split(' ').filter_map(|n| u64::from_str_radix(n, 16).ok()).collect();
            let [first, count, seq] = numbers[..] else { return Err(bad(line)) };
            let range = first as usize..(first + count) as usize;
            let blocks = self.seq.get_mut(range).ok_or_else(|| bad(line))?;
            blocks.fill(u32::try_from(seq).map_err(|_| bad(line))?);
        }
        Ok(())
    }

    /// Takes the lines with which a guest that logs its flushes (`log=1`) tells what is durable. A line
    /// that was cut short by the end of a console counts as far as it is whole. How many lines these were.
    pub fn apply_flushes(&mut self, disk: &str, lines: &[String]) -> u64 {
        let prefix = format!("F {disk} ");
        let mut flushes = 0;
        for rest in lines.iter().filter_map(|line| line.strip_prefix(&prefix)) {
            flushes += 1;
            for write in rest.split(' ') {
                let numbers: Vec<u64> =
                    write.split(':').filter_map(|n| u64::from_str_radix(n, 16).ok()).collect();
                let [first, count, seq] = numbers[..] else { break };
                let Some(blocks) = self.seq.get_mut(first as usize..(first + count) as usize)
                else {
                    break;
                };
                let seq = u32::try_from(seq).unwrap_or(SEQ_BASE);
                // What nobody knew, or was zeroed, is known again.
                let newer = |known: &u32| *known < seq || *known >= SEQ_LIMIT;
                blocks.iter_mut().filter(|known| newer(known)).for_each(|known| *known = seq);
            }
        }
        flushes
    }

    /// Blocks from `first` on hold write number `seq` or a later one, as whoever wrote them knows.
    pub fn note(&mut self, first: u64, count: u64, seq: u32) {
        let range = first as usize..(first + count) as usize;
        self.seq.get_mut(range).into_iter().flatten().for_each(|known| *known = seq);
    }

    /// The image is longer: it has so many bytes, and zeros behind what it had.
    pub fn grow(&mut self, size: u64) {
        self.seq.resize(size as usize / BLOCK, SEQ_BASE);
    }

    /// Compares a raw image with what was flushed: every block may hold that or any later write, and
    /// nothing else. `lost` are ranges in bytes, start and end, of which nothing is expected.
    pub fn check_flushed(&self, path: &Path, lost: &[(u64, u64)]) -> io::Result<()> {
        let file = File::open(path)?;
        let mut found = Mismatches::default();
        let mut buf = [0; BLOCK];
        for (block, &flushed) in (0..).zip(&self.seq) {
            let at = block * BLOCK as u64;
            if lost.iter().any(|&(start, end)| at < end && start < at + BLOCK as u64) {
                continue;
            }
            file.read_exact_at(&mut buf, at)?;
            found.add(self.older(block, flushed, &buf));
        }
        found.result(path)
    }

    /// What is wrong with a block that must hold write number `flushed` or a later one.
    fn older(&self, block: u64, flushed: u32, bytes: &[u8]) -> Option<String> {
        let base = Base::of(block, self.seeded_blocks);
        if block_is(bytes, self.image, block, flushed, base) {
            return None;
        }
        let later = Written::identify(bytes).is_some_and(|held| {
            held.image == self.image
                && held.block == block
                && held.seq > flushed
                && held.matches(bytes)
        });
        if later { None } else { self.mismatch(block, bytes) }
    }

    /// How many blocks no longer have their first content.
    pub fn written_blocks(&self) -> u64 {
        self.seq.iter().filter(|s| **s != SEQ_BASE).count() as u64
    }

    /// How many of them lie between two places, in bytes.
    pub fn written_in(&self, start: u64, end: u64) -> u64 {
        let blocks = (start / BLOCK as u64) as usize..end.div_ceil(BLOCK as u64) as usize;
        let blocks = self.seq.get(blocks).unwrap_or_default();
        blocks.iter().filter(|s| **s != SEQ_BASE).count() as u64
    }

    /// Compares a raw image, block by block.
    pub fn check_raw(&self, path: &Path) -> io::Result<()> {
        let file = File::open(path)?;
        let (size, want) = (file.metadata()?.len(), self.seq.len() as u64 * BLOCK as u64);
        if size < want {
            return Err(io::Error::other(format!("{} bytes, not {want}", size)));
        }
        let mut found = Mismatches::default();
        let mut next = 0;
        while next < self.seq.len() as u64 {
            let (start, end) = data_after(&file, next, self.seq.len() as u64)?;
            // A hole reads as zeros; no need to.
            (next..start).for_each(|block| found.add(self.mismatch_with_zeros(block)));
            self.check_data(&file, start, end, &mut found)?;
            next = end;
        }
        found.result(path)
    }

    /// Compares an image of another format, as QEMU's own tools read it.
    pub fn check_format(&self, path: &Path, format: &str) -> io::Result<()> {
        let raw = path.with_extension("bystander.raw");
        let (from, to) = (path.to_string_lossy(), raw.to_string_lossy());
        let args = ["convert", "-U", "-f", format, "-O", "raw", &from, &to];
        let result = tools::run("qemu-img", &args).and_then(|_| self.check_raw(&raw));
        std::fs::remove_file(&raw)?;
        result
    }

    fn check_data(
        &self,
        file: &File,
        start: u64,
        end: u64,
        found: &mut Mismatches,
    ) -> io::Result<()> {
        let mut buf = vec![0; READ_BLOCKS as usize * BLOCK];
        for first in (start..end).step_by(READ_BLOCKS as usize) {
            let count = READ_BLOCKS.min(end - first);
            let bytes = &mut buf[..count as usize * BLOCK];
            file.read_exact_at(bytes, first * BLOCK as u64)?;
            for (i, chunk) in bytes.chunks_exact(BLOCK).enumerate() {
                found.add(self.mismatch(first + i as u64, chunk));
            }
        }
        Ok(())
    }

    fn mismatch_with_zeros(&self, block: u64) -> Option<String> {
        const ZEROS: [u8; BLOCK] = [0; BLOCK];
        let seq = self.seq[block as usize];
        match Base::of(block, self.seeded_blocks) {
            Base::Zero if seq == SEQ_BASE => None,
            _ => self.mismatch(block, &ZEROS),
        }
    }

    fn mismatch(&self, block: u64, bytes: &[u8]) -> Option<String> {
        let seq = self.seq[block as usize];
        let base = Base::of(block, self.seeded_blocks);
        if block_is(bytes, self.image, block, seq, base) {
            return None;
        }
        let found = match Written::identify(bytes) {
            Some(w) => format!("image {} block {} seq {}", w.image, w.block, w.seq),
            None if bytes.iter().all(|b| *b == 0) => "zeros".to_owned(),
            None => "garbage".to_owned(),
        };
        Some(format!("block {block}: expected seq {seq}, found {found}"))
    }
}

/// What a check found wrong.
#[derive(Default)]
struct Mismatches {
    listed: Vec<String>,
    count: u64,
}

impl Mismatches {
    fn add(&mut self, found: Option<String>) {
        let Some(text) = found else { return };
        self.count += 1;
        if self.listed.len() < MAX_LISTED {
            self.listed.push(text);
        }
    }

    fn result(self, path: &Path) -> io::Result<()> {
        let Self { listed, count } = self;
        if count == 0 {
            return Ok(());
        }
        let name = path.display();
        Err(io::Error::other(format!("{name}: {count} wrong blocks: {}", listed.join("; "))))
    }
}

/// The first blocks at or after `from` that are not in a hole, as start and end; both `end` when
/// there are none.
fn data_after(file: &File, from: u64, end: u64) -> io::Result<(u64, u64)> {
    use rustix::fs::{SeekFrom, seek};
    let block = BLOCK as u64;
    let start = match seek(file, SeekFrom::Data(from * block)) {
        Ok(offset) => (offset / block).min(end),
        Err(rustix::io::Errno::NXIO) => return Ok((end, end)),
        Err(error) => return Err(error.into()),
    };
    let hole = seek(file, SeekFrom::Hole(start * block))?;
    // Data may begin within a block, after a hole: that block is taken whole.
    Ok((start, hole.div_ceil(block).max(start + 1).min(end)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_sees_every_difference() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("image");
        let mut bystander = Bystander::new(3, 1 << 20, 512 << 10);
        bystander.create_raw(&path).expect("create");
        bystander.check_raw(&path).expect("as created");
        bystander
            .apply_dump("vda", &["D vda 5 2 9".into(), "D vdb 1 1 1".into(), "OK".into()])
            .expect("dump");
        assert_eq!(bystander.written_blocks(), 2);
        let error = bystander.check_raw(&path).expect_err("writes are missing").to_string();
        assert!(error.contains("2 wrong blocks: block 5: expected seq 9"), "{error}");
        let file = OpenOptions::new().write(true).open(&path).expect("open");
        for block in [5, 6] {
            let mut buf = vec![0; BLOCK];
            Written { image: 3, block, seq: 9 }.fill(&mut buf);
            file.write_all_at(&buf, block * BLOCK as u64).expect("write");
        }
        bystander.check_raw(&path).expect("as written");
        assert!(bystander.apply_dump("vda", &["D vda 1000 1 1".into()]).is_err());
    }

    #[test]
    fn what_was_flushed_may_be_newer_and_never_older() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("image");
        let mut bystander = Bystander::new(3, 1 << 20, 0);
        bystander.create_raw(&path).expect("create");
        let lines = ["F vda 5:2:9 7:1:b".to_owned(), "F vdb 1:1:1".into(), "F vda 8:1".into()];
        assert_eq!(bystander.apply_flushes("vda", &lines), 2);
        assert_eq!(bystander.written_blocks(), 3);
        assert_eq!(bystander.written_in(6 * 4096, 7 * 4096 + 1), 2);
        assert_eq!(bystander.unwritten().written_blocks(), 0);
        let file = OpenOptions::new().write(true).open(&path).expect("open");
        let write = |block: u64, seq| {
            let mut buf = vec![0; BLOCK];
            Written { image: 3, block, seq }.fill(&mut buf);
            file.write_all_at(&buf, block * BLOCK as u64).expect("write");
        };
        write(5, 9);
        write(6, 12);
        write(7, 10);
        let lost = |range| bystander.check_flushed(&path, range).map_err(|why| why.to_string());
        let why = lost(&[]).expect_err("block 7 is older");
        assert!(why.contains("1 wrong blocks: block 7: expected seq 11"), "{why}");
        assert_eq!(lost(&[(7 * 4096, 8 * 4096)]), Ok(()));
        write(7, 11);
        assert_eq!(lost(&[]), Ok(()));
    }
}
