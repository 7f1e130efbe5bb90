//! A target without a session is told what became of its migration: what goes, what stays, and what a
//! restart finds, whatever happens between.

use super::host::{Host, SimAgent};
use super::receiver;
use dray_api::MigrationState;
use dray_engine::TargetRecord;
use dray_files::StatePath;
use dray_files::files::sim::Fault;
use dray_host::folder::intent::{Settings, TargetImageIntent, TargetIntent};
use dray_host::folder::log::{Folder, Log, TARGET_INTENT, TARGET_JOURNAL};
use dray_host::folder::standing::{self, Unserved};
use dray_host::record::{CopyState, ImageRecord};
use dray_image::ImageNames;
use dray_net::{NetError, NetErrorKind};
use dray_types::{Attempt, BLOCK_SIZE, BlockSet, Epoch, ImageId, MigrationId};
use dray_wire::request::Fate;
use dray_wire::{HandedOver, ImageHandover, ImageOffer, MapHash};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::oneshot;

const MIGRATION: MigrationId = MigrationId(5);
const NAME: &str = "x";

thread_local! {
    /// The clock of this test's hosts.
    static NANOS: Arc<AtomicU64> = Arc::default();
}

/// What a source may say, and that it says nothing.
const TOLD: [Result<Fate, &str>; 8] = [
    Ok(Fate::Live),
    Ok(Fate::Abandoned),
    Ok(Fate::Never),
    Ok(Fate::HandedOver),
    Ok(Fate::Unknown { owned: true }),
    Ok(Fate::Unknown { owned: false }),
    Ok(Fate::Claimed),
    Err("it is away"),
];

fn handover() -> ImageHandover {
    ImageHandover { len: 4 * BLOCK_SIZE, missing: BlockSet::new() }
}

fn promise() -> TargetRecord {
    let (attempt, map_hash, epoch) = (Attempt(1), MapHash::of(&[handover()]), Epoch(1));
    TargetRecord::Prepared { attempt, map_hash, images: vec![handover()], epoch }
}

fn committed() -> TargetRecord {
    let map_hash = MapHash::of(&[handover()]);
    TargetRecord::Committed(HandedOver { epoch: Epoch(2), attempt: Attempt(1), map_hash })
}

/// A target whose agent died when these records were durable, and runs again.
fn target_with(records: &[TargetRecord]) -> Host {
    let mut host = Host::new(PathBuf::from("/b"), 1, &NANOS.with(Arc::clone));
    assert!(host.start());
    let len = 4 * BLOCK_SIZE;
    let offer = ImageOffer { id: ImageId(1), name: NAME.to_owned(), len, read_only: false };
    let path = host.path(NAME);
    let image = TargetImageIntent {
        offer,
        path,
        zeroed: true,
        replica: None,
        refused: None,
        in_place: None,
        qcow2: false,
    };
    let intent = TargetIntent {
        migration: MIGRATION,
        peer: "a".to_owned(),
        images: vec![image],
        settings: Settings::default(),
        guest: None,
        qemu: None,
        started_unix_ms: 7,
    };
    let made = host.within(|agent| {
        agent.prepare_target(intent, &[Vec::new()]).unwrap();
        *agent.here() = None;
        let folder = Folder::of(&agent.store, MIGRATION);
        Log::open(&folder.file(TARGET_JOURNAL)).unwrap().0.append(records).unwrap();
    });
    assert!(made.is_some());
    host.cut();
    assert!(host.start());
    host
}

/// The target hears what the source said; whether it has lived through that.
fn tell(host: &mut Host, sessions: u64, told: Result<Fate, &str>) -> bool {
    let answer = told.map_err(|why| NetError::new(NetErrorKind::Unreachable, why));
    let done = host.within(|agent| {
        let (heard, _) = oneshot::channel();
        if let Some(here) = agent.here().as_ref() {
            here.slot.send(receiver::Input::Fate { sessions, answer, heard });
        }
        agent.pump();
    });
    done.is_some()
}

/// What is durable of the migration, and whether anything is left of it.
fn durable(host: &mut Host) -> (bool, Vec<TargetRecord>) {
    let look = host.within(|agent| {
        let folder = Folder::of(&agent.store, MIGRATION);
        let there = folder.file(TARGET_INTENT).exists().unwrap();
        (there, standing::read(&folder.file(TARGET_JOURNAL)).unwrap())
    });
    look.unwrap()
}

fn shown(host: &Host) -> (MigrationState, Option<String>) {
    let agent = host.agent.as_ref().unwrap();
    let here = agent.here();
    let shown = here.as_ref().unwrap().slot.board.read();
    (shown.state, shown.error.and_then(|error| error.hint))
}

/// Which answers make it go, of those in [`TOLD`].
fn goes(records: &[TargetRecord]) -> Vec<bool> {
    let gone = TOLD.map(|told| {
        let mut host = target_with(records);
        assert!(tell(&mut host, 0, told));
        let (there, _) = durable(&mut host);
        let record = host.within(|agent| agent.registry.get(NAME).is_some()).unwrap();
        assert_eq!(record, there, "the image goes with its migration");
        host.cut();
        assert!(host.start());
        assert_eq!(durable(&mut host).0, there, "{told:?}: after a restart without power");
        !there
    });
    gone.to_vec()
}

#[test]
fn a_promise_goes_on_its_sources_word_alone() {
    let promised = [TargetRecord::Touched, promise()];
    assert_eq!(goes(&promised), [false, false, true, false, true, false, false, false]);
    for told in TOLD {
        let mut host = target_with(&promised);
        assert!(tell(&mut host, 0, told));
        let (there, records) = durable(&mut host);
        let void = records.last() == Some(&TargetRecord::Void { attempt: Attempt(1) });
        assert_eq!(void, told == Ok(Fate::Abandoned), "{told:?}");
        if void {
            assert_eq!(shown(&host).0, MigrationState::Interrupted);
        } else if there {
            assert_eq!(records, promised, "{told:?}");
            let says = shown(&host).1.is_some_and(|hint| hint.contains("`dray claim x"));
            let asked = matches!(told, Err(_) | Ok(Fate::Unknown { .. } | Fate::Claimed));
            assert_eq!(says, asked, "{told:?}");
        }
    }
}

#[test]
fn what_was_received_goes_when_its_source_will_not_have_it() {
    let received = [TargetRecord::Touched];
    assert_eq!(goes(&received), [false, false, true, false, true, false, false, false]);
}

#[test]
fn what_was_only_prepared_goes_when_its_source_does_not_know_it() {
    assert_eq!(goes(&[]), [false, false, true, false, true, true, false, false]);
    let mut host = target_with(&[]);
    assert_eq!(shown(&host), (MigrationState::Prepared, None));
    assert!(tell(&mut host, 0, Err("it is away")));
    assert!(shown(&host).1.is_some_and(|hint| hint.contains("`dray cancel ")));
}

#[test]
fn an_owner_listens_to_none_of_it() {
    let owned = [TargetRecord::Touched, promise(), committed()];
    assert_eq!(goes(&owned), [false; TOLD.len()]);
    let mut host = target_with(&owned);
    let asks = host.within(|agent| agent.here().as_ref().unwrap().slot.question().is_some());
    assert_eq!(asks, Some(false));
}

/// Images that were handed back are their source's again, once it says so.
#[test]
fn what_was_handed_back_goes_when_its_source_has_it() {
    let back = [TargetRecord::Touched, promise(), committed(), TargetRecord::Fenced];
    assert_eq!(goes(&back), [false, false, true, false, true, false, false, false]);
    for told in TOLD {
        let mut host = target_with(&back);
        assert!(tell(&mut host, 0, told));
        if durable(&mut host).0 {
            let hint = shown(&host).1.unwrap_or_default();
            let asked = matches!(told, Err(_) | Ok(Fate::Unknown { .. }));
            assert_eq!(hint.contains("`dray claim x"), asked, "{told:?}");
            assert_eq!(hint.contains("`dray cancel "), told == Ok(Fate::Claimed), "{told:?}");
        }
    }
}

/// An operator removes what was handed back once an image of it was claimed at its source; it may be the only copy
/// otherwise.
#[test]
fn what_was_handed_back_is_removed_by_an_operator_when_it_was_claimed_at_its_source() {
    let back = [TargetRecord::Touched, promise(), committed(), TargetRecord::Fenced];
    for claimed in [false, true] {
        let mut host = target_with(&back);
        let done = host.within(|agent| {
            let (answer, mut gone) = oneshot::channel();
            let here = agent.here();
            let slot = &here.as_ref().unwrap().slot;
            slot.send(receiver::Input::TakeBack { claimed, answer });
            drop(here);
            agent.pump();
            gone.try_recv().unwrap()
        });
        let kept = Err(Unserved::HandedBack);
        assert_eq!(done, Some(if claimed { Ok(()) } else { kept }));
        assert_eq!(durable(&mut host).0, !claimed);
    }
}

/// A session has been there since the question: the answer is of another time.
#[test]
fn an_answer_to_an_older_question_is_not_heard() {
    let mut host = target_with(&[TargetRecord::Touched, promise()]);
    for told in TOLD {
        assert!(tell(&mut host, 1, told));
        assert_eq!(durable(&mut host), (true, vec![TargetRecord::Touched, promise()]), "{told:?}");
    }
}

/// Dropping a promise is disturbed at each call that changes something durable: what is left is the promise, or
/// what the source has said, and the next answer does the rest.
#[test]
fn whatever_fails_while_a_promise_goes_the_next_answer_does_the_rest() {
    let promised = [TargetRecord::Touched, promise()];
    for fate in [Fate::Abandoned, Fate::Never] {
        for fault in Fault::ALL {
            for call in 1.. {
                let mut host = target_with(&promised);
                host.disk.plan(host.disk.calls() + call, fault);
                tell(&mut host, 0, Ok(fate));
                let met = host.disk.met() > 0;
                host.disk.plan_nothing();
                if host.agent.is_none() {
                    assert!(host.start(), "{fate:?} {fault:?} {call}");
                }
                settle(&mut host, fate, &format!("{fate:?} {fault:?} {call}"));
                if !met {
                    break;
                }
            }
        }
    }
}

/// Without room nothing is lost and nothing goes half; it goes when there is room.
#[test]
fn a_target_without_room_drops_a_promise_later() {
    let promised = [TargetRecord::Touched, promise()];
    for fate in [Fate::Abandoned, Fate::Never] {
        let mut host = target_with(&promised);
        for _ in 0..2 {
            host.disk.fill(true);
            tell(&mut host, 0, Ok(fate));
            host.disk.fill(false);
            host.cut();
            assert!(host.start());
        }
        settle(&mut host, fate, "without room");
    }
}

/// What another program has done to the file in which an image comes.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Loss {
    Removed,
    Replaced,
}

/// A target whose agent died when these records were durable, and which finds the file of its image lost.
fn with_lost_file(records: &[TargetRecord], loss: Loss) -> Host {
    let mut host = target_with(records);
    host.kill();
    let partial = partial(&host);
    partial.remove().unwrap();
    if loss == Loss::Replaced {
        partial.put(&"another").unwrap();
    }
    assert!(host.start());
    host
}

fn partial(host: &Host) -> StatePath {
    let names = ImageNames::of(&host.path(NAME)).unwrap();
    StatePath::new(Arc::new(host.disk.files()), names.partial())
}

/// The target hears what the source says of a migration that waits, and looks at it once more.
fn tell_waiting(host: &mut Host, told: Fate) {
    host.within(|agent| {
        // What fails is asked for again.
        let _ = agent.hear_of_waiting(MIGRATION, told);
        agent.look_again();
        agent.pump();
    });
}

fn is_closed(host: &mut Host) -> bool {
    host.within(|agent| agent.registry.closed(NAME).is_some()).unwrap()
}

/// Which of the answers in [`TOLD`] end a migration that cannot be brought back because a file of it is lost.
fn ends_waiting(records: &[TargetRecord], loss: Loss) -> Vec<bool> {
    let told = TOLD.into_iter().filter_map(Result::ok);
    let ended = told.map(|fate| {
        let mut host = with_lost_file(records, loss);
        assert!(is_closed(&mut host) && durable(&mut host).0, "it waits for its file");
        tell_waiting(&mut host, fate);
        let (there, _) = durable(&mut host);
        let known = host.within(|agent| !agent.registry.all_records().is_empty()).unwrap();
        assert_eq!(known, there, "{fate:?}: the image goes with its migration");
        let kept = loss == Loss::Replaced;
        assert_eq!(partial(&host).exists().unwrap(), kept, "what is not ours is not removed");
        host.cut();
        assert!(host.start());
        assert_eq!(durable(&mut host).0, there, "{fate:?}: after a restart without power");
        !there
    });
    ended.collect()
}

#[test]
fn a_migration_whose_file_is_lost_ends_when_its_source_has_done_with_it() {
    for loss in [Loss::Removed, Loss::Replaced] {
        let received = [TargetRecord::Touched];
        let ends = [false, true, true, false, true, false, true];
        assert_eq!(ends_waiting(&received, loss), ends, "{loss:?}");
        let prepared = [false, true, true, false, true, true, true];
        assert_eq!(ends_waiting(&[], loss), prepared, "{loss:?}");
    }
}

/// What was promised waits for its file as long as its source may have handed over, and nobody has taken the image back
/// there. What is owned waits whatever is said.
#[test]
fn a_promise_whose_file_is_lost_ends_on_its_sources_word_alone() {
    let promised = [TargetRecord::Touched, promise()];
    let owned = [TargetRecord::Touched, promise(), committed()];
    for loss in [Loss::Removed, Loss::Replaced] {
        let ends = [false, true, true, false, true, false, true];
        assert_eq!(ends_waiting(&promised, loss), ends, "{loss:?}");
        assert_eq!(ends_waiting(&owned, loss), [false; 7], "{loss:?}");
    }
}

/// The file is put back as it was.
#[test]
fn a_migration_goes_on_when_the_file_is_back() {
    let mut host = target_with(&[TargetRecord::Touched]);
    host.kill();
    let (file, aside) = (partial(&host), partial(&host).with_extension("aside"));
    file.rename(&aside).unwrap();
    file.put(&"another").unwrap();
    assert!(host.start());
    host.within(SimAgent::look_again).unwrap();
    let looked = host.within(|agent| (agent.registry.get(NAME).is_some(), agent.here().is_some()));
    assert_eq!(looked, Some((false, false)), "nothing is filled that is not the image's file");
    file.remove().unwrap();
    aside.rename(&file).unwrap();
    host.within(SimAgent::look_again).unwrap();
    let looked = host.within(|agent| (agent.registry.get(NAME).is_some(), agent.here().is_some()));
    assert_eq!(looked, Some((true, true)));
}

#[test]
fn whatever_fails_while_a_lost_image_is_given_up_the_next_answer_does_the_rest() {
    for fault in Fault::ALL {
        for call in 1.. {
            let mut host = with_lost_file(&[TargetRecord::Touched], Loss::Replaced);
            host.disk.plan(host.disk.calls() + call, fault);
            tell_waiting(&mut host, Fate::Never);
            let met = host.disk.met() > 0;
            host.disk.plan_nothing();
            let is_over = (0..20).any(|round| {
                if round == 10 {
                    host.kill();
                }
                if host.agent.is_none() {
                    assert!(host.start(), "{fault:?} {call}");
                }
                tell_waiting(&mut host, Fate::Never);
                host.within(SimAgent::tick);
                NANOS.with(|nanos| nanos.fetch_add(2_000_000_000, Ordering::SeqCst));
                let known = host.within(|agent| !agent.registry.all_records().is_empty());
                !durable(&mut host).0 && known == Some(false)
            });
            assert!(is_over, "{fault:?} {call}: {:?}", durable(&mut host));
            assert!(partial(&host).exists().unwrap(), "{fault:?} {call}");
            if !met {
                break;
            }
        }
    }
}

/// What the source has said is so in the end, also after a power cut.
fn settle(host: &mut Host, fate: Fate, what: &str) {
    let is_so = |host: &mut Host| {
        let (there, records) = durable(host);
        match fate {
            Fate::Never => !there && host.within(|a| a.registry.get(NAME).is_none()) == Some(true),
            _ => there && records.last() == Some(&TargetRecord::Void { attempt: Attempt(1) }),
        }
    };
    for round in 0..20 {
        if round == 10 {
            // A folder that an I/O error left holds no name, and goes at the next start.
            host.kill();
            assert!(host.start());
        }
        if is_so(host) {
            host.cut();
            assert!(host.start());
            // What a failed sync left to be seen may be undone: then it is asked for once more.
            if is_so(host) {
                return;
            }
        }
        tell(host, 0, Ok(fate));
        NANOS.with(|nanos| nanos.fetch_add(2_000_000_000, Ordering::SeqCst));
        host.within(|agent| {
            agent.look_again();
            agent.tick();
        });
    }
    let closed = host.within(|agent| {
        agent.registry.all_closed().into_iter().map(|c| c.1.reason.why).collect::<Vec<_>>()
    });
    panic!("{what}: {:?} {closed:?}", durable(host));
}

/// A target that has served the image by its record, and whose journal, which said so, is lost.
fn with_lost_journal() -> Host {
    let mut host = target_with(&[TargetRecord::Touched]);
    let served = host.within(|agent| {
        let entry = agent.registry.get(NAME).unwrap();
        let serves = |record: &mut ImageRecord| {
            (record.state, record.epoch) = (CopyState::Owner, Epoch(2));
        };
        agent.registry.update(&entry, serves).unwrap();
        Folder::of(&agent.store, MIGRATION).file(TARGET_JOURNAL).remove().unwrap();
    });
    assert!(served.is_some());
    host.kill();
    assert!(host.start());
    host
}

/// What its guest has written is nowhere else: only a claim at the source says that nobody wants it.
#[test]
fn what_was_served_without_a_journal_goes_when_it_was_claimed_at_the_source_and_not_before() {
    for told in TOLD.into_iter().flatten() {
        let mut host = with_lost_journal();
        assert!(is_closed(&mut host), "{told:?}");
        let nobody_says =
            host.within(|agent| agent.unrevived.give_up(&agent.registry, MIGRATION, None).unwrap());
        assert_eq!(nobody_says, Some(false), "{told:?}");
        tell_waiting(&mut host, told);
        assert!(is_closed(&mut host), "it goes by itself: {told:?}");
        let operator = host.within(|agent| {
            agent.unrevived.give_up(&agent.registry, MIGRATION, Some(told)).unwrap()
        });
        assert_eq!(operator, Some(told == Fate::Claimed), "{told:?}");
        host.kill();
        assert!(host.start());
        host.within(|agent| {
            agent.look_again();
            agent.tick();
        });
        let known = host.within(|agent| !agent.registry.all_records().is_empty()).unwrap();
        let there = partial(&host).exists().unwrap();
        assert_eq!((known, there), (told != Fate::Claimed, told != Fate::Claimed), "{told:?}");
        assert_eq!(known, is_closed(&mut host), "{told:?}");
    }
}
