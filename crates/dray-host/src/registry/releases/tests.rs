//! Notes: which file is which image, and when a note is of no use any more.

use super::*;
use crate::record::Adopted;
use crate::registry::Process;
use crate::registry::surroundings::tests::Plain;
use crate::released::Notes;
use crate::store::Store;
use dray_engine::lineage::FileIdentity;
use dray_files::StatePath;
use dray_types::Epoch;
use dray_types::ImageId;
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;

fn note(path: &Path, id: u128) -> Released {
    let (pid, socket) = (std::process::id() as i32, PathBuf::from("/run/vm.qmp"));
    Released {
        image: ImageRecord {
            mode: 0o600,
            epoch: Epoch(3),
            ..ImageRecord::owned("disk".into(), ImageId(id), path.to_owned(), 4096)
        },
        file: FileId::of(path).unwrap(),
        len: 4096,
        plan: Value::Null,
        qemu: QemuProcess::find(&socket, pid).unwrap(),
        bitmap: Some("writes-1".to_owned()),
        mark: Some(1),
        done: true,
        since_unix_ms: 5,
        made: false,
    }
}

fn folder() -> (tempfile::TempDir, Notes, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    std::fs::write(&path, [1; 4096]).unwrap();
    let notes = Notes::in_folder(StatePath::real(dir.path().join("released")));
    std::fs::create_dir(dir.path().join("released")).unwrap();
    (dir, notes, path)
}

#[test]
fn a_note_is_of_one_file_under_one_name() {
    let (dir, notes, path) = folder();
    let begun = Released { done: false, ..note(&path, 1) };
    notes.put(&begun).unwrap();
    assert!(notes.knows(ImageId(1)));
    assert_eq!(notes.at(&path), None, "the disk may still be on dray");
    notes.put(&note(&path, 1)).unwrap();
    assert_eq!(notes.at(&path), Some(note(&path, 1)));
    // Another file under the name, and the file under another name, are not it.
    let other = dir.path().join("other");
    std::fs::rename(&path, &other).unwrap();
    std::fs::write(&path, [1; 4096]).unwrap();
    assert_eq!((notes.at(&path), notes.at(&other)), (None, None));
    notes.sweep();
    assert!(!notes.knows(ImageId(1)));
}

/// File systems get other numbers in another boot of the host, and are mounted later than the agent starts.
#[test]
fn a_note_outlives_a_boot_that_numbers_file_systems_anew_and_one_whose_pool_comes_late() {
    let (_dir, notes, path) = folder();
    let here = note(&path, 1);
    let elsewhere = FileId { device: here.file.device + 1, ..here.file };
    let before = QemuProcess { boot: "another boot".to_owned(), ..here.qemu.clone() };
    let rebooted = Released { file: elsewhere, qemu: before, ..here.clone() };
    notes.put(&rebooted).unwrap();
    notes.sweep();
    assert_eq!(notes.at(&path), Some(rebooted.clone()));
    // Not in the same boot, and not where nothing tells when the file was made.
    let unborn = FileIdentity { birth: None, ..here.file.file };
    for other in [
        Released { file: elsewhere, ..here.clone() },
        Released { file: FileId { file: unborn, ..elsewhere }, ..rebooted.clone() },
    ] {
        notes.put(&other).unwrap();
        assert_eq!(notes.at(&path), None);
    }
    // The folder is there, and its file system is not.
    std::fs::remove_file(&path).unwrap();
    notes.put(&rebooted).unwrap();
    notes.sweep();
    assert!(notes.knows(ImageId(1)));
    notes.put(&here).unwrap();
    notes.sweep();
    assert!(!notes.knows(ImageId(1)), "the file is gone");
}

#[test]
fn another_image_at_the_path_ends_what_was_known() {
    let (_dir, notes, path) = folder();
    notes.put(&note(&path, 1)).unwrap();
    notes.remove_others(&path, ImageId(1)).unwrap();
    assert!(notes.knows(ImageId(1)));
    notes.remove_others(&path, ImageId(2)).unwrap();
    assert!(!notes.knows(ImageId(1)));
}

#[test]
fn every_qemu_that_runs_on_a_base_image_has_its_note() {
    let (_dir, notes, path) = folder();
    let known = note(&path, 1);
    let base = |id| {
        let image = ImageRecord { id: ImageId(id), read_only: true, ..known.image.clone() };
        Released { image, ..known.clone() }
    };
    let gone = QemuProcess { started: known.qemu.started + 1, ..known.qemu.clone() };
    notes.put(&base(1)).unwrap();
    notes.put(&base(2)).unwrap();
    notes.put(&Released { qemu: gone, ..base(3) }).unwrap();
    notes.remove_others(&path, ImageId(2)).unwrap();
    assert!(notes.knows(ImageId(1)) && notes.knows(ImageId(2)));
    assert!(!notes.knows(ImageId(3)), "its QEMU has ended");
}

#[test]
fn another_process_with_the_same_number_is_not_the_same_qemu() {
    let (_dir, notes, path) = folder();
    let known = note(&path, 1);
    assert!(known.is_tracked());
    let later = QemuProcess { started: known.qemu.started + 1, ..known.qemu.clone() };
    assert!(!later.runs());
    notes.put(&known).unwrap();
    assert_eq!(notes.of_process(&known.qemu).len(), 1);
    assert_eq!(notes.of_process(&later).len(), 0);
    // The agent died in between: QEMU may be on the file already.
    notes.put(&Released { done: false, ..known.clone() }).unwrap();
    assert_eq!((notes.of_process(&known.qemu).len(), notes.begun_by(&known.qemu).len()), (0, 1));
    assert_eq!(notes.begun_by(&later).len(), 0);
    // The line is worth something without its QEMU, a backing image's options are not.
    let gone = Released { qemu: later.clone(), ..known.clone() };
    notes.put(&gone).unwrap();
    let backing = ImageRecord { id: ImageId(2), read_only: true, ..known.image.clone() };
    notes.put(&Released { image: backing, qemu: later, ..known }).unwrap();
    notes.sweep();
    assert!(notes.knows(ImageId(1)) && !notes.knows(ImageId(2)));
}

/// A host whose agent has just been started.
fn start(dir: &Path) -> Arc<Registry> {
    Registry::load(Store::open(dir).unwrap(), Arc::new(Plain)).unwrap()
}

/// An image that was adopted from a QEMU that has ended.
fn adopted(registry: &Registry, dir: &Path) -> Arc<Entry> {
    let path = dir.join("disk.raw");
    std::fs::write(&path, [1; 8192]).unwrap();
    let own = QemuProcess::find(Path::new("/run/vm.qmp"), std::process::id() as i32).unwrap();
    let qemu = Some(QemuProcess { started: own.started + 1, ..own });
    let adopted = Adopted {
        qmp: "/run/vm.qmp".into(),
        qemu,
        device: "disk0".to_owned(),
        splice: Value::Null,
        noted: false,
        done: true,
    };
    let record = ImageRecord::owned("disk".into(), ImageId(1), path, 8192);
    let record = ImageRecord { adopted: Some(adopted), ..record };
    let file = registry.open_file(&record).unwrap();
    registry.add(record, file).unwrap()
}

/// What another program may do with the image's file.
fn is_free(entry: &Entry) -> bool {
    let path = entry.record().path;
    dray_image::locks::probe(&path).unwrap().is_none_or(|by| !by.excludes_owner())
}

#[test]
fn a_disk_whose_vm_has_ended_stands_in_nobodys_way() {
    let dir = tempfile::tempdir().unwrap();
    let registry = start(dir.path());
    let entry = adopted(&registry, dir.path());
    entry.regain_locks();
    assert!(!is_free(&entry), "while it is dray's");
    drop((entry, registry));
    // Also when nobody has found the time to release it: whoever comes first after a restart gets it.
    let registry = start(dir.path());
    let entry = registry.get("disk").unwrap();
    assert!(is_free(&entry));
    let qemu = registry.ended_vm(&entry.record()).unwrap();
    registry.give_back(&entry, &qemu, 5).unwrap();
    assert!(registry.get("disk").is_none());
    assert!(start(dir.path()).get("disk").is_none());
}

/// Who answers at a monitor may be a manager that made its socket.
#[test]
fn a_vm_whose_disk_is_still_used_has_not_ended() {
    let dir = tempfile::tempdir().unwrap();
    let registry = start(dir.path());
    let entry = adopted(&registry, dir.path());
    let pid = std::process::id();
    let own = Process { pid, started: crate::process::started(pid as i32).unwrap() };
    registry.attached("disk", own);
    assert_eq!(registry.ended_vm(&entry.record()), None);
    drop((entry, registry));
    let registry = start(dir.path());
    assert_eq!(registry.ended_vm(&registry.get("disk").unwrap().record()), None);
}

/// What nobody could see counts as changed, and the line goes on with that.
#[test]
fn the_generations_of_a_disk_whose_vm_has_ended_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let registry = start(dir.path());
    let entry = adopted(&registry, dir.path());
    let line = entry.line().unwrap();
    let quiet = entry.disk.quiesce(std::time::Duration::ZERO).unwrap();
    let turn = line.turning(Vec::new()).unwrap().turn(&entry.disk, &quiet, "hosta", 3).unwrap();
    turn.commit().unwrap();
    drop(quiet);
    let open = line.lineage().open();
    let qemu = registry.ended_vm(&entry.record()).unwrap();
    for _ in 0..2 {
        // An agent that dies before it has forgotten the image does it all again.
        registry.give_back(&entry, &qemu, 5).unwrap();
    }
    let (note, lineage, _) = registry.known_at(&entry.record().path).unwrap();
    assert_eq!((note.image.id, note.bitmap, note.done), (ImageId(1), None, true));
    assert_eq!(lineage.open(), open);
}

/// Whoever had the file locked when the agent started may have written to it: when the image can be opened, its
/// line says nothing about what others have of it.
#[test]
fn an_image_that_somebody_else_had_at_a_start_knows_no_past() {
    let dir = tempfile::tempdir().unwrap();
    let registry = start(dir.path());
    let path = dir.path().join("disk.raw");
    std::fs::write(&path, [1; 8192]).unwrap();
    let record = ImageRecord::owned("disk".into(), ImageId(1), path.clone(), 8192);
    let file = registry.open_file(&record).unwrap();
    let entry = registry.add(record, file).unwrap();
    let line = entry.line().unwrap();
    let quiet = entry.disk.quiesce(std::time::Duration::ZERO).unwrap();
    let turn = line.turning(Vec::new()).unwrap().turn(&entry.disk, &quiet, "hosta", 3).unwrap();
    turn.commit().unwrap();
    drop(quiet);
    registry.stop_lines(std::time::Duration::from_secs(5));
    drop((line, entry, registry));
    // In order or not: it looks as it did.
    assert!(start(dir.path()).get("disk").unwrap().line().unwrap().lineage().has_past());
    let other = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let held = dray_image::QemuLocks::take(&other, &path, dray_image::Hold::Owner).unwrap();
    let registry = start(dir.path());
    assert!(registry.get("disk").is_none() && registry.closed("disk").is_some());
    drop((held, other));
    assert_eq!(registry.open_absent(), ["disk"]);
    assert!(!registry.get("disk").unwrap().line().unwrap().lineage().has_past());
}

/// The file system may give the new file the number of the old one.
#[test]
fn a_file_that_was_made_again_is_not_that_of_the_note() {
    let (_dir, notes, path) = folder();
    notes.put(&note(&path, 1)).unwrap();
    // Its clock is coarse.
    std::thread::sleep(std::time::Duration::from_millis(20));
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, [2; 4096]).unwrap();
    assert_eq!(notes.at(&path), None);
    notes.sweep();
    assert!(!notes.knows(ImageId(1)));
}
