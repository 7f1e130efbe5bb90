//! Whether it pays to describe the blocks of a piece that the target lacks.
//!
//! The target names pieces of which it may have most blocks, because their neighbours came from one
//! place. A description of the blocks is 0.8 % of the piece; where it turns out that they are not
//! there, pieces are sent whole for a while.

use dray_wire::frame::PIECE_BLOCKS;

/// Pieces after which it is judged whether blocks are found: 4 MiB.
const JUDGED: u64 = 64;
/// At least one block of so many must be found: four are a sixteenth of a piece's time on the link
/// each, while hashing at both ends and another round trip cost about as much as one on a fast one.
const WORTH: u64 = 4;
/// Pieces that are sent whole before it is tried again: 64 MiB, so that tries which find nothing
/// cost less than a thousandth of the bytes.
const PAUSE: u64 = 1024;

/// What came of describing blocks so far.
#[derive(Debug, Default)]
pub(crate) struct Basis {
    pieces: u64,
    found: u64,
    pause: u64,
}

impl Basis {
    /// Whether the blocks of these pieces shall be described.
    pub(crate) fn tries(&mut self, pieces: u64) -> bool {
        let rests = self.pause > 0;
        self.pause = self.pause.saturating_sub(pieces);
        !rests
    }

    /// The target has answered for blocks of so many pieces, and has found so many blocks.
    pub(crate) fn answer(&mut self, pieces: u64, found: u64) {
        self.pieces += pieces;
        self.found += found;
        if self.pieces >= JUDGED {
            if self.found * WORTH < self.pieces * PIECE_BLOCKS {
                self.pause = PAUSE;
            }
            (self.pieces, self.found) = (0, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_are_not_found_are_not_described_for_a_while() {
        let mut basis = Basis::default();
        for _ in 0..JUDGED {
            assert!(basis.tries(1));
            basis.answer(1, PIECE_BLOCKS / WORTH);
        }
        assert!(basis.tries(1), "a quarter is found");
        for _ in 0..JUDGED / 8 {
            basis.answer(8, 8 * PIECE_BLOCKS / WORTH - 1);
        }
        let rest = (0..).take_while(|_| !basis.tries(2)).count() as u64;
        assert_eq!(rest, PAUSE / 2);
        basis.answer(JUDGED, 0);
        assert!(!basis.tries(1), "and again when that finds nothing");
    }
}
