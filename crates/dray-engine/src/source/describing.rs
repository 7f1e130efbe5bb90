//! Runs that are described instead of sent: what the target has anywhere does not cross the link.
//!
//! A described run is in flight like any other, but takes no room in the window, and its round trip
//! says nothing about the link's queue. What the target lacks of it stays in flight and waits in
//! `lacking` for room; the shell has kept the content that it described, so nothing is read twice,
//! and a write since then has made the blocks dirty as it would under any run (I3).

use super::{ImageState, InFlight, Kind, Source, SourceEffect, Stage};
use crate::order::{next_image, next_in_step};
use crate::reuse::Way;
use dray_types::{BlockRange, ImageIndex, MAX_RUN_BLOCKS};
use dray_wire::frame::PIECE_BLOCKS;

impl Kind {
    /// Whether such a frame takes room in the window.
    pub(super) fn takes_room(self) -> bool {
        matches!(self, Self::Copied | Self::Mirrored)
    }
}

impl Source {
    pub(super) fn reuse_changed(&mut self, known: bool, together: bool) {
        self.reuse.known = known && self.plan.tuning.reuse;
        self.reuse.together = together || self.images.len() > 1;
    }

    /// Copy is about to begin: samples, if the session can.
    pub(super) fn begin_sample(&mut self) {
        if self.stage == Stage::Copy {
            let lens: Vec<_> =
                self.plan.images.iter().map(|offer| BlockRange::whole(offer.len).len).collect();
            self.reuse.begin(self.now, &lens);
        }
    }

    /// Describes what is left of the sample; true while nothing else may be sent.
    pub(super) fn send_sample(&mut self, out: &mut Vec<SourceEffect>) -> bool {
        if self.stage != Stage::Copy {
            return false;
        }
        while let Some((image, range)) = self.reuse.next_sample() {
            let state = &mut self.images[image.ix()];
            if state.todo.blocks().contains_range(range) {
                state.todo.remove(range);
                self.describe(image, range, out);
            }
        }
        self.reuse.samples(self.now)
    }

    /// Sends or describes the next run that waits; false without one, or without room.
    pub(super) fn send_next(&mut self, out: &mut Vec<SourceEffect>) -> bool {
        let waiting = self.images.iter().map(|image| &image.todo);
        let describes = self.stage == Stage::Copy;
        let step = describes && self.reuse.in_step();
        let next = if step { next_in_step(waiting) } else { next_image(waiting) };
        let Some(ix) = next else { return false };
        let image = ImageIndex(ix as u16);
        let Some(run) = self.images[ix].todo.next(MAX_RUN_BLOCKS) else { return false };
        let way = if describes { self.reuse.way(run) } else { Way::Send(run) };
        match way {
            Way::Describe(range) if self.reuse.has_room() && self.has_frames() => {
                self.images[ix].todo.remove(range);
                self.describe(image, range, out);
            }
            Way::Send(range) if self.has_room() => {
                self.images[ix].todo.remove(range);
                self.reuse.sent(range.len);
                self.send_run(image, range, false, out);
            }
            _ => return false,
        }
        true
    }

    fn describe(&mut self, image: ImageIndex, range: BlockRange, out: &mut Vec<SourceEffect>) {
        self.reuse.described(self.now, range.len / PIECE_BLOCKS);
        let tag = self.launch(image, range, Kind::Described, 0);
        out.push(SourceEffect::Describe { tag, image, range });
    }

    /// The whole of a described run was found.
    pub(super) fn found(&mut self, flight: InFlight) {
        let pieces = flight.range.len / PIECE_BLOCKS;
        self.reuse.answer(self.now, pieces, pieces);
        self.images[flight.image.ix()].blocks_found += flight.range.len;
    }

    /// The target lacks these pieces of a described run, and has the others.
    pub(super) fn lack(&mut self, tag: u64, pieces: u16, out: &mut Vec<SourceEffect>) {
        let Some(flight) = self.in_flight.get(&tag).copied() else { return };
        if flight.kind != Kind::Described {
            return;
        }
        self.in_flight.remove(&tag);
        let InFlight { image, range, .. } = flight;
        let mut found = 0;
        for (part, lacks) in parts(range, pieces) {
            if lacks {
                let new = self.next_tag;
                self.next_tag += 1;
                let waits = InFlight { kind: Kind::Lacking, range: part, ..flight };
                self.in_flight.insert(new, waits);
                self.lacking.push_back((new, tag));
            } else {
                found += part.len;
                self.images[image.ix()].arrived(part);
            }
        }
        self.images[image.ix()].blocks_found += found;
        self.delivered(found * dray_types::BLOCK_SIZE);
        self.reuse.answer(self.now, range.len / PIECE_BLOCKS, found / PIECE_BLOCKS);
        if self.stage != Stage::Copy {
            // Other stages need not pump, and wait for what is in flight.
            while self.send_lacking(out) {}
        }
        self.advance(out);
    }

    /// Sends what the target lacks of a described run; false when nothing waits for that.
    pub(super) fn send_lacking(&mut self, out: &mut Vec<SourceEffect>) -> bool {
        let Some((tag, of)) = self.lacking.pop_front() else { return false };
        let Some(flight) = self.in_flight.get_mut(&tag) else { return true };
        flight.kind = Kind::Copied;
        flight.sent_at = self.now;
        let InFlight { image, range, .. } = *flight;
        self.window.sent(range.byte_len());
        self.images[image.ix()].count(range);
        self.reuse.let_go(range.len / PIECE_BLOCKS);
        out.push(SourceEffect::SendKept { tag, of, image, range });
        true
    }
}

impl ImageState {
    /// The blocks in flight have arrived.
    pub(super) fn arrived(&mut self, range: BlockRange) {
        self.land(range);
        self.sent.insert(range);
        self.older.insert(range);
    }
}

/// The run cut where pieces that lack and others meet.
fn parts(range: BlockRange, lacking: u16) -> Vec<(BlockRange, bool)> {
    let mut parts: Vec<(BlockRange, bool)> = Vec::new();
    for piece in 0..range.len / PIECE_BLOCKS {
        let lacks = lacking >> piece & 1 == 1;
        match parts.last_mut() {
            Some((part, same)) if *same == lacks => part.len += PIECE_BLOCKS,
            _ => {
                let start = range.start + piece * PIECE_BLOCKS;
                parts.push((BlockRange::new(start, PIECE_BLOCKS), lacks));
            }
        }
    }
    parts
}
