//! The local API's commands: each checks what was asked, does it or starts it, and answers in the
//! API's own words.

mod asking;
mod backfill;
mod backup;
mod bases;
mod batch;
mod claim;
mod control;
mod ended;
mod flatten;
pub mod images;
mod lineage;
mod migrate;
mod moved;
mod plan;
mod prepare;
mod record;
mod released;
mod resize;
mod seed;
mod settle;
pub(crate) mod splice;
mod survey;

pub(crate) use control::outcome;
pub(crate) use migrate::Together;

use crate::agent::Agent;
use crate::api::{AgentApi, Events};
use dray_api::{
    AgentInfo, ApiResult, Backfilling, BatchStatus, Cancelled, Claimed, ImageStatus, Limited,
    LineageStatus, MigrationStatus, Prepared, Spliced, Started, Summary, Unstalled,
};
use std::sync::Arc;
use tokio::task::block_in_place;

/// The agent as the local API sees it. Commands that wait for a file system leave their thread to others.
pub struct Operator(pub Arc<Agent>);

impl AgentApi for Operator {
    async fn info(&self) -> ApiResult<AgentInfo> {
        Ok(AgentInfo {
            host: self.0.config.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            api_version: dray_api::API_VERSION,
            pid: std::process::id(),
            indexed_bytes: self.0.reuse.indexed_bytes(),
            troubles: self.0.troubles.all(),
        })
    }

    async fn migrate(&self, command: dray_api::Migrate) -> ApiResult<Started> {
        self.0.migrate(command, None).await
    }

    async fn prepare(&self, command: dray_api::Prepare) -> ApiResult<Prepared> {
        self.0.prepare(command).await
    }

    async fn status(&self, command: dray_api::Status) -> ApiResult<Vec<MigrationStatus>> {
        self.0.status(&command)
    }

    async fn watch(&self, command: dray_api::Watch, events: Events) -> ApiResult<Summary> {
        self.0.watch(&command, &events).await
    }

    async fn cancel(&self, command: dray_api::Cancel) -> ApiResult<Cancelled> {
        self.0.cancel(&command).await
    }

    async fn resume(&self, command: dray_api::Resume) -> ApiResult<Started> {
        block_in_place(|| self.0.resume(&command))
    }

    async fn limit(&self, command: dray_api::Limit) -> ApiResult<Limited> {
        block_in_place(|| self.0.limit(&command))
    }

    async fn images(&self) -> ApiResult<Vec<ImageStatus>> {
        Ok(block_in_place(|| self.0.list_images()))
    }

    async fn image_add(&self, command: dray_api::ImageAdd) -> ApiResult<ImageStatus> {
        block_in_place(|| self.0.image_add(command))
    }

    async fn image_remove(&self, command: dray_api::ImageRemove) -> ApiResult<ImageStatus> {
        block_in_place(|| self.0.image_remove(&command))
    }

    async fn adopt(&self, command: dray_api::Adopt) -> ApiResult<Spliced> {
        self.0.adopt(&command).await
    }

    async fn release(&self, command: dray_api::Release) -> ApiResult<Spliced> {
        self.0.release(&command).await
    }

    async fn resize(&self, command: dray_api::Resize) -> ApiResult<ImageStatus> {
        self.0.resize(&command).await
    }

    async fn claim(&self, command: dray_api::Claim) -> ApiResult<Claimed> {
        block_in_place(|| self.0.claim(&command))
    }

    async fn unstall(&self, command: dray_api::Unstall) -> ApiResult<Unstalled> {
        block_in_place(|| self.0.unstall(&command))
    }

    async fn plan(&self, command: dray_api::Plan) -> ApiResult<dray_api::Planned> {
        self.0.predict(command).await
    }

    async fn record(
        &self,
        command: dray_api::Record,
        events: Events,
    ) -> ApiResult<dray_api::Recorded> {
        self.0.record(&command, &events).await
    }

    async fn seed(&self, command: dray_api::Seed, events: Events) -> ApiResult<dray_api::Seeded> {
        self.0.seed(command, &events).await
    }

    async fn backfill(&self, command: dray_api::Backfill) -> ApiResult<Backfilling> {
        self.0.backfill(&command).await
    }

    async fn batch(&self, command: dray_api::Batch) -> ApiResult<BatchStatus> {
        block_in_place(|| self.0.begin_batch(command))
    }

    async fn batches(&self) -> ApiResult<Vec<BatchStatus>> {
        Ok(self.0.list_batches())
    }

    async fn batch_watch(
        &self,
        command: dray_api::BatchWatch,
        events: Events,
    ) -> ApiResult<BatchStatus> {
        self.0.watch_batch(&command, &events).await
    }

    async fn batch_cancel(&self, command: dray_api::BatchCancel) -> ApiResult<BatchStatus> {
        self.0.cancel_batch(&command).await
    }

    async fn batch_limit(&self, command: dray_api::BatchLimit) -> ApiResult<BatchStatus> {
        self.0.limit_batch(&command)
    }

    async fn lineage(&self, command: dray_api::Lineage) -> ApiResult<LineageStatus> {
        self.0.lineage(&command).await
    }

    async fn backup(
        &self,
        command: dray_api::Backup,
        events: Events,
    ) -> ApiResult<dray_api::BackupDone> {
        self.0.backup(command, &events).await
    }

    async fn backup_cancel(
        &self,
        command: dray_api::BackupCancel,
    ) -> ApiResult<dray_api::BackupProgress> {
        self.0.backup_cancel(&command)
    }

    async fn backups(&self, command: dray_api::Backups) -> ApiResult<dray_api::BackupListing> {
        self.0.backups(command).await
    }

    async fn backup_init(
        &self,
        command: dray_api::Repository,
    ) -> ApiResult<dray_api::RepositoryMade> {
        self.0.backup_init(command).await
    }

    async fn backup_prune(
        &self,
        command: dray_api::BackupPrune,
    ) -> ApiResult<dray_api::BackupPruned> {
        self.0.backup_prune(command).await
    }

    async fn backup_gc(
        &self,
        command: dray_api::Repository,
    ) -> ApiResult<dray_api::BackupCollected> {
        self.0.backup_gc(command).await
    }

    async fn backup_verify(
        &self,
        command: dray_api::BackupVerify,
        events: Events,
    ) -> ApiResult<dray_api::BackupVerified> {
        self.0.backup_verify(command, &events).await
    }

    async fn restore(
        &self,
        command: dray_api::Restore,
        events: Events,
    ) -> ApiResult<dray_api::Restored> {
        self.0.restore(command, &events).await
    }
}
