//! The images that are being backed up. Meanwhile the agent refuses operations on them that would
//! disturb the backup.

use dray_api::{ApiResult, BackupProgress, ErrorKind, ImageAmount, Refusal};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// One backup under way.
pub struct Job {
    /// The repository that gets the backup.
    pub to: String,
    began: Instant,
    cancelled: AtomicBool,
    shown: Mutex<BackupProgress>,
}

/// All backups under way, by image.
#[derive(Default)]
pub struct Jobs(Mutex<BTreeMap<String, Arc<Job>>>);

/// The images of a job are nobody else's until this is dropped.
pub struct Lease {
    jobs: Arc<Jobs>,
    names: Vec<String>,
    /// The job.
    pub job: Arc<Job>,
}

impl Jobs {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Job>>> {
        self.0.lock()
    }

    /// Begins a job.
    ///
    /// # Errors
    /// `Conflict` when an image is being backed up already.
    pub fn begin(self: &Arc<Self>, names: &[String], to: &str) -> ApiResult<Lease> {
        let mut jobs = self.lock();
        if let Some(taken) = names.iter().find(|name| jobs.contains_key(*name)) {
            let what = format!("cannot back up to '{to}'");
            let why = format!("image '{taken}' is being backed up already");
            return Err(Refusal::new(ErrorKind::Conflict, what, why));
        }
        let job = Arc::new(Job::new(names, to));
        for name in names {
            jobs.insert(name.clone(), Arc::clone(&job));
        }
        Ok(Lease { jobs: Arc::clone(self), names: names.to_vec(), job })
    }

    /// How far all backups are.
    pub fn all(&self) -> Vec<BackupProgress> {
        let mut jobs: Vec<Arc<Job>> = self.lock().values().cloned().collect();
        jobs.sort_by_key(Arc::as_ptr);
        jobs.dedup_by(|a, b| Arc::ptr_eq(a, b));
        jobs.iter().map(|job| job.progress()).collect()
    }

    /// The backup of this image that is under way.
    pub fn of(&self, name: &str) -> Option<Arc<Job>> {
        self.lock().get(name).cloned()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut jobs = self.jobs.lock();
        self.names.iter().for_each(|name| drop(jobs.remove(name)));
    }
}

impl Job {
    fn new(names: &[String], to: &str) -> Self {
        let image = |name: &String| ImageAmount { image: name.clone(), ..ImageAmount::default() };
        let images = names.iter().map(image).collect();
        let shown = BackupProgress { to: to.to_owned(), images, ..BackupProgress::default() };
        Self {
            to: to.to_owned(),
            began: Instant::now(),
            cancelled: AtomicBool::new(false),
            shown: Mutex::new(shown),
        }
    }

    /// How far it is.
    pub fn progress(&self) -> BackupProgress {
        let mut shown = self.shown.lock().clone();
        shown.elapsed_seconds = self.began.elapsed().as_secs_f64();
        shown
    }

    /// Another image belongs to it, one that nobody asked for by name; its number.
    pub fn add(&self, name: &str) -> usize {
        let mut shown = self.shown.lock();
        shown.images.push(ImageAmount { image: name.to_owned(), ..ImageAmount::default() });
        shown.images.len() - 1
    }

    /// Changes what is shown of image number `nth`.
    pub fn change(&self, nth: usize, change: impl FnOnce(&mut ImageAmount)) {
        let mut shown = self.shown.lock();
        if let Some(image) = shown.images.get_mut(nth) {
            change(image);
        }
    }

    /// It ends as soon as it can.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether it shall end.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_backed_up_once_at_a_time() {
        let jobs = Arc::new(Jobs::default());
        let names = |names: &[&str]| names.iter().map(|&n| n.to_owned()).collect::<Vec<_>>();
        let lease = jobs.begin(&names(&["a", "b"]), "x").unwrap();
        let why = jobs.begin(&names(&["c", "b"]), "y").map(drop).unwrap_err();
        assert_eq!(why.to_string(), "cannot back up to 'y': image 'b' is being backed up already");
        assert!(jobs.of("c").is_none() && jobs.of("a").is_some());
        lease.job.change(1, |image| image.bytes_done = 5);
        assert_eq!(jobs.of("b").unwrap().progress().images[1].bytes_done, 5);
        drop(lease);
        assert!(jobs.begin(&names(&["b"]), "y").is_ok());
    }
}
