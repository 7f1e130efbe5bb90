//! `dray unstall`: ends the stall of guest I/O that waits for a lost source.

use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{ApiResult, ErrorKind, Refusal, Unstall, Unstalled};
use dray_host::record::CopyState;
use dray_host::registry::Entry;
use dray_types::{BLOCK_SIZE, ByteSize};
use std::sync::Arc;
use tokio::task::block_in_place;

impl Answers<Unstall> for Arc<Agent> {
    async fn answer(&self, command: Unstall, _: Events) -> ApiResult<Unstalled> {
        block_in_place(|| self.unstall(&command))
    }
}

impl Agent {
    /// Whether guests may be served from it. While a migration of it is open its loop knows that, and
    /// the record follows; one without a loop vouches for nothing.
    fn is_owned(&self, entry: &Entry) -> bool {
        let record = entry.record();
        let vouched = record.migration.is_none_or(|migration| match self.sources.get(migration) {
            Some(source) => source.owns(),
            None => self.targets.get(migration).is_some_and(|slot| slot.is_exposed()),
        });
        record.state == CopyState::Owner && vouched
    }

    fn unstall(&self, command: &Unstall) -> ApiResult<Unstalled> {
        let entry = self.image(&command.image)?;
        let missing = entry.disk.missing_count() * BLOCK_SIZE;
        let waiting = entry.disk.waiting_ranges().len() as u64;
        if command.fail {
            entry.disk.fail_parked();
        } else if self.is_owned(&entry) {
            // The disk of an owner is not closed, and one that is handed over at this moment stays so.
            entry.disk.wait_again();
        } else {
            let what = format!("cannot let the guest of image '{}' continue", command.image);
            let why = "this host does not own it, or does not know yet whether it does";
            return Err(Refusal::new(ErrorKind::Conflict, what, why)
                .hint("see `dray status`; if the other host is lost, see `dray claim`"));
        }
        Ok(Unstalled {
            image: command.image.clone(),
            failed: command.fail,
            waiting,
            bytes_missing: ByteSize(missing),
        })
    }
}
