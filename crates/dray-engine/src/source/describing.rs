//! Runs that are described instead of sent: what the target has anywhere does not cross the link.
//!
//! A described run is in flight like any other, but takes no room in the window, and its round trip
//! says nothing about the link's queue. What the target lacks of it stays in flight and waits in
//! `lacking` for room; the shell has kept the content that it described, so nothing is read twice,
//! and a write since then has made the blocks dirty as it would under any run (I3).
//!
//! Of what the target lacks it may have most blocks: it names such pieces, their blocks are described
//! in turn, and what lacks of these goes as one part. Until that is acknowledged the whole range is in
//! flight: should the session end, all of it goes again.

use super::{InFlight, Kind, Link, Source, SourceEffect, Stage};
use crate::order::{next_image, next_in_step};
use crate::reuse::NextRun;
use dray_types::{BLOCK_SIZE, BlockRange, ImageIndex, MAX_RUN_BLOCKS};
use dray_wire::frame::{PIECE_BLOCKS, mask_bit, mask_len, set_mask_bit};

impl Kind {
    /// Whether such a frame takes room in the window.
    pub(super) fn takes_room(self) -> bool {
        matches!(self, Self::Copied | Self::Mirrored)
    }
}

impl Source {
    pub(super) fn reuse_changed(
        &mut self,
        known: bool,
        together: bool,
        out: &mut Vec<SourceEffect>,
    ) {
        self.reuse.known = known && self.plan.tuning.reuse;
        self.reuse.together = together || self.images.len() > 1;
        if matches!(self.stage, Stage::Backfill(_)) && self.link == Link::Up {
            self.offer_hashes(out);
        }
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
            if self.images[image.ix()].blocks.launch_sample(range) {
                self.describe(image, range, out);
            }
        }
        self.reuse.samples(self.now)
    }

    /// Sends or describes the next run that waits; false without one, or without room.
    pub(super) fn send_next(&mut self, out: &mut Vec<SourceEffect>) -> bool {
        let waiting = self.images.iter().map(|image| image.blocks.todo());
        let describes = self.stage == Stage::Copy;
        let step = describes && self.reuse.in_step();
        let next = if step { next_in_step(waiting) } else { next_image(waiting) };
        let Some(ix) = next else { return false };
        let image = ImageIndex(ix as u16);
        let Some(run) = self.images[ix].blocks.next(MAX_RUN_BLOCKS) else { return false };
        let in_place = self.images[ix].blocks.in_place();
        let way = if describes { self.reuse.next_run(run, in_place) } else { NextRun::Send(run) };
        match way {
            NextRun::Describe(range) if self.reuse.has_room() && self.has_frames() => {
                self.images[ix].blocks.launch(range);
                self.describe(image, range, out);
            }
            NextRun::Send(range) if self.has_room() => {
                self.images[ix].blocks.launch(range);
                self.reuse.sent(range.len);
                self.send_run(image, range, false, out);
            }
            _ => return false,
        }
        true
    }

    fn describe(&mut self, image: ImageIndex, range: BlockRange, out: &mut Vec<SourceEffect>) {
        self.reuse.described(self.now, range.len / PIECE_BLOCKS);
        let tag = self.frame(image, range, Kind::Described, 0);
        out.push(SourceEffect::Describe { tag, image, range });
    }

    /// The whole of a described run was found.
    pub(super) fn found(&mut self, flight: InFlight) {
        let pieces = flight.range.len / PIECE_BLOCKS;
        self.reuse.answer(self.now, pieces, flight.range.len, 0);
        self.images[flight.image.ix()].blocks_found += flight.range.len;
    }

    /// The target lacks these pieces of a described run, and has the others; of those that are
    /// `near` it may have most blocks.
    pub(super) fn lack(&mut self, tag: u64, pieces: u16, near: u16, out: &mut Vec<SourceEffect>) {
        let Some(flight) = self.in_flight.get(&tag).copied() else { return };
        if flight.kind != Kind::Described {
            return;
        }
        self.in_flight.remove(&tag);
        // Other stages wait for what is in flight: no more questions.
        let near = if self.stage == Stage::Copy { near } else { 0 };
        let InFlight { image, range, .. } = flight;
        let (mut found, mut lacking) = (0, 0);
        for (part, answer) in parts(range, pieces, near) {
            match answer {
                Answer::Found => {
                    found += part.len;
                    self.images[image.ix()].blocks.arrived(part);
                }
                Answer::Near if self.reuse.basis.tries(part.len / PIECE_BLOCKS) => {
                    let new = self.part_of(flight, part, Kind::DescribedBlocks);
                    out.push(SourceEffect::DescribeBlocks {
                        tag: new,
                        of: tag,
                        image,
                        range: part,
                    });
                }
                Answer::Near | Answer::Lacks => {
                    lacking += part.len;
                    let new = self.part_of(flight, part, Kind::Lacking);
                    self.lacking.push_back((new, tag));
                }
            }
        }
        self.images[image.ix()].blocks_found += found;
        self.delivered(found * BLOCK_SIZE);
        let answered = (found + lacking) / PIECE_BLOCKS;
        self.reuse.answer(self.now, answered, found, lacking / PIECE_BLOCKS);
        self.send_what_lacks(out);
    }

    /// A part of what was in flight goes on under a tag of its own.
    fn part_of(&mut self, flight: InFlight, range: BlockRange, kind: Kind) -> u64 {
        let tag = self.next_tag;
        self.next_tag += 1;
        self.in_flight.insert(tag, InFlight { kind, range, ..flight });
        tag
    }

    /// The target has so many of the described blocks.
    pub(super) fn blocks_found(&mut self, flight: InFlight, found: u64) {
        let InFlight { image, range, .. } = flight;
        let pieces = range.len / PIECE_BLOCKS;
        let kept = if found < range.len { pieces } else { 0 };
        self.reuse.answer(self.now, pieces, found, kept);
        self.reuse.basis.answer(pieces, found);
        self.images[image.ix()].blocks_found += found;
    }

    /// The target lacks these of the described blocks, and has the others in their place.
    pub(super) fn lack_blocks(&mut self, tag: u64, blocks: [u64; 4], out: &mut Vec<SourceEffect>) {
        let Some(flight) = self.in_flight.get(&tag).copied() else { return };
        if flight.kind != Kind::DescribedBlocks {
            return;
        }
        self.in_flight.remove(&tag);
        let mut part = [0; 4];
        let lacks = (0..flight.range.len).filter(|&nth| mask_bit(&blocks, nth));
        lacks.for_each(|nth| set_mask_bit(&mut part, nth));
        let found = flight.range.len - mask_len(&part);
        self.blocks_found(flight, found);
        self.delivered(found * BLOCK_SIZE);
        if mask_len(&part) == 0 {
            self.images[flight.image.ix()].blocks.arrived(flight.range);
            return self.advance(out);
        }
        let waits = InFlight { part: Some(part), ..flight };
        let new = self.part_of(waits, flight.range, Kind::Lacking);
        self.lacking.push_back((new, tag));
        self.send_what_lacks(out);
    }

    /// Goes on after an answer.
    fn send_what_lacks(&mut self, out: &mut Vec<SourceEffect>) {
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
        let flight = *flight;
        let InFlight { image, range, part, .. } = flight;
        self.window.sent(flight.bytes());
        self.reuse.let_go(range.len / PIECE_BLOCKS);
        let state = &mut self.images[image.ix()];
        out.push(match part {
            None => {
                state.count(range);
                SourceEffect::SendKept { tag, of, image, range }
            }
            Some(blocks) => {
                state.count_part(range, &blocks);
                SourceEffect::SendPart { tag, of, image, range, blocks }
            }
        });
        true
    }
}

/// What the target said of a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Answer {
    Found,
    Lacks,
    Near,
}

/// The run cut where pieces meet of which the target said other things.
fn parts(range: BlockRange, lacking: u16, near: u16) -> Vec<(BlockRange, Answer)> {
    let mut parts: Vec<(BlockRange, Answer)> = Vec::new();
    for piece in 0..range.len / PIECE_BLOCKS {
        let answer = match (lacking >> piece & 1, near >> piece & 1) {
            (0, _) => Answer::Found,
            (_, 0) => Answer::Lacks,
            _ => Answer::Near,
        };
        match parts.last_mut() {
            Some((part, same)) if *same == answer => part.len += PIECE_BLOCKS,
            _ => {
                let start = range.start + piece * PIECE_BLOCKS;
                parts.push((BlockRange::new(start, PIECE_BLOCKS), answer));
            }
        }
    }
    parts
}
