//! What a soak has done so far.

use std::collections::BTreeMap;
use std::fmt;

/// Counts, by what they count.
#[derive(Default)]
pub struct Counts(BTreeMap<&'static str, u64>);

impl Counts {
    pub fn add(&mut self, what: &'static str, count: u64) {
        *self.0.entry(what).or_default() += count;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (nth, (what, count)) in self.0.iter().enumerate() {
            write!(f, "{}{count} {what}", if nth == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}
