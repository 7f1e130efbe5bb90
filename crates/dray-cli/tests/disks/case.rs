//! One migration under a guest: begun, disturbed, awaited, and looked at from every side.

use crate::guest::{self, Guest, Versions};
use crate::lab::{Lab, opens, wait_for};
use serde_json::{Value, json};
use std::time::Duration;

/// Longest time from the end of a disturbance to the end of the migration.
const END: Duration = Duration::from_secs(45);

/// Blocks of an image: 32 MiB, three quarters of it data.
pub const BLOCKS: u64 = 8192;
/// Blocks of an image with as much data, most of it in another 64 MiB than what the guest writes.
pub const FAR: u64 = 16384 + 6144;
/// Bytes of its data.
pub const DATA: u64 = BLOCKS * guest::BLOCK / 4 * 3;
/// Blocks that a guest uses which leaves most of the image alone: 1 MiB.
pub const SMALL: u64 = 288;
/// The image of most cases.
pub const IMAGE: &str = "disk.img";

/// A lab with one served image and a guest on it.
pub struct Case {
    /// The hosts.
    pub lab: Lab,
    /// The guest.
    pub guest: Guest,
}

impl Case {
    /// Makes the image, starts both agents, each with its variables, and the guest.
    pub fn begin(lab: Lab, seed: u64, source: &[(&str, &str)], target: &[(&str, &str)]) -> Self {
        let mut lab = lab;
        guest::make_image(&lab.a.pool().join(IMAGE), BLOCKS);
        lab.a.start_with(source);
        lab.b.start_with(target);
        lab.a.add(IMAGE);
        let guest = Guest::start(&lab, IMAGE, BLOCKS, BLOCKS, seed);
        Self { lab, guest }
    }

    /// The same with a guest that keeps to a small part of the image, so that what is sent twice
    /// can be told from what was written twice.
    pub fn begin_small(mut lab: Lab) -> Self {
        guest::make_image(&lab.a.pool().join(IMAGE), FAR);
        lab.start();
        lab.a.add(IMAGE);
        let guest = Guest::start(&lab, IMAGE, FAR, SMALL, 1);
        Self { lab, guest }
    }

    /// Waits until the source shows that `bytes` are at the target.
    pub fn await_bytes(&mut self, bytes: u64) -> Result<(), String> {
        let Self { lab, guest } = self;
        wait_for("the copy", END, || {
            let done = lab.a.progress().and_then(|(_, p)| p["total"]["bytes_done"].as_u64());
            guest.complaint().is_some() || done.is_some_and(|done| done >= bytes)
        })
        .map_err(|why| format!("{why}: {}", self.picture()))
    }

    /// Waits until the target has found so many bytes itself.
    pub fn await_found(&mut self, bytes: u64) -> Result<(), String> {
        let Self { lab, guest } = self;
        wait_for("content", END, || {
            let found = lab.a.progress().and_then(|(_, p)| p["bytes_from_target"].as_u64());
            guest.complaint().is_some() || found.is_some_and(|found| found >= bytes)
        })
        .map_err(|why| format!("{why}: {}", self.picture()))
    }

    /// Waits until the source shows this state or phase.
    pub fn await_shown(&mut self, word: &str) -> Result<(), String> {
        let Self { lab, guest } = self;
        wait_for(word, END, || {
            let shown = lab.a.progress();
            guest.complaint().is_some()
                || shown.is_some_and(|(state, p)| state == word || p["phase"] == word)
        })
        .map_err(|why| format!("{why}: {}", self.picture()))
    }

    /// Asks for the migration and does not wait. `rate` is in bytes a second.
    pub fn migrate(&self, strategy: &str, rate: Option<u64>) -> Result<Value, Value> {
        let bandwidth = rate.map(|rate| json!({"bytes_per_second": rate}));
        self.lab.a.ask(json!({"migrate": {
            "subject": {"images": {"names": [IMAGE]}}, "to": "hostb", "strategy": strategy,
            "bandwidth": bandwidth, "detach": true,
        }}))
    }

    /// Waits until the target has everything and both hosts have forgotten the migration.
    pub fn await_end(&mut self) -> Result<(), String> {
        let (lab, guest) = (&mut self.lab, &self.guest);
        let ended = wait_for("the end of the migration", END, || {
            let state = |image: Option<Value>, state: &str| {
                image.is_some_and(|image| {
                    let free = image["migration"].is_null() && image["missing_blocks"] == 0;
                    image["state"] == state && free
                })
            };
            guest.complaint().is_some()
                || state(lab.b.image(IMAGE), "owner")
                    && state(lab.a.image(IMAGE), "replica")
                    && lab.a.open_migrations() + lab.b.open_migrations() == 0
        });
        let ended = guest.complaint().map_or(ended, Err);
        ended.map_err(|why| format!("{why}: {}", self.picture()))
    }

    /// What everybody says, for a failure's message.
    pub fn picture(&mut self) -> String {
        let mut text = String::new();
        for host in [&mut self.lab.a, &mut self.lab.b] {
            let died = if host.has_died() { " (died)" } else { "" };
            text += &format!(
                "\n  {}{died}: files {:?}, {} open, image {}\n    {:?}",
                host.name,
                host.files(),
                host.open_migrations(),
                host.image(IMAGE).unwrap_or_default(),
                host.progress(),
            );
            let log = host.log();
            let last: Vec<_> = log.lines().rev().take(25).collect();
            last.iter().rev().for_each(|line| text += &format!("\n    {line}"));
        }
        text
    }

    /// Shuts the guest down, kills both agents, and looks at what is on the disks.
    pub fn end(self) -> Result<Versions, String> {
        let Self { mut lab, guest, .. } = self;
        let versions = guest.shut_down()?;
        lab.a.kill();
        lab.b.kill();
        let (here, there) = (lab.a.pool().join(IMAGE), lab.b.pool().join(IMAGE));
        guest::compare(&there, &versions)?;
        if opens(&here) || !opens(&there) {
            return Err(format!("only the target's image may open: {:?}", lab.a.files()));
        }
        let (files, replica) = (lab.b.files(), lab.a.files());
        if files != [IMAGE] || replica.len() != 1 || !replica[0].contains(".dray-replica") {
            return Err(format!("files that should not be: {files:?} {replica:?}"));
        }
        warnings(&lab)?;
        Ok(versions)
    }
}

/// An agent's log must hold no error; what it warns of is that its peer went away.
fn warnings(lab: &Lab) -> Result<(), String> {
    for host in [&lab.a, &lab.b] {
        let log = host.log();
        let bad = log.lines().find(|line| line.contains("ERROR") || line.contains("panicked"));
        if let Some(line) = bad {
            return Err(format!("{} logs: {line}", host.name));
        }
    }
    Ok(())
}

/// With both agents dead: at most one host has an image that opens under its name, and none but
/// the last known owner.
pub fn names_agree(lab: &Lab) -> Result<(), String> {
    let (here, there) = (lab.a.pool().join(IMAGE), lab.b.pool().join(IMAGE));
    if opens(&here) && opens(&there) {
        return Err(format!("both images open: {:?} {:?}", lab.a.files(), lab.b.files()));
    }
    Ok(())
}
