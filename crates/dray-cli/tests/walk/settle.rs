//! Waits until nothing is under way any more, and gives up what has failed, as an operator does.

use crate::walk::Walk;
use crate::world::{DEADLINE, LETTERS, Outcome};
use serde_json::Value;
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(100);

impl Walk<'_> {
    /// Every migration ends.
    pub fn settle(&mut self) -> Result<(), String> {
        let since = Instant::now();
        loop {
            let open = self.open_migrations()?;
            if open.is_empty() {
                return self.forget_failed();
            }
            if since.elapsed() > DEADLINE {
                return Err(format!("open for {DEADLINE:?}, with nothing wrong: {open:?}"));
            }
            self.hear()?;
            std::thread::sleep(POLL);
        }
    }

    /// What the agents say of migrations that have not ended. Nobody begins one now.
    fn open_migrations(&self) -> Result<Vec<String>, String> {
        let mut all = Vec::new();
        for host in 0..2 {
            all.extend(self.world.list(host, "status")?.into_iter().map(|one| (host, one)));
        }
        let ended = |one: &Value| {
            matches!(one["state"].as_str(), Some("failed" | "cancelled" | "prepared"))
        };
        // The target keeps what it has for the next try, which the source does not begin by itself.
        let over = |one: &Value| {
            all.iter().any(|(_, other)| other["migration"] == one["migration"] && ended(other))
        };
        let open = |one: &Value| {
            let state = one["state"].as_str();
            matches!(state, Some("running" | "interrupted"))
                && (one["role"] == "source" || !over(one))
        };
        let open = all.iter().filter(|(_, one)| open(one));
        Ok(open.map(|(host, one)| shown(*host, one)).collect())
    }

    /// What is only prepared is taken back. What has failed is left for the next try, or given up.
    fn forget_failed(&mut self) -> Result<(), String> {
        for host in 0..2 {
            for one in self.world.list(host, "status")? {
                let state = one["state"].as_str().unwrap_or_default();
                let id = one["migration"].as_str().unwrap_or_default().to_owned();
                let given_up = match state {
                    "prepared" => true,
                    "failed" | "cancelled" => {
                        self.forgotten.insert(id.clone()) && self.random.chance(50)
                    }
                    _ => false,
                };
                if one["role"] != "source" || !given_up {
                    continue;
                }
                let outcome = self.world.ask(host, &["cancel", "--discard", &id])?;
                if let Outcome::Refused(code, why) = outcome {
                    self.tell(format!("   {state} {id} is not given up: {code} {why}"));
                }
            }
        }
        Ok(())
    }
}

fn shown(host: usize, one: &Value) -> String {
    let (id, state, role) = (&one["migration"], &one["state"], &one["role"]);
    let (phase, why) = (&one["progress"]["phase"], &one["error"]);
    format!("{}: {id} {state} {role} {phase} {why}", LETTERS[host])
}
