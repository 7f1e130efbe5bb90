//! What a soak or a walk has done so far.

use std::collections::BTreeMap;
use std::fmt;

/// Counts, by what they count.
#[derive(Default)]
pub struct Counts(BTreeMap<String, u64>);

impl Counts {
    /// Counts so many more.
    pub fn add(&mut self, what: impl Into<String>, count: u64) {
        *self.0.entry(what.into()).or_default() += count;
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
