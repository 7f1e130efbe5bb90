//! `dray status`: the migrations that this host takes part in.

use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{ApiResult, MigrationStatus, Status, Subject, text};
use dray_host::folder::intent::SourceIntent;
use std::sync::Arc;

impl Answers<Status> for Arc<Agent> {
    async fn answer(&self, command: Status, _: Events) -> ApiResult<Vec<MigrationStatus>> {
        let mut all = self.waiting();
        if let Some(named) = &command.migration {
            let mut known: Vec<_> = all.iter().map(|one| one.migration).collect();
            known.extend(self.boards().iter().map(|board| board.migration));
            let id = text::pick(Some(named), known, Vec::new())?;
            if let Some(waits) = all.into_iter().find(|one| one.migration == id) {
                return Ok(vec![waits]);
            }
            return Ok(vec![self.pick(Some(named))?.status()]);
        }
        all.extend(self.boards().iter().map(|board| board.status()));
        for shown in &mut all {
            shown.subject = self.sources.get(shown.migration).map(|slot| subject(&slot.intent()));
        }
        all.sort_by_key(|status| std::cmp::Reverse(status.started_unix_ms));
        Ok(all)
    }
}

/// What a migration moves, in the words in which it is asked for.
fn subject(intent: &SourceIntent) -> Subject {
    match &intent.vm {
        Some(vm) => Subject::Vm { qmp: vm.qmp.clone() },
        None => Subject::Images {
            names: intent.images.iter().map(|image| image.name.clone()).collect(),
        },
    }
}
