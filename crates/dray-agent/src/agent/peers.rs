//! What peers may do here: open streams of migrations they take part in, and ask a few things.

use super::Agent;
use crate::config::Pool;
use crate::migration::intent::{TargetImageIntent, TargetIntent};
use crate::migration::log::Folder;
use crate::migration::messages::Settings;
use crate::migration::source::unix_ms;
use crate::migration::target::{INTENT, TargetSlot};
use crate::net::requests::{self, RequestHandler};
use crate::net::{self, Incoming, Listener};
use crate::registry::{CopyState, ImageRecord, Place};
use crate::vm;
use dray_image::{FileImage, FileOptions, ImageNames};
use dray_types::{Epoch, MigrationId};
use dray_wire::request::{Reply, Request, WantedImage};
use dray_wire::{ImageOffer, StreamKind};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// How long an abandoned migration may take to go.
const WAY_TIMEOUT: Duration = Duration::from_secs(5);
/// Permission bits of a file that arrived: its owner's only.
const MODE: u32 = 0o600;

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

    async fn incoming(self: Arc<Self>, incoming: Incoming) {
        let (peer, kind) = (incoming.peer.clone(), incoming.kind);
        let handled = match kind {
            StreamKind::Request => requests::serve(incoming, &self).await,
            _ => match self.target_of(&incoming) {
                None => {
                    incoming.refuse("no such migration is prepared here; prepare it again").await;
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

    /// Partial images that an abandoned migration of the same peer left under these names go.
    async fn make_way(&self, peer: &str, migration: MigrationId, images: &[WantedImage]) {
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

    fn prepare_for(
        self: &Arc<Self>,
        peer: &str,
        migration: MigrationId,
        pool: Option<&str>,
        images: &[WantedImage],
    ) -> Result<Reply, String> {
        let exports = images.iter().map(|image| image.name.clone()).collect();
        let answer = Reply::Prepared {
            nbd_socket: self.nbd_socket().to_string_lossy().into_owned(),
            exports,
        };
        if let Some(slot) = self.targets.get(migration).filter(|slot| !slot.is_forgotten()) {
            let same = slot.intent().peer == peer
                && slot
                    .intent()
                    .images
                    .iter()
                    .map(|image| image.offer.id)
                    .eq(images.iter().map(|i| i.id));
            return if same { Ok(answer) } else { Err("another migration has this id".to_owned()) };
        }
        let known = self.config.peer(peer).ok_or("the peer is not configured here")?;
        let pool = self.config.pool_for(known, pool).map_err(|why| why.to_string())?;
        check_space(pool, images)?;
        let intent = TargetIntent {
            migration,
            peer: peer.to_owned(),
            images: images.iter().map(|image| intent_of(pool, image)).collect::<Result<_, _>>()?,
            settings: Settings::default(),
            guest: None,
            started_unix_ms: unix_ms(),
        };
        let folder = Folder::of(&self.store, migration);
        if folder.file(INTENT).exists() {
            // Whatever is in it was not understood at the start: it may be ownership.
            return Err("its folder there cannot be read; see the target agent's log".to_owned());
        }
        self.make_partials(&intent, images)?;
        let names: Vec<_> = intent.images.iter().map(|image| image.offer.name.clone()).collect();
        match self.launch_target(intent) {
            Ok(_) => Ok(answer),
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

    fn make_partials(&self, intent: &TargetIntent, images: &[WantedImage]) -> Result<(), String> {
        let mut made = Vec::new();
        let result = intent.images.iter().zip(images).try_for_each(|(image, wanted)| {
            self.make_partial(intent.migration, image, wanted)?;
            made.push(image.offer.name.clone());
            Ok(())
        });
        if result.is_err() {
            for name in made {
                self.remove_partial(&name);
            }
        }
        result
    }

    fn make_partial(
        &self,
        migration: MigrationId,
        image: &TargetImageIntent,
        wanted: &WantedImage,
    ) -> Result<(), String> {
        let text = |why: dray_image::Error| why.to_string();
        let name = &image.offer.name;
        if self.registry.get(name).is_some() {
            return Err(format!(
                "an image named '{name}' exists here already; choose another name"
            ));
        }
        let names = ImageNames::of(&image.path).map_err(text)?;
        let file = names.create_partial(0).map_err(text)?;
        let direct = self.registry.is_direct(&image.path);
        let options = FileOptions { write: true, direct, export_len: Some(wanted.len) };
        let opened = FileImage::from_file(file, &names.partial(), options).map_err(text);
        let record = ImageRecord {
            name: name.clone(),
            id: wanted.id,
            path: image.path.clone(),
            place: Place::Partial,
            mode: MODE,
            len: wanted.len,
            growable: false,
            read_only: wanted.read_only,
            format: None,
            state: CopyState::Incoming,
            epoch: Epoch(0),
            migration: Some(migration),
            adopted: None,
        };
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
        let removed = ImageNames::of(&entry.record().path)
            .and_then(|names| names.remove_partial())
            .map_err(std::io::Error::other)
            .and_then(|()| self.registry.forget(name));
        if let Err(why) = removed {
            tracing::warn!(image = name, %why, "cannot remove a partial image");
        }
    }
}

fn intent_of(pool: &Pool, image: &WantedImage) -> Result<TargetImageIntent, String> {
    let path = pool.image_path(&image.name).map_err(|why| why.to_string())?;
    if path.exists() {
        return Err(format!("{} exists already; choose another name or pool", path.display()));
    }
    let offer = ImageOffer {
        id: image.id,
        name: image.name.clone(),
        len: image.len,
        read_only: image.read_only,
    };
    Ok(TargetImageIntent { offer, path, zeroed: true })
}

fn check_space(pool: &Pool, images: &[WantedImage]) -> Result<(), String> {
    let wanted: u64 = images.iter().map(|image| image.allocated).sum();
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

impl RequestHandler for Arc<Agent> {
    async fn answer(&self, peer: &str, request: Request) -> Reply {
        match request {
            Request::Identify => Reply::Identity {
                agent: net::AGENT.to_owned(),
                pools: self.config.peer(peer).map(|peer| peer.pools.clone()).unwrap_or_default(),
            },
            Request::Prepare { migration, pool, images } => {
                self.make_way(peer, migration, &images).await;
                let prepared = self.prepare_for(peer, migration, pool.as_deref(), &images);
                prepared.unwrap_or_else(|why| Reply::Refused { why })
            }
            Request::Forget { migration } => {
                if let Some(slot) = self.targets.get(migration)
                    && slot.intent().peer == peer
                {
                    slot.send(crate::migration::target::Input::Forget);
                }
                Reply::Done
            }
        }
    }
}
