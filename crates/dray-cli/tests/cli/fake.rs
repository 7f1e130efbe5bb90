//! An agent that answers every command with a canned result and remembers what it was asked.

use dray_agent::api::*;
use dray_types::{BatchId, BitRate, ByteSize, Epoch, GenerationId, ImageId, MigrationId};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::{Command as Process, Output, Stdio};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// The migration in every canned answer.
pub const ID: MigrationId = MigrationId(0x4f1c_0000_0000_0000_0000_0000_0000_0001);

fn now_unix_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.expect("it is after 1970").as_millis() as u64
}

/// A running fake agent; it ends with the value.
pub struct Fake {
    dir: TempDir,
    seen: Arc<Mutex<Vec<Value>>>,
    _runtime: tokio::runtime::Runtime,
}

/// What a run of `dray` left behind.
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Fake {
    /// Starts one on a socket of its own.
    pub fn start() -> Self {
        let dir = TempDir::with_prefix("dray-cli-").expect("a temporary directory");
        let seen = Arc::new(Mutex::new(Vec::new()));
        let agent = Arc::new(Agent { seen: seen.clone() });
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let path = dir.path().join("api.sock");
        let server = {
            let _inside = runtime.enter();
            Server::bind(&path, SocketAccess::default()).expect("the socket can be bound")
        };
        runtime.spawn(async move { server.serve(agent).await });
        Self { dir, seen, _runtime: runtime }
    }

    /// Its socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("api.sock")
    }

    /// The commands it got, oldest first, as JSON.
    pub fn seen(&self) -> Vec<Value> {
        self.seen.lock().expect("no test has panicked here").clone()
    }

    /// `dray` with this agent's socket, ready to be given arguments.
    pub fn command(&self, args: &[&str]) -> Process {
        let mut process = dray(args);
        process.env("DRAY_SOCKET", self.socket());
        process
    }

    /// Runs `dray` to its end.
    pub fn run(&self, args: &[&str]) -> Ran {
        finish(self.command(args).output().expect("dray can be started"))
    }
}

/// `dray`, away from this terminal and its settings.
pub fn dray(args: &[&str]) -> Process {
    let mut process = Process::new(env!("CARGO_BIN_EXE_dray"));
    process.args(args).stdin(Stdio::null()).env_remove("DRAY_SOCKET").env_remove("COLUMNS");
    process
}

/// What the run left behind, as text.
pub fn finish(output: Output) -> Ran {
    let text = |bytes| String::from_utf8(bytes).expect("output is UTF-8");
    Ran {
        code: output.status.code().expect("dray ended by itself"),
        out: text(output.stdout),
        err: text(output.stderr),
    }
}

/// Two images, half way through the copy.
pub fn progress() -> Progress {
    let image = |name: &str, total: u64| ImageProgress {
        image: name.to_owned(),
        amounts: Amounts {
            bytes_total: total,
            bytes_done: total / 2,
            bytes_missing: 0,
            dirty_blocks: 6144,
        },
    };
    let images = vec![image("vm1-root", 2 << 30), image("vm1-data", 1 << 30)];
    let total = images.iter().map(|image| image.amounts).fold(Amounts::default(), Amounts::plus);
    Progress {
        phase: Phase::Copy,
        elapsed_seconds: 12.3,
        total,
        images,
        wire_bytes: 1_610_612_736,
        rate: 118 << 20,
        dirty_rate: 40 << 20,
        round: 1,
        seconds_left: Some(14.0),
        downtime_ms: Some(41.5),
        ..Progress::new(ID, Strategy::Hybrid)
    }
}

/// How that migration ends.
pub fn summary() -> Summary {
    let image = |name: &str, bytes, sent, twice| ImageSummary {
        image: name.to_owned(),
        name_at_target: name.to_owned(),
        bytes,
        blocks_sent: sent,
        blocks_sent_twice: twice,
        bytes_from_replica: 0,
        bytes_from_target: 0,
        given: Vec::new(),
        replica_not_used: None,
    };
    let from =
        |provider: &str, predicted, bytes| Provided { provider: provider.into(), predicted, bytes };
    Summary {
        result: Ending::Completed,
        migration: ID,
        vm: Some("vm1".into()),
        from: "hosta".into(),
        to: "hostb".into(),
        strategy: Strategy::Hybrid,
        order: Order::WorkloadAware,
        started_unix_ms: 1_795_000_000_000,
        ended_unix_ms: 1_795_000_028_400,
        total_seconds: 28.4,
        downtime_ms: Some(Downtime {
            total: 38.2,
            memory: 21.0,
            quiesce: 1.2,
            map: 3.0,
            commit: 9.0,
            resume: 4.0,
        }),
        bytes_from_target: 0,
        wire_bytes: WireBytes {
            total: 3_330_000_000,
            raw: 3_000_000_000,
            compressed: 200_000_000,
            zero: 48_000,
            memory: 129_000_000,
            control: 900_000,
            hash: 52_000,
        },
        guest_bytes: 3_400_000_000,
        rounds: 1,
        blocks_sent: 830_078,
        blocks_sent_twice: 43_646,
        resends: 0,
        reconnects: 1,
        remote_reads: 1_204,
        blocks_mirrored: 0,
        throttled_operations: 120,
        throttled_ms: 840.5,
        verified: Verified::Equal,
        providers: vec![
            from("nas", Some(1 << 30), 900 << 20),
            from("replica at hostc", Some(512 << 20), 0),
            from("same content at hostb", None, 70 << 20),
            from("source", Some(3_321_888_768), 830_078 * 4096),
        ],
        predicted: Some(came(26.0, 40.0, 20_000, 1000, Vec::new())),
        actual: Some(came(
            28.4,
            38.2,
            43_646,
            1204,
            vec!["the total time was 28.400 s instead of 27.000 s".into()],
        )),
        images: vec![
            image("vm1-root", 8 << 30, 530_078, 43_000),
            image("vm1-data", 4 << 30, 300_000, 646),
        ],
    }
}

fn came(total: f64, downtime: f64, twice: u64, reads: u64, missed: Vec<String>) -> Predicted {
    Predicted {
        total_seconds: total,
        handover_seconds: 21.0,
        downtime_ms: downtime,
        converges: true,
        bytes: 3_400_000_000,
        bytes_twice: twice * 4096,
        remote_reads: reads,
        added_latency_ms: 0.1,
        link: 125_000_000,
        missed,
    }
}

/// Images in every state.
pub fn images() -> Vec<ImageStatus> {
    let image = |name: &str, path: &str, state, missing_blocks, clients| ImageStatus {
        name: name.to_owned(),
        id: ImageId(7),
        path: path.into(),
        size: 8 << 30,
        allocated: 2_254_857_830,
        state,
        epoch: Epoch(3),
        missing_blocks,
        clients,
        growable: false,
        read_only: false,
        migration: None,
        kept_for: None,
        generation: None,
        since_unix_ms: None,
        tracked_by: None,
    };
    let mut all = vec![
        image("vm1-root", "/srv/vm/vm1-root.raw", ImageState::Owner, 12_288, 1),
        image("vm2-root", "/srv/vm/.vm2-root.dray-partial", ImageState::Incoming, 0, 1),
        image("vm3-data", "/srv/vm/vm3.replica", ImageState::Replica, 0, 0),
        image("base", "/srv/vm/base.raw", ImageState::Owner, 0, 12),
    ];
    all[2].kept_for = Some(KeptFor { host: "hostb".into(), bytes: Some(48 << 20) });
    all[3].read_only = true;
    all
}

/// The migration while it runs, seen from the source.
pub fn running() -> MigrationStatus {
    MigrationStatus {
        migration: ID,
        role: Role::Source,
        peer: "hostb".into(),
        vm: Some("vm1".into()),
        state: MigrationState::Running,
        started_unix_ms: 1_795_000_000_000,
        progress: progress(),
        summary: None,
        error: None,
        subject: None,
    }
}

/// The same VM and two images in one batch: one is over, one runs, one waits.
pub fn batch() -> BatchStatus {
    let one = |name: &str, state, predicted_seconds| MoveStatus {
        name: name.into(),
        subject: Subject::Images { names: vec![name.into()] },
        to: "hostb".into(),
        state,
        migration: None,
        predicted_seconds,
        progress: None,
        summary: None,
        error: None,
    };
    let vm = Subject::Vm { qmp: "/run/vm1.qmp".into() };
    let (waiting, running) = (MoveState::Waiting, MoveState::Running);
    BatchStatus {
        batch: BatchId(0x7b00_0000_0000_0000_0000_0000_0000_0002),
        from: "hosta".into(),
        started_unix_ms: 1_795_000_000_000,
        elapsed_seconds: 12.3,
        over: false,
        jobs: 2,
        budget: Some(BitRate { bytes_per_second: 125_000_000 }),
        rate: 118 << 20,
        moves: vec![
            MoveStatus {
                subject: vm,
                migration: Some(ID),
                progress: Some(progress()),
                ..one("vm1", running, Some(26.1))
            },
            one("archive", waiting, Some(188.0)),
            one("data", waiting, None),
        ],
    }
}

/// How that batch ends.
pub fn batch_ended() -> BatchStatus {
    let mut ended = batch();
    (ended.over, ended.elapsed_seconds, ended.rate) = (true, 61.4, 0);
    let [vm, archive, data] = &mut ended.moves[..] else { unreachable!() };
    (vm.state, vm.progress, vm.summary) = (MoveState::Completed, None, Some(summary()));
    let full = "pool 'images' has 2 GiB free and the images need 20 GiB";
    let full = ApiError::new(ErrorKind::NoSpace, "cannot prepare on hostb", full);
    let full = full.hint("free space or choose another pool");
    (archive.state, archive.error) = (MoveState::Failed, Some(full));
    let cancelled = ApiError::new(ErrorKind::Cancelled, "the batch was cancelled", "by a test");
    (data.state, data.error) = (MoveState::Cancelled, Some(cancelled));
    ended
}

struct Agent {
    seen: Arc<Mutex<Vec<Value>>>,
}

/// A name of the form `fail-KIND` stands for an error of that kind.
fn asked_to_fail(name: &str) -> ApiResult<()> {
    let Some(kind) = name.strip_prefix("fail-") else { return Ok(()) };
    let kind: ErrorKind = serde_json::from_value(json!(kind)).expect("a kind of error");
    Err(ApiError::new(kind, format!("cannot do this to {name}"), "the test asked for it")
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
            ApiError::new(ErrorKind::NoSpace, "cannot write vm1-root", "no space left on device")
                .hint("make room in pool fast, then `dray resume`"),
        );
        let mut prepared = running();
        prepared.migration = MigrationId(0x5100_0000_0000_0000_0000_0000_0000_0001);
        (prepared.state, prepared.vm) = (MigrationState::Prepared, Some("vm5".into()));
        prepared.progress = Progress::new(prepared.migration, Strategy::Hybrid);
        prepared.subject = Some(Subject::Vm { qmp: "/run/vm5.qmp".into() });
        let all = [running(), failed, prepared];
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
        Ok(Cancelled { migration: ID, bytes_kept: if command.discard { 0 } else { 1 << 30 } })
    }

    async fn resume(&self, command: Resume) -> ApiResult<Started> {
        self.saw("resume", &command);
        Ok(Started { migration: ID })
    }

    async fn limit(&self, command: Limit) -> ApiResult<Limited> {
        self.saw("limit", &command);
        Ok(Limited { migration: ID, bandwidth: command.bandwidth })
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
        })
    }

    async fn plan(&self, command: Plan) -> ApiResult<Planned> {
        self.saw("plan", &command);
        let one = |strategy, total, twice| PlannedStrategy {
            strategy,
            predicted: Predicted {
                total_seconds: total,
                handover_seconds: total / 2.0,
                downtime_ms: 41.0,
                converges: strategy != Strategy::PreCopy,
                bytes: 3 << 30,
                bytes_twice: twice,
                remote_reads: 12,
                added_latency_ms: 0.1,
                link: 100_000_000,
                missed: Vec::new(),
            },
        };
        Ok(Planned {
            to: command.to,
            link: 100_000_000,
            link_from: LinkFrom::Limit,
            rtt_ms: 0.4,
            memory: 4 << 30,
            memory_written: 1 << 20,
            data: 3 << 30,
            written: 2_500_000,
            images: vec![
                PlannedImage {
                    image: "vm1-root".into(),
                    data: 3 << 30,
                    generation: Some(4),
                    given: [("nas".to_owned(), 2 << 30), ("replica at hostc".to_owned(), 1 << 30)]
                        .into(),
                    source: 12 << 20,
                    notes: vec!["offsite: it did not answer within 25 s".into()],
                    ..PlannedImage::default()
                },
                PlannedImage {
                    image: "vm1-data".into(),
                    data: 1 << 30,
                    generation: Some(2),
                    at_target: 1 << 30,
                    ..PlannedImage::default()
                },
                PlannedImage {
                    image: "scratch".into(),
                    data: 4096,
                    source: 4096,
                    ..PlannedImage::default()
                },
            ],
            indexed: Some(12 << 30),
            silent: (command.bandwidth.is_none()).then(|| "no answer within 90 s".to_owned()),
            strategies: vec![
                one(Strategy::PreCopy, 44.0, 1 << 30),
                one(Strategy::Auto, 33.0, 1 << 20),
            ],
        })
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
        let at =
            |number: u64| GenerationStatus { number, id: GenerationId(u128::from(number) << 120) };
        let holder = |place: &str, held_as, distrusted_bytes| Holder {
            place: place.to_owned(),
            held_as,
            distrusted_bytes,
        };
        let held = [
            holder("nas", HeldAs::Backup, 0),
            holder("hostb", HeldAs::Replica, 0),
            holder("hostc", HeldAs::Replica, 64 << 20),
        ]
        .to_vec();
        let closed = |number, host: &str, changed_blocks| ClosedGeneration {
            at: at(number),
            reason: "handover".to_owned(),
            host: host.to_owned(),
            // Long ago, and a little more: the age is told in days.
            closed_unix_ms: now_unix_ms() - (10 * number + 1) * 86_400_000 - 3_600_000,
            changed_blocks,
            here: number == 1,
            backups: Vec::new(),
            held: if number == 2 { held.clone() } else { Vec::new() },
        };
        Ok(LineageStatus {
            image: command.image,
            id: ImageId(8),
            host: "hosta".to_owned(),
            state: ImageState::Owner,
            past: vec![closed(1, "hosta", None), closed(2, "hostb", Some(2560))],
            open: Some(at(3)),
            changed_blocks: Some(5),
            strays: vec![Stray { at: at(9), held: held[..1].to_vec() }],
            silent: vec!["hostd: it did not answer within 5 s".to_owned()],
        })
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
        if command.repository.is_none() {
            let place = DestinationStatus {
                name: "nas".to_owned(),
                url: "file:///mnt/nas".to_owned(),
                images: vec!["vm1-root".to_owned(), "vm1-data".to_owned()],
                every_seconds: Some(86_400),
                last_unix_ms: Some(now_unix_ms() - 3 * 3_600_000 - 60_000),
                error: Some("cannot back up to 'nas': no room".to_owned()),
            };
            return Ok(BackupListing { destinations: vec![place], ..BackupListing::default() });
        }
        let backup = |number, added_bytes| BackupStatus {
            image: "vm1-root".to_owned(),
            id: ImageId(8),
            generation: GenerationStatus { number, id: GenerationId(u128::from(number) << 120) },
            host: "hosta".to_owned(),
            taken_unix_ms: now_unix_ms() - (20 - number) * 86_400_000 - 60_000,
            consistency: Consistency::Filesystem,
            size: 8 << 30,
            added_bytes,
        };
        let backups = vec![backup(3, 5 << 30), backup(4, 70 << 20)];
        Ok(BackupListing { backups, ..BackupListing::default() })
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
