//! One image that is read from backups: a thread from the choice of what to read until there is a
//! replica.

use super::choose::{self, Choice};
use super::gather::{Gathered, Gathering, Pace, TASK_BYTES};
use super::state::{SeedFile, SeedNote};
use crate::provider::Provider;
use crate::snapshots::Catalogue;
use dray_config::{Config, Peer};
use dray_host::pool::Pool;
use dray_host::record::CopyState;
use dray_host::record::file_system_below;
use dray_host::registry::{Entry, Registry};
use dray_host::store::Store;
use dray_image::{ImageFile, ImageNames};
use dray_types::{BitRate, ByteSize, Epoch, ImageId};
use dray_wire::request::{SeedImage, Seeding};
use parking_lot::{Mutex, MutexGuard};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Who does not ask for so long has gone.
const ASKED: Duration = Duration::from_secs(20);
/// What arrived is made durable this often.
const SAVE: Duration = Duration::from_secs(2);
/// What the replica that lay here before is called in the summary.
const OLD_COPY: &str = "an old copy there";
/// The longest that the job sleeps.
const NAP: Duration = Duration::from_millis(100);

/// What a job is made of.
pub struct Parts {
    /// The images of this host.
    pub registry: Arc<Registry>,
    /// What is durable.
    pub store: Store,
    /// Where the image will be.
    pub pool: Pool,
    /// Who asks.
    pub peer: Peer,
    /// The image.
    pub wanted: SeedImage,
    /// Bytes a second that the link from its owner carries, if known.
    pub link: Option<u64>,
    /// Which pools are open to whom.
    pub config: Arc<Config>,
    /// Where the image can be had from.
    pub places: Vec<Arc<dyn Catalogue>>,
}

impl Parts {
    /// What has the image's name here, if it lies where the peer may go.
    pub fn at_name(&self) -> Option<Arc<Entry>> {
        let entry = self.registry.get(&self.wanted.image.name)?;
        self.config.is_open_to(&self.peer, &entry.record().path).then_some(entry)
    }
}

/// How a job stands, for those who ask.
pub struct Job {
    /// Names the wish that it is for.
    pub number: u64,
    /// The image that is read.
    pub image: ImageId,
    state: Mutex<Seeding>,
    asked: Mutex<Instant>,
    expected: Mutex<Vec<(String, u64)>>,
}

impl Job {
    /// Begins, in a thread.
    ///
    /// # Errors
    /// When no thread can be made.
    pub fn start(number: u64, parts: Parts) -> io::Result<Arc<Self>> {
        let state = Mutex::new(Seeding::Running { done: 0, total: 0 });
        let (image, asked) = (parts.wanted.image.id, Mutex::new(Instant::now()));
        let expected = Mutex::default();
        let job = Arc::new(Self { number, image, state, asked, expected });
        let mine = Arc::clone(&job);
        let work = move || {
            let end = mine.run(&parts).unwrap_or_else(|why| {
                let name = &parts.wanted.image.name;
                tracing::warn!(image = name, %why, "cannot read an image from backups");
                Seeding::Nothing { why: why.to_string() }
            });
            *mine.state() = end;
        };
        std::thread::Builder::new().name("dray-seeding".to_owned()).spawn(work)?;
        Ok(job)
    }

    fn state(&self) -> MutexGuard<'_, Seeding> {
        self.state.lock()
    }

    /// How far it is; whoever asks wants it to go on.
    pub fn ask(&self) -> Seeding {
        *self.asked.lock() = Instant::now();
        self.state().clone()
    }

    /// Bytes that each provider was expected to give when it was chosen what to read.
    pub fn expected(&self) -> Vec<(String, u64)> {
        self.expected.lock().clone()
    }

    /// Whether it has come to an end.
    pub fn is_over(&self) -> bool {
        !matches!(*self.state(), Seeding::Running { .. })
    }

    fn is_wanted(&self) -> bool {
        self.asked.lock().elapsed() < ASKED
    }

    fn run(&self, parts: &Parts) -> io::Result<Seeding> {
        let nothing = |why: &str| Ok(Seeding::Nothing { why: why.to_owned() });
        if let Some(why) = in_the_way(parts) {
            return nothing(&why);
        }
        let old = old_copy(parts);
        let floor = at_hand(parts);
        let choice = match choose::choose(&parts.places, &parts.wanted, old.as_ref(), floor) {
            Ok(choice) => choice,
            Err(notes) => return nothing(&notes.join("; ")),
        };
        *self.expected.lock() = choice.expected();
        let path = parts.pool.image_path(&parts.wanted.image.name).map_err(io::Error::other)?;
        check_room(parts, choice.bytes)?;
        set_aside(parts)?;
        let note = note_of(parts, &choice, path)?;
        let file = SeedFile::open(&parts.registry, &parts.store.seeds(), note, parts.pool.io)?;
        self.fill(file, choice, parts)
    }

    /// Reads until there is nothing left to read, nobody asks any more, or it is not worth it.
    fn fill(&self, mut file: SeedFile, choice: Choice, parts: &Parts) -> io::Result<Seeding> {
        let begun = file.done();
        let earlier = choice.bytes_of(&begun);
        let total = choice.bytes;
        let (seed, len) = (Arc::clone(&file.file), file.note.len);
        let gathering =
            Gathering::start(&choice.providers, choice.masks.clone(), &begun, seed, len)?;
        let mut pace = Pace::new(parts.link, Instant::now());
        let mut saved = Instant::now();
        let why = loop {
            if gathering.is_over(NAP) {
                break None;
            }
            *self.state() = Seeding::Running { done: earlier + gathering.bytes(), total };
            if saved.elapsed() >= SAVE {
                file.save(&gathering.done())?;
                saved = Instant::now();
            }
            if !self.is_wanted() {
                // What is there is used when somebody asks again.
                gathering.end(None)?;
                file.leave(&gathering.done())?;
                return Ok(Seeding::Nothing { why: "no host waited for it any more".to_owned() });
            }
            if let Some(rate) = pace.crawls(gathering.bytes(), Instant::now()) {
                let rate = BitRate { bytes_per_second: rate };
                break Some(format!(
                    "only {rate} arrived in the last seconds: the target does not wait for the rest"
                ));
            }
        };
        let gathered = gathering.end(why.as_deref())?;
        finish(file, &choice, gathered, parts)
    }
}

/// The replica, and what is said of it.
fn finish(
    file: SeedFile,
    choice: &Choice,
    gathered: Gathered,
    parts: &Parts,
) -> io::Result<Seeding> {
    let given: u64 = gathered.given.iter().sum();
    let mut notes = choice.notes.clone();
    notes.extend(gathered.notes);
    if given == 0 && file.note.done.is_empty() && choice.bytes > 0 {
        file.remove()?;
        return Ok(Seeding::Nothing { why: notes.join("; ") });
    }
    let missing = gathered.failed.iter().map(|_| TASK_BYTES).sum();
    file.finish(&gathered.failed, &parts.registry)?;
    let given = shares(&choice.providers, &gathered.given);
    Ok(Seeding::Ready { generation: choice.generation, given, missing, notes })
}

/// Who gave what: what was at hand here counts as such.
fn shares(providers: &[Arc<dyn Provider>], given: &[u64]) -> Vec<(String, u64)> {
    let old: u64 = providers.iter().map(|provider| provider.bytes_of_old()).sum();
    let share = |(provider, given): (&Arc<dyn Provider>, &u64)| {
        (provider.name(), given.saturating_sub(provider.bytes_of_old()))
    };
    let mut shares: Vec<_> = providers.iter().zip(given).map(share).collect();
    if old > 0 {
        shares.push((OLD_COPY.to_owned(), old));
    }
    shares
}

/// The replica that lies here under the name.
pub fn old_copy(parts: &Parts) -> Option<Arc<dyn ImageFile>> {
    let entry = parts.at_name()?;
    (entry.record().len == parts.wanted.image.len).then(|| Arc::clone(&entry.file))
}

/// What keeps the image from being read here at all.
pub fn in_the_way(parts: &Parts) -> Option<String> {
    let name = &parts.wanted.image.name;
    if parts.places.is_empty() {
        return Some(String::new());
    }
    if !parts.config.reuse.enabled {
        return Some("the target compares nothing: its [reuse] is not enabled".to_owned());
    }
    parts.registry.get(name)?;
    let is_replica = |entry: Arc<Entry>| {
        let record = entry.record();
        let idle = record.state == CopyState::Replica && record.migration.is_none();
        idle && record.id == parts.wanted.image.id
    };
    if parts.at_name().is_some_and(is_replica) {
        return None;
    }
    Some(format!("there is an image '{name}' already"))
}

/// The number of the generation that a usable replica here holds.
pub fn at_hand(parts: &Parts) -> Option<u64> {
    let SeedImage { image, ancestors, .. } = &parts.wanted;
    let entry = parts.at_name()?;
    let usable = entry.record().base_for(image, ancestors, &parts.pool);
    usable.ok().map(|note| note.generation.number)
}

/// The replica that lies here is too old or of no use: it gives up its name.
fn set_aside(parts: &Parts) -> io::Result<()> {
    match parts.at_name() {
        Some(entry) => parts.registry.set_aside(&entry).map(drop),
        None => Ok(()),
    }
}

fn check_room(parts: &Parts, bytes: u64) -> io::Result<()> {
    let stat = rustix::fs::statvfs(&parts.pool.path)?;
    let free = stat.f_bavail * stat.f_frsize;
    if bytes <= free {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "pool '{}' has {} free and the backup needs {}",
        parts.pool.name,
        ByteSize(free),
        ByteSize(bytes)
    )))
}

fn note_of(parts: &Parts, choice: &Choice, path: PathBuf) -> io::Result<SeedNote> {
    let SeedImage { image, epoch, .. } = &parts.wanted;
    let found = ImageNames::of(&path).and_then(|names| names.found()).map_err(io::Error::other)?;
    // A replica of an earlier time may have the name that belongs to this epoch.
    let after = found.replicas.last().map_or(Epoch(0), |last| last.next());
    Ok(SeedNote {
        name: image.name.clone(),
        id: image.id,
        file_system: file_system_below(&path),
        path,
        len: image.len,
        read_only: image.read_only,
        generation: choice.generation,
        // Whoever has it next counts on from it.
        epoch: (*epoch).min(Epoch::HIGHEST).max(after),
        done: Vec::new(),
        file: None,
        left: None,
        finished: None,
    })
}
