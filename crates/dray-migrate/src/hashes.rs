//! The hashes that two hosts compare: of pieces of an image, without a look at what holds nothing.

use dray_image::{ExtentKind, Image, Result, runs};
use dray_types::BlockRange;
use std::ops::Range;

/// How far a hole is looked for beyond the piece that is hashed, in bytes.
const LOOK_AHEAD: u64 = 64 << 20;

/// The first 16 bytes of the BLAKE3 hash.
fn short(bytes: &[u8]) -> [u8; 16] {
    let mut short = [0; 16];
    short.copy_from_slice(&blake3::hash(bytes).as_bytes()[..16]);
    short
}

/// Hashes pieces of one image for one answer. It remembers where holes are, and may not outlive a write
/// into one.
pub struct Hashes<'a> {
    image: &'a dyn Image,
    /// Bytes that are not allocated.
    hole: Range<u64>,
    /// The hash of so many bytes of zeros.
    zeros: Option<(u64, [u8; 16])>,
    buf: Vec<u8>,
}

impl<'a> Hashes<'a> {
    /// Hashes pieces of `image`.
    pub fn of(image: &'a dyn Image) -> Self {
        Self { image, hole: 0..0, zeros: None, buf: Vec::new() }
    }

    /// The first 16 bytes of the BLAKE3 hash of a piece; what is past the image's end counts as zeros.
    ///
    /// # Errors
    /// What the disk says.
    pub fn hash(&mut self, range: BlockRange) -> Result<[u8; 16]> {
        let len = range.byte_len();
        if self.is_hole(range)? {
            return Ok(self.hash_of_zeros(len));
        }
        self.buf.resize(len as usize, 0);
        runs::read_run(self.image, range, &mut self.buf)?;
        Ok(short(&self.buf))
    }

    /// Whether nothing of a piece is allocated, so that it need not be read.
    ///
    /// # Errors
    /// What the disk says.
    fn is_hole(&mut self, range: BlockRange) -> Result<bool> {
        let image_end = self.image.geometry().len;
        let (start, end) =
            (range.byte_offset(), (range.byte_offset() + range.byte_len()).min(image_end));
        if start >= end {
            return Ok(false);
        }
        if !self.hole.contains(&start) {
            let ahead = (end + LOOK_AHEAD).min(image_end) - start;
            let first = self.image.extents(start, ahead, 1)?.first().copied();
            let hole = first.filter(|found| found.kind == ExtentKind::Hole);
            self.hole = start..start + hole.map_or(0, |found| found.len);
        }
        Ok(self.hole.contains(&start) && end <= self.hole.end)
    }

    fn hash_of_zeros(&mut self, len: u64) -> [u8; 16] {
        match self.zeros {
            Some((known, hash)) if known == len => hash,
            _ => {
                let hash = short(&vec![0; len as usize]);
                self.zeros = Some((len, hash));
                hash
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_image::layers::{Layered, Op, Recording};
    use dray_image::{FileImage, FileOptions};
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    const BLOCK: u64 = 4096;

    #[test]
    fn holes_are_hashed_as_zeros_and_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let file = std::fs::File::create(&path).unwrap();
        // Blocks 0 and 1 are written, the others are not; of the last there is one byte.
        file.write_all_at(&vec![7; 2 * BLOCK as usize], 0).unwrap();
        file.set_len(64 * BLOCK + 1).unwrap();
        let image = FileImage::open(&path, FileOptions::default()).unwrap();
        let image = Layered::new(Arc::new(image), Recording::default());
        let mut hashes = Hashes::of(&image);
        for (first, blocks, byte) in [(0, 2, 7), (2, 16, 0), (18, 2, 0), (64, 1, 0), (3, 16, 0)] {
            let expected = short(&vec![byte; (blocks * BLOCK) as usize]);
            assert_eq!(hashes.hash(BlockRange::new(first, blocks)).unwrap(), expected, "{first}");
        }
        let half = [[7; BLOCK as usize], [0; BLOCK as usize]].concat();
        assert_eq!(hashes.hash(BlockRange::new(1, 2)).unwrap(), short(&half));
        let requests = image.layer().take();
        let read = requests.iter().filter(|request| request.op == Op::Read);
        let read: Vec<_> = read.map(|request| (request.offset, request.len)).collect();
        assert_eq!(read, [(0, 2 * BLOCK), (BLOCK, 2 * BLOCK)]);
    }
}
