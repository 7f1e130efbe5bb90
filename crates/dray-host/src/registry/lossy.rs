//! That a file has lost writes stays known when its image is forgotten: what is read of it may be in memory only,
//! whatever the image is called that is made of the file next.

use super::identity::found_at;
use super::{Entry, loss_path, losses};
use crate::record::ImageRecord;
use crate::store::Store;
use dray_files::StatePath;
use std::io;

/// Where it is written down for the file of an image: by the file's number and when it was made. None where there is no
/// file.
fn mark_of(store: &Store, record: &ImageRecord) -> io::Result<Option<StatePath>> {
    let Some(path) = found_at(store, record) else { return Ok(None) };
    let look = path.look()?;
    let (seconds, nanoseconds) = look.birth.unwrap_or_default();
    Ok(Some(store.lossy().join(format!("{}-{seconds}-{nanoseconds}", look.inode))))
}

/// The image is about to be forgotten, and its file stays.
///
/// # Errors
/// That it cannot be written down. What cannot be looked at is told, and does not keep the image.
pub(super) fn keep(store: &Store, entry: &Entry) -> io::Result<()> {
    let Some(lost) = entry.file.lost_writes() else { return Ok(()) };
    let record = entry.record();
    match mark_of(store, &record) {
        Ok(None) => Ok(()),
        Ok(Some(mark)) => {
            store.lossy().make_dirs()?;
            losses::put_settled(&mark, &lost)
        }
        Err(why) => {
            let image = record.name;
            tracing::warn!(image, lost, %why, "it is forgotten that this file has lost writes");
            Ok(())
        }
    }
}

/// The image is about to be made of a file that is there.
///
/// # Errors
/// That it cannot be told what the file has lost, or not be written down.
pub(super) fn inherit(store: &Store, record: &ImageRecord) -> io::Result<()> {
    if record.read_only {
        return Ok(());
    }
    let lost = match mark_of(store, record)? {
        Some(mark) if mark.exists()? => losses::read_lost(&mark)?,
        _ => None,
    };
    lost.map_or(Ok(()), |lost| losses::put_settled(&loss_path(store, &record.name), &lost))
}
