//! Whether compressing pays: decided from what this migration's data and link were measured to be.
//!
//! A run that is compressed costs CPU time and saves link time. Both are known as nanoseconds a
//! byte, so the question is one comparison; nothing is assumed about data or hardware. No I/O, no
//! clock: the sender reports what it measured.

use std::time::Duration;

/// Runs compressed at the start, and again when compressing is tried anew.
const PROBE_RUNS: u32 = 3;
/// Runs sent as they are before compressing is tried anew: 64 MiB or so, so that a probe of data
/// that does not compress costs under 1 % of the CPU.
const RAW_RUNS: u32 = 64;
/// Runs compressed before one is sent as it is to measure the link: a link that waits for the
/// compressor cannot be told from a slow one otherwise.
const PACKED_RUNS: u32 = 64;
/// A ratio above this is not worth the receiver's time.
const USELESS: f64 = 0.9;
/// Weight of the newest sample.
const WEIGHT: f64 = 0.25;
/// A write slower than this waits for the link, not for encryption (which does a byte in less
/// than half of this).
const BLOCKED_NS: f64 = 1.5;

/// An average that forgets.
#[derive(Clone, Copy, Debug, Default)]
struct Average(Option<f64>);

impl Average {
    fn add(&mut self, sample: f64) {
        self.0 = Some(self.0.map_or(sample, |old| old + WEIGHT * (sample - old)));
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mode {
    /// Nothing was sent yet.
    Start,
    /// Compress this many more runs, whatever the averages say.
    Probe(u32),
    /// Compress this many more runs while it pays.
    On(u32),
    /// Send one run as it is, to see how fast the link is.
    Measure,
    /// Send this many more runs as they are.
    Off(u32),
}

/// Decides run by run.
#[derive(Clone, Debug)]
pub struct Chooser {
    mode: Mode,
    /// Compressed bytes for a byte.
    ratio: Average,
    /// Nanoseconds to compress a byte.
    cpu: Average,
    /// Nanoseconds the link takes for a byte.
    link: Average,
}

impl Default for Chooser {
    fn default() -> Self {
        let none = Average(None);
        Self { mode: Mode::Start, ratio: none, cpu: none, link: none }
    }
}

impl Chooser {
    /// Whether to compress the next run.
    pub fn compress_next(&mut self) -> bool {
        self.mode = match self.mode {
            Mode::Start => Mode::Measure,
            Mode::Measure if self.ratio.0.is_none() => Mode::Probe(PROBE_RUNS - 1),
            Mode::Probe(left) if left > 0 => Mode::Probe(left - 1),
            Mode::Off(left) if left > 0 => Mode::Off(left - 1),
            // Only a probe says what the ratio is now; the old one was of other data.
            Mode::Off(_) => Mode::Probe(PROBE_RUNS - 1),
            Mode::On(0) => Mode::Measure,
            Mode::On(left) if self.pays() => Mode::On(left - 1),
            Mode::Probe(_) | Mode::Measure if self.pays() => Mode::On(PACKED_RUNS - 1),
            Mode::Probe(_) | Mode::On(_) | Mode::Measure => Mode::Off(RAW_RUNS - 1),
        };
        matches!(self.mode, Mode::Probe(_) | Mode::On(_))
    }

    /// A run of `bytes` became `compressed` bytes and took `time`.
    pub fn compressed(&mut self, bytes: usize, compressed: usize, time: Duration) {
        self.ratio.add(compressed as f64 / bytes as f64);
        self.cpu.add(time.as_nanos() as f64 / bytes as f64);
    }

    /// `bytes`, compressed or not, were written in `writing`, budget included; before that the
    /// thread made them for `making`, while the link went on with what the kernel held.
    pub fn written(&mut self, bytes: usize, packed: bool, making: Duration, writing: Duration) {
        let (making, writing) = (making.as_nanos() as f64, writing.as_nanos() as f64);
        let bytes = bytes as f64;
        let whole = (making + writing) / bytes;
        if writing > BLOCKED_NS * bytes {
            self.link.add(whole);
        } else if !packed {
            self.link.add(writing / bytes);
        } else if let Some(link) = &mut self.link.0 {
            // The link kept up with the compressor: it is at least that fast.
            *link = link.min(whole);
        }
    }

    fn pays(&self) -> bool {
        let (Some(ratio), Some(cpu), Some(link)) = (self.ratio.0, self.cpu.0, self.link.0) else {
            return false;
        };
        ratio <= USELESS && cpu < link * (1.0 - ratio)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: usize = 1 << 20;

    /// Sends `runs` runs and returns how many were compressed.
    fn send(chooser: &mut Chooser, runs: u32, ratio: f64, cpu_ns: f64, link_ns: f64) -> u32 {
        let time = |ns: f64, bytes: usize| Duration::from_nanos((ns * bytes as f64) as u64);
        let mut compressed = 0;
        for _ in 0..runs {
            let mut bytes = RUN;
            let mut making = Duration::from_micros(50);
            let packed = chooser.compress_next();
            if packed {
                bytes = (ratio * RUN as f64) as usize;
                chooser.compressed(RUN, bytes, time(cpu_ns, RUN));
                making += time(cpu_ns, RUN);
                compressed += 1;
            }
            // The kernel sends on while the run is made: the write only takes the rest.
            let writing = time(link_ns, bytes).saturating_sub(making);
            chooser.written(bytes, packed, making, writing.max(time(0.4, bytes)));
        }
        compressed
    }

    #[test]
    fn a_slow_link_compresses_what_compresses() {
        let compressed = send(&mut Chooser::default(), 1000, 0.4, 2.1, 8.0);
        assert!(compressed > 970, "{compressed}");
    }

    #[test]
    fn a_fast_link_is_not_slowed_down() {
        let compressed = send(&mut Chooser::default(), 1000, 0.4, 2.1, 0.5);
        assert!(compressed <= 50, "{compressed}");
    }

    #[test]
    fn random_data_is_sent_as_it_is() {
        let compressed = send(&mut Chooser::default(), 1000, 1.0, 0.2, 80.0);
        assert!(compressed <= 50, "{compressed}");
    }

    #[test]
    fn it_follows_when_the_data_changes() {
        let mut chooser = Chooser::default();
        send(&mut chooser, 200, 1.0, 0.2, 8.0);
        let compressed = send(&mut chooser, 400, 0.3, 2.0, 8.0);
        assert!(compressed > 300, "{compressed}");
        let compressed = send(&mut chooser, 400, 1.0, 0.2, 8.0);
        assert!(compressed < 60, "{compressed}");
    }
}
