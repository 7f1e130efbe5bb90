//! Takes a running VM's disk from its chain: which image it becomes. How it leaves the chain is in
//! [`FlatDisks`](dray_vm::flat::turn::FlatDisks).

use crate::agent::Agent;
use dray_api::{ApiResult, ErrorKind, Refusal, SplicedDisk};
use dray_host::record::ImageRecord;
use dray_host::record::chain::{FlatRecord, Turn};
use dray_host::refusals::io_error;
use dray_host::registry::Entry;
use dray_host::{refusals::random_id, registry::real_path};
use dray_image::names;
use dray_qemu::{AdoptOptions, Watched, flatten};
use dray_types::ImageId;
use dray_vm::flat::chain_of;
use dray_vm::flat::turn::check_chain;
use dray_vm::picture::{LayerPicture, Picture};
use dray_vm::qemu_error;
use std::sync::Arc;
use std::time::Instant;
use tokio::task::block_in_place;

impl Agent {
    /// Flattens one disk; on failure the guest is on its own chain and nothing is left behind.
    pub(crate) async fn freeze_disk(
        &self,
        picture: &Picture,
        layer: &LayerPicture,
        drop_bitmaps: bool,
        id: Option<ImageId>,
    ) -> ApiResult<SplicedDisk> {
        let what = format!("cannot flatten disk {}", layer.plan.qdev);
        let (qmp, options) = (picture.qmp(), AdoptOptions { drop_bitmaps });
        let failed = |why: dray_qemu::Error| qemu_error(what.clone(), &why);
        self.activate_stopped(&what, picture).await?;
        flatten::check(qmp, &layer.chain, options).await.map_err(failed)?;
        check_chain(&what, qmp, &layer.chain).await?;
        let path = real_path(&layer.plan.path()).map_err(|why| io_error(&what, why))?;
        let _operation = self.operate(&what, &self.adopted_name(&path, |_| false), "adopt")?;
        let guest = Watched::begin(qmp).await.map_err(failed)?;
        let entry = self.register_flat(&what, picture, layer, id, guest.running())?;
        let began = Instant::now();
        let frozen = self.flat_disks().freeze(&what, qmp, &entry, guest).await;
        let ms = began.elapsed().as_secs_f64() * 1e3;
        let record = entry.record();
        frozen?;
        tracing::info!(image = record.name, ms, "flattened");
        Ok(SplicedDisk {
            device: layer.plan.qdev.clone(),
            node: layer.plan.nbd_node(),
            image: record.name,
            path: record.path,
            ms,
        })
    }

    /// Registers a chain with an empty overlay. The guest is on the chain itself, as before.
    fn register_flat(
        &self,
        what: &str,
        picture: &Picture,
        layer: &LayerPicture,
        id: Option<ImageId>,
        running: bool,
    ) -> ApiResult<Arc<Entry>> {
        let failed = |why: &dyn std::fmt::Display| io_error(what, why);
        let plan = &layer.plan;
        self.check_file(what, &plan.path(), false)?;
        let path = real_path(&plan.path()).map_err(|why| failed(&why))?;
        let layers =
            chain_of(&layer.chain).map_err(|why| Refusal::new(ErrorKind::Conflict, what, why))?;
        let id = match id {
            Some(id) => id,
            None => ImageId(random_id()?),
        };
        let record = ImageRecord {
            mode: names::file_mode(&path).map_err(|why| failed(&why))?,
            format: Some("raw".to_owned()),
            adopted: Some(self.adopted_by(what, picture, plan, &layer.chain)?),
            flat: Some(FlatRecord {
                layers,
                turn: Some(Turn { home: false, running, done: false }),
                overlay: None,
            }),
            ..ImageRecord::owned(self.adopted_name(&path, |_| false), id, path, plan.size)
        };
        let disks = self.flat_disks();
        let added = disks.add_flat(what, record)?;
        block_in_place(|| disks.hold_peeks(&added));
        Ok(added)
    }
}
