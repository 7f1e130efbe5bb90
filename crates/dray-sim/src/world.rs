//! Time and events, and agents that are crash-only: they take an event, step the engine, and carry
//! out its effects in order; a crash can fall before any effect.

use crate::disk::{Disk, Snapshot};
use crate::faults::{Crash, CrashPoint, Setup, Side};
use crate::rng::Rng;
use crate::state::guest::{Guest, Power};
use crate::state::index::Index;
use crate::state::link::{Frame, Link};
use crate::state::source::SourceHost;
use crate::state::tally::Tally;
use crate::state::target::TargetHost;
use crate::state::vm::Vm;
use dray_engine::{MILLISECOND, SECOND, SourceEvent, TargetEvent};
use dray_types::{BlockRange, BlockSet, ImageIndex};
use std::collections::{BTreeMap, VecDeque};

/// Lines of the trace that are kept.
const TRACE: usize = 60;

/// Something that happens at some time.
pub(crate) enum Ev {
    Turn(Side, u64),
    Source(u64, SourceEvent),
    Target(u64, TargetEvent),
    ScanDone {
        life: u64,
        image: ImageIndex,
    },
    QuiesceCheck {
        life: u64,
    },
    SourceSynced {
        life: u64,
        snapshots: Vec<Snapshot>,
        fails: bool,
    },
    ReadDone {
        life: u64,
        session: u64,
        tag: u64,
        image: ImageIndex,
        range: BlockRange,
        described: bool,
    },
    Control {
        to: Side,
        session: u64,
        bytes: Vec<u8>,
    },
    Data {
        session: u64,
        stream: usize,
        frame: Frame,
    },
    WriteDone {
        life: u64,
        id: u64,
    },
    TargetSynced {
        life: u64,
        id: u64,
        snapshots: Vec<Snapshot>,
        fails: bool,
    },
    CheckpointData {
        life: u64,
        id: u64,
        snapshots: Vec<Snapshot>,
        present: Vec<BlockSet>,
        fails: bool,
    },
    CheckpointRecord {
        life: u64,
        id: u64,
        present: Vec<BlockSet>,
    },
    StartGuest {
        life: u64,
    },
    OpDone {
        op: u64,
        stamp: u64,
    },
    FlushData {
        op: u64,
        stamp: u64,
    },
    GuestTick,
    Tick,
    Connect,
    NoticeDown(Side, u64),
    Restart(Side),
    LinkFault,
    LinkBack,
    MemoryMoved {
        token: u64,
    },
    Abort {
        token: u64,
    },
    Cancel,
    ResumeMigration,
    FaultsStop,
    NewOrder,
    Operator,
    /// The target tries again what it could not write.
    TryAgain(u64),
}

/// Two hosts, a link, a guest.
pub(crate) struct World {
    pub(crate) now: u64,
    seq: u64,
    queue: BTreeMap<(u64, u64), Ev>,
    pub(crate) rng: Rng,
    pub(crate) setup: Setup,
    pub(crate) source: SourceHost,
    pub(crate) target: TargetHost,
    pub(crate) link: Link,
    pub(crate) guest: Guest,
    pub(crate) vm: Vm,
    pub(crate) check: Tally,
    pub(crate) index: Index,
    /// The session agreed to ask for blocks of what lacks.
    pub(crate) basis_known: bool,
    /// The session agreed on questions in Backfill.
    pub(crate) asks_known: bool,
    pub(crate) crash_at: Option<CrashPoint>,
    pub(crate) failed: Option<String>,
    pub(crate) events: u64,
    pub(crate) stamp: u64,
    trace: Option<VecDeque<String>>,
}

/// Formats only when somebody will read it.
macro_rules! note {
    ($world:expr, $($arg:tt)*) => {
        if $world.traces() {
            let line = format!($($arg)*);
            $world.record(line);
        }
    };
}
pub(crate) use note;

impl World {
    pub(crate) fn new(
        setup: Setup,
        mut rng: Rng,
        crash_at: Option<CrashPoint>,
        trace: bool,
    ) -> Self {
        let mut source = SourceHost::new(&setup, &mut rng);
        let mut target = TargetHost::new(&setup, &mut rng);
        source.lines = crate::state::pasts::give_pasts(&setup, &mut rng, &mut source, &mut target);
        let guest = Guest::new(&setup, |image, block| source.disks[image].read(block));
        let index = Index::new(&setup, &source, &mut rng);
        let mut world = Self {
            now: 0,
            seq: 0,
            queue: BTreeMap::new(),
            link: Link::new(&setup),
            vm: Vm::new(),
            check: Tally::new(&setup),
            index,
            basis_known: false,
            asks_known: false,
            source,
            target,
            guest,
            crash_at,
            failed: None,
            events: 0,
            stamp: 0,
            trace: trace.then(VecDeque::new),
            rng,
            setup,
        };
        world.begin();
        world
    }

    fn begin(&mut self) {
        note!(self, "{:?}", self.setup);
        self.at(0, Ev::Tick);
        self.at(0, Ev::GuestTick);
        self.at(0, Ev::Connect);
        // The guest wrote before the migration, and not all of it is durable.
        for _ in 0..self.rng.below(20) {
            self.old_write();
        }
        let start = self.rng.below(SECOND);
        self.at(start, Ev::Source(self.source.life, SourceEvent::Start));
        self.at(0, Ev::Target(self.target.life, TargetEvent::Start));
        if self.setup.faults.link_drop > 0.0 {
            self.at(0, Ev::LinkFault);
        }
        if self.rng.chance(self.setup.faults.cancel) {
            let when = self.rng.below(20 * SECOND);
            self.at(when, Ev::Cancel);
        }
        self.at(self.setup.faults_until, Ev::FaultsStop);
        if self.setup.orders {
            self.at(0, Ev::NewOrder);
        }
        if self.setup.operator || self.setup.strategy.defers {
            self.at(0, Ev::Operator);
        }
    }

    fn old_write(&mut self) {
        let image = self.rng.below(self.setup.images.len() as u64) as usize;
        if !self.setup.guest || self.setup.images[image].read_only {
            return;
        }
        let block = self.rng.below(self.setup.images[image].blocks);
        let version = (1 << 31) + self.rng.below(1 << 20);
        let range = BlockRange::new(block, 1);
        self.source.mark_line(image, range);
        self.source.disks[image].write(block, version);
        self.guest.write_issued(image, range, version);
        self.guest.write_acked(image, range, version);
    }

    /// Carries on until everything is over, something is wrong, or time is up.
    pub(crate) fn run(&mut self) -> Result<(), String> {
        let end = self.setup.faults_until + crate::state::tally::LIVENESS;
        while let Some((&(time, seq), _)) = self.queue.first_key_value() {
            let Some(ev) = self.queue.remove(&(time, seq)) else { break };
            self.now = time;
            self.events += 1;
            self.handle(ev);
            self.check_step();
            if let Some(why) = self.failed.take() {
                return Err(why);
            }
            if self.is_over() {
                return self.check_end();
            }
            if self.now > end {
                return Err(self.stuck());
            }
        }
        Err("nothing happens any more".into())
    }

    /// Something happens `delay` nanoseconds from now.
    pub(crate) fn at(&mut self, delay: u64, ev: Ev) {
        self.seq += 1;
        self.queue.insert((self.now + delay, self.seq), ev);
    }

    /// A random delay around `mean`.
    pub(crate) fn around(&mut self, mean: u64) -> u64 {
        if self.rng.chance(0.02) {
            self.rng.below(20 * mean + 1)
        } else {
            self.rng.below(2 * mean + 1)
        }
    }

    pub(crate) fn disk_time(&mut self) -> u64 {
        self.around(self.setup.disk_delay)
    }

    pub(crate) fn fail(&mut self, why: String) {
        note!(self, "VIOLATION {why}");
        self.failed.get_or_insert(why);
    }

    pub(crate) fn faulty(&mut self, p: f64) -> bool {
        self.now < self.setup.faults_until && self.rng.chance(p)
    }

    fn handle(&mut self, ev: Ev) {
        match ev {
            Ev::Turn(side, life) => self.turn(side, life),
            Ev::Source(life, event) => {
                if life == self.source.life {
                    self.tell_source(event);
                }
            }
            Ev::Target(life, event) => {
                if life == self.target.life {
                    self.tell_target(event);
                }
            }
            Ev::ScanDone { life, image } => self.scan_done(life, image),
            Ev::QuiesceCheck { life } => self.quiesce_check(life),
            Ev::SourceSynced { life, snapshots, fails } => {
                self.source_synced(life, &snapshots, fails)
            }
            Ev::ReadDone { life, session, tag, image, range, described } => {
                self.read_done(life, session, tag, image, range, described);
            }
            Ev::Control { to, session, bytes } => self.control_arrives(to, session, &bytes),
            Ev::Data { session, stream, frame } => self.frame_arrives(session, stream, frame),
            Ev::WriteDone { life, id } => self.write_done(life, id),
            Ev::TargetSynced { life, id, snapshots, fails } => {
                self.target_synced(life, id, &snapshots, fails);
            }
            Ev::CheckpointData { life, id, snapshots, present, fails } => {
                self.checkpoint_data(life, id, &snapshots, present, fails);
            }
            Ev::CheckpointRecord { life, id, present } => {
                self.checkpoint_record(life, id, &present)
            }
            Ev::StartGuest { life } => self.guest_starts(life),
            Ev::OpDone { op, stamp } => self.op_done(op, stamp),
            Ev::FlushData { op, stamp } => self.flush_data(op, stamp),
            Ev::GuestTick => self.guest_tick(),
            Ev::Tick => self.tick(),
            Ev::Connect => self.connect(),
            Ev::NoticeDown(side, session) => self.notice_down(side, session),
            Ev::Restart(side) => self.restart(side),
            Ev::LinkFault => self.link_fault(),
            Ev::LinkBack => self.link.up = true,
            Ev::MemoryMoved { token } => self.memory_moved(token),
            Ev::Abort { token } => self.abort(token),
            Ev::Cancel => self.cancel(),
            Ev::ResumeMigration => self.resume_migration(),
            Ev::FaultsStop => self.link.up = true,
            Ev::NewOrder => self.new_order(),
            Ev::Operator => self.operator(),
            Ev::TryAgain(life) => self.try_again(life),
        }
    }

    fn tick(&mut self) {
        self.tell_source(SourceEvent::Tick);
        self.tell_target(TargetEvent::Tick);
        self.at(100 * MILLISECOND, Ev::Tick);
    }

    pub(crate) fn tell_source(&mut self, event: SourceEvent) {
        if self.source.up {
            self.source.inbox.push_back(event);
            self.wake(Side::Source);
        }
    }

    pub(crate) fn tell_target(&mut self, event: TargetEvent) {
        if self.target.up {
            self.target.inbox.push_back(event);
            self.wake(Side::Target);
        }
    }

    pub(crate) fn wake(&mut self, side: Side) {
        let (awake, life) = match side {
            Side::Source => (&mut self.source.awake, self.source.life),
            Side::Target => (&mut self.target.awake, self.target.life),
        };
        if !std::mem::replace(awake, true) {
            self.at(0, Ev::Turn(side, life));
        }
    }

    fn turn(&mut self, side: Side, life: u64) {
        match side {
            Side::Source if life == self.source.life => self.source_turn(),
            Side::Target if life == self.target.life => self.target_turn(),
            _ => {}
        }
    }

    /// The agent is between two effects: true when it dies here.
    pub(crate) fn crashes(&mut self, side: Side) -> bool {
        let faults = &self.setup.faults;
        let (count, kill, cut) = match side {
            Side::Source => (&mut self.source.effects_done, faults.kill_source, faults.cut_source),
            Side::Target => (&mut self.target.effects_done, faults.kill_target, faults.cut_target),
        };
        let effect = *count;
        *count += 1;
        let chosen = self.crash_at.filter(|at| at.side == side && at.effect == effect);
        let crash = if let Some(at) = chosen {
            if matches!(at.crash, Crash::Unrecorded | Crash::Unsure) {
                self.source.spoiled = Some(at.crash);
                return false;
            }
            Some(at.crash)
        } else if self.faulty(kill) {
            Some(Crash::Kill)
        } else if self.faulty(cut) {
            Some(Crash::PowerCut)
        } else {
            None
        };
        match crash {
            None => false,
            Some(Crash::Full) => {
                self.fill_target(2 * SECOND);
                false
            }
            Some(crash) => {
                self.crash(side, crash);
                true
            }
        }
    }

    fn crash(&mut self, side: Side, crash: Crash) {
        note!(
            self,
            "{side:?}: {crash:?} before effect {}",
            match side {
                Side::Source => self.source.effects_done - 1,
                Side::Target => self.target.effects_done - 1,
            }
        );
        self.check.crashes += 1;
        self.stop_ops(side);
        match side {
            Side::Source => self.source.die(),
            Side::Target => {
                self.lose_pending_writes();
                self.index.forget_some(&mut self.rng);
                self.target.die();
            }
        }
        if crash == Crash::PowerCut {
            self.power_cut(side);
        }
        self.lose_session();
        let off = self.rng.below(3 * SECOND);
        self.at(off, Ev::Restart(side));
    }

    fn power_cut(&mut self, side: Side) {
        let disks: &mut Vec<Disk> = match side {
            Side::Source => &mut self.source.disks,
            Side::Target => &mut self.target.disks,
        };
        for disk in disks {
            disk.power_cut(&mut self.rng);
        }
        if side == Side::Target {
            self.target.noted.iter_mut().for_each(|noted| *noted = BlockSet::new());
        }
        self.guest.memory[side as usize] = false;
        // What travelled from a dead host before the handover is of no use to anybody.
        if side == Side::Source && !self.source.handed_over {
            self.guest.memory[Side::Target as usize] = false;
        }
        if self.guest.place == side && self.guest.power != Power::Absent {
            let survives = self.guest.memory[1 - side as usize];
            if !survives {
                self.guest.power = Power::Dead;
                self.guest.ops.clear();
            } else if side == Side::Target {
                self.guest_goes_back();
            }
        }
    }

    fn restart(&mut self, side: Side) {
        note!(self, "{side:?}: restarts");
        match side {
            Side::Source => self.restart_source(),
            Side::Target => self.restart_target(),
        }
    }

    pub(crate) fn traces(&self) -> bool {
        self.trace.is_some()
    }

    pub(crate) fn record(&mut self, line: String) {
        let time = self.now as f64 / 1e6;
        if let Some(trace) = &mut self.trace {
            if std::env::var_os("DRAY_SIM_ALL").is_some() {
                println!("{time:12.3} ms  {line}");
            }
            if trace.len() == TRACE {
                trace.pop_front();
            }
            trace.push_back(format!("{time:12.3} ms  {line}"));
        }
    }

    pub(crate) fn trace(&self) -> Vec<String> {
        self.trace.iter().flatten().cloned().collect()
    }
}
