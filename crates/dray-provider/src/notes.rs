//! Notes of the repositories to which this host has backed up the generations of an image.
//!
//! `backups/NAME.json` in the state directory. What is in a repository the repository knows: these are for
//! the operator's eyes, and tell which generations a line had better remember.

use dray_files::StatePath;
use dray_types::GenerationId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;

/// Notes that are kept of one image: a line remembers fewer generations.
const MAX_NOTES: usize = 256;

/// One generation in one repository.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Note {
    /// The generation.
    pub generation: GenerationId,
    /// The repository, as the operator named it.
    pub to: String,
}

fn path(folder: &StatePath, image: &str) -> StatePath {
    folder.join(format!("{image}.json"))
}

/// What is noted of an image.
pub fn of(folder: &StatePath, image: &str) -> Vec<Note> {
    path(folder, image).peek().unwrap_or_default()
}

/// The newest generation in each repository.
pub fn newest(folder: &StatePath, image: &str) -> Vec<GenerationId> {
    let places = of(folder, image).into_iter().map(|note| (note.to, note.generation));
    places.collect::<BTreeMap<_, _>>().into_values().collect()
}

/// Notes a backup.
///
/// # Errors
/// What the store reports.
pub fn add(folder: &StatePath, image: &str, note: Note) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let mut notes = of(folder, image);
    notes.retain(|known| *known != note);
    notes.push(note);
    let from = notes.len().saturating_sub(MAX_NOTES);
    path(folder, image).put(&&notes[from..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_notes_stay() {
        let dir = tempfile::tempdir().unwrap();
        let folder = StatePath::real(dir.path());
        let note = |nth: u128| Note { generation: GenerationId(nth), to: "nas".to_owned() };
        (0..300).for_each(|nth| add(&folder, "a", note(nth)).unwrap());
        add(&folder, "a", note(299)).unwrap();
        let notes = of(&folder, "a");
        assert_eq!((notes.len(), notes[0].clone(), notes[255].clone()), (256, note(44), note(299)));
        assert!(of(&folder, "b").is_empty());
        add(&folder, "a", Note { generation: GenerationId(1), to: "off".to_owned() }).unwrap();
        assert_eq!(newest(&folder, "a"), [GenerationId(299), GenerationId(1)]);
    }
}
