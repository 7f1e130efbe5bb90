//! [`Track`]: the rounds of one kind of operation, and the trials of what they predict.

use crate::config::{ColdOrder, Count, HeatConfig, History};
use crate::coverage::{CandidateCoverage, Coverage};
use crate::density::{Density, Weights};
use crate::op::Op;
use crate::order;
use crate::round::Round;
use crate::streams::Streams;
use crate::trial::{LONG, Regret, Trial};
use dray_types::{BlockRange, Schedule};

/// Operations before the first trial; each trial lasts as long as the history before it, until
/// that is half a round.
const FIRST_TRIAL: u64 = 256;
/// Rounds in which trials follow each other at once. What they cost, a schedule each, is most of what
/// counting costs, so that of a guest with more history only one half round in eight is a trial.
const LEARNING_ROUNDS: u64 = 4;
const PAUSE_HALF_ROUNDS: u64 = 7;

#[derive(Clone, Debug)]
pub(crate) struct Track {
    op: Op,
    pub(crate) config: HeatConfig,
    pub(crate) current: Round,
    pub(crate) previous: Option<Round>,
    coverage: Coverage,
    /// What the candidates of the previous round covered.
    covered: Vec<CandidateCoverage>,
    trial: Option<Trial>,
    /// The next one is so short that it looks at every place.
    closely: bool,
    /// Operations since the track began, and how many there are when the trial ends, or, while there
    /// is none, when the next one begins.
    pub(crate) operations: u64,
    turn: u64,
    pub(crate) regret: Regret,
    pub(crate) weights: Weights,
    /// Counted where the order is made of them, with [`ColdOrder::Density`].
    pub(crate) streams: Streams,
}

impl Track {
    pub(crate) fn new(op: Op, config: HeatConfig) -> Self {
        Self {
            op,
            config,
            current: Round::new(config.smallest_chunk_blocks),
            previous: None,
            coverage: Coverage::new(config.smallest_chunk_blocks, config.candidates),
            covered: Vec::new(),
            trial: None,
            closely: false,
            operations: 0,
            turn: FIRST_TRIAL,
            regret: Regret::default(),
            weights: Weights::default(),
            streams: Streams::default(),
        }
    }

    /// Counts one operation on an image of `blocks` blocks, `range` inside it.
    pub(crate) fn access(&mut self, range: BlockRange, blocks: u64) {
        if self.config.guard {
            self.try_history(range, blocks);
        }
        self.operations += 1;
        if self.config.candidates > 1 {
            let second_half = self.current.operations >= self.config.round_operations / 2;
            self.coverage.access(range, second_half);
        }
        let by_blocks = self.config.count == Count::Blocks;
        self.current.access(range, by_blocks, self.config.max_chunks);
        if self.config.cold == ColdOrder::Density {
            self.streams.access(range);
        }
        if self.current.operations >= self.config.round_operations {
            self.end_round(blocks);
        }
    }

    /// Operations until the next trial begins; none when one is under way.
    pub(crate) fn pause(&self) -> u64 {
        if self.trial.is_some() { 0 } else { self.turn.saturating_sub(self.operations) }
    }

    /// Goes on after `operations` operations that were counted before a restart.
    pub(crate) fn restore_operations(&mut self, operations: u64) {
        self.operations = operations.min(1 << 62);
        self.restore_pause(0);
    }

    /// The next trial begins after `pause` operations.
    pub(crate) fn restore_pause(&mut self, pause: u64) {
        let pause = pause.min(PAUSE_HALF_ROUNDS * self.half_round());
        self.turn = (self.operations + pause).max(FIRST_TRIAL);
    }

    fn try_history(&mut self, range: BlockRange, blocks: u64) {
        if self.operations >= self.turn
            && let Some(trial) = self.trial.take()
        {
            self.end_trial(trial);
        }
        // Without a pause the next one begins where this one has ended.
        if self.operations >= self.turn {
            self.begin_trial(blocks);
        }
        if let Some(trial) = &mut self.trial {
            trial.access(range, self.streams.goes_on(range), blocks);
        }
        if let Some(beaten) = self.trial.take_if(|trial| trial.is_beaten()) {
            // How the guest went about what it did says nothing of what it does now.
            self.weights = Weights::default();
            self.end_trial(beaten);
            self.current.age();
            self.closely = true;
            self.begin_trial(blocks);
        }
    }

    /// What the history foretells is tried from the next access on, if it is not yet. A trial under way
    /// goes on: half of one would teach the weights by chance.
    pub(crate) fn try_now(&mut self) {
        if self.trial.is_none() {
            self.turn = self.operations.max(FIRST_TRIAL);
            self.closely = true;
        }
    }

    fn half_round(&self) -> u64 {
        u64::from(self.config.round_operations / 2).max(1)
    }

    fn begin_trial(&mut self, blocks: u64) {
        let most = if std::mem::take(&mut self.closely) { LONG - 1 } else { u64::MAX };
        let lasts = self.operations.clamp(1, self.half_round()).min(most);
        let jump = self.config.jump_blocks;
        let (schedule, density) = self.order_and_density(blocks);
        self.trial = Some(Trial::new(self.op, &schedule, density, blocks, jump, lasts));
        self.turn = self.operations + lasts;
    }

    fn end_trial(&mut self, trial: Trial) {
        let (regret, evidence) = trial.end();
        self.regret.update(regret);
        self.weights.update(&evidence);
        let learning = LEARNING_ROUNDS * u64::from(self.config.round_operations);
        if self.operations >= learning {
            self.turn = self.operations + PAUSE_HALF_ROUNDS * self.half_round();
        }
    }

    fn end_round(&mut self, blocks: u64) {
        match self.config.history {
            History::Decayed => {
                self.current.age();
                self.streams.age();
            }
            History::PreviousRound => {
                let size = self.coverage.choose(blocks).unwrap_or(self.current.chunk_blocks);
                self.previous = Some(std::mem::replace(&mut self.current, Round::new(size)));
            }
        }
        self.covered = if self.config.candidates > 1 {
            self.coverage.candidates(blocks).collect()
        } else {
            Vec::new()
        };
        self.coverage = Coverage::new(self.config.smallest_chunk_blocks, self.config.candidates);
    }

    /// The round that schedules are made of: with [`History::PreviousRound`] the previous one, or
    /// the current one while it is the first.
    pub(crate) fn scheduled(&self) -> &Round {
        self.previous.as_ref().unwrap_or(&self.current)
    }

    /// The order that the history asks for, whether it predicts or not.
    pub(crate) fn order(&self, blocks: u64) -> Schedule {
        self.order_and_density(blocks).0
    }

    /// The same with the density it was made of, where it was made of one.
    fn order_and_density(&self, blocks: u64) -> (Schedule, Option<Density>) {
        let round = self.scheduled();
        if self.config.cold != ColdOrder::Density {
            return (self.by_frequency(round, blocks), None);
        }
        if round.list.len() == 0 {
            return (Schedule::SEQUENTIAL, None);
        }
        let (weights, streams) = (&self.weights, &self.streams);
        let (schedule, density) =
            order::by_density(round, blocks, weights, streams, self.op, &self.config);
        (schedule, Some(density))
    }

    fn by_frequency(&self, round: &Round, blocks: u64) -> Schedule {
        match self.op {
            Op::Read => order::backfill(round, blocks, self.config.cold),
            Op::Write => order::copy(round, blocks, self.config.cold),
        }
    }

    /// The order to use.
    pub(crate) fn schedule(&self, blocks: u64) -> Schedule {
        if self.config.guard && !self.regret.predicts() {
            return Schedule::SEQUENTIAL;
        }
        self.order(blocks)
    }

    pub(crate) fn covered(&self) -> &[CandidateCoverage] {
        &self.covered
    }

    pub(crate) fn memory(&self) -> usize {
        self.current.memory()
            + self.previous.as_ref().map_or(0, Round::memory)
            + self.coverage.memory()
            + self.streams.memory()
            + self.trial.as_ref().map_or(0, Trial::memory)
    }
}
