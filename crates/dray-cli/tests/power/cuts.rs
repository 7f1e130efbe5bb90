//! When the power is cut, what the disk loses then, and who is there afterwards.

use crate::recording::Recording;
use dray_testkit::numbered::next;
use dray_testkit::power::{Cut, disk};
use serde_json::{Value, json};
use std::fmt;
use std::io;
use std::path::Path;

/// Draws for a moment at which there is something to lose.
const DRAWS: u64 = 30;

/// Who loses power, and who comes back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Who {
    /// Both hosts do, and both come back.
    Both,
    /// One does, the other's disk loses nothing.
    One(u64),
    /// One does and comes back; the other is gone for good.
    Alone(u64),
}

/// The order in which cuts go through them.
const WHO: [Who; 6] =
    [Who::Both, Who::Alone(1), Who::One(0), Who::Both, Who::Alone(0), Who::One(1)];

/// One disk after a power cut.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Case {
    /// The cut.
    pub cut: Cut,
    /// Who.
    pub who: Who,
    /// What could be seen last from outside.
    pub phase: String,
}

/// Chooses cuts in all phases, each as often as the others.
pub fn choose(recording: &Recording, count: u64, random: &mut u64) -> Vec<Case> {
    let mut marks: Vec<(usize, &str)> = recording.notes.marks().collect();
    if recording.goes_on() {
        marks.insert(0, (0, "boot"));
    }
    let only = std::env::var("DRAY_POWER_PHASE").ok();
    let wanted = |name: &str| only.as_ref().is_none_or(|only| only == name);
    let phases: Vec<_> =
        marks.windows(2).filter(|pair| pair[0].0 + 1 < pair[1].0 && wanted(pair[0].1)).collect();
    assert!(!phases.is_empty(), "nothing to cut in {marks:?}");
    let chosen = (0..count).map(|nth| {
        // Spread over the phases, whatever their number, and in each over who loses power.
        let phase = &phases
            [((nth * phases.len() as u64 * 2 + count) / (2 * count)) as usize % phases.len()];
        let who = WHO[((nth + nth / WHO.len() as u64) % WHO.len() as u64) as usize];
        let cut = draw(recording, phase[0].0 + 1..phase[1].0 + 1, who, random);
        Case { cut, who, phase: phase[0].1.to_owned() }
    });
    chosen.collect()
}

/// A cut of both hosts at any moment at which the migration is under way.
pub fn both(recording: &Recording, random: &mut u64) -> Case {
    let marks: Vec<(usize, &str)> = recording.notes.marks().collect();
    let place = |name: &str| marks.iter().find(|(_, mark)| *mark == name).map(|(at, _)| *at);
    let from = place("copy").or(place("begin")).unwrap_or(0);
    let to = place("release").or(place("after")).unwrap_or(recording.log.entries.len());
    let cut = draw(recording, from..to, Who::Both, random);
    let phase = marks.iter().rev().find(|(at, _)| *at < cut.at).map_or("", |(_, mark)| mark);
    Case { cut, who: Who::Both, phase: phase.to_owned() }
}

/// A moment of this part of the log at which something was not flushed, if one is found.
fn draw(recording: &Recording, range: std::ops::Range<usize>, who: Who, random: &mut u64) -> Cut {
    let part = match who {
        Who::Both => 0..u64::MAX,
        Who::One(host) | Who::Alone(host) => disk::host(host),
    };
    let (survive, torn) = [(0, 0), (30, 50), (50, 100), (80, 50)][(next(random) % 4) as usize];
    let mut cut = Cut { at: range.start, survive, torn, seed: next(random), part };
    for _ in 0..DRAWS {
        cut.at = range.start + (next(random) % range.len() as u64) as usize;
        if next(random).is_multiple_of(2) {
            // Just before a flush, when most can be lost.
            let rest = &recording.log.entries[cut.at..range.end];
            cut.at += rest.iter().position(|entry| entry.flush).unwrap_or(0);
        }
        if cut.unflushed(&recording.log) > 0 {
            break;
        }
    }
    cut
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cut { at, survive, torn, .. } = self.cut;
        write!(
            f,
            "{:?} cut in '{}' at {at}, {survive} % survive, {torn} % of the rest torn",
            self.who, self.phase
        )
    }
}

impl Case {
    /// Writes it down.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let (who, host) = match self.who {
            Who::Both => ("both", 0),
            Who::One(host) => ("one", host),
            Who::Alone(host) => ("alone", host),
        };
        let Cut { at, survive, torn, seed, part } = &self.cut;
        let text = json!({"at": at, "survive": survive, "torn": torn, "seed": seed, "from": part.start,
            "to": part.end, "who": who, "host": host, "phase": self.phase});
        std::fs::write(path, text.to_string())
    }

    /// Reads what was written down.
    pub fn load(path: &Path) -> io::Result<Self> {
        let text: Value = serde_json::from_slice(&std::fs::read(path)?)?;
        let number = |key: &str| {
            text[key].as_u64().ok_or_else(|| io::Error::other(format!("no {key} in {text}")))
        };
        let who = match text["who"].as_str() {
            Some("one") => Who::One(number("host")?),
            Some("alone") => Who::Alone(number("host")?),
            _ => Who::Both,
        };
        let cut = Cut {
            at: number("at")? as usize,
            survive: number("survive")?,
            torn: number("torn")?,
            seed: number("seed")?,
            part: number("from")?..number("to")?,
        };
        let phase = text["phase"].as_str().unwrap_or_default().to_owned();
        Ok(Self { cut, who, phase })
    }
}
