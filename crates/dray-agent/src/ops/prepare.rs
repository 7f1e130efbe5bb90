//! `dray prepare`: room and exports at the target, and the lines its QEMU is started with.

use super::ask_peer::net_error;
use super::selection::Plan;
use super::splice::plan_kept;
use super::waiting_command;
use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{ApiResult, ErrorKind, Prepare, Prepared, PreparedImage, Refusal};
use dray_host::folder::intent::{SourceImage, SourceIntent};
use dray_host::owner;
use dray_host::provided;
use dray_host::record::MODE;
use dray_host::refusals::io_error;
use dray_host::registry::is_device;
use dray_migrate::source::SourceSlot;
use dray_net::NetError;
use dray_qemu::{LayerPlan, NbdExport, blockdev};
use dray_types::{Endpoint, EndpointKind};
use dray_vm::RECONNECT_DELAY;
use dray_vm::picture::{LayerPicture, Picture};
use dray_wire::ImageOffer;
use dray_wire::request::{
    Base, ComingImage, ContentDigest, FileOwner, Reply, Request, WantedImage,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;

impl Answers<Prepare> for Arc<Agent> {
    async fn answer(&self, command: Prepare, events: Events) -> ApiResult<Prepared> {
        let before = self.kept_preparation(&command).await?;
        let unseeded = match before {
            Some(_) => None,
            None => self.seed_prepare(&command, &events).await?,
        };
        let (intent, plan, picture) = self.plan(&command).await?;
        let pool_and_owner = (command.pool.as_deref(), command.owner.as_deref());
        let (slot, endpoint) = match before {
            Some(slot) => self.as_prepared(slot, &intent, &plan, pool_and_owner).await?,
            None => self.prepare_at_target(intent, &plan, pool_and_owner).await?,
        };
        if let Some(notice) = unseeded {
            let _ = events.send(notice).await;
        }
        let intent = slot.intent();
        if let Some(picture) = &picture {
            // Known by the time that it is wanted; a QEMU that cannot is as good.
            let _ = dray_qemu::status::measure_memory(picture.qmp()).await;
        }
        let blockdev = match &picture {
            Some(picture) => self.blockdev_lines(picture, &plan, &intent, &endpoint),
            None => vec![Vec::new(); intent.images.len()],
        };
        let images = intent.images.iter().zip(blockdev).map(|(image, blockdev)| PreparedImage {
            image: image.name.clone(),
            device: image.device.clone(),
            export: image.export().to_owned(),
            in_place: matches!(image.base, Base::InPlace { .. }),
            blockdev,
        });
        let images: Vec<_> = images.collect();
        let command_line = waiting_command::of(&command, picture.as_ref(), &images).await?;
        Ok(Prepared {
            migration: intent.migration,
            to: intent.peer.clone(),
            endpoint,
            images,
            command_line,
            qemu_args: match picture {
                Some(_) => ["-S", "-incoming", "defer"].map(str::to_owned).to_vec(),
                None => Vec::new(),
            },
        })
    }
}

/// To whom the image's file shall belong at the target: to `wanted`, or to whom it belongs here. A device's owner
/// says nothing of a file's.
fn owner_there(here: &SourceImage, wanted: Option<&str>) -> Option<FileOwner> {
    let known = owner::of_file(&here.path).ok().filter(|_| !is_device(&here.path));
    match wanted {
        Some(wanted) => Some(owner::parse(wanted, known.map_or(MODE, |known| known.mode))),
        None => known,
    }
}

/// The images for which room is asked for.
fn wanted_images(intent: &SourceIntent, plan: &Plan) -> Vec<WantedImage> {
    let wanted = |(image, &allocated): (&SourceImage, &u64)| {
        let ImageOffer { id, name, len, read_only } = image.offer.clone();
        WantedImage { id, name, len, allocated, read_only }
    };
    intent.images.iter().zip(&plan.allocated).map(wanted).collect()
}

impl Agent {
    /// Asks the target for room, and starts the loop that keeps a session with it.
    pub(super) async fn prepare_at_target(
        self: &Arc<Self>,
        mut intent: SourceIntent,
        plan: &Plan,
        (pool, owner): (Option<&str>, Option<&str>),
    ) -> ApiResult<(Arc<SourceSlot>, Endpoint)> {
        let what = format!("cannot prepare on {}", intent.peer);
        // Until it is durable here: a target that asks meanwhile hears that it may begin.
        let _prepares = self.preparing.begin(intent.migration);
        let (endpoint, bases) = self.room_for(&intent, plan, (pool, owner)).await?;
        let notices = self.begin_with(&mut intent, bases);
        let migration = intent.migration;
        let peer = intent.peer.clone();
        match self.begin_source(intent) {
            Ok(slot) => {
                notices.into_iter().for_each(|notice| slot.board.notice(notice));
                Ok((slot, endpoint))
            }
            Err(why) => {
                // Nobody will ever use what the target has just made.
                let _ = self.ask(&peer, &Request::Forget { migration }).await;
                Err(io_error(what, why))
            }
        }
    }

    /// Asks the target for room for the images: where it serves them, and what each begins with.
    pub(super) async fn room_for(
        self: &Arc<Self>,
        intent: &SourceIntent,
        plan: &Plan,
        (pool, owner): (Option<&str>, Option<&str>),
    ) -> ApiResult<(Endpoint, Vec<Base>)> {
        let what = format!("cannot prepare on {}", intent.peer);
        let digests = self.digests_there(&what, intent, plan, pool).await?;
        let wanted = wanted_images(intent, plan);
        let asked = self.ask_for_room(intent, wanted, digests, (pool, owner)).await;
        let asked = asked.map_err(|why| net_error(&what, &why))?;
        let fits = |(_, bases): &(_, Vec<Base>)| bases.len() == intent.images.len();
        asked.filter(fits).ok_or_else(|| {
            Refusal::new(ErrorKind::Peer, what, "the peer's answer does not fit the question")
        })
    }

    /// Notes what each image begins with at the target. What is to be said of replicas that it does not use.
    fn begin_with(&self, intent: &mut SourceIntent, bases: Vec<Base>) -> Vec<String> {
        let mut notices = Vec::new();
        for (image, base) in intent.images.iter_mut().zip(bases) {
            if let Base::Refused { why } = &base {
                let (name, peer) = (&image.offer.name, &intent.peer);
                let notice = format!("the replica of {name} on {peer} is not used: {why}");
                notices.push(format!("{notice}; the source sends everything"));
            }
            if let Base::Replica { generation, .. } = base {
                let (notes, id) = (self.store.given(), image.offer.id);
                image.given = provided::of(&notes, id, &intent.peer, generation);
            }
            image.base = base;
        }
        notices
    }

    /// Asks the target for room: where it serves images, and what each begins with; none when
    /// the peer answers something else.
    async fn ask_for_room(
        &self,
        intent: &SourceIntent,
        images: Vec<WantedImage>,
        digests: Vec<Option<ContentDigest>>,
        (pool, owner): (Option<&str>, Option<&str>),
    ) -> Result<Option<(Endpoint, Vec<Base>)>, NetError> {
        let coming = intent.images.iter().zip(images).zip(digests);
        let coming = coming.map(|((here, image), digest)| ComingImage {
            image,
            ancestors: self.ancestors(here),
            digest,
            qcow2: here.qcow2,
            owner: owner_there(here, owner),
        });
        let request = Request::Prepare {
            migration: intent.migration,
            pool: pool.map(str::to_owned),
            images: coming.collect(),
        };
        match self.ask(&intent.peer, &request).await? {
            Reply::Prepared { endpoint, bases } => Ok(Some((endpoint, bases))),
            _ => Ok(None),
        }
    }

    /// The `-blockdev` values of each image's disk: those of a chain stand with its active image.
    fn blockdev_lines(
        &self,
        picture: &Picture,
        plan: &Plan,
        intent: &SourceIntent,
        endpoint: &Endpoint,
    ) -> Vec<Vec<String>> {
        let mut lines = vec![Vec::new(); intent.images.len()];
        for (layers, images) in picture.disks.iter().zip(&plan.disks) {
            let attached = layers.iter().zip(images).map(|(layer, &image)| {
                let image = &intent.images[image];
                (self.plan_there(picture, layer, image), nbd_export(endpoint, image.export()))
            });
            let attached: Vec<_> = attached.collect();
            if let Some(&active) = images.first() {
                lines[active] = blockdev::arguments(&attached);
            }
        }
        lines
    }

    /// How a layer is attached at the target: its nodes are called as they are here, or were before dray had it.
    fn plan_there(
        &self,
        picture: &Picture,
        layer: &LayerPicture,
        image: &SourceImage,
    ) -> LayerPlan {
        let path = Path::new(image.export());
        if image.qcow2 {
            return layer.plan.directly_on(path);
        }
        let record = self.registry.get(&image.name).map(|entry| entry.record());
        let record = record.filter(|record| record.id == image.offer.id);
        let adopted = record.and_then(|record| plan_kept(&record, picture.look.process.as_ref()));
        match adopted {
            Some(adopted) => layer.plan.clone().named_as(&adopted).for_target(path),
            None => layer.plan.for_target(path),
        }
    }
}

/// The target's export of this name, as the QEMU that waits there connects to it.
fn nbd_export(endpoint: &Endpoint, name: &str) -> NbdExport {
    match endpoint.kind {
        EndpointKind::Nbd => NbdExport {
            socket: PathBuf::from(&endpoint.path),
            name: name.to_owned(),
            reconnect_delay: RECONNECT_DELAY,
        },
    }
}
