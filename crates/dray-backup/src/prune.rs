//! Decides which backups to remove. This module removes only manifests; the collector then removes
//! content that no manifest names.

use crate::error::{Error, Kind, Result};
use crate::manifest::{self, Backup};
use crate::repository::{Repository, manifests};
use dray_types::ImageId;
use std::collections::{BTreeMap, HashSet};

/// Milliseconds of a day.
const DAY_MS: u64 = 24 * 3600 * 1000;

/// The number of the period that a day since 1970 is in.
type Period = fn(u64) -> u64;

/// Which backups of an image to keep; a backup stays when any of these keeps it, and the newest one
/// always stays. Which one is newest their numbers say, not the clocks of the hosts that made them. Days,
/// weeks (from Monday) and months are UTC's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Policy {
    /// The newest this many.
    pub last: usize,
    /// All of this many days before now.
    pub within_days: u64,
    /// The newest of each of the last this many days that have a backup.
    pub daily: usize,
    /// Likewise by week.
    pub weekly: usize,
    /// Likewise by month.
    pub monthly: usize,
}

/// What a pruning removed, or would remove.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Pruned {
    /// Backups that stay.
    pub kept: Vec<Backup>,
    /// Backups that went.
    pub removed: Vec<Backup>,
}

impl Policy {
    /// Which of an image's backups stay.
    fn keeps(&self, backups: &[Backup], now_unix_ms: u64) -> HashSet<u128> {
        let mut newest: Vec<&Backup> = backups.iter().collect();
        // By number: a host's clock may have been wrong.
        newest.sort_by_key(|b| std::cmp::Reverse((b.number, b.info.taken_unix_ms, b.id)));
        let last = self.last.max(1);
        let mut kept: HashSet<u128> = newest.iter().take(last).map(|b| b.id).collect();
        let since = now_unix_ms.saturating_sub(self.within_days.saturating_mul(DAY_MS));
        if self.within_days > 0 {
            let young = newest.iter().filter(|b| b.info.taken_unix_ms >= since);
            kept.extend(young.map(|b| b.id));
        }
        let periods: [(usize, Period); 3] =
            [(self.daily, |day| day), (self.weekly, week), (self.monthly, month)];
        for (count, period) in periods {
            let mut seen = HashSet::new();
            for backup in &newest {
                if seen.len() == count {
                    break;
                }
                if seen.insert(period(backup.info.taken_unix_ms / DAY_MS)) {
                    kept.insert(backup.id);
                }
            }
        }
        kept
    }
}

/// Weeks since the one of 1970-01-01, which was a Thursday.
fn week(day: u64) -> u64 {
    (day + 3) / 7
}

/// Months since January 1970, from days: years of 365 or 366 days, counted from March 1600, so that
/// the leap day is a year's last.
fn month(day: u64) -> u64 {
    const FROM_MARCH_1600: u64 = 135_080;
    const DAYS_OF_400_YEARS: u64 = 146_097;
    let day = day + FROM_MARCH_1600;
    let (era, day) = (day / DAYS_OF_400_YEARS, day % DAYS_OF_400_YEARS);
    let mut year = day / 365;
    let begins = |year: u64| year * 365 + year / 4 - year / 100 + year / 400;
    while begins(year) > day {
        year -= 1;
    }
    let mut rest = day - begins(year);
    let mut months = 0;
    for length in [31, 30, 31, 30, 31, 31, 30, 31, 30, 31, 31] {
        if rest < length {
            break;
        }
        rest -= length;
        months += 1;
    }
    // March 1600 is month 0 here; January 1970 is 4438 months later.
    (era * 400 + year) * 12 + months - 4438
}

impl Repository {
    /// Removes the backups that `policy` does not keep, of one image or of each. With `dry_run`
    /// nothing is removed. Of base images nothing goes unless the image is named: however old their
    /// one backup is, younger ones of other images are of no use without it.
    ///
    /// # Errors
    /// `Invalid` for a policy that keeps nothing; `Unavailable`.
    pub fn prune(&self, image: Option<ImageId>, policy: Policy, dry_run: bool) -> Result<Pruned> {
        if policy == Policy::default() {
            return Err(Error::invalid("the policy keeps no backup at all"));
        }
        let listing = match image {
            Some(image) => self.backups(image)?,
            None => self.all()?,
        };
        let mut images: BTreeMap<ImageId, Vec<Backup>> = BTreeMap::new();
        let mut pruned = Pruned::default();
        let stays = |backup: &Backup| image.is_none() && backup.info.is_base();
        let (bases, others): (Vec<Backup>, _) = listing.backups.into_iter().partition(stays);
        pruned.kept.extend(bases);
        for backup in others {
            images.entry(backup.info.image).or_default().push(backup);
        }
        for backups in images.into_values() {
            let keeps = policy.keeps(&backups, self.core.world.unix_ms());
            let (kept, removed) = backups.into_iter().partition(|b| keeps.contains(&b.id));
            let removed: Vec<Backup> = removed;
            if !dry_run {
                removed.iter().try_for_each(|backup| self.remove(backup))?;
            }
            pruned.kept.extend::<Vec<Backup>>(kept);
            pruned.removed.extend(removed);
        }
        Ok(pruned)
    }

    /// Removes one backup: every revision of its manifest.
    ///
    /// # Errors
    /// `Unavailable`.
    pub fn remove(&self, backup: &Backup) -> Result<()> {
        let folder = format!("{}{}/", manifest::FOLDER, backup.info.image);
        for other in manifests(&self.core, &folder)?.whole {
            if other.backup().id == backup.id {
                self.core.store.delete(&other.backup().object)?;
            }
        }
        Ok(())
    }

    /// Removes an object that [`crate::Listing::damaged`] names, so that the collector can go on.
    ///
    /// # Errors
    /// `Invalid` when it is a manifest that can be read, or none at all; `Unavailable`.
    pub fn remove_damaged(&self, object: &str) -> Result<()> {
        if manifest::parse_name(object).is_none() {
            return Err(Error::invalid(format!("{object} is no manifest")));
        }
        match crate::repository::read(&self.core, object) {
            Err(e) if e.kind() == Kind::Damaged => self.core.store.delete(object),
            Err(e) => Err(e),
            Ok(_) => Err(Error::invalid(format!("{object} is not damaged"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{Consistency, Info};
    use dray_types::{Ancestor, GenerationId};

    fn backup(number: u64, day: u64) -> Backup {
        let info = Info {
            image: ImageId(1),
            name: String::new(),
            bytes: 0,
            generation: Ancestor { id: GenerationId(1), number },
            parent: None,
            ancestors: vec![],
            taken_unix_ms: day * DAY_MS + number,
            host: String::new(),
            consistency: Consistency::Crash,
        };
        let object = String::new();
        Backup { id: number.into(), number, info, added_bytes: 0, revision: 0, object }
    }

    fn kept(policy: Policy, days: &[u64], now: u64) -> Vec<u128> {
        let backups: Vec<_> = days.iter().zip(1..).map(|(day, n)| backup(n, *day)).collect();
        let mut kept: Vec<_> = policy.keeps(&backups, now * DAY_MS).into_iter().collect();
        kept.sort();
        kept
    }

    #[test]
    fn each_rule_keeps_its_own() {
        let days = [0, 1, 1, 3, 3, 10, 40];
        let none = Policy::default();
        assert_eq!(kept(Policy { last: 2, ..none }, &days, 40), [6, 7]);
        assert_eq!(kept(Policy { within_days: 31, ..none }, &days, 40), [6, 7]);
        assert_eq!(kept(Policy { daily: 3, ..none }, &days, 40), [5, 6, 7]);
        // Thursday 0 to Sunday 3 are one week.
        assert_eq!(kept(Policy { weekly: 9, ..none }, &days, 40), [5, 6, 7]);
        assert_eq!(kept(Policy { monthly: 2, ..none }, &days, 40), [6, 7]);
        assert_eq!(kept(Policy { last: 1, monthly: 9, ..none }, &days, 40), [6, 7]);
        assert_eq!(kept(Policy { last: 99, ..none }, &days, 40).len(), 7);
    }

    #[test]
    fn the_newest_backup_stays_whatever_the_clocks_said() {
        let none = Policy::default();
        // The clock was ahead, and was set back before the last one.
        let days = [40, 41, 3];
        assert_eq!(kept(Policy { last: 1, ..none }, &days, 3), [3]);
        assert_eq!(kept(Policy { last: 2, ..none }, &days, 3), [2, 3]);
        assert_eq!(kept(Policy { daily: 1, ..none }, &days, 3), [3]);
        assert_eq!(kept(Policy { within_days: 9, ..none }, &days, 60), [3]);
        // Nobody has made one for a long time.
        assert_eq!(kept(Policy { within_days: 9, ..none }, &[1, 2], 60), [2]);
    }

    #[test]
    fn months_begin_where_the_calendar_says() {
        for (day, expected) in [
            (0, 0),
            (30, 0),
            (31, 1),
            (58, 1),
            (59, 2),
            (364, 11),
            (365, 12),
            (10_956, 359),
            (10_957, 360), // 2000-01-01
            (11_016, 361), // 2000-02-29
            (11_017, 362),
            (20_512, 673), // 2026-02-28
            (20_513, 674),
        ] {
            assert_eq!(month(day), expected, "day {day}");
        }
    }
}
