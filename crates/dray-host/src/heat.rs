//! Heat on this host: what each image's log of accesses is drained into, and how it survives the
//! agent.
//!
//! Guests' requests only push into a disk's log. The agent empties the logs a few times a second, or as
//! often as the fastest guest asks for, and has the counts written down every ten seconds, as
//! small files beside the images' records. Nothing depends on them: what is lost or does not decode is
//! counted anew.

use dray_engine::hotset::Counts;
use dray_engine::plan::{Chunk, Footprint};
use dray_files::StatePath;
use dray_heat::{AccessLog, Heat, HeatConfig, Op};
use dray_image::Disk;
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet, ImageIndex, Schedule};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::io;

use std::time::{Duration, Instant};

/// Time over which the guest's requests a second are counted.
const WINDOW: Duration = Duration::from_secs(10);
/// A window that is shorter than this, in seconds, tells no rate.
const LEAST: f64 = 1.0;
/// Chunks that the planner decides about, in blocks, at least: 4 MiB.
const PLANNED: u64 = 1024;

struct State {
    heat: Heat,
    /// Accesses counted in this process.
    counted: u64,
    /// Accesses that the disk's log has dropped by now.
    dropped: u64,
    /// `counted` when it was last saved.
    saved: u64,
    pace: Pace,
    /// What of it is written; counted anew by each process.
    footprint: Footprint,
}

impl State {
    /// What of a range is written; all of it where only the rate tells of writes, of an earlier process.
    fn written_in(&self, range: BlockRange) -> Vec<BlockRange> {
        let mut areas = self.footprint.areas(range);
        if areas.is_empty() {
            areas.push(range);
        }
        areas
    }
}

/// Whether a chunk that nobody reads or writes ends where the next one starts.
fn is_idle_up_to(chunk: &Chunk, start: u64) -> bool {
    chunk.written == 0.0 && chunk.reads == 0.0 && chunk.range.end() == start
}

/// Bytes of these areas that are in a set.
fn bytes_in(areas: &[BlockRange], set: &BlockSet) -> u64 {
    areas.iter().map(|&area| set.intersection(area).len()).sum::<u64>() * BLOCK_SIZE
}

/// How often the guest reads and writes: counted over windows, the last complete one and the one
/// under way.
#[derive(Default)]
struct Pace {
    /// When the window began; none before the log was looked at.
    since: Option<Instant>,
    /// Reads and writes in the window.
    counted: [u64; 2],
    /// Reads and writes a second in the window before.
    before: [f64; 2],
}

impl Pace {
    /// A window that is over becomes the one before. Asked once for many accesses: reading the clock
    /// takes as long as counting one.
    fn turn(&mut self, now: Instant) {
        let since = *self.since.get_or_insert(now);
        if now.saturating_duration_since(since) >= WINDOW {
            *self = Self { since: Some(now), counted: [0; 2], before: self.a_second(now) };
        }
    }

    /// So many reads and writes were counted, and so many accesses more were made that were not.
    fn count(&mut self, noted: [u64; 2], dropped: u64) {
        let all: u64 = noted.iter().sum();
        for (count, noted) in self.counted.iter_mut().zip(noted) {
            *count += noted + (dropped as f64 * noted as f64 / all.max(1) as f64) as u64;
        }
    }

    /// Reads and writes a second. A window that has just begun says little: what was done in it was
    /// done in a second, not ten times in one.
    fn a_second(&self, now: Instant) -> [f64; 2] {
        let passed = self.since.map(|since| now.saturating_duration_since(since));
        let seconds = passed.unwrap_or_default().as_secs_f64();
        if seconds < LEAST && self.before != [0.0; 2] {
            return self.before;
        }
        self.counted.map(|count| count as f64 / seconds.max(LEAST))
    }
}

/// Heat of one image of this host.
pub struct ImageHeat(Mutex<State>);

impl ImageHeat {
    /// Heat of an image of `len` bytes without any access yet.
    pub fn new(len: u64) -> Self {
        let heat = Heat::new(BlockRange::whole(len).len, HeatConfig::default());
        let (pace, footprint) = (Pace::default(), Footprint::default());
        Self(Mutex::new(State { heat, counted: 0, dropped: 0, saved: 0, pace, footprint }))
    }

    /// What an earlier agent saved at `path` of an image that has `len` bytes now; nothing when
    /// there is none or when it does not fit.
    pub fn load(path: &StatePath, len: u64) -> Self {
        let this = Self::new(len);
        let Ok(bytes) = path.read() else { return this };
        let blocks = BlockRange::whole(len).len;
        match Heat::decode(&bytes, blocks, HeatConfig::default()) {
            Ok(heat) => this.state().heat = heat,
            Err(why) => tracing::info!(path = %path.display(), %why,
                "the counts of accesses begin anew"),
        }
        this
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Counts what the disk's guest has done since the last time. Tells how full its log was
    /// ([`AccessLog::used`]).
    pub fn drain(&self, disk: &Disk, now: Instant) -> f64 {
        self.drain_log(disk.accesses(), now)
    }

    fn drain_log(&self, log: &AccessLog, now: Instant) -> f64 {
        let used = log.used();
        let mut guard = self.state();
        let state = &mut *guard;
        state.pace.since.get_or_insert(now);
        if used == 0.0 {
            return used;
        }
        state.pace.turn(now);
        let mut noted = [0; 2];
        log.drain(|op, range| {
            noted[usize::from(op == Op::Write)] += 1;
            state.heat.access(op, range);
            match op {
                Op::Read => state.footprint.note_read(range),
                Op::Write => state.footprint.note(range),
            }
        });
        state.counted += noted.iter().sum::<u64>();
        let dropped = log.dropped();
        state.pace.count(noted, dropped.saturating_sub(state.dropped));
        state.dropped = dropped;
        used
    }

    /// Accesses counted since the agent started: schedules are as before while it is the same.
    pub fn counted(&self) -> u64 {
        self.state().counted
    }

    /// A migration begins ([`Heat::try_now`]).
    pub fn try_now(&self) {
        self.state().heat.try_now();
    }

    /// The order for Copy, as far as is known by now, where the link carries `jump_blocks` blocks in the
    /// time of a jump; 0 when nobody knows yet.
    pub fn copy_schedule(&self, jump_blocks: u64) -> Schedule {
        self.with_jump(jump_blocks).heat.copy_schedule()
    }

    /// The order for Backfill, as [`copy_schedule`](Self::copy_schedule).
    pub fn backfill_schedule(&self, jump_blocks: u64) -> Schedule {
        self.with_jump(jump_blocks).heat.backfill_schedule()
    }

    fn with_jump(&self, blocks: u64) -> MutexGuard<'_, State> {
        let mut state = self.state();
        if blocks > 0 {
            state.heat.set_jump(blocks);
        }
        state
    }

    /// Blocks read and written in each segment of `segment` bytes, less what has faded.
    pub fn segments(&self, segment: u64) -> Vec<Counts> {
        let mut counts = Vec::new();
        for score in self.state().heat.segment_scores((segment / BLOCK_SIZE).max(1)) {
            let at = score.segment as usize;
            counts.resize(counts.len().max(at + 1), Counts::default());
            let (reads, writes) = (score.reads.round() as u64, score.writes.round() as u64);
            counts[at] = Counts { reads, writes };
        }
        counts
    }

    /// The image in the planner's pieces: chunks that are read or written, and the stretches between
    /// them; only what has `data` to be sent or is written. The target has what is `held` as it is.
    pub fn chunks(
        &self,
        image: ImageIndex,
        data: &BlockSet,
        held: &BlockSet,
        now: Instant,
    ) -> Vec<Chunk> {
        let state = self.state();
        let [reads, writes] = state.pace.a_second(now);
        let heat = &state.heat;
        let step = heat.chunk_blocks(Op::Read).max(heat.chunk_blocks(Op::Write)).max(PLANNED);
        let rates: BTreeMap<u64, (f64, f64)> =
            heat.segment_rates(step).map(|(n, reads, writes)| (n, (reads, writes))).collect();
        let mut chunks: Vec<Chunk> = Vec::new();
        for start in (0..heat.blocks()).step_by(step as usize) {
            let range = BlockRange::new(start, step.min(heat.blocks() - start));
            let (read, written) = rates.get(&(start / step)).copied().unwrap_or_default();
            let (reads, written) = (read * reads, written * writes * BLOCK_SIZE as f64);
            let bytes = bytes_in(&[range], data);
            let cold = written == 0.0 && reads == 0.0;
            match chunks.last_mut() {
                _ if cold && bytes == 0 => {}
                Some(last) if cold && is_idle_up_to(last, start) => {
                    last.range.len += range.len;
                    last.bytes += bytes;
                    last.areas = vec![last.range];
                    last.held += bytes_in(&[range], held);
                }
                _ => {
                    let areas = state.written_in(range);
                    let held = bytes_in(&areas, held);
                    let read_there = state.footprint.share_read(range);
                    chunks.push(Chunk {
                        image,
                        range,
                        bytes,
                        written,
                        areas,
                        held,
                        reads,
                        read_there,
                    });
                }
            }
        }
        chunks
    }

    /// Takes over what is known of the same image before it grew.
    pub fn take_over(&self, old: &Self) {
        let mut heat = old.state().heat.clone();
        let mut state = self.state();
        heat.grow(state.heat.blocks());
        state.heat = heat;
        state.counted += 1;
    }

    /// Replaces the file at `path` if anything has changed. It is not synced: a torn one is
    /// noticed by its checksum.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn save(&self, path: &StatePath) -> io::Result<()> {
        let (bytes, counted) = {
            let state = self.state();
            if state.counted == state.saved {
                return Ok(());
            }
            (state.heat.encode(), state.counted)
        };
        let new = path.with_extension("heat-new");
        new.create()?.write_at(&bytes, 0)?;
        new.rename(path)?;
        self.state().saved = counted;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = 1 << 30;

    fn written() -> ImageHeat {
        let heat = ImageHeat::new(LEN);
        let log = AccessLog::new(300);
        assert!((0..300).all(|n| log.push(Op::Write, BlockRange::new(5000 + n % 7, 1))));
        heat.drain_log(&log, Instant::now());
        heat
    }

    #[test]
    fn heat_survives_in_a_file_and_a_damaged_one_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = StatePath::real(dir.path().join("a.heat"));
        let heat = written();
        heat.save(&path).unwrap();
        let again = ImageHeat::load(&path, LEN);
        assert_eq!(again.copy_schedule(0), heat.copy_schedule(0));
        assert_eq!(again.backfill_schedule(0), heat.backfill_schedule(0));
        assert!(!again.copy_schedule(0).is_sequential());
        assert!(ImageHeat::load(&path, LEN / 2).copy_schedule(0).is_sequential(), "another image");
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, bytes).unwrap();
        assert!(ImageHeat::load(&path, LEN).copy_schedule(0).is_sequential());
    }

    #[test]
    fn segments_are_counted_for_the_hot_set() {
        let counts = written().segments(64 << 20);
        assert_eq!(counts, [Counts { reads: 0, writes: 300 }]);
        assert_eq!(ImageHeat::new(LEN).segments(64 << 20), []);
    }

    #[test]
    fn only_what_has_changed_is_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = StatePath::real(dir.path().join("a.heat"));
        let heat = written();
        heat.save(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        heat.save(&path).unwrap();
        assert!(!path.exists().unwrap());
        let log = AccessLog::new(1);
        assert!(log.push(Op::Read, BlockRange::new(0, 1)));
        heat.drain_log(&log, Instant::now());
        heat.save(&path).unwrap();
        assert!(path.exists().unwrap());
    }

    #[test]
    fn accesses_that_are_not_counted_still_tell_the_guests_pace() {
        let (heat, log) = (ImageHeat::new(LEN), AccessLog::new(64));
        for n in 0..8000 {
            log.push(if n % 4 == 0 { Op::Read } else { Op::Write }, BlockRange::new(n, 1));
        }
        assert_eq!(heat.drain_log(&log, Instant::now()), 1.0);
        assert_eq!(heat.counted(), 64);
        // The window has just begun: what was done is taken for a second's work.
        assert_eq!(heat.state().pace.a_second(Instant::now()), [2000.0, 6000.0]);
        heat.drain_log(&log, Instant::now());
        assert_eq!(heat.state().pace.a_second(Instant::now()), [2000.0, 6000.0]);
    }

    #[test]
    fn an_image_that_grows_keeps_its_heat() {
        let grown = ImageHeat::new(2 * LEN);
        grown.take_over(&written());
        let copy = grown.copy_schedule(0);
        let last = copy.ranges().last().unwrap();
        assert!((last.start..last.end()).contains(&5000), "{last:?}");
    }
}
