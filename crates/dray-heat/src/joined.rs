//! [`Joined`]: pieces of an image, joined with their neighbours until an order of them has few
//! enough jumps.
//!
//! A jump is worth its time where it takes blocks to a quite different place in the order. Two
//! neighbours that are joined go to the place of their mean density. What that costs is, for each of
//! the two, its blocks × how far its density is from the mean × how far that moves it in the order
//! (a share of the image): about the accesses that then come on the wrong side of it. The cheapest
//! joins are made, so that the jumps there may be go to where they save most: a hot place in the
//! middle of a cold region stays on its own when neighbours that differ little are long one.

use dray_types::BlockRange;

/// Thresholds of the first and of each next sweep over all pieces; as the densities of the blocks
/// of an image add up to the blocks in a chunk, the last joins everything.
const FIRST: f64 = 1e-9;
const STEP: f64 = 4.0;
const SWEEPS: u32 = 60;
/// How often the gap between a threshold with too many pieces and the next is halved.
const HALVINGS: u32 = 4;

/// Blocks of one density.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Piece {
    pub(crate) range: BlockRange,
    /// That of a smallest chunk of it, on average.
    pub(crate) density: f64,
    /// Whether an access foretells it, or only that anything may be accessed.
    pub(crate) foretold: bool,
    /// Share of the image that is less dense.
    place: f64,
}

/// Densities in ascending order, and for each the share of the image that is less dense.
struct Places {
    densities: Vec<f64>,
    shares: Vec<f64>,
    /// For each value of the leading bits ([`coarse`]), from that of the lowest density on: how many
    /// densities have a lower one.
    below: Vec<u32>,
}

/// The leading bits of a density that is not negative: they order densities as the densities do, 16 to
/// a factor of two.
fn coarse(density: f64) -> usize {
    (density.to_bits() >> 48) as usize
}

impl Places {
    fn new(pieces: &[(f64, BlockRange)]) -> Self {
        let all: u64 = pieces.iter().map(|(_, range)| range.len).sum();
        let mut places: Vec<(f64, f64)> =
            pieces.iter().map(|&(density, range)| (density, range.len as f64)).collect();
        places.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let mut below = 0.0;
        for (_, share) in &mut places {
            let len = *share;
            *share = below / all as f64;
            below += len;
        }
        let (densities, shares): (Vec<f64>, Vec<f64>) = places.into_iter().unzip();
        let below = Self::below(&densities);
        Self { densities, shares, below }
    }

    fn below(densities: &[f64]) -> Vec<u32> {
        let Some((&low, &high)) = densities.first().zip(densities.last()) else {
            return Vec::new();
        };
        let mut below = vec![0; coarse(high) - coarse(low) + 2];
        for &density in densities {
            below[coarse(density) - coarse(low) + 1] += 1;
        }
        for at in 1..below.len() {
            below[at] += below[at - 1];
        }
        below
    }

    fn of(&self, density: f64) -> f64 {
        let last = self.shares.len().saturating_sub(1);
        let Some(from) = self.densities.first().and_then(|&low| {
            let nth = coarse(density).checked_sub(coarse(low))?;
            self.below.get(nth..nth + 2)
        }) else {
            let at = self.densities.partition_point(|&other| other < density);
            return self.shares.get(at.min(last)).copied().unwrap_or(0.0);
        };
        let (from, to) = (from[0] as usize, from[1] as usize);
        let at = from + self.densities[from..to].partition_point(|&other| other < density);
        self.shares[at.min(last)]
    }

    /// Both as one, and what that costs.
    fn join(&self, a: Piece, b: Piece) -> (Piece, f64) {
        let (len, other) = (a.range.len as f64, b.range.len as f64);
        let density = (len * a.density + other * b.density) / (len + other);
        let place = self.of(density);
        let moved = |piece: Piece| (piece.density - density) * (piece.place - place);
        let joined = Piece {
            range: BlockRange::new(a.range.start, a.range.len + b.range.len),
            density,
            foretold: a.foretold || b.foretold,
            place,
        };
        (joined, len * moved(a) + other * moved(b))
    }
}

/// Pieces in address order that cover an image without gaps.
#[derive(Clone)]
struct Row {
    pieces: Vec<Piece>,
    /// What joining each with the one before would cost. It stays known as long as neither of the two is
    /// joined with another, so that a sweep that joins little costs little.
    costs: Vec<f64>,
}

impl Row {
    fn new(pieces: Vec<Piece>, places: &Places) -> Self {
        let pairs = pieces.windows(2).map(|pair| places.join(pair[0], pair[1]).1);
        let costs = std::iter::once(f64::INFINITY).chain(pairs).take(pieces.len()).collect();
        Self { pieces, costs }
    }

    /// Joins neighbours as long as it costs no more than `most`; whether it has joined any.
    fn sweep(&mut self, most: f64, places: &Places) -> bool {
        let Some(first) = self.costs.iter().position(|&cost| cost <= most) else { return false };
        // Those before `len` are swept. Whether the last of them is as it was:
        let (mut len, mut is_whole) = (first, true);
        for at in first..self.pieces.len() {
            let (mut piece, mut cost) = (self.pieces[at], self.costs[at]);
            if !is_whole {
                cost = places.join(self.pieces[len - 1], piece).1;
            }
            is_whole = true;
            while cost <= most {
                len -= 1;
                piece = places.join(self.pieces[len], piece).0;
                let before = len.checked_sub(1).map(|before| self.pieces[before]);
                cost = before.map_or(f64::INFINITY, |before| places.join(before, piece).1);
                is_whole = false;
            }
            (self.pieces[len], self.costs[len]) = (piece, cost);
            len += 1;
        }
        self.pieces.truncate(len);
        self.costs.truncate(len);
        true
    }
}

/// Pieces of an image that are to be joined; see the module.
pub(crate) struct Joined {
    places: Places,
    row: Row,
}

impl Joined {
    /// `pieces` in any order, some without a density; those have that of `nowhere`.
    pub(crate) fn new(pieces: Vec<(Option<f64>, BlockRange)>, nowhere: f64) -> Self {
        let known: Vec<(f64, BlockRange)> =
            pieces.iter().map(|&(density, range)| (density.unwrap_or(nowhere), range)).collect();
        let places = Places::new(&known);
        let piece = |&(density, range): &(Option<f64>, BlockRange)| {
            let (foretold, density) = (density.is_some(), density.unwrap_or(nowhere));
            Piece { range, density, foretold, place: places.of(density) }
        };
        let mut pieces: Vec<Piece> = pieces.iter().map(piece).collect();
        pieces.sort_unstable_by_key(|piece| piece.range.start);
        let row = Row::new(pieces, &places);
        Self { places, row }
    }

    /// The first of ever fewer pieces that `fit`; the last if none do.
    pub(crate) fn first(mut self, fit: impl Fn(&[Piece]) -> bool) -> Vec<Piece> {
        let mut threshold = FIRST;
        if !fit(&self.row.pieces) {
            for _ in 0..SWEEPS {
                let before = self.row.clone();
                if self.row.sweep(threshold, &self.places) && fit(&self.row.pieces) {
                    let finer = self.finer(&before, threshold / STEP, &fit);
                    return finer.unwrap_or(self.row).pieces;
                }
                threshold *= STEP;
            }
        }
        self.row.pieces
    }

    /// What fits at a threshold between one at which it did not, which has left `row`, and the next.
    fn finer(&self, row: &Row, below: f64, fit: &impl Fn(&[Piece]) -> bool) -> Option<Row> {
        let (mut factor, mut best) = (STEP, None);
        let mut at = below;
        for _ in 0..HALVINGS {
            factor = factor.sqrt();
            let mut swept = row.clone();
            swept.sweep(at * factor, &self.places);
            if fit(&swept.pieces) {
                best = Some(swept);
            } else {
                at *= factor;
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces of these lengths and densities, one behind the other.
    fn pieces(all: &[(u64, f64)]) -> Vec<(Option<f64>, BlockRange)> {
        let mut at = 0;
        let piece = |&(len, density): &(u64, f64)| {
            at += len;
            (Some(density), BlockRange::new(at - len, len))
        };
        all.iter().map(piece).collect()
    }

    /// Lengths of what is left when there may be at most so many.
    fn lengths(all: &[(u64, f64)], most: usize) -> Vec<u64> {
        let joined = Joined::new(pieces(all), 0.0);
        let left = joined.first(|pieces| pieces.len() <= most);
        left.iter().map(|piece| piece.range.len).collect()
    }

    #[test]
    fn what_fits_is_left_alone() {
        let all = [(10, 1.0), (10, 1.0), (10, 3.0)];
        assert_eq!(lengths(&all, 3), [10, 10, 10]);
        assert_eq!(lengths(&all, 2), [20, 10], "equal neighbours first");
        assert_eq!(lengths(&all, 1), [30]);
    }

    #[test]
    fn a_hot_place_stays_on_its_own_where_a_larger_chunk_would_hide_it() {
        // Cold regions that differ a little, and one hot chunk in the middle of one of them.
        let cold = (0..40).map(|n| (64, 1.0 + f64::from(n % 5) / 100.0));
        let mut all: Vec<(u64, f64)> = cold.collect();
        all.insert(20, (32, 500.0));
        let left = lengths(&all, 3);
        assert_eq!(left, [20 * 64, 32, 20 * 64]);
    }

    #[test]
    fn the_pieces_that_may_be_are_used() {
        let mut state = 1u64;
        let mut draw = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) % 1000
        };
        let all: Vec<(u64, f64)> = (0..2000).map(|_| (1 + draw(), draw() as f64 + 1.0)).collect();
        for most in [1, 7, 100, 900, 1999] {
            let left = lengths(&all, most);
            assert!(left.len() <= most && left.len() >= most * 2 / 3, "{most}: {}", left.len());
            assert_eq!(left.iter().sum::<u64>(), all.iter().map(|(len, _)| len).sum::<u64>());
        }
    }

    #[test]
    fn what_nothing_foretells_is_told_apart() {
        let all = vec![(None, BlockRange::new(8, 8)), (Some(2.0), BlockRange::new(0, 8))];
        let known = Joined::new(all.clone(), 0.5).first(|pieces| pieces.len() <= 2);
        let told: Vec<_> = known.iter().map(|piece| (piece.foretold, piece.density)).collect();
        assert_eq!(told, [(true, 2.0), (false, 0.5)]);
        let one = Joined::new(all, 0.5).first(|pieces| pieces.len() <= 1);
        assert_eq!((one.len(), one[0].foretold, one[0].density), (1, true, 1.25));
    }
}
