//! `dray limit`: how much a migration may send.

use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{ApiResult, Limit, Limited};
use std::sync::Arc;
use tokio::task::block_in_place;

impl Answers<Limit> for Arc<Agent> {
    async fn answer(&self, command: Limit, _: Events) -> ApiResult<Limited> {
        let slot = self.pick_source(command.migration.as_ref())?;
        let kept = block_in_place(|| slot.set_limit(command.bandwidth));
        let not_kept = kept.err().map(|why| why.to_string());
        let (migration, bandwidth) = (slot.board.migration, command.bandwidth);
        Ok(Limited { migration, bandwidth, not_kept })
    }
}
