//! [`Focus`]: where a guest waited, and what it is likely to read next.

use super::fetching::Backfill;
use dray_types::ImageIndex;

/// How far Backfill goes on behind a block that a guest waited for, in blocks: 4 MiB, the smallest
/// chunk that heat counts.
const MIN_FOCUS: u64 = 1024;
/// How far once demands follow each other, in blocks: 1 MiB, twice as far each time.
const STREAM_FOCUS: u64 = 256;
/// Demands follow each other over a gap of so many blocks: 64 KiB.
const STREAM_GAP: u64 = 16;
/// How far at most when the guest's demands follow each other: 64 MiB.
const MAX_FOCUS: u64 = 16_384;

/// Where a guest waited: what it reads next is likely what lies behind.
#[derive(Clone, Copy, Debug)]
pub(super) struct Focus {
    pub(super) image: ImageIndex,
    pub(super) from: u64,
    pub(super) until: u64,
    span: u64,
}

impl Focus {
    /// Whether a demand at `start` follows the one that this is about.
    fn reaches(&self, image: ImageIndex, start: u64) -> bool {
        let gap = self.span.max(STREAM_GAP);
        let near = self.from.saturating_sub(gap)..=self.until.saturating_add(gap);
        self.image == image && near.contains(&start)
    }
}

impl Backfill {
    /// A guest waited for blocks from `start` to `end`: what it reads next is likely what lies behind.
    ///
    /// Where a schedule says what the guest reads, one demand says nothing more and the schedule goes
    /// on; only demands that follow each other, as of a guest that reads a file, are followed. Where
    /// nothing is known each demand is. In address order as such none is.
    pub(super) fn focus_on(&mut self, image: ImageIndex, start: u64, end: u64) {
        if !self.ordered {
            return;
        }
        let first = if self.left[image.ix()].is_scheduled() { 0 } else { MIN_FOCUS };
        let span = match self.focus {
            Some(focus) if focus.reaches(image, start) => {
                (focus.span * 2).clamp(STREAM_FOCUS, MAX_FOCUS)
            }
            _ => first,
        };
        self.focus = Some(Focus { image, from: end, until: end.saturating_add(span), span });
    }
}
