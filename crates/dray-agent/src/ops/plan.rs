//! `dray plan`: what a migration would take, and where its bytes would come from; nothing moves.

use super::ask_peer::net_error;
use super::migrate::{MAX_DOWNTIME_MS, guest_memory};
use super::survey::Survey;
use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{
    ApiResult, LinkFrom, Plan, Planned, PlannedStrategy, Predicted, Prepare, TargetFormat,
};
use dray_engine::plan::{self, Goals, Load};
use dray_host::folder::intent::{Conditions, SourceImage};
use dray_host::refusals::io_error;
use dray_host::registry::Entry;
use dray_image::{FileImage, FileOptions, Image};
use dray_migrate::forecast::{self, Moved};
use dray_migrate::links;
use dray_types::BlockRange;
use dray_types::{Choice, Strategy};
use std::sync::Arc;
use std::time::Instant;

impl Answers<Plan> for Arc<Agent> {
    async fn answer(&self, command: Plan, _: Events) -> ApiResult<Planned> {
        self.predict(command).await
    }
}

impl Agent {
    pub(crate) async fn predict(self: &Arc<Self>, command: Plan) -> ApiResult<Planned> {
        let what = format!("cannot plan a migration to {}", command.to);
        let prepare = Prepare {
            subject: command.subject.clone(),
            to: command.to.clone(),
            pool: None,
            prefix: None,
            names: command.names.clone(),
            target_qmp: None,
            chain: command.chain,
            // What is made of an image at the target is made there, of what has arrived.
            target_format: TargetFormat::Raw,
            no_backups: true,
            command_line: false,
            replace: false,
            owner: None,
        };
        let (intent, plan, picture) = self.plan(&prepare).await?;
        let settings = self.session_settings(&command.to)?;
        let rtt = forecast::round_trip(&settings.address).await;
        let rtt = rtt.map_err(|why| net_error(&what, &why))?;
        let (pool, backups) = (command.pool.as_deref(), !command.no_backups);
        let ((memory, memory_dirty), mut survey) = tokio::join!(
            guest_memory(picture.as_ref(), true),
            self.survey(&intent, &plan, pool, backups)
        );
        if let Some(picture) = &picture {
            self.ask_qemu(&mut survey, picture, &plan).await;
        }
        let link = links::rate(&self.store.links(), &command.to);
        let conditions = Conditions { rtt, memory, memory_dirty, link };
        let agent = Arc::clone(self);
        let work = move || agent.predict_all(&intent.images, &command, &conditions, survey);
        let planned = tokio::task::spawn_blocking(work).await;
        planned.map_err(|why| io_error(what.clone(), why))?.map_err(|why| io_error(what, why))
    }

    fn predict_all(
        &self,
        images: &[SourceImage],
        command: &Plan,
        conditions: &Conditions,
        survey: Survey,
    ) -> dray_image::Result<Planned> {
        let entries: Vec<_> = images.iter().map(|image| self.registry.get(&image.name)).collect();
        let files = self.readable(images, &entries)?;
        let moved: Vec<_> = images
            .iter()
            .zip(files.iter().zip(&entries))
            .map(|(image, (file, entry))| Moved {
                image: &**file,
                len: image.offer.len,
                heat: entry.as_ref().map(|entry| &entry.heat),
                shared: self.shared_with_target(image, entry.as_deref(), &survey),
            })
            .collect();
        for entry in entries.iter().flatten() {
            entry.heat.drain(&entry.disk, Instant::now());
        }
        let mut contents = forecast::contents(&moved);
        let mut planned = Vec::new();
        for ((image, moved), content) in images.iter().zip(&moved).zip(&mut contents) {
            survey.rewrite(image, content);
            planned.push(survey.planned(image, content, moved.shared.is_some()));
        }
        let load = forecast::load(&moved, &contents, conditions, command.bandwidth);
        let whole: Vec<_> = moved.iter().map(|image| BlockRange::whole(image.len)).collect();
        let (link, link_from) = forecast::link(conditions, command.bandwidth);
        let written: f64 = load.chunks.iter().map(|chunk| chunk.written).sum();
        Ok(Planned {
            to: command.to.clone(),
            link: link as u64,
            link_from,
            rtt_ms: conditions.rtt * 1e3,
            memory: conditions.memory,
            memory_written: conditions.memory_dirty,
            data: planned.iter().map(|image| image.data).sum(),
            written: moved.iter().all(|image| image.heat.is_some()).then_some(written as u64),
            images: planned,
            indexed: survey.indexed,
            silent: survey.silent,
            strategies: strategies(&load, command, &whole, (link, link_from)),
        })
    }

    /// What is read of each image: its file, or of a flattened disk what its guest sees.
    fn readable(
        &self,
        images: &[SourceImage],
        entries: &[Option<Arc<Entry>>],
    ) -> dray_image::Result<Vec<Arc<dyn Image>>> {
        let open = |(image, entry): (&SourceImage, &Option<Arc<Entry>>)| {
            let options =
                FileOptions { write: false, direct: false, export_len: Some(image.offer.len) };
            Ok(match entry {
                Some(entry) => Arc::clone(entry.disk.backing()),
                None if !image.chain.is_empty() => self.registry.peek_chain(image),
                None => Arc::new(FileImage::open(&image.path, options)?) as Arc<dyn Image>,
            })
        };
        images.iter().zip(entries).map(open).collect()
    }
}

/// What comes of each strategy.
fn strategies(
    load: &Load,
    command: &Plan,
    whole: &[BlockRange],
    link: (f64, LinkFrom),
) -> Vec<PlannedStrategy> {
    let goals = Goals {
        max_downtime: Some(command.max_downtime_ms.unwrap_or(MAX_DOWNTIME_MS) as f64 / 1e3),
        max_added_latency: command.max_added_latency_ms.map(|ms| ms / 1e3),
        deadline: command.deadline_ms.map(|ms| ms as f64 / 1e3),
        bandwidth: Some(link.0),
    };
    let one = |strategy: Strategy| {
        let predicted = if strategy.traits().choice == Choice::Planned {
            let chosen = plan::choose(load, &goals, whole);
            Predicted::new(&chosen.prediction, link, chosen.missed)
        } else {
            let prediction = plan::predict(strategy, load, &goals, None);
            Predicted::new(&prediction, link, goals.missed_by(&prediction))
        };
        PlannedStrategy { strategy, predicted }
    };
    // Those that can be told apart before the guest is observed.
    let known = |strategy: &Strategy| strategy.traits().resembles.is_none();
    Strategy::ALL.into_iter().filter(known).map(one).collect()
}
