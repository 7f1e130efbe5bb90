//! How often each sector was accessed: pages of small counters, only where there was anything.

use super::SECTOR;
use std::collections::BTreeMap;

/// Sectors in a page: 2 MiB of disk.
const PAGE: u64 = 4096;
/// Bytes in the smallest chunk of which frequencies are kept.
const SMALL_CHUNK: u64 = 1 << 20;

type Page = [u8; PAGE as usize];

/// Accesses of one kind in one period.
#[derive(Default)]
pub(super) struct Counts {
    /// Per sector, at most 255.
    pages: BTreeMap<u64, Box<Page>>,
    /// Per chunk of 1 MiB: sectors accessed, each as often as it was.
    chunks: BTreeMap<u64, u64>,
}

impl Counts {
    /// An access of `length` bytes at `offset`; sectors touched in part count.
    pub(super) fn add(&mut self, offset: u64, length: u64) {
        let mut sector = offset / SECTOR;
        let end = (offset + length).div_ceil(SECTOR);
        while sector < end {
            let upto = (sector / PAGE + 1) * PAGE;
            let stop = end.min(upto);
            let page = self.pages.entry(sector / PAGE).or_insert_with(|| Box::new([0; PAGE as _]));
            let (from, to) = (sector % PAGE, stop - (upto - PAGE));
            for count in &mut page[from as usize..to as usize] {
                *count = count.saturating_add(1);
            }
            sector = stop;
        }
        self.count_chunks(offset / SECTOR, end);
    }

    fn count_chunks(&mut self, mut sector: u64, end: u64) {
        const SECTORS: u64 = SMALL_CHUNK / SECTOR;
        while sector < end {
            let stop = end.min((sector / SECTORS + 1) * SECTORS);
            *self.chunks.entry(sector / SECTORS).or_default() += stop - sector;
            sector = stop;
        }
    }

    /// Frequency of each chunk of `chunk` bytes (a multiple of 1 MiB) on a disk of `chunks` chunks.
    pub(super) fn frequencies(&self, chunk: u64, chunks: u64) -> Vec<u64> {
        let mut frequencies = vec![0; chunks as usize];
        for (&small, &count) in &self.chunks {
            frequencies[(small * SMALL_CHUNK / chunk) as usize] += count;
        }
        frequencies
    }

    /// Of the units of `sectors` sectors accessed here, the share that `history` has seen.
    pub(super) fn share_seen_in(&self, history: &Self, sectors: u64) -> Option<f64> {
        let (mut accessed, mut seen) = (0u64, 0u64);
        for (number, page) in &self.pages {
            let past = history.pages.get(number);
            for unit in 0..(PAGE / sectors) {
                let range = (unit * sectors) as usize..((unit + 1) * sectors) as usize;
                if page[range.clone()].iter().any(|&count| count > 0) {
                    accessed += 1;
                    let known = past.is_some_and(|past| past[range].iter().any(|&count| count > 0));
                    seen += u64::from(known);
                }
            }
        }
        (accessed > 0).then(|| seen as f64 / accessed as f64)
    }

    /// Of the sectors accessed here and in `history`, the share accessed there three times or more.
    pub(super) fn share_seen_thrice_in(&self, history: &Self) -> Option<f64> {
        let (mut seen, mut thrice) = (0u64, 0u64);
        for (number, page) in &self.pages {
            let Some(past) = history.pages.get(number) else { continue };
            for (&now, &before) in page.iter().zip(past.iter()) {
                seen += u64::from(now > 0 && before > 0);
                thrice += u64::from(now > 0 && before >= 3);
            }
        }
        (seen > 0).then(|| thrice as f64 / seen as f64)
    }

    /// Runs of accessed sectors in address order, as first sector and one past the last.
    pub(super) fn runs(&self) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for sector in self.sectors() {
            match runs.last_mut() {
                Some((_, end)) if *end == sector => *end += 1,
                _ => runs.push((sector, sector + 1)),
            }
        }
        runs
    }

    /// Accessed sectors in address order.
    pub(super) fn sectors(&self) -> impl Iterator<Item = u64> + '_ {
        self.pages.iter().flat_map(|(number, page)| {
            let accessed = page.iter().enumerate().filter(|&(_, &count)| count > 0);
            accessed.map(move |(place, _)| number * PAGE + place as u64)
        })
    }

    /// Whether a sector was accessed.
    pub(super) fn contains(&self, sector: u64) -> bool {
        self.pages.get(&(sector / PAGE)).is_some_and(|page| page[(sector % PAGE) as usize] > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_count_units_once_however_often_they_are_accessed() {
        let (mut history, mut migration) = (Counts::default(), Counts::default());
        history.add(0, 512);
        history.add(4096, 512);
        history.add(4096, 512);
        history.add(4096, 1);
        migration.add(0, 1024);
        migration.add(0, 512);
        migration.add(4096, 512);
        migration.add(3 << 20, 512);
        assert_eq!(migration.share_seen_in(&history, 1), Some(0.5));
        assert_eq!(migration.share_seen_in(&history, 8), Some(2.0 / 3.0));
        assert_eq!(migration.share_seen_in(&history, 2048), Some(0.5));
        assert_eq!(migration.share_seen_thrice_in(&history), Some(0.5));
        assert_eq!(migration.frequencies(1 << 20, 4), [4, 0, 0, 1]);
        assert_eq!(migration.runs(), [(0, 2), (8, 9), (6144, 6145)]);
        assert_eq!(Counts::default().share_seen_in(&history, 1), None);
    }

    #[test]
    fn accesses_across_pages_and_chunks() {
        let mut counts = Counts::default();
        counts.add((2 << 20) - 512, 1024);
        assert_eq!(counts.runs(), [(4095, 4097)]);
        assert_eq!(counts.frequencies(1 << 20, 3), [0, 1, 1]);
        assert!(counts.contains(4096) && !counts.contains(4097));
    }
}
