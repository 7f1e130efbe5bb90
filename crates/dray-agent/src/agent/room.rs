//! Limits for each peer (I7): on its questions, and on its migrations until this host has all of their
//! images. Such a migration costs a thread, open files, and memory for the blocks of its images,
//! even if it never begins, or never ends.

use super::Agent;
use dray_api::MigrationState;
use dray_host::refusals::{Answer, conflict, invalid, no_room};
use dray_migrate::receiver::TargetSlot;
use dray_types::ByteSize;
use dray_wire::control::MAX_IMAGES;
use dray_wire::request::ComingImage;
use parking_lot::{Mutex, MutexGuard};
use rustix::process::{Resource, getrlimit};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use tokio::sync::OwnedMutexGuard;

/// Most bytes that the images of a migration have together: 64 TiB. What is kept in memory for each block of
/// them is made when they are prepared.
const MAX_TOTAL: u64 = 64 << 40;
/// Most migrations of one host that are not handed over: more than move at a time, and each has a thread.
const MIGRATIONS: usize = 128;
/// Most images of these: each has some five open files, of the 65,536 that the agent may have.
const IMAGES: usize = 1024;
/// Most bytes of these images. Where the missing blocks lie scattered, a map of them takes 32 MiB of memory for each TiB,
/// and there are up to three of it.
const BYTES: u64 = 64 << 40;
/// Most migrations of one host that are handed over, and of which blocks are still missing: whoever leaves a host in
/// a hurry lets the blocks follow later. Most images of these.
const INCOMPLETE: (usize, usize) = (512, 2048);
/// Open files that an image here takes, at most.
const FILES: usize = 10;
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

/// Most measurements of the link by one host at the same time: one would measure what is left beside the other.
const PROBES: usize = 1;

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
    /// Measurements of the link.
    Probe,
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
            Self::Probe => (PROBES, "measurements of the link under way"),
        }
    }
}

/// What is done for one question after the other.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Turn {
    /// A look at the monitor at this path, which has one client at a time: who asks again and again must not keep others
    /// from it.
    Look(PathBuf),
    /// A survey of this host: each has a thread for every image and every place where that may be.
    Survey(String),
}

/// What is under way, by what it is and whose.
#[derive(Clone, Default)]
pub struct Questions {
    counts: Arc<Mutex<BTreeMap<(String, Bounded), usize>>>,
    turns: Arc<Mutex<BTreeMap<Turn, Weak<tokio::sync::Mutex<()>>>>>,
}

/// One of them, for as long as this is there.
pub(crate) struct Question(Questions, (String, Bounded));

impl Questions {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(String, Bounded), usize>> {
        self.counts.lock()
    }

    /// Waits until nothing else of this is under way.
    pub(super) async fn alone(&self, of: Turn) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.turns.lock();
            turns.retain(|_, turn| turn.strong_count() > 0);
            let turn = turns.get(&of).and_then(Weak::upgrade).unwrap_or_default();
            turns.insert(of, Arc::downgrade(&turn));
            turn
        };
        turn.lock_owned().await
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

    /// Whether `peer` may have so much of which blocks are still missing.
    fn check_incomplete(&self, peer: &str) -> Answer<()> {
        let (migrations, images) = INCOMPLETE;
        if self.migrations < migrations && self.images < images {
            return Ok(());
        }
        let why = format!(
            "blocks of {} migrations of {peer} with {} images are still missing at this host; it may have \
             {migrations} with {images} images",
            self.migrations, self.images
        );
        Err(conflict(why)
            .hint("wait until they have ended; `dray backfill start` begins one that waits"))
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

/// How far the images of a migration are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Come {
    /// They are still to be handed over to this host.
    Coming,
    /// This host owns them, and blocks are missing.
    Incomplete,
    /// It is over for this host.
    Over,
}

fn how_far(slot: &TargetSlot) -> Come {
    if slot.is_forgotten() || slot.board.read().state == MigrationState::Completed {
        return Come::Over;
    }
    if slot.is_exposed() { Come::Incomplete } else { Come::Coming }
}

/// Refuses images for which this process would need files that the VMs here may need: a quarter of those that it may have
/// open stays for them.
fn check_files(images: usize) -> Answer<()> {
    let most = getrlimit(Resource::Nofile).current.map_or(usize::MAX, |most| most as usize);
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    if files_fit(open, images, most) {
        return Ok(());
    }
    let why =
        format!("{images} images need files, and the agent has {open} open of at most {most}");
    Err(no_room(why).hint(
        "end migrations that `dray status` shows, or raise LimitNOFILE of the agent's service",
    ))
}

fn files_fit(open: usize, images: usize, most: usize) -> bool {
    open + images * FILES <= most - most / 4
}

impl Agent {
    /// Whether `peer` may have these images on their way here beside what it has already.
    pub(super) fn check_load(&self, peer: &str, images: &[ComingImage]) -> Answer<()> {
        check_files(images.len())?;
        let all = self.targets.all();
        let coming: Vec<_> = all.iter().filter(|slot| how_far(slot) == Come::Coming).collect();
        let waiting = coming.iter().filter(|slot| slot.question().is_some()).count();
        if waiting >= WAITING {
            let host = &self.config.name;
            let why = format!(
                "{waiting} migrations wait at this host for their sources, and no more are allowed"
            );
            let hint = format!("`dray status` on {host} shows them, and `dray cancel` ends one");
            return Err(conflict(why).hint(hint));
        }
        let load_of = |which: Come| {
            let mut load = Load::default();
            for slot in all.iter().filter(|slot| how_far(slot) == which).map(|slot| slot.intent()) {
                if slot.peer.eq_ignore_ascii_case(peer) {
                    load.add(slot.images.iter().map(|image| image.offer.len));
                }
            }
            load
        };
        load_of(Come::Incomplete).check_incomplete(peer)?;
        let mut load = load_of(Come::Coming);
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
    fn what_a_peer_may_leave_incomplete_is_bounded_and_so_are_open_files() {
        let load = |migrations: usize, images: usize| {
            let mut load = Load::default();
            (0..migrations).for_each(|_| load.add(std::iter::repeat_n(1 << 30, images)));
            load.check_incomplete("hosta")
        };
        assert!(load(511, 4).is_ok() && load(512, 1).is_err() && load(8, 256).is_err());
        assert!(files_fit(100, 256, 65_536) && !files_fit(49_000, 256, 65_536));
        assert!(!files_fit(0, 256, 1024) && files_fit(0, 1, usize::MAX) && !files_fit(9, 0, 0));
        assert!(check_files(1).is_ok());
    }

    #[test]
    fn what_a_peer_may_have_on_its_way_is_bounded() {
        let load = |migrations: usize, images: usize, len: u64| {
            let mut load = Load::default();
            (0..migrations).for_each(|_| load.add(std::iter::repeat_n(len, images)));
            load.check("hosta")
        };
        assert!(load(MIGRATIONS, 8, 1 << 36).is_ok());
        let refused = load(MIGRATIONS + 1, 1, 0).unwrap_err();
        let hint = refused.hint.as_deref();
        assert!(refused.why.contains("128"), "{refused}");
        assert!(hint.is_some_and(|hint| hint.contains("`dray cancel` on hosta")), "{hint:?}");
        assert!(load(1, IMAGES + 1, 0).is_err());
        assert!(load(1, 1, MAX_TOTAL).is_ok());
        assert!(load(2, 1, MAX_TOTAL).is_err());
        assert!(load(2, 1, u64::MAX).is_err());
    }
}
