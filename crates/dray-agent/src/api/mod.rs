//! The agent's end of the local API: [`AgentApi`] is what the agent implements, [`server`] listens and
//! dispatches. Nothing here knows how a migration works.

pub mod server;

pub use server::{Server, SocketAccess};

use dray_api::{
    Adopt, AgentInfo, ApiResult, Backfill, Backfilling, Backup, BackupCancel, BackupCollected,
    BackupDone, BackupListing, BackupProgress, BackupPrune, BackupPruned, BackupVerified,
    BackupVerify, Backups, Batch, BatchCancel, BatchLimit, BatchStatus, BatchWatch, Cancel,
    Cancelled, Claim, Claimed, Event, ImageAdd, ImageRemove, ImageStatus, Limit, Limited, Lineage,
    LineageStatus, Migrate, MigrationStatus, Plan, Planned, Prepare, Prepared, Record, Recorded,
    Release, Repository, RepositoryMade, Resize, Restore, Restored, Resume, Seed, Seeded, Spliced,
    Started, Status, Summary, Unstall, Unstalled, Watch,
};
use std::future::Future;
use tokio::sync::mpsc;

/// Where a watching command sends its events. A send fails when the client has gone; the watch
/// should end then, the migration must not.
pub type Events = mpsc::Sender<Event>;

/// What the agent can be asked to do: one method a command.
///
/// `dray migrate` without `--detach` is [`migrate`](Self::migrate) followed by
/// [`watch`](Self::watch) of what it started. A watch is dropped when its client hangs up, so the
/// migration itself runs in a task of its own; every other method is run to its end.
pub trait AgentApi: Send + Sync + 'static {
    /// Who is there.
    fn info(&self) -> impl Future<Output = ApiResult<AgentInfo>> + Send;

    /// Checks everything that can be checked at once, starts a migration (or takes up the one
    /// that `prepare` made) and returns as soon as its intent is durable.
    fn migrate(&self, command: Migrate) -> impl Future<Output = ApiResult<Started>> + Send;

    /// Makes the exports at the target and says how to start the incoming QEMU.
    fn prepare(&self, command: Prepare) -> impl Future<Output = ApiResult<Prepared>> + Send;

    /// One migration, or all that the agent knows, the newest first.
    fn status(
        &self,
        command: Status,
    ) -> impl Future<Output = ApiResult<Vec<MigrationStatus>>> + Send;

    /// Follows a migration to its end, sending at least one progress event a second. A migration
    /// that has ended already answers at once. A failed or cancelled one answers with its error.
    fn watch(
        &self,
        command: Watch,
        events: Events,
    ) -> impl Future<Output = ApiResult<Summary>> + Send;

    /// Stops a migration before its handover; the guest goes on at the source.
    fn cancel(&self, command: Cancel) -> impl Future<Output = ApiResult<Cancelled>> + Send;

    /// Takes up a migration that was interrupted.
    fn resume(&self, command: Resume) -> impl Future<Output = ApiResult<Started>> + Send;

    /// Changes the bandwidth limit of a running migration.
    fn limit(&self, command: Limit) -> impl Future<Output = ApiResult<Limited>> + Send;

    /// Every image the agent knows.
    fn images(&self) -> impl Future<Output = ApiResult<Vec<ImageStatus>>> + Send;

    /// Serves a file or block device as an image.
    fn image_add(&self, command: ImageAdd) -> impl Future<Output = ApiResult<ImageStatus>> + Send;

    /// Stops serving an image and forgets it; its file stays.
    fn image_remove(
        &self,
        command: ImageRemove,
    ) -> impl Future<Output = ApiResult<ImageStatus>> + Send;

    /// Splices a running VM's disks under dray.
    fn adopt(&self, command: Adopt) -> impl Future<Output = ApiResult<Spliced>> + Send;

    /// Hands a running VM's disks back to its QEMU.
    fn release(&self, command: Release) -> impl Future<Output = ApiResult<Spliced>> + Send;

    /// Grows an image.
    fn resize(&self, command: Resize) -> impl Future<Output = ApiResult<ImageStatus>> + Send;

    /// Takes ownership of an image whose owner is gone for good. Stands outside I1.
    fn claim(&self, command: Claim) -> impl Future<Output = ApiResult<Claimed>> + Send;

    /// Ends the stall of guest I/O that waits for a lost source.
    fn unstall(&self, command: Unstall) -> impl Future<Output = ApiResult<Unstalled>> + Send;

    /// Predicts what a migration would take; nothing moves.
    fn plan(&self, command: Plan) -> impl Future<Output = ApiResult<Planned>> + Send;

    /// Tells what guests do to an image until the recording ends. Dropped when its client hangs up.
    fn record(
        &self,
        command: Record,
        events: Events,
    ) -> impl Future<Output = ApiResult<Recorded>> + Send;

    /// Starts, pauses or paces Backfill; this host is the target.
    fn backfill(&self, command: Backfill) -> impl Future<Output = ApiResult<Backfilling>> + Send;

    /// Has a target read images from backups. Dropped when its client hangs up.
    fn seed(&self, command: Seed, events: Events)
    -> impl Future<Output = ApiResult<Seeded>> + Send;

    /// Makes a batch of migrations durable and goes on with it in the background.
    fn batch(&self, command: Batch) -> impl Future<Output = ApiResult<BatchStatus>> + Send;

    /// Every batch that the agent knows, the newest first.
    fn batches(&self) -> impl Future<Output = ApiResult<Vec<BatchStatus>>> + Send;

    /// Follows a batch to its end, sending at least one event a second. That some of it failed is no
    /// error: the answer says which.
    fn batch_watch(
        &self,
        command: BatchWatch,
        events: Events,
    ) -> impl Future<Output = ApiResult<BatchStatus>> + Send;

    /// Begins nothing more of a batch and cancels what is before its handover.
    fn batch_cancel(
        &self,
        command: BatchCancel,
    ) -> impl Future<Output = ApiResult<BatchStatus>> + Send;

    /// Changes what a batch may send.
    fn batch_limit(
        &self,
        command: BatchLimit,
    ) -> impl Future<Output = ApiResult<BatchStatus>> + Send;

    /// The generations of an image, as this host knows them.
    fn lineage(&self, command: Lineage) -> impl Future<Output = ApiResult<LineageStatus>> + Send;

    /// Makes a backup of images that this host serves. Ends when its client hangs up.
    fn backup(
        &self,
        command: Backup,
        events: Events,
    ) -> impl Future<Output = ApiResult<BackupDone>> + Send;

    /// Ends a backup that is under way.
    fn backup_cancel(
        &self,
        command: BackupCancel,
    ) -> impl Future<Output = ApiResult<BackupProgress>> + Send;

    /// Lists destinations, or the backups in a repository.
    fn backups(&self, command: Backups) -> impl Future<Output = ApiResult<BackupListing>> + Send;

    /// Makes a repository.
    fn backup_init(
        &self,
        command: Repository,
    ) -> impl Future<Output = ApiResult<RepositoryMade>> + Send;

    /// Removes backups.
    fn backup_prune(
        &self,
        command: BackupPrune,
    ) -> impl Future<Output = ApiResult<BackupPruned>> + Send;

    /// Removes content that no backup needs.
    fn backup_gc(
        &self,
        command: Repository,
    ) -> impl Future<Output = ApiResult<BackupCollected>> + Send;

    /// Checks the backups in a repository. Ends when its client hangs up.
    fn backup_verify(
        &self,
        command: BackupVerify,
        events: Events,
    ) -> impl Future<Output = ApiResult<BackupVerified>> + Send;

    /// Makes an image of a backup. Ends when its client hangs up.
    fn restore(
        &self,
        command: Restore,
        events: Events,
    ) -> impl Future<Output = ApiResult<Restored>> + Send;
}
