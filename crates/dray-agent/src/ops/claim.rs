//! `dray claim`: what an operator may do when the other host is gone. What a claim does is in
//! [`claim`](dray_host::migration::claim).

use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{ApiResult, ByteRange, Claim, Claimed, ErrorKind, MigrationState, Refusal};
use dray_host::migration::claim::{ClaimError, Claims, Loops};
use dray_host::record::CopyState;
use dray_host::refusals::{io_error, not_taken};
use dray_host::registry::Process;
use dray_migrate::slots::Board;
use dray_migrate::{Voided, receiver, source};
use dray_types::{BLOCK_SIZE, BlockRange, Epoch, MigrationId};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;
use tokio::task::block_in_place;

/// Longest wait for the end of a migration's loop.
const LOOP_TIMEOUT: Duration = Duration::from_secs(30);

impl Answers<Claim> for Arc<Agent> {
    async fn answer(&self, command: Claim, _: Events) -> ApiResult<Claimed> {
        block_in_place(|| self.claim(&command))
    }
}

impl Agent {
    fn claim(&self, command: &Claim) -> ApiResult<Claimed> {
        let what = format!("cannot claim image '{}'", command.image);
        if !command.source_is_fenced {
            let why = "two hosts would own the image if the other host still runs";
            return Err(Refusal::new(ErrorKind::DataAtRisk, what, why).hint(
                "make sure that the other host cannot write to it, then add --source-is-fenced",
            ));
        }
        self.image(&command.image)?;
        let operation = self.registry.operate_anyway(&command.image, "claim");
        let _operation = operation.map_err(|why| not_taken(&what, why))?;
        let entry = self.image(&command.image)?;
        let (before, clients) = (entry.record(), self.registry.clients_that_run(&command.image));
        let claims = Claims { store: &self.store, registry: &self.registry, loops: self };
        let claimed = claims.claim(&entry, command.accept_loss);
        let claimed = claimed.map_err(|why| not_claimed(&what, why))?;
        // A claim that is told once more: they may have come to the image since.
        let repeated = before.state == CopyState::Owner && before.epoch == claimed.epoch;
        let may_go_on = |one: &&Process| !repeated && !self.registry.is_of_past_vm(**one, &before);
        Ok(Claimed {
            image: command.image.clone(),
            epoch: claimed.epoch,
            id: claimed.id,
            writes_may_be_lost: claimed.writes_may_be_lost,
            bytes_lost: claimed.lost.blocks * BLOCK_SIZE,
            lost: claimed.lost.first.iter().copied().map(in_bytes).collect(),
            others: claimed.others,
            attached: clients.iter().filter(may_go_on).map(|client| client.pid).collect(),
        })
    }

    /// Tells the loop of a migration that it is void, if there is one.
    fn say_void(&self, migration: MigrationId, answer: Voided) -> Option<Arc<Board>> {
        if let Some(slot) = self.sources.get(migration) {
            slot.inputs.send(source::Input::Void(answer)).ok()?;
            return Some(Arc::clone(&slot.board));
        }
        let slot = self.targets.get(migration)?;
        slot.inputs.send(receiver::Input::Void(answer)).ok()?;
        Some(Arc::clone(&slot.board))
    }
}

/// Why a loop did not end.
pub enum GoesOn {
    /// It cannot make its migration void.
    Failed(io::Error),
    /// It does not answer.
    Silent,
}

impl Loops for Agent {
    type Error = GoesOn;

    fn is_exposed(&self, migration: MigrationId) -> bool {
        self.targets.get(migration).is_some_and(|slot| slot.is_exposed())
    }

    fn end(&self, migration: MigrationId) -> Result<Option<Epoch>, GoesOn> {
        let (answer, answered) = channel();
        let Some(board) = self.say_void(migration, answer) else { return Ok(None) };
        let epoch = match answered.recv_timeout(LOOP_TIMEOUT) {
            Ok(Ok(epoch)) => epoch,
            Ok(Err(why)) => return Err(GoesOn::Failed(why)),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => return Err(GoesOn::Silent),
        };
        let (ended, why) = ("the migration is void", "an image of it was claimed");
        let error = Refusal::new(ErrorKind::Cancelled, ended, why)
            .hint("`dray images` shows which other images of the migration you must claim as well");
        board.change(|shown| {
            shown.state = MigrationState::Failed;
            shown.error = Some(error);
        });
        self.sources.remove(migration);
        self.targets.remove(migration);
        Ok(Some(epoch))
    }

    fn cut_off(&self, Process { pid, started }: Process) {
        self.attachments.cut(dray_serve::Process { pid, started });
    }
}

/// What the operator is told of a claim that failed.
fn not_claimed(what: &str, why: ClaimError<GoesOn>) -> Refusal {
    match why {
        ClaimError::Refused { why, hint } => {
            Refusal::new(ErrorKind::Conflict, what, why).hint(hint)
        }
        ClaimError::DataAtRisk { why, hint } => {
            Refusal::new(ErrorKind::DataAtRisk, what, why).hint(hint)
        }
        ClaimError::Io(why) | ClaimError::GoesOn(GoesOn::Failed(why)) => io_error(what, why),
        ClaimError::GoesOn(GoesOn::Silent) => {
            Refusal::new(ErrorKind::Conflict, what, "its migration does not end")
                .hint("claim it again; if that does not help, restart the agent first")
        }
        ClaimError::HalfWay(why) => {
            let error = io_error(what, why);
            let hint = error.hint.clone().map_or_else(String::new, |hint| format!("{hint}; "));
            error.hint(format!("{hint}the image stays closed until it is claimed: claim it again"))
        }
    }
}

fn in_bytes(run: BlockRange) -> ByteRange {
    ByteRange { start: run.byte_offset(), len: run.byte_len() }
}
