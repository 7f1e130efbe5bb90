//! Decides which blocks a hot-set migration copies (LiveFS), from the accesses counted during the
//! observation and those that this host has counted before.

use super::SourceLoop;
use super::latency::OBSERVE;
use dray_engine::hotset::Rule;
use dray_engine::{SourceEvent, SourceRecord, Tuning};
use dray_host::folder::intent::Options;
use dray_types::{BlockSet, Choice};
use std::time::Duration;

impl SourceLoop {
    /// What the engine is told beyond the strategy. A restarted agent may choose other blocks.
    pub(super) fn tuning(&self, options: &Options) -> Tuning {
        let throttle = options.tuning.throttle;
        if options.strategy.traits().choice != Choice::Hot {
            return Tuning { throttle, ..Tuning::default() };
        }
        let hot_set = options.tuning.hot_set.clone().unwrap_or_default();
        let copy_only = Some(self.images.hot(&hot_set.rule()));
        Tuning { copy_only, handover_size: hot_set.handover_size, throttle, ..Tuning::default() }
    }

    /// How much longer the guest is to be observed before anything is copied.
    pub(super) fn still_to_observe(&self, options: &Options) -> Option<Duration> {
        let resumed = self.history.last() == Some(&SourceRecord::Resumed);
        let fresh = self.history.is_empty();
        let hot_set = options.tuning.hot_set.as_ref().filter(|_| fresh);
        let hot_set = Duration::from_millis(hot_set.map_or(0, |hot_set| hot_set.observe_ms));
        let paced = options.tuning.max_added_latency_ms.is_some();
        let paced = paced && (fresh || resumed) && !self.report.knows_usual_latency();
        let observe = hot_set.max(if paced { OBSERVE } else { Duration::ZERO });
        let left = observe.saturating_sub(Duration::from_secs_f64(self.report.elapsed()));
        (!self.observed && !left.is_zero()).then_some(left)
    }

    /// The guest was observed for long enough, or nobody waits for the end of it.
    pub(super) fn end_observation(&mut self) {
        if self.observing.take().is_none() {
            return;
        }
        self.observed = true;
        self.revive();
        if self.session.is_some() {
            self.say_reuse();
            self.step(SourceEvent::LinkUp);
        }
    }
}

impl super::SourceImages {
    /// The blocks of each image that are hot by `rule`. What no guest uses here was not counted.
    fn hot(&self, rule: &Rule) -> Vec<BlockSet> {
        let mut counts = vec![Vec::new(); self.len()];
        for (image, heat) in self.heats() {
            counts[image.ix()] = heat.segments(rule.segment);
        }
        let hot = |(ix, counts): (usize, &Vec<_>)| rule.hot(counts, self.offer(ix).len);
        counts.iter().enumerate().map(hot).collect()
    }
}
