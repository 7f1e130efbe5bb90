//! Assigns the next stretch of the image to a provider: pure bookkeeping of tasks.
//!
//! A task can be read from the providers in its mask. Each provider takes first what fewest others
//! have; whoever is quick takes more, so the least loaded does the most. With nothing left to begin, a
//! task that has been with another provider for long is begun a second time. What no provider can
//! read fails, which costs the source sending it.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// Providers of one image at most.
pub const MAX_PROVIDERS: usize = 32;
/// A task is begun a second time after so many times the mean of those done so far …
const SLOW: u32 = 4;
/// … and not before this.
const PATIENCE: Duration = Duration::from_secs(2);

/// A set of providers.
pub type Mask = u32;

#[derive(Clone, Copy, Debug)]
struct Flight {
    task: u32,
    provider: u8,
    since: Instant,
}

/// All tasks of an image.
#[derive(Debug)]
pub struct Tasks {
    /// Who can still read each; none once it is done or has failed.
    masks: Vec<Mask>,
    waiting: BTreeMap<Mask, VecDeque<u32>>,
    flights: Vec<Flight>,
    done: Vec<bool>,
    failed: Vec<u32>,
    took: Duration,
    landed: u32,
}

impl Tasks {
    /// Tasks that can be read from the providers in `masks`; those that `done` names are done.
    pub fn new(masks: Vec<Mask>, done: &[bool]) -> Self {
        let mut tasks = Self {
            done: vec![false; masks.len()],
            masks,
            waiting: BTreeMap::new(),
            flights: Vec::new(),
            failed: Vec::new(),
            took: Duration::ZERO,
            landed: 0,
        };
        for task in 0..tasks.masks.len() {
            if done.get(task).is_some_and(|done| *done) {
                tasks.done[task] = true;
            } else {
                tasks.wait(task as u32);
            }
        }
        tasks
    }

    fn wait(&mut self, task: u32) {
        match self.masks[task as usize] {
            0 => self.failed.push(task),
            mask => self.waiting.entry(mask).or_default().push_back(task),
        }
    }

    /// The next task for a provider; none when it can do nothing now.
    pub fn next(&mut self, provider: usize, now: Instant) -> Option<u32> {
        let bit = 1 << provider;
        let able =
            self.waiting.iter().filter(|(mask, tasks)| **mask & bit != 0 && !tasks.is_empty());
        let fewest = able.map(|(&mask, _)| mask).min_by_key(|mask| mask.count_ones());
        let task = fewest
            .and_then(|mask| self.waiting.get_mut(&mask)?.pop_front())
            .or_else(|| self.slow_elsewhere(provider, now))?;
        self.flights.push(Flight { task, provider: provider as u8, since: now });
        Some(task)
    }

    fn slow_elsewhere(&self, provider: usize, now: Instant) -> Option<u32> {
        let mean = self.took.checked_div(self.landed).unwrap_or_default();
        let patience = PATIENCE.max(mean * SLOW);
        let alone = |flight: &&Flight| {
            self.flights.iter().filter(|other| other.task == flight.task).count() == 1
        };
        let late = |flight: &&Flight| {
            self.masks[flight.task as usize] & (1 << provider) != 0
                && usize::from(flight.provider) != provider
                && now.saturating_duration_since(flight.since) > patience
        };
        self.flights.iter().filter(late).filter(alone).min_by_key(|f| f.since).map(|f| f.task)
    }

    fn land(&mut self, task: u32, provider: usize) -> Option<Flight> {
        let same = |f: &Flight| f.task == task && usize::from(f.provider) == provider;
        let at = self.flights.iter().position(same)?;
        Some(self.flights.swap_remove(at))
    }

    /// A provider has read a task and it is written; false when another one was quicker.
    pub fn read(&mut self, task: u32, provider: usize, now: Instant) -> bool {
        if let Some(flight) = self.land(task, provider) {
            self.took += now.saturating_duration_since(flight.since);
            self.landed += 1;
        }
        self.masks[task as usize] = 0;
        self.failed.retain(|failed| *failed != task);
        !std::mem::replace(&mut self.done[task as usize], true)
    }

    /// A provider could not read a task just now: anybody may try again.
    pub fn later(&mut self, task: u32, provider: usize) {
        self.land(task, provider);
        if !self.done[task as usize] && self.flights.iter().all(|flight| flight.task != task) {
            self.wait(task);
        }
    }

    /// A provider cannot read a task: another one may.
    pub fn cannot(&mut self, task: u32, provider: usize) {
        self.masks[task as usize] &= !(1 << provider);
        self.later(task, provider);
    }

    /// A provider is of no use any more.
    pub fn drop_provider(&mut self, provider: usize) {
        let bit = 1 << provider;
        let its = |flight: &&Flight| usize::from(flight.provider) == provider;
        let flying: Vec<u32> = self.flights.iter().filter(its).map(|f| f.task).collect();
        flying.into_iter().for_each(|task| self.cannot(task, provider));
        for task in std::mem::take(&mut self.waiting).into_values().flatten() {
            self.masks[task as usize] &= !bit;
            self.wait(task);
        }
        for flight in &self.flights {
            self.masks[flight.task as usize] &= !bit;
        }
    }

    /// Whatever is not done fails.
    pub fn give_up(&mut self) {
        self.waiting.clear();
        self.flights.clear();
        let left = self.done.iter().enumerate().filter(|(_, done)| !**done);
        self.failed = left.map(|(task, _)| task as u32).collect();
        self.failed.iter().for_each(|&task| self.masks[task as usize] = 0);
    }

    /// Nothing waits and nothing is under way.
    pub fn is_over(&self) -> bool {
        self.flights.is_empty() && self.waiting.values().all(VecDeque::is_empty)
    }

    /// Which tasks are done.
    pub fn done(&self) -> &[bool] {
        &self.done
    }

    /// The tasks that nobody could read.
    pub fn failed(&self) -> &[u32] {
        &self.failed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tasks(masks: &[Mask]) -> (Tasks, Instant) {
        (Tasks::new(masks.to_vec(), &[]), Instant::now())
    }

    #[test]
    fn each_takes_first_what_fewest_others_have() {
        let (mut tasks, now) = tasks(&[0b11, 0b11, 0b01, 0b10]);
        assert_eq!(tasks.next(0, now), Some(2));
        assert_eq!(tasks.next(1, now), Some(3));
        assert_eq!(tasks.next(1, now), Some(0));
        assert_eq!(tasks.next(1, now), Some(1));
        assert_eq!(tasks.next(0, now), None, "not late yet");
        for (task, by) in [(2, 0), (3, 1), (0, 1), (1, 1)] {
            assert!(tasks.read(task, by, now));
        }
        assert!(tasks.is_over() && tasks.failed().is_empty());
        assert_eq!(tasks.done(), [true; 4]);
    }

    #[test]
    fn what_one_cannot_read_another_does_and_else_it_fails() {
        let (mut tasks, now) = tasks(&[0b11, 0b01]);
        assert_eq!(tasks.next(0, now), Some(1));
        tasks.cannot(1, 0);
        assert_eq!(tasks.failed(), [1]);
        assert_eq!(tasks.next(0, now), Some(0));
        tasks.cannot(0, 0);
        assert_eq!(tasks.next(0, now), None);
        assert_eq!(tasks.next(1, now), Some(0));
        assert!(!tasks.is_over() && tasks.read(0, 1, now) && tasks.is_over());
    }

    #[test]
    fn a_late_task_is_begun_once_more_and_counts_once() {
        let (mut tasks, now) = tasks(&[0b111]);
        assert_eq!(tasks.next(0, now), Some(0));
        let later = now + PATIENCE + Duration::from_millis(1);
        assert_eq!(tasks.next(0, later), None, "not by the same");
        assert_eq!(tasks.next(1, later), Some(0));
        assert_eq!(tasks.next(2, later), None, "not a third time");
        assert!(tasks.read(0, 1, later));
        assert!(!tasks.is_over(), "the slow one still holds it");
        tasks.cannot(0, 0);
        assert!(tasks.is_over() && tasks.failed().is_empty());
    }

    #[test]
    fn what_a_lost_provider_had_goes_to_others() {
        let (mut tasks, now) = tasks(&[0b11, 0b11, 0b01, 0b01]);
        assert_eq!(tasks.next(0, now), Some(2));
        assert_eq!(tasks.next(0, now), Some(3));
        assert_eq!(tasks.next(1, now), Some(0));
        tasks.drop_provider(0);
        let mut failed = tasks.failed().to_vec();
        failed.sort_unstable();
        assert_eq!(failed, [2, 3]);
        tasks.cannot(0, 1);
        assert_eq!(tasks.next(1, now), Some(1));
        tasks.give_up();
        assert!(tasks.is_over());
        assert_eq!(tasks.failed(), [0, 1, 2, 3]);
    }

    #[test]
    fn what_is_done_before_is_not_done_again() {
        let mut tasks = Tasks::new(vec![1, 1, 0], &[true]);
        assert_eq!(tasks.failed(), [2]);
        let now = Instant::now();
        assert_eq!((tasks.next(0, now), tasks.next(0, now)), (Some(1), None));
    }
}
