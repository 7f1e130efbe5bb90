//! Content of described runs, kept until the target has said which pieces it does not have.
//!
//! The engine bounds the pieces under way (`dray_engine::reuse`), and so what lies here: 32 MiB for
//! a session, gone with it.

use dray_types::{BLOCK_SIZE, BlockRange};
use dray_wire::frame::PIECE_BLOCKS;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One described run.
#[derive(Debug)]
struct Run {
    range: BlockRange,
    bytes: Vec<u8>,
    /// Blocks that lack and were not sent yet; all of them before the target has answered.
    left: u64,
}

/// What was described in a session, by tag.
#[derive(Debug, Default)]
pub struct Kept {
    runs: Mutex<HashMap<u64, Run>>,
    bytes: AtomicU64,
}

impl Kept {
    fn runs(&self) -> MutexGuard<'_, HashMap<u64, Run>> {
        self.runs.lock()
    }

    /// Keeps the content of `range`, which is described under `tag`.
    pub(crate) fn keep(&self, tag: u64, range: BlockRange, bytes: Vec<u8>) {
        self.bytes.fetch_add(bytes.len() as u64, Relaxed);
        let run = Run { range, bytes, left: range.len };
        if let Some(old) = self.runs().insert(tag, run) {
            self.bytes.fetch_sub(old.bytes.len() as u64, Relaxed);
        }
    }

    /// The description needs no data any more: found, or asked for in another way.
    pub fn let_go(&self, tag: u64) {
        if let Some(run) = self.runs().remove(&tag) {
            self.bytes.fetch_sub(run.bytes.len() as u64, Relaxed);
        }
    }

    /// The target lacks these pieces of the description.
    pub fn lack(&self, tag: u64, pieces: u16) {
        let mut runs = self.runs();
        let Some(run) = runs.get_mut(&tag) else { return };
        let all = run.range.len / PIECE_BLOCKS;
        run.left = (0..all).filter(|piece| pieces >> piece & 1 == 1).count() as u64 * PIECE_BLOCKS;
        let none = run.left == 0;
        drop(runs);
        if none {
            self.let_go(tag);
        }
    }

    /// Fills `out` with a part of what was described under `tag`; false when it is not here.
    pub(crate) fn take(&self, tag: u64, part: BlockRange, out: &mut [u8]) -> bool {
        let mut runs = self.runs();
        let Some(run) = runs.get_mut(&tag).filter(|run| run.range.contains(part)) else {
            return false;
        };
        let from = ((part.start - run.range.start) * BLOCK_SIZE) as usize;
        out.copy_from_slice(&run.bytes[from..from + out.len()]);
        run.left = run.left.saturating_sub(part.len);
        let over = run.left == 0;
        drop(runs);
        if over {
            self.let_go(tag);
        }
        true
    }

    /// Bytes kept.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lacks_is_kept_until_all_of_it_was_sent() {
        let kept = Kept::default();
        let range = BlockRange::new(16, 48);
        let bytes: Vec<u8> = (0..48u8).flat_map(|block| [block; 4096]).collect();
        kept.keep(7, range, bytes.clone());
        kept.keep(8, range, bytes);
        kept.lack(7, 0b101);
        let mut out = vec![0; 16 * 4096];
        assert!(kept.take(7, BlockRange::new(16, 16), &mut out));
        assert_eq!((out[0], out[4096]), (0, 1));
        assert!(kept.take(7, BlockRange::new(48, 16), &mut out));
        assert_eq!(out[0], 32);
        assert!(!kept.take(7, BlockRange::new(48, 16), &mut out), "it is gone");
        assert_eq!(kept.bytes(), 48 * 4096, "the other one is not");
        assert!(!kept.take(8, BlockRange::new(0, 16), &mut out), "not a part of it");
        kept.lack(8, 0);
        assert_eq!(kept.bytes(), 0);
    }
}
