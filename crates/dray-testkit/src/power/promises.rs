//! What a client was promised up to a moment of the log.

use super::log::{Log, SECTOR};
use dray_guest::note::Note;
use dray_guest::script::{LANES, Script};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

/// Notes, each with the place of its entry in the log.
pub struct Notes(Vec<(usize, Note)>);

impl Notes {
    /// Reads the notes that were written to this part of the disk, in sectors.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub fn read(log: &Log, part: &Range<u64>) -> io::Result<Self> {
        let mut notes = Vec::new();
        for (nth, entry) in log.entries.iter().enumerate() {
            if entry.count > 0 && part.contains(&entry.first) {
                let bytes = log.bytes(entry)?;
                notes.extend(
                    bytes.chunks(SECTOR as usize).filter_map(Note::decode).map(|n| (nth, n)),
                );
            }
        }
        Ok(Self(notes))
    }

    /// The marks, each with its place in the log.
    pub fn marks(&self) -> impl DoubleEndedIterator<Item = (usize, &str)> {
        self.0.iter().filter_map(|(at, note)| match note {
            Note::Mark(text) => Some((*at, text.as_str())),
            _ => None,
        })
    }

    /// What was promised to an image's client, whose requests began with number `first`, before so
    /// many entries of the log were done.
    #[must_use]
    pub fn promises(&self, script: &Script, first: u64, at: usize) -> Promises {
        let mut promises = Promises { first, ..Promises::default() };
        let before = self.0.iter().take_while(|(place, _)| *place < at).map(|(_, note)| note);
        for note in before {
            match *note {
                Note::Flushed { image, host, done } if image == script.image => {
                    promises.flushed.insert(host, done);
                }
                Note::Forced { image, host, lane, n } if image == script.image => {
                    promises.forced.push((host, lane as usize, n));
                }
                Note::Moved { image, host: 1, lane, n } if image == script.image => {
                    promises.moved[lane as usize].get_or_insert(n);
                }
                _ => {}
            }
        }
        promises
    }
}

/// What was promised about one image in one life of its client.
#[derive(Clone, Default, Debug)]
pub struct Promises {
    /// The first request of each lane.
    pub first: u64,
    /// By host: requests of each lane that a flush has made durable.
    pub flushed: BTreeMap<u64, [u64; LANES]>,
    /// Single requests that are durable: host, lane, number.
    pub forced: Vec<(u64, usize, u64)>,
    /// Each lane's first request at the second host.
    pub moved: [Option<u64>; LANES],
}
