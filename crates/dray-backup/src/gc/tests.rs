//! The narrow windows of the protocol, each opened on purpose. They are too narrow for the
//! simulation to meet them often.

use super::*;
use crate::mark::Round;
use crate::piece::PIECE_BYTES;
use crate::place::PackId;
use crate::store::{Object, Put, Store};
use crate::{Backup, Consistency, Info, Key, Kind, MemoryStore, Writer, WriterOptions};
use dray_types::{Ancestor, GenerationId, ImageId};
use std::fmt;
use std::sync::{Arc, Mutex};

type Hook = Box<dyn FnOnce() + Send>;

/// Somebody's way to the store; just before the first request of a kind something else happens.
struct Hooked {
    store: Arc<dyn Store>,
    hook: Mutex<Option<(&'static str, Hook)>>,
}

impl Hooked {
    fn before(&self, request: &str, name: &str) {
        let mut hook = self.hook.lock().unwrap();
        let wanted =
            |(start, _): &mut (&str, Hook)| format!("{request} {name}").starts_with(*start);
        let hook = hook.take_if(wanted);
        if let Some((_, hook)) = hook {
            hook();
        }
    }
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a store with a hook")
    }
}

impl Store for Hooked {
    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<Put> {
        self.before("put", name);
        self.store.put_new(name, bytes)
    }

    fn get(&self, name: &str, limit: usize) -> Result<Vec<u8>> {
        self.before("get", name);
        self.store.get(name, limit)
    }

    fn get_range(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>> {
        self.before("get", name);
        self.store.get_range(name, offset, len)
    }

    fn list(&self, prefix: &str) -> Result<Vec<Object>> {
        self.before("list", prefix);
        self.store.list(prefix)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.before("delete", name);
        self.store.delete(name)
    }

    fn exists(&self, name: &str) -> Result<bool> {
        self.before("exists", name);
        self.store.exists(name)
    }
}

const IMAGE: ImageId = ImageId(1);
const BYTES: u64 = 4 * PIECE_BYTES as u64;

struct Place {
    store: Arc<MemoryStore>,
    repository: Repository,
}

impl Place {
    fn new() -> Self {
        let store = Arc::new(MemoryStore::default());
        let repository = Repository::create(store.clone(), &Key::None).unwrap();
        Self { store, repository }
    }

    /// The same repository for somebody to whom something happens.
    fn hooked(&self, before: &'static str, hook: impl FnOnce() + Send + 'static) -> Repository {
        let hook = Mutex::new(Some((before, Box::new(hook) as Hook)));
        let store = Arc::new(Hooked { store: self.store.clone(), hook });
        Repository::open(store, &Key::None).unwrap()
    }

    fn first_backup(&self) -> Backup {
        let mut writer = begin(&self.repository, None).unwrap();
        writer.put(1, &vec![1; PIECE_BYTES]).unwrap();
        finish(writer).unwrap()
    }

    fn packs(&self) -> Vec<PackId> {
        crate::writer::packs(&self.repository.core).unwrap().into_keys().collect()
    }
}

fn begin(repository: &Repository, parent: Option<&Backup>) -> Result<Writer> {
    let parent = parent.map(|parent| repository.manifest(parent)).transpose()?;
    let options = WriterOptions { threads: 0, ..WriterOptions::default() };
    repository.writer(IMAGE, BYTES, parent.as_ref(), options)
}

fn finish(writer: Writer) -> Result<Backup> {
    let generation = Ancestor { id: GenerationId(1), number: 1 };
    let (name, host) = (String::new(), String::new());
    let (parent, ancestors, consistency) = (None, vec![], Consistency::Crash);
    let (image, bytes, taken_unix_ms) = (IMAGE, BYTES, 0);
    writer.finish(Info {
        image,
        name,
        bytes,
        generation,
        parent,
        ancestors,
        taken_unix_ms,
        host,
        consistency,
    })
}

fn advance(repository: &Repository) -> GcReport {
    let mut report = GcReport::default();
    rounds::advance(&repository.core, Duration::ZERO, &mut report).unwrap();
    report
}

fn is_whole(repository: &Repository, backup: &Backup) {
    let reader = repository.reader(&repository.manifest(backup).unwrap());
    assert_eq!(reader.read_piece(1).unwrap(), vec![1; PIECE_BYTES]);
}

/// C1 was before the backup that names the packs, which will be rescued, unless it is pruned.
fn condemn_all(place: &Place, round: Round) {
    round.condemn(&place.repository.core, &place.packs()).unwrap();
    round.wait_for(&place.repository.core, &[]).unwrap();
}

#[test]
fn what_is_condemned_and_named_is_rescued() {
    let place = Place::new();
    let backup = place.first_backup();
    condemn_all(&place, Round(1));
    assert_eq!(advance(&place.repository).removed_packs, 0);
    is_whole(&place.repository, &backup);
    assert!(crate::mark::list(&place.repository.core).unwrap().is_empty());
}

#[test]
fn a_writer_does_not_rely_on_what_is_condemned_even_if_a_backup_names_it() {
    let place = Place::new();
    let first = place.first_backup();
    condemn_all(&place, Round(1));
    let writer = begin(&place.repository, Some(&first)).unwrap();
    let second = finish(writer).unwrap();
    place.repository.remove(&first).unwrap();
    assert_eq!(advance(&place.repository).removed_packs, 2);
    is_whole(&place.repository, &second);
}

#[test]
fn a_writer_announces_itself_before_it_reads_marks() {
    let place = Arc::new(Place::new());
    let first = place.first_backup();
    // The collector lists the sessions just before the writer's is there.
    let collector = place.clone();
    let host = place.hooked("put sessions/", move || condemn_all(&collector, Round(1)));
    let writer = begin(&host, Some(&first)).unwrap();
    place.repository.remove(&first).unwrap();
    advance(&place.repository);
    let second = finish(writer);
    // The content was there only while the writer might have read it: an error is as good.
    if let Ok(second) = second {
        is_whole(&place.repository, &second);
    }
}

#[test]
fn sessions_are_listed_after_the_mark() {
    let place = Arc::new(Place::new());
    let first = place.first_backup();
    let early = begin(&place.repository, Some(&first)).unwrap();
    place.repository.remove(&first).unwrap();
    // Just before the mark: what is about to be condemned is named again, another writer relies on
    // it, and it is named no more.
    let (there, late) = (place.clone(), Arc::new(Mutex::new(None)));
    let begun = late.clone();
    let host = place.hooked("put gc/", move || {
        let second = finish(early).unwrap();
        *begun.lock().unwrap() = Some(begin(&there.repository, Some(&second)).unwrap());
        there.repository.remove(&second).unwrap();
    });
    let mut report = GcReport::default();
    assert!(rounds::condemn(&host.core, &mut report).unwrap());
    assert_eq!(report.condemned_packs, 2);
    let report = advance(&place.repository);
    assert_eq!((report.removed_packs, report.waiting_rounds), (0, 1));
    let third = finish(late.lock().unwrap().take().unwrap()).unwrap();
    advance(&place.repository);
    is_whole(&place.repository, &third);
}

#[test]
fn a_collector_whose_mark_is_gone_stops() {
    let place = Arc::new(Place::new());
    let first = place.first_backup();
    condemn_all(&place, Round(1));
    // It sleeps before C4. Another finishes the round, and the packs are free to be relied on.
    let (there, late) = (place.clone(), Arc::new(Mutex::new(None)));
    let begun = late.clone();
    let host = place.hooked("list manifests/", move || {
        assert_eq!(advance(&there.repository).removed_packs, 0);
        *begun.lock().unwrap() = Some(begin(&there.repository, Some(&first)).unwrap());
        there.repository.remove(&first).unwrap();
    });
    assert_eq!(advance(&host).removed_packs, 0);
    let second = finish(late.lock().unwrap().take().unwrap()).unwrap();
    is_whole(&place.repository, &second);
}

#[test]
fn a_writer_that_was_fenced_fails_and_a_removed_parent_is_not_found() {
    let place = Place::new();
    let first = place.first_backup();
    let sleeper = begin(&place.repository, Some(&first)).unwrap();
    let parent = place.repository.manifest(&first).unwrap();
    place.repository.remove(&first).unwrap();
    // The caller still has the manifest; nothing in it may be relied on.
    let again = || place.repository.writer(IMAGE, BYTES, Some(&parent), WriterOptions::default());
    assert_eq!(again().err().unwrap().kind(), Kind::NotFound);
    let now = GcOptions {
        grace: Duration::ZERO,
        session_expiry: Duration::ZERO,
        threads: 0,
        ..GcOptions::default()
    };
    let report = place.repository.gc(now).unwrap();
    assert_eq!((report.fenced_sessions, report.removed_packs), (1, 2));
    assert_eq!(finish(sleeper).unwrap_err().kind(), Kind::Fenced);
    assert!(place.repository.all().unwrap().backups.is_empty());
    assert_eq!(again().err().unwrap().kind(), Kind::NotFound);
}
