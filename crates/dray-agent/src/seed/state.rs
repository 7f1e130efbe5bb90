//! What of a seeding survives the agent: the file that is being filled, and a note of what is durable
//! in it.
//!
//! `seeds/NAME.json` in the state folder names the generation and the tasks whose bytes are on disk; the
//! file is `.NAME.dray-seed` in the pool. Once the note says which regions hold something else, the file
//! becomes a replica, again after a crash if need be.

use super::gather::TASK_BYTES;
use crate::migration::source::unix_ms;
use dray_files::StatePath;
use dray_host::lineage::{REGION_BLOCKS, ReplicaNote, stamp_of};
use dray_host::migration::abort;
use dray_host::pool::PoolIo;
use dray_host::registry::{CopyState, ImageRecord, Place, Registry};
use dray_image::{FileImage, FileOptions, ImageNames};
use dray_types::{Ancestor, BLOCK_SIZE, BlockRange, BlockSet, Epoch, ImageId};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Tasks of one region.
pub const REGION_TASKS: u64 = REGION_BLOCKS * BLOCK_SIZE / TASK_BYTES;

/// The note.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SeedNote {
    /// The image's name here.
    pub name: String,
    /// The image.
    pub id: ImageId,
    /// The path it will have as an image.
    pub path: PathBuf,
    /// Its length in bytes.
    pub len: u64,
    /// Nobody writes to it: a base image.
    #[serde(default)]
    pub read_only: bool,
    /// The generation that is read.
    pub generation: Ancestor,
    /// The epoch that the replica's name carries.
    pub epoch: Epoch,
    /// Tasks that are durable, as runs of number and count.
    pub done: Vec<(u64, u64)>,
    /// Set when everything is durable: the regions that hold something else than the generation.
    pub finished: Option<Vec<u64>>,
}

/// A seeding's note and file.
pub struct SeedFile {
    at: StatePath,
    names: ImageNames,
    /// The note as it is on disk.
    pub note: SeedNote,
    /// The file that is filled.
    pub file: Arc<FileImage>,
}

fn other(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::other(why)
}

impl SeedFile {
    /// Goes on with what an earlier life has begun for the same generation, or begins.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn open(seeds: &StatePath, wanted: SeedNote, io: PoolIo) -> io::Result<Self> {
        let at = note_path(seeds, &wanted.name);
        let names = ImageNames::of(&wanted.path).map_err(other)?;
        let known = at.peek::<SeedNote>().ok().filter(|known| {
            let same = SeedNote { done: known.done.clone(), epoch: known.epoch, ..wanted.clone() };
            *known == same
        });
        let opened = known.and_then(|note| Some((note, names.open_seed().ok()?)));
        let (note, file) = match opened {
            Some(opened) => opened,
            None => {
                // Bytes of another generation: removed before a note names this one.
                names.remove_seed().map_err(other)?;
                at.put(&wanted)?;
                let file = names.create_seed(wanted.len).map_err(other)?;
                (wanted, file)
            }
        };
        let direct = io == PoolIo::Direct;
        let options = FileOptions { write: true, direct, export_len: Some(note.len) };
        let file = FileImage::from_file(file, &names.seed(), options).map_err(other)?;
        Ok(Self { at, names, note, file: Arc::new(file) })
    }

    /// Which tasks were done before.
    pub fn done(&self) -> Vec<bool> {
        let mut done = vec![false; task_count(self.note.len)];
        for &(first, count) in &self.note.done {
            let end = first.saturating_add(count).min(done.len() as u64);
            done[first.min(end) as usize..end as usize].fill(true);
        }
        done
    }

    /// Makes what was written so far durable, and then the note that it was: `done` is from before.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn save(&mut self, done: &[bool]) -> io::Result<()> {
        dray_image::Image::flush(&*self.file).map_err(other)?;
        let set: BlockSet = done
            .iter()
            .zip(0..)
            .filter(|(done, _)| **done)
            .map(|(_, task)| BlockRange::new(task, 1))
            .collect();
        self.note.done = set.runs().map(|run| (run.start, run.len)).collect();
        self.at.put(&self.note)
    }

    /// Everything is durable but what `failed` names: the file becomes a replica.
    ///
    /// # Errors
    /// What the file system or the registry reports.
    pub fn finish(mut self, failed: &[u32], registry: &Registry) -> io::Result<()> {
        dray_image::Image::flush(&*self.file).map_err(other)?;
        let mut regions: Vec<u64> =
            failed.iter().map(|&task| u64::from(task) / REGION_TASKS).collect();
        regions.sort_unstable();
        regions.dedup();
        self.note.finished = Some(regions);
        abort::before(|| vec!["seed-finish".to_owned()]);
        self.at.put(&self.note)?;
        drop(self.file);
        become_replica(&self.at, &self.names, &self.note, registry)
    }

    /// Nothing is left of it.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn remove(self) -> io::Result<()> {
        self.names.remove_seed().map_err(other)?;
        self.at.remove()
    }
}

/// Number of tasks of an image of `len` bytes.
pub fn task_count(len: u64) -> usize {
    len.div_ceil(TASK_BYTES) as usize
}

fn note_path(seeds: &StatePath, name: &str) -> StatePath {
    seeds.join(format!("{name}.json"))
}

/// The file gets a replica's name and the registry a record of it. Can be repeated.
fn become_replica(
    at: &StatePath,
    names: &ImageNames,
    note: &SeedNote,
    registry: &Registry,
) -> io::Result<()> {
    abort::before(|| vec!["seed-name".to_owned()]);
    names.finish_seed(note.epoch).map_err(other)?;
    let record = ImageRecord {
        place: Place::Replica(note.epoch),
        state: CopyState::Replica,
        epoch: note.epoch,
        replica: Some(ReplicaNote {
            generation: note.generation,
            stamp: stamp_of(&registry.at(&names.replica(note.epoch)))?,
            since_unix_ms: unix_ms(),
            stays: false,
            distrusted: note.finished.clone().unwrap_or_default(),
        }),
        ..ImageRecord::owned(note.name.clone(), note.id, note.path.clone(), note.len)
    };
    let file = registry.open_file(&record).map_err(other)?;
    registry.add(record, file)?;
    at.remove()
}

/// After a restart: what was finished becomes a replica, and what nobody has gone on with since
/// `keep` ago is removed. What cannot be done now is tried again by the next start: nobody needs it.
pub fn revive(seeds: &StatePath, registry: &Registry, keep: std::time::Duration) {
    for at in seeds.entries(".json").unwrap_or_default() {
        let result = revive_one(&at, registry, keep);
        if let Err(why) = result {
            tracing::warn!(seed = %at.display(), %why, "cannot go on with what was read from backups");
        }
    }
}

fn revive_one(at: &StatePath, registry: &Registry, keep: std::time::Duration) -> io::Result<()> {
    let note: SeedNote = at.get()?;
    let names = ImageNames::of(&note.path).map_err(other)?;
    if note.finished.is_some() {
        return match registry.get(&note.name) {
            Some(_) => at.remove(),
            None => become_replica(at, &names, &note, registry),
        };
    }
    let age = std::fs::metadata(at)?.modified()?.elapsed().unwrap_or_default();
    if age < keep {
        return Ok(());
    }
    names.remove_seed().map_err(other)?;
    at.remove()
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_image::{Image, ImageFile};
    use dray_types::GenerationId;

    const LEN: u64 = 3 * TASK_BYTES + 4096;

    struct World {
        dir: tempfile::TempDir,
    }

    impl World {
        fn open(&self, generation: u128) -> SeedFile {
            let note = SeedNote {
                name: "vm1".to_owned(),
                id: ImageId(1),
                path: self.dir.path().join("vm1"),
                len: LEN,
                read_only: false,
                generation: Ancestor { id: GenerationId(generation), number: 3 },
                epoch: Epoch(2),
                done: Vec::new(),
                finished: None,
            };
            SeedFile::open(&StatePath::real(self.dir.path()), note, PoolIo::Buffered).unwrap()
        }
    }

    #[test]
    fn what_was_saved_is_not_read_again_and_another_generation_begins_anew() {
        let world = World { dir: tempfile::tempdir().unwrap() };
        let mut seed = world.open(7);
        assert_eq!(seed.done(), [false; 4]);
        seed.file.write_bulk(&[1; 4096], 0).unwrap();
        seed.file.write_bulk(&[2; 4096], 2 * TASK_BYTES).unwrap();
        seed.save(&[true, false, true, true]).unwrap();
        drop(seed);
        let seed = world.open(7);
        assert_eq!(seed.done(), [true, false, true, true]);
        let mut bytes = [0; 4096];
        seed.file.read_at(&mut bytes, 2 * TASK_BYTES).unwrap();
        assert_eq!(bytes, [2; 4096]);
        drop(seed);
        let seed = world.open(8);
        assert_eq!(seed.done(), [false; 4]);
        seed.file.read_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [0; 4096]);
        seed.remove().unwrap();
        assert_eq!(std::fs::read_dir(world.dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_without_its_note_or_a_note_without_its_file_begins_anew() {
        let world = World { dir: tempfile::tempdir().unwrap() };
        for gone in [".vm1.dray-seed", "vm1.json"] {
            let mut seed = world.open(7);
            seed.file.write_bulk(&[1; 4096], 0).unwrap();
            seed.save(&[true; 4]).unwrap();
            drop(seed);
            std::fs::remove_file(world.dir.path().join(gone)).unwrap();
            assert_eq!(world.open(7).done(), [false; 4], "{gone}");
        }
    }

    #[test]
    fn a_note_of_more_than_the_image_has_is_cut() {
        let world = World { dir: tempfile::tempdir().unwrap() };
        let mut seed = world.open(7);
        seed.note.done = vec![(1, 1), (3, u64::MAX), (u64::MAX, 9)];
        assert_eq!(seed.done(), [false, true, false, true]);
    }
}
