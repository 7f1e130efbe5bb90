//! Many replays in one table: what an order saves, and what the choice of the chunk size is worth.

use super::settings::PAPER_DELAY;
use super::{Chunks, Order, Outcome, ReplayError, Settings, replay};
use dray_engine::window::{BACKFILL_WINDOW, COPY_WINDOW};
use dray_engine::{MILLISECOND, SECOND};
use dray_trace::{Record, Rng};
use dray_types::Strategy;

/// Chunk sizes of the paper's table 4: 512 KiB to 1 GiB, each twice the one before.
pub const CHUNK_SIZES: std::ops::RangeInclusive<u32> = 19..=30;
/// How much longer than (disk + memory) ÷ bandwidth a migration is taken to last: room for blocks
/// sent again and for jumps.
const SLACK: f64 = 1.25;
/// Of a trace, the share that a migration may last when the bandwidth is not given.
const SHARE: f64 = 0.5;

/// One-way delays of a link that nobody has given one, in nanoseconds: the paper's, and less for
/// traces so short that the engine's windows would let no migration end in them.
const DELAYS: [u64; 4] = [PAPER_DELAY, 10 * MILLISECOND, MILLISECOND, 0];

/// How fast the link is and when the migrations begin.
#[derive(Clone, PartialEq, Debug)]
pub struct Starts {
    /// Bytes a second.
    pub bandwidth: u64,
    /// Nanoseconds of the trace.
    pub at: Vec<u64>,
}

impl Starts {
    /// `count` random starts in what a migration of `bytes` leaves of a trace of `duration`
    /// nanoseconds. Without a `bandwidth` it is such that a migration lasts half of the trace, or as
    /// long as the engine's windows make it last over a link of this `delay`. None when a migration
    /// lasts longer than the trace.
    pub fn choose(
        duration: u64,
        bytes: u64,
        bandwidth: Option<u64>,
        delay: u64,
        count: u32,
        seed: u64,
    ) -> Option<Self> {
        let most = windows(delay);
        let seconds = (duration as f64 / SECOND as f64).max(1e-3);
        let slack = bytes as f64 * SLACK;
        let wanted = (slack / (seconds * SHARE)).ceil().min(most);
        let bandwidth = bandwidth.unwrap_or(wanted as u64).max(1);
        let left = seconds - slack / (bandwidth as f64).min(most);
        if left < 0.0 {
            return None;
        }
        let mut rng = Rng::new(seed);
        let mut at: Vec<u64> =
            (0..count).map(|_| (rng.unit() * left * SECOND as f64) as u64).collect();
        at.sort_unstable();
        Some(Self { bandwidth, at })
    }

    /// [`Self::choose`] over the longest of the delays 50, 10, 1 and 0 ms with which a migration ends
    /// before the trace; that delay in nanoseconds, and the starts.
    pub fn choose_delay(
        duration: u64,
        bytes: u64,
        bandwidth: Option<u64>,
        count: u32,
        seed: u64,
    ) -> Option<(u64, Self)> {
        DELAYS.into_iter().find_map(|delay| {
            let starts = Self::choose(duration, bytes, bandwidth, delay, count, seed)?;
            Some((delay, starts))
        })
    }

    /// `count` random starts between two times in nanoseconds.
    pub fn between(from: u64, to: u64, bandwidth: u64, count: u32, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut at: Vec<u64> = (0..count).map(|_| rng.between(from, to.max(from))).collect();
        at.sort_unstable();
        Self { bandwidth, at }
    }
}

/// Bytes a second that the engine's windows let through over a link of this delay, before and after
/// the handover: the smaller window in a round trip.
pub fn windows(delay: u64) -> f64 {
    let window = COPY_WINDOW.max.min(BACKFILL_WINDOW.max) as f64;
    if delay == 0 { f64::INFINITY } else { window * SECOND as f64 / (2 * delay) as f64 }
}

/// Replays the same migration from several starts.
pub fn runs<I, E>(
    settings: &Settings,
    starts: &Starts,
    open: &impl Fn() -> Result<I, E>,
) -> Result<Vec<Outcome>, ReplayError<E>>
where
    I: Iterator<Item = Result<Record, E>>,
{
    let one = |&start: &u64| {
        let records = open().map_err(ReplayError::Trace)?;
        let settings = Settings { start, bandwidth: starts.bandwidth, ..settings.clone() };
        replay(&settings, records)
    };
    starts.at.iter().map(one).collect()
}

/// Means over several starts.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Mean {
    /// Replays.
    pub runs: u64,
    /// Replays that did not come to their end; they count in the other means as far as they came.
    pub failed: u64,
    /// Bytes of blocks sent again.
    pub extra_bytes: f64,
    /// Bytes of blocks missing at the handover.
    pub missing_bytes: f64,
    /// Degraded reads.
    pub remote_reads: f64,
    /// Bytes they waited for.
    pub remote_bytes: f64,
    /// Mean wait of a degraded read in nanoseconds.
    pub wait: f64,
    /// Runs that were charged for a jump.
    pub jumps: f64,
    /// Writes that were throttled.
    pub throttled: f64,
    /// Nanoseconds until everything was at the target.
    pub total: f64,
    /// Nanoseconds in which the guest was stopped.
    pub downtime: f64,
    /// Bytes on the wire.
    pub wire_bytes: f64,
}

impl Mean {
    /// Of these outcomes.
    pub fn of(outcomes: &[Outcome]) -> Self {
        let count = outcomes.len().max(1) as f64;
        let mean = |value: fn(&Outcome) -> f64| outcomes.iter().map(value).sum::<f64>() / count;
        let reads: u64 = outcomes.iter().map(|outcome| outcome.reads.count).sum();
        let waits: u64 = outcomes.iter().map(|outcome| outcome.reads.total).sum();
        Self {
            runs: outcomes.len() as u64,
            failed: outcomes.iter().filter(|outcome| outcome.failed.is_some()).count() as u64,
            extra_bytes: mean(|outcome| outcome.extra_bytes as f64),
            missing_bytes: mean(|outcome| outcome.missing_bytes as f64),
            remote_reads: mean(|outcome| outcome.reads.count as f64),
            remote_bytes: mean(|outcome| outcome.reads.bytes as f64),
            wait: waits as f64 / reads.max(1) as f64,
            jumps: mean(|outcome| outcome.seeks as f64),
            throttled: mean(|outcome| outcome.throttled as f64),
            total: mean(|outcome| outcome.total as f64),
            downtime: mean(|outcome| outcome.downtime as f64),
            wire_bytes: mean(|outcome| outcome.wire_bytes() as f64),
        }
    }
}

/// By how much `aware` is less than `sequential`, in percent; negative for a loss. None when there
/// was nothing to save and nothing was added.
pub fn reduction(sequential: f64, aware: f64) -> Option<f64> {
    if sequential > 0.0 {
        Some((sequential - aware) / sequential * 100.0)
    } else {
        (aware > 0.0).then_some(f64::NEG_INFINITY)
    }
}

/// One strategy over one link: address order and another one.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Cell {
    /// The strategy.
    pub strategy: Strategy,
    /// By address.
    pub sequential: Mean,
    /// In the other order.
    pub aware: Mean,
}

/// Address order and `settings.order` for one strategy, from the same starts.
pub fn compare<I, E>(
    settings: &Settings,
    starts: &Starts,
    open: &impl Fn() -> Result<I, E>,
) -> Result<Cell, ReplayError<E>>
where
    I: Iterator<Item = Result<Record, E>>,
{
    let mean = |order| {
        let settings = Settings { order, ..settings.clone() };
        runs(&settings, starts, open).map(|outcomes| Mean::of(&outcomes))
    };
    let (sequential, aware) = (mean(Order::Sequential)?, mean(settings.order)?);
    Ok(Cell { strategy: settings.strategy, sequential, aware })
}

/// What one chunk size saves of the extra traffic.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Gain {
    /// Bytes; none for the size that the heat selects by itself.
    pub size: Option<u64>,
    /// Percent of the sequential order's extra traffic; none when that has none.
    pub percent: Option<f64>,
}

/// The paper's table 4 for one load: the gain of the size that `settings.order` selects, and of
/// every fixed one.
pub fn chunk_gains<I, E>(
    settings: &Settings,
    starts: &Starts,
    open: &impl Fn() -> Result<I, E>,
) -> Result<(Gain, Vec<Gain>), ReplayError<E>>
where
    I: Iterator<Item = Result<Record, E>>,
{
    let extra = |order, chunks| -> Result<f64, ReplayError<E>> {
        let settings = Settings { order, chunks, ..settings.clone() };
        runs(&settings, starts, open).map(|outcomes| Mean::of(&outcomes).extra_bytes)
    };
    let sequential = extra(Order::Sequential, Chunks::Selected)?;
    let gain = |size: Option<u64>| {
        let chunks = size.map_or(Chunks::Selected, Chunks::Fixed);
        let percent = reduction(sequential, extra(settings.order, chunks)?);
        Ok(Gain { size, percent })
    };
    let selected = gain(None)?;
    let fixed = CHUNK_SIZES.map(|power| gain(Some(1 << power))).collect::<Result<_, _>>()?;
    Ok((selected, fixed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_leave_room_for_the_migration() {
        let hour = 3600 * SECOND;
        let starts = Starts::choose(hour, 32 << 30, None, 0, 10, 1).unwrap();
        let lasts = (32u64 << 30) as f64 * SLACK / starts.bandwidth as f64;
        assert!((lasts - 1800.0).abs() < 1.0);
        assert!(starts.at.len() == 10 && starts.at.iter().all(|&at| at <= hour / 2 + SECOND));
        assert!(starts.at.iter().any(|&at| at > hour / 4), "{starts:?}");
        assert_eq!(starts, Starts::choose(hour, 32 << 30, None, 0, 10, 1).unwrap());
        assert_ne!(starts.at, Starts::choose(hour, 32 << 30, None, 0, 10, 2).unwrap().at);
        assert!(Starts::choose(hour, 32 << 30, Some(1 << 20), 0, 10, 1).is_none());
        // 16 MiB in 100 ms carry 160 MiB a second, however fast the link is.
        let minute = 60 * SECOND;
        assert!(Starts::choose(minute, 32 << 30, Some(1 << 40), 50_000_000, 10, 1).is_none());
        let slow = Starts::choose(minute, 6 << 30, None, 50_000_000, 10, 1).unwrap();
        assert_eq!(slow.bandwidth, 160 << 20);
    }

    /// Whatever the trace and the disk, there are starts when neither link nor delay is given, and the
    /// delay is the paper's where that will do.
    #[test]
    fn a_delay_that_is_not_given_lets_the_migration_end() {
        let chosen = |seconds, gib: u64, bandwidth| {
            Starts::choose_delay(seconds * SECOND, gib << 30, bandwidth, 3, 1)
        };
        let delay = |seconds, gib| chosen(seconds, gib, None).unwrap().0;
        assert_eq!(
            [3600, 85, 60, 5].map(|seconds| delay(seconds, 15)),
            [PAPER_DELAY, 10 * MILLISECOND, 10 * MILLISECOND, MILLISECOND]
        );
        assert_eq!((delay(1, 500), delay(0, 500)), (0, 0));
        let given = Starts::choose(3600 * SECOND, 15 << 30, None, PAPER_DELAY, 3, 1);
        assert_eq!(chosen(3600, 15, None).map(|(_, starts)| starts), given);
        assert_eq!(chosen(85, 15, Some(500_000_000)).unwrap().0, 10 * MILLISECOND);
        assert_eq!(chosen(85, 15, Some(50_000_000)), None, "no delay makes a slow link faster");
    }

    #[test]
    fn reductions() {
        assert_eq!(reduction(100.0, 25.0), Some(75.0));
        assert_eq!(reduction(100.0, 102.0), Some(-2.0));
        assert_eq!(reduction(0.0, 0.0), None);
        assert_eq!(reduction(0.0, 5.0), Some(f64::NEG_INFINITY));
    }
}
