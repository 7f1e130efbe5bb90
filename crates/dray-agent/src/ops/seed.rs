//! `seed`: asks a target to read images from backups, and waits until it has. A migration, and `prepare`, begin with
//! the same.

use super::ask_peer::net_error;
use super::bases::Asking;
use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{
    ApiResult, Chain, ErrorKind, Event, Migrate, Prepare, Provided, Refusal, Seed, SeedProgress,
    Seeded, SeededImage, Subject, TargetFormat,
};
use dray_host::folder::intent::{SourceImage, SourceIntent};
use dray_host::provided;
use dray_host::refusals::random_id;
use dray_migrate::links;
use dray_net::NetErrorKind;
use dray_types::ByteSize;
use dray_wire::ImageOffer;
use dray_wire::request::{Reply, Request, SeedImage, Seeding, WantedImage};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often the target is asked.
const EVERY: Duration = Duration::from_millis(300);
/// A target that has answered may be away for so long: its agent may be restarting.
const AWAY: Duration = Duration::from_secs(30);

impl Answers<Seed> for Arc<Agent> {
    async fn answer(&self, command: Seed, events: Events) -> ApiResult<Seeded> {
        let Seed { subject, to, pool, prefix, names } = command;
        if !self.config.reuse.enabled {
            // What the target would read, nobody could compare.
            return Ok(Seeded { to, images: Vec::new() });
        }
        let prepare = Prepare {
            subject,
            to: to.clone(),
            pool: pool.clone(),
            prefix,
            names,
            target_qmp: None,
            chain: Chain::Keep,
            target_format: TargetFormat::Raw,
            no_backups: true,
            command_line: false,
            replace: false,
            owner: None,
        };
        let (intent, plan, _) = self.plan(&prepare).await?;
        // Whether that went well `prepare` tells, which finds what was read.
        let asking = Asking { limit: None, events: Some(&events) };
        let _ = self.lying_there(&intent, &plan, pool.as_deref(), asking).await;
        let (names, images): (Vec<_>, Vec<_>) =
            self.seedable(&intent, &plan.allocated).into_iter().unzip();
        if images.is_empty() {
            return Ok(Seeded { to, images: Vec::new() });
        }
        let link = links::rate(&self.store.links(), &to);
        let number = random_id()? as u64;
        let (pools, wanted) = (pool.clone(), images.clone());
        let request = Request::Seed { number, pool, images, link };
        let seeding = self.await_seeds(&to, &request, &events).await?;
        let survey =
            Request::Survey { number: Some(number), pool: pools, images: wanted, backups: false };
        self.note_given(&to, &survey, &seeding).await;
        let images = names.into_iter().zip(seeding).map(|(name, state)| seeded(name, state));
        Ok(Seeded { to, images: images.collect() })
    }
}

/// What of a migration that was not prepared the target could take from its backups; none when nobody wants that. What
/// a VM begins with is seen to when it is prepared.
fn of_migration(command: &Migrate) -> Option<Seed> {
    let Migrate { subject, to, pool, names, prepared, no_backups, no_reuse, .. } = command.clone();
    // What was read counts only after it was compared.
    let wanted = !no_backups && !no_reuse;
    let wanted = wanted && prepared.is_none() && matches!(subject, Subject::Images { .. });
    wanted.then_some(Seed { subject, to, pool, prefix: None, names })
}

/// The same of what is about to be prepared. No backup is of what a guest sees of a chain.
fn of_prepare(command: &Prepare) -> Option<Seed> {
    let Prepare { subject, to, pool, prefix, names, chain, no_backups, .. } = command.clone();
    (!no_backups && chain.is_keep()).then_some(Seed { subject, to, pool, prefix, names })
}

impl Agent {
    /// Has the target read what it can before a migration.
    ///
    /// # Errors
    /// As [`Self::seed_prepare`].
    pub(super) async fn seed_migration(
        self: &Arc<Self>,
        command: &Migrate,
        events: &Events,
    ) -> ApiResult<Option<Event>> {
        let is_prepared = matches!(self.prepared(command), Ok(Some(_)));
        match of_migration(command).filter(|_| !is_prepared) {
            Some(seed) => self.seed_before(seed, events).await,
            None => Ok(None),
        }
    }

    /// The same before something is prepared.
    ///
    /// # Errors
    /// What would stand in the way of the migration, too: who waited for it need not wait once more.
    pub(super) async fn seed_prepare(
        self: &Arc<Self>,
        command: &Prepare,
        events: &Events,
    ) -> ApiResult<Option<Event>> {
        match of_prepare(command) {
            Some(seed) => self.seed_before(seed, events).await,
            None => Ok(None),
        }
    }

    /// What stands in the way of this alone is returned, and the migration begins without it. It is told when that has
    /// begun: it may fail for the same reason.
    async fn seed_before(
        self: &Arc<Self>,
        seed: Seed,
        events: &Events,
    ) -> ApiResult<Option<Event>> {
        let what = format!("cannot prepare on {}", seed.to);
        match self.answer(seed, events.clone()).await {
            Ok(seeded) if seeded.images.is_empty() => Ok(None),
            Ok(seeded) => {
                let _ = events.send(Event::Seeded(seeded)).await;
                Ok(None)
            }
            // The migration itself tells of the same failure.
            Err(why) if matches!(why.kind, ErrorKind::Invalid | ErrorKind::NotFound) => Ok(None),
            Err(why) if matches!(why.kind, ErrorKind::Peer | ErrorKind::Hypervisor) => {
                Err(Refusal { what, ..why })
            }
            Err(why) => {
                let text = format!("no backup or replica is used: {why}");
                Ok(Some(Event::Notice { text }))
            }
        }
    }

    /// Notes who gave what beside what was expected of it, for the summary of the migration.
    async fn note_given(&self, to: &str, survey: &Request, seeding: &[Seeding]) {
        let Request::Survey { images, .. } = survey else { return };
        let ready = |state: &Seeding| matches!(state, Seeding::Ready { .. });
        if !seeding.iter().any(ready) {
            return;
        }
        let expected = match self.ask(to, survey).await {
            Ok(Reply::Surveyed { images: expected, .. }) if expected.len() == images.len() => {
                expected.into_iter().map(|image| image.given).collect()
            }
            // A target that does not tell is missing in the summary.
            _ => vec![Vec::new(); images.len()],
        };
        for ((image, state), expected) in images.iter().zip(seeding).zip(expected) {
            if let Seeding::Ready { generation, given, .. } = state {
                let given = beside(given, &expected);
                provided::note(&self.store.given(), image.image.id, to, *generation, given);
            }
        }
    }

    /// The images that a backup can be of, by their names here: those with closed generations. An image
    /// that QEMU has, and of which nobody tracks what is written, is sent anyway.
    pub(super) fn seedable(
        &self,
        intent: &SourceIntent,
        allocated: &[u64],
    ) -> Vec<(String, SeedImage)> {
        let seed = |(image, &allocated): (&SourceImage, &u64)| {
            let untracked = self.released_at(image).is_some_and(|note| !note.is_tracked());
            if untracked && self.registry.get(&image.name).is_none() {
                return None;
            }
            let (ancestors, epoch) = (self.ancestors(image), self.epoch_of(image)?);
            let ImageOffer { id, name, len, read_only } = image.offer.clone();
            let image_there = WantedImage { id, name, len, allocated, read_only };
            let seed = SeedImage { image: image_there, epoch, ancestors };
            (!seed.ancestors.is_empty()).then(|| (image.name.clone(), seed))
        };
        intent.images.iter().zip(allocated).filter_map(seed).collect()
    }

    /// Asks until no image is being read any more.
    async fn await_seeds(
        &self,
        to: &str,
        request: &Request,
        events: &Events,
    ) -> ApiResult<Vec<Seeding>> {
        let what = format!("cannot let {to} read images from backups");
        let mut heard: Option<Instant> = None;
        let is_gone = |heard: Option<Instant>| heard.is_none_or(|at| at.elapsed() > AWAY);
        loop {
            let states = match self.ask(to, request).await {
                Ok(Reply::Seeding { images }) => images,
                Err(why) if matches!(why.kind, NetErrorKind::Refused(_)) || is_gone(heard) => {
                    return Err(net_error(what, &why));
                }
                Err(_) => {
                    tokio::time::sleep(EVERY).await;
                    continue;
                }
                Ok(_) => {
                    let why = "the peer's answer does not fit the question";
                    return Err(Refusal::new(ErrorKind::Peer, what, why));
                }
            };
            heard = Some(Instant::now());
            let Some(progress) = progress(&states) else { return Ok(states) };
            if events.send(Event::Seeding(progress)).await.is_err() {
                // The target stops by itself when nobody asks any more.
                let why = "the client has disconnected";
                return Err(Refusal::new(ErrorKind::Internal, what, why));
            }
            tokio::time::sleep(EVERY).await;
        }
    }
}

/// What each gave beside what was expected of it, also of those that gave nothing.
fn beside(given: &[(String, u64)], expected: &[(String, u64)]) -> Vec<Provided> {
    let all: BTreeSet<&String> = given.iter().chain(expected).map(|(name, _)| name).collect();
    let of = |list: &[(String, u64)], name: &str| {
        let mut found = list.iter().filter(|(known, _)| known == name).peekable();
        found.peek().is_some().then(|| found.map(|(_, bytes)| bytes).sum::<u64>())
    };
    let one = |provider: &String| Provided {
        provider: provider.clone(),
        predicted: of(expected, provider),
        bytes: of(given, provider).unwrap_or(0),
    };
    all.into_iter().map(one).filter(|one| one.bytes > 0 || one.predicted > Some(0)).collect()
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
            nothing(vec![format!("the target is still reading it, {} so far", ByteSize(done))])
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_gave_what_stands_beside_what_was_expected() {
        let list = |pairs: &[(&str, u64)]| -> Vec<_> {
            pairs.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect()
        };
        let given = list(&[("nas", 7), ("an old copy there", 2), ("idle", 0)]);
        let told = beside(&given, &list(&[("nas", 5), ("dead", 6), ("idle", 0)]));
        let told: Vec<_> =
            told.iter().map(|one| (&*one.provider, one.predicted, one.bytes)).collect();
        let wanted = [("an old copy there", None, 2), ("dead", Some(6), 0), ("nas", Some(5), 7)];
        assert_eq!(told, wanted);
    }
}
