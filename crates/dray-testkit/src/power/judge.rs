//! Compares an image with what its client did and was promised, sector by sector.

use super::promises::Promises;
use dray_guest::script::{LANES, SECTOR, Script};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Requests that may be done beyond the last that was promised.
const SLACK: u64 = 500;
/// Runs of wrong sectors that are listed; more are only counted.
const MAX_LISTED: usize = 5;

/// Whose promises count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Whose {
    /// Everybody's.
    All,
    /// The first host's: the second is gone.
    First,
    /// The second host's, about what was written there: the first is gone, and what only it had.
    Second,
}

/// What an image may hold.
pub struct Judge {
    script: Script,
    /// By sector: the requests that wrote it, in order.
    written: BTreeMap<u64, Vec<u64>>,
    /// By sector: the last request that is promised.
    floor: BTreeMap<u64, u64>,
    whose: Whose,
}

impl Judge {
    /// Takes what was promised, in the order of the client's lives.
    #[must_use]
    pub fn new(script: Script, lives: &[Promises], whose: Whose) -> Self {
        let mut judge = Self { script, written: BTreeMap::new(), floor: BTreeMap::new(), whose };
        lives.iter().for_each(|promises| judge.add(promises));
        judge
    }

    fn add(&mut self, promises: &Promises) {
        let whose = self.whose;
        let counts = |host: u64| match whose {
            Whose::All => true,
            Whose::First => host == 0,
            Whose::Second => host == 1,
        };
        let mut last = [promises.first; LANES];
        for done in promises.flushed.values() {
            (0..LANES).for_each(|lane| last[lane] = last[lane].max(done[lane]));
        }
        for (_, lane, n) in &promises.forced {
            last[*lane] = last[*lane].max(n + 1);
        }
        for (lane, last) in last.into_iter().enumerate() {
            for n in promises.first..last + SLACK {
                let sectors = self.script.op(lane, n).sectors();
                sectors.for_each(|sector| self.written.entry(sector).or_default().push(n));
            }
        }
        let from = |lane: usize| match whose {
            Whose::Second => promises.moved[lane].unwrap_or(u64::MAX),
            _ => promises.first,
        };
        for (_, done) in promises.flushed.iter().filter(|(host, _)| counts(**host)) {
            for (lane, done) in done.iter().enumerate() {
                (from(lane)..*done).for_each(|n| self.promise(lane, n));
            }
        }
        for (_, lane, n) in promises.forced.iter().filter(|(host, ..)| counts(*host)) {
            self.promise(*lane, *n);
        }
    }

    fn promise(&mut self, lane: usize, n: u64) {
        for sector in self.script.op(lane, n).sectors() {
            let floor = self.floor.entry(sector).or_insert(n);
            *floor = n.max(*floor);
        }
    }

    /// Sectors about which something was promised.
    #[must_use]
    pub fn promised(&self) -> usize {
        self.floor.len()
    }

    /// Compares an image; what lies past its end counts as zeros.
    ///
    /// # Errors
    /// What is wrong, or why it cannot be read.
    pub fn check(&self, image: &Path) -> io::Result<()> {
        let file = File::open(image)?;
        let size = (self.script.blocks * dray_guest::content::BLOCK as u64) as usize;
        let mut bytes = vec![0; size];
        let len = (file.metadata()?.len() as usize).min(size);
        file.read_exact_at(&mut bytes[..len], 0)?;
        let sectors = (0..).zip(bytes.chunks_exact(SECTOR as usize));
        let mut wrong: Vec<(u64, u64, String)> = Vec::new();
        for (sector, bytes) in sectors {
            let Some(why) = self.wrong(sector, bytes) else { continue };
            match wrong.last_mut() {
                Some((_, end, same)) if *end == sector && *same == why => *end += 1,
                _ => wrong.push((sector, sector + 1, why)),
            }
        }
        if wrong.is_empty() {
            return Ok(());
        }
        let count: u64 = wrong.iter().map(|(start, end, _)| end - start).sum();
        let line = |(start, end, why): &(u64, u64, String)| format!("{start}..{end} {why}");
        let listed: Vec<String> = wrong.iter().take(MAX_LISTED).map(line).collect();
        Err(io::Error::other(format!("{count} wrong sectors: {}", listed.join("; "))))
    }

    fn wrong(&self, sector: u64, bytes: &[u8]) -> Option<String> {
        let floor = self.floor.get(&sector).copied();
        if self.whose == Whose::Second && floor.is_none() {
            return None;
        }
        let none = Vec::new();
        let written = self.written.get(&sector).unwrap_or(&none);
        let is = |after: Option<u64>| self.script.content(sector, after)[..] == *bytes;
        let later = written.iter().filter(|n| floor.is_none_or(|floor| **n >= floor));
        if floor.is_none() && is(None) || later.copied().any(|n| is(Some(n))) {
            return None;
        }
        let older = written.iter().rev().find(|n| is(Some(**n)));
        let found = match older {
            Some(n) => format!("request {n}"),
            None if is(None) => "what it was at the beginning".to_owned(),
            None if bytes.iter().all(|byte| *byte == 0) => "zeros".to_owned(),
            None => format!("what nobody wrote, {}", self.parts(sector, written, bytes)),
        };
        let lane = self.script.lane(sector);
        let floor = floor.map_or("none".to_owned(), |n| n.to_string());
        Some(format!("(lane {lane}): promised request {floor}, found {found}"))
    }

    /// Whose the first and the last bytes of a sector are, which is nobody's as a whole.
    fn parts(&self, sector: u64, written: &[u64], bytes: &[u8]) -> String {
        let candidates = || std::iter::once(None).chain(written.iter().map(|n| Some(*n)));
        let front = |after| {
            let content = self.script.content(sector, after);
            content.iter().zip(bytes).take_while(|(a, b)| a == b).count()
        };
        let back = |after| {
            let content = self.script.content(sector, after);
            content.iter().rev().zip(bytes.iter().rev()).take_while(|(a, b)| a == b).count()
        };
        let name = |after: Option<u64>| {
            after.map_or("the beginning".to_owned(), |n| format!("request {n}"))
        };
        let most = |same: &dyn Fn(Option<u64>) -> usize| {
            let most = candidates().map(|after| (same(after), after)).max();
            most.map_or_else(String::new, |(count, after)| {
                format!("{count} bytes as in {}", name(after))
            })
        };
        let begins: String = bytes.iter().take(48).map(|byte| format!("{byte:02x}")).collect();
        let elsewhere = self.elsewhere(bytes);
        format!(
            "which begins with {}, ends with {}{elsewhere}: {begins}",
            most(&front),
            most(&back)
        )
    }

    /// Another sector to which the bytes belong.
    fn elsewhere(&self, bytes: &[u8]) -> String {
        let sectors = self.script.blocks * dray_guest::content::BLOCK as u64 / SECTOR;
        let found = (0..sectors).find_map(|sector| {
            let written = self.written.get(&sector).into_iter().flatten().map(|n| Some(*n));
            let mut all = std::iter::once(None).chain(written);
            all.find(|after| self.script.content(sector, *after)[..] == *bytes)
                .map(|after| (sector, after))
        });
        found.map_or_else(String::new, |(sector, after)| {
            format!(", is what belongs at sector {sector} after {after:?}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCRIPT: Script = Script { image: 1, blocks: 128, seeded: 96, seed: 5 };

    fn image(upto: [u64; LANES]) -> Vec<u8> {
        let sectors = SCRIPT.blocks * dray_guest::content::BLOCK as u64 / SECTOR;
        let mut bytes: Vec<u8> =
            (0..sectors).flat_map(|sector| SCRIPT.content(sector, None)).collect();
        for (lane, upto) in upto.into_iter().enumerate() {
            for n in 0..upto {
                let at = (SCRIPT.op(lane, n).first * SECTOR) as usize;
                let written = SCRIPT.bytes(lane, n);
                bytes[at..at + written.len()].copy_from_slice(&written);
            }
        }
        bytes
    }

    #[test]
    fn what_was_promised_or_comes_later_is_right_and_nothing_older() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let mut promises = Promises::default();
        promises.flushed.insert(0, [20, 30]);
        let judge = Judge::new(SCRIPT, &[promises], Whose::All);
        let check = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            judge.check(&path)
        };
        check(&image([20, 30])).unwrap();
        check(&image([25, 33])).unwrap();
        let older = check(&image([20, 29])).unwrap_err().to_string();
        assert!(older.contains("(lane 1): promised request 29"), "{older}");
        let mut torn = image([20, 30]);
        let next = SCRIPT.op(0, 20);
        let at = (next.first * SECTOR) as usize;
        torn[at..at + 512].copy_from_slice(&SCRIPT.bytes(0, 20)[..512]);
        check(&torn).unwrap();
        // Within a sector two writes do not meet.
        let (older, newer) = (image([20, 30]), SCRIPT.bytes(0, 20));
        torn[at..at + 512].copy_from_slice(&older[at..at + 512]);
        torn[at..at + 100].copy_from_slice(&newer[..100]);
        let why = check(&torn).unwrap_err().to_string();
        assert!(
            why.contains("what nobody wrote") && why.contains("100 bytes as in request 20"),
            "{why}"
        );
    }
}
