//! Images that are added, grow, and are found again, with faults at every call.

use super::*;
use crate::registry::surroundings::tests::Plain;
use dray_files::files::Files;
use dray_files::files::sim::{Fault, Mount, SimDisk, SimFiles};
use dray_image::{Image, StateImages};
use std::path::PathBuf;

const LEN: u64 = 8192;
const GROWN: u64 = 16384;

/// What comes at a call that changes something; the agent dies of it, or goes on and is killed later.
const FAULTS: [Fault; 4] = [Fault::KillBefore, Fault::CutBefore, Fault::NoSpace, Fault::Broken];

fn load(files: SimFiles) -> Arc<Registry> {
    try_load(files).unwrap()
}

fn try_load(files: SimFiles) -> io::Result<Arc<Registry>> {
    let files: Arc<dyn Files> = Arc::new(files);
    let state = StatePath::new(Arc::clone(&files), "/state");
    let store = Store::among(state, Arc::new(StateImages(files)))?;
    Registry::load(store, Arc::new(Plain))
}

/// A host that owns an image called "disk", of `LEN` bytes in a file that has grown to `GROWN`.
fn host_with_disk() -> (Arc<SimDisk>, Arc<Registry>) {
    let disk = SimDisk::new(1, &["/", "/state", "/pool"].map(Path::new));
    let path = PathBuf::from("/pool/disk");
    let file = disk.files().create(&path).unwrap();
    file.write_at(&[7; GROWN as usize], 0).unwrap();
    file.sync().unwrap();
    dray_files::files::sync_parent(&disk.files(), &path).unwrap();
    (Arc::clone(&disk), load(disk.files()))
}

fn add_disk(registry: &Registry) -> io::Result<Arc<Entry>> {
    let record = ImageRecord::owned("disk".into(), ImageId(1), "/pool/disk".into(), LEN);
    let file = registry.open_file(&record).unwrap();
    registry.add(record, file)
}

/// Runs `change` with each fault at each of its calls, then `look` at what the next agent finds and at
/// whether `change` said that it was done.
fn at_every_call(
    prepare: impl Fn(&Registry),
    change: impl Fn(&Registry) -> bool,
    look: impl Fn(&Registry, bool, Fault, u64),
) {
    for fault in FAULTS {
        for call in 1.. {
            let (disk, registry) = host_with_disk();
            prepare(&registry);
            disk.plan(disk.calls() + call, fault);
            let done = change(&registry);
            if disk.met() == 0 {
                assert!(done && call > 3, "{fault:?}: there are {call} calls");
                break;
            }
            drop(registry);
            disk.kill();
            disk.plan_nothing();
            look(&load(disk.files()), done, fault, call);
        }
    }
}

#[test]
fn an_image_that_grows_is_there_with_its_old_or_its_new_length_whatever_happens() {
    let grow = |registry: &Registry| {
        let old = registry.get("disk").unwrap();
        let grown = registry.regrow(&old, GROWN, None);
        // Guests go on, with what there is.
        let now = registry.get("disk").unwrap();
        assert!(now.disk.is_open());
        grown.is_ok()
    };
    let look = |registry: &Registry, done: bool, fault, call| {
        let what = format!("{fault:?} at call {call}");
        let entry = registry.get("disk").unwrap_or_else(|| panic!("{what}: it is not there"));
        let len = entry.record().len;
        assert!(len == GROWN || len == LEN && !done, "{what}: {len} bytes");
        assert_eq!(entry.disk.geometry().len, len, "{what}");
        assert!(entry.disk.is_open(), "{what}");
        // And it can be grown again.
        registry.regrow(&entry, GROWN + 4096, None).unwrap();
    };
    at_every_call(|registry| drop(add_disk(registry).unwrap()), grow, look);
}

/// What a guest is let write is what a migration moves and a backup keeps.
#[test]
fn an_image_whose_file_somebody_has_made_longer_is_as_long_as_its_record_says() {
    for (growable, migration) in [(false, false), (false, true), (true, false), (true, true)] {
        let (disk, registry) = host_with_disk();
        let entry = add_disk(&registry).unwrap();
        let line = entry.line().unwrap().lineage().open();
        let bound = migration.then_some(MigrationId(1));
        let change = |record: &mut ImageRecord| {
            (record.growable, record.migration) = (growable, bound);
        };
        registry.update(&entry, change).unwrap();
        drop((entry, registry));
        disk.kill();
        let registry = load(disk.files());
        let what = format!("growable: {growable}, in a migration: {migration}");
        if growable && migration {
            let why = registry.closed("disk").unwrap().reason.why;
            assert!(why.contains("16384") && why.contains("8192"), "{what}: {why}");
            continue;
        }
        let entry = registry.get("disk").unwrap();
        let len = if growable { GROWN } else { LEN };
        assert_eq!((entry.record().len, entry.disk.geometry().len), (len, len), "{what}");
        assert_eq!(entry.line().unwrap().lineage().open() == line, !growable, "{what}");
    }
}

#[test]
fn nobody_writes_past_the_disk_of_an_image_that_has_grown() {
    let (_disk, registry) = host_with_disk();
    let old = add_disk(&registry).unwrap();
    registry.regrow(&old, GROWN, None).unwrap();
    let late = old.disk.write_at(&[1; 512], 0, false);
    assert!(late.is_err(), "a client that came to the old disk meanwhile");
    registry.get("disk").unwrap().disk.write_at(&[1; 512], LEN, false).unwrap();
}

#[test]
fn an_image_that_could_not_be_added_is_not_there_after_a_restart() {
    let look = |registry: &Registry, done: bool, fault, call| {
        let is_there = registry.get("disk").is_some();
        // A record of which nobody knows whether it is durable may be.
        let certain = done || fault == Fault::NoSpace;
        assert!(!certain || is_there == done, "{fault:?} at call {call}: {done}");
        if !is_there {
            add_disk(registry).unwrap_or_else(|why| panic!("{fault:?} at {call}: {why}"));
        }
    };
    at_every_call(|_| {}, |registry| add_disk(registry).is_ok(), look);
}

/// The memory for its blocks would be more than there is, at each start again.
#[test]
fn an_image_that_is_too_long_is_closed_before_anything_is_made_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let record = |name: &str, len| {
        let path = dir.path().join(name);
        std::fs::write(&path, [0; 4096]).unwrap();
        ImageRecord::owned(name.to_owned(), ImageId(1), path, len)
    };
    for len in [MAX_LEN + 1, u64::MAX] {
        store.images().join("long.json").put(&record("long", len)).unwrap();
        store.images().join("short.json").put(&record("short", 4096)).unwrap();
        let registry = Registry::load(store.clone(), Arc::new(Plain)).unwrap();
        assert!(registry.get("long").is_none() && registry.get("short").is_some());
        let reason = registry.closed("long").unwrap().reason.why;
        assert!(reason.contains("longer than"), "{reason}");
    }
}

/// The state directory cannot be read when the agent starts: what it has is served when that has passed, and
/// nobody is told to put an older record there.
#[test]
fn a_record_that_the_system_does_not_give_out_is_read_again() {
    let (disk, registry) = host_with_disk();
    add_disk(&registry).unwrap();
    drop(registry);
    disk.kill();
    disk.mount(Path::new("/state/images"), Some(Mount::ReadOnly));
    let registry = load(disk.files());
    registry.open_absent();
    let closed = registry.closed("disk").unwrap();
    assert!(closed.reason.passes && registry.get("disk").is_none(), "{:?}", closed.reason);
    assert!(!closed.reason.hint.contains("copy"), "{:?}", closed.reason);
    disk.mount(Path::new("/state/images"), None);
    registry.open_absent();
    assert!(registry.closed("disk").is_none());
    assert!(registry.get("disk").unwrap().disk.is_open());
}

const SHORT: u64 = 4096;

/// Sets the length of the file of `host_with_disk`, as another program does while no agent runs.
fn set_len(disk: &Arc<SimDisk>, len: u64) {
    let file = disk.files().open(Path::new("/pool/disk")).unwrap();
    file.set_len(len).unwrap();
    file.sync().unwrap();
}

/// The guest would read zeros where its blocks were.
#[test]
fn an_image_whose_file_has_become_shorter_waits_for_it() {
    let (disk, registry) = host_with_disk();
    let entry = add_disk(&registry).unwrap();
    let line = entry.line().unwrap().lineage().open();
    drop((entry, registry));
    disk.kill();
    set_len(&disk, SHORT);
    let registry = load(disk.files());
    registry.open_absent();
    let reason = registry.closed("disk").unwrap().reason;
    assert!(registry.get("disk").is_none() && reason.passes);
    assert_eq!(reason.why, "its file has 4096 bytes, and the image has 8192");
    assert!(reason.hint.contains("`dray images add disk /pool/disk`"), "{}", reason.hint);
    // Rounded up to a block it has all of it.
    set_len(&disk, LEN - 4095);
    assert_eq!(registry.open_absent(), ["disk"]);
    assert!(registry.closed("disk").is_none() && registry.get("disk").unwrap().disk.is_open());
    assert_eq!(registry.get("disk").unwrap().line().unwrap().lineage().open(), line);
    assert!(registry.forget_unfit("disk", false).unwrap().is_none(), "it is not closed");
}

#[test]
fn an_image_whose_file_is_too_short_can_be_removed_and_added_again() {
    let (disk, registry) = host_with_disk();
    add_disk(&registry).unwrap();
    drop(registry);
    disk.kill();
    set_len(&disk, SHORT);
    let registry = load(disk.files());
    assert!(registry.forget_unfit("disk", false).unwrap().is_some());
    assert!(registry.closed("disk").is_none() && registry.open_absent().is_empty());
    let record = ImageRecord::owned("disk".into(), ImageId(2), "/pool/disk".into(), SHORT);
    registry.add(record.clone(), registry.open_file(&record).unwrap()).unwrap();
    drop(registry);
    disk.kill();
    assert!(load(disk.files()).get("disk").is_some());
    // One that is not there may come back, and one of a migration is its.
    for (bound, len) in [(None, None), (Some(MigrationId(1)), Some(SHORT))] {
        let (disk, registry) = host_with_disk();
        let entry = add_disk(&registry).unwrap();
        registry.update(&entry, |record| record.migration = bound).unwrap();
        drop((entry, registry));
        disk.kill();
        match len {
            Some(len) => set_len(&disk, len),
            None => disk.files().remove(Path::new("/pool/disk")).unwrap(),
        }
        let registry = load(disk.files());
        assert!(registry.forget_unfit("disk", false).unwrap().is_none());
        let hint = registry.closed("disk").unwrap().reason.hint;
        assert!(!hint.contains("images remove"), "{hint}");
    }
}

/// What comes grows as it comes, and the file of an image that grows is as long as it has to be.
#[test]
fn files_that_may_be_shorter_than_their_images_are_opened() {
    let short = [
        ("it grows", CopyState::Owner, true),
        ("it comes", CopyState::Incoming, false),
        ("it has left", CopyState::Replica, false),
    ];
    for (what, state, growable) in short {
        let (disk, registry) = host_with_disk();
        let entry = add_disk(&registry).unwrap();
        let change = |record: &mut ImageRecord| (record.state, record.growable) = (state, growable);
        registry.update(&entry, change).unwrap();
        drop((entry, registry));
        disk.kill();
        set_len(&disk, SHORT);
        assert!(load(disk.files()).get("disk").is_some(), "{what}");
    }
}

/// What grew on another host does not say so here, and neither do the records of earlier releases.
#[test]
fn an_image_of_which_nobody_knows_that_its_file_was_longer_is_opened() {
    let (disk, registry) = host_with_disk();
    let entry = add_disk(&registry).unwrap();
    registry.update(&entry, |record| record.whole = false).unwrap();
    drop((entry, registry));
    disk.kill();
    set_len(&disk, SHORT);
    let registry = load(disk.files());
    assert!(!registry.get("disk").unwrap().record().whole);
    drop(registry);
    disk.kill();
    // It is known as soon as it was seen once.
    set_len(&disk, LEN);
    assert!(load(disk.files()).get("disk").unwrap().record().whole);
    disk.kill();
    set_len(&disk, SHORT);
    assert!(load(disk.files()).get("disk").is_none());
}

/// A target reads from it.
#[test]
fn a_replica_that_a_target_reads_from_is_closed_when_it_is_too_short() {
    let (disk, registry) = host_with_disk();
    let entry = add_disk(&registry).unwrap();
    let change = |record: &mut ImageRecord| {
        (record.state, record.migration) = (CopyState::Replica, Some(MigrationId(1)));
    };
    registry.update(&entry, change).unwrap();
    drop((entry, registry));
    disk.kill();
    set_len(&disk, SHORT);
    let registry = load(disk.files());
    assert!(registry.closed("disk").unwrap().reason.why.contains("4096"));
}

/// Somebody had the file at the moment when dray wanted its locks back.
#[test]
fn locks_that_could_not_be_had_are_taken_when_they_can_be() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, [7; LEN as usize]).unwrap();
    let registry = Registry::load(Store::open(dir.path()).unwrap(), Arc::new(Plain)).unwrap();
    let record = ImageRecord::owned("disk".into(), ImageId(1), path.clone(), LEN);
    let entry = registry.add(record.clone(), registry.open_file(&record).unwrap()).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let other = || QemuLocks::take(&file, &path, dray_image::Hold::Owner);
    entry.drop_locks();
    let locks = other().unwrap();
    entry.regain_locks();
    registry.open_absent();
    assert!(entry.used_elsewhere().unwrap().is_some());
    drop(locks);
    registry.open_absent();
    assert!(other().is_err(), "it is dray's again");
    // QEMU is about to have it.
    entry.drop_locks();
    registry.open_absent();
    drop(other().unwrap());
}

/// This process, as the client of an image.
fn this_process() -> Process {
    let pid = std::process::id();
    let started = crate::process::started(i32::try_from(pid).unwrap()).unwrap();
    Process { pid, started }
}

/// The device below the pool alone fails: the host goes on, and with it a guest that has written and not flushed.
#[test]
fn a_guest_is_told_that_the_file_system_was_mounted_anew_while_it_ran() {
    for runs in [true, false] {
        let (disk, registry) = host_with_disk();
        let entry = add_disk(&registry).unwrap();
        if runs {
            registry.attached("disk", this_process());
        }
        drop((entry, registry));
        let flush = || load(disk.files()).get("disk").unwrap().file.flush();
        disk.kill();
        flush().unwrap();
        disk.remount(Path::new("/pool"));
        assert_eq!(flush().is_err(), runs, "a client that is still there has to hear of it");
        // Until it was told and has heard, each agent says so.
        disk.kill();
        assert_eq!(flush().is_err(), runs);
        disk.kill();
        disk.cut();
        flush().unwrap();
    }
}

/// It has written and not flushed, and comes back. One that has gone has nothing to lose.
#[test]
fn a_client_of_another_host_is_told_of_a_power_cut_and_of_a_remount() {
    for (what, loses) in [("kill", false), ("cut", true), ("remount", true)] {
        for stays in [true, false] {
            let (disk, registry) = host_with_disk();
            let entry = add_disk(&registry).unwrap();
            registry.attached_remotely(&entry);
            registry.attached_remotely(&entry);
            registry.detached_remotely(&entry);
            if !stays {
                registry.detached_remotely(&entry);
            }
            drop((entry, registry));
            disk.kill();
            match what {
                "cut" => disk.cut(),
                "remount" => disk.remount(Path::new("/pool")),
                _ => {}
            }
            let is_told = || load(disk.files()).get("disk").unwrap().file.flush().is_err();
            assert_eq!(is_told(), loses && stays, "{what}, stays: {stays}");
            disk.kill();
            assert_eq!(is_told(), loses && stays, "{what}: until it has heard");
            // Nobody has come back before the power fails again.
            disk.kill();
            disk.cut();
            assert_eq!(is_told(), stays, "{what}, and a power cut");
        }
    }
}

/// Its image is not given up before it has heard, and what says why may be lost meanwhile.
#[test]
fn what_a_client_of_another_host_is_owed_outlives_the_record_of_the_loss() {
    let (disk, registry) = host_with_disk();
    let entry = add_disk(&registry).unwrap();
    registry.attached_remotely(&entry);
    drop((entry, registry));
    disk.kill();
    disk.cut();
    for is_lost in [false, true] {
        let registry = load(disk.files());
        let entry = registry.get("disk").unwrap();
        assert!(registry.owes_remote_client(&entry), "its record is lost: {is_lost}");
        if is_lost {
            entry.file.flush().unwrap_err();
            assert!(!registry.owes_remote_client(&entry), "it was told");
        }
        super::loss_path(registry.store(), "disk").remove().unwrap();
        drop((entry, registry));
        disk.kill();
    }
}

#[test]
fn a_note_of_clients_of_other_hosts_that_cannot_be_read_may_name_one() {
    let (disk, registry) = host_with_disk();
    drop(add_disk(&registry).unwrap());
    super::mark_path(registry.store(), "disk").make_dirs().unwrap();
    drop(registry);
    disk.kill();
    load(disk.files()).get("disk").unwrap().file.flush().unwrap_err();
}

/// What the agent that sees it cannot write down, the next one sees again.
#[test]
fn a_guest_is_told_of_a_remount_whatever_the_first_agent_meets() {
    let faults = [Fault::KillBefore, Fault::KillAfter, Fault::NoSpace, Fault::Broken];
    for (fault, call) in faults.into_iter().flat_map(|fault| (1..20).map(move |n| (fault, n))) {
        let (disk, registry) = host_with_disk();
        let entry = add_disk(&registry).unwrap();
        registry.attached("disk", this_process());
        drop((entry, registry));
        disk.kill();
        disk.remount(Path::new("/pool"));
        disk.plan(disk.calls() + call, fault);
        drop(try_load(disk.files()));
        disk.plan_nothing();
        disk.kill();
        let told = load(disk.files()).get("disk").unwrap().file.flush();
        assert!(told.is_err(), "{fault:?} at call {call}");
    }
}

/// The mark belongs to the file, whatever the image is called.
#[test]
fn a_file_that_has_lost_writes_has_lost_them_under_another_name_too() {
    let full = dray_image::Error::new(ErrorKind::NoSpace, "syncing", "the pool is full");
    let record =
        |name: &str, path: &str| ImageRecord::owned(name.into(), ImageId(2), path.into(), LEN);
    let add = |registry: &Registry, record: ImageRecord| {
        let file = registry.open_file(&record).unwrap();
        registry.add(record, file).unwrap()
    };
    for fault in [None, Some(Fault::KillBefore), Some(Fault::NoSpace), Some(Fault::Broken)] {
        for call in 1..8 {
            let (disk, registry) = host_with_disk();
            add_disk(&registry).unwrap().file.owe_loss(&full);
            fault.iter().for_each(|&fault| disk.plan(disk.calls() + call, fault));
            // The next agent finds the image, or its file.
            let forgotten = registry.forget("disk");
            drop(registry);
            disk.kill();
            disk.plan_nothing();
            let registry = load(disk.files());
            let there = registry.get("disk");
            assert!(there.is_none() || fault.is_some(), "{forgotten:?}");
            let entry = there.unwrap_or_else(|| add(&registry, record("other", "/pool/disk")));
            let lost = entry.file.lost_writes().unwrap();
            assert!(lost.contains("the pool is full"), "{fault:?} at call {call}: {lost}");
            if entry.record().name == "other" {
                entry.file.flush().unwrap();
                let another = disk.files().create(Path::new("/pool/another")).unwrap();
                another.write_at(&[7; LEN as usize], 0).unwrap();
                let entry = add(&registry, record("disk", "/pool/another"));
                assert_eq!(entry.file.lost_writes(), None);
            }
        }
    }
}
