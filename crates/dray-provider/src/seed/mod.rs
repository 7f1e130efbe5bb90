//! Seeding: what an image was at an earlier generation is read from backups into a file at the target,
//! which becomes a replica. A migration that follows begins with it, as one back to a host that has an
//! old copy does: the source sends what was written since, and what no provider could give.
//!
//! [`choose`] says what is read and from whom ([`backup`]s, and [`replica`]s at other hosts), [`tasks`] who reads what next, [`gather`] reads,
//! [`state`] is what survives the agent, [`job`] the thread of one image.

pub mod backup;
mod choose;
pub mod gather;
mod job;
pub mod replica;
mod state;
mod survey;
mod tasks;

use dray_wire::request::{Base, SeedImage, Seeding, Surveyed};
use job::Job;
pub use job::Parts;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

pub use state::{SeedNote, revive};
pub use survey::survey;

/// What was read and nobody has gone on with for so long is removed.
pub const KEEP: Duration = Duration::from_secs(24 * 3600);

/// Most images that are read at a time: each has a thread, and reads from repositories and other hosts.
const AT_ONCE: usize = 256;
/// Most images of which is known how far they are; beyond it those that are over are forgotten.
const KNOWN: usize = 1024;

/// The images that are being read, by name.
#[derive(Default)]
pub struct Seeds(Mutex<BTreeMap<String, Arc<Job>>>);

impl Seeds {
    /// How far the wish `number` for an image is, which is read with `parts`; begins it when it is a new one. One that is being
    /// read for somebody else is waited for.
    ///
    /// # Errors
    /// When no thread can be made.
    pub fn ask(&self, number: u64, parts: Parts) -> io::Result<Seeding> {
        let mut jobs = self.0.lock();
        let wanted = &parts.wanted.image;
        let name = wanted.name.clone();
        if let Some(job) = jobs.get(&name).filter(|job| job.number == number || !job.is_over()) {
            if job.image != wanted.id {
                let why = format!("the target is reading another image called '{name}'");
                return Ok(Seeding::Nothing { why });
            }
            return Ok(job.ask());
        }
        if jobs.len() >= KNOWN {
            jobs.retain(|_, job| !job.is_over());
        }
        if jobs.values().filter(|job| !job.is_over()).count() >= AT_ONCE {
            let why = format!("the target is reading {AT_ONCE} images already");
            return Ok(Seeding::Nothing { why });
        }
        let job = Job::start(number, parts)?;
        let state = job.ask();
        jobs.insert(name, job);
        Ok(state)
    }

    /// Who was expected to give what for the wish `number`, before anything was read.
    pub fn expected(&self, number: u64, image: &SeedImage) -> Surveyed {
        let jobs = self.0.lock();
        let job = jobs.get(&image.image.name);
        let job = job.filter(|job| job.number == number && job.image == image.image.id);
        let given = job.map_or_else(Vec::new, |job| job.expected());
        Surveyed { base: Base::Empty, given, notes: Vec::new() }
    }
}
