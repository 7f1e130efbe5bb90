//! One host is gone for good, in the middle of a move: the other one's disks are claimed, its agent is
//! restarted, and what the guest had flushed there is still there.

use crate::judge;
use crate::round::Soak;
use crate::vm::{Kind, images, path};
use crate::world::LETTERS;
use serde_json::Value;
use std::time::{Duration, Instant};

const ANSWER: Duration = Duration::from_secs(60);
/// How long an agent may take until a claimed file has its name.
const SOON: Duration = Duration::from_secs(40);
/// A migration is at most so far when a host goes.
const BEFORE: Duration = Duration::from_secs(12);

/// What was claimed of one disk.
struct Claimed {
    lost: Vec<(u64, u64)>,
    /// More is lost than the answer lists.
    more: bool,
}

impl Soak<'_> {
    pub fn claim(&mut self) -> Result<(), String> {
        self.pool_full = false;
        let source = self.vm.host();
        let migrate = self.begin_move("60Mbit")?;
        let before = self.random.time(BEFORE);
        std::thread::sleep(before);
        let gone = self.random.below(2) as usize;
        let left = 1 - gone;
        self.tell(format!("{} is gone for good, after {before:.1?}", LETTERS[gone]));
        self.world.host(gone).kill9().map_err(|why| why.to_string())?;
        self.vm.lose_qemus(gone);
        if let Some(mut migrate) = migrate {
            // It watches for nothing.
            let _ = migrate.kill();
            let _ = migrate.wait();
        }
        if left == source {
            // What the guest wrote at the other host is gone with it.
            self.vm.waiting = None;
        }
        self.hear()?;
        self.vm.lose_qemus(left);
        self.vm.waiting = None;
        self.vm.running = None;
        let claimed = self.claim_all(left, source)?;
        self.counts.add("claims", 1);
        self.restart_twice(left)?;
        self.judge_claimed(left, &claimed)
    }

    /// Gives up what can be given up, and claims each disk that the host has not got already.
    fn claim_all(&mut self, left: usize, source: usize) -> Result<Vec<Option<Claimed>>, String> {
        let cancel = self.world.ask(left, &["cancel", "--discard"], ANSWER);
        self.tell(format!("cancel: {cancel:?}"));
        let mut all = Vec::new();
        for i in 0..self.vm.disks.len() {
            let name = self.vm.disks[i].file.clone();
            let known = images(&self.world, left)?;
            let image = known.iter().find(|image| image["name"] == name.as_str());
            let state = image.map(|image| image["state"].as_str().unwrap_or_default().to_owned());
            let answer = self.claim_one(left, &name)?;
            self.tell(format!("{name} was {state:?}; claim: {answer}"));
            let nothing = || Claimed { lost: Vec::new(), more: false };
            all.push(match (answer["claimed"].as_bool(), state.as_deref()) {
                (Some(true), _) => Some(lost(&answer)),
                // What never left is here; what never arrived is nowhere.
                _ if left == source => Some(nothing()),
                (_, Some("owner" | "released")) => Some(nothing()),
                _ => None,
            });
        }
        Ok(all)
    }

    fn claim_one(&self, left: usize, name: &str) -> Result<Value, String> {
        let claim = ["claim", name, "--source-is-fenced", "--accept-loss"];
        let answer = self.world.ask(left, &claim, ANSWER).map_err(|why| why.to_string())?;
        let answer = answer.ok_or(format!("claim of {name}: no answer"))?;
        let mut value =
            answer.json().unwrap_or_else(|_| serde_json::json!({"why": answer.stderr.trim()}));
        value["claimed"] = (answer.code == 0).into();
        Ok(value)
    }

    fn restart_twice(&mut self, left: usize) -> Result<(), String> {
        let failed = |why: std::io::Error| format!("a restart after the claim: {why}");
        for kill in [false, true] {
            let host = self.world.host(left);
            if kill { host.kill9() } else { host.stop() }.map_err(failed)?;
            self.world.start(left).map_err(failed)?;
        }
        Ok(())
    }

    fn judge_claimed(&mut self, left: usize, claimed: &[Option<Claimed>]) -> Result<(), String> {
        let since = Instant::now();
        for i in 0..claimed.len() {
            let Some(claimed) = &claimed[i] else { continue };
            let file = path(&self.world, left, &self.vm.disks[i]);
            while !file.exists() {
                if since.elapsed() > SOON {
                    let known = images(&self.world, left)?;
                    return Err(format!(
                        "{} was claimed and has no name: {known:?}",
                        file.display()
                    ));
                }
                std::thread::sleep(Duration::from_millis(100));
            }
            let disk = &self.vm.disks[i];
            // Bytes of a qcow2 are not bytes of the disk.
            if claimed.more || (disk.kind == Kind::Growing && !claimed.lost.is_empty()) {
                continue;
            }
            let raw = judge::readable(&self.world, left, disk)?;
            let checked = disk.flushed.check_flushed(&raw, &claimed.lost);
            checked.map_err(|why| format!("after a claim and two restarts: {why}"))?;
            self.counts.add("MiB compared", raw.metadata().map_or(0, |meta| meta.len()) >> 20);
        }
        Ok(())
    }
}

fn lost(answer: &Value) -> Claimed {
    let range = |one: &Value| {
        let (start, len) = (one["start"].as_u64()?, one["len"].as_u64()?);
        Some((start, start + len))
    };
    let listed = answer["lost"].as_array().cloned().unwrap_or_default();
    let lost: Vec<(u64, u64)> = listed.iter().filter_map(range).collect();
    let bytes: u64 = lost.iter().map(|(start, end)| end - start).sum();
    let more = answer["bytes_lost"].as_u64().is_some_and(|all| all > bytes);
    Claimed { lost, more }
}
