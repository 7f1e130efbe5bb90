//! The prediction of a migration, which is made at its start and compared at its end; and the
//! strategy `auto`, for which the planner chooses the blocks to copy.

use super::SourceLoop;
use crate::forecast::{self, Content};
use dray_api::{LinkFrom, Predicted};
use dray_engine::plan::{self, Load};
use dray_engine::{Phase, SourceEvent, Tuning};
use dray_host::folder::intent::Options;
use dray_types::{BlockRange, ImageIndex};
use std::time::{Duration, Instant};

/// Pause between two choices: what is hot moves on in minutes, and a choice looks at every chunk.
const CHOOSE_AGAIN: Duration = Duration::from_secs(5);

/// What the choices are made of that stays as it is.
#[derive(Default)]
pub struct Choices {
    /// When the last one was made; none before the first.
    made_at: Option<Instant>,
    /// Where each image held data when the migration began.
    contents: Vec<Content>,
}

impl SourceLoop {
    /// Chooses. A restarted agent may choose other blocks; what it predicts then is not told.
    pub(super) fn auto(&mut self, options: &Options) -> Tuning {
        let (load, link) = self.load(options);
        let plan = plan::choose(&load, &options.goals(), &self.whole());
        let migration = self.slot.board.migration;
        tracing::debug!(%migration, prediction = ?plan.prediction, forced = ?plan.forced, "plan");
        for missed in &plan.missed {
            self.slot.board.notice(missed.clone());
        }
        self.foretell(Predicted::new(&plan.prediction, link, plan.missed));
        self.choices.made_at = Some(Instant::now());
        Tuning { copy_only: Some(plan.copy_only), ..self.tuning(options) }
    }

    /// Chooses again while blocks are copied: what is written most is sent last, and may be other
    /// blocks by then. The prediction stays that of the start.
    pub(super) fn choose_again(&mut self) {
        let due = self.choices.made_at.is_some_and(|at| at.elapsed() >= CHOOSE_AGAIN);
        let copies = |engine: &dray_engine::Source| engine.phase() == Phase::Copy;
        if !due || !self.engine.as_ref().is_some_and(copies) {
            return;
        }
        let Some(options) = self.slot.intent().options else { return };
        self.choices.made_at = Some(Instant::now());
        let (load, _) = self.load(&options);
        let plan = plan::choose(&load, &options.goals(), &self.whole());
        for (ix, copy_only) in plan.copy_only.into_iter().enumerate() {
            self.step(SourceEvent::Choose { image: ImageIndex(ix as u16), copy_only });
        }
    }

    /// Says what will come of the other strategies, as far as that can be known: hot-set's choice is
    /// the operator's, and when a deferred one ends is too.
    pub(super) fn predict(&mut self, options: &Options) {
        let known = options.strategy.traits().resembles.is_none();
        if !self.history.is_empty() {
            return;
        }
        let (load, link) = self.load(options);
        if !known {
            return;
        }
        let goals = options.goals();
        let prediction = plan::predict(options.strategy, &load, &goals, None);
        self.foretell(Predicted::new(&prediction, link, goals.missed_by(&prediction)));
    }

    fn load(&mut self, options: &Options) -> (Load, (f64, LinkFrom)) {
        // What the guest has done up to now is counted too.
        let _ = self.images.heats().count();
        let moved = self.images.moved();
        if self.choices.contents.len() != moved.len() {
            self.choices.contents = forecast::contents(&moved);
        }
        let contents = &self.choices.contents;
        if self.history.is_empty() {
            let at_target = contents.iter().map(Content::bytes_at_target);
            self.report.begins_with(at_target.collect());
        }
        let load = forecast::load(&moved, contents, &options.conditions, options.bandwidth);
        let link = forecast::link(&options.conditions, options.bandwidth);
        (load, link)
    }

    fn whole(&self) -> Vec<BlockRange> {
        self.images.moved().iter().map(|image| BlockRange::whole(image.len)).collect()
    }

    fn foretell(&mut self, predicted: Predicted) {
        if !self.history.is_empty() {
            return;
        }
        if !predicted.converges {
            let why = "the guest writes faster than the migration sends: the migration will not \
                       end by itself";
            self.slot.board.notice(why.to_owned());
        }
        self.report.predict(predicted);
    }
}
