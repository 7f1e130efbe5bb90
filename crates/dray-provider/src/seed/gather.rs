//! Reading an image's content from several providers at once, into a file.
//!
//! A provider that fails, lies or crawls costs time and nothing else: every piece is checked before
//! it is written, what one cannot give another one does, and what nobody gives is left to the source.

use super::tasks::{Mask, Tasks};
use crate::provider::{Failure, Provider};
use dray_host::abort;
use dray_image::{FileImage, ImageFile};
use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of one task.
pub const TASK_BYTES: u64 = 4 << 20;
/// Tasks that each provider reads at a time.
const READERS: usize = 3;
/// Failures in a row after which a provider is left alone, and how long a reader waits after one.
const STRIKES: u32 = 2 * READERS as u32;
const BREATH: Duration = Duration::from_millis(500);
/// How long a reader with nothing to do waits before it looks again.
const NAP: Duration = Duration::from_millis(100);
/// What was read in so much time says how fast it goes.
const WATCHED: Duration = Duration::from_secs(10);
/// Bytes a second below which reading on is of no use, where nothing better is known.
const CRAWL: u64 = 1 << 20;
/// The same, as a part of what the link to the source carries.
const CRAWL_PART: u64 = 16;

/// What came of it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Gathered {
    /// Bytes of data that each provider gave.
    pub given: Vec<u64>,
    /// Tasks that nobody could give.
    pub failed: Vec<u32>,
    /// What went wrong, for people; the first of each kind and provider.
    pub notes: Vec<String>,
}

struct Inner {
    tasks: Tasks,
    strikes: Vec<u32>,
    /// Whether something that each gave was wrong.
    damaged: Vec<bool>,
    gathered: Gathered,
    /// The target's own disk failed.
    broken: Option<String>,
}

/// A gathering under way.
pub struct Gathering {
    inner: Mutex<Inner>,
    wake: Condvar,
    /// Taken away at the end: a reader that was given up must not write any more.
    file: RwLock<Option<Arc<FileImage>>>,
    bytes: AtomicU64,
    len: u64,
}

impl Gathering {
    /// Begins: `masks` says which providers have each task of the image of `len` bytes, `done` what
    /// an earlier life has done.
    ///
    /// # Errors
    /// When no thread can be made.
    pub fn start(
        providers: &[Arc<dyn Provider>],
        masks: Vec<Mask>,
        done: &[bool],
        file: Arc<FileImage>,
        len: u64,
    ) -> io::Result<Arc<Self>> {
        let gathered = Gathered { given: vec![0; providers.len()], ..Gathered::default() };
        let inner = Inner {
            tasks: Tasks::new(masks, done),
            strikes: vec![0; providers.len()],
            damaged: vec![false; providers.len()],
            gathered,
            broken: None,
        };
        let gathering = Arc::new(Self {
            inner: Mutex::new(inner),
            wake: Condvar::new(),
            file: RwLock::new(Some(file)),
            bytes: AtomicU64::new(0),
            len,
        });
        for (number, provider) in providers.iter().enumerate() {
            for _ in 0..READERS {
                let (gathering, provider) = (Arc::clone(&gathering), Arc::clone(provider));
                let work = move || gathering.serve(number, &*provider);
                std::thread::Builder::new().name("dray-seed".to_owned()).spawn(work)?;
            }
        }
        Ok(gathering)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Bytes of data that have arrived so far.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Which tasks are done. What it names was handed to the file before, so a sync after this makes
    /// it durable.
    pub fn done(&self) -> Vec<bool> {
        self.inner().tasks.done().to_vec()
    }

    /// Waits at most `wait`; whether there is nothing left to wait for.
    pub fn is_over(&self, wait: Duration) -> bool {
        let over = |inner: &Inner| inner.tasks.is_over() || inner.broken.is_some();
        let mut inner = self.inner();
        if over(&inner) {
            return true;
        }
        self.wake.wait_for(&mut inner, wait);
        over(&inner)
    }

    /// The end: nothing is written any more. What is not done has failed.
    ///
    /// # Errors
    /// What the target's own disk reported.
    pub fn end(&self, why: Option<&str>) -> io::Result<Gathered> {
        // Waits for writes under way.
        self.file.write().take();
        let mut inner = self.inner();
        if !inner.tasks.is_over() {
            inner.tasks.give_up();
            inner.gathered.notes.extend(why.map(str::to_owned));
        }
        self.wake.notify_all();
        match inner.broken.take() {
            Some(why) => Err(io::Error::other(why)),
            None => {
                Ok(Gathered { failed: inner.tasks.failed().to_vec(), ..inner.gathered.clone() })
            }
        }
    }

    /// One reader of a provider.
    fn serve(&self, number: usize, provider: &dyn Provider) {
        while let Some(task) = self.next(number) {
            let offset = u64::from(task) * TASK_BYTES;
            let read = provider.read(offset, TASK_BYTES.min(self.len.saturating_sub(offset)));
            match read {
                Ok(parts) => self.arrived(number, task, &parts),
                Err(Failure::Damaged(why)) => self.damaged(number, &provider.name(), task, &why),
                Err(Failure::Unavailable(why)) => {
                    self.unavailable(number, &provider.name(), task, &why);
                    std::thread::sleep(BREATH);
                }
            }
        }
    }

    /// The next task; none when there will not be any.
    fn next(&self, number: usize) -> Option<u32> {
        let mut inner = self.inner();
        loop {
            let useless = inner.strikes[number] >= STRIKES || inner.broken.is_some();
            if useless || inner.tasks.is_over() {
                return None;
            }
            if let Some(task) = inner.tasks.next(number, Instant::now()) {
                return Some(task);
            }
            self.wake.wait_for(&mut inner, NAP);
        }
    }

    fn arrived(&self, number: usize, task: u32, parts: &[(u64, Vec<u8>)]) {
        let file = self.file.read();
        let Some(file) = file.as_ref() else { return };
        abort::before(|| vec!["seed-read".to_owned()]);
        let written = parts.iter().try_for_each(|(at, data)| file.write_bulk(data, *at));
        let mut inner = self.inner();
        match written {
            Err(why) => inner.broken = Some(why.to_string()),
            Ok(()) => {
                inner.strikes[number] = 0;
                if inner.tasks.read(task, number, Instant::now()) {
                    let bytes: u64 = parts.iter().map(|(_, data)| data.len() as u64).sum();
                    inner.gathered.given[number] += bytes;
                    self.bytes.fetch_add(bytes, Ordering::Relaxed);
                }
            }
        }
        drop(inner);
        self.wake.notify_all();
    }

    fn damaged(&self, number: usize, name: &str, task: u32, why: &str) {
        let mut inner = self.inner();
        if !std::mem::replace(&mut inner.damaged[number], true) {
            inner.gathered.notes.push(format!("{name}: {why}"));
        }
        inner.tasks.cannot(task, number);
        drop(inner);
        self.wake.notify_all();
    }

    /// Anybody may try again at once; after some more failures in a row the provider is left alone.
    fn unavailable(&self, number: usize, name: &str, task: u32, why: &str) {
        let mut inner = self.inner();
        inner.strikes[number] += 1;
        inner.tasks.later(task, number);
        if inner.strikes[number] == STRIKES {
            inner.tasks.drop_provider(number);
            inner.gathered.notes.push(format!("{name} is left alone: {why}"));
        }
        drop(inner);
        self.wake.notify_all();
    }
}

/// Whether what arrives is too little to wait for more of it.
pub struct Pace {
    floor: u64,
    since: Instant,
    bytes: u64,
}

impl Pace {
    /// Beside a link that carries `link` bytes a second, if that is known.
    pub fn new(link: Option<u64>, now: Instant) -> Self {
        Self {
            floor: link.map_or(CRAWL, |link| (link / CRAWL_PART).max(CRAWL)),
            since: now,
            bytes: 0,
        }
    }

    /// `bytes` have arrived in all; how many a second lately, when reading on is of no use.
    pub fn crawls(&mut self, bytes: u64, now: Instant) -> Option<u64> {
        let time = now.saturating_duration_since(self.since);
        if time < WATCHED {
            return None;
        }
        let rate = (bytes.saturating_sub(self.bytes) as f64 / time.as_secs_f64()) as u64;
        (self.since, self.bytes) = (now, bytes);
        (rate < self.floor).then_some(rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provider::Parts;
    use dray_image::FileOptions;
    use std::sync::atomic::AtomicU32;

    const TASKS: u64 = 6;
    const LEN: u64 = TASKS * TASK_BYTES - 1000;

    fn content(offset: u64) -> u8 {
        (offset / TASK_BYTES) as u8 + 1
    }

    /// Gives `content`, a part of each task, and fails as it is told.
    struct Fake {
        fail: fn(u64) -> Option<Failure>,
        slow: Duration,
    }

    fn fake(fail: fn(u64) -> Option<Failure>, slow: Duration) -> Arc<dyn Provider> {
        Arc::new(Fake { fail, slow })
    }

    impl Fake {
        fn good() -> Arc<dyn Provider> {
            fake(|_| None, Duration::ZERO)
        }
    }

    impl Provider for Fake {
        fn name(&self) -> String {
            "fake".to_owned()
        }

        fn read(&self, offset: u64, len: u64) -> Result<Parts, Failure> {
            std::thread::sleep(self.slow);
            match (self.fail)(offset / TASK_BYTES) {
                Some(failure) => Err(failure),
                None => Ok(vec![(offset + 4096, vec![content(offset); len as usize - 4096])]),
            }
        }
    }

    struct World {
        dir: tempfile::TempDir,
        gathering: Arc<Gathering>,
    }

    impl World {
        fn begin(providers: &[Arc<dyn Provider>], masks: &[Mask; TASKS as usize]) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("seed");
            std::fs::File::create(&path).unwrap().set_len(LEN).unwrap();
            let options = FileOptions { write: true, direct: false, export_len: None };
            let file = Arc::new(FileImage::open(&path, options).unwrap());
            let gathering = Gathering::start(providers, masks.to_vec(), &[], file, LEN).unwrap();
            Self { dir, gathering }
        }

        fn end(&self) -> Gathered {
            let begun = Instant::now();
            while !self.gathering.is_over(Duration::from_millis(10)) {
                assert!(begun.elapsed() < Duration::from_secs(20));
            }
            self.gathering.end(None).unwrap()
        }

        /// The tasks whose bytes are right, the others are untouched.
        fn right(&self) -> Vec<u64> {
            let bytes = std::fs::read(self.dir.path().join("seed")).unwrap();
            let right = |task: &u64| {
                let offset = task * TASK_BYTES;
                let mine = &bytes[offset as usize..LEN.min(offset + TASK_BYTES) as usize];
                let (zero, data) = mine.split_at(4096);
                assert!(zero.iter().all(|byte| *byte == 0));
                data.iter().all(|byte| *byte == content(offset)) || {
                    assert!(data.iter().all(|byte| *byte == 0));
                    false
                }
            };
            (0..TASKS).filter(right).collect()
        }
    }

    #[test]
    fn several_providers_share_the_work() {
        let slow = fake(|_| None, Duration::from_millis(30));
        let world = World::begin(&[slow.clone(), slow], &[0b11; 6]);
        let gathered = world.end();
        assert_eq!(world.right(), [0, 1, 2, 3, 4, 5]);
        assert!(gathered.given.iter().all(|given| *given > 0), "{gathered:?}");
        assert_eq!(gathered.given.iter().sum::<u64>(), LEN - TASKS * 4096);
        assert_eq!((gathered.failed.len(), gathered.notes.len()), (0, 0));
    }

    #[test]
    fn what_is_damaged_comes_from_another_or_not_at_all() {
        let liar = fake(
            |task| (task % 2 == 0).then(|| Failure::Damaged("piece 7 is damaged".to_owned())),
            Duration::ZERO,
        );
        let world = World::begin(&[liar, Fake::good()], &[0b11, 0b11, 0b11, 0b11, 0b01, 0b11]);
        let gathered = world.end();
        assert_eq!(gathered.failed, [4]);
        assert_eq!(world.right(), [0, 1, 2, 3, 5]);
        assert_eq!(gathered.notes, ["fake: piece 7 is damaged"]);
    }

    #[test]
    fn a_provider_that_dies_costs_time_and_nothing_else() {
        let dead = fake(|_| Some(Failure::Unavailable("it is gone".into())), Duration::ZERO);
        let world = World::begin(&[dead, Fake::good()], &[0b11; 6]);
        let gathered = world.end();
        assert_eq!(world.right(), [0, 1, 2, 3, 4, 5]);
        assert_eq!(gathered.given[0], 0);

        let dead = fake(|_| Some(Failure::Unavailable("it is gone".into())), Duration::ZERO);
        let world = World::begin(&[dead], &[0b1; 6]);
        let gathered = world.end();
        assert_eq!(gathered.failed.len(), 6);
        assert_eq!(gathered.notes, ["fake is left alone: it is gone"]);
        assert!(world.right().is_empty());
    }

    #[test]
    fn one_failure_in_between_is_forgiven() {
        struct Once(AtomicU32);
        impl Provider for Once {
            fn name(&self) -> String {
                "once".to_owned()
            }
            fn read(&self, offset: u64, len: u64) -> Result<Parts, Failure> {
                if self.0.fetch_add(1, Ordering::Relaxed) == 2 {
                    return Err(Failure::Unavailable("a hiccup".to_owned()));
                }
                Ok(vec![(offset + 4096, vec![content(offset); len as usize - 4096])])
            }
        }
        let world = World::begin(&[Arc::new(Once(AtomicU32::new(0)))], &[0b1; 6]);
        let gathered = world.end();
        assert_eq!(world.right(), [0, 1, 2, 3, 4, 5]);
        assert!(gathered.failed.is_empty() && gathered.notes.is_empty(), "{gathered:?}");
    }

    #[test]
    fn a_reader_that_hangs_is_helped_and_writes_nothing_after_the_end() {
        let hangs = fake(|_| None, Duration::from_secs(20));
        let world = World::begin(&[hangs, Fake::good()], &[0b11; 6]);
        let begun = Instant::now();
        while world.gathering.done() != [true; 6] {
            world.gathering.is_over(Duration::from_millis(10));
            assert!(begun.elapsed() < Duration::from_secs(15), "the other one did it all");
        }
        let gathered = world.gathering.end(None).unwrap();
        assert_eq!((gathered.given[0], gathered.failed.len()), (0, 0));
        assert_eq!(world.right(), [0, 1, 2, 3, 4, 5]);

        let world = World::begin(&[fake(|_| None, Duration::from_secs(1))], &[0b1; 6]);
        let gathered = world.gathering.end(Some("it crawls")).unwrap();
        assert_eq!(
            (gathered.failed.len(), &gathered.notes[..]),
            (6, &["it crawls".to_owned()][..])
        );
        std::thread::sleep(Duration::from_millis(1500));
        assert!(world.right().is_empty());
    }

    #[test]
    fn the_pace_is_judged_over_ten_seconds() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut pace = Pace::new(Some(160 << 20), start);
        assert_eq!(pace.crawls(0, at(9)), None);
        assert_eq!(pace.crawls(100 << 20, at(10)), None);
        assert_eq!(pace.crawls(190 << 20, at(20)), Some(9 << 20));
        assert!(Pace::new(None, start).crawls(9 << 20, at(10)).is_some());
        assert!(Pace::new(None, start).crawls(10 << 20, at(10)).is_none());
    }
}
