//! Remembers what it was asked and answers with what is ready.

use super::ID;
use super::canned::*;
use super::document;
use dray_agent::api::{Answers, Events};
use dray_api::*;
use dray_types::{ByteSize, Endpoint, Epoch, GenerationId, ImageId, MigrationId};
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

/// The agent behind the socket.
#[derive(Clone)]
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
    fn saw<C: Ask>(&self, command: &C) {
        let value = json!({ C::NAME: command });
        self.seen.lock().expect("no test has panicked here").push(value);
    }
}

/// A command whose answer is ready.
trait Canned: Ask {
    /// What comes before the answer.
    fn events(&self) -> Vec<Event> {
        Vec::new()
    }

    /// The answer.
    fn canned(self) -> ApiResult<Self::Answer>;
}

impl<C: Ask> Answers<C> for Agent {
    async fn answer(&self, command: C, events: Events) -> ApiResult<C::Answer> {
        self.saw(&command);
        let answer = match command.into() {
            Command::Migrate(command) => to_json(migrate(command, &events).await?),
            Command::Watch(command) => to_json(watch(command, &events).await?),
            Command::Batch(command) => to_json(start_batch(command, &events).await?),
            Command::BatchWatch(command) => to_json(watch_batch(command, &events).await?),
            other => {
                let (before, answer) = canned(other).unwrap_or_else(|| {
                    let (before, answer) = document::answer(C::NAME);
                    (before, Ok(answer))
                });
                for event in before {
                    let _ = events.send(event).await;
                }
                answer?
            }
        };
        Ok(serde_json::from_value(answer).expect("an answer of this command"))
    }
}

fn to_json(answer: impl Serialize) -> Value {
    serde_json::to_value(answer).expect("an answer can be written")
}

/// Makes [`canned`] for the commands whose answers are below, because they depend on what is asked.
/// Of every other command the answer is the example in the interface's document.
macro_rules! canned {
    ($($command:ident)+) => {
        /// What comes before the answer of the command, and the answer.
        fn canned(command: Command) -> Option<(Vec<Event>, ApiResult<Value>)> {
            match command {
                $(Command::$command(command) => {
                    Some((command.events(), command.canned().map(to_json)))
                })+
                _ => None,
            }
        }
    };
}

canned! {
    Peers Probe Prepare Seed Status Cancel Resume Limit Images ImageAdd ImageRemove Resize Claim Plan
    Record Backfill Batches BatchCancel BatchLimit Lineage Backup BackupPrune BackupCancel Backups
    BackupInit BackupVerify Restore Unstall Quit
}

async fn migrate(command: Migrate, events: &Events) -> ApiResult<Migrated> {
    asked_to_fail(&command.to)?;
    let started = Started { migration: ID };
    if command.detach {
        return Ok(Migrated::Started(started));
    }
    let _ = events.send(Event::Started(started)).await;
    tell(events).await;
    Ok(Migrated::Ended(Box::new(summary())))
}

async fn watch(command: Watch, events: &Events) -> ApiResult<Summary> {
    let named = command.migration.map_or_else(String::new, |named| named.0);
    asked_to_fail(&named)?;
    if named == "endless" {
        let _ = events.send(Event::Progress(progress())).await;
        std::future::pending::<()>().await;
    }
    tell(events).await;
    Ok(summary())
}

/// What a watch of the migration is told.
async fn tell(events: &Events) {
    let mut now = progress();
    let _ = events.send(Event::Progress(now.clone())).await;
    let _ = events.send(Event::Notice { text: "the link is back".into() }).await;
    now.phase = Phase::Backfill;
    now.elapsed_seconds = 25.0;
    now.total.bytes_missing = 48 << 20;
    now.total.dirty_blocks = 0;
    now.remote_reads = 12;
    now.downtime_ms = Some(38.2);
    let _ = events.send(Event::Progress(now)).await;
}

async fn start_batch(command: Batch, events: &Events) -> ApiResult<BatchStatus> {
    if command.detach {
        return Ok(batch());
    }
    let _ = events.send(Event::Batch(Box::new(batch()))).await;
    Ok(batch_ended())
}

async fn watch_batch(command: BatchWatch, events: &Events) -> ApiResult<BatchStatus> {
    let _ = events.send(Event::Batch(Box::new(batch()))).await;
    if command.batch.is_some_and(|named| named.0 == "endless") {
        std::future::pending::<()>().await;
    }
    Ok(batch_ended())
}

impl Canned for Probe {
    fn canned(self) -> ApiResult<Vec<PeerProbe>> {
        let silent =
            Refusal::new(ErrorKind::Peer, "cannot measure the link to hostd", "it is silent");
        Ok(vec![
            PeerProbe {
                peer: "hostb".into(),
                link: Some(117_000_000),
                disk: Some(1 << 30),
                error: None,
            },
            PeerProbe { peer: "hostd".into(), link: None, disk: None, error: Some(silent) },
        ])
    }
}

impl Canned for Peers {
    fn canned(self) -> ApiResult<Vec<PeerStatus>> {
        let peer = |peer: &str, address: &str, state, rtt_ms| PeerStatus {
            peer: peer.into(),
            address: address.into(),
            state,
            rtt_ms,
            agent: (state == PeerState::Ready).then(|| "dray/0.1.0".into()),
            pools: Vec::new(),
            certificate_days: None,
            clock_ahead_ms: None,
            rate: None,
            error: None,
        };
        let pool = |name: &str, free| PeerPool { name: name.into(), free };
        let untrusted = Refusal::new(ErrorKind::Denied, "no answer", "its certificate has expired")
            .hint("issue a new one with `dray pki issue`");
        let silent = Refusal::new(ErrorKind::Peer, "no answer", "connection refused");
        Ok(vec![
            PeerStatus {
                pools: vec![pool("images", Some(80 << 30)), pool("lvm", None)],
                certificate_days: Some(396),
                clock_ahead_ms: Some(-2),
                rate: Some(118 << 20),
                ..peer("hostb", "10.0.0.2", PeerState::Ready, Some(0.42))
            },
            PeerStatus {
                certificate_days: Some(9),
                clock_ahead_ms: Some(-12_300),
                ..peer("hoste", "10.0.0.5", PeerState::Ready, Some(0.61))
            },
            PeerStatus {
                error: Some(untrusted),
                ..peer("hostc", "10.0.0.3:7421", PeerState::Untrusted, Some(12.0))
            },
            PeerStatus {
                error: Some(silent),
                ..peer("hostd", "10.0.0.4", PeerState::Silent, None)
            },
        ])
    }
}

fn waiting_command() -> WaitingCommand {
    let option = |name: &str, value: &str| (name.to_owned(), Some(value.to_owned()));
    WaitingCommand {
        vm: Some("vm1".into()),
        pid: 4711,
        user: Some("libvirt-qemu".into()),
        program: "/usr/bin/qemu-system-x86_64".into(),
        options: vec![
            option("-name", "vm1"),
            option("-machine", "pc-q35-7.2,accel=kvm"),
            option("-kernel", "/boot/vmlinuz"),
            option("-blockdev", r#"{"driver":"nbd","node-name":"disk0","export":"vm1-root"}"#),
            option("-device", "virtio-blk-pci,id=disk0,drive=disk0"),
            option("-qmp", "unix:/q,server=on,wait=off"),
            ("-S".into(), None),
            option("-incoming", "defer"),
        ],
        left_out: vec!["-netdev (id net0) uses a descriptor".into()],
        reads: vec!["/boot/vmlinuz".into()],
        makes: vec!["/q".into()],
        directory: None,
        qmp: Some("/q".into()),
    }
}

impl Canned for Prepare {
    fn canned(self) -> ApiResult<Prepared> {
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
            to: self.to,
            endpoint: Endpoint::nbd("/run/dray/nbd.sock".as_ref()),
            images: vec![image("vm1-root", "disk0"), image("vm1-data", "disk1")],
            qemu_args: ["-S", "-incoming", "defer"].map(str::to_owned).to_vec(),
            command_line: self.command_line.then(waiting_command),
        })
    }
}

impl Canned for Seed {
    fn events(&self) -> Vec<Event> {
        let progress = SeedProgress { bytes_done: 1 << 30, bytes_total: 3 << 30 };
        if self.to == "hostc" { vec![Event::Seeding(progress)] } else { Vec::new() }
    }

    fn canned(self) -> ApiResult<Seeded> {
        if self.to != "hostc" {
            return Ok(Seeded { to: self.to, images: Vec::new() });
        }
        let image = |name: &str, generation, notes: &[&str]| SeededImage {
            image: name.into(),
            generation,
            given: generation.map(|_| ("nas".to_owned(), 3 << 30)).into_iter().collect(),
            missing_bytes: generation.map_or(0, |_| 4 << 20),
            notes: notes.iter().map(|note| (*note).to_owned()).collect(),
        };
        let root = image("vm1-root", Some(7), &["offsite is left alone: connection refused"]);
        let data = image("vm1-data", None, &["nas: its lineage has diverged"]);
        Ok(Seeded { to: self.to, images: vec![root, data] })
    }
}

impl Canned for Status {
    fn canned(self) -> ApiResult<Vec<MigrationStatus>> {
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
                .hint("if hostb is lost: `dray claim vm5-root --source-is-fenced` on this host"),
        );
        let all = [running(), failed, prepared, waiting, promised];
        let Some(named) = self.migration else { return Ok(all.to_vec()) };
        let id = named.resolve(all.iter().map(|one| one.migration))?;
        Ok(all.into_iter().filter(|one| one.migration == id).collect())
    }
}

impl Canned for Cancel {
    fn canned(self) -> ApiResult<Cancelled> {
        let bytes_kept = if self.discard { 0 } else { 1 << 30 };
        let target_was_away = self.migration == Some(text::MigrationRef("away".to_owned()));
        let at_target = self.migration == Some(text::MigrationRef("here".to_owned()));
        Ok(Cancelled { bytes_kept, target_was_away, at_target, ..Cancelled::of(ID) })
    }
}

impl Canned for Resume {
    fn canned(self) -> ApiResult<Started> {
        Ok(Started { migration: ID })
    }
}

impl Canned for Limit {
    fn canned(self) -> ApiResult<Limited> {
        let full = self.migration == Some(text::MigrationRef("full".to_owned()));
        let not_kept = full.then(|| "No space left on device".to_owned());
        Ok(Limited { migration: ID, bandwidth: self.bandwidth, not_kept })
    }
}

impl Canned for Images {
    fn canned(self) -> ApiResult<Vec<ImageStatus>> {
        Ok(images())
    }
}

impl Canned for ImageAdd {
    fn canned(self) -> ApiResult<ImageStatus> {
        Ok(ImageStatus { name: self.name, path: self.path, ..images().remove(0) })
    }
}

impl Canned for ImageRemove {
    fn canned(self) -> ApiResult<ImageStatus> {
        Ok(ImageStatus { name: self.name, ..images().remove(0) })
    }
}

impl Canned for Resize {
    fn canned(self) -> ApiResult<ImageStatus> {
        Ok(ImageStatus { name: self.image, size: self.size.0, ..images().remove(0) })
    }
}

impl Canned for Claim {
    fn canned(self) -> ApiResult<Claimed> {
        let lost = (0..10).map(|at| ByteRange { start: at << 20, len: 65536 }).collect();
        Ok(Claimed {
            image: self.image,
            epoch: Epoch(4),
            id: ImageId(8),
            writes_may_be_lost: true,
            bytes_lost: 655_360,
            lost,
            others: vec!["b".to_owned()],
            attached: vec![77],
        })
    }
}

impl Canned for Plan {
    fn canned(self) -> ApiResult<Planned> {
        Ok(planned(self))
    }
}

impl Canned for Record {
    fn events(&self) -> Vec<Event> {
        let accesses = vec![
            AccessLine(1_000_000, AccessKind::W, 4096, 512),
            AccessLine(2_500_000, AccessKind::R, 0, 65_536),
        ];
        let batch = AccessBatch { accesses, until_ns: 3_000_000_000, missed: 7 };
        let fails = asked_to_fail(&self.image).is_err();
        if fails { Vec::new() } else { vec![Event::Accesses(batch)] }
    }

    fn canned(self) -> ApiResult<Recorded> {
        asked_to_fail(&self.image)?;
        Ok(Recorded {
            image: self.image,
            bytes: 8 << 30,
            accesses: 2,
            missed: 7,
            duration_ns: 3_000_000_000,
            end: RecordEnd::Duration,
        })
    }
}

impl Canned for Backfill {
    fn canned(self) -> ApiResult<Backfilling> {
        let bandwidth = match self.action {
            BackfillAction::Rate(limit) => limit,
            _ => None,
        };
        let paused = self.action == BackfillAction::Pause;
        Ok(Backfilling { migration: ID, paused, bandwidth, bytes_missing: 48 << 20 })
    }
}

impl Canned for Batches {
    fn canned(self) -> ApiResult<Vec<BatchStatus>> {
        let older = BatchStatus { batch: dray_types::BatchId(0x6a << 120), ..batch_ended() };
        let is_named = |one: &BatchStatus| {
            self.batch.as_ref().is_none_or(|named| one.batch.to_string().starts_with(&named.0))
        };
        Ok([batch(), older].into_iter().filter(is_named).collect())
    }
}

impl Canned for BatchCancel {
    fn canned(self) -> ApiResult<BatchStatus> {
        Ok(batch_ended())
    }
}

impl Canned for BatchLimit {
    fn canned(self) -> ApiResult<BatchStatus> {
        Ok(BatchStatus { budget: self.budget, ..batch() })
    }
}

impl Canned for Lineage {
    fn canned(self) -> ApiResult<LineageStatus> {
        Ok(line(self.image))
    }
}

impl Canned for Backup {
    fn events(&self) -> Vec<Event> {
        let image = |name: &String| ImageAmount {
            image: name.clone(),
            bytes_total: 64 << 20,
            bytes_done: 16 << 20,
            stored_bytes: 1 << 20,
        };
        let images = self.images.iter().map(image).collect();
        vec![Event::Backup(BackupProgress {
            to: chosen(self.to.clone()),
            elapsed_seconds: 2.0,
            images,
        })]
    }

    fn canned(self) -> ApiResult<BackupDone> {
        let at = |number| GenerationStatus { number, id: GenerationId(5 << 120) };
        let done = |name: &String| BackedUp {
            image: name.clone(),
            generation: at(4),
            parent: (!self.full).then(|| at(3)),
            full_because: self.full.then(|| "the operator asked for a full backup".to_owned()),
            size: 8 << 30,
            changed_bytes: 64 << 20,
            stored_bytes: 3 << 20,
            kept_aside_bytes: 8192,
        };
        Ok(BackupDone {
            images: self.images.iter().map(done).collect(),
            to: chosen(self.to),
            taken_unix_ms: 1_000,
            quiet_ms: 1.25,
            seconds: 12.5,
            consistency: Consistency::Crash,
            pruned: u64::from(self.keep_last.unwrap_or(0)),
        })
    }
}

/// The repository that was named; the only one is the NAS.
fn chosen(at: Option<String>) -> String {
    at.unwrap_or_else(|| "nas".to_owned())
}

impl Canned for BackupPrune {
    fn canned(self) -> ApiResult<BackupPruned> {
        Ok(BackupPruned { dry_run: self.dry_run, kept: 9, removed: Vec::new() })
    }
}

impl Canned for BackupCancel {
    fn canned(self) -> ApiResult<BackupProgress> {
        asked_to_fail(&self.image)?;
        Ok(BackupProgress { to: "nas".to_owned(), ..BackupProgress::default() })
    }
}

impl Canned for Backups {
    fn canned(self) -> ApiResult<BackupListing> {
        Ok(if self.repository.is_none() { destinations() } else { backups_there() })
    }
}

impl Canned for BackupInit {
    fn canned(self) -> ApiResult<RepositoryMade> {
        Ok(RepositoryMade { encrypted: self.0.key_file.is_some(), at: chosen(self.0.at) })
    }
}

impl Canned for BackupVerify {
    fn canned(self) -> ApiResult<BackupVerified> {
        let faults = match self.repository.at.as_deref() {
            Some("damaged") => 1,
            Some("lost") => 2,
            _ => 0,
        };
        let damaged =
            (0..faults).map(|nth| format!("vm1-root generation {}: piece 7: it is gone", 3 + nth));
        let bytes_read = if self.read_data { 3 << 30 } else { 0 };
        Ok(BackupVerified { backups: 2, bytes_read, damaged: damaged.collect() })
    }
}

impl Canned for Restore {
    fn canned(self) -> ApiResult<Restored> {
        Ok(Restored {
            path: format!("/srv/vm/{}", self.name).into(),
            image: self.name,
            generation: GenerationStatus { number: 4, id: GenerationId(5 << 120) },
            of: self.image,
            size: 8 << 30,
            written_bytes: 3 << 30,
            seconds: 40.0,
        })
    }
}

impl Canned for Quit {
    fn canned(self) -> ApiResult<QemuEnded> {
        Ok(QemuEnded { pid: 4242, ended: !self.qmp.ends_with("slow.qmp") })
    }
}

impl Canned for Unstall {
    fn canned(self) -> ApiResult<Unstalled> {
        asked_to_fail(&self.image)?;
        Ok(Unstalled {
            image: self.image,
            failed: self.fail,
            waiting: 3,
            bytes_missing: ByteSize(48 << 20),
        })
    }
}
