//! Every fault has an error of its own kind, and harms nothing else.

mod common;

use common::{Image, info, key, settings};
use dray_backup::{
    Backup, Content, Dedup, Error, Fault, FaultyStore, GcOptions, Info, Key, Kind, Level,
    LocalStore, MemoryStore, NEVER_CHANGES, PIECE_BYTES, Policy, Repository, Store, StreamOptions,
    WriterOptions,
};
use dray_types::{Ancestor, GenerationId};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

struct Setup {
    store: Arc<MemoryStore>,
    faulty: Arc<FaultyStore>,
    repository: Repository,
}

fn setup(key: &Key) -> Setup {
    let store = Arc::new(MemoryStore::default());
    let faulty = Arc::new(FaultyStore::new(store.clone()));
    let repository = Repository::create_with(faulty.clone(), key, settings(200_000)).unwrap();
    Setup { store, faulty, repository }
}

/// Without threads, so that the number of effects is always the same.
fn inline() -> WriterOptions {
    WriterOptions { threads: 0, ..WriterOptions::default() }
}

fn now() -> GcOptions {
    GcOptions {
        grace: Duration::ZERO,
        session_expiry: Duration::ZERO,
        threads: 0,
        ..Default::default()
    }
}

fn image(pieces: u64, seed: u8) -> Image {
    let mut image = Image::new(1, 40 * PIECE_BYTES as u64);
    (0..pieces).for_each(|ix| image.write(ix, seed + ix as u8));
    image
}

fn back_up(
    repository: &Repository,
    image: &Image,
    parent: Option<&Backup>,
) -> Result<Backup, Error> {
    let parent = parent.map(|parent| repository.manifest(parent)).transpose()?;
    let mut writer = repository.writer(image.id, image.bytes, parent.as_ref(), inline())?;
    for ix in 0..image.bytes.div_ceil(PIECE_BYTES as u64) {
        writer.put(ix, &image.piece(ix))?;
    }
    writer.finish(info(image))
}

fn names(store: &dyn Store, prefix: &str) -> Vec<String> {
    store.list(prefix).unwrap().into_iter().map(|object| object.name).collect()
}

#[test]
fn a_wrong_key_is_one_clear_error() {
    let pass = |text: &str| Key::Passphrase(text.as_bytes().to_vec());
    for (right, wrong) in [
        (Key::Raw([1; 32]), Key::Raw([2; 32])),
        (Key::Raw([1; 32]), Key::None),
        (Key::None, Key::Raw([1; 32])),
        (pass("right"), pass("wrong")),
        (pass("right"), Key::Raw([1; 32])),
    ] {
        let setup = setup(&right);
        let opened = Repository::open(setup.store.clone(), &wrong);
        assert_eq!(opened.unwrap_err().kind(), Kind::WrongKey, "{wrong:?}");
        Repository::open(setup.store, &right).unwrap();
    }
    let none = Repository::open(Arc::new(MemoryStore::default()), &Key::None);
    assert_eq!(none.unwrap_err().kind(), Kind::NotFound);
    let setup = setup(&Key::None);
    let again = Repository::create(setup.store, &Key::None);
    assert_eq!(again.unwrap_err().kind(), Kind::Exists);
}

#[test]
fn keys_come_from_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    std::fs::write(&path, "0f".repeat(32) + "\n").unwrap();
    assert_eq!(Key::from_file(&path).unwrap(), Key::Raw([15; 32]));
    std::fs::write(&path, "0g".repeat(32)).unwrap();
    assert_eq!(Key::from_file(&path).unwrap_err().kind(), Kind::Invalid);
    std::fs::write(&path, "two words \n").unwrap();
    assert_eq!(Key::from_passphrase_file(&path).unwrap(), Key::Passphrase(b"two words".to_vec()));
    assert_eq!(Key::from_file(&folder.path().join("no")).unwrap_err().kind(), Kind::NotFound);
}

#[test]
fn an_encrypted_store_shows_nothing_of_the_content() {
    let setup = setup(&key(true));
    let mut image = Image::new(1, 4 * PIECE_BYTES as u64);
    image.write(0, 1);
    image.write(1, 5);
    back_up(&setup.repository, &image, None).unwrap();
    let hash = *blake3::hash(&image.piece(1)).as_bytes();
    for name in names(&*setup.store, "") {
        let bytes = setup.store.get(&name, 1 << 24).unwrap();
        let shows = |secret: &[u8]| bytes.windows(secret.len()).any(|window| window == secret);
        assert!(!shows(&image.piece(1)[..32]) && !shows(&hash) && !shows(b"hosta"), "{name}");
    }
}

#[test]
fn damage_is_about_one_piece_and_verify_finds_it() {
    for sealed in [false, true] {
        let setup = setup(&key(sealed));
        let image = image(12, 4);
        let good = back_up(&setup.repository, &image, None).unwrap();
        let manifest = setup.repository.manifest(&good).unwrap();
        let reader = setup.repository.reader(&manifest);
        let dray_backup::Piece::Data { place, .. } = reader.piece(5).unwrap() else { panic!() };
        let flip = |bytes: &mut Vec<u8>| bytes[place.offset as usize + 77] ^= 4;
        assert!(setup.store.tamper(&place.pack.name(), flip));
        let error = reader.read_piece(5).unwrap_err();
        assert_eq!((error.kind(), error.piece()), (Kind::Damaged, Some(5)));
        let mut bad = Vec::new();
        reader.stream(std::iter::once(0..12), StreamOptions::default(), |ix, content| {
            match content {
                Ok(Content::Data(bytes)) => assert_eq!(bytes, image.piece(ix)),
                Ok(Content::Zero) => panic!("piece {ix} is not zero"),
                Err(error) => bad.push((ix, error.kind(), error.piece())),
            }
            ControlFlow::Continue(())
        });
        assert_eq!(bad, [(5, Kind::Damaged, Some(5))]);
        assert!(setup.repository.verify(Level::Manifests).unwrap().problems.is_empty());
        let report = setup.repository.verify(Level::Everything).unwrap();
        assert_eq!((report.backups, report.pieces, report.problems.len()), (1, 12, 1));
        let problem = &report.problems[0];
        assert_eq!((problem.pieces, problem.first_piece), (1, Some(5)));
        assert_eq!(problem.backup.as_ref(), Some(&good));
    }
}

#[test]
fn a_pack_that_is_cut_off_or_gone_costs_its_own_pieces() {
    let setup = setup(&Key::None);
    let backup = back_up(&setup.repository, &image(12, 4), None).unwrap();
    let reader = setup.repository.reader(&setup.repository.manifest(&backup).unwrap());
    let dray_backup::Piece::Data { place, .. } = reader.piece(2).unwrap() else { panic!() };
    let pack = place.pack.name();
    let kinds = || {
        let mut kinds = Vec::new();
        reader.stream(std::iter::once(0..12), StreamOptions { parallel: 1 }, |_, content| {
            kinds.push(content.err().map(|error| error.kind()));
            ControlFlow::Continue(())
        });
        kinds
    };
    setup.store.tamper(&pack, |bytes| bytes.truncate(place.offset as usize + 1));
    let cut = kinds();
    assert_eq!(cut.len(), 12);
    assert!(cut[..2].iter().all(Option::is_none) && cut[2] == Some(Kind::Damaged), "{cut:?}");
    assert_eq!(cut.iter().flatten().count(), 2, "the pack's third and fourth piece");
    let report = setup.repository.verify(Level::Manifests).unwrap();
    assert_eq!(report.problems[0].pieces, 2);
    setup.store.delete(&pack).unwrap();
    let gone = kinds();
    assert_eq!(gone.iter().flatten().count(), 4);
    assert!(gone.iter().flatten().all(|kind| *kind == Kind::NotFound));
    assert_eq!(setup.repository.verify(Level::Everything).unwrap().problems[0].pieces, 4);
}

#[test]
fn a_truncated_manifest_leaves_the_others_usable_and_stops_only_the_collector() {
    let setup = setup(&Key::None);
    let image = image(6, 1);
    let first = back_up(&setup.repository, &image, None).unwrap();
    let second = back_up(&setup.repository, &image, Some(&first)).unwrap();
    let folder = format!("manifests/{}/", image.id);
    let name = names(&*setup.store, &folder).into_iter().min().unwrap();
    setup.store.tamper(&name, |bytes| bytes.truncate(100));
    assert_eq!(setup.repository.manifest(&first).unwrap_err().kind(), Kind::Damaged);
    let listing = setup.repository.backups(image.id).unwrap();
    assert_eq!(listing.backups, std::slice::from_ref(&second));
    assert_eq!(
        (listing.damaged[0].0.as_str(), listing.damaged[0].1.kind()),
        (&*name, Kind::Damaged)
    );
    image.check(&setup.repository, &second);
    assert_eq!(setup.repository.verify(Level::Manifests).unwrap().problems.len(), 1);
    assert_eq!(setup.repository.gc(now()).unwrap_err().kind(), Kind::Damaged);
    setup.repository.remove_damaged(&name).unwrap();
    setup.repository.gc(now()).unwrap();
    image.check(&setup.repository, &second);
}

#[test]
fn a_store_that_fails_is_unavailable_and_a_slow_one_only_slow() {
    let setup = setup(&Key::None);
    let image = image(8, 4);
    let backup = back_up(&setup.repository, &image, None).unwrap();
    let reader = setup.repository.reader(&setup.repository.manifest(&backup).unwrap());
    setup.faulty.set([("packs/", Fault::Error)]);
    assert_eq!(reader.read_piece(0).unwrap_err().kind(), Kind::Unavailable);
    reader.stream(std::iter::once(0..8), StreamOptions::default(), |ix, content| {
        assert_eq!(content.unwrap_err().piece(), Some(ix));
        ControlFlow::Continue(())
    });
    let failed = back_up(&setup.repository, &self::image(9, 5), Some(&backup));
    assert_eq!(failed.unwrap_err().kind(), Kind::Unavailable);
    setup.faulty.set([("", Fault::Error)]);
    assert_eq!(setup.repository.all().unwrap_err().kind(), Kind::Unavailable);
    assert_eq!(setup.repository.gc(now()).unwrap_err().kind(), Kind::Unavailable);
    setup.faulty.set([("packs/", Fault::Slow(Duration::from_millis(20)))]);
    let begun = Instant::now();
    image.check(&setup.repository, &backup);
    assert!(begun.elapsed() >= Duration::from_millis(20));
}

#[test]
fn a_crash_after_any_effect_leaves_a_whole_backup_or_none() {
    for threads in [0, 2] {
        let setup = setup(&Key::None);
        let before = image(8, 1);
        let parent = back_up(&setup.repository, &before, None).unwrap();
        let after = image(12, 3);
        let mut committed = 0;
        for most in 0.. {
            let parent = setup.repository.manifest(&parent).unwrap();
            setup.faulty.set([("", Fault::CrashAfter(most))]);
            let options = WriterOptions { threads, dedup: Dedup::Parent, ..inline() };
            let write = || {
                let writer = setup.repository.writer(after.id, after.bytes, Some(&parent), options);
                let mut writer = writer?;
                (0..12).try_for_each(|ix| writer.put(ix, &after.piece(ix)))?;
                writer.finish(info(&after))
            };
            let finished = write();
            let crashed = setup.faulty.refused() > 0;
            setup.faulty.set([]);
            let listed = setup.repository.backups(after.id).unwrap();
            assert!(listed.damaged.is_empty());
            committed = listed.backups.len() - 1;
            assert!(finished.is_err() || committed > 0);
            listed.backups[1..].iter().for_each(|backup| after.check(&setup.repository, backup));
            if !crashed {
                break;
            }
            // What the crash left is collected.
            setup.repository.gc(now()).unwrap();
            before.check(&setup.repository, parent.backup());
            if committed > 0 {
                setup.repository.remove(&listed.backups[1]).unwrap();
            }
            setup.repository.gc(now()).unwrap();
            let left = names(&*setup.store, "");
            let tombstones = left.iter().filter(|name| name.starts_with("manifests/")).count() - 1;
            let rest = left.len() - tombstones;
            assert_eq!(rest, 5, "config, manifest, two data packs, one of segments: {left:?}");
        }
        assert_eq!(committed, 1);
    }
}

#[test]
fn a_collector_that_dies_anywhere_loses_nothing_and_the_next_one_finishes() {
    for most in 0..40 {
        let setup = setup(&Key::None);
        let mut image = image(12, 1);
        let first = back_up(&setup.repository, &image, None).unwrap();
        (0..12).step_by(2).for_each(|ix| image.write(ix, 100 + ix as u8));
        let second = back_up(&setup.repository, &image, Some(&first)).unwrap();
        setup.repository.remove(&first).unwrap();
        setup.faulty.set([("", Fault::CrashAfter(most))]);
        let collected = setup.repository.gc(GcOptions { keep_percent: 70, ..now() });
        let done = setup.faulty.refused() == 0;
        assert_eq!(done, collected.is_ok());
        setup.faulty.set([]);
        image.check(&setup.repository, &second);
        let again = || setup.repository.gc(GcOptions { keep_percent: 70, ..now() }).unwrap();
        again();
        again();
        assert_eq!(again(), Default::default(), "nothing left to do after {most}");
        image.check(&setup.repository, &second);
        assert!(setup.repository.verify(Level::Everything).unwrap().problems.is_empty());
        if done {
            assert!(most > 5);
            return;
        }
    }
    panic!("a collection takes more than 40 changes");
}

#[test]
fn base_images_are_pruned_only_when_they_are_named() {
    let setup = setup(&key(false));
    let base = image(3, 1);
    // They were made years ago.
    for _ in 0..2 {
        let mut writer = setup.repository.writer(base.id, base.bytes, None, inline()).unwrap();
        (0..40).for_each(|ix| writer.put(ix, &base.piece(ix)).unwrap());
        let never = Ancestor { id: GenerationId(9), number: NEVER_CHANGES };
        writer.finish(Info { generation: never, ..info(&base) }).unwrap();
    }
    let policy = Policy { within_days: 1, ..Policy::default() };
    let pruned = setup.repository.prune(None, policy, false).unwrap();
    assert_eq!((pruned.kept.len(), pruned.removed.len()), (2, 0));
    let pruned = setup.repository.prune(Some(base.id), policy, false).unwrap();
    assert_eq!((pruned.kept.len(), pruned.removed.len()), (1, 1));
}

#[test]
fn pruning_and_collecting_in_a_directory_frees_the_space() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(LocalStore::open(folder.path()).unwrap());
    let repository = Repository::create_with(store.clone(), &key(true), settings(100_000)).unwrap();
    let mut last = None;
    for n in 0..4 {
        last = Some(back_up(&repository, &image(12, 4 + 20 * n), last.as_ref()).unwrap());
    }
    let bytes = || store.list("packs/").unwrap().iter().map(|object| object.bytes).sum::<u64>();
    let full = bytes();
    let policy = Policy { last: 1, ..Policy::default() };
    assert_eq!(repository.prune(None, policy, true).unwrap().removed.len(), 3);
    let pruned = repository.prune(None, policy, false).unwrap();
    assert_eq!((pruned.kept.len(), pruned.removed.len()), (1, 3));
    let waiting = repository.gc(GcOptions { grace: Duration::from_secs(60), ..now() }).unwrap();
    assert!(waiting.condemned_packs > 0 && waiting.removed_packs == 0 && bytes() == full);
    let report = repository.gc(now()).unwrap();
    assert_eq!(report.removed_bytes, full - bytes());
    assert!(bytes() < full / 3);
    image(12, 64).check(&repository, &last.unwrap());
    assert!(repository.prune(None, Policy::default(), false).is_err());
}
