//! What happens while the guest moves: each act alone is harmless, by the failure table; several come
//! together here, and the second one meets what the first has left.

use crate::vm::Vm;
use crate::world::{LETTERS, Room, World};
use dray_testkit::counts::Counts;
use dray_testkit::random::Random;
use std::time::Duration;

/// How long an agent is away at most before it is started again.
const AWAY: Duration = Duration::from_secs(4);
/// How long a command is waited for while something is wrong.
const ANSWER: Duration = Duration::from_secs(5);
/// The furthest a clock jumps, in seconds.
const JUMP: u64 = 900;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Act {
    Terminate,
    Kill,
    Pause,
    Continue,
    FillState,
    FillPool,
    Free,
    Link,
    Clock,
    Cancel,
    Unstall,
    Limit,
    Reboot,
}

/// With their names for `DRAY_SOAK_ACTS`, and how often they are drawn.
const ALL: [(Act, &str, usize); 13] = [
    (Act::Terminate, "term", 4),
    (Act::Kill, "kill", 4),
    (Act::Pause, "pause", 2),
    (Act::Continue, "continue", 2),
    (Act::FillState, "state", 2),
    (Act::FillPool, "pool", 1),
    (Act::Free, "free", 2),
    (Act::Link, "link", 3),
    (Act::Clock, "clock", 2),
    (Act::Cancel, "cancel", 1),
    (Act::Unstall, "unstall", 1),
    (Act::Limit, "limit", 2),
    (Act::Reboot, "reboot", 1),
];

/// The acts to draw from: all, or those that `DRAY_SOAK_ACTS` names.
pub fn drawn() -> Vec<Act> {
    let named = std::env::var("DRAY_SOAK_ACTS").ok();
    let wanted = |name: &str| named.as_ref().is_none_or(|all| all.split(',').any(|n| n == name));
    let some = ALL.iter().filter(|(_, name, _)| wanted(name));
    some.flat_map(|&(act, _, often)| std::iter::repeat_n(act, often)).collect()
}

/// What an act is done to.
pub struct Stage<'a> {
    pub world: &'a mut World,
    pub vm: &'a mut Vm,
    pub random: &'a mut Random,
    pub counts: &'a mut Counts,
}

impl Stage<'_> {
    /// Does it; what was done, in words. An error is one of dray, or of the machine.
    pub fn act(&mut self, act: Act) -> Result<String, String> {
        let i = self.random.below(2) as usize;
        let at = LETTERS[i];
        match act {
            Act::Terminate | Act::Kill => self.restart(i, act == Act::Kill),
            Act::Pause => self.pause(i),
            Act::Continue => self.go_on(),
            Act::FillState | Act::FillPool => {
                let room = if act == Act::FillPool { Room::Pool } else { Room::State };
                self.counts.add("full directories", 1);
                self.world.fill(i, room).map_err(|why| format!("fill: {why}"))?;
                Ok(format!("{room:?} of {at} is full"))
            }
            Act::Free => self.free(),
            Act::Link => self.link(),
            Act::Clock => self.clock(i),
            Act::Cancel => {
                self.counts.add("cancels", 1);
                let discard: &[&str] = if self.random.chance(50) { &["--discard"] } else { &[] };
                self.ask(self.vm.host(), &[&["cancel"], discard].concat())
            }
            Act::Unstall => {
                let disk = self.random.below(self.vm.disks.len() as u64) as usize;
                let name = self.vm.disks[disk].file.clone();
                self.ask(i, &["unstall", &name])
            }
            Act::Limit => {
                let rate = self.random.pick(&["20Mbit", "100Mbit", "none"]);
                self.ask(i, &["limit", rate])
            }
            Act::Reboot => self.reboot(i),
        }
    }

    /// A command that may be refused.
    fn ask(&mut self, i: usize, args: &[&str]) -> Result<String, String> {
        if self.world.paused[i] || self.world.host(i).pid().is_none() {
            return Ok(format!("{} hears no {args:?}", LETTERS[i]));
        }
        let answer = self.world.ask(i, args, ANSWER).map_err(|why| why.to_string())?;
        let answer = answer.map_or("no answer".to_owned(), |answer| {
            format!("{} {}", answer.code, answer.stderr.trim())
        });
        Ok(format!("{} {args:?}: {answer}", LETTERS[i]))
    }

    fn restart(&mut self, i: usize, kill: bool) -> Result<String, String> {
        let host = self.world.host(i);
        if self.world.paused[i] {
            host.go_on().map_err(|why| why.to_string())?;
        }
        let result = if kill { host.kill9() } else { host.stop() };
        result.map_err(|why| format!("the end of agent {}: {why}", LETTERS[i]))?;
        self.world.paused[i] = false;
        self.counts.add(if kill { "kills" } else { "restarts" }, 1);
        let away = self.random.time(AWAY);
        std::thread::sleep(away);
        self.start(i)?;
        let how = if kill { "killed" } else { "ended" };
        Ok(format!("{} is {how}, and back after {away:.1?}", LETTERS[i]))
    }

    fn start(&mut self, i: usize) -> Result<(), String> {
        self.world.restarted[i] = true;
        let full = &self.world.full[i];
        let started = self.world.start(i);
        started.map_err(|why| format!("agent {} does not start, full {full:?}: {why}", LETTERS[i]))
    }

    fn pause(&mut self, i: usize) -> Result<String, String> {
        if !self.world.paused[i] {
            self.world.host(i).pause().map_err(|why| why.to_string())?;
            self.world.paused[i] = true;
            self.counts.add("stops", 1);
        }
        Ok(format!("{} stands still", LETTERS[i]))
    }

    fn go_on(&mut self) -> Result<String, String> {
        for i in 0..2 {
            if std::mem::take(&mut self.world.paused[i]) {
                self.world.host(i).go_on().map_err(|why| why.to_string())?;
            }
        }
        Ok("nobody stands still".to_owned())
    }

    fn free(&mut self) -> Result<String, String> {
        for i in 0..2 {
            for room in self.world.full[i].clone() {
                self.world.free(i, room).map_err(|why| format!("free: {why}"))?;
            }
        }
        Ok("there is room".to_owned())
    }

    fn link(&mut self) -> Result<String, String> {
        let up = self.world.link_down;
        self.world.set_link(up).map_err(|why| format!("link: {why}"))?;
        self.counts.add("cuts", u64::from(!up));
        Ok(format!("the link is {}", if up { "up" } else { "down" }))
    }

    fn clock(&mut self, i: usize) -> Result<String, String> {
        let seconds = self.random.below(2 * JUMP) as i64 - JUMP as i64;
        self.world.step_clock(i, seconds).map_err(|why| format!("clock: {why}"))?;
        self.counts.add("clock steps", 1);
        Ok(format!("the clock of {} jumps by {seconds} s", LETTERS[i]))
    }

    /// The host is started again: its processes are gone, and it has another boot id.
    fn reboot(&mut self, i: usize) -> Result<String, String> {
        self.world.host(i).kill9().map_err(|why| why.to_string())?;
        self.world.paused[i] = false;
        self.vm.lose_qemus(i);
        self.world.new_boot_id(i).map_err(|why| why.to_string())?;
        self.counts.add("reboots", 1);
        std::thread::sleep(self.random.time(AWAY));
        self.start(i)?;
        Ok(format!("{} was rebooted", LETTERS[i]))
    }

    /// Everything is as it should be again.
    pub fn mend(&mut self) -> Result<(), String> {
        self.go_on()?;
        self.free()?;
        if self.world.link_down {
            self.link()?;
        }
        Ok(())
    }
}
