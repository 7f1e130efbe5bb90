//! One host is gone for good, in the middle of a move: the other one's disks are claimed, also by an
//! agent that is killed meanwhile or has no room, and what the guest had flushed there is still there,
//! except where the claim has said that it is lost. The host that was gone changes nothing when it comes
//! back.

use crate::judge;
use crate::round::Soak;
use crate::vm::{Kind, images, path};
use crate::world::{LETTERS, Room};
use dray_testkit::guest::tools;
use dray_testkit::lab::Answer;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// The code of `dray` when an agent does not answer, or not to the end.
const UNREACHABLE: i32 = 3;
/// Its code for what is not there.
const NOT_FOUND: i32 = 5;
const ANSWER: Duration = Duration::from_secs(60);
/// How long an agent may take until a claimed file has its name.
const SOON: Duration = Duration::from_secs(40);
/// A migration is at most so far when a host goes.
const BEFORE: Duration = Duration::from_secs(12);
/// How long a handover is waited for, and how long after it a host goes at most.
const HANDOVER: Duration = Duration::from_secs(30);
const AFTER: Duration = Duration::from_secs(5);
/// An agent dies this soon after it was told to claim, at most: a claim takes some milliseconds.
const DIES: Duration = Duration::from_millis(120);
/// What a host that comes back may say until it is gone again.
const BACK: Duration = Duration::from_secs(4);
/// With blocks that follow the guest, and slowly.
const STRATEGIES: [&str; 4] = ["post-copy", "deferred", "deferred", "hybrid"];
const RATES: [&str; 2] = ["20Mbit", "60Mbit"];
/// A guest's first flushes at its target may be of writes that it made before.
const FIRST: usize = 16;

/// What became of a disk at the host that is left.
#[derive(Debug)]
enum Fate {
    /// It is this host's without a claim.
    Here,
    /// It was claimed; what is lost of it, in bytes from and to.
    Claimed { lost: Vec<(u64, u64)>, sure: bool },
    /// This host never had it, or has it no more.
    Absent,
}

/// Who is left, and where the move was going.
#[derive(Clone, Copy)]
struct Scene {
    left: usize,
    gone: usize,
    source: usize,
}

impl Soak<'_> {
    /// Whether the guest goes on afterwards.
    pub fn claim(&mut self) -> Result<bool, String> {
        self.pool_full = false;
        let source = self.vm.host();
        self.begin_move(&STRATEGIES, &RATES)?;
        self.await_moment(source)?;
        let gone = self.random.below(2) as usize;
        let scene = Scene { left: 1 - gone, gone, source };
        self.counts.add("hosts gone for good", 1);
        self.lose(scene)?;
        let fates = self.claim_all(scene)?;
        if fates.iter().all(|fate| matches!(fate, Fate::Absent)) {
            return self.not_for_good(scene);
        }
        self.restart_twice(scene.left)?;
        self.judge_claimed(scene, &fates)?;
        let whole = |fate: &Fate| match fate {
            Fate::Here => true,
            Fate::Claimed { lost, sure } => *sure && lost.is_empty(),
            Fate::Absent => false,
        };
        let goes_on = fates.iter().all(whole);
        if goes_on {
            self.vm.boot(&self.world, scene.left, true)?;
            judge::judge_running(&self.world, &mut self.vm, self.counts, self.pool_full)?;
        }
        self.come_back(scene, &fates)?;
        Ok(goes_on)
    }

    /// Some time passes, mostly until the guest is at its target and disks follow.
    fn await_moment(&mut self, source: usize) -> Result<(), String> {
        if self.random.chance(20) {
            std::thread::sleep(self.random.time(BEFORE));
            return Ok(());
        }
        let since = Instant::now();
        let over = |image: &Value| image["state"] == "owner" || image["state"] == "released";
        while since.elapsed() < HANDOVER && !images(&self.world, 1 - source)?.iter().any(over) {
            std::thread::sleep(Duration::from_millis(50));
        }
        std::thread::sleep(self.random.time(AFTER));
        Ok(())
    }

    /// The host is gone with its guest, and the guest at the other one ends: it would complain of zeros.
    fn lose(&mut self, scene: Scene) -> Result<(), String> {
        self.tell(format!("{} is gone for good", LETTERS[scene.gone]));
        self.world.host(scene.gone).kill9().map_err(|why| why.to_string())?;
        self.vm.lose_qemus(scene.gone);
        self.end_command();
        if scene.left == scene.source {
            // What the guest wrote at the other host is gone with it.
            self.vm.waiting = None;
        }
        self.hear()?;
        self.vm.lose_qemus(scene.left);
        // What is known without the loop that knew it, and in another boot without what was not flushed.
        let (again, reboot) = (self.random.chance(50), self.random.chance(50));
        if again {
            let host = self.world.host(scene.left);
            host.kill9().map_err(|why| why.to_string())?;
            if reboot {
                self.world.new_boot_id(scene.left).map_err(|why| why.to_string())?;
            }
            self.world.start(scene.left).map_err(|why| why.to_string())?;
            self.tell(format!("{} starts again, rebooted: {reboot}", LETTERS[scene.left]));
        }
        Ok(())
    }

    /// Gives up what can be given up, and claims each disk that the host has not got already.
    fn claim_all(&mut self, scene: Scene) -> Result<Vec<Fate>, String> {
        let cancel = self.world.ask(scene.left, &["cancel", "--discard"], ANSWER);
        self.tell(format!("cancel: {:?}", cancel.ok().flatten().map(|answer| answer.stderr)));
        let mut all = Vec::new();
        for i in 0..self.vm.disks.len() {
            let name = self.vm.disks[i].file.clone();
            let known = images(&self.world, scene.left)?;
            let was = known.into_iter().find(|image| image["name"] == name.as_str());
            let was = was.unwrap_or(Value::Null);
            let fate = self.claim_one(scene, &name, &was)?;
            self.tell(format!("{name}, {} with {} missing", was["state"], was["missing_blocks"]));
            self.tell(format!("… {}", shown(&fate)));
            all.push(fate);
        }
        Ok(all)
    }

    fn claim_one(&mut self, scene: Scene, name: &str, was: &Value) -> Result<Fate, String> {
        let open = was["state"] != "owner" && was["state"] != "released";
        let open = open || !was["migration"].is_null();
        let mut unheard = open && self.random.chance(25) && self.die_in_claim(scene.left, name)?;
        if open && self.random.chance(25) {
            unheard |= self.claim_without_room(scene.left, name)?;
        }
        let careful = self.ask_claim(scene.left, name, &[])?;
        let losses = careful["bytes_lost"] != 0 || careful["writes_may_be_lost"] == true;
        let answer = match careful["code"].as_i64() {
            // It was claimed in an earlier round, and tells of that once more.
            Some(0) if !open => return Ok(Fate::Here),
            // One that was killed after it was told to accept them is told of again.
            Some(0) if losses && !unheard => {
                return Err(format!(
                    "{name} was claimed with losses that nobody accepted: {careful}"
                ));
            }
            Some(0) => careful,
            _ => self.ask_claim(scene.left, name, &["--accept-loss"])?,
        };
        if answer["code"] == 0 {
            return Ok(self.claimed(scene, &answer));
        }
        self.tell(format!("{name}: {}", answer["why"]));
        if answer["why"].as_str().is_some_and(|why| why.contains("owns it already")) {
            // What a claim has told just before the agent's death is not known.
            let unsure = || Fate::Claimed { lost: Vec::new(), sure: false };
            return Ok(if unheard { unsure() } else { Fate::Here });
        }
        let named = || tools::opens(&self.world.room(scene.left, Room::Pool).join(name));
        // Its QEMU has ended, and the agent has let go of it since it was asked what it has.
        let let_go = answer["code"] == NOT_FOUND && scene.left == scene.source && named();
        match was["state"].as_str() {
            Some("owner") if let_go => Ok(Fate::Here),
            Some("owner" | "replica") => Err(format!("{name} cannot be claimed: {was} {answer}")),
            // A file of QEMU's own, which never left.
            _ if scene.left == scene.source && named() => Ok(Fate::Here),
            _ => Ok(Fate::Absent),
        }
    }

    fn claimed(&mut self, scene: Scene, answer: &Value) -> Fate {
        let at_source = scene.left == scene.source;
        let what = if at_source { "claims at the source" } else { "claims at the target" };
        self.counts.add(what, 1);
        let lost = lost(answer);
        let bytes: u64 = lost.iter().map(|(start, end)| end - start).sum();
        self.counts.add("claims with losses", u64::from(bytes > 0));
        // What the guest went on to write at the source is lost with a promise that was not kept; a long
        // answer lists no more than its beginning.
        let promised = !at_source && answer["writes_may_be_lost"] == true;
        Fate::Claimed { lost, sure: answer["bytes_lost"] == bytes && !promised }
    }

    fn ask_claim(&self, left: usize, name: &str, more: &[&str]) -> Result<Value, String> {
        let claim = [&["claim", name, "--source-is-fenced"], more].concat();
        let answer = self.world.ask(left, &claim, ANSWER).map_err(|why| why.to_string())?;
        let answer = answer.ok_or(format!("claim of {name}: no answer"))?;
        let mut value = match answer.json() {
            Ok(value) if answer.code == 0 => value,
            _ => json!({"why": answer.stderr.trim()}),
        };
        value["code"] = answer.code.into();
        Ok(value)
    }

    /// The agent is killed while it claims; whether it may have done so.
    fn die_in_claim(&mut self, left: usize, name: &str) -> Result<bool, String> {
        let claim = ["claim", name, "--source-is-fenced", "--accept-loss"];
        let asked = self.world.host(left).spawn(&claim).map_err(|why| why.to_string())?;
        let after = self.random.time(DIES);
        std::thread::sleep(after);
        self.restart(left, true)?;
        let answer = Answer::of(asked).map_err(|why| why.to_string())?;
        self.counts.add("claims that an agent's death met", 1);
        self.tell(format!("killed {after:.0?} after it was told to claim {name}: {}", answer.code));
        Ok([0, UNREACHABLE].contains(&answer.code))
    }

    /// Whether it was claimed all the same.
    fn claim_without_room(&mut self, left: usize, name: &str) -> Result<bool, String> {
        self.world.fill(left, Room::State).map_err(|why| format!("fill: {why}"))?;
        let answer = self.ask_claim(left, name, &["--accept-loss"])?;
        self.world.free(left, Room::State).map_err(|why| format!("free: {why}"))?;
        self.counts.add("claims without room", 1);
        self.tell(format!("without room: {} {}", answer["code"], answer["why"]));
        Ok(answer["code"] == 0)
    }

    fn restart(&mut self, left: usize, kill: bool) -> Result<(), String> {
        let failed = |why: std::io::Error| format!("a restart round a claim: {why}");
        let host = self.world.host(left);
        if kill { host.kill9() } else { host.stop() }.map_err(failed)?;
        self.world.start(left).map_err(failed)
    }

    fn restart_twice(&mut self, left: usize) -> Result<(), String> {
        self.restart(left, false)?;
        self.restart(left, true)
    }

    /// Nothing could be claimed: the host is back after all, with what it had, and goes on.
    fn not_for_good(&mut self, scene: Scene) -> Result<bool, String> {
        self.tell(format!("{} is back, and has the disks", LETTERS[scene.gone]));
        self.counts.add("hosts gone that had all", 1);
        self.world.new_boot_id(scene.gone).map_err(|why| why.to_string())?;
        self.world.start(scene.gone).map_err(|why| why.to_string())?;
        self.boot_again()?;
        Ok(true)
    }

    fn judge_claimed(&mut self, scene: Scene, fates: &[Fate]) -> Result<(), String> {
        let since = Instant::now();
        for (i, fate) in fates.iter().enumerate() {
            let file = path(&self.world, scene.left, &self.vm.disks[i]);
            while !matches!(fate, Fate::Absent) && !file.exists() {
                if since.elapsed() > SOON {
                    let known = images(&self.world, scene.left)?;
                    return Err(format!("{}, {fate:?}, has no name: {known:?}", file.display()));
                }
                std::thread::sleep(Duration::from_millis(100));
            }
            self.judge_record(scene.left, i, fate)?;
            let none = Vec::new();
            let lost = match fate {
                Fate::Here => &none,
                Fate::Claimed { lost, sure: true } => lost,
                Fate::Absent | Fate::Claimed { .. } => continue,
            };
            let disk = &self.vm.disks[i];
            // Bytes of a qcow2 are not bytes of the disk.
            if disk.kind == Kind::Growing && !lost.is_empty() {
                continue;
            }
            let raw = judge::readable(&self.world, scene.left, disk)?;
            let checked = disk.flushed.check_flushed(&raw, lost);
            checked.map_err(|why| format!("after a claim and two restarts: {why}"))?;
            are_zeros(&raw, lost)?;
            self.counts.add("MiB compared", raw.metadata().map_or(0, |meta| meta.len()) >> 20);
            self.judge_lost(scene, i, lost)?;
        }
        self.vm.waiting = None;
        self.vm.running = None;
        Ok(())
    }

    /// A claimed image is the host's like any other. One that may have been claimed may have been all
    /// here as well, and waits for its source to hear of that.
    fn judge_record(&self, left: usize, i: usize, fate: &Fate) -> Result<(), String> {
        let Fate::Claimed { sure, .. } = fate else { return Ok(()) };
        let (name, known) = (&self.vm.disks[i].file, images(&self.world, left)?);
        let Some(image) = known.iter().find(|image| image["name"] == name.as_str()) else {
            return Err(format!("nobody knows {name}, which was claimed"));
        };
        let whole = image["closed"].is_null() && image["missing_blocks"] == 0;
        let free = image["migration"].is_null() || !sure;
        if whole && free && image["state"] == "owner" {
            Ok(())
        } else {
            Err(format!("claimed: {image}"))
        }
    }

    /// Nothing is lost that the guest has written and flushed where it was claimed.
    fn judge_lost(&mut self, scene: Scene, i: usize, lost: &[(u64, u64)]) -> Result<(), String> {
        let disk = &self.vm.disks[i];
        let Some(target) = self.vm.waiting.as_mut().filter(|_| scene.left != scene.source) else {
            return Ok(());
        };
        let flush = format!("F {} ", disk.device);
        let lines = target.qemu.console().lines();
        let flushes = lines.into_iter().filter(|line| line.starts_with(&flush));
        let flushes: Vec<String> = flushes.skip(FIRST).collect();
        let mut written = disk.flushed.unwritten();
        written.apply_flushes(&disk.device, &flushes);
        match lost.iter().find(|&&(start, end)| written.written_in(start, end) > 0) {
            None => Ok(()),
            Some(range) => {
                Err(format!("{}: flushed here, and said to be lost: {range:?}", disk.file))
            }
        }
    }

    /// The host that was gone is started again with what it has, and changes nothing; then it is new.
    fn come_back(&mut self, scene: Scene, fates: &[Fate]) -> Result<(), String> {
        let Scene { left, gone, .. } = scene;
        let failed = |why: std::io::Error| format!("{} comes back: {why}", LETTERS[gone]);
        if self.random.chance(60) {
            let opens = |soak: &Self| -> Vec<bool> {
                let disks = soak.vm.disks.iter();
                disks.map(|disk| tools::opens(&path(&soak.world, gone, disk))).collect()
            };
            let before = opens(self);
            self.tell(format!("{} comes back, with {before:?}", LETTERS[gone]));
            self.counts.add("hosts that came back", 1);
            self.world.new_boot_id(gone).map_err(failed)?;
            self.world.start(gone).map_err(failed)?;
            std::thread::sleep(BACK);
            let after = opens(self);
            if before.iter().zip(&after).any(|(before, after)| after > before) {
                return Err(format!("{} opens {after:?} of what was claimed", LETTERS[gone]));
            }
            self.still_has(left, fates)?;
            self.world.host(gone).kill9().map_err(failed)?;
        }
        self.world.wipe(gone).map_err(failed)?;
        self.world.new_boot_id(gone).map_err(failed)?;
        self.world.start(gone).map_err(failed)
    }

    fn still_has(&self, left: usize, fates: &[Fate]) -> Result<(), String> {
        for (i, fate) in fates.iter().enumerate() {
            self.judge_record(left, i, fate)?;
        }
        Ok(())
    }
}

fn shown(fate: &Fate) -> String {
    match fate {
        Fate::Claimed { lost, sure } => {
            let bytes: u64 = lost.iter().map(|(start, end)| end - start).sum();
            format!("claimed, {bytes} bytes in {} ranges are lost, sure: {sure}", lost.len())
        }
        other => format!("{other:?}"),
    }
}

fn lost(answer: &Value) -> Vec<(u64, u64)> {
    let range = |one: &Value| {
        let (start, len) = (one["start"].as_u64()?, one["len"].as_u64()?);
        Some((start, start + len))
    };
    answer["lost"].as_array().into_iter().flatten().filter_map(range).collect()
}

/// What is lost has become zeros.
fn are_zeros(raw: &Path, lost: &[(u64, u64)]) -> Result<(), String> {
    use std::os::unix::fs::FileExt;
    let failed = |why: std::io::Error| format!("{}: {why}", raw.display());
    let file = std::fs::File::open(raw).map_err(failed)?;
    for &(start, end) in lost {
        let mut bytes = vec![0; (end - start) as usize];
        file.read_exact_at(&mut bytes, start).map_err(failed)?;
        if let Some(at) = bytes.iter().position(|&byte| byte != 0) {
            return Err(format!("{}: lost, and not zero at {}", raw.display(), start + at as u64));
        }
    }
    Ok(())
}
