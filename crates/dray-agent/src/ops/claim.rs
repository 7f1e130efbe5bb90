//! `dray claim` and `unstall`: what an operator may do when the other host is gone. A claim stands
//! outside the rule of one owner, so it demands the operator's word.
//!
//! It needs the image's record and the folder of its migration, and no loop. In this order: the loop
//! ends, if there is one, and the migration is void, durably; what is gone becomes zeros, durably; the
//! record says that the image is claimed; its file gets its name. Before that record a restart finds it
//! closed and not claimed, after it claimed.

use super::images::random_id;
use super::io_error;
use crate::agent::Agent;
use crate::api::{
    ApiError, ApiResult, ByteRange, Claim, Claimed, ErrorKind, MigrationState, Unstall, Unstalled,
};
use crate::migration::log::Folder;
use crate::migration::present::PresentFile;
use crate::migration::slots::Board;
use crate::migration::standing::{self, Part, Standing};
use crate::migration::{Voided, abort, source, target};
use crate::registry::{CopyState, Entry, ImageRecord, Place};
use dray_image::{Fetcher, Fill, Image};
use dray_types::{
    BLOCK_SIZE, BlockRange, BlockSet, ByteSize, Epoch, ImageId, MAX_RUN_BLOCKS, MigrationId,
};
use rustix::fs::{OFlags, fcntl_getfl};
use std::io;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// Lost ranges that an answer lists at most.
const MAX_LISTED: usize = 1000;
/// Longest wait for the end of a migration's loop.
const LOOP_TIMEOUT: Duration = Duration::from_secs(30);

/// What is claimed.
enum Case {
    /// What this host had before the handover.
    Replica,
    /// An image that this host was to serve: it does not know what became of that.
    Promised(Part),
    /// An image that this host serves without having all of it.
    Owned(Part),
    /// A complete image of this host's, which is closed because its migration cannot be brought back.
    Kept,
}

/// Nobody can be asked for blocks any more.
struct Nobody;

impl Fetcher for Nobody {
    // Who waits is woken when the claim has filled the block.
    fn demand(&self, _range: BlockRange) {}

    fn peek(&self, _offset: u64, _buf: &mut [u8]) -> dray_image::Result<()> {
        let (what, why) = ("reading from the source", "the image is being claimed");
        Err(dray_image::Error::new(dray_image::ErrorKind::Unavailable, what, why))
    }
}

impl Agent {
    pub(super) fn claim(&self, command: &Claim) -> ApiResult<Claimed> {
        let what = format!("cannot claim image '{}'", command.image);
        if !command.source_is_fenced {
            let why = "two hosts would own it if the other one still runs";
            return Err(ApiError::new(ErrorKind::DataAtRisk, what, why)
                .hint("make sure the other host cannot write, then add --source-is-fenced"));
        }
        // One claim at a time, and nobody removes a replica or takes it for a migration meanwhile.
        let _taking = self.registry.taking.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = self.image(&command.image)?;
        let record = entry.record();
        let case = self.check_claim(&what, &entry, command.accept_loss)?;
        let served = self.is_served(&entry);
        let Ended { others, epoch } = self.end_migration(&what, &record)?;
        let claimed = self.take(&entry, &case, served, epoch);
        let (id, lost) = claimed.map_err(|why| self.half_way(&what, &entry, &why))?;
        if let Some(migration) = record.migration {
            self.forget_void(migration);
        }
        let epoch = entry.record().epoch;
        tracing::warn!(image = command.image, epoch = epoch.0, %id, "claimed");
        Ok(Claimed {
            image: command.image.clone(),
            epoch,
            id,
            writes_may_be_lost: matches!(case, Case::Replica | Case::Promised(_)),
            bytes_lost: lost.len() * BLOCK_SIZE,
            lost: listed(&lost),
            others,
        })
    }

    /// What a claim of the image would be, if it can be: what stands against it is found out before
    /// anything has changed.
    fn check_claim(&self, what: &str, entry: &Entry, accept_loss: bool) -> ApiResult<Case> {
        let record = entry.record();
        let case = self.case_of(what, &record)?;
        if !accept_loss {
            let lost = self.lost(entry, &case).map_err(|why| io_error(what, why))?;
            refuse_loss(what, &case, lost.len() * BLOCK_SIZE)?;
        }
        self.registry.check_name(&record).map_err(|why| io_error(what, why))?;
        // Room for the record that will decide.
        self.registry.update(entry, |_| {}).map_err(|why| io_error(what, why))?;
        Ok(case)
    }

    /// How an image stands in its migration, if it is in one that is known.
    fn standing_of(&self, record: &ImageRecord) -> io::Result<Option<Standing>> {
        let Some(migration) = record.migration else { return Ok(None) };
        standing::look(&Folder::of(&self.store, migration), record)
    }

    /// What a claim of the image would be, or why there can be none.
    fn case_of(&self, what: &str, record: &ImageRecord) -> ApiResult<Case> {
        let refuse =
            |why: &str, hint: &str| Err(ApiError::new(ErrorKind::Conflict, what, why).hint(hint));
        let owned = || refuse("this host owns it already", "`dray images` shows what it has");
        if record.outlives_migration() {
            return owned();
        }
        let standing = match self.standing_of(record) {
            Ok(standing) => standing,
            // The file is whole, whoever has it: what the folder would say is who.
            Err(_) if record.place != Place::Partial && record.state != CopyState::Incoming => {
                return Ok(Case::Replica);
            }
            Err(why) => {
                let why = format!("what its migration wrote down cannot be read: {why}");
                return refuse(&why, "bring the folder back, or restore a backup");
            }
        };
        match (standing, record.state) {
            (Some(Standing::HandedOver), _) | (Some(Standing::Kept) | None, CopyState::Replica) => {
                Ok(Case::Replica)
            }
            (Some(Standing::Promised(part)), _) => Ok(Case::Promised(part)),
            (Some(Standing::Owned(part)), _) => Ok(Case::Owned(part)),
            // Only its name is missing, which its loop would have given it.
            (Some(Standing::Complete(part)), _) if record.place == Place::Partial => {
                Ok(Case::Owned(part))
            }
            (Some(Standing::Incoming), _) | (None, CopyState::Incoming) => refuse(
                "this copy never was the owner's and is not complete",
                "claim it at the source, or restore a backup",
            ),
            (Some(Standing::Gone), _) => {
                refuse("this host has given it back", "claim it at the source")
            }
            (None, CopyState::Owner) if record.place == Place::Partial => refuse(
                "the folder of its migration is gone, and with it what is known of its blocks",
                "bring the folder back, or restore a backup",
            ),
            (Some(Standing::Kept), _) | (None, CopyState::Owner) if self.is_closed(record) => {
                Ok(Case::Kept)
            }
            (Some(Standing::Kept | Standing::Complete(_)), _) | (None, CopyState::Owner) => owned(),
        }
    }

    fn is_closed(&self, record: &ImageRecord) -> bool {
        self.registry.closed(&record.name).is_some()
    }

    /// Blocks that only the other host has.
    fn lost(&self, entry: &Entry, case: &Case) -> io::Result<BlockSet> {
        let part = match case {
            Case::Replica | Case::Kept => return Ok(BlockSet::new()),
            Case::Promised(part) | Case::Owned(part) => part,
        };
        let record = entry.record();
        if self.is_served(entry) {
            return Ok(entry.disk.missing_snapshot());
        }
        Ok(missing_of(&record, part, &*self.present(&record, part)?))
    }

    /// Whether the disk of an image of which blocks are missing knows which.
    fn is_served(&self, entry: &Entry) -> bool {
        let slot = entry.record().migration.and_then(|migration| self.targets.get(migration));
        slot.is_some_and(|slot| slot.is_exposed()) || entry.disk.missing_count() > 0
    }

    /// What is known to be present of an image, when no disk writes to that.
    fn present(&self, record: &ImageRecord, part: &Part) -> io::Result<Arc<PresentFile>> {
        let migration = record.migration.ok_or(io::ErrorKind::NotFound)?;
        let folder = Folder::of(&self.store, migration);
        let blocks = BlockRange::whole(record.len).len;
        PresentFile::open(&folder.file(&target::present_name(part.index)), blocks)
    }

    /// What a void migration has left goes, when nobody can need it.
    fn forget_void(&self, migration: MigrationId) {
        abort::step("Claim-Forget");
        let removed = self.registry.remove_void(&Folder::of(&self.store, migration));
        if let Err(why) = removed {
            tracing::warn!(%migration, %why, "cannot remove a migration's folder");
        }
    }

    /// Ends the migration of the image for good.
    fn end_migration(&self, what: &str, record: &ImageRecord) -> ApiResult<Ended> {
        let Some(migration) = record.migration else { return Ok(Ended::default()) };
        let epoch = match self.end_loop(what, migration)? {
            Some(epoch) => epoch,
            None => {
                abort::step("Claim-Void");
                let folder = Folder::of(&self.store, migration);
                folder.set_void().map_err(|why| io_error(what, why))?;
                Epoch(0)
            }
        };
        abort::step("Claim-Close");
        let mut others = Vec::new();
        for other in self.registry.all() {
            let theirs = other.record();
            if theirs.migration != Some(migration) || theirs.name == record.name {
                continue;
            }
            if !theirs.outlives_migration() {
                self.registry.close_void(&other);
                others.push(theirs.name);
            } else if let Err(why) = self.registry.update(&other, |record| record.migration = None)
            {
                tracing::warn!(image = theirs.name, %why, "a restart lets go of a base image");
            }
        }
        Ok(Ended { others, epoch })
    }

    /// Ends the migration's loop, which makes the migration void as the last thing that it does; tells
    /// the epoch that it knew, or nothing when there was none any more.
    fn end_loop(&self, what: &str, migration: MigrationId) -> ApiResult<Option<Epoch>> {
        let (answer, answered) = channel();
        let Some(board) = self.say_void(migration, answer) else { return Ok(None) };
        let epoch = match answered.recv_timeout(LOOP_TIMEOUT) {
            Ok(Ok(epoch)) => epoch,
            Ok(Err(why)) => return Err(io_error(what, why)),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => {
                let why = "its migration does not end";
                return Err(ApiError::new(ErrorKind::Conflict, what, why)
                    .hint("claim it again; if that does not help, restart the agent first"));
            }
        };
        let (ended, why) = ("the migration is void", "an image of it was claimed");
        let error = ApiError::new(ErrorKind::Cancelled, ended, why)
            .hint("its other images are closed until they are claimed as well: see `dray images`");
        board.change(|shown| {
            shown.state = MigrationState::Failed;
            shown.error = Some(error);
        });
        self.sources.remove(migration);
        self.targets.remove(migration);
        Ok(Some(epoch))
    }

    /// Tells the loop of a migration that it is void, if there is one.
    fn say_void(&self, migration: MigrationId, answer: Voided) -> Option<Arc<Board>> {
        if let Some(slot) = self.sources.get(migration) {
            slot.inputs.send(source::Input::Void(answer)).ok()?;
            return Some(Arc::clone(&slot.board));
        }
        let slot = self.targets.get(migration)?;
        slot.inputs.send(target::Input::Void(answer)).ok()?;
        Some(Arc::clone(&slot.board))
    }

    /// Makes the image this host's. `served`: its disk knows what is missing; `epoch`: the highest that
    /// its migration's loop knew.
    fn take(
        &self,
        entry: &Arc<Entry>,
        case: &Case,
        served: bool,
        epoch: Epoch,
    ) -> io::Result<(ImageId, BlockSet)> {
        let (lost, agreed) = match case {
            Case::Replica | Case::Kept => (BlockSet::new(), Epoch(0)),
            Case::Promised(part) | Case::Owned(part) => {
                (self.fill_lost(entry, part, served)?, part.epoch)
            }
        };
        let id = ImageId(random_id().map_err(|why| io::Error::other(why.to_string()))?);
        // Above any that the other host can have, which was at most one handover ahead. What it may
        // still have is another line of descent: no replica of that is ever taken for one of this.
        let epoch = entry.record().epoch.max(agreed).max(epoch).next().next();
        self.registry.end_line(entry)?;
        self.registry.claim(entry, id, epoch)?;
        abort::step("Claim-Open");
        entry.disk.stop_tracking();
        let writes = |flags: OFlags| flags.intersects(OFlags::RDWR | OFlags::WRONLY);
        if !writes(fcntl_getfl(entry.file.file())?) && !entry.record().read_only {
            // It was open for reading only; from here on it is written.
            self.registry.reopen(entry)?.take_locks();
        } else {
            entry.take_locks();
            entry.disk.unpark();
        }
        self.registry.vouch(&entry.record().name);
        Ok((id, lost))
    }

    /// What is gone becomes zeros, durably. Returns what that was.
    fn fill_lost(&self, entry: &Entry, part: &Part, served: bool) -> io::Result<BlockSet> {
        if !served {
            self.serve_parked(entry, part)?;
        }
        abort::step("Claim-Fill");
        let lost = entry.disk.missing_snapshot();
        for run in lost.runs_up_to(MAX_RUN_BLOCKS) {
            entry.disk.fill(run, Fill::Zero).map_err(io::Error::other)?;
        }
        entry.disk.checkpoint().map_err(io::Error::other)?;
        Ok(lost)
    }

    /// Tells the disk what is missing, while nothing passes: no loop has done so.
    fn serve_parked(&self, entry: &Entry, part: &Part) -> io::Result<()> {
        entry.disk.shut();
        let record = entry.record();
        let present = self.present(&record, part)?;
        // Once a guest has had it, it may have grown, whatever the record says.
        if !present.has_begun() && record.in_place.is_none() {
            entry.file.set_len(part.handover.len).map_err(io::Error::other)?;
            entry.file.sync().map_err(io::Error::other)?;
        }
        present.begin()?;
        let (missing, noted) = (missing_of(&record, part, &present), present.noted());
        entry.disk.serve_with_missing(missing, &noted, Arc::new(Nobody), present);
        Ok(())
    }

    /// A claim that failed once the migration was void: the image is closed until it is claimed again.
    fn half_way(&self, what: &str, entry: &Entry, why: &io::Error) -> ApiError {
        if self.registry.is_void(&entry.record()) {
            self.registry.close_void(entry);
        }
        let error = io_error(what, why);
        let hint = error.hint.clone().map_or_else(String::new, |hint| format!("{hint}; "));
        error.hint(format!("{hint}the image is closed until it is claimed: claim it again"))
    }
}

/// What the claim of an image did to its migration.
#[derive(Default)]
struct Ended {
    /// Images that wait for claims of their own.
    others: Vec<String>,
    /// The epoch that the migration's loop knew.
    epoch: Epoch,
}

/// Blocks that an image at its target does not have.
fn missing_of(record: &ImageRecord, part: &Part, present: &PresentFile) -> BlockSet {
    // A file that was here before has everything.
    if record.in_place.is_some() {
        return BlockSet::new();
    }
    let mut missing = part.handover.missing.clone();
    missing.subtract(&present.all());
    missing
}

/// Says what would be lost, where something would be.
fn refuse_loss(what: &str, case: &Case, bytes: u64) -> ApiResult<()> {
    let zeros = "add --accept-loss: these parts become zeros";
    let (why, hint) = match case {
        Case::Replica => (
            "everything written since the handover is on the other host".to_owned(),
            "bring that host back, or add --accept-loss".to_owned(),
        ),
        Case::Promised(_) => {
            let why = "this host has given its promise to serve it and has not heard more: what was \
                       written since is on the other host";
            let parts = match bytes {
                0 => String::new(),
                bytes => format!(", and so are {} that are missing here", ByteSize(bytes)),
            };
            let hint = match bytes {
                0 => "bring that host back, or add --accept-loss".to_owned(),
                _ => format!("bring that host back, or {zeros}"),
            };
            (format!("{why}{parts}"), hint)
        }
        Case::Kept => return Ok(()),
        Case::Owned(_) if bytes == 0 => return Ok(()),
        Case::Owned(_) => {
            let why = format!("{} of it are only on the source", ByteSize(bytes));
            (why, format!("bring the source back, or {zeros}"))
        }
    };
    Err(ApiError::new(ErrorKind::DataAtRisk, what, why).hint(hint))
}

fn listed(lost: &BlockSet) -> Vec<ByteRange> {
    let range = |run: BlockRange| ByteRange { start: run.byte_offset(), len: run.byte_len() };
    lost.runs().take(MAX_LISTED).map(range).collect()
}

impl Agent {
    /// Whether guests may be served from it. While a migration of it is open its loop knows that, and
    /// the record follows; one without a loop vouches for nothing.
    fn is_owned(&self, entry: &Entry) -> bool {
        let record = entry.record();
        let vouched = record.migration.is_none_or(|migration| match self.sources.get(migration) {
            Some(source) => source.owns(),
            None => self.targets.get(migration).is_some_and(|slot| slot.is_exposed()),
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
