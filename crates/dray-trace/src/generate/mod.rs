//! Loads of several kinds of servers, from a seed.
//!
//! A load is a stream of reads and a stream of writes. Each stream has a *stable* set of extents
//! that it comes back to all the time, by a Zipf law; a *moving* set, of which the oldest extent is
//! replaced by a fresh one at a steady rate; and possibly a *log*, written round and round. Extents
//! lie in the used parts of block groups, as file systems spread them; a few fresh ones lie in the
//! unused parts. So temporal locality follows from the sizes of the sets and the rate of fresh
//! extents, spatial locality from the groups and the extents, popularity from the Zipf exponent.
//! [`analyse`](crate::analyse) shows what comes of it.
//!
//! Records are made as they are asked for, without end; requests arrive as a Poisson process.

mod layout;
mod presets;
mod stream;

pub use layout::Layout;
pub use presets::Load;
pub use stream::Stream;

use crate::record::{Op, Record};
use crate::rng::Rng;
use stream::Source;

/// A load: a disk, memory, and what the guest does.
#[derive(Clone, PartialEq, Debug)]
pub struct LoadSpec {
    /// Where data lies.
    pub layout: Layout,
    /// Memory of the guest in bytes (for the length of a migration).
    pub memory: u64,
    /// What it reads.
    pub reads: Stream,
    /// What it writes.
    pub writes: Stream,
}

impl LoadSpec {
    /// The records from time 0 on; equal seeds give equal records.
    pub fn records(&self, seed: u64) -> Records {
        let mut rng = Rng::new(seed);
        let mut source = |stream: &Stream| {
            let own = Rng::new(rng.bits());
            stream.has_rate().then(|| Source::new(stream.clone(), self.layout, own))
        };
        let (reads, writes) = (source(&self.reads), source(&self.writes));
        Records { reads, writes }
    }
}

/// The records of a load, in order of time; ends only when neither reads nor writes have a rate.
pub struct Records {
    reads: Option<Source>,
    writes: Option<Source>,
}

impl Iterator for Records {
    type Item = Record;

    fn next(&mut self) -> Option<Record> {
        let time = |source: &Option<Source>| source.as_ref().map(Source::next_time);
        let reads_first = match (time(&self.reads), time(&self.writes)) {
            (Some(read), Some(write)) => read <= write,
            (read, _) => read.is_some(),
        };
        if reads_first {
            self.reads.as_mut().map(|source| source.next(Op::Read))
        } else {
            self.writes.as_mut().map(|source| source.next(Op::Write))
        }
    }
}
