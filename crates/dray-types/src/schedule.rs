//! In which order the blocks of one image move.

use crate::BlockRange;
use serde::{Deserialize, Serialize};

/// Ranges of one image in the order in which they should move. Blocks it does not name follow
/// after them in address order, so the empty schedule is address order.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Schedule {
    ranges: Vec<BlockRange>,
}

impl Schedule {
    /// Address order.
    pub const SEQUENTIAL: Self = Self { ranges: Vec::new() };

    /// Adds `range` behind what is there; a range that continues the last one becomes part of it.
    pub fn push(&mut self, range: BlockRange) {
        if range.is_empty() {
            return;
        }
        match self.ranges.last_mut() {
            // Ranges may come from outside: their end need not be a number.
            Some(last)
                if last.start.checked_add(last.len) == Some(range.start)
                    && last.len.checked_add(range.len).is_some() =>
            {
                last.len += range.len;
            }
            _ => self.ranges.push(range),
        }
    }

    /// The ranges, first to move first.
    pub fn ranges(&self) -> &[BlockRange] {
        &self.ranges
    }

    /// Whether it is address order.
    pub fn is_sequential(&self) -> bool {
        self.ranges.is_empty()
    }
}

impl FromIterator<BlockRange> for Schedule {
    fn from_iter<T: IntoIterator<Item = BlockRange>>(ranges: T) -> Self {
        let mut schedule = Self::default();
        for range in ranges {
            schedule.push(range);
        }
        schedule
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_in_the_order_become_one_range() {
        let ranges = [(8, 4), (12, 4), (0, 4), (4, 0)].map(|(s, l)| BlockRange::new(s, l));
        let schedule: Schedule = ranges.into_iter().collect();
        assert_eq!(schedule.ranges(), [BlockRange::new(8, 8), BlockRange::new(0, 4)]);
        assert!(Schedule::SEQUENTIAL.is_sequential() && !schedule.is_sequential());
    }
}
