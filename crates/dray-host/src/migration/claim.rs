//! Claiming an image: making it this host's without asking the other one, which is gone. It stands outside
//! the rule of one owner, so it demands the operator's word.
//!
//! It needs the image's record and the folder of its migration, and no loop. In this order: the loop
//! ends, if there is one, and the migration is void, durably (a loop may take its time, and may want the lock that
//! a claim holds: that is taken after it, and the image looked at again); what is gone is noted and becomes zeros,
//! durably; the record says that the image is claimed; its file gets its name. Before that record a
//! restart finds it closed and not claimed, after it claimed.

use super::case::{self, Case, NoCase, OWNED};
use crate::abort;
use crate::folder::intent::{TargetIntent, written_by_guest};
use crate::folder::log::{Folder, TARGET_INTENT, present_name};
use crate::folder::lost;
use crate::folder::present::PresentFile;
use crate::folder::standing::{self, Part, Standing};
use crate::lineage::random_id;
use crate::record::{CopyState, ImageRecord, Lost, NameKind};
use crate::registry::{Entry, Process, Registry};
use crate::store::Store;
use dray_image::{Fetcher, Fill};
use dray_types::{
    BLOCK_SIZE, BlockRange, BlockSet, ByteSize, Epoch, ImageId, MAX_RUN_BLOCKS, MigrationId,
};
use std::io;
use std::sync::Arc;

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

/// What came of a claim.
pub struct Claimed {
    /// The epoch in which this host owns the image.
    pub epoch: Epoch,
    /// The image's new id.
    pub id: ImageId,
    /// The other host may have writes of its guest that nobody knows of here.
    pub writes_may_be_lost: bool,
    /// What has become zeros.
    pub lost: Lost,
    /// Images of the same migration that wait for claims of their own.
    pub others: Vec<String>,
}

/// Why an image is not claimed. Unless it says otherwise nothing has changed.
#[derive(Debug)]
pub enum ClaimError<E> {
    /// It can not be claimed, or not here.
    Refused {
        /// The reason.
        why: String,
        /// What to do instead.
        hint: String,
    },
    /// It would lose what nobody has said may be lost.
    DataAtRisk {
        /// What that is.
        why: String,
        /// What to do about it.
        hint: String,
    },
    /// Its migration goes on: why that did not end.
    GoesOn(E),
    /// What has to be looked at, or durable, cannot be.
    Io(io::Error),
    /// Its migration is void by now, and the image closed until it is claimed again.
    HalfWay(io::Error),
}

impl<E> From<NoCase> for ClaimError<E> {
    fn from(NoCase { why, hint }: NoCase) -> Self {
        Self::Refused { why: why.to_owned(), hint: hint.to_owned() }
    }
}

impl<E> From<io::Error> for ClaimError<E> {
    fn from(why: io::Error) -> Self {
        Self::Io(why)
    }
}

/// The loops of an agent, as far as claims have to do with them.
pub trait Loops {
    /// Why a loop did not end.
    type Error;

    /// Whether the images of a migration to here are served, each with what is missing of it.
    fn is_exposed(&self, migration: MigrationId) -> bool;

    /// Ends the migration's loop, which makes the migration void as the last thing that it does; tells
    /// the epoch that it knew, or nothing when there is no loop.
    ///
    /// # Errors
    /// Why it goes on.
    fn end(&self, migration: MigrationId) -> Result<Option<Epoch>, Self::Error>;

    /// Breaks the connections of a process to all images. It may come again, and gets what is there for it then.
    fn cut_off(&self, process: Process);
}

/// Claims the images of a host.
pub struct Claims<'a, L> {
    /// The state directory.
    pub store: &'a Store,
    /// The images of this host.
    pub registry: &'a Arc<Registry>,
    /// The loops of their migrations.
    pub loops: &'a L,
}

impl<L: Loops> Claims<'_, L> {
    /// Makes an image this host's.
    ///
    /// # Errors
    /// What stands against it: then nothing has changed. Once its migration is void the image is closed
    /// until it is claimed again.
    pub fn claim(
        &self,
        entry: &Arc<Entry>,
        accept_loss: bool,
    ) -> Result<Claimed, ClaimError<L::Error>> {
        if let Some(claimed) = self.claimed_before(&entry.record()) {
            return Ok(claimed);
        }
        self.check_claim(entry, accept_loss)?;
        let (record, served) = (entry.record(), self.is_served(entry));
        let stopped = self.end_loop(&record)?;
        // One claim at a time, and nobody removes a replica or takes it for a migration meanwhile.
        let _taking = self.registry.taking.lock();
        if let Some(claimed) = self.claimed_before(&entry.record()) {
            return Ok(claimed);
        }
        let case = match self.look_again(entry, accept_loss) {
            Err(why) if stopped.epoch.is_some() => return Err(self.ended_in_vain(entry, why)),
            looked => looked?,
        };
        let Ended { others, epoch } = self.end_migration(&record, stopped)?;
        if let Some(migration) = record.migration {
            if matches!(case, Case::Promised(_)) {
                self.note_waiting_qemu(migration);
            }
            // The VM's QEMU has its guest as it was at the handover, and so is the image.
            self.registry.vm_may_go_on(migration);
        }
        let claimed = self.take(entry, &case, served, epoch);
        let (id, lost) = claimed.map_err(|why| self.half_way(entry, why))?;
        if let Some(migration) = record.migration {
            self.forget_void(migration);
        }
        let epoch = entry.record().epoch;
        tracing::warn!(image = record.name, epoch = epoch.0, %id, "claimed");
        let writes_may_be_lost = case.may_lose_writes();
        Ok(Claimed { epoch, id, writes_may_be_lost, lost, others })
    }

    /// The QEMU that waits here for the VM may have all of its memory, and the VM may be started anew in another one.
    fn note_waiting_qemu(&self, migration: MigrationId) {
        let folder = Folder::of(self.store, migration);
        let intent = folder.intent_file(TARGET_INTENT).and_then(|at| at.peek::<TargetIntent>());
        if let Ok(TargetIntent { qemu: Some(qemu), images, .. }) = intent {
            self.registry.vm_leaves(migration, &written_by_guest(&images), &qemu);
        }
    }

    /// What was told of the claim by which this host has owned the image since: who asked may not have heard it.
    fn claimed_before(&self, record: &ImageRecord) -> Option<Claimed> {
        let claim = record.claim.clone().filter(|claim| claim.epoch == record.epoch)?;
        if record.state != CopyState::Owner || record.migration.is_some() {
            return None;
        }
        let is_void = |record: &ImageRecord| self.registry.is_void(record).unwrap_or(true);
        let others = self.registry.all().into_iter().map(|other| other.record());
        let others =
            others.filter(|other| other.migration.is_some() && other.migration == claim.migration);
        Some(Claimed {
            epoch: record.epoch,
            id: record.id,
            writes_may_be_lost: claim.writes_may_be_lost,
            lost: claim.lost,
            others: others.filter(is_void).map(|other| other.name).collect(),
        })
    }

    /// What a claim of the image would be, if it can be: what stands against it is found out before
    /// anything has changed.
    fn check_claim(&self, entry: &Entry, accept_loss: bool) -> Result<(), ClaimError<L::Error>> {
        let case = self.acceptable_case(entry, accept_loss)?;
        let record = entry.record();
        self.registry.check_name(&record)?;
        // Room for the record that will decide, and for what it makes zeros of.
        self.registry.update(entry, |_| {})?;
        if let (Some(part), Some(migration)) = (case.part(), record.migration) {
            let folder = Folder::of(self.store, migration);
            lost::make_room(&folder, part.index)?;
        }
        Ok(())
    }

    /// What a claim of the image would be, unless it loses what may not be lost.
    fn acceptable_case(
        &self,
        entry: &Entry,
        accept_loss: bool,
    ) -> Result<Case, ClaimError<L::Error>> {
        let case = self.case_of(&entry.record())?;
        if !accept_loss {
            refuse_loss(&case, self.lost(entry, &case)?.len() * BLOCK_SIZE)?;
        }
        Ok(case)
    }

    /// The same once nobody else can take the image: until its loop had ended, or somebody else had done with it, it
    /// may have become another case.
    fn look_again(&self, entry: &Entry, accept_loss: bool) -> Result<Case, ClaimError<L::Error>> {
        if !self.registry.is_current(entry) {
            let why = "another command has removed or used it meanwhile".to_owned();
            let hint = "`dray images` shows the images of this host".to_owned();
            return Err(ClaimError::Refused { why, hint });
        }
        self.acceptable_case(entry, accept_loss)
    }

    /// A claim that is refused although the migration's loop has ended for it: what that leaves void is closed.
    fn ended_in_vain(&self, entry: &Entry, why: ClaimError<L::Error>) -> ClaimError<L::Error> {
        self.registry.close_voids();
        if !self.registry.is_void(&entry.record()).unwrap_or(true) {
            return why;
        }
        match why {
            ClaimError::Refused { why, hint } | ClaimError::DataAtRisk { why, hint } => {
                self.half_way(entry, io::Error::other(format!("{why}; {hint}")))
            }
            ClaimError::Io(why) | ClaimError::HalfWay(why) => self.half_way(entry, why),
            ClaimError::GoesOn(why) => ClaimError::GoesOn(why),
        }
    }

    /// How an image stands in its migration, if it is in one that is known.
    fn standing_of(&self, record: &ImageRecord) -> io::Result<Option<Standing>> {
        let Some(migration) = record.migration else { return Ok(None) };
        standing::look(&Folder::of(self.store, migration), record)
    }

    /// What a claim of the image would be, or why there can be none.
    fn case_of(&self, record: &ImageRecord) -> Result<Case, ClaimError<L::Error>> {
        if record.outlives_migration() {
            return Err(OWNED.into());
        }
        let standing = match self.standing_of(record) {
            Ok(standing) => standing,
            // The file is whole, whoever has it: what the folder would say is who.
            Err(_) if record.place != NameKind::Partial && record.state != CopyState::Incoming => {
                return Ok(Case::Replica);
            }
            Err(why) => {
                let why = format!("the records of its migration cannot be read: {why}");
                let hint = "put the migration's folder back, or restore a backup".to_owned();
                return Err(ClaimError::Refused { why, hint });
            }
        };
        if let Some((why, hint)) = self.lost_intent(record, standing.as_ref())? {
            return Err(ClaimError::Refused { why, hint });
        }
        Ok(case::decide(standing, record, self.is_closed(record))?)
    }

    /// That the intent of an image's migration to here is not there, where the image cannot be told without it from
    /// what is still to come, and what to do.
    fn lost_intent(
        &self,
        record: &ImageRecord,
        standing: Option<&Standing>,
    ) -> io::Result<Option<(String, String)>> {
        let whole = record.place != NameKind::Partial && record.state != CopyState::Incoming;
        let Some(migration) = record.migration.filter(|_| standing.is_none() && !whole) else {
            return Ok(None);
        };
        let folder = Folder::of(self.store, migration);
        if !folder.lacks_intent()? {
            return Ok(None);
        }
        let why = "the intent of its migration is missing, which says which blocks this host has";
        let intent = folder.file(TARGET_INTENT);
        let hint = format!(
            "put {} back; if it is lost: claim the image at its source, or restore a backup",
            intent.display()
        );
        Ok(Some((why.to_owned(), hint)))
    }

    fn is_closed(&self, record: &ImageRecord) -> bool {
        self.registry.closed(&record.name).is_some()
    }

    /// Blocks that only the other host has; zeros may be there, if a claim before this one has come to no
    /// end.
    fn lost(&self, entry: &Entry, case: &Case) -> io::Result<BlockSet> {
        let Some(part) = case.part() else { return Ok(BlockSet::new()) };
        let record = entry.record();
        let mut lost = match self.is_served(entry) {
            true => without_doubtful(entry.disk.missing_snapshot(), part),
            false => missing_of(&record, part, &*self.present(&record, part)?),
        };
        lost.union_with(&self.noted_lost(&record, part)?);
        Ok(lost)
    }

    /// What a claim of the image that came to no end has found lost.
    fn noted_lost(&self, record: &ImageRecord, part: &Part) -> io::Result<BlockSet> {
        let folder = self.folder(record)?;
        Ok(lost::noted(&folder, part.index)?.intersection(BlockRange::whole(record.len)))
    }

    /// The folder of the migration that an image takes part in.
    fn folder(&self, record: &ImageRecord) -> io::Result<Folder> {
        let migration = record.migration.ok_or(io::ErrorKind::NotFound)?;
        Ok(Folder::of(self.store, migration))
    }

    /// Whether the disk of an image of which blocks are missing knows which.
    fn is_served(&self, entry: &Entry) -> bool {
        let exposed = |migration| self.loops.is_exposed(migration);
        // One that was handed back waits for its source again.
        entry.record().migration.is_some_and(exposed) || entry.disk.serves_with_missing()
    }

    /// What is known to be present of an image, when no disk writes to that.
    fn present(&self, record: &ImageRecord, part: &Part) -> io::Result<Arc<PresentFile>> {
        let folder = self.folder(record)?;
        let blocks = BlockRange::whole(record.len).len;
        let path = folder.file(&present_name(part.index));
        let present = PresentFile::open(&path, &record.path, blocks)?;
        if record.state == CopyState::Owner && !present.has_begun() {
            let why = format!("{}: the record of the blocks on this host is lost", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        Ok(present)
    }

    /// What a void migration has left goes, when nobody can need it.
    fn forget_void(&self, migration: MigrationId) {
        abort::step("Claim-Forget");
        let removed = self.registry.remove_void(&Folder::of(self.store, migration));
        if let Err(why) = removed {
            tracing::warn!(%migration, %why, "cannot remove a migration's folder");
        }
    }

    /// Ends the loop of the image's migration, if there is one. Who calls holds no lock that a loop may wait for.
    fn end_loop(&self, record: &ImageRecord) -> Result<Stopped, ClaimError<L::Error>> {
        let Some(migration) = record.migration else { return Ok(Stopped::default()) };
        let exposed = self.loops.is_exposed(migration);
        let epoch = self.loops.end(migration).map_err(ClaimError::GoesOn)?;
        Ok(Stopped { exposed, epoch })
    }

    /// Ends the migration of the image for good.
    fn end_migration(
        &self,
        record: &ImageRecord,
        stopped: Stopped,
    ) -> Result<Ended, ClaimError<L::Error>> {
        let Some(migration) = record.migration else { return Ok(Ended::default()) };
        let epoch = match stopped.epoch {
            Some(epoch) => epoch,
            None => {
                abort::step("Claim-Void");
                let folder = Folder::of(self.store, migration);
                folder.set_void()?;
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
                if !self.registry.keep_whole(&other, stopped.exposed) {
                    self.registry.close_void(&other);
                    others.push(theirs.name);
                }
            } else if let Err(why) = self.registry.update(&other, |record| record.migration = None)
            {
                tracing::warn!(image = theirs.name, %why,
                    "cannot forget a base image; the next start does it");
            }
        }
        Ok(Ended { others, epoch })
    }

    /// Makes the image this host's. `served`: its disk knows what is missing; `epoch`: the highest that
    /// its migration's loop knew.
    fn take(
        &self,
        entry: &Arc<Entry>,
        case: &Case,
        served: bool,
        epoch: Epoch,
    ) -> io::Result<(ImageId, Lost)> {
        let (lost, agreed) = match case.part() {
            None => (BlockSet::new(), Epoch(0)),
            Some(part) => (self.fill_lost(entry, part, served)?, part.epoch),
        };
        let id = ImageId(random_id()?);
        // Above any that the other host can have, which was at most one handover ahead. What it may
        // still have is another line of descent: no replica of that is ever taken for one of this.
        let epoch = entry.record().epoch.max(agreed).max(epoch).next().next();
        self.registry.end_line(entry)?;
        let lost = Lost::of(&lost);
        self.registry.claim(entry, (id, epoch), case.may_lose_writes(), lost.clone())?;
        abort::step("Claim-Open");
        entry.disk.stop_tracking();
        // They were let in to what another host had.
        let past = self.registry.past_clients(&entry.record().name);
        past.into_iter().for_each(|process| self.loops.cut_off(process));
        // Its migration may have waited for the guest's start.
        entry.disk.start_changes();
        if entry.file.geometry().read_only && !entry.record().read_only {
            // It was open for reading only; from here on it is written.
            self.registry.reopen(entry)?;
        } else {
            self.registry.hold(entry);
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
        let record = entry.record();
        self.keep_doubtful(entry, part)?;
        let missing = entry.disk.missing_snapshot();
        lost::note(&self.folder(&record)?, part.index, &missing)?;
        let lost = self.noted_lost(&record, part)?;
        if !lost.is_empty() {
            let bytes = lost.len() * BLOCK_SIZE;
            tracing::warn!(image = record.name, bytes, "its lost blocks become zeros");
        }
        abort::step("Claim-Zero");
        for run in missing.runs_up_to(MAX_RUN_BLOCKS) {
            entry.disk.fill(run, Fill::Zero).map_err(io::Error::other)?;
        }
        entry.disk.checkpoint().map_err(io::Error::other)?;
        Ok(lost)
    }

    /// What had been received and was not fetched again is still the best that there is.
    fn keep_doubtful(&self, entry: &Entry, part: &Part) -> io::Result<()> {
        let mut doubtful = entry.disk.missing_snapshot();
        doubtful.subtract(&without_doubtful(doubtful.clone(), part));
        let len = entry.file.geometry().len;
        for run in doubtful.runs_up_to(MAX_RUN_BLOCKS) {
            let mut bytes = vec![0; run.byte_len() as usize];
            let inside = run.byte_len().min(len.saturating_sub(run.byte_offset())) as usize;
            entry
                .file
                .read_at(&mut bytes[..inside], run.byte_offset())
                .map_err(io::Error::other)?;
            entry.disk.fill(run, Fill::Data(&bytes)).map_err(io::Error::other)?;
        }
        Ok(())
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
    fn half_way(&self, entry: &Entry, why: io::Error) -> ClaimError<L::Error> {
        if self.registry.is_void(&entry.record()).unwrap_or(true) {
            self.registry.close_void(entry);
        }
        ClaimError::HalfWay(why)
    }
}

/// What became of a migration's loop.
#[derive(Clone, Copy, Default)]
struct Stopped {
    /// The images were served, each with what is missing of it.
    exposed: bool,
    /// The epoch that it knew; none when there was no loop, and the migration is not void yet.
    epoch: Option<Epoch>,
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

/// Those of these missing blocks that were missing at the handover: the others were received, and are only doubted.
fn without_doubtful(missing: BlockSet, part: &Part) -> BlockSet {
    let mut doubtful = missing.clone();
    doubtful.subtract(&part.handover.missing);
    let mut never = missing;
    never.subtract(&doubtful);
    never
}

/// Says what would be lost, where something would be.
fn refuse_loss<E>(case: &Case, bytes: u64) -> Result<(), ClaimError<E>> {
    let zeros = "add --accept-loss: these parts become zeros";
    let (why, hint) = match case {
        Case::Replica => (
            "all writes since the handover are on the other host".to_owned(),
            "start that host again, or add --accept-loss".to_owned(),
        ),
        Case::Promised(part) | Case::HandedBack(part) => {
            let doubt = match part.distrusted {
                false => "",
                true => "another program has changed its file, nobody knows where; and ",
            };
            let done = match case {
                Case::HandedBack(_) => "has handed it back",
                _ => "has promised to serve it and has not heard more",
            };
            let why = format!("{doubt}this host {done}: all writes since are on the other host");
            let parts = match bytes {
                0 => String::new(),
                bytes => format!(", and so are {} that this host does not have", ByteSize(bytes)),
            };
            let hint = match bytes {
                0 => "start that host again, or add --accept-loss".to_owned(),
                _ => format!("start that host again, or {zeros}"),
            };
            (format!("{why}{parts}"), hint)
        }
        Case::Kept => return Ok(()),
        Case::Owned(part) if bytes == 0 && !part.distrusted => return Ok(()),
        Case::Owned(part) => {
            let only = format!("only the source has {} of it", ByteSize(bytes));
            let why = match part.distrusted {
                false => only,
                true => format!(
                    "another program had changed its file, which has not all come anew; {only}"
                ),
            };
            (why, format!("start the source again, or {zeros}"))
        }
    };
    Err(ClaimError::DataAtRisk { why, hint })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::intent::{Settings, TargetImageIntent};
    use crate::folder::log::{Log, TARGET_JOURNAL};
    use crate::process::QemuProcess;
    use crate::registry::surroundings::tests::Plain;
    use dray_engine::TargetRecord;
    use dray_image::Image;
    use dray_types::Attempt;
    use dray_wire::{ImageHandover, ImageOffer, MapHash};
    use std::path::Path;
    use std::time::Duration;

    const AWAY: MigrationId = MigrationId(5);

    /// The loop of a migration, which ends with something that needs the lock of those who take images.
    struct Ending<'a> {
        registry: &'a Registry,
        /// The image that goes by that.
        removes: Option<&'a Entry>,
    }

    impl Loops for Ending<'_> {
        type Error = &'static str;

        fn is_exposed(&self, _migration: MigrationId) -> bool {
            false
        }

        fn end(&self, migration: MigrationId) -> Result<Option<Epoch>, Self::Error> {
            let taking = self.registry.taking.try_lock_for(Duration::from_millis(200));
            drop(taking.ok_or("it waits for the claim that waits for it")?);
            if let Some(entry) = self.removes {
                self.registry.update(entry, |record| record.migration = None).unwrap();
                self.registry.remove_replica(entry).unwrap();
            }
            Folder::of(self.registry.store(), migration).set_void().unwrap();
            Ok(Some(Epoch(6)))
        }

        fn cut_off(&self, _process: Process) {}
    }

    /// An image that was handed over in a migration that is not over.
    fn handed_over(dir: &Path) -> (Arc<Registry>, Arc<Entry>) {
        let registry = Registry::load(Store::open(dir).unwrap(), Arc::new(Plain)).unwrap();
        let path = dir.join("disk");
        std::fs::write(&path, [7; 8192]).unwrap();
        let record = ImageRecord::owned("disk".into(), ImageId(7), path, 8192);
        let file = registry.open_file(&record).unwrap();
        let entry = registry.add(record, file).unwrap();
        registry.update(&entry, |record| record.migration = Some(AWAY)).unwrap();
        entry.disk.park(entry.disk.quiesce(Duration::ZERO).unwrap());
        registry.retire(&entry, Epoch(2), 0).unwrap();
        (registry, entry)
    }

    fn claim(
        registry: &Arc<Registry>,
        entry: &Arc<Entry>,
        removes: Option<&Entry>,
    ) -> Result<Claimed, ClaimError<&'static str>> {
        let loops = Ending { registry, removes };
        Claims { store: registry.store(), registry, loops: &loops }.claim(entry, true)
    }

    #[test]
    fn a_loop_that_ends_does_not_wait_for_the_claim() {
        let dir = tempfile::tempdir().unwrap();
        let (registry, entry) = handed_over(dir.path());
        let claimed = claim(&registry, &entry, None).unwrap_or_else(|why| panic!("{why:?}"));
        assert_eq!((claimed.epoch, entry.record().state), (Epoch(8), CopyState::Owner));
        assert!(dir.path().join("disk").exists() && entry.record().migration.is_none());
    }

    /// What the loop does last may be that it removes what is claimed.
    #[test]
    fn what_is_gone_when_its_loop_has_ended_is_not_claimed() {
        let dir = tempfile::tempdir().unwrap();
        let (registry, entry) = handed_over(dir.path());
        let refused = claim(&registry, &entry, Some(&entry));
        assert!(matches!(refused, Err(ClaimError::Refused { .. })));
        assert!(registry.get("disk").is_none() && !dir.path().join("disk").exists());
        let store = Store::open(dir.path()).unwrap();
        assert!(Registry::load(store, Arc::new(Plain)).unwrap().all_records().is_empty());
    }

    /// An image whose target has promised to serve it, and the QEMU that waits there.
    fn promised(dir: &Path, qemu: &QemuProcess) -> (Arc<Registry>, Arc<Entry>) {
        let registry = Registry::load(Store::open(dir).unwrap(), Arc::new(Plain)).unwrap();
        let offer = ImageOffer { id: ImageId(7), name: "disk".into(), len: 8192, read_only: false };
        let coming = ImageRecord::coming(&offer, dir.join("disk"), AWAY);
        let entry = registry.make_partial(coming).unwrap();
        entry.file.write_at(&[7; 8192], 0, true).unwrap();
        let image = TargetImageIntent {
            offer,
            path: dir.join("disk"),
            zeroed: true,
            replica: None,
            refused: None,
            in_place: None,
            qcow2: false,
        };
        let intent = TargetIntent {
            migration: AWAY,
            peer: "a".to_owned(),
            images: vec![image],
            settings: Settings::default(),
            guest: None,
            qemu: Some(qemu.clone()),
            started_unix_ms: 7,
        };
        let folder = Folder::create(registry.store(), AWAY).unwrap();
        folder.file(TARGET_INTENT).put(&intent).unwrap();
        let images = vec![ImageHandover { len: 8192, missing: BlockSet::new() }];
        let (attempt, map_hash, epoch) = (Attempt(1), MapHash::of(&images), Epoch(1));
        let promise = TargetRecord::Prepared { attempt, map_hash, images, epoch };
        let (mut journal, _) = Log::open(&folder.file(TARGET_JOURNAL)).unwrap();
        journal.append(&[TargetRecord::Touched, promise]).unwrap();
        (registry, entry)
    }

    /// The QEMU may have all of the VM's memory, and nobody has let its guest go on.
    #[test]
    fn of_the_qemu_that_waits_for_a_promised_image_and_a_new_one_only_the_first_changes_it() {
        for waiting_is_first in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let program = dir.path().join("qemu-system-x");
            std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
            let mut child = std::process::Command::new(program).arg("60").spawn().unwrap();
            let waiting = QemuProcess::find(Path::new("/qmp"), child.id() as i32).unwrap();
            let (registry, entry) = promised(dir.path(), &waiting);
            let claimed = claim(&registry, &entry, None).unwrap_or_else(|why| panic!("{why:?}"));
            assert!(claimed.writes_may_be_lost);
            let waiting = Process::itself(&waiting, &[]).unwrap();
            let (waiting, new) = (Some(waiting), Some(Process { pid: 1, started: 0 }));
            let [waiting, new] = [waiting, new].map(|one| registry.served_to(&entry, one));
            let (first, second) = if waiting_is_first { (waiting, new) } else { (new, waiting) };
            let change = |image: &dyn Image| image.write_at(&[8], 0, true);
            change(&*first).unwrap();
            change(&*second).unwrap_err();
            change(&*first).unwrap();
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Somebody has started the VM anew on the file while no agent ran, and has ended it again.
    #[test]
    fn a_qemu_does_not_go_on_with_a_claimed_image_that_was_changed_while_no_agent_ran() {
        for is_changed in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let program = dir.path().join("qemu-system-x");
            std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
            let mut child = std::process::Command::new(program).arg("60").spawn().unwrap();
            let waiting = QemuProcess::find(Path::new("/qmp"), child.id() as i32).unwrap();
            let (registry, entry) = promised(dir.path(), &waiting);
            claim(&registry, &entry, None).unwrap_or_else(|why| panic!("{why:?}"));
            drop((entry, registry));
            std::thread::sleep(Duration::from_millis(20));
            if is_changed {
                std::fs::write(dir.path().join("disk"), [9; 8192]).unwrap();
            }
            let process = Process::itself(&waiting, &[]).unwrap();
            for _ in 0..2 {
                let store = Store::open(dir.path()).unwrap();
                let registry = Registry::load(store, Arc::new(Plain)).unwrap();
                let record = registry.get("disk").unwrap().record();
                assert_eq!(registry.is_of_past_vm(process, &record), is_changed);
            }
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
