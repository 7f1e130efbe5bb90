//! A model of an image, and repositories to back it up to.
#![allow(dead_code, reason = "each test uses a part of it")]

use dray_backup::{
    Backup, Consistency, Content, Info, Key, PIECE_BYTES, Repository, Settings, StreamOptions,
    piece_count, piece_len,
};
use dray_types::{Ancestor, GenerationId, ImageId};
use std::collections::BTreeMap;
use std::ops::ControlFlow;

/// An image: the content of its pieces by number, 0 for zeros.
#[derive(Clone, Debug)]
pub struct Image {
    pub id: ImageId,
    pub bytes: u64,
    pieces: BTreeMap<u64, u8>,
}

impl Image {
    pub fn new(id: u128, bytes: u64) -> Self {
        Self { id: ImageId(id), bytes, pieces: BTreeMap::new() }
    }

    /// What growing and shrinking does: the tail piece keeps the start of its content.
    pub fn resize(&mut self, bytes: u64) {
        let tail = self.bytes.min(bytes) / PIECE_BYTES as u64;
        // A piece that is cut in the middle becomes zero, to keep the model to whole contents.
        if !self.bytes.min(bytes).is_multiple_of(PIECE_BYTES as u64) && bytes != self.bytes {
            self.pieces.remove(&tail);
        }
        self.bytes = bytes;
        self.pieces.retain(|ix, _| *ix < piece_count(bytes));
    }

    pub fn write(&mut self, ix: u64, content: u8) {
        let ix = ix % piece_count(self.bytes).max(1);
        self.pieces.insert(ix, content);
    }

    /// Content 1 to 3 compresses, 4 and above does not; 3 depends on the place.
    pub fn piece(&self, ix: u64) -> Vec<u8> {
        let mut bytes = vec![0; piece_len(self.bytes, ix)];
        match self.pieces.get(&ix).copied().unwrap_or(0) {
            0 => {}
            3 => bytes.fill(ix as u8 | 1),
            content @ ..4 => bytes.fill(content),
            content => {
                blake3::Hasher::new_derive_key("test")
                    .update(&[content])
                    .finalize_xof()
                    .fill(&mut bytes);
            }
        }
        bytes
    }

    /// Pieces that differ, all that are not zero without a parent.
    pub fn changed_since(&self, before: Option<&Image>) -> Vec<u64> {
        let old = |ix| before.map_or_else(Vec::new, |before| before.piece(ix));
        let differs = |ix: u64| match before {
            Some(_) => self.piece(ix) != old(ix),
            None => self.pieces.contains_key(&ix),
        };
        (0..piece_count(self.bytes)).filter(|ix| differs(*ix)).collect()
    }

    /// Reads a backup in every way and compares.
    pub fn check(&self, repository: &Repository, backup: &Backup) {
        assert_eq!(backup.info.bytes, self.bytes);
        let manifest = repository.manifest(backup).unwrap();
        let reader = repository.reader(&manifest);
        let recipe = repository.hashes(&manifest).unwrap();
        assert_eq!(recipe.len() as u64, piece_count(self.bytes));
        let mut seen = vec![0; recipe.len()];
        let count = recipe.len() as u64;
        // Backwards in three parts, so that the order is not the packs'.
        let parts = [2, 1, 0].map(|n| count * n / 3..count * (n + 1) / 3);
        reader.stream(parts, StreamOptions { parallel: 3 }, |ix, content| {
            seen[ix as usize] += 1;
            let expected = self.piece(ix);
            match content.unwrap() {
                Content::Zero => assert!(expected.iter().all(|byte| *byte == 0), "piece {ix}"),
                Content::Data(bytes) => assert!(bytes == expected, "piece {ix}"),
            }
            let hash = recipe[ix as usize].map(|hash| hash.0);
            let zero = expected.iter().all(|byte| *byte == 0);
            assert_eq!(hash, (!zero).then(|| *blake3::hash(&expected).as_bytes()));
            ControlFlow::Continue(())
        });
        assert!(seen.iter().all(|times| *times == 1));
        if let Some((ix, _)) = self.pieces.last_key_value() {
            assert_eq!(reader.read_piece(*ix).unwrap(), self.piece(*ix));
        }
    }
}

pub fn info(image: &Image) -> Info {
    Info {
        image: image.id,
        name: "vm.img".into(),
        bytes: image.bytes,
        generation: Ancestor { id: GenerationId(3), number: 2 },
        parent: None,
        ancestors: vec![Ancestor { id: GenerationId(2), number: 1 }],
        taken_unix_ms: 1_700_000_000_000,
        host: "hosta".into(),
        consistency: Consistency::Crash,
    }
}

pub fn key(sealed: bool) -> Key {
    if sealed { Key::Raw([9; 32]) } else { Key::None }
}

pub fn settings(pack_bytes: usize) -> Settings {
    Settings { pack_bytes, ..Settings::default() }
}
