//! Another program takes a snapshot of a disk while its VM moves, and merges it afterwards.

use crate::walk::Walk;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// How long a block job may take.
const JOB: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);

/// What lies above a disk, and the node below.
pub struct Overlay {
    name: String,
    below: String,
}

impl Walk<'_> {
    /// Takes it of the first disk, if the VM's QEMU is in a state to do so.
    pub fn snapshot(&mut self, number: usize) -> Result<Option<Overlay>, String> {
        let host = self.vms[number].host();
        let name = format!("overlay-{}", self.random.below(1 << 32));
        let file = self.world.file(host, &format!("{name}.qcow2"));
        let running = self.vms[number].running()?;
        let blocks = running.tell("{\"execute\":\"query-block\"}")?;
        let disk = blocks["return"].as_array().and_then(|blocks| {
            let first =
                |block: &&Value| block["qdev"].as_str().is_some_and(|q| q.contains("disk0"));
            blocks.iter().find(first)
        });
        let below =
            disk.and_then(|disk| disk["inserted"]["node-name"].as_str()).unwrap_or_default();
        let snapshot = json!({ "execute": "blockdev-snapshot-sync", "arguments": {
            "node-name": below, "snapshot-file": file, "snapshot-node-name": name } });
        let answer = running.tell(&snapshot.to_string())?;
        let below = below.to_owned();
        self.tell(format!("   a snapshot of {below}: {answer}"));
        Ok(answer.get("return").map(|_| Overlay { name, below }))
    }

    /// The way out for a guest that has stayed: the overlay goes, then dray gives the disk back.
    pub fn merge(&mut self, number: usize, overlay: Overlay) -> Result<(), String> {
        let Overlay { name, below } = overlay;
        let commit = json!({ "job-id": "merge", "device": name, "base-node": below });
        self.other(number, "block-commit", &commit)?;
        self.await_jobs(number, |jobs| jobs[0]["ready"] == true)?;
        self.other(number, "job-complete", &json!({ "id": "merge" }))?;
        self.await_jobs(number, |jobs| jobs == &json!([]))?;
        let host = self.vms[number].host();
        std::fs::remove_file(self.world.file(host, &format!("{name}.qcow2")))
            .map_err(|why| format!("the overlay: {why}"))?;
        self.counts.add("snapshots merged", 1);
        self.release(number)
    }

    fn other(&mut self, number: usize, command: &str, arguments: &Value) -> Result<Value, String> {
        let line = json!({ "execute": command, "arguments": arguments });
        let mut answer = self.vms[number].running()?.tell(&line.to_string())?;
        match answer.get("error") {
            Some(why) => Err(format!("{command}: {why}")),
            None => Ok(answer["return"].take()),
        }
    }

    fn await_jobs(&mut self, number: usize, wanted: impl Fn(&Value) -> bool) -> Result<(), String> {
        let deadline = Instant::now() + JOB;
        loop {
            let jobs = self.other(number, "query-block-jobs", &json!({}))?;
            if wanted(&jobs) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!("the merge does not end: {jobs}"));
            }
            std::thread::sleep(POLL);
        }
    }
}
