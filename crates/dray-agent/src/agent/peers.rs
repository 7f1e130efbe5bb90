//! What peers may do here: open streams of migrations they take part in, and have room made for images.
//! What else they may ask is in [`requests`](super::requests).

use super::Agent;
use super::found::{Found, Here, check_space, intent_of};
use super::made::{check_made, is_made};
use crate::config::{Pool, PoolKind};
use crate::migration::intent::{TargetImageIntent, TargetIntent};
use crate::migration::log::Folder;
use crate::migration::messages::Settings;
use crate::migration::source::unix_ms;
use crate::migration::target::{INTENT, TargetSlot};
use crate::net::requests;
use crate::net::{Incoming, Listener, NetError};
use crate::registry::{CopyState, ImageRecord, Place};
use crate::vm;
use dray_image::{FileImage, FileOptions, ImageNames};
use dray_types::{Ancestor, Epoch, MigrationId};
use dray_wire::StreamKind;
use dray_wire::request::{Base, WantedImage};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// How long an abandoned migration may take to go.
const WAY_TIMEOUT: Duration = Duration::from_secs(5);

impl Agent {
    pub(super) async fn listen(self: Arc<Self>, listener: Listener) {
        let known = {
            let config = Arc::clone(&self.config);
            move |name: &str| config.peer(name).is_some()
        };
        let identity = (*self.identity).clone();
        let handle = move |incoming| {
            let agent = Arc::clone(&self);
            async move { agent.incoming(incoming).await }
        };
        listener.run(identity, known, handle).await;
    }

    fn target_of(&self, incoming: &Incoming) -> Option<Arc<TargetSlot>> {
        let slot = self.targets.get(incoming.hello.migration?)?;
        (!slot.is_forgotten()).then_some(slot)
    }

    /// Why nothing is taken of this migration.
    fn unknown(&self, migration: Option<MigrationId>) -> String {
        match migration.and_then(|migration| self.registry.claimed_from(migration)) {
            Some((name, epoch)) => format!(
                "image '{name}' was claimed here and has epoch {} now: the migration is void",
                epoch.0
            ),
            None => "no such migration is prepared here; prepare it again".to_owned(),
        }
    }

    async fn incoming(self: Arc<Self>, incoming: Incoming) {
        let (peer, kind) = (incoming.peer.clone(), incoming.kind);
        let handled = match kind {
            StreamKind::Request => requests::serve(incoming, &self).await,
            StreamKind::Store => self.offer_store(incoming).await,
            StreamKind::Replica => match incoming.welcome(Vec::new()).await {
                Ok(stream) => self.offer_replicas(stream),
                Err(why) => Err(why),
            },
            _ => match self.target_of(&incoming) {
                None => {
                    let why = self.unknown(incoming.hello.migration);
                    incoming.refuse(why).await;
                    Ok(())
                }
                Some(slot) if kind == StreamKind::Memory => {
                    if slot.intent().peer != peer {
                        incoming.refuse("the migration belongs to another peer").await;
                        return;
                    }
                    match incoming.welcome(Vec::new()).await {
                        Ok(stream) => vm::target::deliver(&self.config, &slot, stream).await,
                        Err(why) => Err(why),
                    }
                }
                Some(slot) => slot.attach(incoming, self.control_settings()).await,
            },
        };
        if let Err(why) = handled {
            tracing::warn!(peer, ?kind, %why, "a peer's stream ended badly");
        }
    }

    /// The backup store, for those who may use it.
    async fn offer_store(&self, incoming: Incoming) -> Result<(), NetError> {
        let offered = self.config.backup_store.as_ref();
        match offered.filter(|store| store.peers.contains(&incoming.peer)) {
            Some(store) => {
                let stream = incoming.welcome(Vec::new()).await?;
                crate::backup::offer::serve(stream, &store.path)
            }
            None => {
                incoming.refuse("there is no backup store here that this host may use").await;
                Ok(())
            }
        }
    }

    /// Partial images that an abandoned migration of the same peer left under these names go.
    pub(super) async fn make_way(
        &self,
        peer: &str,
        migration: MigrationId,
        images: &[WantedImage],
    ) {
        for image in images {
            let Some(entry) = self.registry.get(&image.name) else { continue };
            let record = entry.record();
            let old = record.migration.filter(|&old| old != migration);
            let Some(slot) = old.and_then(|old| self.targets.get(old)) else { continue };
            if record.state != CopyState::Incoming || slot.intent().peer != peer {
                continue;
            }
            let (answer, gone) = oneshot::channel();
            slot.send(crate::migration::target::Input::GiveWay(answer));
            // What is still there after this is refused with its name, as any other.
            if matches!(tokio::time::timeout(WAY_TIMEOUT, gone).await, Ok(Ok(true))) {
                self.targets.remove(slot.board.migration);
            }
        }
    }

    /// Makes room for images; returns what each begins with.
    pub(super) fn prepare_for(
        self: &Arc<Self>,
        peer: &str,
        migration: MigrationId,
        pool: Option<&str>,
        images: &[WantedImage],
        here: Here,
    ) -> Result<Vec<Base>, String> {
        if !here.fits(images.len()) {
            return Err("the request names other images than lines".to_owned());
        }
        if let Some(slot) = self.targets.get(migration).filter(|slot| !slot.is_forgotten()) {
            let same = slot.intent().peer == peer
                && slot
                    .intent()
                    .images
                    .iter()
                    .map(|image| image.offer.id)
                    .eq(images.iter().map(|i| i.id));
            if let Some(wanted) = pool.filter(|_| same) {
                self.check_same_pool(peer, wanted, &slot.intent())?;
            }
            let bases = || slot.intent().images.iter().map(TargetImageIntent::base).collect();
            return match same {
                false => Err("another migration has this id".to_owned()),
                true => self.check_same_bases(&here, &slot.intent()).map(|()| bases()),
            };
        }
        let known = self.config.peer(peer).ok_or("the peer is not configured here")?;
        let pool = self.config.pool_for(known, pool).map_err(|why| why.to_string())?;
        let found = self.found_for(pool, images, &here)?;
        let reused = |found: &Found| match found {
            Found::Usable(entry, _) => entry.file.allocated_bytes().unwrap_or(0),
            _ => 0,
        };
        let beside = check_made(&self.registry, pool, images, here.made)?;
        if pool.kind == PoolKind::Files {
            let comes = |(image, found): (&WantedImage, &Found)| {
                (!matches!(found, Found::InPlace(_))).then_some(image.allocated)
            };
            let wanted = images.iter().zip(&found).filter_map(comes).sum::<u64>();
            check_space(pool, wanted, beside, found.iter().map(reused).sum())?;
        }
        let intents = images.iter().zip(&found).zip(is_made(here.made, images.len()));
        let intents = intents.map(|((image, found), qcow2)| {
            Ok::<_, String>(TargetImageIntent {
                qcow2,
                ..intent_of(pool, migration, image, found)?
            })
        });
        let intent = TargetIntent {
            migration,
            peer: peer.to_owned(),
            images: intents.collect::<Result<_, _>>()?,
            settings: Settings::default(),
            guest: None,
            started_unix_ms: unix_ms(),
        };
        let folder = Folder::of(&self.store, migration);
        if folder.file(INTENT).exists() || folder.is_void() {
            // Whatever is in it was not understood at the start: it may be ownership.
            return Err("its folder there cannot be read; see the target agent's log".to_owned());
        }
        self.make_partials(&intent, images, &found)?;
        let name = |image: &TargetImageIntent| image.name_here().to_owned();
        let names: Vec<_> = intent.images.iter().map(name).collect();
        let bases = intent.images.iter().map(TargetImageIntent::base).collect();
        match self.begin_target(intent) {
            Ok(()) => Ok(bases),
            Err(why) => {
                self.targets.remove(migration);
                names.iter().for_each(|name| self.remove_partial(name));
                if let Err(why) = folder.remove() {
                    tracing::warn!(%migration, %why, "cannot remove a migration's folder");
                }
                Err(why.to_string())
            }
        }
    }

    /// What an earlier try has sent stays where it is, so the next one cannot go elsewhere.
    fn check_same_pool(
        &self,
        peer: &str,
        wanted: &str,
        earlier: &TargetIntent,
    ) -> Result<(), String> {
        let known = self.config.peer(peer).ok_or("the peer is not configured here")?;
        let pool = self.config.pool_for(known, Some(wanted)).map_err(|why| why.to_string())?;
        if earlier.images.iter().all(|image| pool.holds(&image.path)) {
            return Ok(());
        }
        Err(format!(
            "what an earlier try has sent is not in pool '{wanted}'; name the same pool again, or \
             other names with --name HERE=THERE"
        ))
    }

    /// What lies here of the images that come.
    fn found_for(
        &self,
        pool: &Pool,
        images: &[WantedImage],
        here: &Here,
    ) -> Result<Vec<Found>, String> {
        let mut found = self.replicas_for(pool, images, here.ancestors)?;
        let digests = here.digests.unwrap_or_default();
        for ((image, digest), found) in images.iter().zip(digests).zip(&mut found) {
            if let Some(digest) = digest {
                *found = Found::InPlace(self.base_in_place(pool, image, digest)?);
            }
        }
        Ok(found)
    }

    /// Replicas of the images that come.
    fn replicas_for(
        &self,
        pool: &Pool,
        images: &[WantedImage],
        ancestors: Option<&[Vec<Ancestor>]>,
    ) -> Result<Vec<Found>, String> {
        let Some(ancestors) = ancestors else { return Ok(vec![Found::Nothing; images.len()]) };
        let find = |(wanted, ancestors): (&WantedImage, &Vec<Ancestor>)| {
            let Some(entry) = self.registry.get(&wanted.name) else { return Ok(Found::Nothing) };
            let record = entry.record();
            // Anything else under the name is refused with it, as ever.
            // What is left on a device is not gone on from.
            if record.state != CopyState::Replica || record.id != wanted.id || record.device {
                return Ok(Found::Nothing);
            }
            if record.migration.is_some() {
                let name = &wanted.name;
                return Err(format!(
                    "the migration that image '{name}' left with is not over here"
                ));
            }
            Ok(match record.base_for(wanted, ancestors, pool) {
                Ok(note) => Found::Usable(entry, note),
                Err(why) => Found::Useless(entry, why),
            })
        };
        images.iter().zip(ancestors).map(find).collect()
    }

    fn make_partials(
        &self,
        intent: &TargetIntent,
        images: &[WantedImage],
        found: &[Found],
    ) -> Result<(), String> {
        let mut made = Vec::new();
        let parts = intent.images.iter().zip(images).zip(found);
        let result = parts.into_iter().try_for_each(|((image, wanted), found)| {
            match found {
                Found::Usable(entry, _) => {
                    // Noted first: a failure half-way is undone like the rest.
                    made.push(image.offer.name.clone());
                    self.registry
                        .begin_return(entry, intent.migration)
                        .map_err(|why| why.to_string())?;
                    return Ok(());
                }
                Found::Useless(entry, why) => {
                    let name = &image.offer.name;
                    tracing::info!(image = name, why, "a replica is not used");
                    self.registry.set_aside(entry).map_err(|why| why.to_string())?;
                }
                Found::InPlace(lying) => {
                    self.use_in_place(intent.migration, wanted, lying)?;
                    made.push(image.name_here().to_owned());
                    return Ok(());
                }
                Found::Nothing => {}
            }
            self.make_partial(intent.migration, image, wanted)?;
            made.push(image.offer.name.clone());
            Ok::<(), String>(())
        });
        if result.is_err() {
            for name in made {
                self.remove_partial(&name);
            }
        }
        result
    }

    /// The NBD socket of this host, and the images' names as its exports.
    pub(super) fn exports(&self, images: &[WantedImage]) -> (String, Vec<String>) {
        let socket = self.nbd_socket().to_string_lossy().into_owned();
        (socket, images.iter().map(|image| image.name.clone()).collect())
    }

    fn make_partial(
        &self,
        migration: MigrationId,
        image: &TargetImageIntent,
        wanted: &WantedImage,
    ) -> Result<(), String> {
        let text = |why: dray_image::Error| why.to_string();
        let name = &image.offer.name;
        if let Some(entry) = self.registry.get(name) {
            if wanted.read_only && entry.record().state == CopyState::Incoming {
                return Err(format!(
                    "base image '{name}' is on its way here with another migration; prepare this one \
                     again when it has arrived"
                ));
            }
            return Err(format!(
                "an image named '{name}' exists here already; choose another name"
            ));
        }
        let device = !image.zeroed;
        let record = ImageRecord {
            place: Place::Partial,
            device,
            read_only: wanted.read_only,
            state: CopyState::Incoming,
            epoch: Epoch(0),
            migration: Some(migration),
            ..ImageRecord::owned(name.clone(), wanted.id, image.path.clone(), wanted.len)
        };
        if device {
            return self.take_device(record);
        }
        let names = ImageNames::of(&image.path).map_err(text)?;
        let file = names.create_partial(0).map_err(text)?;
        let direct = self.registry.is_direct(&image.path);
        let options = FileOptions { write: true, direct, export_len: Some(wanted.len) };
        let opened = FileImage::from_file(file, &names.partial(), options).map_err(text);
        let added = opened.and_then(|file| {
            self.registry.add(record, Arc::new(file)).map_err(|why| why.to_string())
        });
        if added.is_err() {
            names.remove_partial().map_err(text)?;
        }
        added.map(drop)
    }

    fn remove_partial(&self, name: &str) {
        let Some(entry) = self.registry.get(name) else { return };
        let removed = if entry.record().replica.is_some() {
            self.registry.end_return(&entry, &[]).map(drop)
        } else {
            self.registry.remove_partial(&entry)
        };
        if let Err(why) = removed {
            tracing::warn!(image = name, %why, "cannot remove a partial image");
        }
    }
}
