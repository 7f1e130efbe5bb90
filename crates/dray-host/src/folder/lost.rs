//! The ranges of which the claim of an image makes zeros, recorded in the folder of its void
//! migration. A claim that is repeated after a crash finds no missing blocks any more, and must
//! report these ranges all the same.

use super::log::{Folder, Log};
use super::standing::read;
use dray_types::BlockSet;
use std::io;

/// Its name in the folder, for the image at this place in the migration's order.
fn name(index: usize) -> String {
    format!("lost-{index}")
}

/// What a claim that came to no end has found lost.
///
/// # Errors
/// When it cannot be read.
pub fn noted(folder: &Folder, index: usize) -> io::Result<BlockSet> {
    Ok(union(&read(&folder.file(&name(index)))?))
}

/// Takes room for what a claim will note.
///
/// # Errors
/// That there is none.
pub fn make_room(folder: &Folder, index: usize) -> io::Result<()> {
    Log::<BlockSet>::open(&folder.file(&name(index))).map(drop)
}

/// These blocks are lost, durably.
///
/// # Errors
/// What the file system reports.
pub fn note(folder: &Folder, index: usize, lost: &BlockSet) -> io::Result<()> {
    let (mut log, noted) = Log::open(&folder.file(&name(index)))?;
    let mut new = lost.clone();
    new.subtract(&union(&noted));
    // However often it is tried, the sets have no block in common.
    if new.is_empty() { Ok(()) } else { log.append(&[new]) }
}

fn union(sets: &[BlockSet]) -> BlockSet {
    let mut all = BlockSet::new();
    sets.iter().for_each(|set| all.union_with(set));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Store;
    use dray_types::{BlockRange, MigrationId};

    #[test]
    fn what_was_lost_once_is_lost_after_each_repetition() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let folder = Folder::create(&store, MigrationId(7)).unwrap();
        let set = |start, len| BlockSet::from_iter([BlockRange::new(start, len)]);
        assert!(noted(&folder, 0).unwrap().is_empty());
        assert!(!folder.file(&name(0)).exists().unwrap(), "looking makes nothing");
        make_room(&folder, 0).unwrap();
        assert!(noted(&folder, 0).unwrap().is_empty());
        note(&folder, 0, &set(3, 7)).unwrap();
        let len = folder.file(&name(0)).look().unwrap().len;
        note(&folder, 0, &set(4, 2)).unwrap();
        assert_eq!(folder.file(&name(0)).look().unwrap().len, len);
        note(&folder, 0, &set(8, 9)).unwrap();
        assert_eq!(noted(&folder, 0).unwrap(), set(3, 14));
        assert!(noted(&folder, 1).unwrap().is_empty());
    }
}
