//! Answers to peers: they may open streams of migrations in which they take part, and ask for room
//! for images. What else they may ask is in [`requests`](super::requests).

use super::Agent;
use super::existing_copies::{ExistingCopy, check_space, intent_of};
use super::partials::owner_here;
use super::qcow2_checks::check_made;
use super::requests::Desk;
use super::rights::need_of_stream;
use super::room::{Bounded, check_counts};
use dray_api::{MigrationState, Refusal};
use dray_config::Peer;
use dray_files::unix_ms;
use dray_host::folder::intent::{Settings, TargetImageIntent, TargetIntent};
use dray_host::folder::log::{End, Folder, TARGET_INTENT};
use dray_host::migration::revive::may_come_back;
use dray_host::pool::{Pool, check_name};
use dray_host::record::CopyState;
use dray_host::refusals::{Answer, conflict, failed, of_path, unknown_peer};
use dray_host::registry::{Claimed, Entry};
use dray_host::replicas::undo_prepared;
use dray_migrate::guest;
use dray_migrate::receiver::TargetSlot;
use dray_net::requests;
use dray_net::{Incoming, Listener, NetError};
use dray_types::MigrationId;
use dray_wire::StreamKind;
use dray_wire::request::{Base, ComingImage, Fate, WantedImage};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::task::block_in_place;

/// How long an abandoned migration may take to go.
const WAY_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a peer that prepares may have sources asked because of it, one after the other.
const ASKING_LIMIT: Duration = Duration::from_secs(20);

impl Agent {
    pub(crate) async fn listen(self: Arc<Self>, listener: Listener) {
        let known = {
            let config = Arc::clone(&self.config);
            move |name: &str| config.peer(name).map(|peer| peer.name.clone())
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

    fn may_come_back(&self, incoming: &Incoming) -> bool {
        let known = incoming.hello.migration.filter(|id| self.targets.get(*id).is_none());
        known.is_some_and(|id| may_come_back(&self.store, id))
    }

    /// The image that was claimed here from a migration whose other end `peer` has, or may have.
    pub(super) fn claimed_from(&self, peer: &str, migration: MigrationId) -> Option<Claimed> {
        let claimed = self.registry.claimed_from(migration);
        claimed.filter(|claimed| claimed.peer.as_deref().is_none_or(|of| of == peer))
    }

    /// Why nothing is taken of this migration. What became of its images is for its other end alone.
    fn unknown(&self, peer: &str, migration: Option<MigrationId>) -> Refusal {
        match migration.and_then(|migration| self.claimed_from(peer, migration)) {
            Some(Claimed { name, epoch, peer: Some(_) }) => conflict(format!(
                "image '{name}' was claimed here and has epoch {} now: the migration is void",
                epoch.0
            )),
            // Of a claim whose folder could not say who had the other end.
            Some(_) => conflict("an image of it was claimed here: the migration is void"),
            None => conflict("no such migration is prepared here").hint("prepare it again"),
        }
    }

    async fn incoming(self: Arc<Self>, incoming: Incoming) {
        let (peer, kind) = (incoming.peer.clone(), incoming.kind);
        if let Err(why) = self.admit(&peer, need_of_stream(kind, incoming.hello.migration)) {
            tracing::info!(peer, stream = %kind, %why, "refused a peer's stream");
            incoming.refuse(why).await;
            return;
        }
        let handled = match kind {
            StreamKind::Request => match self.questions.begin(&peer, Bounded::Question) {
                Ok(_question) => requests::serve(incoming, &Desk(Arc::clone(&self))).await,
                Err(why) => {
                    incoming.refuse(why).await;
                    Ok(())
                }
            },
            StreamKind::Store => self.offer_store(incoming).await,
            StreamKind::Replica => match self.questions.begin(&peer, Bounded::Replica) {
                Ok(question) => match incoming.welcome(Vec::new()).await {
                    Ok(stream) => self.offer_replicas(stream, question),
                    Err(why) => Err(why),
                },
                Err(why) => {
                    incoming.refuse(why).await;
                    Ok(())
                }
            },
            StreamKind::Probe => self.be_measured(incoming).await,
            _ => match self.target_of(&incoming) {
                // The source tries again.
                None if self.may_come_back(&incoming) => Ok(()),
                None => {
                    let why = self.unknown(&peer, incoming.hello.migration);
                    incoming.refuse(why).await;
                    Ok(())
                }
                Some(slot) if kind == StreamKind::Memory => {
                    match incoming.welcome(Vec::new()).await {
                        Ok(stream) => guest::receiver::deliver(&self.config, &slot, stream).await,
                        Err(why) => Err(why),
                    }
                }
                Some(slot) => slot.attach(incoming, self.control_settings()).await,
            },
        };
        if let Err(why) = handled {
            tracing::warn!(peer, stream = %kind, %why, "a peer's stream ended with an error");
        }
    }

    /// The backup store, if this host has one.
    async fn offer_store(&self, incoming: Incoming) -> Result<(), NetError> {
        let known = self.config.peer(&incoming.peer);
        let others = known.map_or_else(Vec::new, |peer| peer.reads_store_of.clone());
        match (&self.offer, self.questions.begin(&incoming.peer, Bounded::Store)) {
            (Some(offer), Ok(question)) => {
                let stream = incoming.welcome(Vec::new()).await?;
                offer.serve(stream, others, question)
            }
            (Some(_), Err(why)) => {
                incoming.refuse(why).await;
                Ok(())
            }
            (None, _) => {
                let here = &self.config.name;
                let why = conflict(format!("{here} offers no backup store"));
                let hint = format!("add a [backup_store] with a path to the dray.toml of {here}");
                incoming.refuse(why.hint(hint)).await;
                Ok(())
            }
        }
    }

    /// Partial images that a migration left under these names go, if its source says that it is over, or if
    /// it is of the same peer and was abandoned.
    async fn make_way(&self, peer: &Peer, migration: MigrationId, images: &[ComingImage]) {
        let mut seen = BTreeSet::new();
        let begun = Instant::now();
        for coming in images {
            let Some(entry) = self.registry.get(&coming.image.name) else { continue };
            let record = entry.record();
            // Who may not use the pool that the name is taken in never gets it.
            if !self.config.is_open_to(peer, &record.path) || begun.elapsed() > ASKING_LIMIT {
                continue;
            }
            let old = record.migration.filter(|&old| old != migration);
            let Some(slot) = old.and_then(|old| self.targets.get(old)) else { continue };
            // Each is asked for once, however many names it holds.
            if record.state != CopyState::Incoming || !seen.insert(slot.board.migration) {
                continue;
            }
            // A restart knows nothing of a cancel, and who was away has not heard of it.
            let told = self.ask_source(&slot).await;
            let goes_on = matches!(told, Some(Ok(Fate::Live | Fate::HandedOver)));
            if goes_on
                || slot.is_forgotten()
                || !slot.intent().peer.eq_ignore_ascii_case(&peer.name)
            {
                continue;
            }
            let (answer, gone) = oneshot::channel();
            slot.send(dray_migrate::receiver::Input::GiveWay(answer));
            // What is still there after this is refused with its name, as any other.
            if matches!(tokio::time::timeout(WAY_TIMEOUT, gone).await, Ok(Ok(true))) {
                self.targets.remove(slot.board.migration);
            }
        }
    }

    /// Makes room for images; returns what each begins with. Nobody else hears of it, and nothing is made,
    /// before it is certain that the peer may ask for this.
    pub(super) async fn make_room(
        self: &Arc<Self>,
        peer: &str,
        migration: MigrationId,
        pool: Option<&str>,
        images: &[ComingImage],
    ) -> Answer<Vec<Base>> {
        let known = self.check_wanted(peer, pool, images)?;
        self.make_way(&known, migration, images).await;
        // One after the other: two would both take the last place.
        let _alone = self.making_room.lock().await;
        block_in_place(|| self.prepare_for(peer, migration, pool, images))
    }

    /// Whether a peer may ask for room for these images at all, as far as its question alone tells.
    fn check_wanted(
        &self,
        peer: &str,
        pool: Option<&str>,
        images: &[ComingImage],
    ) -> Answer<Arc<Peer>> {
        check_counts(images)?;
        let known = self.config.peer(peer).ok_or_else(unknown_peer)?;
        self.config.pool_for(&known, pool).map_err(of_path)?;
        let fits = images.iter().try_for_each(|coming| check_name(&coming.image.name));
        fits.map_err(|why| of_path(why.hint("choose another name with --name HERE=THERE")))?;
        Ok(known)
    }

    fn prepare_for(
        self: &Arc<Self>,
        peer: &str,
        migration: MigrationId,
        pool: Option<&str>,
        images: &[ComingImage],
    ) -> Answer<Vec<Base>> {
        if let Some(slot) = self.targets.get(migration).filter(|slot| !slot.is_forgotten()) {
            return self.prepare_again(peer, pool, images, &slot);
        }
        self.check_new(migration)?;
        let known = self.config.peer(peer).ok_or_else(unknown_peer)?;
        let pool = self.config.pool_for(&known, pool).map_err(of_path)?;
        images.iter().try_for_each(|coming| self.refuse_held(peer, &coming.image))?;
        images.iter().try_for_each(|coming| self.refuse_twice(&coming.image, images))?;
        self.show_newest(peer);
        self.check_load(peer, images)?;
        let owners = images.iter().map(owner_here).collect::<Answer<Vec<_>>>()?;
        let found = self.found_for((&known, pool), images)?;
        let beside = check_made(&self.registry, pool, images)?;
        check_space(pool, images, &found, beside)?;
        let intents = images.iter().zip(&found);
        let intents = intents.map(|(coming, found)| intent_of(pool, migration, coming, found));
        let intent = TargetIntent {
            migration,
            peer: peer.to_owned(),
            images: intents.collect::<Result<_, _>>()?,
            settings: Settings::default(),
            guest: None,
            qemu: None,
            started_unix_ms: unix_ms(),
        };
        self.make_partials(&intent, images, (&found, &owners))?;
        self.begin_prepared(intent)
    }

    /// The same migration once more: the answer is as before, if the question is.
    fn prepare_again(
        &self,
        peer: &str,
        pool: Option<&str>,
        images: &[ComingImage],
        slot: &TargetSlot,
    ) -> Answer<Vec<Base>> {
        let intent = slot.intent();
        let earlier = intent.images.iter().map(|image| image.offer.id);
        if intent.peer != peer || !earlier.eq(images.iter().map(|coming| coming.image.id)) {
            return Err(conflict("another migration has this id"));
        }
        if let Some(wanted) = pool {
            self.check_same_pool(peer, wanted, &intent)?;
        }
        slot.prepared_again();
        self.check_same_bases(images, &intent)?;
        Ok(intent.images.iter().map(TargetImageIntent::base).collect())
    }

    /// Refuses an id that something else has here: a migration away, or what is left of one to here.
    fn check_new(&self, migration: MigrationId) -> Answer<()> {
        let folder = Folder::of(&self.store, migration);
        // Its target knows the id before anything of it is durable here.
        let goes = self.preparing.contains(migration) || self.sources.get(migration).is_some();
        if goes || folder.holds(End::Source).map_err(failed)? {
            return Err(conflict("a migration away from that host has this id"));
        }
        let known = folder
            .file(TARGET_INTENT)
            .exists()
            .and_then(|intent| Ok(intent || folder.is_void()? || folder.lacks_intent()?));
        if known.map_err(failed)? {
            // Whatever is in it was not understood at the start: it may be ownership.
            return Err(conflict("the migration's folder at the target cannot be read")
                .hint("see the target agent's log"));
        }
        Ok(())
    }

    /// Begins a migration to here for whose images there is room. What was made for one that cannot begin goes.
    fn begin_prepared(self: &Arc<Self>, intent: TargetIntent) -> Answer<Vec<Base>> {
        let migration = intent.migration;
        let name = |image: &TargetImageIntent| image.name_here().to_owned();
        let names: Vec<_> = intent.images.iter().map(name).collect();
        let bases = intent.images.iter().map(TargetImageIntent::base).collect();
        let Err(why) = self.begin_target(intent) else { return Ok(bases) };
        self.targets.remove(migration);
        let folder = Folder::of(&self.store, migration);
        if let Err(why) = undo_prepared(&self.registry, &folder, &names) {
            tracing::warn!(%migration, %why,
                "cannot remove the files that were made for a migration");
        }
        Err(failed(why))
    }

    /// What an earlier try has sent stays where it is, so the next one cannot go elsewhere.
    fn check_same_pool(&self, peer: &str, wanted: &str, earlier: &TargetIntent) -> Answer<()> {
        let known = self.config.peer(peer).ok_or_else(unknown_peer)?;
        let pool = self.config.pool_for(&known, Some(wanted)).map_err(of_path)?;
        if earlier.images.iter().all(|image| pool.holds(&image.path)) {
            return Ok(());
        }
        let why = format!("the blocks of an earlier attempt are not in pool '{wanted}'");
        Err(conflict(why)
            .hint("name the same pool again, or choose other names with --name HERE=THERE"))
    }

    /// To backups, replicas and whoever else asks by id, two images with one id are the same. A peer says which image
    /// it brings, and may say what it likes (I7). Base images may lie here more than once.
    fn refuse_twice(&self, image: &WantedImage, images: &[ComingImage]) -> Answer<()> {
        if image.read_only {
            return Ok(());
        }
        let is_it = |entry: &Arc<Entry>| {
            let record = entry.record();
            record.id == image.id && record.state != CopyState::Replica
        };
        let coming = images.iter().filter(|coming| coming.image.id == image.id).count();
        if coming == 1 && !self.registry.all().iter().any(is_it) {
            return Ok(());
        }
        let here = &self.config.name;
        Err(conflict("an image with that id is on this host already").hint(format!(
            "`dray images` on {here} shows it; if it was prepared and is not wanted, `dray cancel` at its source \
             removes it"
        )))
    }

    /// A name that a migration to here holds. Its own source learns which that is, and what takes it back;
    /// others, that the name is taken.
    pub(super) fn refuse_held(&self, peer: &str, image: &WantedImage) -> Answer<()> {
        let name = &image.name;
        let Some(entry) = self.registry.get(name) else { return Ok(()) };
        let record = entry.record();
        let held = record.migration.filter(|_| record.state == CopyState::Incoming);
        let Some(slot) = held.and_then(|held| self.targets.get(held)) else { return Ok(()) };
        let (id, from) = (slot.board.migration, slot.intent().peer);
        let other = "choose another name";
        if from != peer {
            let here = &self.config.name;
            return Err(match image.read_only {
                true => conflict(format!("base image '{name}' is on its way here with another migration"))
                    .hint(format!(
                        "prepare this migration again when the image has arrived; `dray status` \
                         on {here} shows it"
                    )),
                false => conflict(format!(
                    "an image named '{name}' exists here already: a migration from another host has it"
                ))
                .hint(format!("`dray status` on {here} shows it; wait for its end, or {other}")),
            });
        }
        let prepared = slot.board.read().state == MigrationState::Prepared;
        Err(match (image.read_only, prepared) {
            (true, _) => conflict(format!(
                "base image '{name}' is on its way here with another migration, {id} from {from}"
            ))
            .hint(format!(
                "prepare this migration again when the image has arrived, or give `dray cancel \
                 {id}` on {from}"
            )),
            (false, true) => conflict(format!(
                "an image named '{name}' exists here already: migration {id} from {from} is prepared for it"
            ))
            .hint(format!("give `dray cancel {id}` on {from}, or {other}")),
            (false, false) => conflict(format!(
                "an image named '{name}' exists here already: it is on its way with migration {id} from {from}"
            ))
            .hint(format!("give `dray cancel {id}` on {from}, or {other}")),
        })
    }

    /// What lies here of the images that come.
    fn found_for(
        &self,
        (peer, pool): (&Peer, &Pool),
        images: &[ComingImage],
    ) -> Answer<Vec<ExistingCopy>> {
        let find = |coming: &ComingImage| match &coming.digest {
            Some(digest) => {
                self.base_in_place(pool, &coming.image, digest).map(ExistingCopy::InPlace)
            }
            None => self.replica_for((peer, pool), coming),
        };
        images.iter().map(find).collect()
    }

    /// A replica of an image that comes.
    fn replica_for(
        &self,
        (peer, pool): (&Peer, &Pool),
        coming: &ComingImage,
    ) -> Answer<ExistingCopy> {
        let wanted = &coming.image;
        let Some(entry) = self.registry.get(&wanted.name) else { return Ok(ExistingCopy::Nothing) };
        let record = entry.record();
        // Anything else under the name is refused with it, as ever.
        // What is left on a device is not gone on from.
        if record.state != CopyState::Replica || record.id != wanted.id || record.device {
            return Ok(ExistingCopy::Nothing);
        }
        // Nor is what lies where the peer may not go: the name is another's.
        if !self.config.is_open_to(peer, &record.path) {
            return Ok(ExistingCopy::Nothing);
        }
        if record.migration.is_some() {
            let name = &wanted.name;
            let why =
                format!("this host has not finished the migration in which image '{name}' left it");
            return Err(conflict(why));
        }
        Ok(match record.base_for(wanted, &coming.ancestors, pool) {
            Ok(note) => ExistingCopy::Usable(entry, note),
            Err(why) => ExistingCopy::Useless(entry, why.to_string()),
        })
    }
}
