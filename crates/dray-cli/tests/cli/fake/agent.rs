//! Remembers what it was asked and answers with what is ready.

use super::ID;
use super::canned::*;
use dray_agent::api::{AgentApi, Events};
use dray_api::*;
use dray_types::{ByteSize, Epoch, GenerationId, ImageId, MigrationId};
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

/// The agent behind the socket.
pub struct Agent {
    pub seen: Arc<Mutex<Vec<Value>>>,
}

/// A name of the form `fail-KIND` stands for an error of that kind.
fn asked_to_fail(name: &str) -> ApiResult<()> {
    let Some(kind) = name.strip_prefix("fail-") else { return Ok(()) };
    let kind: ErrorKind = serde_json::from_value(json!(kind)).expect("a kind of error");
    Err(Refusal::new(kind, format!("cannot do this to {name}"), "the test asked for it")
        .hint("ask for something else"))
}

impl Agent {
    fn saw(&self, name: &str, command: &impl Serialize) {
        let value = json!({ name: command });
        self.seen.lock().expect("no test has panicked here").push(value);
    }

    fn spliced(&self) -> Spliced {
        let disk = |device: &str, path: &str, ms| SplicedDisk {
            device: device.into(),
            node: format!("{device}-file"),
            image: format!("vm1-{device}"),
            path: path.into(),
            ms,
        };
        let disks = vec![disk("disk0", "/srv/vm/a.raw", 24.7), disk("disk1", "/srv/vm/b", 2.0)];
        Spliced { disks }
    }
}

impl AgentApi for Agent {
    async fn info(&self) -> ApiResult<AgentInfo> {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Ok(AgentInfo {
            host: "hosta".into(),
            version,
            api_version: API_VERSION,
            pid: 1,
            indexed_bytes: 0,
            troubles: Vec::new(),
        })
    }

    async fn migrate(&self, command: Migrate) -> ApiResult<Started> {
        self.saw("migrate", &command);
        asked_to_fail(&command.to)?;
        Ok(Started { migration: ID })
    }

    async fn prepare(&self, command: Prepare) -> ApiResult<Prepared> {
        self.saw("prepare", &command);
        let image = |name: &str, device: &str| PreparedImage {
            image: name.into(),
            device: Some(device.into()),
            export: name.into(),
            in_place: false,
            blockdev: vec![format!(
                r#"{{"driver":"nbd","node-name":"{device}","export":"{name}"}}"#
            )],
        };
        Ok(Prepared {
            migration: ID,
            to: command.to,
            nbd_socket: "/run/dray/nbd.sock".into(),
            images: vec![image("vm1-root", "disk0"), image("vm1-data", "disk1")],
            qemu_args: ["-S", "-incoming", "defer"].map(str::to_owned).to_vec(),
        })
    }

    async fn seed(&self, command: Seed, events: Events) -> ApiResult<Seeded> {
        self.saw("seed", &command);
        if command.to != "hostc" {
            return Ok(Seeded { to: command.to, images: Vec::new() });
        }
        let progress = SeedProgress { bytes_done: 1 << 30, bytes_total: 3 << 30 };
        let _ = events.send(Event::Seeding(progress)).await;
        let image = |name: &str, generation, notes: &[&str]| SeededImage {
            image: name.into(),
            generation,
            given: generation.map(|_| ("nas".to_owned(), 3 << 30)).into_iter().collect(),
            missing_bytes: generation.map_or(0, |_| 4 << 20),
            notes: notes.iter().map(|note| (*note).to_owned()).collect(),
        };
        let root = image("vm1-root", Some(7), &["offsite is left alone: connection refused"]);
        let data = image("vm1-data", None, &["nas: its lineage has diverged"]);
        Ok(Seeded { to: command.to, images: vec![root, data] })
    }

    async fn status(&self, command: Status) -> ApiResult<Vec<MigrationStatus>> {
        self.saw("status", &command);
        let mut failed = running();
        failed.migration = MigrationId(ID.0 + (1 << 120));
        failed.role = Role::Target;
        failed.state = MigrationState::Failed;
        failed.error = Some(
            Refusal::new(ErrorKind::NoSpace, "cannot write vm1-root", "no space left on device")
                .hint("make room in pool fast, then `dray resume`"),
        );
        let mut prepared = running();
        prepared.migration = MigrationId(0x5100_0000_0000_0000_0000_0000_0000_0001);
        (prepared.state, prepared.vm) = (MigrationState::Prepared, Some("vm5".into()));
        prepared.progress = Progress::new(prepared.migration, Strategy::Hybrid);
        prepared.subject = Some(Subject::Vm { qmp: "/run/vm5.qmp".into() });
        let mut waiting = prepared.clone();
        waiting.migration = MigrationId(0x5200_0000_0000_0000_0000_0000_0000_0001);
        (waiting.role, waiting.vm, waiting.subject) = (Role::Target, None, None);
        waiting.waiting_seconds = Some(720);
        let mut promised = waiting.clone();
        promised.migration = MigrationId(0x5300_0000_0000_0000_0000_0000_0000_0001);
        promised.state = MigrationState::Running;
        promised.progress.phase = Phase::Handover;
        promised.error = Some(
            Refusal::new(ErrorKind::Peer, "waits for hostb", "connection refused")
                .hint("if hostb is gone for good: `dray claim vm5-root --source-is-fenced` here"),
        );
        let all = [running(), failed, prepared, waiting, promised];
        let Some(named) = command.migration else { return Ok(all.to_vec()) };
        let id = named.resolve(all.iter().map(|one| one.migration))?;
        Ok(all.into_iter().filter(|one| one.migration == id).collect())
    }

    async fn watch(&self, command: Watch, events: Events) -> ApiResult<Summary> {
        self.saw("watch", &command);
        let named = command.migration.map_or_else(String::new, |named| named.0);
        asked_to_fail(&named)?;
        let mut now = progress();
        let _ = events.send(Event::Progress(now.clone())).await;
        if named == "endless" {
            std::future::pending::<()>().await;
        }
        let _ = events.send(Event::Notice { text: "the link is back".into() }).await;
        now.phase = Phase::Backfill;
        now.elapsed_seconds = 25.0;
        now.total.bytes_missing = 48 << 20;
        now.total.dirty_blocks = 0;
        now.remote_reads = 12;
        now.downtime_ms = Some(38.2);
        let _ = events.send(Event::Progress(now)).await;
        Ok(summary())
    }

    async fn cancel(&self, command: Cancel) -> ApiResult<Cancelled> {
        self.saw("cancel", &command);
        let bytes_kept = if command.discard { 0 } else { 1 << 30 };
        let target_was_away = command.migration == Some(text::MigrationRef("away".to_owned()));
        let at_target = command.migration == Some(text::MigrationRef("here".to_owned()));
        Ok(Cancelled { bytes_kept, target_was_away, at_target, ..Cancelled::of(ID) })
    }

    async fn resume(&self, command: Resume) -> ApiResult<Started> {
        self.saw("resume", &command);
        Ok(Started { migration: ID })
    }

    async fn limit(&self, command: Limit) -> ApiResult<Limited> {
        self.saw("limit", &command);
        let full = command.migration == Some(text::MigrationRef("full".to_owned()));
        let not_kept = full.then(|| "No space left on device".to_owned());
        Ok(Limited { migration: ID, bandwidth: command.bandwidth, not_kept })
    }

    async fn images(&self) -> ApiResult<Vec<ImageStatus>> {
        Ok(images())
    }

    async fn image_add(&self, command: ImageAdd) -> ApiResult<ImageStatus> {
        self.saw("image-add", &command);
        Ok(ImageStatus { name: command.name, path: command.path, ..images().remove(0) })
    }

    async fn image_remove(&self, command: ImageRemove) -> ApiResult<ImageStatus> {
        self.saw("image-remove", &command);
        Ok(ImageStatus { name: command.name, ..images().remove(0) })
    }

    async fn adopt(&self, command: Adopt) -> ApiResult<Spliced> {
        self.saw("adopt", &command);
        Ok(self.spliced())
    }

    async fn release(&self, command: Release) -> ApiResult<Spliced> {
        self.saw("release", &command);
        Ok(self.spliced())
    }

    async fn resize(&self, command: Resize) -> ApiResult<ImageStatus> {
        self.saw("resize", &command);
        Ok(ImageStatus { name: command.image, size: command.size.0, ..images().remove(0) })
    }

    async fn claim(&self, command: Claim) -> ApiResult<Claimed> {
        self.saw("claim", &command);
        let lost = (0..10).map(|at| ByteRange { start: at << 20, len: 65536 }).collect();
        Ok(Claimed {
            image: command.image,
            epoch: Epoch(4),
            id: ImageId(8),
            writes_may_be_lost: true,
            bytes_lost: 655_360,
            lost,
            others: vec!["b".to_owned()],
        })
    }

    async fn plan(&self, command: Plan) -> ApiResult<Planned> {
        self.saw("plan", &command);
        Ok(planned(command))
    }

    async fn record(&self, command: Record, events: Events) -> ApiResult<Recorded> {
        self.saw("record", &command);
        asked_to_fail(&command.image)?;
        let accesses = vec![
            AccessLine(1_000_000, AccessKind::W, 4096, 512),
            AccessLine(2_500_000, AccessKind::R, 0, 65_536),
        ];
        let batch = AccessBatch { accesses, until_ns: 3_000_000_000, missed: 7 };
        events.send(Event::Accesses(batch)).await.expect("the client listens");
        Ok(Recorded {
            image: command.image,
            bytes: 8 << 30,
            accesses: 2,
            missed: 7,
            duration_ns: 3_000_000_000,
            end: RecordEnd::Duration,
        })
    }

    async fn backfill(&self, command: Backfill) -> ApiResult<Backfilling> {
        self.saw("backfill", &command);
        let bandwidth = match command.action {
            BackfillAction::Rate(limit) => limit,
            _ => None,
        };
        let paused = command.action == BackfillAction::Pause;
        Ok(Backfilling { migration: ID, paused, bandwidth, bytes_missing: 48 << 20 })
    }

    async fn batch(&self, command: Batch) -> ApiResult<BatchStatus> {
        self.saw("batch", &command);
        Ok(batch())
    }

    async fn batches(&self) -> ApiResult<Vec<BatchStatus>> {
        self.saw("batches", &());
        Ok(vec![batch(), batch_ended()])
    }

    async fn batch_watch(&self, command: BatchWatch, events: Events) -> ApiResult<BatchStatus> {
        // A batch that is begun is watched, which is no request of its own.
        let named = command.batch.as_ref().map_or_else(String::new, |named| named.0.clone());
        if named != batch().batch.to_string() {
            self.saw("batch-watch", &command);
        }
        let _ = events.send(Event::Batch(Box::new(batch()))).await;
        if named == "endless" {
            std::future::pending::<()>().await;
        }
        Ok(batch_ended())
    }

    async fn batch_cancel(&self, command: BatchCancel) -> ApiResult<BatchStatus> {
        self.saw("batch-cancel", &command);
        Ok(batch_ended())
    }

    async fn batch_limit(&self, command: BatchLimit) -> ApiResult<BatchStatus> {
        self.saw("batch-limit", &command);
        Ok(BatchStatus { budget: command.budget, ..batch() })
    }

    async fn lineage(&self, command: Lineage) -> ApiResult<LineageStatus> {
        self.saw("lineage", &command);
        Ok(line(command.image))
    }

    async fn backup(&self, command: Backup, events: Events) -> ApiResult<BackupDone> {
        self.saw("backup", &command);
        let image = |name: &str| ImageAmount {
            image: name.to_owned(),
            bytes_total: 64 << 20,
            bytes_done: 16 << 20,
            stored_bytes: 1 << 20,
        };
        let images = command.images.iter().map(|name| image(name)).collect();
        let progress = BackupProgress { to: command.to.clone(), elapsed_seconds: 2.0, images };
        let _ = events.send(Event::Backup(progress)).await;
        let at = |number| GenerationStatus { number, id: GenerationId(5 << 120) };
        let done = |name: &String| BackedUp {
            image: name.clone(),
            generation: at(4),
            parent: (!command.full).then(|| at(3)),
            full_because: command.full.then(|| "it was asked for".to_owned()),
            size: 8 << 30,
            changed_bytes: 64 << 20,
            stored_bytes: 3 << 20,
            kept_aside_bytes: 8192,
        };
        Ok(BackupDone {
            images: command.images.iter().map(done).collect(),
            to: command.to,
            taken_unix_ms: 1_000,
            quiet_ms: 1.25,
            seconds: 12.5,
            consistency: Consistency::Crash,
            pruned: u64::from(command.keep_last.unwrap_or(0)),
        })
    }

    async fn backup_prune(&self, command: BackupPrune) -> ApiResult<BackupPruned> {
        self.saw("backup-prune", &command);
        Ok(BackupPruned { dry_run: command.dry_run, kept: 9, removed: Vec::new() })
    }

    async fn backup_gc(&self, command: Repository) -> ApiResult<BackupCollected> {
        self.saw("backup-gc", &command);
        Ok(BackupCollected {
            removed_bytes: 3 << 30,
            condemned_bytes: 16 << 20,
            fenced_writers: 1,
            ..BackupCollected::default()
        })
    }

    async fn backup_cancel(&self, command: BackupCancel) -> ApiResult<BackupProgress> {
        self.saw("backup-cancel", &command);
        asked_to_fail(&command.image)?;
        Ok(BackupProgress { to: "nas".to_owned(), ..BackupProgress::default() })
    }

    async fn backups(&self, command: Backups) -> ApiResult<BackupListing> {
        self.saw("backups", &command);
        Ok(if command.repository.is_none() { destinations() } else { backups_there() })
    }

    async fn backup_init(&self, command: Repository) -> ApiResult<RepositoryMade> {
        self.saw("backup-init", &command);
        Ok(RepositoryMade { encrypted: command.key_file.is_some(), at: command.at })
    }

    async fn backup_verify(&self, command: BackupVerify, _: Events) -> ApiResult<BackupVerified> {
        self.saw("backup-verify", &command);
        let faulty = command.repository.at == "damaged";
        let damaged = faulty.then(|| "vm1-root generation 3: piece 7: it is gone".to_owned());
        let bytes_read = if command.read_data { 3 << 30 } else { 0 };
        Ok(BackupVerified { backups: 2, bytes_read, damaged: damaged.into_iter().collect() })
    }

    async fn restore(&self, command: Restore, _: Events) -> ApiResult<Restored> {
        self.saw("restore", &command);
        Ok(Restored {
            path: format!("/srv/vm/{}", command.name).into(),
            image: command.name,
            generation: GenerationStatus { number: 4, id: GenerationId(5 << 120) },
            of: command.image,
            size: 8 << 30,
            written_bytes: 3 << 30,
            seconds: 40.0,
        })
    }

    async fn unstall(&self, command: Unstall) -> ApiResult<Unstalled> {
        self.saw("unstall", &command);
        asked_to_fail(&command.image)?;
        Ok(Unstalled {
            image: command.image,
            failed: command.fail,
            waiting: 3,
            bytes_missing: ByteSize(48 << 20),
        })
    }
}
