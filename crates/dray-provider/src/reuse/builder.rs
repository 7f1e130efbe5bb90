//! Fills the index in the background: a thread reads the pools slowly, when no other program needs
//! the disks.
//!
//! Images and replicas of this host, and other files of its pools (base images, say), are read once,
//! and again when they look otherwise: an image that a guest writes once a day at most. The thread
//! has the lowest priority, keeps to a rate, and waits while anything migrates or a guest is busy. It
//! writes down how far it is, and a restart goes on there. No file is open while it waits: the room of
//! one that somebody deletes is given back at once.

use super::files::FileRef;
use super::scope::{self, Scope};
use super::store::{Batch, Scanned, Store};
use super::{PIECE_BYTES, Reuse};
use dray_files::unix_ms;
use dray_host::record::CopyState;
use dray_host::registry::Registry;
use dray_image::{FileImage, FileOptions, Image, runs};
use dray_net::zeros::{RunBuffer, is_zero};
use dray_types::{BLOCK_SIZE, BlockRange, MAX_RUN_BLOCKS};
use dray_wire::frame::PIECE_BLOCKS;
use std::collections::HashSet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// First look at the pools after the agent's start; a pause between looks later.
const FIRST: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_secs(30);
/// An image that is written is read again after this long at the earliest, in milliseconds.
const AGAIN: u64 = 24 * 3_600_000;
/// Pieces that are written down together: 1 GiB of content.
const BATCH: usize = 16_384;
/// And at least this often.
const SAVE: Duration = Duration::from_secs(10);
/// More requests a second from guests than this are busy guests.
const BUSY: u64 = 200;
/// Directories below a pool that are looked into.
const DEPTH: u32 = 2;
/// The lowest priority that a thread can be given without asking for more rights.
const NICE: i32 = 19;

/// Starts the thread. `moves` says whether anything migrates.
///
/// # Errors
/// When there can be no thread.
pub(super) fn start(
    reuse: &Arc<Reuse>,
    path: &Path,
    moves: impl Fn() -> bool + Send + 'static,
) -> io::Result<()> {
    let (reuse, path) = (Arc::downgrade(reuse), path.to_owned());
    let work = move || {
        match (Store::open(&path), reuse.upgrade()) {
            (Ok(store), Some(reuse)) => reuse.set_store(store),
            (Err(why), _) => return tracing::warn!(%why, "there is no index of content"),
            (_, None) => return,
        }
        // On Linux this is the thread's own.
        if let Err(why) = rustix::process::setpriority_process(None, NICE) {
            tracing::debug!(%why, "the index is filled at normal priority");
        }
        std::thread::sleep(FIRST);
        while let Some(strong) = reuse.upgrade() {
            let mut look = Look::new(Arc::downgrade(&strong), &moves);
            drop(strong);
            if let Err(why) = look.all() {
                tracing::warn!(%why, "cannot fill the index of content");
            }
            std::thread::sleep(PAUSE);
        }
    };
    std::thread::Builder::new().name("dray-index".to_owned()).spawn(work).map(drop)
}

/// Something to be read.
struct Source {
    file: FileRef,
    path: PathBuf,
    /// Guests write to it.
    written: bool,
    scope: Scope,
}

impl Source {
    /// It looks like this when reading it begins.
    fn begun(&self, stamp: (u64, i64, i64)) -> Scanned {
        let (file, scope) = (self.file.clone(), self.scope);
        Scanned { file, stamp, next: Some(0), ended_unix_ms: 0, scope }
    }
}

/// One look at everything.
struct Look<'a, M> {
    reuse: Weak<Reuse>,
    moves: &'a M,
    batch: Batch,
    saved: Instant,
    /// When what was read so far may have been read at the rate that is allowed.
    due: Instant,
    guests: (Instant, u64),
}

impl<'a, M: Fn() -> bool> Look<'a, M> {
    fn new(reuse: Weak<Reuse>, moves: &'a M) -> Self {
        let now = Instant::now();
        let batch = Batch::default();
        Self { reuse, moves, batch, saved: now, due: now, guests: (now, 0) }
    }

    fn all(&mut self) -> io::Result<()> {
        let Some(reuse) = self.reuse.upgrade() else { return Ok(()) };
        let sources = sources(&reuse);
        self.forget_others(&reuse, &sources)?;
        drop(reuse);
        for source in sources {
            let Some(reuse) = self.reuse.upgrade() else { return Ok(()) };
            if !self.one(&reuse, &source)? {
                break;
            }
        }
        let Some(reuse) = self.reuse.upgrade() else { return Ok(()) };
        self.save(&reuse)
    }

    /// What is not there any more is forgotten.
    fn forget_others(&self, reuse: &Reuse, sources: &[Source]) -> io::Result<()> {
        let here: HashSet<_> = sources.iter().map(|source| &source.file).collect();
        // An image on its way is not read, and will be here again.
        let stays = |file: &FileRef| match file {
            FileRef::Image { name, .. } => reuse.files.registry().get(name).is_some(),
            FileRef::Plain { path } => path.exists(),
        };
        let gone = reuse.files.scanned().into_iter();
        let gone =
            gone.filter(|(_, scanned)| !here.contains(&scanned.file) && !stays(&scanned.file));
        let gone: HashSet<_> = gone.map(|(number, _)| number).collect();
        if gone.is_empty() { Ok(()) } else { reuse.forget(&gone) }
    }

    /// Reads a file if it has to be; false when the index has no room for more.
    fn one(&mut self, reuse: &Reuse, source: &Source) -> io::Result<bool> {
        let Ok(meta) = source.path.metadata() else { return Ok(true) };
        let stamp = (meta.len(), meta.mtime(), meta.mtime_nsec());
        let number = reuse.files.number(&source.file);
        let mut scanned = match reuse.files.scanned_of(number) {
            // Somebody else may be told of it by now.
            Some(known) if known.scope != source.scope => source.begun(stamp),
            Some(known) if known.next.is_none() => {
                let young = unix_ms().saturating_sub(known.ended_unix_ms) < AGAIN;
                if known.stamp == stamp || source.written && young {
                    return Ok(true);
                }
                Scanned { stamp, next: Some(0), ..known }
            }
            // What has changed meanwhile proves wrong when it is looked at.
            Some(begun) => begun,
            None => source.begun(stamp),
        };
        let mut run = RunBuffer::new(MAX_RUN_BLOCKS);
        while let Some(first) = scanned.next {
            self.give_way(reuse);
            let Some(image) = open(&source.path) else { break };
            let end = image.geometry().len / PIECE_BYTES as u64;
            let len = (end - first.min(end)).min(MAX_RUN_BLOCKS / PIECE_BLOCKS);
            if len == 0 {
                (scanned.next, scanned.ended_unix_ms) = (None, unix_ms());
            } else {
                self.read(&image, (number, source.scope), first, len, &mut run)?;
                scanned.next = Some(first + len);
            }
            drop(image);
            let full = self.batch.pieces.len() >= BATCH || self.saved.elapsed() >= SAVE;
            if scanned.next.is_none() || full {
                self.batch.files.push((number, scanned.clone()));
                self.save(reuse)?;
                if reuse.is_full() {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Reads some pieces; holes are not read.
    fn read(
        &mut self,
        image: &FileImage,
        (number, scope): (u32, Scope),
        first: u64,
        len: u64,
        run: &mut RunBuffer,
    ) -> io::Result<()> {
        let range = BlockRange::new(first * PIECE_BLOCKS, len * PIECE_BLOCKS);
        let data = runs::data_blocks(image, range).map_err(io::Error::other)?;
        if data.is_empty() {
            return Ok(());
        }
        let bytes = run.bytes((range.len * BLOCK_SIZE) as usize);
        runs::read_run(image, range, bytes).map_err(io::Error::other)?;
        self.due = self.due.max(Instant::now());
        for (piece, content) in (first..).zip(bytes.chunks_exact(PIECE_BYTES)) {
            if !is_zero(content) {
                self.batch.add(scope, blake3::hash(content).as_bytes(), number, piece);
            }
        }
        Ok(())
    }

    /// Keeps to the rate, and waits while others need the disks.
    fn give_way(&mut self, reuse: &Reuse) {
        let mebibyte = MAX_RUN_BLOCKS * BLOCK_SIZE;
        let rate = reuse.config.reuse.index_rate.max(1);
        self.due += Duration::from_nanos(mebibyte * 1_000_000_000 / rate);
        std::thread::sleep(self.due.saturating_duration_since(Instant::now()));
        while (self.moves)() || self.guests_are_busy(reuse.files.registry()) {
            std::thread::sleep(Duration::from_millis(500));
        }
    }

    fn guests_are_busy(&mut self, registry: &Registry) -> bool {
        let (since, before) = self.guests;
        let span = since.elapsed();
        if span < Duration::from_millis(200) {
            return false;
        }
        let requests = |stats: dray_image::DiskStats| stats.reads + stats.writes + stats.zeroes;
        let now = registry.all().iter().map(|entry| requests(entry.disk.stats())).sum();
        self.guests = (Instant::now(), now);
        now.saturating_sub(before) as f64 > BUSY as f64 * span.as_secs_f64() && before > 0
    }

    fn save(&mut self, reuse: &Reuse) -> io::Result<()> {
        self.saved = Instant::now();
        reuse.write(std::mem::take(&mut self.batch))
    }
}

/// Read past the page cache where that is possible: what guests have there stays.
fn open(path: &Path) -> Option<FileImage> {
    let options = FileOptions { direct: true, ..FileOptions::default() };
    FileImage::open(path, options).or_else(|_| FileImage::open(path, FileOptions::default())).ok()
}

/// Everything that content can be read from: what does not change first.
fn sources(reuse: &Reuse) -> Vec<Source> {
    let mut sources = Vec::new();
    let mut known = HashSet::new();
    for entry in reuse.files.registry().all() {
        let record = entry.record();
        if record.in_place.is_some() {
            // The same file as before and after.
            continue;
        }
        known.insert(record.path.clone());
        let Ok(path) = record.current_path() else { continue };
        known.insert(path.clone());
        let whole = record.flat.is_none();
        if whole && record.state != CopyState::Incoming && record.migration.is_none() {
            let written = record.state == CopyState::Owner && !record.read_only;
            let file = FileRef::Image { name: record.name, id: record.id };
            let scope = scope::of(&reuse.config, &file, &record.path, record.read_only);
            sources.push(Source { file, path, written, scope });
        }
    }
    for pool in &reuse.config.pools {
        let mut found = Vec::new();
        files_below(&pool.path, DEPTH, &mut found);
        for path in found.into_iter().filter(|path| !known.contains(path)) {
            let file = FileRef::Plain { path: path.clone() };
            // Nobody here knows who writes to it: like an image of a guest.
            let scope = scope::of(&reuse.config, &file, &path, false);
            sources.push(Source { file, path, written: true, scope });
        }
    }
    sources.sort_by_key(|source| source.written);
    sources
}

/// Plain files of at least a piece; no links, and nothing that is hidden.
fn files_below(dir: &Path, depth: u32, found: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        let Ok(meta) = entry.metadata() else { continue };
        if hidden {
            continue;
        }
        if meta.is_dir() && depth > 0 {
            files_below(&entry.path(), depth - 1, found);
        } else if meta.is_file() && meta.len() >= PIECE_BYTES as u64 {
            found.push(entry.path());
        }
    }
}
