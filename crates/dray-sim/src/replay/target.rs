//! What the target's shell does, on sets of blocks.

use super::bytes;
use super::settings::Settings;
use super::world::{IMAGE, MIGRATION, World, offer};
use dray_engine::receiver::TargetNotice;
use dray_engine::{Target, TargetEffect, TargetEvent, TargetPlan, Time};
use dray_types::BlockSet;
use dray_wire::ImageHandover;
use std::collections::VecDeque;

/// A demand brings the missing blocks around it, to this alignment in blocks (64 KiB), as in the
/// agent: in every order but address order as such.
const NEIGHBOURHOOD: u64 = 16;

pub(super) struct TargetShell {
    machine: Target,
    inbox: VecDeque<TargetEvent>,
    effects: Vec<TargetEffect>,
    /// The live map of the disk.
    pub(super) missing: BlockSet,
}

impl TargetShell {
    pub(super) fn new(settings: &Settings) -> Self {
        let plan = TargetPlan {
            migration: MIGRATION,
            images: vec![offer(settings)],
            zeroed: vec![true],
            based: vec![false],
        };
        Self {
            machine: Target::new(plan),
            inbox: VecDeque::new(),
            effects: Vec::new(),
            missing: BlockSet::new(),
        }
    }

    /// Alignment in blocks of the missing blocks that a demand brings with it.
    pub(super) fn around(&self) -> u64 {
        if self.machine.widens() { NEIGHBOURHOOD } else { 1 }
    }

    /// Only what the guest waits for is fetched.
    pub(super) fn paused(&self) -> bool {
        self.machine.status().paused
    }
}

impl World {
    /// Gives the target an event and carries out what follows from it.
    pub(super) fn tell_target(&mut self, event: TargetEvent) {
        self.target.inbox.push_back(event);
        while let Some(event) = self.target.inbox.pop_front() {
            let mut effects = std::mem::take(&mut self.target.effects);
            self.target.machine.step(Time(self.now), event, &mut effects);
            effects.drain(..).for_each(|effect| self.target_effect(effect));
            self.target.effects = effects;
        }
    }

    fn target_effect(&mut self, effect: TargetEffect) {
        let inbox = &mut self.target.inbox;
        match effect {
            TargetEffect::Send(envelope) => self.send_to_source(envelope),
            TargetEffect::SyncImages { id } => {
                inbox.push_back(TargetEvent::ImagesSynced { id, result: Ok(()) });
            }
            TargetEffect::Expose { images } => self.expose(images),
            TargetEffect::ReachGuest => inbox.push_back(TargetEvent::GuestReachable(Ok(()))),
            TargetEffect::StartGuest => {
                inbox.push_back(TargetEvent::GuestStarted(Ok(())));
                self.start_guest();
            }
            TargetEffect::AskMissing { image, range, max } => {
                let run = self.target.missing.next_run(range.start, max);
                let run = run.map(|run| run.intersect(range)).filter(|run| !run.is_empty());
                self.target.inbox.push_back(TargetEvent::NextMissing { image, run });
            }
            TargetEffect::Checkpoint { id } => {
                inbox.push_back(TargetEvent::Checkpointed { id, result: Ok(()) });
            }
            TargetEffect::Finish => self.complete(),
            TargetEffect::Notice(TargetNotice::Failed { why }) => self.broken_by(&why),
            TargetEffect::Withdraw | TargetEffect::Discard | TargetEffect::BeginAnew { .. } => {
                self.broken_by("the target gives up");
            }
            TargetEffect::Journal(_) | TargetEffect::LetChange | TargetEffect::Notice(_) => {}
        }
    }

    /// I3: at handover every block is either equal at the target or in the missing map.
    fn expose(&mut self, images: Vec<ImageHandover>) {
        let missing = images.into_iter().next().map(|image| image.missing).unwrap_or_default();
        let mut lost = self.stale.clone();
        lost.subtract(&missing);
        if !lost.is_empty() {
            self.broken_by(&format!("{} old blocks at the target are not missing", lost.len()));
        }
        self.out.missing_bytes = bytes(missing.len());
        self.target.missing = missing;
    }

    /// At the end the target has everything.
    fn complete(&mut self) {
        if !self.target.missing.is_empty() {
            self.broken_by(&format!("complete without {} blocks", self.target.missing.len()));
        }
        self.finish();
    }

    /// A guest waits for blocks.
    pub(super) fn demand(&mut self, runs: Vec<dray_types::BlockRange>) {
        self.tell_target(TargetEvent::Demand { image: IMAGE, runs });
    }
}
