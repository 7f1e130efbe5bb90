//! When the guest's writes are slowed, and to what (Scheduling, section 6.1).

use super::{Link, Source, SourceEffect, Stage};
use crate::throttle::{Mode, WriteLimit};

impl Source {
    /// Half of the migration's speed while dirty blocks are sent again and the guest runs; nothing
    /// in any other state, so that every way out of Sync lets the guest go.
    fn wanted_limit(&self) -> Option<WriteLimit> {
        let mode = self.plan.tuning.throttle;
        let sends = matches!(self.stage, Stage::Sync | Stage::Ready) && self.scheme.syncs;
        let half = (self.window.rate() / 2.0) as u64;
        let may = mode != Mode::None && self.opened && self.link == Link::Up && half > 0;
        let round = self.rounds.count;
        (sends && may).then_some(WriteLimit { mode, bytes_per_second: half, round })
    }

    pub(super) fn slow_or_release(&mut self, out: &mut Vec<SourceEffect>) {
        let wanted = self.wanted_limit();
        let close = match (self.limit, wanted) {
            (None, None) => true,
            // The measured rate is never quite still; a gate need not hear of each change.
            (Some(old), Some(new)) => {
                let (a, b) = (old.bytes_per_second, new.bytes_per_second);
                old.round == new.round && a.abs_diff(b) <= a / 4
            }
            _ => false,
        };
        if !close {
            self.limit = wanted;
            out.push(SourceEffect::Throttle { limit: wanted });
        }
    }

    /// What the gate was last told to hold the guest's writes to.
    pub fn write_limit(&self) -> Option<WriteLimit> {
        self.limit
    }
}
