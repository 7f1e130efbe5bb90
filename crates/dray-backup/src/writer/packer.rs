//! Packing: content → hash → known already, or compressed, sealed and appended to a pack.

use crate::error::{Error, Kind, Result};
use crate::index::Index;
use crate::pack::Builder;
use crate::piece::{Hash, Piece};
use crate::place::PackSlice;
use crate::repository::Core;
use crate::store::Put;
use parking_lot::RwLock;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// What the packers of one session share.
pub(super) struct Shared {
    core: Arc<Core>,
    session: u128,
    next: AtomicU32,
    index: RwLock<Index>,
    stored: AtomicU64,
}

impl Shared {
    pub(super) fn new(core: &Arc<Core>, session: u128, index: Index) -> Self {
        let (next, stored) = (AtomicU32::new(0), AtomicU64::new(0));
        Self { core: core.clone(), session, next, index: RwLock::new(index), stored }
    }

    pub(super) fn stored_bytes(&self) -> u64 {
        self.stored.load(Ordering::Relaxed)
    }

    fn find(&self, hash: &Hash) -> Option<PackSlice> {
        self.index.read().get(hash)
    }

    fn builder(&self) -> Result<Builder> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Builder::new(self.session, number, &self.core.keys)
    }
}

/// One open pack, and what is in it.
pub(super) struct Packer {
    shared: Arc<Shared>,
    open: Option<Builder>,
    inside: HashMap<Hash, (u32, u32)>,
    waiting: Vec<(u64, Hash)>,
    done: Vec<(u64, Piece)>,
}

impl Packer {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        let (inside, waiting, done) = (HashMap::new(), Vec::new(), Vec::new());
        Self { shared: shared.clone(), open: None, inside, waiting, done }
    }

    /// Stores `content` unless it is stored; [`Packer::take`] tells where, after a while.
    pub(super) fn add(&mut self, ix: u64, content: &[u8]) -> Result<()> {
        let hash = Hash::of(content);
        if let Some(place) = self.shared.find(&hash) {
            self.done.push((ix, Piece::Data { hash, place }));
            return Ok(());
        }
        if !self.inside.contains_key(&hash) {
            if self.open.is_none() {
                self.open = Some(self.shared.builder()?);
            }
            let Some(open) = &mut self.open else { return Ok(()) };
            let (offset, stored) = open.append(content)?;
            self.inside.insert(hash, (offset, stored));
        }
        self.waiting.push((ix, hash));
        match &self.open {
            Some(open) if open.len() >= self.shared.core.pack_bytes => self.flush(),
            _ => Ok(()),
        }
    }

    /// What is durable since the last call.
    pub(super) fn take(&mut self) -> Vec<(u64, Piece)> {
        std::mem::take(&mut self.done)
    }

    /// Makes everything that was added durable.
    pub(super) fn flush(&mut self) -> Result<()> {
        let Some(open) = self.open.take() else { return Ok(()) };
        let (pack, bytes) = open.close();
        if self.shared.core.store.put_new(&pack.name(), &bytes)? == Put::Existed {
            // Only a request of ours that was repeated on the way can have created it: the name
            // holds the session and the content.
            tracing::debug!(%pack, "a pack was there already");
        }
        self.shared.stored.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        let mut index = self.shared.index.write();
        for (ix, hash) in self.waiting.drain(..) {
            let Some((offset, stored)) = self.inside.get(&hash).copied() else {
                return Err(Error::new(Kind::Invalid, "a piece is in no pack"));
            };
            let piece = Piece::Data { hash, place: PackSlice { pack, offset, stored } };
            index.insert(&piece);
            self.done.push((ix, piece));
        }
        self.inside.clear();
        Ok(())
    }
}
