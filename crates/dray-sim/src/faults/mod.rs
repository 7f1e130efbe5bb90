//! What a run looks like and what goes wrong in it, all drawn from the seed.

pub(crate) mod reuse;

use self::reuse::ReuseSetup;
use crate::rng::Rng;
use dray_engine::throttle::Mode;
use dray_engine::{MILLISECOND, SECOND, Tuning};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet, Strategy, StrategyTraits};

/// One of the two hosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// Where the images are at the start.
    Source,
    /// Where they go.
    Target,
}

/// How an agent ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Crash {
    /// `kill -9` of the agent: kernel, guest and page cache live on.
    Kill,
    /// The host loses power.
    PowerCut,
    /// Nothing ends: for a while there is no room for what the target writes beside the images.
    Full,
    /// It does not end: if the effect is a record of the source, that is certainly not written.
    Unrecorded,
    /// The same, and nobody knows whether it is.
    Unsure,
}

/// A crash at a chosen place: before the effect with this number is carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CrashPoint {
    /// Which host.
    pub side: Side,
    /// Number of effects that side has carried out, over all its lives.
    pub effect: u64,
    /// How.
    pub crash: Crash,
}

/// Probabilities of what can go wrong, each named for what it does.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    /// Per effect.
    pub(crate) kill_source: f64,
    pub(crate) kill_target: f64,
    pub(crate) cut_source: f64,
    pub(crate) cut_target: f64,
    /// Per second.
    pub(crate) link_drop: f64,
    /// Per frame.
    pub(crate) damage: f64,
    pub(crate) read_error: f64,
    pub(crate) write_error: f64,
    /// Per request.
    pub(crate) sync_error: f64,
    /// Per record of the source's journal: its append fails and is taken back, or nobody knows
    /// whether it is there.
    pub(crate) record_fails: f64,
    pub(crate) record_unsure: f64,
    /// Per effect that writes: the target has no room for it, for a while.
    pub(crate) full: f64,
    /// Per restart of the target's agent: another program has changed the files of images that come.
    pub(crate) edited: f64,
    pub(crate) quiesce_fails: f64,
    pub(crate) unreachable: f64,
    /// Per handover: the guest's user lets it go on at the target before that has reached it.
    pub(crate) user_resumes: f64,
    pub(crate) start_fails: f64,
    pub(crate) abort: f64,
    /// Over the whole run.
    pub(crate) cancel: f64,
    pub(crate) discard: f64,
    pub(crate) resume: f64,
}

#[derive(Clone, Debug)]
pub(crate) struct ImageSetup {
    pub(crate) blocks: u64,
    pub(crate) read_only: bool,
    pub(crate) zeroed: bool,
    /// The target has a replica of an earlier generation.
    pub(crate) replica: bool,
    /// Share of blocks that hold data.
    pub(crate) density: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pattern {
    Random,
    Sequential,
    HotSpot,
}

/// Everything about a run that its seed decides before it begins.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) strategy: StrategyTraits,
    pub(crate) tuning: Tuning,
    pub(crate) images: Vec<ImageSetup>,
    /// Storage only: no guest runs.
    pub(crate) guest: bool,
    pub(crate) pattern: Pattern,
    pub(crate) op_gap: u64,
    pub(crate) depth: usize,
    pub(crate) write_share: f64,
    pub(crate) latency: u64,
    pub(crate) jitter: u64,
    pub(crate) bandwidth: u64,
    pub(crate) streams: usize,
    pub(crate) disk_delay: u64,
    pub(crate) epoch: u64,
    pub(crate) max_downtime: u64,
    pub(crate) handover_timeout: u64,
    pub(crate) memory_time: u64,
    /// Heat has something to say about the order of blocks, again and again.
    pub(crate) orders: bool,
    /// The operator starts and pauses Backfill at random.
    pub(crate) operator: bool,
    /// That operator starts no Backfill as long as a guest waits for missing blocks.
    pub(crate) patient: bool,
    /// The source asks for content before it sends it.
    pub(crate) reuse: Option<ReuseSetup>,
    /// The guest never slows down.
    pub(crate) restless: bool,
    pub(crate) faults: Faults,
    pub(crate) faults_until: u64,
}

impl Setup {
    pub(crate) fn draw(rng: &mut Rng) -> Self {
        let strategy = rng.pick(&Strategy::ALL).traits();
        let images: Vec<_> = (0..rng.between(1, 3)).map(|_| draw_image(rng)).collect();
        let mut setup = Self {
            strategy,
            tuning: draw_tuning(&images, rng),
            images,
            guest: rng.chance(0.9),
            pattern: rng.pick(&[Pattern::Random, Pattern::Sequential, Pattern::HotSpot]),
            op_gap: rng.pick(&[1, 3, 10, 30]) * MILLISECOND,
            depth: rng.between(1, 6) as usize,
            write_share: rng.pick(&[0.2, 0.5, 0.9]),
            latency: rng.pick(&[50_000, MILLISECOND, 20 * MILLISECOND]),
            jitter: rng.pick(&[10_000, MILLISECOND, 30 * MILLISECOND]),
            bandwidth: rng.pick(&[4 << 20, 16 << 20, 64 << 20]),
            streams: rng.between(1, 4) as usize,
            disk_delay: rng.pick(&[20_000, 500_000, 20 * MILLISECOND]),
            epoch: rng.between(1, 5),
            max_downtime: rng.pick(&[100, 300, 1000]) * MILLISECOND,
            handover_timeout: rng.pick(&[3, 5, 10]) * SECOND,
            memory_time: rng.pick(&[MILLISECOND, 200 * MILLISECOND, 3 * SECOND]),
            orders: rng.chance(0.6),
            operator: rng.chance(0.3),
            patient: rng.chance(0.5),
            reuse: None,
            restless: strategy.mirrors && rng.chance(0.3),
            faults: if rng.chance(0.2) { Faults::default() } else { draw_faults(rng) },
            faults_until: rng.between(5, 40) * SECOND,
        };
        setup.reuse = ReuseSetup::draw(rng);
        setup.tuning.reuse = setup.reuse.is_some();
        setup.tuning.link_rate = rng.pick(&[0, 0, setup.bandwidth]);
        if setup.restless {
            setup.write_more_than_the_link_carries();
        }
        setup
    }

    /// Twelve blocks a request on average, nearly all of them writes, on the slowest link.
    fn write_more_than_the_link_carries(&mut self) {
        self.guest = true;
        self.op_gap = MILLISECOND;
        self.depth = 16;
        self.write_share = 0.9;
        self.bandwidth = 4 << 20;
        self.disk_delay = 20_000;
        self.tuning.mirror_window = 8 << 20;
    }

    /// A small run without chance faults, for crashing at every single effect.
    pub(crate) fn small(strategy: StrategyTraits, rng: &mut Rng) -> Self {
        let mut setup = Self::draw(rng);
        setup.strategy = strategy;
        setup.images.truncate(2);
        for image in &mut setup.images {
            image.blocks = image.blocks.min(96);
        }
        setup.guest = true;
        setup.restless = false;
        setup.faults = match rng.below(4) {
            0 => {
                let user_resumes = rng.pick(&[0.0, 1.0]);
                Faults { unreachable: 1.0, user_resumes, ..Faults::default() }
            }
            1 => Faults { abort: 0.7, link_drop: 1.0, ..Faults::default() },
            _ => Faults::default(),
        };
        setup.faults.full = rng.pick(&[0.0, 0.0, 0.2]);
        setup.faults.edited = rng.pick(&[0.0, 1.0]);
        setup.faults_until = 2 * SECOND;
        setup.memory_time = setup.memory_time.min(200 * MILLISECOND);
        setup.bandwidth = setup.bandwidth.max(8 << 20);
        setup
    }

    /// Nothing that makes a block cross the wire again can happen.
    pub(crate) fn clean_wire(&self) -> bool {
        let faults = &self.faults;
        let causes = [
            faults.kill_source,
            faults.kill_target,
            faults.cut_source,
            faults.cut_target,
            faults.link_drop,
            faults.damage,
            faults.read_error,
            faults.write_error,
            faults.sync_error,
            faults.full,
        ];
        causes.iter().all(|&p| p == 0.0)
    }
}

fn draw_image(rng: &mut Rng) -> ImageSetup {
    let size = rng.pick(&[64, 128, 200, 512, 1024, 4096]);
    let replica = rng.chance(0.35);
    ImageSetup {
        blocks: rng.between(size / 2, size),
        read_only: rng.chance(0.15) && !replica,
        zeroed: rng.chance(0.6) && !replica,
        replica,
        density: rng.pick(&[0.0, 0.1, 0.5, 0.9, 1.0]),
    }
}

fn draw_tuning(images: &[ImageSetup], rng: &mut Rng) -> Tuning {
    let chosen = |image: &ImageSetup, rng: &mut Rng| -> BlockSet {
        let ranges = rng.pick(&[0, 1, 3, 10]);
        let range = |_| BlockRange::new(rng.below(image.blocks), rng.between(1, image.blocks / 2));
        (0..ranges).map(range).collect()
    };
    Tuning {
        copy_only: rng.chance(0.9).then(|| images.iter().map(|image| chosen(image, rng)).collect()),
        handover_size: rng.pick(&[None, Some(0), Some(4 * BLOCK_SIZE), Some(256 * BLOCK_SIZE)]),
        throttle: rng.pick(&[Mode::None, Mode::Soft, Mode::Aggressive]),
        mirror_window: rng.pick(&[0, 8 * BLOCK_SIZE, 8 << 20]),
        ..Tuning::default()
    }
}

fn draw_faults(rng: &mut Rng) -> Faults {
    let mut maybe = |values: &[f64]| if rng.chance(0.3) { rng.pick(values) } else { 0.0 };
    Faults {
        kill_source: maybe(&[0.0005, 0.005, 0.03]),
        kill_target: maybe(&[0.0005, 0.005, 0.03]),
        cut_source: maybe(&[0.0005, 0.005, 0.02]),
        cut_target: maybe(&[0.0005, 0.005, 0.02]),
        link_drop: maybe(&[0.05, 0.5, 3.0]),
        damage: maybe(&[0.01, 0.1]),
        read_error: maybe(&[0.0005, 0.01]),
        write_error: maybe(&[0.0005, 0.01]),
        sync_error: maybe(&[0.02, 0.2]),
        quiesce_fails: maybe(&[0.2, 0.6]),
        unreachable: maybe(&[0.3, 1.0]),
        start_fails: maybe(&[0.5]),
        abort: maybe(&[0.3, 0.7]),
        cancel: maybe(&[0.3, 1.0]),
        discard: maybe(&[0.5]),
        resume: if rng.chance(0.7) { 0.8 } else { 0.0 },
        record_fails: maybe_of(rng, &[0.05, 0.3]),
        record_unsure: maybe_of(rng, &[0.05, 0.3]),
        full: if rng.chance(0.3) { rng.pick(&[0.02, 0.3]) } else { 0.0 },
        edited: maybe_of(rng, &[0.3, 1.0]),
        user_resumes: maybe_of(rng, &[0.3, 1.0]),
    }
}

fn maybe_of(rng: &mut Rng, values: &[f64]) -> f64 {
    if rng.chance(0.3) { rng.pick(values) } else { 0.0 }
}
