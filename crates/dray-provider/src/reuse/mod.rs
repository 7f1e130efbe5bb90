//! The content of this host's images, by hash, for migrations to this host.
//!
//! The [`Index`] knows for a hash where such content was seen, in images and replicas of this host,
//! in other files of its pools, and in images that are just arriving. It is a hint and nothing more:
//! what it leads to is read and hashed each time, and used only if it has the hash that was asked
//! for ([`Reuse::find`]), so a stale entry, a damaged file or a file that somebody has edited costs a
//! look and never a wrong block (I3). Content is read into memory, hashed there and written from
//! there: a reflink would save the writing, but what is linked could change between hash and link.
//!
//! An image gets content only from where its [`Asker`] may: else a peer could learn, hash by hash, what other images
//! hold (I7).

mod asker;
mod builder;
mod continuations;
mod files;
mod index;
mod scope;
mod store;
mod wanted;

pub use asker::Asker;
pub use files::FileRef;
pub use index::Spot;
pub use wanted::{Lacking, PATIENCE, Wanted};

use continuations::AllContinuations;
use dray_config::Config;
use dray_host::registry::Registry;
use dray_image::runs;
use dray_types::{BLOCK_SIZE, BlockRange};
use dray_wire::frame::{PIECE_BLOCKS, PieceHash};
use files::{Files, Found};
use index::Index;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use store::{Batch, Store};

/// Bytes of a piece.
pub const PIECE_BYTES: usize = (PIECE_BLOCKS * BLOCK_SIZE) as usize;

/// Counters, for logs and tests.
#[derive(Debug, Default)]
pub struct Looks {
    /// Pieces that were asked for.
    pub asked: AtomicU64,
    /// Those that were found, read and right.
    pub found: AtomicU64,
    /// Entries that proved wrong and were dropped.
    pub wrong: AtomicU64,
}

/// Content of this host by hash.
pub struct Reuse {
    config: Arc<Config>,
    files: Files,
    index: Index,
    /// What peers were told to send and has not arrived.
    pub wanted: Wanted,
    leads: Mutex<AllContinuations>,
    /// Migrations away from here by peer, for sources: who else sends there.
    moving: Mutex<HashMap<String, usize>>,
    /// What came of asking.
    pub looks: Looks,
}

impl Reuse {
    /// Nothing is known yet.
    pub fn new(config: Arc<Config>, registry: Arc<Registry>) -> Arc<Self> {
        Arc::new(Self {
            files: Files::new(registry),
            config,
            index: Index::default(),
            wanted: Wanted::default(),
            leads: Mutex::default(),
            moving: Mutex::default(),
            looks: Looks::default(),
        })
    }

    /// Whether content is reused at all, at both ends.
    pub fn is_on(&self) -> bool {
        self.config.reuse.enabled
    }

    /// Opens the index at `path`, if the operator wants one, and fills it, in the background from now on,
    /// unless something `moves`. Nobody waits for it: one that was not closed in order takes a while.
    ///
    /// # Errors
    /// When there can be no thread.
    pub fn keep(
        self: &Arc<Self>,
        path: &Path,
        moves: impl Fn() -> bool + Send + 'static,
    ) -> io::Result<()> {
        let wanted = self.config.reuse.enabled && self.config.reuse.index;
        if wanted { builder::start(self, path, moves) } else { Ok(()) }
    }

    /// What is durable can be asked from now on.
    fn set_store(&self, store: Store) {
        self.files.load(store.files().unwrap_or_default());
        self.index.set_store(store);
    }

    /// Closes files that nobody reads any more. Called every few seconds.
    pub fn close_idle(&self) {
        self.files.close_idle();
    }

    /// Bytes of content that the durable index knows.
    pub fn indexed_bytes(&self) -> u64 {
        self.index.store().map_or(0, Store::pieces) * PIECE_BYTES as u64
    }

    /// Whether the store has reached the size that it may have.
    fn is_full(&self) -> bool {
        self.index.store().is_none_or(|store| store.bytes() >= self.config.reuse.index_size)
    }

    fn write(&self, batch: Batch) -> io::Result<()> {
        let files = batch.files.clone();
        self.index.write(batch)?;
        files.into_iter().for_each(|(number, file)| self.files.set_scanned(number, file));
        Ok(())
    }

    fn forget(&self, gone: &HashSet<u32>) -> io::Result<()> {
        self.files.forget(gone);
        self.index.store().map_or(Ok(()), |store| store.forget(gone))
    }

    /// For whom content is looked for, when the image of `file` comes from `peer`.
    pub fn asker(&self, peer: &str, file: &FileRef) -> Asker {
        let path = self.files.path_of(file);
        Asker::new(&self.config, peer, file.clone(), path.as_deref())
    }

    /// Fills `out`, a piece long, with content that has this hash, if there is some that the image may
    /// get; where it was. Entries that prove wrong are dropped.
    pub fn find(&self, asker: &Asker, hash: &PieceHash, out: &mut [u8]) -> Option<Spot> {
        self.looks.asked.fetch_add(1, Relaxed);
        self.index.get(&asker.scopes, hash).find(|spot| self.is_at(asker, hash, *spot, out))
    }

    fn is_at(&self, asker: &Asker, hash: &PieceHash, spot: Spot, out: &mut [u8]) -> bool {
        let Some(found) = self.files.open(spot.file) else {
            self.index.remove(&asker.scopes, hash, spot);
            return false;
        };
        if !asker.may_see(&self.config, &found) {
            return false;
        }
        let read = runs::read_run(&*found.file, spot.range(), out);
        if read.is_ok() && blake3::hash(out).as_bytes() == hash {
            self.looks.found.fetch_add(1, Relaxed);
            return true;
        }
        self.looks.wrong.fetch_add(1, Relaxed);
        self.index.remove(&asker.scopes, hash, spot);
        false
    }

    /// What is there, if the image may get it.
    fn open(&self, asker: &Asker, spot: Spot) -> Option<Found> {
        self.files.open(spot.file).filter(|found| asker.may_see(&self.config, found))
    }

    /// Fills `out`, a piece long, with whatever is there, for somebody who compares it; false when
    /// there is nothing that the image may get.
    pub fn read(&self, asker: &Asker, spot: Spot, out: &mut [u8]) -> bool {
        let found = self.open(asker, spot);
        found.is_some_and(|found| runs::read_run(&*found.file, spot.range(), out).is_ok())
    }

    /// Whether content with this hash is there; `out` is memory for a piece.
    pub fn has(&self, asker: &Asker, spot: Spot, hash: &PieceHash, out: &mut [u8]) -> bool {
        self.has_data(asker, spot)
            && self.read(asker, spot, out)
            && blake3::hash(out).as_bytes() == hash
    }

    /// Whether something that the image may get is there: neither a hole nor past the end.
    pub fn has_data(&self, asker: &Asker, spot: Spot) -> bool {
        self.open(asker, spot).is_some_and(|found| {
            runs::data_blocks(&*found.file, spot.range()).is_ok_and(|blocks| !blocks.is_empty())
        })
    }

    /// The two places hold, or will hold, the same.
    pub fn alike(&self, one: Spot, other: Spot) {
        self.leads.lock().alike(one, other);
    }

    /// Places that probably hold something similar and that the image may get, the best first.
    pub fn similar(&self, asker: &Asker, spot: Spot) -> Vec<Spot> {
        let mut all = self.leads.lock().of(spot);
        all.retain(|spot| self.open(asker, *spot).is_some());
        all
    }

    /// The place of a piece of `file`.
    pub fn spot(&self, file: &FileRef, piece: u64) -> Option<Spot> {
        Some(Spot { file: self.files.number(file), piece: u32::try_from(piece).ok()? })
    }

    /// Content with this hash is there, as far as anybody knows: in the image that `asker` stands for.
    pub fn remember(&self, asker: &Asker, hash: &PieceHash, spot: Spot) {
        self.index.insert(asker.scope, hash, spot);
    }

    /// A migration to `peer` begins; it counts until the guard is dropped.
    pub fn company(self: &Arc<Self>, peer: &str) -> Company {
        let mut moving = self.moving.lock();
        *moving.entry(peer.to_owned()).or_default() += 1;
        Company { reuse: Arc::clone(self), peer: peer.to_owned() }
    }
}

impl Spot {
    fn range(self) -> BlockRange {
        BlockRange::new(u64::from(self.piece) * PIECE_BLOCKS, PIECE_BLOCKS)
    }
}

/// A migration among others to the same peer.
pub struct Company {
    reuse: Arc<Reuse>,
    peer: String,
}

impl Company {
    /// Whether there are others.
    pub fn is_together(&self) -> bool {
        let moving = self.reuse.moving.lock();
        moving.get(&self.peer).is_some_and(|&count| count > 1)
    }
}

impl Drop for Company {
    fn drop(&mut self) {
        let mut moving = self.reuse.moving.lock();
        if let Some(count) = moving.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                moving.remove(&self.peer);
            }
        }
    }
}
