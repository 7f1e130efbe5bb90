//! `dray prepare`: room and exports at the target, and the lines its QEMU is started with.

use super::bases::usual_name;
use super::flatten::{check_flat, refuse_flat_images, refuse_format, seen_bytes};
use super::images::random_id;
use super::io_error;
use crate::agent::Agent;
use crate::api::{
    ApiError, ApiResult, Chain, ErrorKind, MigrationState, Prepare, Prepared, PreparedImage,
    Subject, TargetFormat,
};
use crate::flat::raw_name;
use crate::given;
use crate::migration::intent::{SourceImage, SourceIntent, SourceVm};
use crate::migration::source::{SourceSlot, unix_ms};
use crate::net::requests;
use crate::net::{NetError, NetErrorKind};
use crate::registry::CopyState;
use crate::released::Released;
use crate::vm::RECONNECT_DELAY;
use crate::vm::picture::{LayerPicture, Picture, Place};
use dray_image::{FileImage, FileOptions};
use dray_qemu::{NbdExport, blockdev};
use dray_types::{Ancestor, Epoch, ImageId, MigrationId};
use dray_wire::ImageOffer;
use dray_wire::request::{Base, ContentDigest, Reply, Request, WantedImage};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How long the target may take to make room.
const ASK_TIMEOUT: Duration = Duration::from_secs(30);

/// Why an older target is of no use for a qcow2.
const TOO_OLD: &str = "the target's software makes no qcow2 of what has arrived";
/// What a system says of a full disk.
pub(super) const FULL: &str = "No space left";
/// What to do about it.
pub(super) const MAKE_ROOM: &str = "free space there, then try again";

/// A failure of the network as the API tells it.
pub fn net_error(what: impl Into<String>, why: &NetError) -> ApiError {
    let kind = match why.kind {
        NetErrorKind::Certificate => ErrorKind::Denied,
        NetErrorKind::Version => ErrorKind::Unsupported,
        NetErrorKind::Refused => refused_kind(&why.what),
        _ => ErrorKind::Peer,
    };
    // A peer's refusal is one text: `what and why; what to do`.
    let (text, hint) = match (&why.hint, why.what.rsplit_once("; ")) {
        (Some(hint), _) => (why.what.as_str(), Some(hint.as_str())),
        (None, Some((text, hint))) => (text, Some(hint)),
        (None, None) if why.what.contains(FULL) => (why.what.as_str(), Some(MAKE_ROOM)),
        (None, None) => (why.what.as_str(), None),
    };
    let error = ApiError::new(kind, what, text);
    match hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

/// What sort of refusal the target's words tell of.
pub(crate) fn refused_kind(why: &str) -> ErrorKind {
    let has = |words: &str| why.contains(words);
    if has("free and the images need") || has("is too small") || has(FULL) {
        ErrorKind::NoSpace
    } else if has("is not a name") || has("no qcow2 is made of one") {
        ErrorKind::Invalid
    } else if has("there is no device") {
        ErrorKind::NotFound
    } else if [
        "is in use",
        "is read-only",
        "an earlier try",
        "exists already",
        "exists here already",
        "since it was compared",
        "when this was prepared",
    ]
    .into_iter()
    .any(has)
    {
        ErrorKind::Conflict
    } else if has("not a configured peer") || has("may not use") || has("pool") {
        ErrorKind::Denied
    } else {
        ErrorKind::Conflict
    }
}

/// The images of a migration while it is being put together.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) images: Vec<SourceImage>,
    pub(super) allocated: Vec<u64>,
    /// Per disk and layer: which image.
    pub(super) disks: Vec<Vec<usize>>,
}

impl Agent {
    pub(super) async fn prepare(self: &Arc<Self>, command: Prepare) -> ApiResult<Prepared> {
        let (intent, plan, picture) = self.plan(&command).await?;
        let (slot, nbd_socket) =
            self.prepare_at_target(intent, &plan, command.pool.as_deref()).await?;
        let intent = slot.intent();
        if let Some(picture) = &picture {
            // Known by the time that it is wanted; a QEMU that cannot is as good.
            let _ = dray_qemu::status::measure_memory(&picture.qmp).await;
        }
        let blockdev = match &picture {
            Some(picture) => blockdev_lines(picture, &plan, &intent, &nbd_socket),
            None => vec![Vec::new(); intent.images.len()],
        };
        let images = intent.images.iter().zip(blockdev).map(|(image, blockdev)| PreparedImage {
            image: image.name.clone(),
            device: image.device.clone(),
            export: image.export().to_owned(),
            in_place: matches!(image.base, Base::InPlace { .. }),
            blockdev,
        });
        Ok(Prepared {
            migration: intent.migration,
            to: intent.peer.clone(),
            nbd_socket,
            images: images.collect(),
            qemu_args: ["-S", "-incoming", "defer"].map(str::to_owned).to_vec(),
        })
    }

    /// Works out which images move, under which names.
    pub(super) async fn plan(
        &self,
        command: &Prepare,
    ) -> ApiResult<(SourceIntent, Plan, Option<Picture>)> {
        self.session_settings(&command.to)?;
        refuse_format(command)?;
        let named = |here: &str, device: Option<&str>, usual: &str| {
            let other = command.names.get(here).or_else(|| command.names.get(device?));
            let name = other.map_or(usual, String::as_str);
            format!("{}{name}", command.prefix.as_deref().unwrap_or_default())
        };
        let mut plan = Plan::default();
        let (vm, picture) = match &command.subject {
            Subject::Images { names } => {
                refuse_flat_images(command)?;
                for name in names {
                    let target = named(name, None, &usual_name(self.registry.get(name), name));
                    self.plan_resident(&mut plan, name, target, None, false)?;
                }
                (None, None)
            }
            Subject::Vm { qmp } => {
                let mut picture = self.picture(qmp).await?;
                self.plan_frozen(&mut picture);
                if command.chain == Chain::Flatten {
                    picture.flatten()?;
                    check_flat(&picture).await?;
                }
                for layers in &picture.disks {
                    let mut found = Vec::new();
                    for layer in layers {
                        found.push(self.plan_layer(&mut plan, layer, &named)?);
                    }
                    plan.disks.push(found);
                }
                let name = picture.name.clone();
                let target_qmp = command.target_qmp.clone();
                (Some(SourceVm { qmp: qmp.clone(), name, target_qmp, facts: None }), Some(picture))
            }
        };
        if command.target_format == TargetFormat::Qcow2 {
            self.want_qcow2(&mut plan)?;
        }
        check_names(&plan)?;
        let epoch = plan.images.iter().filter_map(|image| self.epoch_of(image)).max();
        let known = self.earlier_try(&command.to, &mut plan);
        let intent = SourceIntent {
            migration: match known {
                Some(migration) => migration,
                None => MigrationId(random_id()?),
            },
            peer: command.to.clone(),
            images: plan.images.clone(),
            vm,
            options: None,
            epoch: epoch.unwrap_or(Epoch(1)),
            started_unix_ms: unix_ms(),
            adopted: Vec::new(),
        };
        Ok((intent, plan, picture))
    }

    /// The epoch of an image that this host serves, or that QEMU has taken back.
    pub(super) fn epoch_of(&self, image: &SourceImage) -> Option<Epoch> {
        if let Some(entry) = self.registry.get(&image.name) {
            return Some(entry.record().epoch);
        }
        if self.base_generation(image).is_some() {
            return Some(Epoch(1));
        }
        self.released_at(image).map(|note| note.image.epoch)
    }

    /// What is known of an image that QEMU has taken back, and that will be adopted again.
    pub(super) fn released_at(&self, image: &SourceImage) -> Option<Released> {
        let known = self.registry.released.at(&image.path)?;
        (known.image.id == image.offer.id).then_some(known)
    }

    /// The generations of which the target may have a replica to begin with.
    pub(super) fn ancestors(&self, image: &SourceImage) -> Vec<Ancestor> {
        if image.offer.read_only {
            return self.base_generation(image).into_iter().collect();
        }
        let line = match self.registry.get(&image.name) {
            Some(entry) => entry.line().map(|line| line.lineage()),
            None => {
                self.released_at(image).and_then(|n| self.registry.released.lineage(n.image.id))
            }
        };
        line.map_or_else(Vec::new, |line| line.ancestors())
    }

    /// The generation of a base image whose content is known.
    fn base_generation(&self, image: &SourceImage) -> Option<Ancestor> {
        let known = self.digests.identity(&image.path).filter(|_| image.offer.read_only);
        known.filter(|(id, _)| *id == image.offer.id).map(|(_, generation)| generation)
    }

    /// A failed or cancelled migration of the same resident images to the same host: what its
    /// target still has is used again.
    fn earlier_try(&self, to: &str, plan: &mut Plan) -> Option<MigrationId> {
        let same = |intent: &SourceIntent| {
            intent.peer == to
                && intent.adopted.is_empty()
                && intent.images.len() == plan.images.len()
                && intent.images.iter().zip(&plan.images).all(|(old, new)| {
                    old.name == new.name
                        && old.offer.name == new.offer.name
                        && old.qcow2 == new.qcow2
                        && self.registry.get(&new.name).is_some_and(|entry| {
                            entry.record().id == old.offer.id && entry.record().len == old.offer.len
                        })
                })
        };
        let slot = self.sources.all().into_iter().find(|slot| {
            let ended = matches!(
                slot.board.read().state,
                MigrationState::Failed | MigrationState::Cancelled
            );
            ended && same(&slot.intent())
        })?;
        slot.is_kept().then_some(slot.board.migration)
    }

    fn plan_layer(
        &self,
        plan: &mut Plan,
        layer: &LayerPicture,
        named: &impl Fn(&str, Option<&str>, &str) -> String,
    ) -> ApiResult<usize> {
        let device = Some(layer.plan.qdev.clone());
        match &layer.place {
            Place::Resident(name) => {
                let entry = self.registry.get(name);
                let flat = entry.as_ref().is_some_and(|entry| entry.flat.is_some());
                let usual = if flat { raw_name(name) } else { usual_name(entry, name) };
                let target = named(name, device.as_deref(), &usual);
                let read_only = layer.plan.depth > 0;
                self.plan_resident(plan, name, target, device, read_only)
            }
            Place::Local(path) => self.plan_local(plan, layer, path, named),
        }
    }

    fn plan_resident(
        &self,
        plan: &mut Plan,
        name: &str,
        target: String,
        device: Option<String>,
        backing: bool,
    ) -> ApiResult<usize> {
        let what = format!("cannot move image '{name}'");
        let conflict = |why: String| Err(ApiError::new(ErrorKind::Conflict, what.clone(), why));
        let entry = self.image(name)?;
        let record = entry.record();
        let missing = entry.disk.missing_count();
        if missing > 0 {
            return conflict(format!("{missing} of its blocks have not arrived here yet"));
        }
        if record.state != CopyState::Owner {
            return conflict("this host does not own it".to_owned());
        }
        if let Some(migration) = record.migration {
            return conflict(format!("it takes part in migration {migration}"));
        }
        self.refuse_during_backup(&what, name)?;
        let read_only = record.read_only || backing;
        let offer = ImageOffer { id: record.id, name: target, len: record.len, read_only };
        let (name, path, base) = (name.to_owned(), record.path, Base::Empty);
        let (chain, given) = (Vec::new(), Vec::new());
        plan.images.push(SourceImage {
            name,
            offer,
            path,
            device,
            base,
            chain,
            given,
            qcow2: false,
        });
        plan.allocated.push(match &entry.flat {
            Some(_) => seen_bytes(&what, entry.disk.backing().as_ref())?,
            None => entry.file.allocated_bytes().map_err(|why| io_error(&what, why))?,
        });
        Ok(plan.images.len() - 1)
    }

    fn plan_local(
        &self,
        plan: &mut Plan,
        layer: &LayerPicture,
        path: &Path,
        named: &impl Fn(&str, Option<&str>, &str) -> String,
    ) -> ApiResult<usize> {
        let what = format!("cannot move disk {}", layer.plan.qdev);
        self.check_file(&what, path, false)?;
        let path = super::images::real_path(path).map_err(|why| io_error(&what, why))?;
        // A base image under several disks moves once.
        if let Some(known) = plan.images.iter().position(|image| image.path == path) {
            return Ok(known);
        }
        if !layer.chain.is_empty() {
            return self.plan_flat(&what, plan, layer, path, named);
        }
        let options = FileOptions { write: false, direct: false, export_len: None };
        let file = FileImage::open(&path, options).map_err(|why| io_error(&what, why))?;
        let backing = layer.plan.depth > 0;
        let len = if backing || layer.plan.format == "raw" {
            layer.plan.file_size
        } else {
            super::images::growable_len(layer.plan.file_size, layer.plan.size)
        };
        let read_only = backing || layer.plan.read_only;
        let known = self.registry.known_at(&path).filter(|_| !read_only);
        let name = match &known {
            Some((note, ..)) => note.image.name.clone(),
            None => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        };
        let device = (!backing).then(|| layer.plan.qdev.clone());
        let target = named(&name, device.as_deref(), &name);
        let base = self.digests.identity(&path).filter(|_| read_only).map(|(id, _)| id);
        // A copy of the same content under another name is another image.
        let base = base.filter(|id| plan.images.iter().all(|image| image.offer.id != *id));
        let id = match (known, base) {
            (Some((note, ..)), _) => note.image.id,
            (None, Some(id)) => id,
            (None, None) => ImageId(random_id()?),
        };
        let offer = ImageOffer { id, name: target, len, read_only };
        plan.allocated.push(file.allocated_bytes().map_err(|why| io_error(&what, why))?);
        let (base, chain, given) = (Base::Empty, Vec::new(), Vec::new());
        plan.images.push(SourceImage {
            name,
            offer,
            path,
            device,
            base,
            chain,
            given,
            qcow2: false,
        });
        Ok(plan.images.len() - 1)
    }

    /// Asks the target for room, and starts the loop that keeps a session with it.
    pub(super) async fn prepare_at_target(
        self: &Arc<Self>,
        mut intent: SourceIntent,
        plan: &Plan,
        pool: Option<&str>,
    ) -> ApiResult<(Arc<SourceSlot>, PathBuf)> {
        let what = format!("cannot prepare on {}", intent.peer);
        let images = intent.images.iter().zip(&plan.allocated).map(|(image, &allocated)| {
            let ImageOffer { id, name, len, read_only } = image.offer.clone();
            WantedImage { id, name, len, allocated, read_only }
        });
        let images: Vec<_> = images.collect();
        let digests = self.digests_there(&what, &intent, plan, pool).await?;
        let wants_qcow2 = intent.images.iter().any(|image| image.qcow2);
        let asked = self.ask_for_room(&intent, images, digests, pool).await;
        let (nbd_socket, bases) = asked.map_err(|why| match why.kind {
            // Only a qcow2 cannot be done without.
            NetErrorKind::Unknown if wants_qcow2 => {
                ApiError::new(ErrorKind::Unsupported, &what, TOO_OLD)
                    .hint("leave --target-format out, or upgrade the target")
            }
            _ => net_error(&what, &why),
        })?;
        if bases.len() != intent.images.len() {
            return Err(ApiError::new(ErrorKind::Peer, what, "the peer answered something else"));
        }
        let mut notices = Vec::new();
        for (image, base) in intent.images.iter_mut().zip(bases) {
            if let Base::Refused { why } = &base {
                let (name, peer) = (&image.offer.name, &intent.peer);
                let notice = format!("the replica of {name} on {peer} is not used: {why}");
                notices.push(format!("{notice}; everything is copied"));
            }
            if let Base::Replica { generation, .. } = base {
                let (notes, id) = (self.store.given(), image.offer.id);
                image.given = given::of(&notes, id, &intent.peer, generation);
            }
            image.base = base;
        }
        let migration = intent.migration;
        let peer = intent.peer.clone();
        match self.launch_source(intent)? {
            Ok((slot, _)) => {
                notices.into_iter().for_each(|notice| slot.board.notice(notice));
                Ok((slot, nbd_socket.into()))
            }
            Err(why) => {
                // Nobody will ever use what the target has just made.
                let _ = self.ask(&peer, &Request::Forget { migration }).await;
                Err(io_error(what, why))
            }
        }
    }

    /// Asks the target for room, and what it has already: its NBD socket, and what each image begins
    /// with. An older target is asked for room only.
    async fn ask_for_room(
        &self,
        intent: &SourceIntent,
        images: Vec<WantedImage>,
        digests: Vec<Option<ContentDigest>>,
        pool: Option<&str>,
    ) -> Result<(String, Vec<Base>), NetError> {
        let (migration, pool) = (intent.migration, pool.map(str::to_owned));
        let ancestors = intent.images.iter().map(|image| self.ancestors(image)).collect();
        let qcow2: Vec<bool> = intent.images.iter().map(|image| image.qcow2).collect();
        let bare = Request::Prepare { migration, pool: pool.clone(), images: images.clone() };
        let made = qcow2.contains(&true);
        let in_place = digests.iter().any(Option::is_some);
        let request = match (made, in_place) {
            (true, _) => {
                Request::PrepareQcow2 { migration, pool, images, ancestors, digests, qcow2 }
            }
            (false, true) => {
                Request::PrepareInPlace { migration, pool, images, ancestors, digests }
            }
            (false, false) => Request::PrepareReturn { migration, pool, images, ancestors },
        };
        let needed = made || in_place;
        let reply = match self.ask(&intent.peer, &request).await {
            Err(why) if why.kind == NetErrorKind::Unknown && !needed => {
                self.ask(&intent.peer, &bare).await
            }
            reply => reply,
        };
        match reply? {
            Reply::Prepared { nbd_socket, .. } => {
                Ok((nbd_socket, vec![Base::Empty; intent.images.len()]))
            }
            Reply::PreparedReturn { nbd_socket, bases, .. } => Ok((nbd_socket, bases)),
            _ => Ok((String::new(), Vec::new())),
        }
    }

    /// Asks a peer something outside any migration.
    ///
    /// # Errors
    /// When the peer is not configured, or why it could not be asked.
    pub(crate) async fn ask(&self, peer: &str, request: &Request) -> Result<Reply, NetError> {
        self.ask_within(ASK_TIMEOUT, peer, request).await
    }

    /// The same with another limit to its patience.
    pub(super) async fn ask_within(
        &self,
        limit: Duration,
        peer: &str,
        request: &Request,
    ) -> Result<Reply, NetError> {
        let local = |why: ApiError| NetError::new(NetErrorKind::Local, why.to_string());
        let settings = self.session_settings(peer).map_err(local)?;
        let (identity, address) = (&*settings.identity, &settings.address);
        requests::ask(identity, &settings.peer, address, request, limit).await
    }
}

fn check_names(plan: &Plan) -> ApiResult<()> {
    let mut seen: BTreeMap<&str, &str> = BTreeMap::new();
    for image in &plan.images {
        if let Some(other) = seen.insert(&image.offer.name, &image.name) {
            let why =
                format!("'{other}' and '{}' would both be '{}'", image.name, image.offer.name);
            return Err(ApiError::new(ErrorKind::Invalid, "cannot name the images", why)
                .hint("give one of them another name at the target with --name HERE=THERE"));
        }
    }
    Ok(())
}

/// The `-blockdev` values of each image's disk: those of a chain stand with its active image.
fn blockdev_lines(
    picture: &Picture,
    plan: &Plan,
    intent: &SourceIntent,
    socket: &Path,
) -> Vec<Vec<String>> {
    let mut lines = vec![Vec::new(); intent.images.len()];
    for (layers, images) in picture.disks.iter().zip(&plan.disks) {
        let attached: Vec<_> = layers
            .iter()
            .zip(images)
            .map(|(layer, &image)| {
                let name = intent.images[image].export().to_owned();
                let export = NbdExport {
                    socket: socket.to_owned(),
                    name: name.clone(),
                    reconnect_delay: RECONNECT_DELAY,
                };
                let plan = match intent.images[image].qcow2 {
                    true => layer.plan.directly_on(Path::new(&name)),
                    false => layer.plan.for_target(Path::new(&name)),
                };
                (plan, export)
            })
            .collect();
        if let Some(&active) = images.first() {
            lines[active] = blockdev::arguments(&attached);
        }
    }
    lines
}

/// The layers of a VM with the number of the image that each is in.
pub(super) fn layer_plans(picture: &Picture, plan: &Plan) -> ApiResult<Vec<(u16, String)>> {
    let mut found = Vec::new();
    for (layers, images) in picture.disks.iter().zip(&plan.disks) {
        for (layer, &image) in layers.iter().zip(images) {
            let text = serde_json::to_string(&layer.plan)
                .map_err(|why| io_error("cannot describe the vm's disks", why))?;
            found.push((image as u16, text));
        }
    }
    Ok(found)
}
