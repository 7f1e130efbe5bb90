//! `info`: who is there, and what does not work just now.

use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{API_VERSION, AgentInfo, ApiResult, Info};
use std::sync::Arc;

impl Answers<Info> for Arc<Agent> {
    async fn answer(&self, _: Info, _: Events) -> ApiResult<AgentInfo> {
        Ok(AgentInfo {
            host: self.config.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            api_version: API_VERSION,
            pid: std::process::id(),
            peers: self.config.peers.all().iter().map(|peer| peer.name.clone()).collect(),
            indexed_bytes: self.reuse.indexed_bytes(),
            troubles: self.troubles.all(),
        })
    }
}
