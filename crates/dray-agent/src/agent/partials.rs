//! The files that a target makes for images that come, and to whom they belong.

use super::Agent;
use super::existing_copies::ExistingCopy;
use dray_api::Refusal;
use dray_host::folder::intent::{TargetImageIntent, TargetIntent};
use dray_host::folder::log::Folder;
use dray_host::owner::{self, Owner};
use dray_host::record::{CopyState, ImageRecord};
use dray_host::refusals::{Answer, absent, conflict, failed};
use dray_host::registry::Entry;
use dray_host::replicas::undo_room;
use dray_wire::request::{ComingImage, WantedImage};

impl Agent {
    pub(super) fn make_partials(
        &self,
        intent: &TargetIntent,
        images: &[ComingImage],
        (found, owners): (&[ExistingCopy], &[Option<Owner>]),
    ) -> Answer<()> {
        let mut made = Vec::new();
        let parts = intent.images.iter().zip(images).zip(found).zip(owners);
        let result = parts.into_iter().try_for_each(|(((image, coming), found), owner)| {
            let wanted = &coming.image;
            match found {
                ExistingCopy::Usable(entry, _) => {
                    // Noted first: a failure half-way is undone like the rest.
                    made.push(image.offer.name.clone());
                    let returning = self.registry.begin_return(entry, intent.migration);
                    let returning = returning.map_err(failed)?;
                    return self.give(&returning, *owner);
                }
                ExistingCopy::Useless(entry, why) => {
                    let name = &image.offer.name;
                    tracing::info!(image = name, why, "a replica is not used");
                    self.registry.set_aside(entry).map_err(failed)?;
                }
                ExistingCopy::InPlace(lying) => {
                    self.use_in_place(intent.migration, wanted, lying)?;
                    made.push(image.name_here().to_owned());
                    return Ok(());
                }
                ExistingCopy::Nothing => {}
            }
            self.make_partial(intent, image, wanted, *owner)?;
            made.push(image.offer.name.clone());
            Ok::<(), Refusal>(())
        });
        if result.is_err() {
            let folder = Folder::of(&self.store, intent.migration);
            if let Err(why) = undo_room(&self.registry, &folder, &made) {
                let migration = intent.migration;
                tracing::warn!(%migration, %why,
                    "cannot remove the files that were made for a migration");
            }
        }
        result
    }

    fn make_partial(
        &self,
        intent: &TargetIntent,
        image: &TargetImageIntent,
        wanted: &WantedImage,
        owner: Option<Owner>,
    ) -> Answer<()> {
        let name = &image.offer.name;
        self.refuse_held(&intent.peer, wanted)?;
        if let Some(entry) = self.registry.get(name) {
            let here = &self.config.name;
            let way_out = match entry.record().state {
                CopyState::Replica => format!(
                    "it is the replica of another image; `dray images remove {name} --delete` on \
                     {here} removes it"
                ),
                _ => "choose another name".to_owned(),
            };
            let why = format!("an image named '{name}' exists here already");
            return Err(conflict(why).hint(way_out));
        }
        let device = !image.zeroed;
        let coming = ImageRecord::coming(&image.offer, image.path.clone(), intent.migration);
        let record = ImageRecord { device, ..coming };
        if device {
            // It keeps its owner.
            return self.take_device(record);
        }
        let entry = self.registry.make_partial(record).map_err(failed)?;
        self.give(&entry, owner).inspect_err(|_| {
            if let Err(why) = self.registry.remove_partial(&entry) {
                tracing::warn!(image = name, %why, "cannot remove a file that was made for a migration");
            }
        })
    }

    /// A file that was made for an image will belong to whom its source says.
    fn give(&self, entry: &Entry, owner: Option<Owner>) -> Answer<()> {
        let Some(owner) = owner else { return Ok(()) };
        self.registry.promise_to(entry, owner).map_err(|why| {
            let hint = "choose a pool whose file system knows owners, or --owner root:root";
            failed(why).hint(hint)
        })
    }
}

/// To whom the file of an image will belong here.
pub(super) fn owner_here(coming: &ComingImage) -> Answer<Option<Owner>> {
    // Who is not root gives no file to anybody.
    let wanted = coming.owner.as_ref().filter(|_| rustix::process::geteuid().is_root());
    let Some(wanted) = wanted else { return Ok(None) };
    let owner = owner::here(wanted).map_err(|why| {
        let why = format!("give the file of '{}' to its owner: {why}", coming.image.name);
        absent(why).hint("make it there, or name another owner with --owner USER[:GROUP]")
    })?;
    Ok(Some(owner))
}
