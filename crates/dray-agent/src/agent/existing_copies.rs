//! What the target already has of the images of a migration to it, and how it uses this.

use super::Agent;
use crate::agent::bases::{FileInPlace, export_name};
use dray_host::folder::intent::{TargetImageIntent, TargetIntent};
use dray_host::lineage::ReplicaNote;
use dray_host::pool::{Pool, PoolKind};
use dray_host::refusals::{Answer, conflict, failed, no_room, of_path};
use dray_host::registry::Entry;
use dray_types::MigrationId;
use dray_wire::ImageOffer;
use dray_wire::request::ComingImage;
use std::sync::Arc;

impl Agent {
    /// Whether images that come are what was prepared for them earlier.
    pub(super) fn check_same_bases(
        &self,
        coming: &[ComingImage],
        earlier: &TargetIntent,
    ) -> Answer<()> {
        let cancel_it = |why: String| conflict(why).hint("cancel it with --discard");
        for (coming, image) in coming.iter().zip(&earlier.images) {
            if coming.qcow2 != image.qcow2 {
                return Err(cancel_it("it was prepared for another format".to_owned()));
            }
            if coming.digest.is_some() != image.in_place.is_some() {
                let path = image.path.display();
                let why = format!("{path} has changed since the migration was prepared");
                return Err(cancel_it(why));
            }
            let entry = image.in_place.as_ref().and_then(|name| self.registry.get(name));
            let same = entry.map_or(Ok(()), |entry| self.registry.check_in_place(&entry));
            same.map_err(|why| cancel_it(why.to_string()))?;
        }
        Ok(())
    }
}

/// What this host has of an image that comes.
#[derive(Clone)]
pub(super) enum ExistingCopy {
    /// The target has nothing of the image.
    Nothing,
    /// A replica to begin with.
    Usable(Arc<Entry>, ReplicaNote),
    /// A replica that is of no use, and why.
    Useless(Arc<Entry>, String),
    /// A file with its content.
    InPlace(FileInPlace),
}

/// What becomes of an image here.
///
/// # Errors
/// That its name is none, or taken.
pub(super) fn intent_of(
    pool: &Pool,
    migration: MigrationId,
    coming: &ComingImage,
    found: &ExistingCopy,
) -> Answer<TargetImageIntent> {
    let image = &coming.image;
    let path = match found {
        ExistingCopy::Usable(entry, _) => entry.record().path,
        ExistingCopy::InPlace(lying) => lying.path.clone(),
        _ => pool.image_path(&image.name).map_err(of_path)?,
    };
    let device = pool.kind == PoolKind::Devices;
    let in_place =
        matches!(found, ExistingCopy::InPlace(_)).then(|| export_name(&image.name, migration));
    if !device && in_place.is_none() && path.exists() {
        let why = format!("{} exists already", path.display());
        return Err(conflict(why).hint("choose another name or pool"));
    }
    let offer = ImageOffer {
        id: image.id,
        name: image.name.clone(),
        len: image.len,
        read_only: image.read_only,
    };
    let (replica, refused) = match found {
        ExistingCopy::Nothing | ExistingCopy::InPlace(_) => (None, None),
        ExistingCopy::Usable(_, note) => (Some(note.clone()), None),
        ExistingCopy::Useless(_, why) => (None, Some(why.clone())),
    };
    // A device holds whatever was on it.
    let zeroed = replica.is_none() && !device && in_place.is_none();
    Ok(TargetImageIntent { offer, path, zeroed, replica, refused, in_place, qcow2: coming.qcow2 })
}

/// Whether there is room for images that come, and for those bytes that are `beside` them: what is made of the
/// images. What was `found` of them takes no more. Nobody makes room on devices.
///
/// # Errors
/// That there is not, and what to do.
pub(super) fn check_space(
    pool: &Pool,
    images: &[ComingImage],
    found: &[ExistingCopy],
    beside: u64,
) -> Answer<()> {
    if pool.kind != PoolKind::Files {
        return Ok(());
    }
    let comes = |(coming, found): (&ComingImage, &ExistingCopy)| {
        (!matches!(found, ExistingCopy::InPlace(_))).then_some(coming.image.allocated)
    };
    let reused = |found: &ExistingCopy| match found {
        ExistingCopy::Usable(entry, _) => entry.file.allocated_bytes().unwrap_or(0),
        _ => 0,
    };
    let sent = images.iter().zip(found).filter_map(comes).fold(0, u64::saturating_add);
    let reused = found.iter().map(reused).sum();
    check_free(pool, sent.saturating_sub(reused).saturating_add(beside))
}

/// Whether a pool of files has room for `wanted` bytes.
fn check_free(pool: &Pool, wanted: u64) -> Answer<()> {
    let stat = rustix::fs::statvfs(&pool.path)
        .map_err(|why| failed(format!("pool '{}': {}", pool.name, std::io::Error::from(why))))?;
    let free = stat.f_bavail * stat.f_frsize;
    if wanted > free {
        let why = format!(
            "pool '{}' has {} free and the images need {}",
            pool.name,
            dray_types::ByteSize(free),
            dray_types::ByteSize(wanted)
        );
        return Err(no_room(why).hint("free space or choose another pool"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_api::ErrorKind;
    use dray_host::pool::PoolIo;
    use dray_host::stamp::FileStamp;
    use dray_types::ImageId;
    use dray_wire::request::WantedImage;

    const TOO_MUCH: u64 = 1 << 60;

    fn coming(allocated: u64) -> ComingImage {
        let (id, name, len) = (ImageId(1), "a.raw".to_owned(), allocated);
        let image = WantedImage { id, name, len, allocated, read_only: true };
        ComingImage { image, ancestors: Vec::new(), digest: None, qcow2: false, owner: None }
    }

    #[test]
    fn images_need_room_in_a_pool_of_files_unless_they_lie_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.raw");
        std::fs::write(&path, "content").unwrap();
        let lying = FileInPlace { stamp: FileStamp::of(&path).unwrap(), path };
        let lying = [ExistingCopy::InPlace(lying)];
        let nothing = [ExistingCopy::Nothing];
        let (kind, io) = (PoolKind::Files, PoolIo::Buffered);
        let (name, path) = ("p".to_owned(), dir.path().to_owned());
        let files = Pool { name, path, kind, io, reuse_domain: None };
        assert_eq!(check_space(&files, &[coming(4096)], &nothing, 0), Ok(()));
        assert_eq!(check_space(&files, &[coming(TOO_MUCH)], &lying, 0), Ok(()));
        let full = [(TOO_MUCH, &nothing, 0), (4096, &nothing, TOO_MUCH), (4096, &lying, TOO_MUCH)];
        for (bytes, found, beside) in full {
            let refused = check_space(&files, &[coming(bytes)], found, beside);
            assert_eq!(refused.unwrap_err().kind, ErrorKind::NoSpace);
        }
        let devices = Pool { kind: PoolKind::Devices, ..files };
        assert_eq!(check_space(&devices, &[coming(TOO_MUCH)], &nothing, 0), Ok(()));
    }
}
