//! The questions of peers outside migrations, and the answers to them.

use super::Agent;
use super::rights::need_of_request;
use super::room::{Bounded, Turn};
use dray_api::MigrationState;
use dray_config::{Peer, Right};
use dray_files::unix_ms;
use dray_host::folder::intent::GuestFacts;
use dray_host::pool::Pool;
use dray_host::pool::PoolKind;
use dray_host::refusals::{Answer, absent, conflict, failed, invalid, of_path, unknown_peer};
use dray_migrate::guest;
use dray_net::requests::RequestHandler;
use dray_provider::{catalogues, seed};
use dray_types::{Endpoint, ErrorKind, MigrationId, Refusal};
use dray_wire::control::MAX_IMAGES;
use dray_wire::request::{Base, Reply, Request, SeedImage, Seeding, Surveyed};
use std::sync::Arc;

impl Agent {
    /// Images are read from backups before they come.
    fn seed_for(
        &self,
        peer: &str,
        number: u64,
        pool: Option<&str>,
        images: Vec<SeedImage>,
        link: Option<u64>,
    ) -> Answer<Vec<Seeding>> {
        let known = self.config.peer(peer).ok_or_else(unknown_peer)?;
        let pool = self.config.pool_for(&known, pool).map_err(of_path)?;
        if pool.kind != PoolKind::Files {
            let why = "images on devices cannot begin with a backup".to_owned();
            return Ok(vec![Seeding::Nothing { why }; images.len()]);
        }
        if images.len() > MAX_IMAGES {
            return Err(invalid(format!("more than {MAX_IMAGES} images at once")));
        }
        let ask = |image| self.seeds.ask(number, self.seed_parts((&known, pool), image, link));
        images.into_iter().map(ask).collect::<Result<_, _>>().map_err(failed)
    }

    /// What images would begin with here, and how many bytes the index of contents of this host covers for this peer.
    async fn answer_survey(
        self: &Arc<Self>,
        peer: &str,
        number: Option<u64>,
        pool: Option<String>,
        images: Vec<SeedImage>,
        backups: bool,
    ) -> Answer<(Vec<Surveyed>, u64)> {
        let reuses = self.config.peer(peer).is_some_and(|known| known.may(Right::Reuse));
        let survey = self.questions.begin(peer, Bounded::Survey)?;
        let turn = self.questions.alone(Turn::Survey(peer.to_owned())).await;
        let indexed = if reuses { self.reuse.indexed_bytes() } else { 0 };
        let (agent, peer) = (Arc::clone(self), peer.to_owned());
        let look = move || {
            // It counts until its threads have ended, whether anybody waits for them or not.
            let _under_way = (survey, turn);
            agent.survey_for(&peer, number, pool.as_deref(), images, backups)
        };
        Ok((may_block(look).await?, indexed))
    }

    /// What images would begin with here: each is looked for on a thread of its own. Of the wish
    /// `number`, what was expected of it.
    fn survey_for(
        &self,
        peer: &str,
        number: Option<u64>,
        pool: Option<&str>,
        images: Vec<SeedImage>,
        backups: bool,
    ) -> Answer<Vec<Surveyed>> {
        let known = self.config.peer(peer).ok_or_else(unknown_peer)?;
        let pool = self.config.pool_for(&known, pool).map_err(of_path)?;
        if images.len() > MAX_IMAGES {
            return Err(invalid(format!("more than {MAX_IMAGES} images at once")));
        }
        if pool.kind != PoolKind::Files {
            let notes = vec!["images on devices cannot begin with anything".to_owned()];
            return Ok(vec![
                Surveyed { base: Base::Empty, given: Vec::new(), notes };
                images.len()
            ]);
        }
        if let Some(number) = number {
            let expected = |image: &SeedImage| self.seeds.expected(number, image);
            return Ok(images.iter().map(expected).collect());
        }
        let look = |image| {
            let parts = self.seed_parts((&known, pool), image, None);
            dray_provider::snapshots::apart(move || seed::survey(&parts, backups))
        };
        let looking: Vec<_> = images.into_iter().map(look).collect();
        let found = looking.into_iter().map(|surveyed| surveyed.recv());
        found.collect::<Result<_, _>>().map_err(|_| failed("cannot start a thread"))
    }
}

impl Agent {
    /// Who this is, and what it has for this peer.
    fn identity_for(&self, peer: &str) -> Reply {
        let names = self.config.peer(peer).map(|peer| peer.pools.clone()).unwrap_or_default();
        let free = |name: &str| {
            let pool = self.config.pools.iter().find(|pool| pool.name == name)?;
            // A pool of devices has files beside them, of another file system.
            let files = pool.kind == PoolKind::Files;
            let stat = rustix::fs::statvfs(&pool.path).ok().filter(|_| files)?;
            Some(stat.f_bavail.saturating_mul(stat.f_frsize))
        };
        Reply::Identity {
            agent: dray_net::AGENT.to_owned(),
            pools: names.into_iter().map(|name| (name.clone(), free(&name))).collect(),
            unix_ms: unix_ms(),
            certificate_days: dray_net::tls::days_left(&self.config.tls_dir).ok(),
        }
    }

    /// Looks at the QEMU that is to take a VM, before its migration begins.
    async fn waits(
        &self,
        peer: &str,
        migration: MigrationId,
        qmp: &str,
        layers: Vec<(u16, String)>,
    ) -> Answer<()> {
        let _look = self.questions.begin(peer, Bounded::Look)?;
        let slot = self.targets.get(migration);
        let slot = slot.ok_or_else(|| absent("nothing is prepared for it here"))?;
        if slot.board.read().state != MigrationState::Prepared {
            return Err(conflict("it has begun here"));
        }
        let facts = GuestFacts { name: None, qmp: qmp.into(), layers, running: false };
        let _alone = self.questions.alone(Turn::Look(facts.qmp.clone())).await;
        let fits = guest::receiver::fits(&self.config, &*self.hypervisor, &slot, &facts).await;
        fits.map_err(|why| Refusal::new(ErrorKind::Hypervisor, "cannot take the vm", why))
    }

    /// What the seeding of an image is made of.
    pub fn seed_parts(
        &self,
        (peer, pool): (&Peer, &Pool),
        wanted: SeedImage,
        link: Option<u64>,
    ) -> seed::Parts {
        seed::Parts {
            registry: Arc::clone(&self.registry),
            store: self.store.clone(),
            pool: pool.clone(),
            peer: peer.clone(),
            wanted,
            link,
            places: catalogues::catalogues(&self.config),
            config: Arc::clone(&self.config),
        }
    }
}

/// What peers ask of an agent.
pub(super) struct Desk(pub Arc<Agent>);

/// Looks on a thread that may block.
async fn may_block<T: Send + 'static>(
    look: impl FnOnce() -> Answer<T> + Send + 'static,
) -> Answer<T> {
    tokio::task::spawn_blocking(look).await.map_err(failed)?
}

/// What a peer is told of an answer, or that it is refused.
fn reply<T>(answer: Answer<T>, of: impl FnOnce(T) -> Reply) -> Reply {
    answer.map_or_else(Reply::Refused, of)
}

impl RequestHandler for Desk {
    async fn answer(&self, peer: &str, request: Request) -> Reply {
        let Self(agent) = self;
        if let Err(why) = agent.admit(peer, need_of_request(&request)) {
            tracing::info!(peer, %why, "refused a peer's request");
            return Reply::Refused(why);
        }
        match request {
            Request::Identify => agent.identity_for(peer),
            Request::Prepare { migration, pool, images } => {
                let room = agent.make_room(peer, migration, pool.as_deref(), &images).await;
                let endpoint = Endpoint::nbd(&agent.nbd_socket());
                reply(room, |bases| Reply::Prepared { endpoint, bases })
            }
            Request::Seed { number, pool, images, link } => {
                let seeding = agent.seed_for(peer, number, pool.as_deref(), images, link);
                reply(seeding, |images| Reply::Seeding { images })
            }
            Request::Holdings { image } => Reply::Holdings { held: agent.holdings(peer, image) },
            Request::Survey { number, pool, images, backups } => {
                let surveyed = agent.answer_survey(peer, number, pool, images, backups).await;
                reply(surveyed, |(images, indexed)| Reply::Surveyed { images, indexed })
            }
            Request::Bases { pool, images } => {
                let (agent, peer) = (Arc::clone(agent), peer.to_owned());
                let look = move || agent.bases_for(&peer, pool.as_deref(), &images);
                reply(may_block(look).await, |images| Reply::Bases { images })
            }
            Request::Fate { migration, images } => {
                let (agent, peer) = (Arc::clone(agent), peer.to_owned());
                let look = move || agent.fate_for(&peer, migration, &images);
                reply(may_block(look).await, |fate| Reply::Fate { fate })
            }
            Request::Waits { migration, qmp, layers } => {
                reply(agent.waits(peer, migration, &qmp, layers).await, |()| Reply::Done)
            }
            Request::Forget { migration } => {
                if let Some(slot) = agent.targets.get(migration) {
                    slot.send(dray_migrate::receiver::Input::Forget);
                }
                Reply::Done
            }
        }
    }
}
