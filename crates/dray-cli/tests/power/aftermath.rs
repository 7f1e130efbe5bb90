//! The machine that is booted on a disk after a power cut, and what that disk must hold when everybody
//! there has done what he does: the images are taken out of its file systems, and no agent is asked
//! what is in them.

use crate::cuts::{Case, Who};
use crate::recording::Recording;
use dray_guest::script::Script;
use dray_testkit::guest::initramfs::Boot;
use dray_testkit::power::disk;
use dray_testkit::power::judge::{Judge, Whose};
use dray_testkit::power::machine::Machine;
use dray_testkit::power::promises::Promises;
use serde_json::Value;
use std::path::Path;

/// Boots the disk and looks at it; how many sectors were promised to somebody.
pub fn check(recording: &Recording, case: &Case, boot: &Boot, dir: &Path) -> Result<usize, String> {
    let (disk, console) = (dir.join("cut"), dir.join("booted"));
    let io = |why: std::io::Error| why.to_string();
    case.cut.apply(&recording.log, &recording.base, &disk).map_err(io)?;
    let alone = match case.who {
        Who::Alone(host) => format!("dray.alone={}", ["a", "b"][host as usize]),
        _ => String::new(),
    };
    let order = format!("dray.do=look {alone} {}", recording.order());
    let machine = Machine { disk: &disk, log: None, order: &order, console: &console };
    let said = machine.run(boot).map_err(io)?;
    let said: Value = serde_json::from_str(&said).map_err(|why| format!("{why}: {said}"))?;
    let mut promised = 0;
    for (name, script) in recording.images() {
        let lives = recording.promises(&script, case.cut.at);
        let copies = said[name].as_array().cloned().unwrap_or_default();
        let copy = Copy { name, script, lives };
        promised += copy.check(case.who, &copies, &disk).map_err(|why| format!("{why}: {said}"))?;
    }
    Ok(promised)
}

/// An image.
struct Copy {
    name: &'static str,
    script: Script,
    lives: Vec<Promises>,
}

impl Copy {
    /// Looks at the copies of the image that the machine has shown.
    fn check(&self, who: Who, copies: &[Value], disk: &Path) -> Result<usize, String> {
        let name = self.name;
        let owners: Vec<&Value> = copies.iter().filter(|copy| copy["state"] == "owner").collect();
        let owner = match owners[..] {
            [owner] => owner,
            // Alone the target has nothing to show for an image that was never its own.
            [] if who == Who::Alone(1) && !self.served_at_target() => return Ok(0),
            _ => return Err(format!("{name} has {} owners", owners.len())),
        };
        let whose = match who {
            Who::Alone(0) if owner["claimed"] == true => Whose::First,
            Who::Alone(1) if owner["claimed"] == true => Whose::Second,
            _ => Whose::All,
        };
        let judge = Judge::new(self.script, &self.lives, whose);
        let host = u64::from(owner["host"] == "b");
        let path = owner["path"].as_str().unwrap_or_default();
        // Where its host's file system was mounted.
        let inside = path.get(2..).unwrap_or_default();
        let out = disk.with_extension("image");
        disk::extract(disk, host, inside, &out).map_err(|why| why.to_string())?;
        judge.check(&out).map_err(|why| format!("{name} at host {host}: {why}"))?;
        Ok(judge.promised())
    }

    /// Whether the second host has promised anything.
    fn served_at_target(&self) -> bool {
        self.lives.iter().any(|promises| {
            let forced = promises.forced.iter().any(|(host, ..)| *host == 1);
            forced || promises.flushed.contains_key(&1)
        })
    }
}
