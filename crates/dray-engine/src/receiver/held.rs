//! The order of a target's effects while one of them cannot be carried out.
//!
//! Effects are done strictly in order. One that fails (a full state directory, a broken disk) stays
//! the first and is tried again; what comes after it waits, but for what guests wait for: at an
//! owner blocks are looked for, asked for and made durable meanwhile.

use super::TargetEffect;
use crate::record::TargetRecord;
use dray_wire::{TargetState, ToSource};
use std::collections::VecDeque;

/// Effects that are not carried out yet.
#[derive(Default)]
pub struct Held {
    /// Which session an effect was made in, and the effect.
    waiting: VecDeque<(u64, TargetEffect)>,
    /// What does not wait.
    urgent: VecDeque<(u64, TargetEffect)>,
    session: u64,
    /// The first one failed, and it is not yet time to try it again.
    stuck: bool,
}

impl Held {
    /// Takes what the machine wants done.
    pub fn push(&mut self, effect: TargetEffect) {
        let queue = if self.overtakes(&effect) { &mut self.urgent } else { &mut self.waiting };
        queue.push_back((self.session, effect));
    }

    /// What is to be done next; nothing when there is nothing, or the first one has to wait.
    pub fn take(&mut self) -> Option<TargetEffect> {
        loop {
            let (session, effect) = match self.urgent.pop_front() {
                Some(first) => first,
                None if self.stuck => return None,
                None => self.waiting.pop_front()?,
            };
            // What was to be said in a session that is over is said in no other: it opens anew.
            let stale = session != self.session && matches!(effect, TargetEffect::Send(_));
            if !stale {
                return Some(effect);
            }
        }
    }

    /// It could not be done: it stays the first until [`retry`](Self::retry).
    pub fn put_back(&mut self, effect: TargetEffect) {
        self.waiting.push_front((self.session, effect));
        self.stuck = true;
    }

    /// The first one is tried again.
    pub fn retry(&mut self) {
        self.stuck = false;
    }

    /// Whether something could not be done and waits to be tried again.
    pub fn is_stuck(&self) -> bool {
        self.stuck
    }

    /// True when nothing waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.urgent.is_empty()
    }

    /// A session began or ended.
    pub fn new_session(&mut self) {
        self.session += 1;
    }

    /// Everything is forgotten: the migration goes.
    pub fn clear(&mut self) {
        self.waiting.clear();
        self.urgent.clear();
        self.stuck = false;
    }

    /// Whether the effect may be done although the one before it could not be. None may before the
    /// disks are exposed: until then nothing is known to be missing.
    fn overtakes(&self, effect: &TargetEffect) -> bool {
        if !self.stuck || self.holds(|effect| matches!(effect, TargetEffect::Expose { .. })) {
            return false;
        }
        match effect {
            TargetEffect::Send(envelope) => match envelope.body {
                // An owner that has exposed its disks has recorded that it is one.
                ToSource::Opened { state: TargetState::Owner, .. } | ToSource::Serving => true,
                ToSource::Fetch { urgent: true, .. } => true,
                ToSource::Fetch { .. } | ToSource::Hurry { .. } | ToSource::Describe { .. } => {
                    !self.holds(is_pause)
                }
                _ => false,
            },
            TargetEffect::AskMissing { .. } | TargetEffect::Checkpoint { .. } => {
                !self.holds(is_pause)
            }
            _ => false,
        }
    }

    fn holds(&self, what: impl Fn(&TargetEffect) -> bool) -> bool {
        self.waiting.iter().any(|(_, effect)| what(effect))
    }
}

/// Whether Backfill begins or pauses with it: that is durable before it counts.
fn is_pause(effect: &TargetEffect) -> bool {
    let TargetEffect::Journal(records) = effect else { return false };
    records.iter().any(|record| matches!(record, TargetRecord::BackfillPaused { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_types::{Attempt, BlockRange, Epoch, ImageIndex};
    use dray_wire::Envelope;

    const RANGE: BlockRange = BlockRange::new(0, 1);

    fn send(body: ToSource) -> TargetEffect {
        TargetEffect::Send(Envelope { epoch: Epoch(2), attempt: Attempt(1), body })
    }

    fn fetch(tag: u64, urgent: bool) -> TargetEffect {
        send(ToSource::Fetch { tag, image: ImageIndex(0), range: RANGE, urgent })
    }

    fn record(record: TargetRecord) -> TargetEffect {
        TargetEffect::Journal(vec![record])
    }

    fn all(held: &mut Held) -> Vec<TargetEffect> {
        std::iter::from_fn(|| held.take()).collect()
    }

    #[test]
    fn what_fails_stays_the_first_and_only_fetching_goes_on() {
        let mut held = Held::default();
        let started = record(TargetRecord::GuestStarted);
        [started.clone(), fetch(1, false)].into_iter().for_each(|effect| held.push(effect));
        let first = held.take().unwrap();
        held.put_back(first);
        assert!(held.is_stuck() && held.take().is_none());
        let ask = TargetEffect::AskMissing { image: ImageIndex(0), range: RANGE, max: 1 };
        [send(ToSource::Complete), ask.clone(), fetch(2, false), fetch(3, true)]
            .into_iter()
            .for_each(|effect| held.push(effect));
        assert_eq!(all(&mut held), [ask, fetch(2, false), fetch(3, true)]);
        held.retry();
        assert_eq!(all(&mut held), [started, fetch(1, false), send(ToSource::Complete)]);
        assert!(held.is_empty());
    }

    #[test]
    fn before_the_disks_are_exposed_and_before_a_pause_is_durable_nothing_is_fetched() {
        let paused = record(TargetRecord::BackfillPaused { paused: false });
        for (first, goes) in [(TargetEffect::Expose { images: Vec::new() }, 0), (paused, 1)] {
            let mut held = Held::default();
            held.put_back(first);
            held.push(fetch(1, false));
            held.push(fetch(2, true));
            assert_eq!(all(&mut held).len(), goes);
        }
    }

    #[test]
    fn what_was_to_be_said_in_one_session_is_not_said_in_the_next() {
        let mut held = Held::default();
        let void = record(TargetRecord::Void { attempt: Attempt(1) });
        held.put_back(void.clone());
        held.push(send(ToSource::Complete));
        held.new_session();
        held.push(send(ToSource::HandBack));
        held.retry();
        assert_eq!(all(&mut held), [void, send(ToSource::HandBack)]);
    }
}
