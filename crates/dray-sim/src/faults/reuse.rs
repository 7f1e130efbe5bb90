//! How a run looks in which the target has content already.

use crate::rng::Rng;

/// What a run with reuse looks like.
#[derive(Clone, Debug)]
pub(crate) struct ReuseSetup {
    /// Share of the source's pieces that are at the target somewhere.
    pub(crate) share: f64,
    /// Share of these whose content has changed since it was hashed.
    pub(crate) stale: f64,
    /// A look-up fails.
    pub(crate) fails: f64,
    /// A look-up takes long.
    pub(crate) slow: f64,
    /// The peer of a session knows nothing of it.
    pub(crate) unknown: f64,
    /// Other migrations go to the same target.
    pub(crate) together: bool,
    /// Blocks of what lacks.
    pub(crate) basis: BasisSetup,
    /// A session agrees on questions in Backfill.
    pub(crate) asks: f64,
    /// A look in Backfill hangs.
    pub(crate) hangs: f64,
}

impl ReuseSetup {
    pub(crate) fn draw(rng: &mut Rng) -> Option<Self> {
        rng.chance(0.6).then(|| Self {
            share: rng.pick(&[0.0, 0.3, 0.9, 1.0]),
            stale: rng.pick(&[0.0, 0.1, 0.5]),
            fails: rng.pick(&[0.0, 0.1]),
            slow: rng.pick(&[0.0, 0.2]),
            unknown: rng.pick(&[0.0, 0.0, 0.3]),
            together: rng.chance(0.3),
            basis: BasisSetup {
                known: rng.pick(&[0.0, 0.7, 1.0, 1.0]),
                near: rng.pick(&[0.2, 1.0]),
                other: rng.pick(&[0.0, 0.2, 0.9]),
            },
            asks: rng.pick(&[0.5, 1.0, 1.0]),
            hangs: rng.pick(&[0.0, 0.0, 0.02]),
        })
    }
}

/// How likely bases are in a run, and how good.
#[derive(Clone, Debug)]
pub(crate) struct BasisSetup {
    /// A session agrees on it.
    pub(crate) known: f64,
    /// A piece that lacks is said to have one.
    pub(crate) near: f64,
    /// A block of it is another one.
    pub(crate) other: f64,
}
