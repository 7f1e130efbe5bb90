//! Content that is on its way: of several images that are described at the same time and have
//! something in common, one is told to send it, and the others wait until it is here. So do those that
//! have something like it, of which only some blocks will have to come then.

use super::asker::Asker;
use super::index::Spot;
use dray_wire::frame::PieceHash;
use parking_lot::Mutex;
use std::collections::HashMap;

use std::time::{Duration, Instant};

/// A sender that has not sent after this long has other worries: the next one is asked.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Pieces on their way at most; more are simply asked for twice.
const MOST: usize = 65_536;

/// What somebody was told to send, and when: pieces by scope and hash, and the places where they will be.
#[derive(Default)]
struct Coming {
    pieces: HashMap<(u64, PieceHash), (Spot, Instant)>,
    places: HashMap<Spot, Instant>,
    /// How often something has come, or been given up.
    settled: u64,
}

/// A piece that lacks.
pub struct Lacking {
    /// Who may get it when it has come.
    scope: u64,
    /// Its hash.
    pub hash: PieceHash,
    /// Where it will be.
    pub place: Spot,
    /// Where most of its blocks will be when that has come, and is not known to be already.
    pub near: Vec<Spot>,
}

impl Lacking {
    /// A piece of the image that `asker` stands for.
    pub fn new(asker: &Asker, hash: PieceHash, place: Spot, near: Vec<Spot>) -> Self {
        Self { scope: asker.scope, hash, place, near }
    }
}

/// Content that is on its way. Only those wait for it that may get it when it has come.
#[derive(Default)]
pub struct Wanted(Mutex<Coming>);

impl Coming {
    fn has(&self, piece: &Lacking, now: Instant) -> bool {
        let fresh = |since: &Instant| now.duration_since(*since) < PATIENCE;
        // Who was told to send it himself, and asks once more, is not waited for.
        let other = |place: &Spot| *place != piece.place;
        self.pieces
            .get(&(piece.scope, piece.hash))
            .is_some_and(|(place, since)| other(place) && fresh(since))
            || piece.near.iter().any(|place| self.places.get(place).is_some_and(fresh))
    }

    fn make_room(&mut self, more: usize, now: Instant) -> bool {
        if self.pieces.len() + more > MOST {
            self.pieces.retain(|_, (_, since)| now.duration_since(*since) < PATIENCE);
            self.places.retain(|_, since| now.duration_since(*since) < PATIENCE);
        }
        self.pieces.len().max(self.places.len()) + more <= MOST
    }
}

impl Wanted {
    /// Claims the right to ask for `pieces`, or says that some of them, or something like them, is on
    /// its way already, and claims nothing. `anyway` does not wait for those. All or nothing, and
    /// only what was asked for is waited for, so that no two images wait for each other.
    pub fn claim(&self, pieces: &[Lacking], anyway: bool) -> bool {
        let mut coming = self.0.lock();
        let now = Instant::now();
        if !anyway && pieces.iter().any(|piece| coming.has(piece, now)) {
            return false;
        }
        if coming.make_room(pieces.len(), now) {
            let claimed = |piece: &Lacking| ((piece.scope, piece.hash), (piece.place, now));
            coming.pieces.extend(pieces.iter().map(claimed));
            coming.places.extend(pieces.iter().map(|piece| (piece.place, now)));
        }
        true
    }

    /// Claims what lacks by `look`, all or nothing, as [`claim`](Self::claim) does: what lacks, and
    /// whether it is claimed. What has come while it was looked for is not claimed: its sender had
    /// no claim on it any more, and it would cross once more.
    pub fn claim_what_lacks(
        &self,
        anyway: bool,
        mut look: impl FnMut() -> Vec<Lacking>,
    ) -> (Vec<Lacking>, bool) {
        let before = self.settled();
        let lacks = look();
        if lacks.is_empty() || !self.claim(&lacks, anyway) {
            let claimed = lacks.is_empty();
            return (lacks, claimed);
        }
        if self.settled() == before {
            return (lacks, true);
        }
        // From the claim on nobody else is told to send it: what this look misses is not here.
        let (claimed, lacks) = (lacks, look());
        let has_come = |piece: &&Lacking| lacks.iter().all(|still| still.hash != piece.hash);
        claimed.iter().filter(has_come).for_each(|piece| self.settle_lacking(piece));
        (lacks, true)
    }

    fn settled(&self) -> u64 {
        self.0.lock().settled
    }

    /// Whether some of `pieces`, or something like them, is on its way.
    pub fn comes(&self, pieces: &[Lacking]) -> bool {
        let coming = self.0.lock();
        let now = Instant::now();
        pieces.iter().any(|piece| coming.has(piece, now))
    }

    /// Whether what will be at `place` is still on its way, all of it or some blocks.
    pub fn comes_there(&self, place: Spot) -> bool {
        let coming = self.0.lock();
        coming.places.get(&place).is_some_and(|since| since.elapsed() < PATIENCE)
    }

    /// Where content with this hash, which the image may get, is on its way to.
    pub fn comes_to(&self, asker: &Asker, piece: &PieceHash) -> Option<Spot> {
        let coming = self.0.lock();
        coming.pieces.get(&(asker.scope, *piece)).map(|(place, _)| *place)
    }

    /// It is here, or will not come.
    pub fn settle(&self, asker: &Asker, piece: &PieceHash, place: Spot) {
        self.settle_of(asker.scope, piece, place);
    }

    /// The same.
    pub fn settle_lacking(&self, piece: &Lacking) {
        self.settle_of(piece.scope, &piece.hash, piece.place);
    }

    fn settle_of(&self, scope: u64, piece: &PieceHash, place: Spot) {
        let mut coming = self.0.lock();
        coming.pieces.remove(&(scope, *piece));
        coming.places.remove(&place);
        coming.settled += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lacking(hash: u8, piece: u32, near: &[u32]) -> Lacking {
        let spot = |piece| Spot { file: 1, piece };
        let near = near.iter().copied().map(spot).collect();
        Lacking { scope: 0, hash: [hash; 32], place: spot(piece), near }
    }

    #[test]
    fn what_is_on_its_way_is_waited_for_and_nothing_is_claimed_meanwhile() {
        let wanted = Wanted::default();
        let [a, b] = [|| lacking(1, 1, &[]), || lacking(2, 2, &[])];
        let same = [a(), lacking(1, 3, &[])];
        assert!(wanted.claim(&same, false), "the same content twice in one run is no other's");
        let again = lacking(1, 3, &[]);
        assert!(wanted.claim(&[again], false), "nobody waits for himself");
        assert!(!wanted.claim(&[b(), a()], false));
        assert!(wanted.claim(&[b()], false), "it was not claimed together with the other one");
        assert!(wanted.claim(&[a()], true));
        wanted.settle_lacking(&a());
        assert!(wanted.claim(&[a()], false));
    }

    #[test]
    fn nobody_waits_for_what_he_may_not_get() {
        let wanted = Wanted::default();
        assert!(wanted.claim(&[lacking(1, 1, &[])], false));
        let other = Lacking { scope: 1, ..lacking(1, 9, &[]) };
        assert!(!wanted.comes(std::slice::from_ref(&other)) && wanted.claim(&[other], false));
        assert!(!wanted.claim(&[lacking(1, 3, &[])], false));
    }

    #[test]
    fn what_comes_while_it_is_looked_for_is_not_asked_for_again() {
        let wanted = Wanted::default();
        let [first, second] = [|| lacking(1, 1, &[]), || lacking(1, 9, &[])];
        assert!(wanted.claim(&[first()], false));
        let mut looks = 0;
        let look = || {
            looks += 1;
            if looks > 1 {
                return vec![lacking(2, 10, &[])];
            }
            // The look has missed it, and now it is here.
            wanted.settle_lacking(&first());
            vec![second(), lacking(2, 10, &[])]
        };
        let (lacks, claimed) = wanted.claim_what_lacks(false, look);
        assert!(claimed && looks == 2);
        assert_eq!(lacks.iter().map(|piece| piece.hash[0]).collect::<Vec<_>>(), [2]);
        let others = |hash| wanted.comes(&[lacking(hash, 30, &[])]);
        assert!(others(2) && !others(1), "only what lacks is claimed");
        let (_, claimed) = wanted.claim_what_lacks(false, || vec![lacking(2, 20, &[])]);
        assert!(!claimed, "it is on its way");
        assert!(wanted.claim_what_lacks(false, Vec::new).1, "nothing lacks");
    }

    #[test]
    fn something_like_it_is_waited_for_only_when_it_was_asked_for() {
        let wanted = Wanted::default();
        let [a, b] = [|| lacking(1, 1, &[2]), || lacking(2, 2, &[1])];
        assert!(wanted.claim(&[a()], false), "nobody has asked for its neighbour");
        assert!(!wanted.claim(&[b()], false) && wanted.comes(&[b()]));
        assert!(wanted.comes_there(a().place) && !wanted.comes_there(b().place));
        wanted.settle_lacking(&a());
        assert!(!wanted.comes(&[b()]) && wanted.claim(&[b()], false));
    }
}
