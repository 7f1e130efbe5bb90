//! Segments that were read, a bounded number of them.

use crate::error::Result;
use crate::piece::Piece;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// Segments kept at most: 64 of 512 pieces of 88 bytes are 3 MiB and 2 GiB of image.
const MOST: usize = 64;

#[derive(Default)]
struct Kept {
    segments: HashMap<u64, (u64, Arc<Vec<Piece>>)>,
    clock: u64,
}

#[derive(Default)]
pub(super) struct Cache(Mutex<Kept>);

impl Cache {
    /// Segment `ix`, read by `read` unless it is kept.
    pub(super) fn get(
        &self,
        ix: u64,
        read: impl FnOnce() -> Result<Arc<Vec<Piece>>>,
    ) -> Result<Arc<Vec<Piece>>> {
        if let Some(found) = self.find(ix) {
            return Ok(found);
        }
        let segment = read()?;
        let mut kept = self.0.lock();
        if kept.segments.len() >= MOST {
            let oldest = kept.segments.iter().min_by_key(|(_, (used, _))| *used);
            let oldest = oldest.map(|(ix, _)| *ix);
            oldest.and_then(|ix| kept.segments.remove(&ix));
        }
        kept.clock += 1;
        let used = kept.clock;
        kept.segments.insert(ix, (used, segment.clone()));
        Ok(segment)
    }

    fn find(&self, ix: u64) -> Option<Arc<Vec<Piece>>> {
        let mut kept = self.0.lock();
        kept.clock += 1;
        let clock = kept.clock;
        let (used, segment) = kept.segments.get_mut(&ix)?;
        *used = clock;
        Some(segment.clone())
    }
}
