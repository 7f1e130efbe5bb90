//! What a directory does as a store, one promise after the other.

use super::*;
use std::cell::RefCell;

thread_local! {
    /// Folders that this thread has synced.
    pub(super) static SYNCED: RefCell<Vec<PathBuf>> = const { RefCell::new(Vec::new()) };
}

fn store() -> (tempfile::TempDir, LocalStore) {
    let folder = tempfile::tempdir().unwrap();
    let store = LocalStore::open(&folder.path().join("deep/repository")).unwrap();
    (folder, store)
}

#[test]
fn a_name_is_created_once() {
    let (_folder, store) = store();
    assert_eq!(store.put_new("packs/a/1", b"one").unwrap(), Put::Created);
    assert_eq!(store.put_new("packs/a/1", b"two").unwrap(), Put::Existed);
    assert_eq!(store.get("packs/a/1", 3).unwrap(), b"one");
    assert_eq!(store.get("packs/a/1", 2).unwrap_err().kind(), Kind::Damaged);
    assert_eq!(store.get_range("packs/a/1", 1, 2).unwrap(), b"ne");
    assert_eq!(store.get_range("packs/a/1", 1, 3).unwrap_err().kind(), Kind::Damaged);
    assert_eq!(store.get("packs/a/2", 9).unwrap_err().kind(), Kind::NotFound);
    assert!(store.exists("packs/a/1").unwrap() && !store.exists("packs/b").unwrap());
    store.delete("packs/a/1").unwrap();
    store.delete("packs/a/1").unwrap();
    assert!(store.list("").unwrap().is_empty());
    assert_eq!(fs::read_dir(store.root.join(TEMPORARY)).unwrap().count(), 0);
}

#[test]
fn one_of_many_racing_writers_creates() {
    let (_folder, store) = store();
    let created = std::thread::scope(|scope| {
        let put = |n: u8| store.put_new("a/b/c", &[n; 100]).unwrap() == Put::Created;
        let all: Vec<_> = (0..8).map(|n| scope.spawn(move || put(n))).collect();
        all.into_iter().map(|t| t.join().unwrap()).filter(|created| *created).count()
    });
    assert_eq!(created, 1);
}

#[test]
fn listings_see_whole_objects_below_the_prefix_only() {
    let (_folder, store) = store();
    store.put_new("config", b"1").unwrap();
    store.put_new("packs/a/1", b"12").unwrap();
    fs::write(store.root.join(TEMPORARY).join("half"), b"x").unwrap();
    fs::write(store.root.join("lost+FOUND"), b"x").unwrap();
    let mut all = store.list("").unwrap();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    let all: Vec<_> = all.iter().map(|o| (o.name.as_str(), o.bytes)).collect();
    assert_eq!(all, [("config", 1), ("packs/a/1", 2)]);
    assert_eq!(store.list("packs/").unwrap().len(), 1);
    assert!(store.list("packs/b/").unwrap().is_empty());
    assert!(store.list("../").is_err() && store.put_new("../x", b"").is_err());
}

/// Nobody waits for a FIFO's other end, and nothing outside is read.
#[test]
fn only_a_regular_file_is_read() {
    let (_folder, store) = store();
    let fifo = store.root.join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", store.root.join("link")).unwrap();
    for name in ["fifo", "link"] {
        assert!(store.get(name, 9).is_err() && store.get_range(name, 0, 1).is_err(), "{name}");
    }
}

/// Whoever may write to the repository could have files of others removed, or read.
#[test]
fn no_folder_is_a_symbolic_link() {
    let (folder, store) = store();
    store.put_new("packs/a/1", b"x").unwrap();
    let others = folder.path().join("others");
    fs::create_dir_all(others.join("a")).unwrap();
    fs::write(others.join("a/1"), b"y").unwrap();
    fs::rename(store.root.join("packs"), folder.path().join("away")).unwrap();
    std::os::unix::fs::symlink(&others, store.root.join("packs")).unwrap();
    assert!(store.list("packs/").is_err() && store.list("").unwrap().is_empty());
    assert!(store.get("packs/a/1", 9).is_err() && store.delete("packs/a/1").is_err());
    assert!(store.put_new("packs/a/2", b"z").is_err());
    fs::remove_dir_all(store.root.join(".tmp")).unwrap();
    std::os::unix::fs::symlink(&others, store.root.join(".tmp")).unwrap();
    assert!(LocalStore::open(&store.root).is_err());
    assert_eq!(fs::read(others.join("a/1")).unwrap(), b"y");
}

#[test]
fn what_a_crash_left_behind_goes_when_it_is_old() {
    let (_folder, store) = store();
    let (old, young) = (store.root.join(".tmp/old"), store.root.join(".tmp/young"));
    fs::write(&old, b"x").unwrap();
    fs::write(&young, b"x").unwrap();
    File::open(&old).unwrap().set_modified(SystemTime::now() - LEFT_BEHIND).unwrap();
    LocalStore::open(&store.root).unwrap();
    assert!(!old.exists() && young.exists());
}

fn away(store: &LocalStore) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    let mut read = |path: &Path, _: &Metadata| {
        found.push(fs::read(path).unwrap());
        Ok(())
    };
    walk(&store.root.join(PUT_AWAY), &mut read, &|_| {}).unwrap();
    found.sort();
    found
}

#[test]
fn a_folder_is_no_object() {
    let (_folder, store) = store();
    store.put_new("vms/packs/1", b"content").unwrap();
    std::os::unix::fs::symlink("vms/packs/1", store.root.join("link")).unwrap();
    for name in ["vms", "vms/packs", "link", "vms/packs/1/x"] {
        assert!(!store.exists(name).unwrap(), "{name}");
        assert_eq!(store.remove(name).unwrap(), None, "{name}");
        assert!(!store.put_away(name).unwrap(), "{name}");
    }
    assert_eq!(store.get("vms/packs/1", 9).unwrap(), b"content");
    assert!(store.exists("vms/packs/1").unwrap() && away(&store).is_empty());
    assert_eq!(store.list("").unwrap().len(), 1);
}

#[test]
fn nothing_that_is_put_away_takes_the_place_of_another() {
    let (_folder, store) = store();
    // The clock stands still.
    for n in 0..50_u8 {
        store.put_new("a/b", &[n]).unwrap();
        store.move_away("a/b", &store.root.join("a/b"), 1_800_000_000_000).unwrap();
    }
    assert_eq!(away(&store), (0..50_u8).map(|n| vec![n]).collect::<Vec<_>>());
    store.put_new("a/b", &[50]).unwrap();
    assert!(store.put_away("a/b").unwrap() && !store.put_away("a/b").unwrap());
    assert_eq!(away(&store).len(), 51);
}

#[test]
fn a_sweep_removes_what_is_old_with_its_folders_and_keeps_what_has_no_time() {
    let (_folder, store) = store();
    for name in ["a/b/1", "c/2"] {
        store.put_new(name, b"four").unwrap();
        store.put_away(name).unwrap();
        store.tidy(name);
    }
    assert!(!store.root.join("a").exists());
    fs::write(store.root.join(".deleted/c/no-time"), b"12345").unwrap();
    let mut kept = Vec::new();
    store.sweep(SystemTime::UNIX_EPOCH, &mut |len| kept.push(len)).unwrap();
    kept.sort_unstable();
    assert_eq!(kept, [4, 4, 5]);
    kept.clear();
    store.sweep(SystemTime::now(), &mut |len| kept.push(len)).unwrap();
    assert_eq!(kept, [5]);
    assert!(!store.root.join(".deleted/a").exists());
}

#[test]
fn objects_are_created_while_their_folders_are_removed() {
    let (_folder, store) = store();
    std::thread::scope(|scope| {
        for n in 0..4 {
            let store = &store;
            scope.spawn(move || {
                let name = format!("a/b/{n}");
                for _ in 0..100 {
                    assert_eq!(store.put_new(&name, b"x").unwrap(), Put::Created);
                    assert_eq!(store.remove(&name).unwrap(), Some(1));
                    store.tidy(&name);
                    store.list("").unwrap();
                }
            });
        }
    });
    assert!(!store.root.join("a").exists());
}

#[test]
fn a_folder_that_somebody_else_has_just_made_is_durable_with_the_object() {
    let (_folder, store) = store();
    let root = &store.root;
    fs::create_dir_all(root.join("a/b")).unwrap();
    fs::create_dir_all(root.join(".deleted/a/b")).unwrap();
    SYNCED.take();
    store.put_new("a/b/1", b"x").unwrap();
    assert_eq!(SYNCED.take(), [root.join("a/b"), root.join("a"), root.clone()]);
    store.put_new("a/b/1", b"y").unwrap();
    assert_eq!(SYNCED.take().len(), 3, "whoever made the object may not have got there");
    store.put_away("a/b/1").unwrap();
    let away = [".deleted/a/b", ".deleted/a", ".deleted", "", "a/b"];
    let away = away.map(|folder| root.join(folder).components().collect::<PathBuf>());
    assert_eq!(SYNCED.take(), away);
}

#[test]
fn folders_that_a_crash_left_empty_go_and_others_stay() {
    let (_folder, store) = store();
    for folder in ["a/b/c", "packs/1", ".deleted/a/b"] {
        fs::create_dir_all(store.root.join(folder)).unwrap();
    }
    store.put_new("packs/2/x", b"four").unwrap();
    store.put_new("sessions/1/x", b"").unwrap();
    store.delete("sessions/1/x").unwrap();
    let mut lengths = Vec::new();
    store.measure(&mut |len| lengths.push(len)).unwrap();
    store.sweep(SystemTime::UNIX_EPOCH, &mut |_| {}).unwrap();
    assert_eq!(lengths, [4]);
    let mut left: Vec<_> =
        fs::read_dir(&store.root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, [TEMPORARY, "packs"]);
    assert_eq!(fs::read_dir(store.root.join("packs")).unwrap().count(), 1);
}
