//! Beginning a migration that is prepared: its intent is durable first, then its images are bound to it, then
//! the loop is told.

use super::{Input, SourceSlot};
use dray_api::{ApiResult, MigrationState};
use dray_host::folder::intent::SourceIntent;
use dray_host::folder::log::SOURCE_INTENT;
use dray_host::refusals::{io_error, not_taken};
use dray_host::registry::Registry;
use std::io;

impl SourceSlot {
    /// Begins as the intent says; `check` is asked once the images are bound.
    ///
    /// # Errors
    /// What the store or `check` reports, as the failure of `what`: nothing has begun then, and no restart
    /// begins it.
    pub fn begin(
        &self,
        what: &str,
        registry: &Registry,
        intent: SourceIntent,
        check: impl FnOnce() -> ApiResult<()>,
    ) -> ApiResult<()> {
        self.set_intent(intent.clone()).map_err(|why| io_error(what, why))?;
        let taken = registry.take(intent.migration, intent.epoch, &intent.wanted());
        if let Err(why) = taken.map_err(|why| not_taken(what, why)) {
            self.take_back(intent);
            return Err(why);
        }
        if let Err(why) = check() {
            registry.untake(intent.migration, &intent.wanted());
            self.take_back(intent);
            return Err(why);
        }
        self.board.change(|shown| {
            shown.state = MigrationState::Running;
            shown.error = None;
            shown.started_unix_ms = intent.started_unix_ms;
            if let Some(options) = &intent.options {
                shown.progress.strategy = options.strategy;
                shown.progress.bandwidth = options.bandwidth;
            }
        });
        self.send(Input::Begin);
        Ok(())
    }

    /// This is the intent from now on, durably: whoever changes it later changes this one.
    fn set_intent(&self, new: SourceIntent) -> io::Result<()> {
        let mut intent = self.lock_intent();
        self.folder.take_back_cancelled()?;
        self.folder.file(SOURCE_INTENT).put(&new)?;
        *intent = new;
        Ok(())
    }

    /// What was refused is only prepared. If that cannot be written, a restart finds images that are not
    /// bound, and knows by that.
    fn take_back(&self, intent: SourceIntent) {
        let migration = intent.migration;
        if let Err(why) = self.set_intent(SourceIntent { options: None, ..intent }) {
            tracing::warn!(%migration, %why, "cannot remove the intent of a refused migration");
        }
    }
}
