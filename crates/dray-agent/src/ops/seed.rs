//! `seed`: asks a target to read images from backups, and waits until it has.

use super::images::random_id;
use crate::agent::Agent;
use crate::api::{
    ApiError, ApiResult, Chain, ErrorKind, Event, Events, Prepare, Seed, SeedProgress, Seeded,
    SeededImage,
};
use crate::links;
use crate::migration::intent::SourceIntent;
use crate::net::NetErrorKind;
use dray_types::ByteSize;
use dray_wire::request::{Reply, Request, SeedImage, Seeding, WantedImage};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// How often the target is asked.
const EVERY: Duration = Duration::from_millis(300);
/// The target may be away for so many questions: its agent may be restarting.
const AWAY: u32 = 100;

impl Agent {
    pub(super) async fn seed(
        self: &Arc<Self>,
        command: Seed,
        events: &Events,
    ) -> ApiResult<Seeded> {
        let Seed { subject, to, pool, prefix, names } = command;
        let prepare = Prepare {
            subject,
            to: to.clone(),
            pool: pool.clone(),
            prefix,
            names,
            target_qmp: None,
            chain: Chain::Keep,
        };
        let (intent, _, _) = self.plan(&prepare).await?;
        let (names, images) = self.seedable(&intent);
        if images.is_empty() {
            return Ok(Seeded { to, images: Vec::new() });
        }
        let link = links::rate(&self.store.links(), &to);
        let request = Request::Seed { number: random_id()? as u64, pool, images, link };
        let seeding = self.await_seeds(&to, &request, events).await?;
        let images = names.into_iter().zip(seeding).map(|(name, state)| seeded(name, state));
        Ok(Seeded { to, images: images.collect() })
    }

    /// The images that a backup can be of: those with a line of generations here.
    fn seedable(&self, intent: &SourceIntent) -> (Vec<String>, Vec<SeedImage>) {
        let seed = |image: &crate::migration::intent::SourceImage| {
            let entry = self.registry.get(&image.name).filter(|_| !image.offer.read_only)?;
            let ancestors = entry.line()?.lineage().ancestors();
            let allocated = entry.file.allocated_bytes().unwrap_or(0);
            let offer = image.offer.clone();
            let wanted = WantedImage {
                id: offer.id,
                name: offer.name,
                len: offer.len,
                allocated,
                read_only: false,
            };
            let seed = SeedImage { image: wanted, epoch: entry.record().epoch, ancestors };
            (!seed.ancestors.is_empty()).then(|| (image.name.clone(), seed))
        };
        intent.images.iter().filter_map(seed).unzip()
    }

    /// Asks until no image is being read any more.
    async fn await_seeds(
        &self,
        to: &str,
        request: &Request,
        events: &Events,
    ) -> ApiResult<Vec<Seeding>> {
        let what = format!("cannot have {to} read images from backups");
        let mut away = 0;
        loop {
            let states = match self.ask(to, request).await {
                Ok(Reply::Seeding { images }) => images,
                // An older target reads nothing.
                Err(why) if why.kind == NetErrorKind::Unknown => return Ok(Vec::new()),
                Err(why) if why.kind == NetErrorKind::Refused || away == AWAY => {
                    return Err(ApiError::new(ErrorKind::Peer, what, why));
                }
                Err(_) => {
                    away += 1;
                    tokio::time::sleep(EVERY).await;
                    continue;
                }
                Ok(_) => {
                    let why = "the peer answered something else";
                    return Err(ApiError::new(ErrorKind::Peer, what, why));
                }
            };
            away = 0;
            let Some(progress) = progress(&states) else { return Ok(states) };
            if events.send(Event::Seeding(progress)).await.is_err() {
                // The target stops by itself when nobody asks any more.
                let why = "the client hung up";
                return Err(ApiError::new(ErrorKind::Internal, what, why));
            }
            tokio::time::sleep(EVERY).await;
        }
    }
}

/// The sum over all images; none when none is being read any more.
fn progress(states: &[Seeding]) -> Option<SeedProgress> {
    let mut sum = SeedProgress::default();
    let mut running = false;
    for state in states {
        match state {
            Seeding::Running { done, total } => {
                running = true;
                sum.bytes_done += done;
                sum.bytes_total += total;
            }
            Seeding::Ready { given, .. } => {
                let bytes: u64 = given.iter().map(|(_, bytes)| bytes).sum();
                sum.bytes_done += bytes;
                sum.bytes_total += bytes;
            }
            Seeding::Nothing { .. } => {}
        }
    }
    running.then_some(sum)
}

fn seeded(image: String, state: Seeding) -> SeededImage {
    let nothing = |notes| SeededImage {
        image: image.clone(),
        generation: None,
        given: BTreeMap::new(),
        missing_bytes: 0,
        notes,
    };
    match state {
        Seeding::Nothing { why } if why.is_empty() => nothing(Vec::new()),
        Seeding::Nothing { why } => nothing(vec![why]),
        Seeding::Running { done, .. } => {
            nothing(vec![format!("still being read, {} so far", ByteSize(done))])
        }
        Seeding::Ready { generation, given, missing, notes } => SeededImage {
            image,
            generation: Some(generation.number),
            given: given.into_iter().collect(),
            missing_bytes: missing,
            notes,
        },
    }
}
