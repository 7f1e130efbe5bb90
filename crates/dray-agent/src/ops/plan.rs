//! `dray plan`: what a migration would take; nothing moves.

use super::io_error;
use super::migrate::{MAX_DOWNTIME_MS, guest_memory};
use super::prepare::net_error;
use crate::agent::Agent;
use crate::api::{ApiResult, Plan, Planned, PlannedStrategy, Predicted, Prepare};
use crate::forecast::{self, Moved, Way};
use crate::links;
use crate::migration::intent::SourceImage;
use crate::migration::source::shown_strategy;
use dray_engine::Strategy;
use dray_engine::plan::{self, Goals};
use dray_image::{FileImage, FileOptions, Image};
use dray_types::BlockRange;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The strategies that can be told apart before the guest is observed; hot-set cannot.
const SHOWN: [Strategy; 5] =
    [Strategy::PreCopy, Strategy::PostCopy, Strategy::Hybrid, Strategy::Mirror, Strategy::Auto];

impl Agent {
    pub(crate) async fn predict(self: &Arc<Self>, command: Plan) -> ApiResult<Planned> {
        let what = format!("cannot plan a migration to {}", command.to);
        let prepare = Prepare {
            subject: command.subject.clone(),
            to: command.to.clone(),
            pool: None,
            prefix: None,
            names: BTreeMap::new(),
            target_qmp: None,
            chain: command.chain,
        };
        let (intent, _, picture) = self.plan(&prepare).await?;
        let settings = self.session_settings(&command.to)?;
        let (memory, memory_dirty) = guest_memory(picture.as_ref(), true).await;
        let rtt = Way::round_trip(&settings.address).await;
        let rtt = rtt.map_err(|why| net_error(&what, &why))?;
        let link = links::rate(&self.store.links(), &command.to);
        let way = Way { rtt, memory, memory_dirty, link };
        let agent = Arc::clone(self);
        let work = move || agent.predict_all(&intent.images, &command, &way);
        let planned = tokio::task::spawn_blocking(work).await;
        planned.map_err(|why| io_error(what.clone(), why))?.map_err(|why| io_error(what, why))
    }

    fn predict_all(
        &self,
        images: &[SourceImage],
        command: &Plan,
        way: &Way,
    ) -> dray_image::Result<Planned> {
        let entries: Vec<_> = images.iter().map(|image| self.registry.get(&image.name)).collect();
        let mut files = Vec::new();
        for (image, entry) in images.iter().zip(&entries) {
            let options =
                FileOptions { write: false, direct: false, export_len: Some(image.offer.len) };
            files.push(match entry {
                Some(entry) => Arc::clone(entry.disk.backing()),
                None if !image.chain.is_empty() => self.registry.peek_chain(image),
                None => Arc::new(FileImage::open(&image.path, options)?) as Arc<dyn Image>,
            });
        }
        let moved: Vec<_> = images
            .iter()
            .zip(files.iter().zip(&entries))
            .map(|(image, (file, entry))| Moved {
                image: &**file,
                len: image.offer.len,
                heat: entry.as_ref().map(|entry| &entry.heat),
            })
            .collect();
        let (link, link_from) = way.link(command.bandwidth);
        for entry in entries.iter().flatten() {
            entry.heat.drain(&entry.disk);
        }
        let load = forecast::load(&moved, &forecast::data(&moved), way, command.bandwidth);
        let whole: Vec<_> = moved.iter().map(|image| BlockRange::whole(image.len)).collect();
        let goals = Goals {
            max_downtime: Some(command.max_downtime_ms.unwrap_or(MAX_DOWNTIME_MS) as f64 / 1e3),
            max_added_latency: command.max_added_latency_ms.map(|ms| ms / 1e3),
            deadline: command.deadline_ms.map(|ms| ms as f64 / 1e3),
            bandwidth: Some(link),
        };
        let one = |&strategy: &Strategy| {
            let predicted = if strategy == Strategy::Auto {
                let chosen = plan::choose(&load, &goals, &whole);
                Predicted::new(&chosen.prediction, link, chosen.missed)
            } else {
                let prediction = plan::predict(strategy, &load, &goals, None);
                Predicted::new(&prediction, link, goals.missed_by(&prediction))
            };
            PlannedStrategy { strategy: shown_strategy(strategy), predicted }
        };
        Ok(Planned {
            to: command.to.clone(),
            link: link as u64,
            link_from,
            rtt_ms: way.rtt * 1e3,
            memory: way.memory,
            memory_written: way.memory_dirty,
            data: load.chunks.iter().map(|chunk| chunk.bytes).sum(),
            written: load.chunks.iter().map(|chunk| chunk.written).sum::<f64>() as u64,
            strategies: SHOWN.iter().map(one).collect(),
        })
    }
}
