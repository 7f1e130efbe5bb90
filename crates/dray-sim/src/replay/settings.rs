//! What is migrated, over what, and how.

use dray_engine::hotset::Rule;
use dray_engine::throttle::Mode;
use dray_engine::{MILLISECOND, SECOND};
use dray_heat::HeatConfig;
use dray_types::{BLOCK_SIZE, Schedule, Strategy, Why};
use std::fmt;
use std::str::FromStr;

/// The paper's history: operations before the start (section 7.1).
pub const PAPER_HISTORY: usize = 50_000;
/// The paper's delay of the network, one way, in nanoseconds (section 7.1).
pub const PAPER_DELAY: u64 = 50 * MILLISECOND;
/// The paper's penalty for a block that does not follow its predecessor, in nanoseconds.
pub const PAPER_SEEK: u64 = 10 * MILLISECOND;
/// What `dray migrate` takes for downtime unless it is told, in nanoseconds.
const MAX_DOWNTIME: u64 = 300 * MILLISECOND;
/// How often it is asked whether the heat's order is to be told again, in nanoseconds.
const REFRESH: u64 = SECOND;

/// In which order blocks move.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Order {
    /// By address.
    Sequential,
    /// By what the agent's heat says of reads and writes.
    WorkloadAware,
    /// By the algorithm of the scheduling paper as written down there (its figures 7 and 9), made
    /// once at the start.
    Paper,
    /// By the incremental algorithm of its section 5 ([`HeatConfig::paper`]), which goes on learning.
    PaperIncremental,
}

impl Order {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::Sequential, Self::WorkloadAware, Self::Paper, Self::PaperIncremental];
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sequential => "sequential",
            Self::WorkloadAware => "workload-aware",
            Self::Paper => "paper",
            Self::PaperIncremental => "paper-incremental",
        })
    }
}

impl FromStr for Order {
    type Err = Why;

    fn from_str(text: &str) -> Result<Self, Why> {
        let found = Self::ALL.into_iter().find(|order| order.to_string() == text);
        found.ok_or_else(|| {
            let orders = "sequential, workload-aware, paper or paper-incremental";
            Why::from(format!("'{text}' is not an order; use {orders}"))
        })
    }
}

/// How large the chunks are by which the history is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Chunks {
    /// Chosen from the history.
    Selected,
    /// This many bytes; a multiple of 4 KiB.
    Fixed(u64),
}

/// An order that comes from elsewhere than the history.
#[derive(Clone, Debug)]
pub enum Given {
    /// That of Copy; Backfill goes by address.
    Copy(Schedule),
    /// That of Backfill; Copy goes by address.
    Backfill(Schedule),
}

/// LiveFS's parameters, for `hot-set`.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct HotSet {
    /// Weights, segment and threshold.
    pub rule: Rule,
    /// How long the guest was observed before the start, in nanoseconds; none: as far as the history
    /// reaches.
    pub observed: Option<u64>,
    /// Bytes that may be dirty at the handover and are then fetched; none: Sync ends when the rest
    /// fits the downtime, and it is sent.
    pub handover_size: Option<u64>,
    /// Sync goes on until no more is dirty, however long that takes (LiveFS).
    pub endless: bool,
}

/// One migration.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Which blocks move when.
    pub strategy: Strategy,
    /// Which of them first.
    pub order: Order,
    /// Chunks of the other orders.
    pub chunks: Chunks,
    /// How the agent's order is made, but for the chunks and for what a jump costs.
    pub heat: HeatConfig,
    /// An order where it comes from elsewhere: what `order` would make of the history is not asked for
    /// then.
    pub given: Option<Given>,
    /// Size of the disk in bytes, every block of which holds data.
    pub disk: u64,
    /// Guest memory in bytes.
    pub memory: u64,
    /// Bytes a second that the link carries.
    pub bandwidth: u64,
    /// One way, in nanoseconds.
    pub delay: u64,
    /// When the migration begins, in nanoseconds of the trace.
    pub start: u64,
    /// Accesses before the start that the heat has seen.
    pub history: usize,
    /// In any order but address order: what a run costs that does not follow its predecessor, in
    /// nanoseconds.
    pub seek: u64,
    /// How often a new order may be told while blocks are copied, if it is due then
    /// ([`Refresh`](dray_engine::refresh::Refresh)), in nanoseconds; 0: the one at the start stays, as
    /// in the paper.
    pub refresh: u64,
    /// Longest downtime that pre-copy may take, in nanoseconds.
    pub max_downtime: u64,
    /// `auto`: longest time by which the mean read may be slower while blocks are missing, in
    /// nanoseconds.
    pub max_added_latency: Option<u64>,
    /// `auto`: longest total time, in nanoseconds.
    pub deadline: Option<u64>,
    /// Whether the guest's writes are slowed during Sync.
    pub throttle: Mode,
    /// What `hot-set` copies before the handover.
    pub hot_set: HotSet,
    /// Sync sends whole pieces of so many bytes of which a block was written, a multiple of 4 KiB:
    /// one block as dray does, 64 MiB as LiveFS.
    pub sync_unit: u64,
    /// Whether to paint a picture.
    pub picture: bool,
}

impl Settings {
    /// The paper's link delay, penalty and history.
    pub fn new(strategy: Strategy, order: Order, disk: u64, bandwidth: u64) -> Self {
        Self {
            strategy,
            order,
            chunks: Chunks::Selected,
            heat: HeatConfig::default(),
            given: None,
            disk,
            memory: 0,
            bandwidth,
            delay: PAPER_DELAY,
            start: 0,
            history: PAPER_HISTORY,
            seek: PAPER_SEEK,
            refresh: REFRESH,
            max_downtime: MAX_DOWNTIME,
            max_added_latency: None,
            deadline: None,
            throttle: Mode::None,
            hot_set: HotSet::default(),
            sync_unit: BLOCK_SIZE,
            picture: false,
        }
    }
}
