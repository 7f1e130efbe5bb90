//! Backups in repositories: which there are, and one of them as a provider.

use super::choose::joined;
use crate::destination::Destination;
use crate::provider::{Failure, Parts, Provider};
use crate::snapshots::{self, Catalogue, HeldCopy, PATIENCE, Snapshot, Snapshots, Unheard, Wanted};
use dray_api::HeldAs;
use dray_backup::{
    Backup, Content, Hash, Kind, PIECE_BYTES, Reader, Repository, StreamOptions, piece_count,
    piece_len,
};
use dray_config::Config;
use dray_image::ImageFile;
use dray_types::ImageId;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The backups in a repository of the configuration.
pub struct RepositoryCatalogue {
    /// Says where the repository is.
    pub config: Arc<Config>,
    /// The repository's name.
    pub name: String,
}

impl Catalogue for RepositoryCatalogue {
    fn name(&self) -> &str {
        &self.name
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    fn is_host(&self) -> bool {
        false
    }

    fn snapshots(&self, image: ImageId) -> Result<Snapshots, Unheard> {
        at_repository(&self.config, &self.name, image)
    }
}

fn at_repository(config: &Config, name: &str, image: ImageId) -> Result<Snapshots, Unheard> {
    let repository = Destination::resolve(config, name, None)?.open()?;
    let listing = repository.backups(image)?;
    let notes = listing.damaged.iter().map(|(_, why)| format!("{name}: {why}")).collect();
    let held = listing.backups.into_iter().map(|backup| Snapshot {
        place: name.to_owned(),
        generation: backup.info.generation,
        len: backup.info.bytes,
        held: Box::new(BackupCopy {
            place: name.to_owned(),
            repository: repository.clone(),
            backup: Arc::new(backup),
        }),
    });
    Ok(Snapshots { held: held.collect(), notes, silent: Vec::new() })
}

/// A backup, as the index knows it.
struct BackupCopy {
    place: String,
    repository: Repository,
    backup: Arc<Backup>,
}

impl HeldCopy for BackupCopy {
    fn held_as(&self) -> HeldAs {
        HeldAs::Backup
    }

    fn has_recipe(&self) -> bool {
        true
    }

    fn recipe(&self) -> Result<Option<Arc<Reader>>, Unheard> {
        let read = reader(self.repository.clone(), Arc::clone(&self.backup))?;
        Ok(Some(Arc::new(read)))
    }

    fn provider(&self, wanted: Wanted) -> Option<Arc<dyn Provider>> {
        let Wanted { old, recipe, .. } = wanted;
        let (name, from_old) = (self.place.clone(), AtomicU64::new(0));
        Some(Arc::new(Source { name, reader: recipe?, old, from_old }))
    }
}

/// What is read of a backup, once its manifest is there.
fn reader(repository: Repository, backup: Arc<Backup>) -> Result<Reader, Unheard> {
    let read = move || Ok(repository.reader(&repository.manifest(&backup)?));
    snapshots::apart(read).recv_timeout(PATIENCE).map_err(|_| Unheard::Late(PATIENCE))?
}

/// A place that gives pieces.
struct Source {
    name: String,
    reader: Arc<Reader>,
    /// An old copy of the image on this host, of whatever state: what is the same in it, as the
    /// recipe tells, is read from there.
    old: Option<Arc<dyn ImageFile>>,
    /// Bytes that came from it.
    from_old: AtomicU64,
}

impl Source {
    /// The piece as the old copy has it, if that is what is wanted.
    fn at_hand(&self, ix: u64) -> Option<Vec<u8>> {
        let old = self.old.as_ref()?;
        let hash = self.reader.piece(ix).ok()?.hash()?;
        let bytes = &mut vec![0; piece_len(self.reader.manifest().info().bytes, ix)];
        old.read_at(bytes, ix * PIECE_BYTES as u64).ok()?;
        (Hash::of(bytes) == hash).then(|| std::mem::take(bytes))
    }

    /// What the old copy has of some pieces, and the other pieces.
    fn split(&self, range: Range<u64>) -> (Parts, Vec<Range<u64>>) {
        if self.old.is_none() {
            return (Vec::new(), vec![range]);
        }
        let (mut found, mut left) = (Vec::new(), Vec::new());
        for ix in range {
            match self.at_hand(ix) {
                Some(bytes) => found.push((ix * PIECE_BYTES as u64, bytes)),
                None => left.push(ix..ix + 1),
            }
        }
        let bytes = found.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        self.from_old.fetch_add(bytes, Ordering::Relaxed);
        (found, left)
    }
}

impl Provider for Source {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn bytes_of_old(&self) -> u64 {
        self.from_old.load(Ordering::Relaxed)
    }

    fn read(&self, offset: u64, len: u64) -> Result<Parts, Failure> {
        let first = offset / PIECE_BYTES as u64;
        let range = first..first + piece_count(len);
        let (mut pieces, left) = self.split(range);
        let mut failed = None;
        let options = StreamOptions { parallel: 1 };
        self.reader.stream(left, options, |ix, content| match content {
            Ok(Content::Zero) => ControlFlow::Continue(()),
            Ok(Content::Data(bytes)) => {
                pieces.push((ix * PIECE_BYTES as u64, bytes));
                ControlFlow::Continue(())
            }
            Err(why) => {
                failed = Some(why);
                ControlFlow::Break(())
            }
        });
        match failed {
            None => Ok(joined(pieces)),
            Some(why) if matches!(why.kind(), Kind::Damaged | Kind::NotFound) => {
                Err(Failure::Damaged(why.to_string()))
            }
            Some(why) => Err(Failure::Unavailable(why.to_string())),
        }
    }
}
