//! The strategy `auto`: the planner chooses the blocks to copy, and its prediction goes into the
//! summary.

use super::SourceLoop;
use crate::api::Predicted;
use crate::forecast;
use crate::migration::intent::Options;
use dray_engine::Tuning;
use dray_engine::plan::{self, Goals};
use dray_types::BlockRange;

impl Options {
    /// What the operator wants, for the planner.
    pub fn goals(&self) -> Goals {
        Goals {
            max_downtime: Some(self.max_downtime_ms as f64 / 1e3),
            max_added_latency: None,
            deadline: self.deadline_ms.map(|ms| ms as f64 / 1e3),
            bandwidth: self.bandwidth.map(|limit| limit.bytes_per_second as f64),
        }
    }
}

impl SourceLoop {
    /// Chooses. A restarted agent may choose other blocks; what it predicts then is not told.
    pub(super) fn auto(&mut self, options: &Options) -> Tuning {
        let images = self.images.moved();
        let whole: Vec<_> = images.iter().map(|image| BlockRange::whole(image.len)).collect();
        let load = forecast::load(&images, &options.way);
        let plan = plan::choose(&load, &options.goals(), &whole);
        let migration = self.slot.board.migration;
        tracing::info!(%migration, prediction = ?plan.prediction, forced = ?plan.forced, "plan");
        for missed in &plan.missed {
            self.slot.board.notice(missed.clone());
        }
        if self.history.is_empty() {
            self.report.predict(Predicted::new(&plan.prediction, plan.missed));
        }
        Tuning { copy_only: Some(plan.copy_only), ..self.tuning(options) }
    }
}
