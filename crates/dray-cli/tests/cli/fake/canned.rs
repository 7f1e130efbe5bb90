//! The results that the fake agent has ready.

use super::ID;
use dray_api::*;
use dray_types::{BatchId, BitRate, Epoch, GenerationId, ImageId};

fn now_unix_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.expect("it is after 1970").as_millis() as u64
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
        bytes_in_place: 0,
        bytes_from_target: 0,
        given: Vec::new(),
        replica_not_used: None,
        qcow2: None,
        stays_raw: None,
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
        phase_seconds: PhaseSeconds {
            prepare: 0.2,
            copy: 19.7,
            sync: 1.1,
            handover: 0.038,
            backfill: 7.362,
            after: 3.1,
        },
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
        not_released: None,
        verified: Verified::Equal,
        compared: Some(Compared::new(3_100_000, 3_145_728)),
        providers: vec![
            from("nas", Some(1 << 30), 900 << 20),
            from("replica at hostc", Some(512 << 20), 0),
            from("same content at hostb", None, 70 << 20),
            from("source", Some(3_321_888_768), 830_078 * 4096),
        ],
        predicted: Some(Predicted {
            link_from: Some(LinkFrom::Assumed),
            ..came(26.0, 40.0, 20_000, 1000, Vec::new())
        }),
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
        link_from: None,
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
        in_place: false,
        migration: None,
        kept_for: None,
        generation: None,
        since_unix_ms: None,
        tracked_by: None,
        closed: None,
        not_locked: None,
        write_back_error: None,
    };
    let mut all = vec![
        image("vm1-root", "/srv/vm/vm1-root.raw", ImageState::Owner, 12_288, 1),
        image("vm2-root", "/srv/vm/.vm2-root.dray-partial", ImageState::Incoming, 0, 1),
        image("vm3-data", "/srv/vm/vm3.replica", ImageState::Replica, 0, 0),
        image("base", "/srv/vm/base.raw", ImageState::Owner, 0, 12),
        image("vm4-root", "/srv/vm/vm4-root.raw", ImageState::Owner, 0, 1),
    ];
    all[2].kept_for = Some(KeptFor { host: "hostb".into(), bytes: Some(48 << 20) });
    all[3].read_only = true;
    let why = "another program has the file: it is open for writing in qemu-io (pid 4711)".into();
    all[4].not_locked = Some(NotLocked { why, hint: "stop what uses its file".into() });
    let lost = |told, count| LostWrites { why: "flushing: I/O error".into(), count, told };
    all[0].write_back_error = Some(lost(true, 2));
    all[1].write_back_error = Some(lost(false, 1));
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
        waiting_seconds: None,
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
    let full = Refusal::new(ErrorKind::NoSpace, "cannot prepare on hostb", full);
    let full = full.hint("free space or choose another pool");
    (archive.state, archive.error) = (MoveState::Failed, Some(full));
    let cancelled = Refusal::new(ErrorKind::Cancelled, "the batch was cancelled", "by a test");
    (data.state, data.error) = (MoveState::Cancelled, Some(cancelled));
    ended
}

/// What a plan tells.
pub(super) fn planned(command: Plan) -> Planned {
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
            link_from: Some(LinkFrom::Limit),
            missed: Vec::new(),
        },
    };
    Planned {
        to: command.to.clone(),
        link: 100_000_000,
        link_from: LinkFrom::Limit,
        rtt_ms: 0.4,
        memory: 4 << 30,
        memory_written: 1 << 20,
        data: 3 << 30,
        written: (command.to != "hostc").then_some(2_500_000),
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
        strategies: vec![one(Strategy::PreCopy, 44.0, 1 << 30), one(Strategy::Auto, 33.0, 1 << 20)],
    }
}

/// The line of an image, with who holds what of it.
pub(super) fn line(image: String) -> LineageStatus {
    let at = |number: u64| GenerationStatus { number, id: GenerationId(u128::from(number) << 120) };
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
    LineageStatus {
        image,
        id: ImageId(8),
        host: "hosta".to_owned(),
        state: ImageState::Owner,
        past: vec![closed(1, "hosta", None), closed(2, "hostb", Some(2560))],
        open: Some(at(3)),
        changed_blocks: Some(5),
        strays: vec![Stray { at: at(9), held: held[..1].to_vec() }],
        silent: vec!["hostd: it did not answer within 5 s".to_owned()],
    }
}

/// The repositories that a host is configured with.
pub(super) fn destinations() -> BackupListing {
    let place = DestinationStatus {
        name: "nas".to_owned(),
        url: "file:///mnt/nas".to_owned(),
        images: vec!["vm1-root".to_owned(), "vm1-data".to_owned()],
        every_seconds: Some(86_400),
        last_unix_ms: Some(now_unix_ms() - 3 * 3_600_000 - 60_000),
        error: Some("cannot back up to 'nas': no room".to_owned()),
    };
    BackupListing { destinations: vec![place], ..BackupListing::default() }
}

/// The backups in a repository.
pub(super) fn backups_there() -> BackupListing {
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
    BackupListing { backups, ..BackupListing::default() }
}
