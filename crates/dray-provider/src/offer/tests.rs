//! The store as a peer uses it: its questions, without the stream that carries them.

use super::*;
use crate::peer::{PeerStore, Way};
use dray_backup::repository::Settings;
use dray_backup::world::{SystemWorld, World};
use dray_backup::{Consistency, Info, Key, PIECE_BYTES, Repository, SESSIONS, WriterOptions};
use dray_types::{Ancestor, GenerationId, ImageId};
use std::sync::atomic::{AtomicU64, Ordering};

const PIECES: u64 = 12;

/// The questions of one peer.
struct Direct(Arc<Offer>);

impl Way for Direct {
    fn peer(&self) -> &'static str {
        "hostb"
    }

    fn ask(&self, ask: &Ask, body: &[u8]) -> io::Result<(Answer, Vec<u8>)> {
        let own = self.0.shelf("hostb").map_err(io::Error::other)?;
        let view = View { offer: &self.0, own, others: Vec::new() };
        Ok(view.answer(ask.clone(), body))
    }
}

pub(super) fn rules(append_only: bool) -> StoreRules {
    let keep_deleted = Duration::from_secs(3600);
    StoreRules { append_only, keep_deleted, max_bytes: None, max_objects: 1000 }
}

/// A clock that a test moves.
#[derive(Default)]
struct Clock(AtomicU64);

impl World for Clock {
    fn unix_ms(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn fill(&self, bytes: &mut [u8]) -> Result<()> {
        SystemWorld.fill(bytes)
    }
}

fn info() -> Info {
    Info {
        image: ImageId(1),
        name: "vm1.img".into(),
        bytes: PIECES * PIECE_BYTES as u64,
        generation: Ancestor { id: GenerationId(5), number: 1 },
        parent: None,
        ancestors: Vec::new(),
        taken_unix_ms: 1_700_000_000_000,
        host: "hostb".into(),
        consistency: Consistency::Crash,
    }
}

#[test]
fn a_backup_of_any_length_works_in_an_append_only_store_in_any_folder() {
    for folder in ["", "team1/vms"] {
        let dir = tempfile::tempdir().unwrap();
        let offer = Arc::new(Offer::new(dir.path(), rules(true)));
        let store = Arc::new(PeerStore::on(Direct(offer), folder));
        let clock = Arc::new(Clock::default());
        let settings = Settings { world: clock.clone(), ..Settings::default() };
        let repository = Repository::create_with(store.clone(), &Key::None, settings).unwrap();
        let options = WriterOptions { threads: 0, ..WriterOptions::default() };
        let mut writer = repository.writer(ImageId(1), info().bytes, None, options).unwrap();
        for piece in 0..PIECES {
            // An hour in all: the sign of life is renewed with each piece, and the one before removed.
            clock.0.fetch_add(Duration::from_secs(301).as_millis() as u64, Ordering::Relaxed);
            writer.put(piece, &[piece as u8 + 1; PIECE_BYTES]).unwrap();
            let marks = store.list(SESSIONS).unwrap();
            assert_eq!(marks.len(), 2, "{folder}: {marks:?}");
        }
        let backup = writer.finish(info()).unwrap();
        assert_eq!(store.list(SESSIONS).unwrap(), Vec::new(), "{folder}");
        let reader = repository.reader(&repository.manifest(&backup).unwrap());
        for piece in 0..PIECES {
            assert_eq!(reader.read_piece(piece).unwrap(), [piece as u8 + 1; PIECE_BYTES]);
        }
        // What the backup consists of nobody at hostb can delete.
        for object in store.list("").unwrap() {
            let why = store.delete(&object.name).unwrap_err();
            assert_eq!(why.kind(), Kind::Denied, "{why}");
        }
    }
}
