//! The VM's own migration, reduced to what the engine sees of it: memory moves, the guest stops,
//! the images are handed over, the guest goes on at one of the two hosts.

use crate::faults::Side;
use crate::state::guest::Power;
use crate::state::vm::Stage;
use crate::world::{Ev, World, note};
use dray_engine::receiver::TargetNotice;
use dray_engine::source::SourceNotice;
use dray_engine::{BackfillControl, MILLISECOND, SECOND, SourceEvent, TargetEvent};
use dray_types::{BlockRange, Choice, ImageIndex, Schedule, Why};

/// Handovers tried before the operator gives up.
const MAX_TRIES: u32 = 12;
/// The longest that a guest waits for blocks once the faults are over, in virtual nanoseconds.
const LONGEST_WAIT: u64 = 30 * SECOND;
/// A patient operator starts Backfill this long after the last fault, whoever waits.
const PATIENCE: u64 = 100 * SECOND;

impl World {
    pub(crate) fn source_notice(&mut self, notice: SourceNotice) {
        match notice {
            SourceNotice::Ready if self.vm.stage == Stage::Idle => {
                let time = self.setup.memory_time;
                self.move_memory(time);
            }
            SourceNotice::HandoverFailed { .. } => self.handover_failed(),
            SourceNotice::Refused { .. }
                if self.vm.stage == Stage::HandingOver && self.source.machine.owns() =>
            {
                self.handover_failed();
            }
            SourceNotice::Abandoned { .. } => {
                // Whether tracking has begun again or not: nothing of the migration is left to vouch for.
                self.source.untracked = false;
                self.vm.stage = Stage::Idle;
                self.guest_goes_on_at_source();
                if self.rng.chance(self.setup.faults.resume) && self.vm.resumes < 3 {
                    self.vm.resumes += 1;
                    self.check.resuming = true;
                    self.at(SECOND, Ev::ResumeMigration);
                }
            }
            SourceNotice::TakenBack => {
                self.vm.stage = Stage::Idle;
                self.guest_goes_on_at_source();
            }
            SourceNotice::Broken { why } => self.fail(format!("the source says: {why}")),
            _ => {}
        }
    }

    pub(crate) fn target_notice(&mut self, notice: &TargetNotice) {
        if let TargetNotice::HandedBack { .. } = notice {
            self.guest.memory[Side::Target as usize] = false;
        }
    }

    /// The images go back, and the guest with them as it was stopped: whatever it has done since its user let it go on
    /// at the target has changed nothing.
    pub(crate) fn guest_goes_back(&mut self) {
        if self.guest.place == Side::Target && self.guest.power == Power::Running {
            self.guest.power = Power::Paused;
            self.guest.place = Side::Source;
            self.guest.ops.clear();
        }
    }

    /// The target takes changes: nobody goes on at the source any more.
    pub(crate) fn guest_stays(&mut self) {
        self.target.takes_changes = true;
        if self.guest.place == Side::Target {
            self.guest.memory[Side::Source as usize] = false;
        }
    }

    /// The guest's user lets it go on at the target, whose disks serve, and nobody has asked for that yet.
    pub(crate) fn user_resumes(&mut self) {
        let waits = self.guest.power == Power::Paused && self.guest.memory[Side::Target as usize];
        if waits && self.faulty(self.setup.faults.user_resumes) {
            note!(self, "the guest's user lets it go on at the target");
            self.guest.power = Power::Running;
            self.guest.place = Side::Target;
        }
    }

    fn move_memory(&mut self, mean: u64) {
        self.vm.stage = Stage::Moving;
        self.vm.token += 1;
        let token = self.vm.token;
        let delay = self.around(mean);
        self.at(delay, Ev::MemoryMoved { token });
    }

    pub(crate) fn memory_moved(&mut self, token: u64) {
        if token != self.vm.token || self.vm.stage != Stage::Moving || !self.source.up {
            return;
        }
        let runs = matches!(self.guest.power, Power::Running | Power::Absent);
        // Nobody stops a guest while the target cannot be reached; the link may still go later.
        let ready = self.source.machine.is_ready() && self.source.machine.status().link_up;
        if !runs || !ready {
            if self.source.machine.is_over() {
                self.vm.stage = Stage::Idle;
                return;
            }
            return self.move_memory(200 * MILLISECOND);
        }
        if self.guest.power == Power::Running {
            self.guest.power = Power::Paused;
        }
        self.vm.stage = Stage::Draining;
        self.vm_drained();
    }

    /// QEMU completes its requests before its memory is complete.
    pub(crate) fn vm_drained(&mut self) {
        if self.vm.stage != Stage::Draining || !self.guest.ops.is_empty() || !self.source.up {
            return;
        }
        note!(self, "vm: the guest is stopped");
        self.vm.stage = Stage::HandingOver;
        if self.target.up && self.guest.power == Power::Paused {
            self.guest.memory[Side::Target as usize] = true;
        }
        if self.faulty(self.setup.faults.abort) {
            let token = self.vm.token;
            let delay = self.around(20 * MILLISECOND);
            self.at(delay, Ev::Abort { token });
        }
        self.tell_source(SourceEvent::BeginHandover);
    }

    pub(crate) fn abort(&mut self, token: u64) {
        if token == self.vm.token && self.vm.stage == Stage::HandingOver {
            self.tell_source(SourceEvent::AbortHandover { why: "QEMU gave up".into() });
        }
    }

    fn handover_failed(&mut self) {
        self.guest_goes_on_at_source();
        self.vm.tries += u32::from(self.now > self.setup.faults_until);
        if self.vm.tries > MAX_TRIES {
            return self.fail("the handover fails again and again without a fault".into());
        }
        self.move_memory(300 * MILLISECOND);
    }

    fn guest_goes_on_at_source(&mut self) {
        self.guest.memory[Side::Target as usize] = false;
        if self.guest.power == Power::Paused {
            if self.guest.memory[Side::Source as usize] {
                self.guest.power = Power::Running;
            } else {
                self.guest.power = Power::Dead;
                self.guest.ops.clear();
            }
            self.guest.place = Side::Source;
        }
    }

    /// The orchestration died with the agent; the machine that recovers says what holds.
    pub(crate) fn vm_source_restarted(&mut self) {
        self.vm.stage = Stage::Idle;
        self.vm.token += 1;
        if self.source.machine.owns() && !self.source.handed_over {
            self.guest_goes_on_at_source();
        }
    }

    /// The target's QEMU is told to go on.
    pub(crate) fn guest_starts(&mut self, life: u64) {
        if life != self.target.life {
            return;
        }
        let result = self.start_guest();
        self.tell_target(TargetEvent::GuestStarted(result));
    }

    fn start_guest(&mut self) -> Result<(), Why> {
        let started = self.guest.place == Side::Target && self.guest.power == Power::Running;
        if self.guest.power == Power::Absent || started {
            return Ok(());
        }
        let fails = self.faulty(self.setup.faults.start_fails);
        if fails || !self.guest.memory[Side::Target as usize] {
            self.guest.power = Power::Dead;
            self.guest.place = Side::Target;
            self.guest.memory = [false; 2];
            self.guest.ops.clear();
            return Err("QEMU is gone".into());
        }
        note!(self, "guest goes on at the target");
        self.guest.power = Power::Running;
        self.guest.place = Side::Target;
        self.guest.memory = [false, true];
        Ok(())
    }

    pub(crate) fn cancel(&mut self) {
        let discard = self.rng.chance(self.setup.faults.discard);
        self.tell_source(SourceEvent::Cancel { discard });
    }

    /// Heat has changed, at one host or the other.
    pub(crate) fn new_order(&mut self) {
        let ix = self.rng.below(self.setup.images.len() as u64);
        let image = ImageIndex(ix as u16);
        let copy = self.draw_order(ix as usize);
        let backfill = self.draw_order(ix as usize);
        if self.setup.strategy.choice == Choice::Planned && self.rng.chance(0.5) {
            let copy_only = self.draw_order(ix as usize).ranges().iter().copied().collect();
            self.tell_source(SourceEvent::Choose { image, copy_only });
        } else if self.rng.chance(0.8) {
            let nanos = self.rng.below(20 * MILLISECOND);
            self.tell_source(SourceEvent::Jumps { nanos });
            let backfill = Some(backfill);
            self.tell_source(SourceEvent::Schedule { image, copy, backfill });
        } else {
            self.tell_target(TargetEvent::Schedule { image, backfill });
        }
        let pause = self.around(500 * MILLISECOND);
        self.at(pause, Ev::NewOrder);
    }

    /// Any order, sensible or not.
    fn draw_order(&mut self, image: usize) -> Schedule {
        let blocks = self.setup.images[image].blocks;
        let ranges = self.rng.below(12);
        let range = |_| BlockRange::new(self.rng.below(blocks + 8), self.rng.below(blocks / 2));
        (0..ranges).map(range).collect()
    }

    /// The operator starts and pauses Backfill, and in the end starts it.
    pub(crate) fn operator(&mut self) {
        let settled = self.now > self.setup.faults_until;
        let start = if self.setup.patient {
            let patience = self.setup.faults_until + PATIENCE;
            !self.waits_for_blocks() && settled || self.now > patience
        } else {
            settled || self.rng.chance(0.5)
        };
        let control = if start { BackfillControl::Start } else { BackfillControl::Pause };
        self.tell_target(TargetEvent::BackfillControl(control));
        let pause = self.around(SECOND);
        self.at(pause, Ev::Operator);
    }

    /// Whether the guest waits for missing blocks. It must not wait long, Backfill paused or not,
    /// once the faults are over.
    fn waits_for_blocks(&mut self) -> bool {
        let began = self.guest.ops.values().filter(|op| !op.issued).filter_map(|op| op.waits_since);
        let Some(began) = began.min() else { return false };
        let since = began.max(self.setup.faults_until);
        if self.target.open() && self.now > since + LONGEST_WAIT {
            self.fail("I5: a guest waits for missing blocks and Backfill is paused".into());
        }
        true
    }
}
