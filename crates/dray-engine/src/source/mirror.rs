//! Mirroring: a guest's write to a block that was already copied is sent as well.
//!
//! The guest does not wait for it: its write is done when it is done here, with its blocks dirty in
//! the tracker, and only then the shell tells of it. So nothing depends on a mirrored frame: a write
//! that finds the window full, or no link, simply stays dirty and is sent by a round of Sync.
//!
//! Whether a block was already copied is known block by block: what is still in `todo` Copy will
//! bring in its newest version, what is in flight waits in `again` until that frame has landed (two
//! versions of a block are never under way at once), and everything else is mirrored. Copy and Sync keep half of the window as
//! long as they have something to send, and a round that the guest's own writes keep from ending is
//! ended: mirroring must not hide that the guest writes more than the link carries.

use super::{Link, Source, SourceEffect, Stage};
use crate::{SECOND, Time};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet, ImageIndex};

/// A round that has brought nothing for this long is over, in nanoseconds.
const STUCK: u64 = 5 * SECOND;
/// If that many bytes arrived meanwhile: a slow link is not a stuck round.
const STUCK_BYTES: u64 = 16 << 20;

/// How far the round of Copy or Sync is: what waits only shrinks unless the guest fills it up again
/// as fast as the link empties it.
#[derive(Debug, Default)]
pub(super) struct Progress {
    least: u64,
    at: Time,
    bytes: u64,
}

impl Source {
    /// A round begins.
    pub(super) fn begin_progress(&mut self) {
        self.progress = Progress { least: u64::MAX, at: self.now, bytes: 0 };
    }

    /// Bytes of a frame arrived.
    pub(super) fn delivered(&mut self, bytes: u64) {
        self.progress.bytes += bytes;
    }

    /// Whether the guest writes as fast as the link carries, so that its own writes keep the round
    /// from ending. The next round then shows whether that is little enough to hand over.
    pub(super) fn is_stuck(&mut self) -> bool {
        if !self.plan.strategy.mirrors
            || !matches!(self.stage, Stage::Copy | Stage::Sync | Stage::Ready)
        {
            return false;
        }
        let waits = self.images.iter().map(|image| image.blocks.waiting_or_unsure()).sum();
        if waits < self.progress.least {
            self.progress = Progress { least: waits, at: self.now, bytes: 0 };
        }
        self.now.since(self.progress.at) > STUCK && self.progress.bytes > STUCK_BYTES
    }

    /// Mirrored writes take half of the window as long as Copy or Sync has something to send.
    pub(super) fn mirror_has_room(&self) -> bool {
        let waits = || self.images.iter().any(|image| image.blocks.waits());
        self.mirror_flying < self.window.size() / 2 || !waits()
    }

    pub(super) fn written(
        &mut self,
        image: ImageIndex,
        range: BlockRange,
        out: &mut Vec<SourceEffect>,
    ) {
        let listens = matches!(self.stage, Stage::Copy | Stage::Sync | Stage::Ready);
        if !self.plan.strategy.mirrors || !listens || self.link != Link::Up || !self.opened {
            return;
        }
        let Some(offer) = self.plan.images.get(image.ix()) else { return };
        let range = crate::order::clip(range, BlockRange::whole(offer.len));
        let room = self.plan.tuning.mirror_window.saturating_sub(self.mirror_bytes) / BLOCK_SIZE;
        let queued = self.images[image.ix()].blocks.written(range, room);
        self.mirror_bytes += queued * BLOCK_SIZE;
        self.pump(out);
    }

    pub(super) fn send_mirrored(&mut self, out: &mut Vec<SourceEffect>) -> bool {
        let mut images = self.images.iter_mut().enumerate();
        let next = images.find_map(|(ix, image)| Some((ix, image.blocks.launch_mirrored()?)));
        let Some((ix, range)) = next else { return false };
        self.blocks_mirrored += range.len;
        self.mirror_flying += range.byte_len();
        self.send_run(ImageIndex(ix as u16), range, true, out);
        true
    }

    /// What waits to be mirrored is dirty in the tracker, and that is enough.
    pub(super) fn forget_mirrored(&mut self) {
        for image in &mut self.images {
            self.mirror_bytes -= image.blocks.forget_mirrored() * BLOCK_SIZE;
        }
    }

    /// A round of Sync brings these blocks.
    pub(super) fn not_mirrored(&mut self, image: ImageIndex, blocks: &BlockSet) {
        let fewer = self.images[image.ix()].blocks.not_mirrored(blocks);
        self.mirror_bytes -= fewer * BLOCK_SIZE;
    }
}
