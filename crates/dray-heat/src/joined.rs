//! [`Joined`]: pieces of an image, joined with their neighbours until an order of them has few
//! enough jumps.
//!
//! A jump is worth its time where it takes blocks to a quite different place in the order. Two
//! neighbours that are joined go to the place of their mean density. What that costs is, for each of
//! the two, its blocks × how far its density is from the mean × how far that moves it in the order
//! (a share of the image): about the accesses that then come on the wrong side of it. The cheapest
//! joins are made, so that the jumps there may be go to where they save most: a hot place in the
//! middle of a cold region stays on its own when neighbours that differ little are long one.
//!
//! What a jump takes, all accesses that are still to come wait for, so a join that costs less than that
//! is made however many jumps there may be.

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

/// For every density, the share of the image that is less dense.
///
/// Densities are counted in classes of which 64 make a factor of two, and the blocks of a class are
/// taken to be spread evenly over it, so that a place is found without a search.
struct Places {
    /// The class of the lowest density.
    lowest: usize,
    /// Shares below each class from the lowest on, and below all that follow the last.
    below: Vec<f64>,
}

/// Bits of a density that tell where in its class it is.
const WITHIN: u32 = 46;

/// Classes order densities that are not negative as the densities do.
fn class(density: f64) -> usize {
    (density.to_bits() >> WITHIN) as usize
}

impl Places {
    fn new(pieces: &[(Option<f64>, BlockRange)], nowhere: f64) -> Self {
        let known = || pieces.iter().map(|&(density, range)| (density.unwrap_or(nowhere), range));
        let classes = || known().map(|(density, _)| class(density));
        let lowest = classes().min().unwrap_or(0);
        let all: u64 = known().map(|(_, range)| range.len).sum();
        let mut below = vec![0.0; classes().max().unwrap_or(0) - lowest + 2];
        for (density, range) in known() {
            below[class(density) - lowest + 1] += range.len as f64 / all as f64;
        }
        for at in 1..below.len() {
            below[at] += below[at - 1];
        }
        Self { lowest, below }
    }

    fn of(&self, density: f64) -> f64 {
        let Some(nth) = class(density).checked_sub(self.lowest) else { return 0.0 };
        let Some(&[from, to]) = self.below.get(nth..nth + 2) else { return 1.0 };
        let within = density.to_bits() % (1 << WITHIN);
        from + (to - from) * (within as f64 / (1u64 << WITHIN) as f64)
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

    /// What joining a piece with the one before, if there is one, costs.
    fn cost(&self, before: Option<&Piece>, piece: Piece) -> f64 {
        before.map_or(f64::INFINITY, |&before| self.join(before, piece).1)
    }
}

/// Pieces in address order that cover an image without gaps.
#[derive(Default)]
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

    /// The least that joining two of them costs.
    fn cheapest(&self) -> f64 {
        self.costs.iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// Makes `swept` of these, neighbours joined as long as that costs no more than `most`.
    fn sweep(&self, most: f64, places: &Places, swept: &mut Self) {
        swept.pieces.clear();
        swept.costs.clear();
        let mut at = 0;
        while let Some(next) = self.costs[at..].iter().position(|&cost| cost <= most) {
            swept.pieces.extend_from_slice(&self.pieces[at..at + next]);
            swept.costs.extend_from_slice(&self.costs[at..at + next]);
            at = self.sweep_from(at + next, most, places, swept);
        }
        swept.pieces.extend_from_slice(&self.pieces[at..]);
        swept.costs.extend_from_slice(&self.costs[at..]);
    }

    /// Joins the piece `at` with what is swept, and those that follow until one stays as it is; the place
    /// behind that.
    fn sweep_from(&self, at: usize, most: f64, places: &Places, swept: &mut Self) -> usize {
        let Self { pieces, costs } = swept;
        let mut cost = self.costs[at];
        for (nth, &next) in self.pieces.iter().enumerate().skip(at) {
            let mut piece = next;
            if nth > at {
                cost = places.cost(pieces.last(), piece);
            }
            let stays = cost > most;
            while cost <= most
                && let Some(before) = pieces.pop()
            {
                costs.pop();
                piece = places.join(before, piece).0;
                cost = places.cost(pieces.last(), piece);
            }
            pieces.push(piece);
            costs.push(cost);
            if stays {
                return nth + 1;
            }
        }
        self.pieces.len()
    }
}

/// Pieces of an image that are to be joined; see the module.
pub(crate) struct Joined {
    places: Places,
    row: Row,
}

impl Joined {
    /// `pieces` in address order, some without a density; those have that of `nowhere`.
    pub(crate) fn new(pieces: Vec<(Option<f64>, BlockRange)>, nowhere: f64) -> Self {
        let places = Places::new(&pieces, nowhere);
        let piece = |(density, range): (Option<f64>, BlockRange)| {
            let (foretold, density) = (density.is_some(), density.unwrap_or(nowhere));
            Piece { range, density, foretold, place: places.of(density) }
        };
        let row = Row::new(pieces.into_iter().map(piece).collect(), &places);
        Self { places, row }
    }

    /// Joins neighbours that are not worth a jump, those whose join costs no more than `worth`, and goes
    /// on until the pieces `fit`; all there are if none do.
    pub(crate) fn first(self, worth: f64, fit: impl Fn(&[Piece]) -> bool) -> Vec<Piece> {
        let Self { places, mut row } = self;
        let (mut threshold, mut swept) = (FIRST, Row::default());
        // The cheapest first here too: piece by piece, each at little cost, a cold region would take
        // in a hot one beside it.
        while threshold < worth * STEP {
            let most = threshold.min(worth);
            if row.cheapest() <= most {
                row.sweep(most, &places, &mut swept);
                std::mem::swap(&mut row, &mut swept);
            }
            threshold *= STEP;
        }
        if fit(&row.pieces) {
            return row.pieces;
        }
        for _ in 0..SWEEPS {
            if row.cheapest() <= threshold {
                row.sweep(threshold, &places, &mut swept);
                if fit(&swept.pieces) {
                    return finer(&row, swept, &places, threshold / STEP, &fit).pieces;
                }
                std::mem::swap(&mut row, &mut swept);
            }
            threshold *= STEP;
        }
        row.pieces
    }
}

/// What fits at the lowest threshold between `below`, at which it did not, which has left `row`, and the
/// next, of which `swept` came.
fn finer(
    row: &Row,
    swept: Row,
    places: &Places,
    below: f64,
    fit: &impl Fn(&[Piece]) -> bool,
) -> Row {
    let (mut factor, mut at) = (STEP, below);
    let (mut best, mut spare) = (swept, Row::default());
    for _ in 0..HALVINGS {
        factor = factor.sqrt();
        row.sweep(at * factor, places, &mut spare);
        if fit(&spare.pieces) {
            std::mem::swap(&mut best, &mut spare);
        } else {
            at *= factor;
        }
    }
    best
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
        let left = joined.first(0.0, |pieces| pieces.len() <= most);
        left.iter().map(|piece| piece.range.len).collect()
    }

    #[test]
    fn what_fits_is_left_alone() {
        let all = [(10, 1.0), (10, 1.1), (10, 3.0)];
        assert_eq!(lengths(&all, 3), [10, 10, 10]);
        assert_eq!(lengths(&all, 2), [20, 10], "neighbours that differ least first");
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
    fn a_cold_region_does_not_take_a_hot_one_in_piece_by_piece() {
        let hot = std::iter::repeat_n((32, 8.0), 32);
        let all: Vec<_> = [(6144, 1.0)].into_iter().chain(hot).collect();
        let each = Joined::new(pieces(&all), 0.0);
        let piece = each.places.cost(Some(&each.row.pieces[0]), each.row.pieces[1]);
        let left = each.first(piece * 2.0, |_| true);
        let lengths: Vec<_> = left.iter().map(|piece| piece.range.len).collect();
        assert_eq!(lengths, [6144, 1024]);
    }

    #[test]
    fn neighbours_that_are_not_worth_a_jump_are_joined_though_all_fit() {
        let pieces = pieces(&[(100, 1.0), (100, 1.1), (100, 9.0)]);
        let lengths = |worth: f64| {
            let left = Joined::new(pieces.clone(), 0.0).first(worth, |_| true);
            left.iter().map(|piece| piece.range.len).collect::<Vec<_>>()
        };
        assert_eq!(lengths(0.0), [100, 100, 100]);
        // 100 blocks, each 0.05 from the mean, some sixth of the image from their place; and the others.
        assert_eq!(lengths(5.0), [200, 100]);
        assert_eq!(lengths(1e4), [300]);
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
        let all = vec![(Some(2.0), BlockRange::new(0, 8)), (None, BlockRange::new(8, 8))];
        let known = Joined::new(all.clone(), 0.5).first(0.0, |pieces| pieces.len() <= 2);
        let told: Vec<_> = known.iter().map(|piece| (piece.foretold, piece.density)).collect();
        assert_eq!(told, [(true, 2.0), (false, 0.5)]);
        let one = Joined::new(all, 0.5).first(0.0, |pieces| pieces.len() <= 1);
        assert_eq!((one.len(), one[0].foretold, one[0].density), (1, true, 1.25));
    }
}
