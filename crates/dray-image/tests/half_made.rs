//! What could not be made whole is not in the way of the next try.

use dray_files::StatePath;
use dray_image::{ImageNames, Journal};
use std::process::Command;

#[test]
fn a_file_that_could_not_be_made_leaves_its_name_free() {
    let dir = tempfile::Builder::new().prefix("image-half-").tempdir().unwrap();
    let names = ImageNames::of(&dir.path().join("vm.raw")).unwrap();
    names.create_partial(u64::MAX >> 2).expect_err("no file system has files of that length");
    assert!(!names.found().unwrap().partial);
    names.create_partial(8192).unwrap();
}

/// A file system of a mebibyte.
struct Small(tempfile::TempDir);

impl Small {
    fn mount() -> Option<Self> {
        let dir = tempfile::Builder::new().prefix("image-small-").tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(dir.path());
        if !mount.status().is_ok_and(|status| status.success()) {
            println!("SKIPPED: a small file system cannot be mounted here");
            return None;
        }
        Some(Self(dir))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_journal_that_has_no_room_to_be_rewritten_goes_on_as_it_is() {
    let Some(small) = Small::mount() else { return };
    let path = small.0.path().join("journal");
    let (mut journal, _) = Journal::open(&StatePath::real(&path)).unwrap();
    journal.append(b"one").unwrap();
    let filler = small.0.path().join("filler");
    std::fs::write(&filler, vec![1; 900 << 10]).unwrap();
    journal.rewrite(&[&vec![7; 512 << 10]]).unwrap_err();
    let names: Vec<_> = std::fs::read_dir(small.0.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names.len(), 2, "half a journal is left behind: {names:?}");
    journal.append(b"two").unwrap();
    std::fs::remove_file(&filler).unwrap();
    journal.rewrite(&[b"three"]).unwrap();
    journal.append(b"four").unwrap();
    let (_, records) = Journal::open(&StatePath::real(&path)).unwrap();
    assert_eq!(records, [b"three".to_vec(), b"four".to_vec()]);
}
