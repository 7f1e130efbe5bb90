//! The places where an image's content was found so far. These places probably continue as the
//! image does, so most blocks of a piece that is nowhere as a whole may be there.

use super::index::Spot;
use std::collections::HashMap;

/// Leads of an image at most: images that move together know each of the others.
const MOST: usize = 8;
/// Files whose leads are remembered; when there are more, what is needed is found again.
const MOST_FILES: usize = 1024;

/// A file that has the image's content so many pieces further on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Lead {
    file: u32,
    shift: i64,
}

/// The leads of one image, the best first.
#[derive(Default, Debug)]
struct Continuations(Vec<Lead>);

impl Continuations {
    /// Content of the image's piece `piece` was found there. Each find moves its lead up by one
    /// place, so that what happens to be the same somewhere does not drive the good ones out.
    fn found(&mut self, piece: u64, at: Spot) {
        let lead = Lead { file: at.file, shift: i64::from(at.piece) - piece as i64 };
        match self.0.iter().position(|known| *known == lead) {
            Some(0) => {}
            Some(nth) => self.0.swap(nth, nth - 1),
            None => {
                self.0.truncate(MOST - 1);
                self.0.push(lead);
            }
        }
    }

    /// Where the image's piece `piece` would be.
    fn of(&self, piece: u64) -> impl Iterator<Item = Spot> + '_ {
        self.0.iter().filter_map(move |lead| {
            let there = piece.checked_add_signed(lead.shift)?;
            Some(Spot { file: lead.file, piece: u32::try_from(there).ok()? })
        })
    }
}

/// The leads of all files.
#[derive(Default, Debug)]
pub(super) struct AllContinuations(HashMap<u32, Continuations>);

impl AllContinuations {
    /// The two places hold the same: either leads to the other.
    pub(super) fn alike(&mut self, one: Spot, other: Spot) {
        if one == other {
            return;
        }
        if self.0.len() >= MOST_FILES {
            self.0.clear();
        }
        self.0.entry(one.file).or_default().found(one.piece.into(), other);
        self.0.entry(other.file).or_default().found(other.piece.into(), one);
    }

    /// Places that probably hold something similar, the best first.
    pub(super) fn of(&self, spot: Spot) -> Vec<Spot> {
        let leads = self.0.get(&spot.file);
        leads.map_or(Vec::new(), |leads| leads.of(spot.piece.into()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_leads_stay_and_chance_finds_do_not_drive_them_out() {
        let mut leads = Continuations::default();
        let spot = |file, piece| Spot { file, piece };
        leads.found(10, spot(9, 3));
        leads.found(10, spot(1, 10));
        leads.found(11, spot(1, 11));
        for chance in 0..100 {
            leads.found(50, spot(100 + chance, 0));
        }
        let there: Vec<_> = leads.of(20).collect();
        assert_eq!(there[..2], [spot(1, 20), spot(9, 13)]);
        assert!(there.len() < MOST, "what would lie before a file's beginning is no place");
        assert_eq!(leads.of(5).collect::<Vec<_>>(), [spot(1, 5)]);
    }

    #[test]
    fn what_leads_there_leads_back() {
        let mut all = AllContinuations::default();
        let spot = |file, piece| Spot { file, piece };
        all.alike(spot(1, 10), spot(2, 14));
        all.alike(spot(1, 10), spot(1, 10));
        assert_eq!(all.of(spot(1, 0)), [spot(2, 4)]);
        assert_eq!(all.of(spot(2, 4)), [spot(1, 0)]);
        assert!(all.of(spot(2, 3)).is_empty() && all.of(spot(3, 3)).is_empty());
    }
}
