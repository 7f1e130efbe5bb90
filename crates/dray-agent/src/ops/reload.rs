//! `dray reload`.

use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{ApiResult, Reload, Reloaded};
use std::sync::Arc;
use tokio::task::block_in_place;

impl Answers<Reload> for Arc<Agent> {
    async fn answer(&self, _: Reload, _: Events) -> ApiResult<Reloaded> {
        block_in_place(|| self.reload())
    }
}
