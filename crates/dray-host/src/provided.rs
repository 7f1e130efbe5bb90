//! The bytes of an image that repositories and other hosts gave to the target before a migration,
//! as the target reports them, for the summary of the migration.
//!
//! A file of the state directory. Nothing but that part of the summary depends on it; a damaged one is
//! begun anew.

use dray_api::Provided;
use dray_files::StatePath;
use dray_types::{Ancestor, ImageId};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// Images move at the same time.
static WRITING: Mutex<()> = Mutex::new(());
/// Notes that are kept, the newest ones: more images than one host gives away in a day.
const MAX_NOTES: usize = 256;

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Note {
    image: ImageId,
    to: String,
    generation: Ancestor,
    given: Vec<Provided>,
}

fn read(path: &StatePath) -> Vec<Note> {
    path.peek().unwrap_or_default()
}

/// The host `to` has `image` as it was at `generation` now, from these.
pub fn note(
    path: &StatePath,
    image: ImageId,
    to: &str,
    generation: Ancestor,
    given: Vec<Provided>,
) {
    let _writing = WRITING.lock();
    let mut notes = read(path);
    notes.retain(|note| note.image != image || note.to != to);
    notes.push(Note { image, to: to.to_owned(), generation, given });
    let old = notes.len().saturating_sub(MAX_NOTES);
    notes.drain(..old);
    if let Err(why) = path.put(&notes) {
        tracing::debug!(%why, "cannot note which providers gave an image");
    }
}

/// Who gave what the host `to` has of `image` at `generation`; nothing when it came another way.
pub fn of(path: &StatePath, image: ImageId, to: &str, generation: Ancestor) -> Vec<Provided> {
    let same = |note: &Note| note.image == image && note.to == to && note.generation == generation;
    read(path).into_iter().find(same).map_or_else(Vec::new, |note| note.given)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_api::Provided;
    use dray_types::GenerationId;

    #[test]
    fn the_last_note_of_an_image_at_a_host_counts_and_old_ones_go() {
        let dir = tempfile::tempdir().unwrap();
        let path = StatePath::real(dir.path().join("given.json"));
        let at = |number| Ancestor { id: GenerationId(number), number: number as u64 };
        let nas = |bytes| vec![Provided { provider: "nas".into(), predicted: Some(9), bytes }];
        note(&path, ImageId(1), "hostb", at(3), nas(1));
        note(&path, ImageId(1), "hostc", at(3), nas(2));
        note(&path, ImageId(1), "hostb", at(4), nas(3));
        assert_eq!(of(&path, ImageId(1), "hostb", at(3)), []);
        assert_eq!(of(&path, ImageId(1), "hostb", at(4)), nas(3));
        assert_eq!(of(&path, ImageId(1), "hostc", at(3)), nas(2));
        assert_eq!(of(&path, ImageId(2), "hostb", at(4)), []);
        (0..MAX_NOTES as u128 - 1).for_each(|n| note(&path, ImageId(9 + n), "x", at(1), nas(0)));
        assert_eq!(of(&path, ImageId(1), "hostc", at(3)), []);
        assert_eq!(of(&path, ImageId(1), "hostb", at(4)), nas(3));
        std::fs::write(&path, "[").unwrap();
        assert_eq!(of(&path, ImageId(1), "hostb", at(4)), []);
        note(&path, ImageId(1), "hostb", at(4), nas(5));
        assert_eq!(of(&path, ImageId(1), "hostb", at(4)), nas(5));
    }
}
