//! How far fresh blocks lie from what the history has written.

use super::SECTOR;
use super::counts::Counts;
use crate::rng::Rng;

/// Random blocks that are compared with; more would not change the percentile.
const RANDOM: usize = 20_000;

/// Distances in bytes from fresh blocks to the closest block of the history.
#[derive(Clone, PartialEq, Debug)]
pub struct Distances {
    /// Half of the fresh blocks are at most this far.
    pub median: f64,
    /// Nine tenths are.
    pub p90: f64,
    /// All are.
    pub max: f64,
    /// The 90th percentile divided by the size of the disk.
    pub normalised_p90: f64,
    /// The 90th percentile of blocks at random places, for comparison (figure 3 of the paper).
    pub random_p90: f64,
    /// Cumulative shares in percent steps: `cdf[i]` is the distance within which `i + 1` percent lie.
    pub cdf: Vec<f64>,
}

impl Distances {
    /// The mean of several.
    pub(super) fn mean(all: &[&Self]) -> Option<Self> {
        let count = all.len() as f64;
        let mean =
            |value: fn(&Self) -> f64| all.iter().map(|each| value(each)).sum::<f64>() / count;
        let step = |place: usize| all.iter().map(|each| each.cdf[place]).sum::<f64>() / count;
        (!all.is_empty()).then(|| Self {
            median: mean(|each| each.median),
            p90: mean(|each| each.p90),
            max: mean(|each| each.max),
            normalised_p90: mean(|each| each.normalised_p90),
            random_p90: mean(|each| each.random_p90),
            cdf: (0..100).map(step).collect(),
        })
    }
}

/// Distances of what `migration` has and `history` has not; none without fresh blocks or history.
pub(super) fn distances(
    history: &Counts,
    migration: &Counts,
    disk: u64,
    rng: &mut Rng,
) -> Option<Distances> {
    let runs = history.runs();
    if runs.is_empty() {
        return None;
    }
    let mut next = 0;
    let mut found = Vec::new();
    for sector in migration.sectors().filter(|&sector| !history.contains(sector)) {
        while next < runs.len() && runs[next].0 < sector {
            next += 1;
        }
        found.push(distance(&runs, next, sector));
    }
    let count = found.len().min(RANDOM);
    let mut random: Vec<u64> = (0..count)
        .map(|_| {
            let sector = rng.below((disk / SECTOR).max(1));
            let next = runs.partition_point(|run| run.0 <= sector);
            distance(&runs, next, sector)
        })
        .collect();
    if found.is_empty() {
        return None;
    }
    found.sort_unstable();
    random.sort_unstable();
    let bytes = |sorted: &[u64], percent| (percentile(sorted, percent) * SECTOR) as f64;
    let p90 = bytes(&found, 90);
    Some(Distances {
        median: bytes(&found, 50),
        p90,
        max: bytes(&found, 100),
        normalised_p90: p90 / disk as f64,
        random_p90: bytes(&random, 90),
        cdf: (1..=100).map(|percent| bytes(&found, percent)).collect(),
    })
}

/// Sectors from `sector` to the closest run; `next` is the first run that begins behind it.
fn distance(runs: &[(u64, u64)], next: usize, sector: u64) -> u64 {
    let before = next.checked_sub(1).map(|at| (sector + 1).saturating_sub(runs[at].1));
    let after = runs.get(next).map(|run| run.0 - sector);
    before.into_iter().chain(after).min().unwrap_or(0)
}

/// The smallest value that `percent` of the sorted values do not exceed.
fn percentile(sorted: &[u64], percent: usize) -> u64 {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted[rank - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closest_on_either_side() {
        let (mut history, mut migration) = (Counts::default(), Counts::default());
        history.add(10 * 512, 2 * 512);
        history.add(100 * 512, 512);
        for sector in [0, 10, 12, 60, 99, 103] {
            migration.add(sector * 512, 512);
        }
        // Distances 10, 1, 40, 1, 3 in sectors; sector 10 is not fresh.
        let found = distances(&history, &migration, 1 << 20, &mut Rng::new(1)).unwrap();
        assert_eq!((found.median, found.max), (3.0 * 512.0, 40.0 * 512.0));
        assert_eq!(found.cdf[19], 512.0);
        assert_eq!(found.cdf[59], 3.0 * 512.0);
        assert_eq!(found.normalised_p90, 40.0 * 512.0 / f64::from(1 << 20));
        assert!(distances(&Counts::default(), &migration, 1, &mut Rng::new(1)).is_none());
        assert!(distances(&history, &history, 1 << 20, &mut Rng::new(1)).is_none());
    }
}
