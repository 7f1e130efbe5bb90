//! Content that is on its way: of several images that are described at the same time and have
//! something in common, one is told to send it, and the others wait until it is here.

use dray_wire::frame::PieceHash;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A sender that has not sent after this long has other worries: the next one is asked.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Pieces on their way at most; more are simply asked for twice.
const MOST: usize = 65_536;

/// Hashes whose content somebody was told to send, and when.
#[derive(Default)]
pub struct Wanted(Mutex<HashMap<PieceHash, Instant>>);

impl Wanted {
    /// Claims the right to ask for `pieces`, or says that some of them are on their way already, and
    /// claims nothing. `anyway` does not wait for those. All or nothing, so that no two images
    /// wait for each other.
    pub fn claim(&self, pieces: &[PieceHash], anyway: bool) -> bool {
        let mut wanted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let comes =
            |hash| wanted.get(hash).is_some_and(|since| now.duration_since(*since) < PATIENCE);
        if !anyway && pieces.iter().any(comes) {
            return false;
        }
        if wanted.len() + pieces.len() > MOST {
            wanted.retain(|_, since| now.duration_since(*since) < PATIENCE);
        }
        if wanted.len() + pieces.len() <= MOST {
            wanted.extend(pieces.iter().map(|hash| (*hash, now)));
        }
        true
    }

    /// It is here, or will not come.
    pub fn settle(&self, piece: &PieceHash) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(piece);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_on_its_way_is_waited_for_and_nothing_is_claimed_meanwhile() {
        let wanted = Wanted::default();
        let [a, b] = [[1; 32], [2; 32]];
        assert!(wanted.claim(&[a, a], false), "the same content twice in one run is no other's");
        assert!(!wanted.claim(&[b, a], false));
        assert!(wanted.claim(&[b], false), "it was not claimed together with the other one");
        assert!(wanted.claim(&[a], true));
        wanted.settle(&a);
        assert!(wanted.claim(&[a], false));
    }
}
