//! Small records of the state directory that cannot be read. The code that needs such a record does
//! without it or begins it anew. This module tells the operator, until the file can be read or does
//! not exist any more. Records of images and of migrations are not among them, because they decide
//! which images the agent serves.

use crate::agent::Agent;
use dray_files::StatePath;
use dray_files::files::{self, Look};
use dray_host::batches::BatchRecord;
use dray_host::released::Released;
use dray_host::store::Store;
use dray_provider::seed::SeedNote;
use dray_vm::released::plan_of;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io;

/// A kind of record.
struct Kind {
    /// Where they are: a file, or all of a folder.
    at: StatePath,
    read: fn(&StatePath) -> io::Result<()>,
    /// What comes of one that cannot be read.
    what: &'static str,
}

fn read<T: DeserializeOwned>(path: &StatePath) -> io::Result<()> {
    path.peek::<T>().map(drop)
}

fn read_released(path: &StatePath) -> io::Result<()> {
    plan_of(&path.peek::<Released>()?).map(drop)
}

fn kinds(store: &Store) -> [Kind; 8] {
    let kind = |at, read, what| Kind { at, read, what };
    let migrations = "the agent does not begin the waiting migrations of a batch";
    [
        kind(store.batches(), read::<BatchRecord>, migrations),
        kind(
            store.seeds(),
            read::<SeedNote>,
            "the agent does not use the content that it has read from backups for an image",
        ),
        kind(store.released(), read_released, "the next move copies a released image as a whole"),
        kind(store.backups(), read::<Value>, "the agent does not know where an image is in backup"),
        kind(
            store.backups().join(".schedule.json"),
            read::<Value>,
            "the time of the last backup is unknown: the agent makes a backup now",
        ),
        kind(store.digests(), read::<Value>, "the agent reads the base images once more"),
        kind(store.links(), read::<Value>, "the agent measures the rates of the links anew"),
        kind(
            store.given(),
            read::<Value>,
            "the next summaries do not say which bytes came from repositories and peers",
        ),
    ]
}

/// The files of a kind. A folder that was never made has none.
fn files(at: &StatePath) -> io::Result<Vec<StatePath>> {
    match at.look() {
        Ok(Look { kind: files::Kind::Folder, .. }) => at.entries(".json"),
        _ => Ok(vec![at.clone()]),
    }
}

impl Agent {
    /// Looks at all of them.
    pub(super) fn look_at_records(&self) {
        self.look_at_those(|_| true);
    }

    /// Looks again at those that could not be read.
    pub(super) fn look_at_damaged_records(&self) {
        let known: Vec<_> = self.troubles.all().into_iter().map(|trouble| trouble.key).collect();
        let known: Vec<_> = known.iter().filter_map(|key| key.strip_prefix(KEY)).collect();
        let gone = known.iter().filter(|path| matches!(StatePath::real(*path).exists(), Ok(false)));
        gone.for_each(|path| self.troubles.clear(&key(&StatePath::real(*path))));
        if !known.is_empty() {
            self.look_at_those(|key| self.troubles.has(key));
        }
    }

    fn look_at_those(&self, wanted: impl Fn(&str) -> bool) {
        for Kind { at, read, what } in kinds(&self.store) {
            match files(&at) {
                Ok(files) => files.iter().for_each(|path| self.look_at(path, read, what, &wanted)),
                Err(why) => self.troubles.note(key(&at), what, why, ""),
            }
        }
    }

    fn look_at(
        &self,
        path: &StatePath,
        read: fn(&StatePath) -> io::Result<()>,
        what: &str,
        wanted: impl Fn(&str) -> bool,
    ) {
        let key = key(path);
        if !wanted(&key) {
            return;
        }
        let damaged = read(path).err().filter(|why| why.kind() != io::ErrorKind::NotFound);
        let why = damaged.map(|why| format!("{} cannot be read: {why}", path.display()));
        self.troubles.settle(&key, what, why, &format!("remove {}", path.display()));
    }
}

/// Keys of troubles with records begin so.
const KEY: &str = "record.";

fn key(path: &StatePath) -> String {
    format!("{KEY}{}", path.display())
}
