//! Limits for each peer (I7): on its questions, and on its migrations before this host owns the
//! images. Such a migration costs a thread, open files, and memory for the blocks of its images,
//! even if it never begins.

use super::Agent;
use dray_api::MigrationState;
use dray_host::refusals::{Answer, conflict, invalid};
use dray_migrate::receiver::TargetSlot;
use dray_types::ByteSize;
use dray_wire::control::MAX_IMAGES;
use dray_wire::request::ComingImage;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Most bytes that the images of a migration have together: 64 TiB. What is kept in memory for each block of
/// them is made when they are prepared.
const MAX_TOTAL: u64 = 64 << 40;
/// Most migrations of one host that are not handed over: more than move at a time, and each has a thread.
const MIGRATIONS: usize = 128;
/// Most images of these: each has some five open files, of the 65,536 that the agent may have.
const IMAGES: usize = 1024;
/// Most bytes of these images: 256 TiB cost some 100 MiB of memory.
const BYTES: u64 = 256 << 40;
/// Most migrations of all hosts that wait for their source, to begin or to come back.
const WAITING: usize = 512;
/// So many migrations of one host that are over here are still shown.
const SHOWN: usize = 128;

/// Most questions of one host that are being answered: one for each migration it may prepare. Each costs a
/// megabyte and up to 256 threads.
const QUESTIONS: usize = MIGRATIONS;

/// Most surveys of one host at the same time. Each has up to 256 threads, and asks repositories and other hosts.
const SURVEYS: usize = 8;
/// Most looks of one host at QEMUs that wait for its VMs, at the same time. Each has a connection to a monitor.
const LOOKS: usize = 32;
/// Most streams of one host to the backup store and to replicas, each of them. A stream has a thread, and a host
/// keeps some ten of them open while it reads from several places.
const STREAMS: usize = 64;

/// What one host has under way at most, of each of these.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Bounded {
    /// Questions that are being answered.
    Question,
    /// Those of them that are surveys.
    Survey,
    /// Those of them that look at a QEMU.
    Look,
    /// Streams to the backup store.
    Store,
    /// Streams to replicas.
    Replica,
}

impl Bounded {
    /// How many, and what they are called.
    fn limit(self) -> (usize, &'static str) {
        match self {
            Self::Question => (QUESTIONS, "unanswered questions"),
            Self::Survey => (SURVEYS, "surveys under way"),
            Self::Look => (LOOKS, "looks at waiting QEMUs under way"),
            Self::Store => (STREAMS, "streams to the backup store"),
            Self::Replica => (STREAMS, "streams to replicas"),
        }
    }
}

/// What is under way, by what it is and whose.
#[derive(Clone, Default)]
pub struct Questions(Arc<Mutex<BTreeMap<(String, Bounded), usize>>>);

/// One of them, for as long as this is there.
pub(crate) struct Question(Questions, (String, Bounded));

impl Questions {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(String, Bounded), usize>> {
        self.0.lock()
    }

    /// Another one of `peer`.
    ///
    /// # Errors
    /// `Conflict` when it has too many already.
    pub(super) fn begin(&self, peer: &str, what: Bounded) -> Answer<Question> {
        let key = (peer.to_owned(), what);
        let mut asked = self.lock();
        let count = asked.entry(key.clone()).or_default();
        let (most, name) = what.limit();
        if *count >= most {
            let why = format!("{peer} has {count} {name} at this host, and may have {most}");
            return Err(conflict(why).hint("try again when one of them has ended"));
        }
        *count += 1;
        drop(asked);
        Ok(Question(self.clone(), key))
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        let mut asked = self.0.lock();
        if let Some(count) = asked.get_mut(&self.1) {
            *count -= 1;
        }
        asked.retain(|_, count| *count > 0);
    }
}

/// What a peer has on its way here.
#[derive(Clone, Copy, Default, Debug)]
struct Load {
    migrations: usize,
    images: usize,
    bytes: u64,
}

impl Load {
    fn add(&mut self, lens: impl Iterator<Item = u64>) {
        self.migrations += 1;
        for len in lens {
            self.images += 1;
            self.bytes = self.bytes.saturating_add(len);
        }
    }

    fn check(&self, peer: &str) -> Answer<()> {
        if self.migrations <= MIGRATIONS && self.images <= IMAGES && self.bytes <= BYTES {
            return Ok(());
        }
        let why = format!(
            "{peer} would have {} migrations with {} images of {} before the handover at this \
             host, and may have {MIGRATIONS} with {IMAGES} images of {}",
            self.migrations,
            self.images,
            ByteSize(self.bytes),
            ByteSize(BYTES)
        );
        Err(conflict(why).hint(format!(
            "`dray cancel` on {peer} ends one of those that `dray status` shows there"
        )))
    }
}

/// Whether the images are still to be handed over to this host.
fn is_coming(slot: &TargetSlot) -> bool {
    let owned = slot.is_exposed() || slot.board.read().state == MigrationState::Completed;
    !owned && !slot.is_forgotten()
}

impl Agent {
    /// Whether `peer` may have these images on their way here beside what it has already.
    pub(super) fn check_load(&self, peer: &str, images: &[ComingImage]) -> Answer<()> {
        let coming: Vec<_> =
            self.targets.all().into_iter().filter(|slot| is_coming(slot)).collect();
        let waiting = coming.iter().filter(|slot| slot.question().is_some()).count();
        if waiting >= WAITING {
            let host = &self.config.name;
            let why = format!(
                "{waiting} migrations wait at this host for their sources, and no more are allowed"
            );
            let hint = format!("`dray status` on {host} shows them, and `dray cancel` ends one");
            return Err(conflict(why).hint(hint));
        }
        let mut load = Load::default();
        for slot in coming.iter().map(|slot| slot.intent()) {
            if slot.peer.eq_ignore_ascii_case(peer) {
                load.add(slot.images.iter().map(|image| image.offer.len));
            }
        }
        load.add(images.iter().map(|coming| coming.image.len));
        load.check(peer)
    }

    /// Of what is over here only the newest of each host stays to be shown: a peer may prepare and take
    /// back as often as it likes.
    pub(super) fn show_newest(&self, peer: &str) {
        let mut over: Vec<Arc<TargetSlot>> = self.targets.all();
        over.retain(|slot| slot.intent().peer.eq_ignore_ascii_case(peer) && slot.is_forgotten());
        over.sort_by_key(|slot| std::cmp::Reverse(slot.intent().started_unix_ms));
        over.iter().skip(SHOWN).for_each(|slot| self.targets.remove(slot.board.migration));
    }
}

/// What a peer wants room for costs something before it is there: memory for each block of its length, files
/// and descriptors for each image.
pub(super) fn check_counts(images: &[ComingImage]) -> Answer<()> {
    if images.is_empty() || images.len() > MAX_IMAGES {
        return Err(invalid(format!("a migration has 1 to {MAX_IMAGES} images")));
    }
    let total = images.iter().map(|coming| coming.image.len).fold(0, u64::saturating_add);
    if total > MAX_TOTAL {
        return Err(invalid(format!("the images have {total} bytes, more than {MAX_TOTAL}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_types::ImageId;
    use dray_wire::request::WantedImage;

    #[test]
    fn what_a_peer_may_want_room_for_is_bounded() {
        let image = |len| ComingImage {
            image: WantedImage {
                id: ImageId(1),
                name: "a".to_owned(),
                len,
                allocated: 0,
                read_only: false,
            },
            ancestors: Vec::new(),
            digest: None,
            qcow2: false,
            owner: None,
        };
        assert!(check_counts(&[]).is_err());
        assert!(check_counts(&vec![image(1 << 30); MAX_IMAGES]).is_ok());
        assert!(check_counts(&vec![image(0); MAX_IMAGES + 1]).is_err());
        assert!(check_counts(&[image(MAX_TOTAL)]).is_ok());
        assert!(check_counts(&[image(MAX_TOTAL), image(1)]).is_err());
        assert!(check_counts(&[image(u64::MAX), image(u64::MAX)]).is_err());
    }

    #[test]
    fn a_peer_asks_so_many_questions_at_a_time_and_others_are_answered() {
        let questions = Questions::default();
        for (what, most) in [
            (Bounded::Question, 128),
            (Bounded::Survey, 8),
            (Bounded::Store, 64),
            (Bounded::Replica, 64),
        ] {
            let begin = |peer: &str| questions.begin(peer, what);
            let mut asked: Vec<_> = (0..most).map(|_| begin("hosta").unwrap()).collect();
            let refused = begin("hosta").err().unwrap();
            assert!(refused.why.contains(&format!("may have {most}")), "{refused}");
            assert!(begin("hostb").is_ok());
            asked.pop();
            drop(begin("hosta").unwrap());
            drop(asked);
        }
        assert!(questions.lock().is_empty());
    }

    #[test]
    fn what_a_peer_may_have_on_its_way_is_bounded() {
        let load = |migrations: usize, images: usize, len: u64| {
            let mut load = Load::default();
            (0..migrations).for_each(|_| load.add(std::iter::repeat_n(len, images)));
            load.check("hosta")
        };
        assert!(load(MIGRATIONS, 8, 1 << 38).is_ok());
        let refused = load(MIGRATIONS + 1, 1, 0).unwrap_err();
        let hint = refused.hint.as_deref();
        assert!(refused.why.contains("128"), "{refused}");
        assert!(hint.is_some_and(|hint| hint.contains("`dray cancel` on hosta")), "{hint:?}");
        assert!(load(1, IMAGES + 1, 0).is_err());
        assert!(load(4, 1, MAX_TOTAL).is_ok());
        assert!(load(4, 2, MAX_TOTAL).is_err());
        assert!(load(2, 1, u64::MAX).is_err());
    }
}
