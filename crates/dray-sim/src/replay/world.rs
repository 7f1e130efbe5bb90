//! Time and events: two machines, a link between them, a guest that the trace plays.

use super::guest::{Guest, GuestLocation};
use super::link::{Frame, Link, Piece};
use super::orders::Orders;
use super::settings::{Given, Order, Settings};
use super::source::SourceShell;
use super::target::TargetShell;
use super::tuning::Recent;
use super::{Outcome, Picture, bytes};
use crate::replay::picture::Layer;
use dray_engine::receiver::Arrival;
use dray_engine::refresh::Refresh;
use dray_engine::{MILLISECOND, SECOND, SourceEvent, TargetEvent, Time, Tuning};
use dray_trace::Record;
use dray_types::{BLOCK_SIZE, BlockSet, ImageId, ImageIndex, MigrationId};
use dray_wire::{Envelope, ImageOffer, ToSource, ToTarget};
use std::collections::BTreeMap;

/// The one image of a replay.
pub(super) const IMAGE: ImageIndex = ImageIndex(0);
/// The migration's id; any will do.
pub(super) const MIGRATION: MigrationId = MigrationId(1);
/// How often the engine is told that time passes.
const TICK: u64 = 100 * MILLISECOND;
/// How often `auto` chooses again what it copies, in nanoseconds.
const CHOICE: u64 = 5 * SECOND;

/// Something that happens at some time.
enum Ev {
    Tick,
    /// The heat has a new order.
    Refresh,
    /// The link may carry the next piece.
    LinkFree,
    Arrives(Frame),
    MemoryArrives,
    /// A write that was held back.
    Released(Record),
    ToSource(Box<Envelope<ToSource>>),
    ToTarget(Box<Envelope<ToTarget>>),
}

/// Everything there is.
pub(super) struct World {
    pub(super) now: u64,
    seq: u64,
    queue: BTreeMap<(u64, u64), Ev>,
    pub(super) settings: Settings,
    pub(super) orders: Orders,
    refresh: Refresh,
    /// When auto chose last.
    chosen: u64,
    pub(super) recent: Recent,
    pub(super) source: SourceShell,
    pub(super) target: TargetShell,
    pub(super) guest: Guest,
    pub(super) link: Link,
    /// Blocks of which the target has no copy, or an old one.
    pub(super) stale: BlockSet,
    /// Blocks that were sent at least once.
    sent: BlockSet,
    pub(super) out: Outcome,
    pub(super) picture: Option<Picture>,
    pub(super) why_broken: Option<String>,
    trace_over: bool,
    over: bool,
}

pub(super) fn offer(settings: &Settings) -> ImageOffer {
    let len = settings.disk.next_multiple_of(BLOCK_SIZE);
    ImageOffer { id: ImageId(1), name: "disk".to_owned(), len, read_only: false }
}

impl World {
    pub(super) fn new(settings: &Settings, orders: Orders, recent: Recent, tuning: Tuning) -> Self {
        let seek = match settings.order {
            Order::Sequential => 0,
            Order::WorkloadAware | Order::Paper | Order::PaperIncremental => settings.seek,
        };
        let whole = dray_types::BlockRange::whole(settings.disk);
        let mut world = Self {
            now: 0,
            seq: 0,
            queue: BTreeMap::new(),
            source: SourceShell::new(settings, tuning),
            target: TargetShell::new(settings),
            guest: Guest::default(),
            link: Link::new(settings.bandwidth, settings.delay, seek),
            stale: [whole].into_iter().collect(),
            sent: BlockSet::new(),
            out: Outcome::default(),
            picture: settings.picture.then(|| Picture::new(whole.len)),
            why_broken: None,
            trace_over: false,
            over: false,
            orders,
            refresh: Refresh::default(),
            chosen: 0,
            recent,
            settings: settings.clone(),
        };
        world.begin();
        world
    }

    fn begin(&mut self) {
        self.out.chunks = self.orders.chunks();
        if self.refreshes() {
            self.at(self.settings.refresh, Ev::Refresh);
        }
        self.tell_target(TargetEvent::Start);
        self.tell_target(TargetEvent::LinkUp);
        if let Some(Given::Backfill(backfill)) = self.settings.given.clone() {
            self.tell_target(TargetEvent::Schedule { image: IMAGE, backfill });
        }
        self.tell_source(SourceEvent::Start);
        self.tell_source(SourceEvent::Jumps { nanos: self.settings.seek });
        self.tell_order();
        self.tell_source(SourceEvent::LinkUp);
        self.at(TICK, Ev::Tick);
    }

    /// Whether the order changes while blocks are copied.
    pub(super) fn refreshes(&self) -> bool {
        self.orders.learns() && self.settings.refresh > 0
    }

    /// What the history says by now, at the end also of Backfill.
    pub(super) fn order(&self, ends: bool) -> Option<SourceEvent> {
        let copy = self.orders.copy()?;
        let backfill = self.orders.backfill().filter(|_| ends);
        Some(SourceEvent::Schedule { image: IMAGE, copy, backfill })
    }

    /// Blocks sent by now, and all there are.
    fn progress(&self) -> (u64, u64) {
        let sent = (self.out.first_bytes + self.out.extra_bytes) / BLOCK_SIZE;
        (sent, self.settings.disk / BLOCK_SIZE)
    }

    fn tell_order(&mut self) {
        self.refresh.made(Time(self.now), self.progress().0);
        if let Some(order) = self.order(!self.refreshes()) {
            self.tell_source(order);
        }
    }

    /// What auto would copy by now.
    fn tell_choice(&mut self) {
        self.chosen = self.now;
        let now = self.settings.start + self.now;
        if let Some(copy_only) = self.recent.choice(&self.settings, now) {
            self.tell_source(SourceEvent::Choose { image: IMAGE, copy_only });
        }
    }

    /// When the next event comes.
    pub(super) fn next_event(&self) -> u64 {
        self.queue.first_key_value().map_or(u64::MAX, |((time, _), _)| *time)
    }

    /// The next event.
    pub(super) fn step(&mut self) {
        let Some(((time, _), event)) = self.queue.pop_first() else {
            self.broken_by("nothing happens any more");
            return;
        };
        if time < self.now {
            self.broken_by("time goes back");
        }
        self.now = self.now.max(time);
        self.out.events += 1;
        match event {
            Ev::Tick => self.tick(),
            Ev::Refresh => self.refresh(),
            Ev::LinkFree => {
                self.link.busy = false;
                self.carry_on();
            }
            Ev::Arrives(frame) => self.arrives(frame),
            Ev::MemoryArrives => self.tell_source(SourceEvent::BeginHandover),
            Ev::Released(record) => self.carry_out(&record, record.blocks()),
            Ev::ToSource(envelope) => match envelope.body {
                ToSource::Hurry { tag } => self.link.hurry(tag),
                _ => self.tell_source(SourceEvent::Message(*envelope)),
            },
            Ev::ToTarget(envelope) => self.tell_target(TargetEvent::Message(*envelope)),
        }
    }

    fn tick(&mut self) {
        self.tell_source(SourceEvent::Tick);
        self.tell_target(TargetEvent::Tick);
        self.at(TICK, Ev::Tick);
        // Nobody will ask for the blocks that a deferred migration has left.
        let idle = self.trace_over && self.target.paused() && !self.link.busy;
        if idle && self.guest.place == GuestLocation::Target && !self.guest.waits() {
            self.finish();
        }
    }

    fn refresh(&mut self) {
        if self.guest.place == GuestLocation::Source {
            let (sent, all) = self.progress();
            if self.refresh.is_due(Time(self.now), sent, all) {
                self.tell_order();
            }
            if self.now >= self.chosen + CHOICE {
                self.tell_choice();
            }
            self.at(self.settings.refresh, Ev::Refresh);
        }
    }

    fn at(&mut self, delay: u64, event: Ev) {
        self.seq += 1;
        self.queue.insert((self.now + delay, self.seq), event);
    }

    pub(super) fn send_to_source(&mut self, envelope: Envelope<ToSource>) {
        self.at(self.link.delay, Ev::ToSource(Box::new(envelope)));
    }

    pub(super) fn send_to_target(&mut self, envelope: Envelope<ToTarget>) {
        self.at(self.link.delay, Ev::ToTarget(Box::new(envelope)));
    }

    pub(super) fn send_frame(&mut self, frame: Frame) {
        self.link.push(frame);
        self.carry_on();
    }

    /// The write is carried out later.
    pub(super) fn hold_back(&mut self, wait: u64, record: Record) {
        self.at(wait, Ev::Released(record));
    }

    /// The images are ready: the guest's memory goes, then the guest stops.
    pub(super) fn send_memory(&mut self) {
        if self.settings.memory == 0 {
            return self.at(0, Ev::MemoryArrives);
        }
        self.link.push_memory(self.settings.memory);
        self.carry_on();
    }

    /// Gives the link its next piece if it is free.
    fn carry_on(&mut self) {
        if self.link.busy {
            return;
        }
        let (source, stale) = (&self.source, &self.stale);
        // After the handover the target asks, for what has not arrived.
        let waits =
            |range| if source.owns() { source.waits(range) } else { stale.intersects(range) };
        let Some((piece, time)) = self.link.next(waits) else { return };
        self.link.busy = true;
        self.at(time, Ev::LinkFree);
        let arrival = time + self.link.delay;
        match piece {
            Piece::Blocks(frame) => {
                self.read(frame);
                self.at(arrival, Ev::Arrives(frame));
            }
            Piece::Memory(last) => {
                self.out.memory_bytes = self.settings.memory;
                if last {
                    self.at(arrival, Ev::MemoryArrives);
                }
            }
        }
    }

    /// The source reads what it is about to send: this version will be at the target.
    fn read(&mut self, frame: Frame) {
        let Frame { range, urgent, .. } = frame;
        let again = self.sent.intersection(range).len();
        self.sent.insert(range);
        self.stale.remove(range);
        self.out.extra_bytes += bytes(again);
        self.out.first_bytes += bytes(range.len - again);
        if urgent {
            self.out.urgent_bytes += bytes(range.len);
        }
        if let Some(picture) = &mut self.picture {
            let layer = match (urgent, again > 0) {
                (true, _) => Layer::Demand,
                (false, true) => Layer::Resent,
                (false, false) => Layer::Copied,
            };
            picture.paint(layer, self.now, range);
        }
    }

    fn arrives(&mut self, frame: Frame) {
        let Frame { tag, range, .. } = frame;
        self.fill(range);
        let arrival = Arrival::Written;
        self.tell_target(TargetEvent::RunArrived { tag, image: IMAGE, range, arrival });
        self.tell_target(TargetEvent::Idle);
    }

    /// No record of the trace is left.
    pub(super) fn trace_is_over(&mut self) {
        self.trace_over = true;
    }

    pub(super) fn broken_by(&mut self, why: &str) {
        self.why_broken.get_or_insert_with(|| why.to_owned());
    }

    /// What went wrong in a way that must not happen.
    pub(super) fn broken(&mut self) -> Option<String> {
        self.why_broken.take()
    }

    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    pub(super) fn fail(&mut self, why: Option<String>) {
        self.out.failed = Some(why.unwrap_or_else(|| "cancelled".to_owned()));
        self.finish();
    }

    pub(super) fn finish(&mut self) {
        self.out.total = self.now;
        self.over = true;
    }

    pub(super) fn outcome(mut self, records: u64) -> Outcome {
        self.out.records = records;
        self.out.seeks = self.link.seeks;
        self.out.throttled = self.source.throttle.delayed_operations();
        self.out.throttled_for = self.source.throttle.added_latency();
        self.out.rounds = self.source.rounds();
        self.out.left_bytes = bytes(self.target.missing.len());
        if self.out.failed.is_none() {
            let disk = offer(&self.settings).len;
            self.out.cancelled_bytes = disk - self.out.first_bytes - self.out.left_bytes;
        }
        if let Some(picture) = &mut self.picture {
            picture.end(self.out.total, self.out.handover);
        }
        self.out.picture = self.picture;
        self.out
    }
}
