//! What a simulated disk does to those who use it.

use super::*;
use crate::files::{read, read_settled, replace};

const DIR: &str = "/state";

fn disk(seed: u64) -> Arc<SimDisk> {
    SimDisk::new(seed, &[Path::new("/"), Path::new(DIR)])
}

#[test]
fn what_is_not_synced_survives_the_process_and_perhaps_the_host() {
    let path = Path::new("/state/a");
    let mut left = std::collections::BTreeSet::new();
    for seed in 0..200 {
        let disk = disk(seed);
        let files = disk.files();
        let file = files.create(path).unwrap();
        file.write_at(&[1; 1024], 0).unwrap();
        file.sync().unwrap();
        files.sync_dir(Path::new(DIR)).unwrap();
        file.write_at(&[2; 1024], 0).unwrap();
        disk.kill();
        assert!(file.read().is_err(), "a dead process reads nothing");
        assert_eq!(read(&disk.files(), path).unwrap(), [2; 1024]);
        disk.cut();
        let now = read(&disk.files(), path).unwrap();
        left.insert((now[0], now[600]));
    }
    assert_eq!(left.len(), 4, "either sector may be old or new: {left:?}");
}

#[test]
fn a_name_is_durable_when_its_folder_was_synced() {
    let seen = (0..100).map(|seed| {
        let disk = disk(seed);
        let files = disk.files();
        let file = files.create(Path::new("/state/a")).unwrap();
        file.write_at(b"x", 0).unwrap();
        file.sync().unwrap();
        disk.cut();
        disk.files().exists(Path::new("/state/a")).unwrap()
    });
    let kept = seen.filter(|&there| there).count();
    assert!((1..100).contains(&kept), "{kept}");
}

#[test]
fn what_a_failed_sync_lost_is_never_durable() {
    let mut kept = 0;
    for seed in 0..100 {
        let disk = disk(seed);
        let files = disk.files();
        let file = replace(&files, Path::new("/state/a"), &[1; 8]).unwrap();
        file.write_at(&[2; 8], 0).unwrap();
        disk.plan(disk.calls() + 1, Fault::Broken);
        assert!(file.sync().is_err());
        file.sync().unwrap();
        disk.cut();
        kept += u32::from(read(&disk.files(), Path::new("/state/a")).unwrap() == [2; 8]);
    }
    assert!((1..100).contains(&kept), "{kept}");
}

#[test]
fn on_a_full_disk_only_reserved_room_can_be_written() {
    let disk = disk(1);
    let files = disk.files();
    let file = files.create(Path::new("/state/a")).unwrap();
    file.reserve(0, 100).unwrap();
    disk.fill(true);
    file.write_at(&[1; 60], 0).unwrap();
    assert!(file.write_at(&[2; 60], 60).is_err());
    assert_eq!(file.len().unwrap(), 100, "the part for which there was room");
    assert!(files.create(Path::new("/state/b")).is_err());
    assert!(file.reserve(100, 1).is_err());
}

/// Whatever happens at whichever call, and once more when it is done again: the old value or the
/// new one is there, the new one if the call said so, and what a process has seen is not undone.
#[test]
fn a_value_is_replaced_or_not_whatever_happens_twice() {
    let path = Path::new("/state/a");
    let count = {
        let disk = disk(0);
        replace(&disk.files(), path, b"old").unwrap();
        let before = disk.calls();
        replace(&disk.files(), path, b"new").unwrap();
        disk.calls() - before
    };
    let mut runs = 0;
    for (first, second) in (1..=count).flat_map(|a| (1..=count).map(move |b| (a, b))) {
        for (one, two) in Fault::ALL.iter().flat_map(|&a| Fault::ALL.map(|b| (a, b))) {
            let disk = disk(first * 100 + second);
            replace(&disk.files(), path, b"old").unwrap();
            let mut said = b"old".to_vec();
            for (at, fault, value) in [(first, one, b"new"), (second, two, b"re2")] {
                disk.plan(disk.calls() + at, fault);
                let done = replace(&disk.files(), path, value).is_ok();
                // The next process believes what it sees only when that outlives the host.
                let found = read_settled(&disk.files(), path).unwrap();
                assert!(found == said || found == value, "{first} {one:?} {second} {two:?}");
                assert!(!done || found == value);
                said = found;
            }
            disk.cut();
            assert_eq!(read(&disk.files(), path).unwrap(), said);
            runs += 1;
        }
    }
    println!("{runs} pairs of faults");
}

#[test]
fn what_a_failed_sync_lost_may_be_seen_or_not_and_is_counted() {
    let path = Path::new("/state/a");
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..100 {
        let disk = disk(seed);
        let files = disk.files();
        let file = replace(&files, path, &[1; 3 * 4096]).unwrap();
        file.write_at(&[2; 3 * 4096], 0).unwrap();
        disk.plan(disk.calls() + 1, Fault::Broken);
        assert!(file.sync().is_err());
        let bytes = file.read().unwrap();
        file.write_at(&[3; 8], 0).unwrap();
        let later = read(&disk.files(), path).unwrap();
        assert_eq!(later[..8], [3; 8], "what was written since stays");
        assert!(
            bytes.len() == later.len() && !later[8..].iter().zip(&bytes[8..]).any(|(l, b)| l > b)
        );
        // A sync that fails and has nothing to lose loses nothing.
        file.sync().unwrap();
        disk.plan(disk.calls() + 1, Fault::Broken);
        assert!(file.sync().is_err());
        let failed = disk.failed_syncs(|of| of == path).swap_remove(0).1;
        assert!(failed.len() == 2 && failed[1].is_empty());
        let differs = |bytes: &[u8]| bytes.contains(&1);
        let lost = !failed[0].is_empty();
        assert!(lost || !differs(&later));
        seen.insert((differs(&bytes), differs(&later), lost));
    }
    let all =
        [(false, false, false), (false, false, true), (false, true, true), (true, true, true)];
    assert_eq!(seen, all.into());
}

#[test]
fn a_look_fails_once_or_until_it_is_mended() {
    let (path, other) = (Path::new("/state/a"), Path::new("/state/b"));
    let disk = disk(1);
    let files = disk.files();
    let file = replace(&files, path, b"a").unwrap();
    replace(&files, other, b"b").unwrap();
    disk.plan(disk.looks() + 1, Fault::Unread);
    assert!(files.exists(path).is_err());
    assert!(files.exists(path).unwrap());
    disk.plan(disk.looks() + 2, Fault::Unreadable);
    assert_eq!(read(&files, other).map_err(|why| why.raw_os_error()), Err(Some(5)));
    for _ in 0..2 {
        assert!(files.open(other).is_err(), "the file whose content could not be read");
        assert_eq!(file.read().unwrap(), b"a");
    }
    disk.kill();
    let files = disk.files();
    assert!(files.look(other).is_err());
    disk.mend();
    assert_eq!(read(&files, other).unwrap(), b"b");
    assert_eq!(disk.met(), 2);
}

#[test]
fn what_is_cut_off_gives_its_room_back() {
    let disk = disk(1);
    let files = disk.files();
    let file = files.create(Path::new("/state/a")).unwrap();
    file.reserve(0, 100).unwrap();
    file.write_at(&[1; 20], 0).unwrap();
    file.set_len(30).unwrap();
    disk.fill(true);
    file.write_at(&[1; 10], 90).unwrap();
    file.set_len(100).unwrap();
    assert!(file.write_at(&[1; 1], 100).is_err(), "to become longer takes no room");
    file.set_len(20).unwrap();
    assert!(file.write_at(&[1; 1], 20).is_err());
    file.write_at(&[1; 1], 19).unwrap();
}

#[test]
fn a_file_system_that_is_away_comes_back_as_it_was() {
    let disk = disk(1);
    let (files, path) = (disk.files(), Path::new("/state/a"));
    replace(&files, path, b"x").unwrap();
    disk.mount(Path::new(DIR), Some(Mount::Away));
    assert!(!files.exists(path).unwrap_or(false));
    assert_eq!(files.list(Path::new(DIR)).unwrap_err().kind(), io::ErrorKind::NotFound);
    assert_eq!(files.create(path).err().unwrap().kind(), io::ErrorKind::NotFound);
    disk.mount(Path::new(DIR), Some(Mount::ReadOnly));
    assert!(files.exists(path).unwrap());
    let read_only = io::ErrorKind::ReadOnlyFilesystem;
    assert_eq!(files.open(path).err().unwrap().kind(), read_only);
    assert_eq!(files.remove(path).unwrap_err().kind(), read_only);
    files.sync_dir(Path::new(DIR)).unwrap();
    disk.mount(Path::new(DIR), None);
    assert_eq!(read(&files, path).unwrap(), b"x");
}

/// As on many real file systems; only the time of its birth tells it from the one that was there before.
#[test]
fn a_file_that_is_made_again_has_the_number_of_the_one_that_is_gone_and_a_birth_of_its_own() {
    let files = disk(1).files();
    let path = Path::new("/state/a");
    files.create(path).unwrap();
    let first = files.look(path).unwrap();
    files.create(path).unwrap();
    files.rename(path, Path::new("/state/b")).unwrap();
    files.rename(Path::new("/state/b"), path).unwrap();
    let renamed = files.look(path).unwrap();
    assert_eq!((renamed.inode, renamed.birth), (first.inode, first.birth), "it is the same file");
    files.remove(path).unwrap();
    files.create_closed(path).unwrap();
    let second = files.look(path).unwrap();
    assert_eq!(second.inode, first.inode);
    assert!(first.birth.is_some() && second.birth > first.birth, "{first:?} {second:?}");
    files.create(Path::new("/state/b")).unwrap();
    assert_ne!(files.look(Path::new("/state/b")).unwrap().inode, second.inode);
}
