//! `--max-added-latency`: the migration slows down before the guest does (I6).
//!
//! What is measured is how long a guest's writes, zeroes and discards take from the disk's gate to
//! the end of the change in the image: what a busy disk, and the reads of the copy, add. What the
//! operator asked for (`--throttle`) and what happens on the way to the agent is not in it, nor are
//! reads and flushes. What is compared is the ninetieth percentile of half a second with that of the
//! time in which the guest was observed before the copy; what was usual is kept over a restart of
//! the agent. Of a guest that wrote too little in half a second nothing is concluded until it wrote
//! enough, or for five seconds: a guest may write little because its writes have become slow.

use super::SourceLoop;
use dray_engine::Time;
use dray_engine::pace::{Pace, Sample};
use dray_image::{Disk, Latencies};
use dray_types::BitRate;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a guest is observed before the copy, to know what is usual.
pub const OBSERVE: Duration = Duration::from_secs(2);
/// Pause between two measurements.
const EVERY: Duration = Duration::from_millis(500);
/// The percentile that is compared.
const SHARE: f64 = 0.9;
/// Fewer changes say nothing of a percentile.
const ENOUGH: u64 = 10;
/// After this long, fewer changes than [`ENOUGH`] must do.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is known of the guest's latency; measuring ends when this is dropped.
pub struct Pacing {
    pace: Pace,
    disks: Vec<Arc<Disk>>,
    last: Latencies,
    /// Before the copy, in nanoseconds; none until it begins.
    baseline: Option<u64>,
    at: Instant,
    /// Bytes that had been moved by then.
    moved: u64,
}

impl Pacing {
    /// Measures from now on; `goal` is what may be added.
    pub fn new(goal: Duration, disks: impl Iterator<Item = Arc<Disk>>) -> Self {
        let disks: Vec<_> = disks.collect();
        disks.iter().for_each(|disk| disk.measure_writes(true));
        let goal = u64::try_from(goal.as_nanos()).unwrap_or(u64::MAX);
        let (pace, last) = (Pace::new(goal), total(&disks));
        Self { pace, disks, last, baseline: None, at: Instant::now(), moved: 0 }
    }

    /// The copy begins, after `moved` bytes of earlier tries: what was measured until now is what is
    /// usual, unless that is `known` already. Answers with it. Nothing is usual when the guest wrote
    /// too little; then all of its latency counts as added.
    pub fn begin(&mut self, known: Option<u64>, moved: u64) -> u64 {
        let now = total(&self.disks);
        let measured = || percentile(&now.since(&self.last), ENOUGH).unwrap_or(0);
        let baseline = known.unwrap_or_else(measured);
        *self = Self {
            pace: self.pace.clone(),
            disks: std::mem::take(&mut self.disks),
            last: now,
            baseline: Some(baseline),
            at: Instant::now(),
            moved,
        };
        baseline
    }

    /// Measures if it is time to; the limit that holds from now on, in bytes a second, and the
    /// inner none for none.
    fn observe(&mut self, now: Time, moved: u64) -> Option<Option<u64>> {
        let baseline = self.baseline?;
        let passed = self.at.elapsed();
        if passed < EVERY {
            return None;
        }
        let times = total(&self.disks);
        let since = times.since(&self.last);
        let enough = if passed < PATIENCE { ENOUGH } else { 1 };
        let latency = match percentile(&since, enough) {
            None if passed < PATIENCE => return None,
            latency => latency.unwrap_or(baseline),
        };
        let rate = (moved.saturating_sub(self.moved) as f64 / passed.as_secs_f64()) as u64;
        (self.at, self.last, self.moved) = (Instant::now(), times, moved);
        Some(self.pace.observe(now, Sample { latency, baseline, rate }))
    }
}

impl Drop for Pacing {
    fn drop(&mut self) {
        self.disks.iter().for_each(|disk| disk.measure_writes(false));
    }
}

fn total(disks: &[Arc<Disk>]) -> Latencies {
    disks.iter().fold(Latencies::default(), |sum, disk| sum.plus(&disk.write_latencies()))
}

fn percentile(times: &Latencies, enough: u64) -> Option<u64> {
    let time = times.percentile(SHARE).filter(|_| times.count() >= enough)?;
    Some(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

impl SourceLoop {
    /// Measures the guest from now on, if there is a goal.
    pub(super) fn measure_if_wanted(&mut self) {
        let goal = self.slot.intent().options.and_then(|o| o.tuning.max_added_latency_ms);
        self.pacing = None;
        let disks = self.images.disks().map(|(_, disk)| disk);
        self.pacing = goal.map(|ms| Pacing::new(Duration::from_secs_f64(ms / 1e3), disks));
    }

    /// The copy begins; what is usual for the guest outlives this process.
    pub(super) fn begin_pacing(&mut self) {
        if self.pacing.is_none() {
            self.measure_if_wanted();
        }
        if let Some(pacing) = &mut self.pacing {
            let moved = self.slot.stats.totals().wire_bytes();
            self.report.usual_latency(|known| pacing.begin(known, moved));
        }
    }

    /// Takes a measurement now and then, while the guest runs here.
    pub(super) fn keep_latency(&mut self) {
        let Some(pacing) = &mut self.pacing else { return };
        let copies = self.engine.as_ref().is_some_and(|engine| engine.owns() && !engine.is_over());
        let asked = self.slot.board.read().progress.bandwidth;
        if !copies {
            if self.engine.is_some() {
                self.pacing = None;
                self.slot.pacer.set_limit(asked);
            }
            return;
        }
        let moved = self.slot.stats.totals().wire_bytes();
        let Some(limit) = pacing.observe(self.clock.now(), moved) else { return };
        let rate = |limit: BitRate| limit.bytes_per_second;
        let least = [limit, asked.map(rate)].into_iter().flatten().min();
        let limit = least.map(|bytes_per_second| BitRate { bytes_per_second });
        self.slot.pacer.set_limit(limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_engine::MILLISECOND;
    use dray_image::{FileImage, FileOptions, Image, layers};

    /// A disk whose writes take as long as they are told to is what a guest feels: the migration
    /// slows down, and goes on at full speed when the cause is gone.
    #[test]
    fn a_slow_disk_slows_the_migration() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let options = FileOptions { write: true, ..Default::default() };
        let file = FileImage::open(&path, options).unwrap();
        let delay = layers::Delay::new().with(layers::Op::Write, Duration::from_millis(5));
        let quick = Disk::new(Arc::new(FileImage::open(&path, options).unwrap()));
        let slow = Disk::new(Arc::new(layers::Layered::new(Arc::new(file), delay)));
        let disks = [Arc::clone(&quick), Arc::clone(&slow)].into_iter();
        let mut pacing = Pacing::new(Duration::from_millis(1), disks);
        let write = |disk: &Disk| {
            (0..2 * ENOUGH).for_each(|n| disk.write_at(&[1; 512], n * 512, false).unwrap());
        };
        write(&quick);
        pacing.begin(None, 0);
        assert!(pacing.baseline.unwrap() < MILLISECOND, "{:?}", pacing.baseline);
        let mut later = |disk: &Disk, seconds: u64, moved| {
            write(disk);
            pacing.at = Instant::now() - EVERY;
            pacing.observe(Time(seconds * 1000 * MILLISECOND), moved).unwrap()
        };
        assert_eq!(later(&quick, 1, 50 << 20), None);
        let limit = later(&slow, 2, 100 << 20).unwrap();
        assert!(limit < 100 << 20, "{limit}");
        let less = later(&slow, 3, 130 << 20).unwrap();
        assert!(less < limit, "{less} {limit}");
        assert!(later(&quick, 4, 150 << 20).unwrap() > less);
        drop(pacing);
        write(&slow);
        assert_eq!(slow.write_latencies().count(), 4 * ENOUGH, "nobody measures any more");
    }

    fn writes(disk: &Disk, count: u64) {
        (0..count).for_each(|n| disk.write_at(&[1; 512], n * 512, false).unwrap());
    }

    fn slow_disk(dir: &std::path::Path) -> Arc<Disk> {
        let path = dir.join("a");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let file = FileImage::open(&path, FileOptions { write: true, ..Default::default() });
        let delay = layers::Delay::new().with(layers::Op::Write, Duration::from_millis(5));
        Disk::new(Arc::new(layers::Layered::new(Arc::new(file.unwrap()), delay)))
    }

    /// A guest whose writes take so long that there are few of them is not one that is well.
    #[test]
    fn a_guest_that_hardly_writes_any_more_is_not_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let disk = slow_disk(dir.path());
        let mut pacing = Pacing::new(Duration::from_millis(1), [Arc::clone(&disk)].into_iter());
        assert_eq!(pacing.begin(Some(0), 0), 0);
        let mut later = |passed: Duration, moved| {
            pacing.at = Instant::now() - passed;
            pacing.observe(Time(passed.as_nanos() as u64), moved)
        };
        writes(&disk, ENOUGH / 2);
        assert_eq!(later(EVERY, 50 << 20), None, "too little to tell");
        writes(&disk, ENOUGH / 2);
        let limit = later(EVERY * 2, 100 << 20).unwrap().unwrap();
        writes(&disk, 1);
        assert_eq!(later(EVERY * 4, 150 << 20), None);
        assert!(later(PATIENCE, 150 << 20).unwrap().unwrap() < limit);
    }

    /// A restarted agent has not seen the guest without the copy, and earlier tries are no rate.
    #[test]
    fn what_is_usual_and_what_was_moved_is_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let disk = slow_disk(dir.path());
        let mut pacing = Pacing::new(Duration::from_millis(1), [Arc::clone(&disk)].into_iter());
        let usual = 20 * MILLISECOND;
        assert_eq!(pacing.begin(Some(usual), 1 << 40), usual);
        writes(&disk, 2 * ENOUGH);
        pacing.at = Instant::now() - EVERY;
        assert_eq!(pacing.observe(Time(MILLISECOND), 1 << 40), Some(None), "slow, but as usual");
        assert_eq!(pacing.moved, 1 << 40);
        writes(&disk, 2 * ENOUGH);
        pacing.baseline = Some(0);
        pacing.at = Instant::now() - EVERY;
        let limit = pacing.observe(Time(1000 * MILLISECOND), (1 << 40) + (50 << 20));
        assert!(limit.unwrap().unwrap() < 100 << 20, "{limit:?}");
    }
}
