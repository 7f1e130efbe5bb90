//! The checks of `dray prepare --chain flatten`, before it changes anything: whether another
//! process can read the chain, how much data the guest sees, and what prevents the flattening.

use super::selection::{Plan, name_there};
use crate::agent::Agent;
use dray_api::{ApiResult, Chain, ErrorKind, Prepare, Refusal, TargetFormat};
use dray_host::folder::intent::SourceImage;
use dray_host::refusals::io_error;
use dray_host::refusals::random_id;
use dray_image::{Image, runs};
use dray_qemu::AdoptOptions;
use dray_types::{BLOCK_SIZE, BlockRange, ImageId};
use dray_vm::flat::barred::chain_error;
use dray_vm::flat::{chain_of, layers_of, raw_name};
use dray_vm::picture::{LayerLocation, LayerPicture, Picture};
use dray_vm::qemu_error;
use dray_wire::ImageOffer;
use std::path::PathBuf;

/// What a wish for a qcow2 is refused with.
const NO_QCOW2: &str = "cannot make a qcow2 at the target";

impl Agent {
    /// What the guest sees of a chain, as one raw image.
    pub(super) fn plan_flat(
        &self,
        what: &str,
        plan: &mut Plan,
        layer: &LayerPicture,
        path: PathBuf,
        command: &Prepare,
    ) -> ApiResult<usize> {
        let chain =
            chain_of(&layer.chain).map_err(|why| Refusal::new(ErrorKind::Conflict, what, why))?;
        let name =
            self.adopted_name(&path, |name| plan.images.iter().any(|image| image.name == name));
        let device = Some(layer.plan.qdev.clone());
        let target = name_there(command, &name, device.as_deref(), &raw_name(&name));
        let (id, len) = (ImageId(random_id()?), layer.plan.file_size);
        let offer = ImageOffer { id, name: target, len, read_only: false };
        let image = SourceImage { chain, ..SourceImage::new(name, offer, path, device) };
        // Shows, before anything is touched, that the chain can be read: later a read would wait.
        let seen = self.registry.peek_chain(&image);
        tokio::task::block_in_place(|| seen.open()).map_err(|why| chain_error(what, &why))?;
        plan.allocated.push(seen_bytes(what, &*seen)?);
        plan.images.push(image);
        Ok(plan.images.len() - 1)
    }

    /// Of the disks that are flattened, or are going to be, the target makes qcow2 files. They come
    /// under the names of the raw images that they are until then.
    pub(super) fn want_qcow2(&self, plan: &mut Plan) -> ApiResult<()> {
        let frozen = |name: &str| self.registry.get(name).is_some_and(|entry| entry.flat.is_some());
        let mut any = false;
        for image in &mut plan.images {
            if !image.chain.is_empty() || frozen(&image.name) {
                image.qcow2 = true;
                image.offer.name = raw_name(&image.offer.name);
                any = true;
            }
        }
        let (what, why) = (NO_QCOW2, "the vm has no disk that would be flattened: all are raw");
        match any {
            true => Ok(()),
            false => Err(Refusal::new(ErrorKind::Invalid, what, why)
                .hint("leave --target-format out: raw disks arrive raw")),
        }
    }

    /// Disks that are flattened already have the node names that they had on their chains.
    pub(super) fn plan_frozen(&self, picture: &mut Picture) {
        for layer in picture.disks.iter_mut().filter_map(|layers| layers.first_mut()) {
            let LayerLocation::Resident(name) = &layer.place else { continue };
            let frozen = self.registry.get(name).filter(|entry| entry.flat.is_some());
            let layers = frozen.and_then(|entry| layers_of(&entry.record()).ok());
            if let Some(active) = layers.as_ref().and_then(|layers| layers.first()) {
                layer.plan = active.flattened();
            }
        }
    }
}

/// Bytes of data that a guest sees in an image.
pub(super) fn seen_bytes(what: &str, image: &dyn Image) -> ApiResult<u64> {
    let whole = BlockRange::whole(image.geometry().len);
    let data = tokio::task::block_in_place(|| runs::data_blocks(image, whole));
    data.map(|blocks| blocks.len() * BLOCK_SIZE).map_err(|why| io_error(what, why))
}

/// Nothing is known of what is in an image that no VM has.
pub(super) fn refuse_flat_images(command: &Prepare) -> ApiResult<()> {
    if command.chain == Chain::Keep {
        return Ok(());
    }
    let (what, why) =
        ("cannot flatten images", "dray learns only from a running vm which chain a disk has");
    Err(Refusal::new(ErrorKind::Unsupported, what, why)
        .hint("name the vm with --qmp; without one, `qemu-img convert` makes a raw image"))
}

/// A chain that is kept has its formats.
pub(super) fn refuse_format(command: &Prepare) -> ApiResult<()> {
    if command.target_format == TargetFormat::Raw || command.chain == Chain::Flatten {
        return Ok(());
    }
    let why = "with --chain keep, a chain arrives as it is";
    Err(Refusal::new(ErrorKind::Invalid, NO_QCOW2, why).hint("give --chain flatten as well"))
}

/// What stands against flattening is told before the target is asked; bitmaps once it is known
/// whether they may go.
pub(super) async fn check_flat(picture: &Picture) -> ApiResult<()> {
    let options = AdoptOptions { drop_bitmaps: true };
    for layer in picture.layers().filter(|layer| !layer.chain.is_empty()) {
        let checked = dray_qemu::flatten::check(picture.qmp(), &layer.chain, options).await;
        let what = format!("cannot flatten disk {}", layer.plan.qdev);
        checked.map_err(|why| qemu_error(what, &why))?;
    }
    Ok(())
}
