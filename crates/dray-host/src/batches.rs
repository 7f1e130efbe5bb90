//! What is durable of a batch: `batches/ID.json` of the state directory, replaced as a whole
//! whenever something of it begins or ends.

use dray_api::{ErrorKind, Migrate, MoveState, Refusal, Subject, Summary};
use dray_files::StatePath;
use dray_types::text::name_of_socket;
use dray_types::{BatchId, BitRate, MigrationId};
use serde::{Deserialize, Serialize};

/// Batches that are over and still shown; older ones are forgotten.
const KEPT: usize = 16;

/// A batch.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct BatchRecord {
    /// Id of the batch.
    pub batch: BatchId,
    /// Milliseconds since 1970 at the start.
    pub started_unix_ms: u64,
    /// The same at the end, once everything is over.
    pub ended_unix_ms: Option<u64>,
    /// How many run at the same time.
    pub jobs: usize,
    /// Limit of everything that they send together.
    pub budget: Option<BitRate>,
    /// The moves are in the order in which they are begun.
    pub ordered: bool,
    /// The operator wants no more of it.
    pub cancelled: bool,
    /// Each migration.
    pub moves: Vec<MoveRecord>,
}

/// One migration of a batch.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MoveRecord {
    /// As it was asked for.
    pub command: Migrate,
    /// What it is called.
    pub name: String,
    /// Seconds that it was predicted to take.
    pub predicted_seconds: Option<f64>,
    /// Its id: written before it begins, so that a restart finds it again.
    pub migration: Option<MigrationId>,
    /// The names of its images here, written with the id.
    pub images: Vec<String>,
    /// How it ended, when it came through.
    pub summary: Option<Summary>,
    /// Why it did not.
    pub error: Option<Refusal>,
}

impl MoveRecord {
    /// One whose turn has not come. `vm`: what its VM is called, if that is known.
    pub fn new(command: Migrate, vm: Option<String>) -> Self {
        let name = match &command.subject {
            Subject::Vm { qmp } => {
                vm.or_else(|| name_of_socket(qmp)).unwrap_or_else(|| qmp.display().to_string())
            }
            Subject::Images { names } => names.join(", "),
        };
        Self {
            command,
            name,
            predicted_seconds: None,
            migration: None,
            images: Vec::new(),
            summary: None,
            error: None,
        }
    }

    /// How it ended, if it has.
    pub fn end(&self) -> Option<MoveState> {
        match (&self.summary, &self.error) {
            (Some(_), _) => Some(MoveState::Completed),
            (None, Some(error)) if error.kind == ErrorKind::Cancelled => Some(MoveState::Cancelled),
            (None, Some(_)) => Some(MoveState::Failed),
            (None, None) => None,
        }
    }
}

impl BatchRecord {
    /// The shortest first; those of which nothing could be predicted come last, in their order.
    pub fn sort(&mut self) {
        let key = |one: &MoveRecord| one.predicted_seconds.unwrap_or(f64::INFINITY);
        self.moves.sort_by(|one, other| key(one).total_cmp(&key(other)));
        self.ordered = true;
    }

    /// Every batch of `folder` that can be read, and forgets all but the last that are over.
    pub fn all(folder: &StatePath) -> Vec<Self> {
        let paths = folder.entries(".json").unwrap_or_default();
        let mut found: Vec<Self> = paths.iter().filter_map(|path| path.get().ok()).collect();
        found.sort_by_key(|record| record.started_unix_ms);
        let over = found.iter().filter(|record| record.ended_unix_ms.is_some()).count();
        let mut surplus = over.saturating_sub(KEPT);
        found.retain(|record| {
            if surplus == 0 || record.ended_unix_ms.is_none() {
                return true;
            }
            surplus -= 1;
            if let Err(why) = folder.join(format!("{}.json", record.batch)).remove() {
                tracing::warn!(%why, "cannot forget a batch");
            }
            false
        });
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_vm_is_called_as_it_is_known() {
        let command = json!({"subject": {"vm": {"qmp": "/run/vms/web.qmp"}}, "to": "hostb"});
        let command: Migrate = serde_json::from_value(command).unwrap();
        assert_eq!(MoveRecord::new(command.clone(), None).name, "web");
        assert_eq!(MoveRecord::new(command, Some("shop".into())).name, "shop");
    }

    fn image(name: &str, seconds: Option<f64>) -> MoveRecord {
        let command = json!({"subject": {"images": {"names": [name]}}, "to": "hostb"});
        let predicted_seconds = seconds;
        MoveRecord {
            predicted_seconds,
            ..MoveRecord::new(serde_json::from_value(command).unwrap(), None)
        }
    }

    fn batch(number: u128, moves: Vec<MoveRecord>) -> BatchRecord {
        BatchRecord {
            batch: BatchId(number),
            started_unix_ms: number as u64,
            ended_unix_ms: None,
            jobs: 2,
            budget: None,
            ordered: false,
            cancelled: false,
            moves,
        }
    }

    #[test]
    fn the_shortest_comes_first_and_the_unknown_last() {
        let moves = vec![
            image("unknown", None),
            image("long", Some(9.0)),
            image("short", Some(1.5)),
            image("unknown too", None),
        ];
        let mut record = batch(1, moves);
        record.sort();
        let names: Vec<_> = record.moves.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, ["short", "long", "unknown", "unknown too"]);
    }

    #[test]
    fn what_is_over_is_forgotten_after_a_while_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let folder = StatePath::real(dir.path());
        for number in 0..KEPT as u128 + 5 {
            let mut record = batch(number, vec![image("a", None)]);
            // The oldest still runs.
            record.ended_unix_ms = (number > 0).then_some(1);
            let path = folder.join(format!("{}.json", record.batch));
            path.put(&record).unwrap();
        }
        std::fs::write(dir.path().join("broken.json"), "{").unwrap();
        let found = BatchRecord::all(&folder);
        let numbers: Vec<_> = found.iter().map(|record| record.batch.0).collect();
        let wanted: Vec<_> = std::iter::once(0).chain(5..KEPT as u128 + 5).collect();
        assert_eq!(numbers, wanted);
        assert_eq!(folder.entries(".json").unwrap().len(), KEPT + 2);
    }
}
