//! One stream of requests: which extents it uses and how they change.

use super::Layout;
use crate::record::{Op, Record};
use crate::rng::Rng;
use std::collections::{BTreeSet, VecDeque};

/// The smallest request, in bytes.
const SMALLEST: u64 = 4096;
/// Times a place is drawn before a taken one is accepted.
const TRIES: u32 = 32;

/// What a stream of requests is like.
#[derive(Clone, PartialEq, Debug)]
pub struct Stream {
    /// Mean bytes a second; zero for no requests.
    pub rate: f64,
    /// Sizes of requests in bytes, multiples of 4 KiB and no larger than an extent, with weights. A
    /// request begins at a multiple of its size within its extent.
    pub sizes: Vec<(u64, u32)>,
    /// Bytes in an extent.
    pub extent: u64,
    /// Bytes of extents that stay in use.
    pub stable: u64,
    /// Share of the requests that goes to them.
    pub stable_share: f64,
    /// Bytes of extents that are replaced one after another.
    pub moving: u64,
    /// Bytes a second of fresh extents that take the place of old ones.
    pub fresh: f64,
    /// Seconds after which the place of a replaced extent may be used again.
    pub rest: f64,
    /// Share of fresh extents in unused parts of groups.
    pub outside: f64,
    /// Zipf exponent of the popularity of extents; 0 makes them equal.
    pub skew: f64,
    /// Bytes of a log at the end of the disk.
    pub log: u64,
    /// Share of the requests that goes there, one behind the other.
    pub log_share: f64,
}

impl Stream {
    /// Whether it makes requests at all.
    pub(super) fn has_rate(&self) -> bool {
        self.rate > 0.0 && !self.sizes.is_empty()
    }

    fn mean_size(&self) -> f64 {
        let weights: f64 = self.sizes.iter().map(|&(_, weight)| f64::from(weight)).sum();
        let bytes: f64 =
            self.sizes.iter().map(|&(size, weight)| size as f64 * f64::from(weight)).sum();
        bytes / weights
    }
}

/// Picks places by a Zipf law: place `k` with a chance proportional to 1 ÷ (k + 1)^skew.
struct Zipf {
    cumulated: Vec<f64>,
}

impl Zipf {
    fn new(places: usize, skew: f64) -> Self {
        let mut total = 0.0;
        let add = |place: usize| {
            total += 1.0 / ((place + 1) as f64).powf(skew);
            total
        };
        Self { cumulated: (0..places).map(add).collect() }
    }

    fn pick(&self, rng: &mut Rng) -> usize {
        let total = self.cumulated.last().copied().unwrap_or(0.0);
        let at = rng.unit() * total;
        self.cumulated.partition_point(|&upto| upto <= at).min(self.cumulated.len() - 1)
    }
}

/// Extents in use and how popular each is.
struct Extents {
    places: Vec<u64>,
    zipf: Zipf,
}

/// A stream at work.
pub(super) struct Source {
    spec: Stream,
    layout: Layout,
    rng: Rng,
    stable: Extents,
    moving: Extents,
    taken: BTreeSet<u64>,
    /// Places that were given up, and when in nanoseconds.
    resting: VecDeque<(f64, u64)>,
    /// Which moving extent is the oldest.
    oldest: usize,
    /// Fresh bytes owed.
    owed: f64,
    /// Where the log is written next, from its beginning.
    log_at: u64,
    /// When the next request comes, in nanoseconds.
    next: f64,
    /// Nanoseconds between requests on average.
    gap: f64,
}

impl Source {
    pub(super) fn new(spec: Stream, layout: Layout, rng: Rng) -> Self {
        let gap = spec.mean_size() / spec.rate * 1e9;
        let none = || Extents { places: Vec::new(), zipf: Zipf::new(0, 0.0) };
        let mut source = Self {
            layout,
            rng,
            stable: none(),
            moving: none(),
            taken: BTreeSet::new(),
            resting: VecDeque::new(),
            oldest: 0,
            owed: 0.0,
            log_at: 0,
            next: 0.0,
            gap,
            spec,
        };
        source.stable = source.fill(source.spec.stable);
        source.moving = source.fill(source.spec.moving);
        source.next = source.rng.exponential(gap);
        source
    }

    fn fill(&mut self, bytes: u64) -> Extents {
        let count = (bytes / self.spec.extent).max(1) as usize;
        let places = (0..count).map(|_| self.fresh_place()).collect();
        Extents { places, zipf: Zipf::new(count, self.spec.skew) }
    }

    fn fresh_place(&mut self) -> u64 {
        let Stream { extent, log, outside, .. } = self.spec;
        let mut place = 0;
        for _ in 0..TRIES {
            let outside = self.rng.chance(outside);
            place = self.layout.place(extent, log, outside, &mut self.rng);
            if self.taken.insert(place) {
                break;
            }
        }
        place
    }

    /// When the next request comes, in nanoseconds.
    pub(super) fn next_time(&self) -> u64 {
        self.next as u64
    }

    /// The next request.
    pub(super) fn next(&mut self, op: Op) -> Record {
        let time_ns = self.next_time();
        let wait = self.rng.exponential(self.gap);
        self.next += wait;
        self.renew(wait);
        let length = self.size();
        let kind = self.rng.unit();
        let offset = if kind < self.spec.log_share {
            self.log(length)
        } else {
            let rest = self.spec.log_share + (1.0 - self.spec.log_share) * self.spec.stable_share;
            let extents = if kind < rest { &self.stable } else { &self.moving };
            let start = extents.places[extents.zipf.pick(&mut self.rng)];
            start + self.rng.below(self.spec.extent / length) * length
        };
        Record { time_ns, op, offset, length }
    }

    /// Replaces the oldest extents by as many fresh ones as `wait` nanoseconds bring.
    fn renew(&mut self, wait: f64) {
        self.owed += self.spec.fresh * wait / 1e9;
        while self.owed >= self.spec.extent as f64 {
            self.owed -= self.spec.extent as f64;
            let rested = self.next - self.spec.rest * 1e9;
            while let Some((_, place)) = self.resting.pop_front_if(|(since, _)| *since < rested) {
                self.taken.remove(&place);
            }
            self.resting.push_back((self.next, self.moving.places[self.oldest]));
            self.moving.places[self.oldest] = self.fresh_place();
            self.oldest = (self.oldest + 1) % self.moving.places.len();
        }
    }

    fn size(&mut self) -> u64 {
        let sizes = &self.spec.sizes;
        let total: u64 = sizes.iter().map(|&(_, weight)| u64::from(weight)).sum();
        let mut at = self.rng.below(total);
        for &(size, weight) in sizes {
            if at < u64::from(weight) {
                return size.min(self.spec.extent);
            }
            at -= u64::from(weight);
        }
        SMALLEST
    }

    fn log(&mut self, length: u64) -> u64 {
        if self.log_at + length > self.spec.log {
            self.log_at = 0;
        }
        let offset = self.layout.disk - self.spec.log + self.log_at;
        self.log_at += length;
        offset
    }
}
