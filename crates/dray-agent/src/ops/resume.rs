//! `dray resume`: takes up a migration that failed or was cancelled.

use super::migrate::take;
use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{ApiResult, ErrorKind, MigrationState, Refusal, Resume, Started};
use dray_host::refusals::{io_error, not_taken};
use dray_migrate::shown::once_more;
use dray_migrate::source::SourceSlot;
use dray_types::MigrationId;
use std::sync::Arc;
use tokio::task::block_in_place;

impl Answers<Resume> for Arc<Agent> {
    async fn answer(&self, command: Resume, _: Events) -> ApiResult<Started> {
        block_in_place(|| self.resume(&command))
    }
}

impl Agent {
    fn resume(self: &Arc<Self>, command: &Resume) -> ApiResult<Started> {
        let what = "cannot resume the migration";
        let resumable = |slot: &Arc<SourceSlot>| {
            let state = slot.board.read().state;
            matches!(state, MigrationState::Failed | MigrationState::Cancelled)
        };
        let slots = self.sources.all();
        let known: Vec<MigrationId> = slots.iter().map(|slot| slot.board.migration).collect();
        let waiting = slots.iter().filter(|slot| resumable(slot)).map(|slot| slot.board.migration);
        let id = dray_api::text::pick(command.migration.as_ref(), known, waiting)?;
        let old = self.sources.get(id).filter(resumable).ok_or_else(|| {
            Refusal::new(ErrorKind::Conflict, what, "it has neither failed nor been cancelled")
        })?;
        let intent = old.intent();
        if intent.vm.is_some() {
            // The disks went back to QEMU and the waiting QEMU has ended: both are made anew.
            let why = "only a migration of images can be continued, not one of a vm";
            return Err(Refusal::new(ErrorKind::Conflict, what, why).hint(once_more(true)));
        }
        if !old.is_kept() {
            let why = "the target has kept no blocks of it";
            return Err(Refusal::new(ErrorKind::NotFound, what, why).hint("migrate anew"));
        }
        // What was kept is of the images as they were then.
        let still = self.registry.may_take(intent.migration, intent.epoch, &intent.wanted());
        still.map_err(|why| not_taken(what, why))?;
        let mut prepared = intent.clone();
        prepared.options = None;
        self.session_settings(&prepared.peer)?;
        let slot = self.begin_source(prepared).map_err(|why| io_error(what, why))?;
        take(what, &slot)?;
        let begun = self.start(what, &slot, intent);
        if begun.is_err() {
            slot.board.change(|shown| shown.state = MigrationState::Prepared);
        }
        begun
    }
}
