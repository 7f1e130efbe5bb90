//! The state of an image in its migration, read from the migration's folder: all that a claim must
//! know when it cannot ask a loop. Reading changes nothing, so it is safe while a loop runs.

use super::intent::{SourceIntent, TargetIntent};
use super::log::{Folder, SOURCE_INTENT, SOURCE_JOURNAL, TARGET_INTENT, TARGET_JOURNAL};
use crate::record::ImageRecord;
use dray_engine::{SourceRecord, TargetRecord};
use dray_files::StatePath;
use dray_image::journal;
use dray_types::Epoch;
use dray_wire::ImageHandover;
use serde::de::DeserializeOwned;
use std::io;

/// How an image stands in its migration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Standing {
    /// It is still this host's, which was to send it.
    Kept,
    /// This host has handed it over.
    HandedOver,
    /// It is on its way here, and nothing was promised.
    Incoming,
    /// This host has promised to serve it and has not heard what became of that.
    Promised(Part),
    /// This host serves it, and blocks of it may be missing.
    Owned(Part),
    /// This host has all of it.
    Complete(Part),
    /// This host has handed it back, as nobody had changed it here. Its source may not have heard of that.
    HandedBack(Part),
    /// This host has removed it, or was told to.
    Gone,
}

/// An image's part of what was agreed at the handover.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// Its place in the migration's order.
    pub index: usize,
    /// Its length, and what was missing.
    pub handover: ImageHandover,
    /// The epoch in which this host owns it, once it does; until then the one in which its source had it.
    pub epoch: Epoch,
    /// Another program may have changed what was received until then.
    pub distrusted: bool,
}

/// How the image of `record` stands in the migration of this folder; none when that does not know it.
///
/// # Errors
/// When the folder cannot be read.
pub(crate) fn look(folder: &Folder, record: &ImageRecord) -> io::Result<Option<Standing>> {
    let at = folder.intent_file(SOURCE_INTENT)?;
    if at.exists()? {
        let intent: SourceIntent = at.peek()?;
        let known = intent.images.iter().any(|image| image.name == record.name);
        let records = read(&folder.file(SOURCE_JOURNAL))?;
        return Ok(known.then(|| at_source(&records)));
    }
    let at = folder.intent_file(TARGET_INTENT)?;
    if !at.exists()? {
        // Of an image away its journal tells without the intent: all of them leave together.
        let journal = folder.file(SOURCE_JOURNAL);
        return if journal.exists()? { Ok(Some(at_source(&read(&journal)?))) } else { Ok(None) };
    }
    let intent: TargetIntent = at.peek()?;
    let index = intent.images.iter().position(|image| image.name_here() == record.name);
    let records = read(&folder.file(TARGET_JOURNAL))?;
    Ok(index.map(|index| at_target(&records, index)))
}

/// Whether a target with this journal has promised to serve its images, serves them and has not
/// everything yet, or has handed them back.
///
/// # Errors
/// When the journal cannot be read.
pub fn can_be_claimed(journal: &StatePath) -> io::Result<bool> {
    let standing = at_target(&read(journal)?, 0);
    Ok(matches!(standing, Standing::Promised(_) | Standing::Owned(_) | Standing::HandedBack(_)))
}

/// What a target that does not own its images has done with them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unserved {
    /// It has received some of them, and promised nothing.
    Received,
    /// It has promised to serve them.
    Promised,
    /// It has handed them back.
    HandedBack,
}

/// What a target with these records has done with its images; none once it owns them, or has removed them.
pub(crate) fn unserved(records: &[TargetRecord]) -> Option<Unserved> {
    match at_target(records, 0) {
        Standing::Incoming => Some(Unserved::Received),
        Standing::Promised(_) => Some(Unserved::Promised),
        Standing::HandedBack(_) => Some(Unserved::HandedBack),
        _ => None,
    }
}

/// Whether the target of the migration in this folder has promised nothing, and has not given its images up.
///
/// # Errors
/// When the journal cannot be read.
pub(crate) fn promised_nothing(folder: &Folder) -> io::Result<bool> {
    let records = read(&folder.file(TARGET_JOURNAL))?;
    Ok(unserved(&records) == Some(Unserved::Received))
}

/// Whether the target of the migration in this folder has everything.
///
/// # Errors
/// When the journal cannot be read.
pub(crate) fn has_everything(folder: &Folder) -> io::Result<bool> {
    let records = read(&folder.file(TARGET_JOURNAL))?;
    Ok(matches!(at_target(&records, 0), Standing::Complete(_)))
}

/// Whether this host has handed over what it sent in the migration of this folder.
///
/// # Errors
/// When the journal cannot be read.
pub(crate) fn is_handed_over(folder: &Folder) -> io::Result<bool> {
    Ok(at_source(&read(&folder.file(SOURCE_JOURNAL))?) == Standing::HandedOver)
}

fn at_source(records: &[SourceRecord]) -> Standing {
    match handed_over_in(records) {
        Some(_) => Standing::HandedOver,
        None => Standing::Kept,
    }
}

/// The epoch in which the target owns what a source with these records has handed over, if it has.
pub(crate) fn handed_over_in(records: &[SourceRecord]) -> Option<Epoch> {
    records.iter().fold(None, |epoch, record| match record {
        SourceRecord::HandedOver(agreed) => Some(agreed.epoch),
        SourceRecord::TakenBack { .. } => None,
        _ => epoch,
    })
}

pub(super) fn at_target(records: &[TargetRecord], index: usize) -> Standing {
    let next = |standing, record: &TargetRecord| match (record, standing) {
        (&TargetRecord::Prepared { ref images, epoch, .. }, _) => match images.get(index) {
            Some(handover) => {
                let handover = handover.clone();
                Standing::Promised(Part { index, handover, epoch, distrusted: false })
            }
            None => Standing::Incoming,
        },
        (TargetRecord::Void { .. }, _) => Standing::Incoming,
        (TargetRecord::Distrusted { image }, Standing::Promised(part)) if image.ix() == index => {
            Standing::Promised(Part { distrusted: true, ..part })
        }
        (TargetRecord::Committed(agreed), Standing::Promised(part)) => {
            Standing::Owned(Part { epoch: agreed.epoch, ..part })
        }
        (TargetRecord::Complete, Standing::Owned(part)) => Standing::Complete(part),
        (TargetRecord::Fenced, Standing::Owned(part)) => Standing::HandedBack(part),
        (TargetRecord::Fenced | TargetRecord::Discarded, _) => Standing::Gone,
        (_, standing) => standing,
    };
    records.iter().fold(Standing::Incoming, next)
}

/// The records of a journal that a loop may be writing to: what is torn at its end does not count.
pub fn read<R: DeserializeOwned>(path: &StatePath) -> io::Result<Vec<R>> {
    let bytes = match path.read() {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let damaged = |why| {
        let why = format!("{}: {why}", path.display());
        io::Error::new(io::ErrorKind::InvalidData, why)
    };
    let payloads = journal::records(&bytes).map_err(damaged)?;
    let decode = |payload: &Vec<u8>| postcard::from_bytes(payload).map_err(io::Error::other);
    payloads.iter().map(decode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::log::Log;
    use dray_types::{Attempt, BlockSet, ImageIndex};
    use dray_wire::{HandedOver, MapHash};

    fn handed_over() -> HandedOver {
        HandedOver { epoch: Epoch(2), attempt: Attempt(1), map_hash: MapHash::of(&[]) }
    }

    #[test]
    fn a_source_has_it_until_the_point_of_no_return() {
        let attempt = SourceRecord::Attempt { attempt: Attempt(1) };
        let over = SourceRecord::HandedOver(handed_over());
        let back = SourceRecord::TakenBack { epoch: Epoch(3) };
        assert_eq!(at_source(std::slice::from_ref(&attempt)), Standing::Kept);
        assert_eq!(at_source(&[attempt, over.clone()]), Standing::HandedOver);
        assert_eq!(at_source(&[over.clone(), SourceRecord::Done]), Standing::HandedOver);
        assert_eq!(at_source(&[over, back]), Standing::Kept);
    }

    #[test]
    fn a_target_has_it_once_it_was_committed() {
        let handover = ImageHandover { len: 4096, missing: BlockSet::new() };
        let part =
            Part { index: 0, handover: handover.clone(), epoch: Epoch(1), distrusted: false };
        let (attempt, map_hash) = (Attempt(1), MapHash::of(&[]));
        let (images, epoch) = (vec![handover], Epoch(1));
        let prepared = TargetRecord::Prepared { attempt, map_hash, images, epoch };
        let void = TargetRecord::Void { attempt };
        let committed = TargetRecord::Committed(handed_over());
        let at = |records: &[TargetRecord]| at_target(records, 0);
        assert_eq!(at(&[TargetRecord::Touched]), Standing::Incoming);
        assert_eq!(at(std::slice::from_ref(&prepared)), Standing::Promised(part.clone()));
        assert_eq!(at(&[prepared.clone(), void]), Standing::Incoming);
        let distrusted = TargetRecord::Distrusted { image: ImageIndex(0) };
        let doubted = Standing::Promised(Part { distrusted: true, ..part.clone() });
        assert_eq!(at(&[prepared.clone(), distrusted]), doubted);
        let other = TargetRecord::Distrusted { image: ImageIndex(1) };
        assert_eq!(at(&[prepared.clone(), other]), Standing::Promised(part.clone()));
        let owned = [prepared, committed, TargetRecord::GuestStarted];
        let part = Part { epoch: Epoch(2), ..part };
        assert_eq!(at(&owned), Standing::Owned(part.clone()));
        let complete = [&owned[..], &[TargetRecord::Complete]].concat();
        assert_eq!(at(&complete), Standing::Complete(part.clone()));
        let fenced = [&owned[..2], &[TargetRecord::Fenced]].concat();
        assert_eq!(at(&fenced), Standing::HandedBack(part));
        assert_eq!(at(&[&fenced[..], &[TargetRecord::Discarded]].concat()), Standing::Gone);
    }

    #[test]
    fn a_journal_is_read_beside_its_writer() {
        let dir = tempfile::tempdir().unwrap();
        let path = StatePath::real(dir.path().join("journal"));
        assert!(read::<u8>(&path).unwrap().is_empty());
        let (mut log, _) = Log::<u8>::open(&path).unwrap();
        log.append(&[7]).unwrap();
        let before = std::fs::read(&path).unwrap();
        let mut torn = before.clone();
        torn.extend([1, 2, 3]);
        std::fs::write(&path, &torn).unwrap();
        assert_eq!(read::<u8>(&path).unwrap(), [7]);
        assert_eq!(std::fs::read(&path).unwrap(), torn);
    }
}
