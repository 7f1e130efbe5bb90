//! Verification: every block that the guest has not written since handover is read from the
//! target's disk again and compared with the source's hash of it (I3).

use super::{Input, TargetLoop};
use crate::hashes::Hashes;
use dray_image::Image;
use dray_types::{BlockRange, BlockSet, ImageIndex};
use dray_wire::ToSource;

/// Blocks hashed together: 64 KiB.
const GRAIN: u64 = 16;
/// Ranges asked for at once: 64 MiB of image for 16 KiB of hashes.
const BATCH: usize = 1024;

/// How far verification is.
pub struct Verifier {
    image: usize,
    from: u64,
    tag: u64,
    asked: Vec<BlockRange>,
    blocks: u64,
    different: u64,
}

impl TargetLoop {
    /// Begins, or begins again after a lost link.
    pub(super) fn start_verification(&mut self) {
        self.verifier = Some(Verifier {
            image: 0,
            from: 0,
            tag: 1,
            asked: Vec::new(),
            blocks: 0,
            different: 0,
        });
        self.ask_hashes();
    }

    pub(super) fn restart_verification(&mut self) {
        if let Some(verifier) = &mut self.verifier {
            verifier.asked.clear();
        }
    }

    pub(super) fn verifying(&mut self) -> bool {
        // The question was lost with the link: the new session asks it again.
        if self.verifier.as_ref().is_some_and(|verifier| verifier.asked.is_empty()) {
            self.start_verification();
        }
        self.verifier.is_some()
    }

    fn ask_hashes(&mut self) {
        let images = self.images.entries();
        let Some(verifier) = &mut self.verifier else { return };
        while let Some((_, len)) = images.get(verifier.image) {
            let whole = BlockRange::whole(*len);
            let written = self.images.written(verifier.image);
            let (ranges, next) = clean_ranges(&written, verifier.from, whole);
            verifier.from = next;
            if ranges.is_empty() {
                verifier.image += 1;
                verifier.from = 0;
                continue;
            }
            verifier.tag += 1;
            verifier.asked.clone_from(&ranges);
            let (tag, image) = (verifier.tag, ImageIndex(verifier.image as u16));
            return self.send_aside(ToSource::Hash { tag, image, ranges });
        }
        let (blocks, different) = (verifier.blocks, verifier.different);
        self.slot.send(Input::Verified(blocks, different));
    }

    /// The source's hashes of what was asked for.
    pub(super) fn hashed(&mut self, tag: u64, hashes: Vec<[u8; 16]>) {
        let images = self.images.entries();
        let Some(verifier) = &mut self.verifier else { return };
        if tag != verifier.tag || verifier.asked.is_empty() {
            return;
        }
        let asked = std::mem::take(&mut verifier.asked);
        let (entry, _) = &images[verifier.image];
        let here = hash_here(&*entry.file, &asked);
        // Read after hashing: a block the guest wrote meanwhile is not compared.
        let written = self.images.written(verifier.image);
        for (nth, range) in asked.iter().enumerate() {
            if written.intersects(*range) {
                continue;
            }
            verifier.blocks += range.len;
            if here.get(nth) != hashes.get(nth) || here.get(nth).is_none() {
                verifier.different += range.len;
            }
        }
        self.ask_hashes();
    }

    pub(super) fn verified(&mut self, blocks: u64, different: u64) {
        if self.verifier.take().is_none() {
            return;
        }
        self.send_aside(ToSource::Verified { blocks, different });
        self.say_progress();
        self.release();
    }

    /// There is nobody any more to compare with, if that was not done. Can be repeated.
    pub(super) fn release_uncompared(&mut self) {
        let verifies = self.slot.intent().settings.verify && !self.releasing;
        if self.verifier.take().is_some() || verifies {
            let peer = self.slot.intent().peer;
            let why = format!("not compared: {peer} does not know the migration any more");
            tracing::warn!(migration = %self.slot.board.migration, why);
            self.slot.board.notice(why);
        }
        self.release();
    }
}

/// Up to [`BATCH`] ranges at or after `from` that hold no written block and do not cross a grain,
/// and where to go on.
fn clean_ranges(written: &BlockSet, from: u64, whole: BlockRange) -> (Vec<BlockRange>, u64) {
    let mut ranges = Vec::new();
    let mut at = from;
    while at < whole.end() && ranges.len() + GRAIN as usize <= BATCH {
        let end = ((at / GRAIN + 1) * GRAIN).min(whole.end());
        let grain = BlockRange::new(at, end - at);
        ranges.extend(written.complement_in(grain).runs());
        at = end;
    }
    (ranges, at)
}

fn hash_here(file: &dyn Image, ranges: &[BlockRange]) -> Vec<[u8; 16]> {
    let mut hashes = Hashes::of(file);
    let hash = |&range: &BlockRange| {
        // From the disk, not from what the page cache remembers of the writing.
        let _ = file.forget_cached(range.byte_offset(), range.byte_len());
        hashes.hash(range).ok()
    };
    ranges.iter().map_while(hash).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_blocks_are_left_out() {
        let written: BlockSet = [BlockRange::new(18, 2)].into_iter().collect();
        let (ranges, next) = clean_ranges(&written, 0, BlockRange::new(0, 40));
        let cut: Vec<_> = ranges.iter().map(|range| (range.start, range.len)).collect();
        assert_eq!(cut, [(0, 16), (16, 2), (20, 12), (32, 8)]);
        assert_eq!(next, 40);
    }
}
