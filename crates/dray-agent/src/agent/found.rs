//! What a target finds of images that come, and what it makes of it.

use super::Agent;
use super::made::is_made;
use crate::bases::there::{Lying, export_name};
use dray_host::lineage::ReplicaNote;
use dray_host::migration::intent::{TargetImageIntent, TargetIntent};
use dray_host::pool::{Pool, PoolKind};
use dray_host::registry::Entry;
use dray_types::{Ancestor, MigrationId};
use dray_wire::ImageOffer;
use dray_wire::request::{ContentDigest, WantedImage};
use std::sync::Arc;

/// What the asking side says of its images, so that they can begin with what is here; nothing where it
/// is too old to understand the answer.
#[derive(Clone, Copy, Default)]
pub(super) struct Here<'a> {
    /// The closed generations of each.
    pub(super) ancestors: Option<&'a [Vec<Ancestor>]>,
    /// Of each the digest of its content, if the file here is to be used.
    pub(super) digests: Option<&'a [Option<ContentDigest>]>,
    /// Of which images a qcow2 is to be made, none when there are none.
    pub(super) made: &'a [bool],
}

impl Here<'_> {
    /// Whether it says as much as there are images.
    pub(super) fn fits(&self, images: usize) -> bool {
        self.ancestors.is_none_or(|ancestors| ancestors.len() == images)
            && self.digests.is_none_or(|digests| digests.len() == images)
            && (self.made.is_empty() || self.made.len() == images)
    }
}

impl Agent {
    /// Who does not ask for bases does not know of them (I3).
    pub(super) fn check_same_bases(
        &self,
        here: &Here,
        earlier: &TargetIntent,
    ) -> Result<(), String> {
        let images = &earlier.images;
        if !is_made(here.made, images.len()).eq(images.iter().map(|image| image.qcow2)) {
            return Err("it was prepared for another format; cancel it with --discard".to_owned());
        }
        if here.ancestors.is_none() && images.iter().any(|image| image.replica.is_some()) {
            return Err("it was prepared with a replica; cancel it with --discard".to_owned());
        }
        for (nth, image) in images.iter().enumerate() {
            let asked = here.digests.is_some_and(|digests| digests[nth].is_some());
            if asked != image.in_place.is_some() {
                let path = image.path.display();
                return Err(format!(
                    "{path} is not what it was when this was prepared; cancel it with --discard"
                ));
            }
            let entry = image.in_place.as_ref().and_then(|name| self.registry.get(name));
            let same = entry.map_or(Ok(()), |entry| self.registry.check_in_place(&entry));
            same.map_err(|why| format!("{why}; cancel it with --discard"))?;
        }
        Ok(())
    }
}

/// What this host has of an image that comes.
#[derive(Clone)]
pub(super) enum Found {
    /// Nothing.
    Nothing,
    /// A replica to begin with.
    Usable(Arc<Entry>, ReplicaNote),
    /// A replica that is of no use, and why.
    Useless(Arc<Entry>, String),
    /// A file with its content.
    InPlace(Lying),
}

/// What becomes of an image here.
///
/// # Errors
/// That its name is none, or taken.
pub(super) fn intent_of(
    pool: &Pool,
    migration: MigrationId,
    image: &WantedImage,
    found: &Found,
) -> Result<TargetImageIntent, String> {
    let path = match found {
        Found::Usable(entry, _) => entry.record().path,
        Found::InPlace(lying) => lying.path.clone(),
        _ => pool.image_path(&image.name).map_err(|why| why.to_string())?,
    };
    let device = pool.kind == PoolKind::Devices;
    let in_place = matches!(found, Found::InPlace(_)).then(|| export_name(&image.name, migration));
    if !device && in_place.is_none() && path.exists() {
        return Err(format!("{} exists already; choose another name or pool", path.display()));
    }
    let offer = ImageOffer {
        id: image.id,
        name: image.name.clone(),
        len: image.len,
        read_only: image.read_only,
    };
    let (replica, refused) = match found {
        Found::Nothing | Found::InPlace(_) => (None, None),
        Found::Usable(_, note) => (Some(note.clone()), None),
        Found::Useless(_, why) => (None, Some(why.clone())),
    };
    // A device holds whatever was on it.
    let zeroed = replica.is_none() && !device && in_place.is_none();
    Ok(TargetImageIntent { offer, path, zeroed, replica, refused, in_place, qcow2: false })
}

/// Whether there is room for `sent` bytes, of which `reused` are here already, and for those that are
/// `beside` them: what is made of the images.
///
/// # Errors
/// That there is not, and what to do.
pub(super) fn check_space(pool: &Pool, sent: u64, beside: u64, reused: u64) -> Result<(), String> {
    let wanted = sent.saturating_sub(reused).saturating_add(beside);
    let stat = rustix::fs::statvfs(&pool.path)
        .map_err(|why| format!("pool '{}': {}", pool.name, std::io::Error::from(why)))?;
    let free = stat.f_bavail * stat.f_frsize;
    if wanted > free {
        return Err(format!(
            "pool '{}' has {} free and the images need {}; free space or choose another pool",
            pool.name,
            dray_types::ByteSize(free),
            dray_types::ByteSize(wanted)
        ));
    }
    Ok(())
}
