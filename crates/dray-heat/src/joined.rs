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

/// Densities in ascending order, each with the share of the image that is less dense.
struct Places(Vec<(f64, f64)>);

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
        Self(places)
    }

    fn of(&self, density: f64) -> f64 {
        let at = self.0.partition_point(|&(other, _)| other < density);
        self.0.get(at).or(self.0.last()).map_or(0.0, |&(_, share)| share)
    }
}

/// A piece among others, and what joining it with the one before would cost, once that is known. It
/// stays known as long as neither of the two is joined with another, so that a sweep that joins
/// little costs little.
#[derive(Clone, Copy)]
struct Swept {
    piece: Piece,
    cost: Option<f64>,
}

/// Pieces in address order that cover an image without gaps.
pub(crate) struct Joined {
    places: Places,
    pieces: Vec<Swept>,
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
        let pieces = pieces.into_iter().map(|piece| Swept { piece, cost: None }).collect();
        Self { places, pieces }
    }

    /// Both as one, and what that costs.
    fn join(&self, a: Piece, b: Piece) -> (Piece, f64) {
        let (len, other) = (a.range.len as f64, b.range.len as f64);
        let density = (len * a.density + other * b.density) / (len + other);
        let place = self.places.of(density);
        let moved = |piece: Piece| (piece.density - density) * (piece.place - place);
        let joined = Piece {
            range: BlockRange::new(a.range.start, a.range.len + b.range.len),
            density,
            foretold: a.foretold || b.foretold,
            place,
        };
        (joined, len * moved(a) + other * moved(b))
    }

    /// Joins neighbours as long as it costs no more than `most`.
    fn swept(&self, most: f64) -> Vec<Swept> {
        let mut swept: Vec<Swept> = Vec::with_capacity(self.pieces.len());
        // Whether the last of `swept` is a piece as it was.
        let mut is_whole = true;
        for &Swept { mut piece, cost } in &self.pieces {
            let mut cost = cost.filter(|_| is_whole);
            is_whole = true;
            while let Some(before) = swept.last() {
                if cost.is_some_and(|cost| cost > most) {
                    break;
                }
                let (joined, costs) = self.join(before.piece, piece);
                if costs > most {
                    cost = Some(costs);
                    break;
                }
                swept.pop();
                (piece, cost, is_whole) = (joined, None, false);
            }
            swept.push(Swept { piece, cost });
        }
        swept
    }

    /// The first of what `order` makes of ever fewer pieces that `fits`; the last if none does.
    pub(crate) fn first<T>(
        mut self,
        order: impl Fn(&[Piece]) -> T,
        fits: impl Fn(&T) -> bool,
    ) -> T {
        let mut made = order(&bare(&self.pieces));
        let mut threshold = FIRST;
        for _ in 0..SWEEPS {
            if fits(&made) {
                break;
            }
            let swept = self.swept(threshold);
            made = order(&bare(&swept));
            if fits(&made) {
                return self.finer(threshold / STEP, &order, &fits).unwrap_or(made);
            }
            self.pieces = swept;
            threshold *= STEP;
        }
        made
    }

    /// What fits at a threshold between one at which it did not and the next.
    fn finer<T>(
        &self,
        below: f64,
        order: &impl Fn(&[Piece]) -> T,
        fits: &impl Fn(&T) -> bool,
    ) -> Option<T> {
        let (mut factor, mut best) = (STEP, None);
        let mut at = below;
        for _ in 0..HALVINGS {
            factor = factor.sqrt();
            let made = order(&bare(&self.swept(at * factor)));
            if fits(&made) {
                best = Some(made);
            } else {
                at *= factor;
            }
        }
        best
    }
}

fn bare(swept: &[Swept]) -> Vec<Piece> {
    swept.iter().map(|swept| swept.piece).collect()
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
        let lengths = |pieces: &[Piece]| pieces.iter().map(|piece| piece.range.len).collect();
        joined.first(lengths, |lengths: &Vec<u64>| lengths.len() <= most)
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
        let both = |pieces: &[Piece]| pieces.to_vec();
        let known = Joined::new(all.clone(), 0.5).first(both, |pieces| pieces.len() <= 2);
        let told: Vec<_> = known.iter().map(|piece| (piece.foretold, piece.density)).collect();
        assert_eq!(told, [(true, 2.0), (false, 0.5)]);
        let one = Joined::new(all, 0.5).first(both, |pieces| pieces.len() <= 1);
        assert_eq!((one.len(), one[0].foretold, one[0].density), (1, true, 1.25));
    }
}
