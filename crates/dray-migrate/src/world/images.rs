//! The images that move, and what both sides mean to do with them.

use super::Mission;
use super::World;
use super::host::Host;
use super::model::{Model, SECTOR, bytes_of};
use dray_api::{Order, Tuning};
use dray_host::folder::intent::{
    Conditions, Options, Settings, SourceImage, SourceIntent, TargetImageIntent, TargetIntent,
};
use dray_host::record::ImageRecord;
use dray_types::{Ancestor, BLOCK_SIZE, Epoch, ImageId, MigrationId};
use dray_wire::ImageOffer;
use dray_wire::request::Base;

/// Their names.
pub const NAMES: [&str; 2] = ["a.raw", "b.qcow2"];
/// Exported blocks of each, and how many of them the file has in the beginning: the second one grows.
pub const BLOCKS: [(u64, u64); 2] = [(12, 12), (12, 5)];
/// The host's names.
pub const HOSTS: [&str; 2] = ["a", "b"];
/// The first migration.
const MIGRATION: u128 = 7;

/// What a source offers.
fn offers() -> Vec<ImageOffer> {
    let offer = |(ix, name): (usize, &&str)| ImageOffer {
        id: ImageId(ix as u128 + 1),
        name: (*name).to_owned(),
        len: BLOCKS[ix].0 * BLOCK_SIZE,
        read_only: false,
    };
    NAMES.iter().enumerate().map(offer).collect()
}

impl World {
    /// The migration that is under way, away from the host `from`.
    fn migration(&self) -> MigrationId {
        MigrationId(MIGRATION + self.from as u128)
    }

    /// What the source means to do; `bases` are what the target's copies begin with.
    pub(super) fn source_intent(&self, bases: &[Base], begun: bool) -> SourceIntent {
        let image = |(offer, base): (ImageOffer, &Base)| {
            let path = self.hosts[self.from].path(&offer.name);
            let image = SourceImage::new(offer.name.clone(), offer, path, None);
            SourceImage { base: base.clone(), ..image }
        };
        let options = Options {
            strategy: self.strategy,
            order: Order::default(),
            tuning: Tuning::default(),
            bandwidth: None,
            max_downtime_ms: 300,
            deadline_ms: None,
            conditions: Conditions::default(),
            settings: Settings::default(),
            remove_replica: self.mission == Mission::Remove,
            no_reuse: true,
        };
        let record = self.hosts[self.from]
            .agent
            .as_ref()
            .and_then(|agent| agent.registry.get(NAMES[0]).map(|entry| entry.record()));
        SourceIntent {
            migration: self.migration(),
            peer: HOSTS[1 - self.from].to_owned(),
            images: offers().into_iter().zip(bases).map(image).collect(),
            owner: None,
            vm: None,
            options: begun.then_some(options),
            epoch: record.map_or(Epoch(1), |record| record.epoch),
            started_unix_ms: 0,
            adopted: Vec::new(),
        }
    }

    /// What the target means to do.
    pub(super) fn target_intent(&self) -> TargetIntent {
        let image = |offer: ImageOffer| TargetImageIntent {
            path: self.hosts[1 - self.from].path(&offer.name),
            offer,
            zeroed: true,
            replica: None,
            refused: None,
            in_place: None,
            qcow2: false,
        };
        TargetIntent {
            migration: self.migration(),
            peer: HOSTS[self.from].to_owned(),
            images: offers().into_iter().map(image).collect(),
            settings: Settings::default(),
            guest: None,
            qemu: None,
            started_unix_ms: 0,
        }
    }

    /// The generations of the source's images.
    pub(super) fn ancestors(&self) -> Vec<Vec<Ancestor>> {
        let agent = self.hosts[self.from].agent.as_ref();
        let of = |name| Some(agent?.registry.get(name)?.line()?.lineage().ancestors());
        NAMES.into_iter().map(|name| of(name).unwrap_or_default()).collect()
    }
}

/// Host `host` gets an image that it owns.
pub fn own(host: &mut Host, ix: usize, (blocks, held): (u64, u64)) -> Model {
    use dray_files::files::Files;
    let path = host.path(NAMES[ix]);
    let per_block = BLOCK_SIZE / SECTOR;
    let values = (0..blocks * per_block).map(|nth| {
        // Every third block is a hole.
        let filled = nth < held * per_block && nth / per_block % 3 != 2;
        if filled { nth + 1 } else { 0 }
    });
    let values: Vec<u64> = values.collect();
    let files = host.disk.files();
    let made = (|| {
        let file = files.create(&path)?;
        for (nth, value) in values.iter().enumerate().take((held * per_block) as usize) {
            file.write_at(&bytes_of(*value, 1), nth as u64 * SECTOR)?;
        }
        file.sync()?;
        dray_files::files::sync_parent(&files, &path)
    })();
    made.unwrap();
    if host.agent.is_none() {
        assert!(host.start());
    }
    let len = blocks * BLOCK_SIZE;
    let record = ImageRecord {
        growable: held < blocks,
        ..ImageRecord::owned(NAMES[ix].to_owned(), ImageId(ix as u128 + 1), path, len)
    };
    let added = host.within(|agent| {
        let file = agent.registry.open_file(&record).unwrap();
        agent.registry.add(record, file).map(drop)
    });
    assert!(matches!(added, Some(Ok(()))));
    Model::new(values)
}
