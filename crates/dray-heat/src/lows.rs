//! [`Lows`]: the buckets of low frequencies, found without a walk.
//!
//! Most chunks have been accessed a few times, and after some rounds there is a bucket for nearly
//! every frequency of a few units: an access of many blocks would pass all of them.

const NONE: u32 = u32::MAX;
/// Frequencies below this are here: 4 KiB of places.
pub(crate) const END: u64 = 1024;

/// Places of buckets by frequency; see the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lows {
    /// A bit for each frequency that has a bucket.
    there: [u64; (END / 64) as usize],
    /// Empty before the first.
    places: Vec<u32>,
}

impl Lows {
    /// Notes a bucket, if its frequency is low.
    pub(crate) fn insert(&mut self, frequency: u64, place: u32) {
        if frequency >= END {
            return;
        }
        if self.places.is_empty() {
            self.places = vec![NONE; END as usize];
        }
        self.places[frequency as usize] = place;
        self.there[(frequency / 64) as usize] |= 1 << (frequency % 64);
    }

    /// Forgets the bucket of a frequency.
    pub(crate) fn remove(&mut self, frequency: u64) {
        if frequency < END {
            self.there[(frequency / 64) as usize] &= !(1 << (frequency % 64));
        }
    }

    /// The last low bucket whose frequency is at most `frequency`.
    pub(crate) fn last_at_most(&self, frequency: u64) -> Option<u32> {
        let last = frequency.min(END - 1);
        let mut word = (last / 64) as usize;
        let mut bits = self.there[word] & (u64::MAX >> (63 - last % 64));
        loop {
            if bits != 0 {
                let found = word as u64 * 64 + 63 - u64::from(bits.leading_zeros());
                return Some(self.places[found as usize]);
            }
            word = word.checked_sub(1)?;
            bits = self.there[word];
        }
    }

    /// Heap bytes.
    pub(crate) fn memory(&self) -> usize {
        self.places.capacity() * size_of::<u32>()
    }
}
