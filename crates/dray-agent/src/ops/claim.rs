//! `dray claim` and `unstall`: what an operator may do when the other host is gone. A claim stands
//! outside the rule of one owner, so it demands the operator's word.

use super::images::random_id;
use super::io_error;
use crate::agent::Agent;
use crate::api::{ApiError, ApiResult, ByteRange, Claim, Claimed, ErrorKind, Unstall, Unstalled};
use crate::registry::{CopyState, Entry};
use dray_image::Fill;
use dray_types::{BLOCK_SIZE, ByteSize, Epoch, ImageId};

/// Lost ranges that an answer lists at most.
const MAX_LISTED: usize = 1000;

impl Agent {
    pub(super) fn claim(&self, command: &Claim) -> ApiResult<Claimed> {
        let entry = self.image(&command.image)?;
        let what = format!("cannot claim image '{}'", command.image);
        if !command.source_is_fenced {
            let why = "two hosts would own it if the other one still runs";
            return Err(ApiError::new(ErrorKind::DataAtRisk, what, why)
                .hint("make sure the other host cannot write, then add --source-is-fenced"));
        }
        let record = entry.record();
        match record.state {
            CopyState::Owner if entry.disk.missing_count() > 0 => {
                self.claim_incomplete(&what, &entry, command)
            }
            CopyState::Owner => {
                Err(ApiError::new(ErrorKind::Conflict, what, "this host owns it already"))
            }
            CopyState::Replica => self.claim_replica(&what, &entry, command),
            CopyState::Incoming => {
                let why = "this copy never was the owner's and is not complete";
                Err(ApiError::new(ErrorKind::Conflict, what, why)
                    .hint("claim it at the source, or restore a backup"))
            }
        }
    }

    /// This host owns the image, and the source of its missing blocks is gone.
    fn claim_incomplete(&self, what: &str, entry: &Entry, command: &Claim) -> ApiResult<Claimed> {
        let missing = entry.disk.missing_snapshot();
        let bytes = missing.len() * BLOCK_SIZE;
        let lost: Vec<ByteRange> = missing
            .runs()
            .take(MAX_LISTED)
            .map(|run| ByteRange { start: run.byte_offset(), len: run.byte_len() })
            .collect();
        if !command.accept_loss {
            let why = format!("{} of it are only on the source", ByteSize(bytes));
            return Err(ApiError::new(ErrorKind::DataAtRisk, what, why)
                .hint("bring the source back, or add --accept-loss: these parts become zeros"));
        }
        for run in missing.runs_up_to(dray_types::MAX_RUN_BLOCKS) {
            entry.disk.fill(run, Fill::Zero).map_err(|why| io_error(what, why))?;
        }
        entry.disk.checkpoint().map_err(|why| io_error(what, why))?;
        let (epoch, id) = self.new_line(what, entry)?;
        Ok(Claimed {
            image: command.image.clone(),
            epoch,
            id,
            writes_may_be_lost: false,
            bytes_lost: bytes,
            lost,
        })
    }

    /// This host has what it was before the handover, and the new owner is gone.
    fn claim_replica(&self, what: &str, entry: &Entry, command: &Claim) -> ApiResult<Claimed> {
        if !command.accept_loss {
            let why = "everything written since the handover is on the other host";
            return Err(ApiError::new(ErrorKind::DataAtRisk, what, why)
                .hint("bring that host back, or add --accept-loss"));
        }
        let record = entry.record();
        self.registry.restore(entry, record.epoch).map_err(|why| io_error(what, why))?;
        self.registry
            .update(entry, |record| record.replica = None)
            .map_err(|why| io_error(what, why))?;
        let (epoch, id) = self.new_line(what, entry)?;
        if let Some(slot) = record.migration.and_then(|migration| self.sources.get(migration)) {
            slot.send(crate::migration::source::Input::Stop);
        }
        // The file was open for reading only; from here on it is written.
        self.reopen(what, &command.image)?;
        Ok(Claimed {
            image: command.image.clone(),
            epoch,
            id,
            writes_may_be_lost: true,
            bytes_lost: 0,
            lost: Vec::new(),
        })
    }

    fn reopen(&self, what: &str, name: &str) -> ApiResult<()> {
        let record = self.image(name)?.record();
        let file = self.registry.open_file(&record).map_err(|why| io_error(what, why))?;
        self.registry.forget(name).map_err(|why| io_error(what, why))?;
        self.registry.add(record, file.into()).map_err(|why| io_error(what, why)).map(drop)
    }

    /// A new epoch and a new id: what the other host may still have is another line of descent.
    fn new_line(&self, what: &str, entry: &Entry) -> ApiResult<(Epoch, ImageId)> {
        let id = ImageId(random_id()?);
        // Above anything the lost host can have: it was at most one handover ahead.
        let epoch = entry.record().epoch.next().next();
        self.registry
            .update(entry, |record| {
                record.id = id;
                record.epoch = epoch;
                record.migration = None;
            })
            .map_err(|why| io_error(what, why))?;
        // No replica of the old line may ever be taken for one of this.
        self.registry.end_line(entry).map_err(|why| io_error(what, why))?;
        Ok((epoch, id))
    }

    /// Whether guests may be served from it. While a migration of it is open its loop knows that, and
    /// the record follows; one without a loop vouches for nothing.
    fn is_owned(&self, entry: &Entry) -> bool {
        let record = entry.record();
        let vouched = record.migration.is_none_or(|migration| match self.sources.get(migration) {
            Some(source) => source.owns(),
            None => self.targets.get(migration).is_some(),
        });
        record.state == CopyState::Owner && vouched
    }

    pub(super) fn unstall(&self, command: &Unstall) -> ApiResult<Unstalled> {
        let entry = self.image(&command.image)?;
        let missing = entry.disk.missing_count() * BLOCK_SIZE;
        let waiting = entry.disk.waiting_ranges().len() as u64;
        if command.fail {
            entry.disk.fail_parked();
        } else if self.is_owned(&entry) {
            entry.disk.unpark();
        } else {
            let what = format!("cannot let the guest of image '{}' go on", command.image);
            let why = "this host does not own it, or nobody knows yet whether it does";
            return Err(ApiError::new(ErrorKind::Conflict, what, why)
                .hint("see `dray status`; if the other host is gone for good, see `dray claim`"));
        }
        Ok(Unstalled {
            image: command.image.clone(),
            failed: command.fail,
            waiting,
            bytes_missing: ByteSize(missing),
        })
    }
}
