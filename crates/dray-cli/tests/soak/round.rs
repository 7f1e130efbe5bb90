//! One move of the guest with whatever happens meanwhile, until everything is quiet again; then the judge.

use crate::acts::{Act, Stage, drawn};
use crate::judge;
use crate::vm::{Vm, await_end, images};
use crate::world::{Ground, LETTERS, Room, World};
use dray_testkit::counts::Counts;
use dray_testkit::lab::Answer;
use dray_testkit::random::Random;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::time::{Duration, Instant};

/// When nothing is wrong any more, everything ends within this on a busy machine.
const STUCK: Duration = Duration::from_secs(150);
/// A guest that shows no life for so long, one of whose QEMUs has ended, has died with it.
const NO_LIFE: Duration = Duration::from_secs(12);
/// How long a QEMU that was told to quit may take.
const QUIT: Duration = Duration::from_secs(15);
/// How long a command may take when nothing is wrong, and while something is.
const ANSWER: Duration = Duration::from_secs(60);
const HASTE: Duration = Duration::from_secs(8);
/// The most time between two acts.
const BETWEEN: Duration = Duration::from_secs(2);
/// How long what was given up may take to go.
const LEFT: Duration = Duration::from_secs(3);
/// How often migrations are helped along.
const HELP: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(200);
const STRATEGIES: [&str; 7] =
    ["pre-copy", "post-copy", "hybrid", "mirror", "hot-set", "deferred", "auto"];

/// A guest, its two hosts, and what has happened to them.
pub struct Soak<'a> {
    // Before the hosts: their agents are not asked by a QEMU that ends.
    pub vm: Vm,
    pub world: World,
    pub random: Random,
    pub counts: &'a mut Counts,
    story: Vec<String>,
    began: Instant,
    helped: Instant,
    /// Migrations that the operator has given up.
    forgotten: BTreeSet<String>,
    /// The command that began the move, and watches it.
    command: Option<Child>,
    /// In this round a pool was full.
    pub pool_full: bool,
}

/// What has become of the guest.
#[derive(PartialEq, Eq, Debug)]
enum Guest {
    Stayed,
    Moved,
    Died,
}

impl<'a> Soak<'a> {
    pub fn begin(
        ground: &Ground,
        mut random: Random,
        counts: &'a mut Counts,
    ) -> Result<Self, String> {
        let world = World::begin(ground).map_err(|why| format!("hosts: {why}"))?;
        let vm = Vm::begin(&world, &mut random)?;
        let (story, began, helped) = (Vec::new(), Instant::now(), Instant::now());
        let forgotten = BTreeSet::new();
        let (command, pool_full) = (None, false);
        Ok(Self { vm, world, random, counts, story, began, helped, forgotten, command, pool_full })
    }

    pub fn tell(&mut self, what: impl Into<String>) {
        let line = format!("{:8.2} {}", self.began.elapsed().as_secs_f64(), what.into());
        if std::env::var_os("DRAY_SOAK_TELL").is_some() {
            println!("{line}");
        }
        self.story.push(line);
    }

    pub fn keep(&self, seed: u64, why: &str) {
        if let Err(why) = self.world.keep(seed, why, &self.story) {
            println!("logs are not kept: {why}");
        }
        println!("{}", self.story[self.story.len().saturating_sub(25)..].join("\n"));
    }

    pub fn round(&mut self) -> Result<(), String> {
        self.pool_full = false;
        self.world.restarted = [false; 2];
        let began = Instant::now();
        let acts = drawn();
        if self.random.chance(15) && !acts.is_empty() {
            self.act(&acts)?;
        }
        self.begin_move(&STRATEGIES, &["20Mbit", "60Mbit", "400Mbit"])?;
        for _ in 0..self.random.below(6) {
            if acts.is_empty() {
                break;
            }
            std::thread::sleep(self.random.time(BETWEEN));
            self.act(&acts)?;
        }
        let outcome = self.settle()?;
        self.end_command();
        self.tell(format!("{outcome:?}"));
        self.conclude(&outcome)?;
        self.counts.add("rounds", 1);
        self.tell(format!("a round of {:.0?}", began.elapsed()));
        Ok(())
    }

    fn stage(&mut self) -> Stage<'_> {
        let Self { world, vm, random, counts, .. } = self;
        Stage { world, vm, random, counts }
    }

    fn act(&mut self, acts: &[Act]) -> Result<(), String> {
        let act = self.random.pick(acts);
        self.tell(format!("… {act:?}"));
        let done = self.stage().act(act)?;
        self.tell(done);
        self.pool_full |= self.world.full.iter().any(|full| full.contains(&Room::Pool));
        self.hear()
    }

    pub fn hear(&mut self) -> Result<(), String> {
        judge::hear(&mut self.vm, self.counts, self.pool_full)
    }

    /// Prepares and begins a move to the other host. While something is wrong it may come to nothing.
    pub fn begin_move(&mut self, strategies: &[&str], rates: &[&str]) -> Result<(), String> {
        let (here, there) = (self.vm.host(), 1 - self.vm.host());
        let whole = self.world.is_whole();
        let Some(running) = &mut self.vm.running else { return Ok(()) };
        let (source, to) = (running.qmp(), format!("host{}", LETTERS[there]));
        if self.world.paused[here] || running.has_ended() {
            return Ok(());
        }
        let limit = if whole { ANSWER } else { HASTE };
        let prepare = ["prepare", "--qmp", &source, "--to", &to];
        let answer = self.world.ask(here, &prepare, limit).map_err(|why| why.to_string())?;
        let prepared = answer.as_ref().map(Answer::json);
        let Some(Ok(prepared)) = prepared else {
            self.tell(format!("prepare: {answer:?}"));
            let refused = || Err(format!("prepare, and nothing is wrong: {answer:?}"));
            return if whole { refused() } else { Ok(()) };
        };
        if let Err(why) = self.vm.start_waiting(&self.world, there, &prepared) {
            self.tell(format!("the waiting QEMU: {why}"));
            return if whole { Err(why) } else { Ok(()) };
        }
        let target = self.vm.waiting.as_ref().ok_or("no target")?.qmp();
        let mut args = vec!["migrate", "--qmp", &source, "--to", &to, "--target-qmp", &target];
        let options = self.options(strategies, rates);
        args.extend(options.iter().map(String::as_str));
        self.tell(format!("{} → {}: {}", LETTERS[here], LETTERS[there], options.join(" ")));
        self.counts.add("moves begun", 1);
        let spawned = self.world.host(here).spawn(&args).map_err(|why| why.to_string())?;
        self.command = Some(spawned);
        Ok(())
    }

    /// Whoever watches may have lost sight of the migration, or watch what never comes.
    pub fn end_command(&mut self) {
        if let Some(mut command) = self.command.take() {
            // Ended already, mostly.
            let _ = command.kill();
            let _ = command.wait();
        }
    }

    fn options(&mut self, strategies: &[&str], rates: &[&str]) -> Vec<String> {
        let random = &mut self.random;
        let strategy = random.pick(strategies);
        let mut options = vec!["--strategy", strategy];
        if strategy == "hot-set" {
            options.extend(["--observe", "1s"]);
        }
        if ["pre-copy", "mirror", "hot-set"].contains(&strategy) && random.chance(40) {
            options.extend(["--throttle", random.pick(&["soft", "aggressive"])]);
        }
        options.extend(["--bandwidth", random.pick(rates)]);
        options.extend(["--release", random.pick(&["as-before", "always", "never"])]);
        options.extend(["--order", random.pick(&["workload-aware", "sequential"])]);
        for (flag, percent) in [("--verify", 30), ("--no-reuse", 30), ("--remove-replica", 60)] {
            if random.chance(percent) {
                options.push(flag);
            }
        }
        options.into_iter().map(str::to_owned).collect()
    }

    /// Mends everything and waits until every migration has ended and the guest goes on somewhere, or has
    /// died.
    fn settle(&mut self) -> Result<Guest, String> {
        self.stage().mend()?;
        let (since, disks) = (Instant::now(), self.vm.disks.len());
        let mut life = since;
        loop {
            self.hear()?;
            let writes = |one: &Option<crate::vm::Running>| {
                one.as_ref().is_some_and(|one| one.writes(disks, since))
            };
            let (here, there) = (writes(&self.vm.running), writes(&self.vm.waiting));
            let open = self.open_migrations(since.elapsed())?;
            if here || there || !open.is_empty() {
                life = Instant::now();
            }
            if open.is_empty() && (here || there) {
                return self.who_writes();
            }
            if open.is_empty() && life.elapsed() > NO_LIFE && self.some_qemu_has_ended() {
                return Ok(Guest::Died);
            }
            if since.elapsed() > STUCK {
                let logs = format!("guest here {here}, there {there}; {open:?}");
                return Err(format!("stuck for {STUCK:?} with nothing wrong: {logs}"));
            }
            std::thread::sleep(POLL);
        }
    }

    fn some_qemu_has_ended(&mut self) -> bool {
        let vm = &mut self.vm;
        [&mut vm.running, &mut vm.waiting].into_iter().flatten().any(|one| one.has_ended())
    }

    /// At exactly one host the guest goes on.
    fn who_writes(&mut self) -> Result<Guest, String> {
        let (since, disks) = (Instant::now(), self.vm.disks.len());
        while since.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(POLL * 5);
            self.hear()?;
            let writes = |one: &Option<crate::vm::Running>| {
                one.as_ref().is_some_and(|one| one.writes(disks, since))
            };
            match (writes(&self.vm.running), writes(&self.vm.waiting)) {
                (true, true) => return Err("the guest runs at both hosts".to_owned()),
                (true, false) => return Ok(Guest::Stayed),
                (false, true) => return Ok(Guest::Moved),
                (false, false) => {}
            }
        }
        Err("the guest has stopped writing when all was over".to_owned())
    }

    /// What the agents say of migrations that have not ended. They are helped along, as an operator would.
    fn open_migrations(&mut self, waited: Duration) -> Result<Vec<String>, String> {
        let mut all = Vec::new();
        for i in 0..2 {
            all.extend(self.status(i)?.into_iter().map(|one| (i, one)));
        }
        // An agent that dies before it has noted that a move begins has only prepared it.
        let begins = self.command.as_mut().is_some_and(|one| matches!(one.try_wait(), Ok(None)));
        let ended = |state: &Value| match state.as_str() {
            Some("failed" | "cancelled") => true,
            Some("prepared") => !begins,
            _ => false,
        };
        // The target keeps what it has for the next try, which the source does not begin by itself.
        let over = |one: &Value| {
            all.iter()
                .any(|(_, other)| other["migration"] == one["migration"] && ended(&other["state"]))
        };
        let goes_on = |one: &Value| {
            // What is prepared runs when the command has come so far; disks are adopted first.
            let begins = begins && one["role"] == "source" && one["state"] == "prepared";
            let open = begins || matches!(one["state"].as_str(), Some("running" | "interrupted"));
            open && (one["role"] == "source" || !over(one))
        };
        let open: Vec<_> = all.iter().filter(|(_, one)| goes_on(one)).collect();
        if self.helped.elapsed() > HELP {
            open.iter().try_for_each(|(i, one)| self.help(*i, one, waited))?;
            self.helped = Instant::now();
        }
        Ok(open.iter().map(|(i, one)| shown(*i, one)).collect())
    }

    /// All migrations that a host knows.
    fn status(&self, i: usize) -> Result<Vec<Value>, String> {
        let at = LETTERS[i];
        let answer = self.world.ask(i, &["status"], ANSWER).map_err(|why| why.to_string())?;
        let all = answer.ok_or(format!("status at {at}: no answer"))?.json();
        let all = all.map_err(|why| format!("status at {at}: {why}"))?;
        Ok(all.as_array().cloned().unwrap_or_else(|| vec![all]))
    }

    fn help(&self, i: usize, one: &Value, waited: Duration) -> Result<(), String> {
        let id = one["migration"].as_str().unwrap_or_default();
        let ask = |args: &[&str]| self.world.ask(i, args, HASTE).map_err(|why| why.to_string());
        if one["role"] == "source" {
            // A restart of the agent brings back the limit that the move began with.
            ask(&["limit", "none", id])?;
        }
        if one["progress"]["paused"] == true {
            ask(&["backfill", "start", id])?;
        }
        if one["state"] == "interrupted" && waited > NO_LIFE {
            ask(&["resume", "--detach", id])?;
        }
        Ok(())
    }

    fn conclude(&mut self, outcome: &Guest) -> Result<(), String> {
        match outcome {
            Guest::Moved => {
                self.counts.add("moves", 1);
                self.quit_source()?;
            }
            Guest::Stayed => self.vm.waiting = None,
            Guest::Died => return self.boot_again(),
        }
        self.forget_failed()?;
        self.judge_owner(self.vm.host())?;
        self.count_left()?;
        judge::judge_running(&self.world, &mut self.vm, self.counts, self.pool_full)
    }

    fn quit_source(&mut self) -> Result<(), String> {
        let mut old = self.vm.running.take().ok_or("no source")?;
        self.vm.running = self.vm.waiting.take();
        if old.has_ended() {
            return Ok(());
        }
        let told = quit(&old.qmp());
        if await_end(&mut old.qemu, QUIT) {
            return Ok(());
        }
        if !self.world.restarted[old.host] {
            return Err(format!("the source's QEMU does not quit: {told:?}"));
        }
        // The agent that has started since has no export for a disk that has left. QEMU waits for one as long as its
        // reconnect-delay says, unless it is ended.
        self.counts.add("source QEMUs that had to be killed", 1);
        old.qemu.kill().map(drop).map_err(|why| why.to_string())
    }

    /// The operator gives up what has failed, so that the next move begins afresh.
    pub fn forget_failed(&mut self) -> Result<(), String> {
        for i in 0..2 {
            for one in self.status(i)?.iter().filter(|one| one["role"] == "source") {
                let state = one["state"].as_str().unwrap_or_default();
                let id = one["migration"].as_str().unwrap_or_default();
                let failed = matches!(state, "failed" | "prepared" | "cancelled" | "interrupted");
                // What was given up and is taken up again has the id that it had.
                let new = self.forgotten.insert(id.to_owned()) || state == "prepared";
                if failed && new {
                    let cancel = ["cancel", "--discard", id];
                    let answer = self.world.ask(i, &cancel, ANSWER);
                    let answer = answer.ok().flatten().map(|answer| (answer.code, answer.stderr));
                    self.tell(format!("{state}: {cancel:?}: {answer:?}"));
                }
            }
        }
        Ok(())
    }

    /// The guest is gone, with its host or its QEMU: another one is booted on what its disks hold.
    pub fn boot_again(&mut self) -> Result<(), String> {
        self.counts.add("guests lost with their hosts", 1);
        for host in 0..2 {
            self.vm.lose_qemus(host);
        }
        self.hear()?;
        self.vm.running = None;
        self.vm.waiting = None;
        self.forget_failed()?;
        let host = self.owner()?;
        self.judge_owner(host)?;
        judge::judge_stopped(&self.world, &self.vm, host, self.counts)?;
        self.tell(format!("boots at {}", LETTERS[host]));
        self.vm.boot(&self.world, host, true)?;
        judge::judge_running(&self.world, &mut self.vm, self.counts, self.pool_full)
    }

    /// The host that owns what dray has; all disks are at the same one.
    fn owner(&mut self) -> Result<usize, String> {
        let since = Instant::now();
        loop {
            let open = self.open_migrations(since.elapsed())?;
            let mut owners = Vec::new();
            for host in 0..2 {
                let all = images(&self.world, host)?;
                let own = |image: &Value| image["state"] == "owner" || image["state"] == "released";
                owners.extend(all.iter().any(own).then_some(host));
            }
            if let (true, [host]) = (open.is_empty(), &owners[..]) {
                return Ok(*host);
            }
            if since.elapsed() > STUCK {
                return Err(format!("no guest any more; hosts {owners:?} own, and {open:?}"));
            }
            std::thread::sleep(POLL);
        }
    }

    /// What was given up may still lie where it was to go: it costs room there, and the next move takes it
    /// up. It is counted.
    fn count_left(&mut self) -> Result<(), String> {
        let since = Instant::now();
        while since.elapsed() < LEFT {
            let mut coming = Vec::new();
            for host in 0..2 {
                let all = images(&self.world, host)?;
                coming.extend(all.into_iter().filter(|image| image["state"] == "incoming"));
            }
            if coming.is_empty() {
                return Ok(());
            }
            std::thread::sleep(POLL);
        }
        self.counts.add("moves of which something was left", 1);
        self.tell("something is left of what was given up");
        Ok(())
    }

    /// Names follow in their own time.
    fn judge_owner(&self, host: usize) -> Result<(), String> {
        let since = Instant::now();
        loop {
            match judge::judge_owner(&self.world, &self.vm, host) {
                Err(why) if since.elapsed() > STUCK => return Err(why),
                Err(_) => std::thread::sleep(POLL),
                Ok(()) => return Ok(()),
            }
        }
    }
}

fn shown(i: usize, one: &Value) -> String {
    let progress = &one["progress"];
    format!(
        "{}: {} {} {} {}, memory {} of {} more: {}",
        LETTERS[i],
        one["migration"],
        one["state"],
        one["role"],
        progress["phase"],
        progress["memory_bytes"],
        progress["memory_left"],
        one["error"]
    )
}

/// Tells a QEMU to quit. Its monitor has one client, which may be an agent for a moment.
fn quit(path: &str) -> std::io::Result<()> {
    let since = Instant::now();
    loop {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        if let Some(Ok(_)) = lines.next() {
            let mut stream = stream;
            stream.write_all(b"{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"quit\"}\n")?;
            // Until it hangs up, or says no.
            for line in lines.map_while(Result::ok) {
                if line.contains("error") {
                    return Err(std::io::Error::other(line));
                }
            }
            return Ok(());
        }
        if since.elapsed() > QUIT {
            return Err(std::io::Error::other("its monitor is taken"));
        }
        std::thread::sleep(POLL);
    }
}
