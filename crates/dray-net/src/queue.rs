//! The jobs that the data streams of a session share: urgent ones first, the rest in order and at
//! the budget's pace.

use crate::bucket::Class;
use crate::kept::Kept;
use crate::pace::Pacer;
use dray_types::{BlockRange, Epoch, ImageIndex};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// For this long after an urgent job the first of several streams takes no bulk: a guest that
/// reads missing blocks reads more of them, and must not find every stream inside a run.
const RESERVED: Duration = Duration::from_secs(1);
/// Longest sleep of a thread that waits for the budget; after it a changed limit counts.
const NAP: Duration = Duration::from_millis(50);
/// How often a stream without work is looked at: what was under way on one that broke has to be sent
/// again, and nobody else says so.
const LOOK: Duration = Duration::from_secs(1);

/// Most jobs that no stream has begun: far more than windows of both ends allow. A target that asks for more, and takes
/// nothing, is not served.
const MAX_JOBS: usize = 1 << 17;

/// What a job sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SendKind {
    /// The content of the range, at most one run.
    Run,
    /// That the range reads as zeros; nothing is read.
    Zero,
    /// The hashes of the range, whole pieces.
    Described {
        /// Its content is kept for what the target lacks of it.
        keep: bool,
    },
    /// Content that was kept when it was described under this tag.
    Kept(u64),
    /// The hashes of the blocks of a range that was kept when it was described under this tag; it is
    /// kept under the new one. None: it is read, and not kept.
    DescribedBlocks(Option<u64>),
    /// Blocks of a range whose blocks were described under this tag.
    Part {
        /// The tag.
        of: u64,
        /// Bit `i` set: block `i` of the range is sent.
        blocks: [u64; 4],
    },
}

/// One frame to be made and sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SendJob {
    /// Named by the frame and by its acknowledgement.
    pub tag: u64,
    /// The image, by its place in `Open`.
    pub image: ImageIndex,
    /// Which blocks.
    pub range: BlockRange,
    /// Epoch of the sender.
    pub epoch: Epoch,
    /// A guest waits for it.
    pub urgent: bool,
    /// Content or zeros.
    pub kind: SendKind,
}

#[derive(Debug, Default)]
struct Jobs {
    urgent: VecDeque<SendJob>,
    bulk: VecDeque<SendJob>,
    last_urgent: Option<Instant>,
    closed: bool,
    down: bool,
}

/// A queue of jobs with two priorities, for one session.
#[derive(Debug, Default)]
pub struct JobQueue {
    jobs: Mutex<Jobs>,
    wake: Condvar,
    /// Content that was described.
    pub kept: Kept,
}

impl JobQueue {
    /// An empty queue.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock()
    }

    /// Adds a job. After [`close`](Self::close) it is dropped. Where too many wait already the link is broken off.
    pub fn push(&self, job: SendJob) {
        let mut jobs = self.jobs();
        if jobs.closed {
            return;
        }
        if jobs.urgent.len() + jobs.bulk.len() >= MAX_JOBS {
            drop(jobs);
            tracing::warn!("the target asks for more than it takes: the link is broken off");
            self.break_off();
            return;
        }
        if job.urgent {
            jobs.urgent.push_back(job);
            jobs.last_urgent = Some(Instant::now());
        } else {
            jobs.bulk.push_back(job);
        }
        drop(jobs);
        // All, because the first stream may not take what it is woken for.
        self.wake.notify_all();
    }

    /// The next job, if there is one: for a simulated network, which has no data streams.
    pub fn next_now(&self) -> Option<SendJob> {
        let mut jobs = self.jobs();
        jobs.urgent.pop_front().or_else(|| jobs.bulk.pop_front())
    }

    /// Takes a job back that no stream has begun; `false` when one has.
    pub fn remove(&self, tag: u64) -> bool {
        let mut guard = self.jobs();
        let jobs = &mut *guard;
        for queue in [&mut jobs.urgent, &mut jobs.bulk] {
            if let Some(at) = queue.iter().position(|job| job.tag == tag) {
                queue.remove(at);
                return true;
            }
        }
        false
    }

    /// Makes a waiting bulk job urgent; `false` when a stream has begun it or it is not there.
    pub fn hurry(&self, tag: u64) -> bool {
        let mut jobs = self.jobs();
        let Some(at) = jobs.bulk.iter().position(|job| job.tag == tag) else { return false };
        let Some(mut job) = jobs.bulk.remove(at) else { return false };
        job.urgent = true;
        jobs.urgent.push_back(job);
        jobs.last_urgent = Some(Instant::now());
        drop(jobs);
        self.wake.notify_all();
        true
    }

    /// Takes every job back that no stream has begun.
    pub fn clear(&self) -> Vec<SendJob> {
        let mut jobs = self.jobs();
        let mut all: Vec<_> = jobs.urgent.drain(..).collect();
        all.extend(jobs.bulk.drain(..));
        all
    }

    /// Jobs that no stream has begun.
    pub fn len(&self) -> usize {
        let jobs = self.jobs();
        jobs.urgent.len() + jobs.bulk.len()
    }

    /// True when every job was begun.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// No more jobs: streams send what is queued, then finish in order.
    pub fn close(&self) {
        self.jobs().closed = true;
        self.wake.notify_all();
    }

    /// The link is down: drops all jobs and ends all streams. True for the first who says so.
    pub(crate) fn break_off(&self) -> bool {
        let mut jobs = self.jobs();
        let first = !jobs.down;
        jobs.down = true;
        jobs.closed = true;
        jobs.urgent.clear();
        jobs.bulk.clear();
        drop(jobs);
        self.wake.notify_all();
        first
    }

    /// The next job for the stream `index` of `streams`; waits for one and for the budget. None
    /// when the queue is closed and empty. While there is none, `look` sees now and then whether the
    /// stream is still there.
    ///
    /// # Errors
    /// What `look` says.
    pub(crate) fn pop(
        &self,
        index: usize,
        streams: usize,
        pacer: &Pacer,
        look: impl Fn() -> io::Result<()>,
    ) -> io::Result<Option<SendJob>> {
        let mut jobs = self.jobs();
        loop {
            if let Some(job) = jobs.urgent.pop_front() {
                return Ok(Some(job));
            }
            if jobs.bulk.is_empty() {
                if jobs.closed {
                    return Ok(None);
                }
                if self.wake.wait_for(&mut jobs, LOOK).timed_out() {
                    look()?;
                }
                continue;
            }
            let wait = reserved(&jobs, index, streams).max(pacer.ready_in(Class::Bulk));
            if wait.is_zero() {
                return Ok(jobs.bulk.pop_front());
            }
            self.wake.wait_for(&mut jobs, wait.min(NAP));
        }
    }
}

/// How long the stream must still keep itself free for urgent jobs.
fn reserved(jobs: &Jobs, index: usize, streams: usize) -> Duration {
    if index != 0 || streams < 2 {
        return Duration::ZERO;
    }
    jobs.last_urgent.map_or(Duration::ZERO, |at| RESERVED.saturating_sub(at.elapsed()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_types::BitRate;

    fn job(tag: u64, urgent: bool) -> SendJob {
        SendJob {
            tag,
            image: ImageIndex(0),
            range: BlockRange::new(tag, 1),
            epoch: Epoch(1),
            urgent,
            kind: SendKind::Run,
        }
    }

    fn pop(queue: &JobQueue, index: usize, streams: usize, pacer: &Pacer) -> Option<SendJob> {
        queue.pop(index, streams, pacer, || Ok(())).unwrap()
    }

    #[test]
    fn a_target_that_asks_for_more_than_it_takes_loses_its_link() {
        let queue = JobQueue::new();
        (0..MAX_JOBS as u64).for_each(|tag| queue.push(job(tag, tag % 2 == 0)));
        assert_eq!(queue.len(), MAX_JOBS);
        queue.push(job(0, true));
        assert_eq!((queue.len(), queue.break_off()), (0, false));
    }

    #[test]
    fn urgent_jobs_come_first_and_ignore_the_budget() {
        let (queue, pacer) = (JobQueue::new(), Pacer::new(Some(BitRate { bytes_per_second: 1 })));
        pacer.charge(1 << 20);
        queue.push(job(1, false));
        queue.push(job(2, true));
        queue.push(job(3, true));
        assert_eq!(pop(&queue, 0, 1, &pacer).map(|job| job.tag), Some(2));
        assert_eq!(pop(&queue, 0, 1, &pacer).map(|job| job.tag), Some(3));
        pacer.set_limit(None);
        assert_eq!(pop(&queue, 0, 1, &pacer).map(|job| job.tag), Some(1));
        queue.close();
        assert_eq!(pop(&queue, 0, 1, &pacer), None);
    }

    #[test]
    fn the_first_stream_stays_free_after_an_urgent_job() {
        let (queue, pacer) = (JobQueue::new(), Pacer::new(None));
        queue.push(job(1, true));
        queue.push(job(2, false));
        assert_eq!(pop(&queue, 0, 2, &pacer).map(|job| job.tag), Some(1));
        assert!(!reserved(&queue.jobs(), 0, 2).is_zero());
        assert_eq!(pop(&queue, 1, 2, &pacer).map(|job| job.tag), Some(2));
    }

    #[test]
    fn jobs_can_be_taken_back_and_hurried() {
        let (queue, pacer) = (JobQueue::new(), Pacer::new(None));
        (1..=3).for_each(|tag| queue.push(job(tag, false)));
        assert!(queue.remove(1) && !queue.remove(1));
        assert!(queue.hurry(3) && !queue.hurry(9));
        assert_eq!(pop(&queue, 0, 1, &pacer).map(|job| (job.tag, job.urgent)), Some((3, true)));
        assert_eq!(queue.clear(), vec![job(2, false)]);
        assert!(queue.break_off() && !queue.break_off());
        queue.push(job(4, false));
        assert_eq!(pop(&queue, 0, 1, &pacer), None);
    }
}
