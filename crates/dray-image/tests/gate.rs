//! The gate against a model: every short sequence of causes that begin and end, and what passes then.

use dray_image::Quiesced;
use dray_image::gate::Gate;
use std::sync::Arc;
use std::time::Duration;

/// Longest sequence tried.
const STEPS: usize = 5;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Quiesce,
    Drop,
    KeepAndDrop,
    Park,
    Unpark,
    Shut,
    Unshut,
    Expect,
    TakeOver,
    AwaitStart,
    Start,
    Reserve,
    Unreserve,
    Fail,
    Unfail,
}

/// The process for which it is reserved, and another one.
const HOLDER: Option<u128> = Some(7);
const OTHER: Option<u128> = Some(8);

const ALL: [Step; 15] = [
    Step::Quiesce,
    Step::Drop,
    Step::KeepAndDrop,
    Step::Park,
    Step::Unpark,
    Step::Shut,
    Step::Unshut,
    Step::Expect,
    Step::TakeOver,
    Step::AwaitStart,
    Step::Start,
    Step::Reserve,
    Step::Unreserve,
    Step::Fail,
    Step::Unfail,
];

/// The causes for which a gate is closed.
#[derive(Clone, Copy, Default, Debug)]
struct Model {
    quiesced: bool,
    parked: bool,
    incoming: bool,
    unstarted: bool,
    reserved: bool,
    shut: bool,
    failed: bool,
}

impl Model {
    fn step(&mut self, step: Step) {
        match step {
            Step::Quiesce => self.quiesced = true,
            Step::Drop => self.quiesced = false,
            Step::KeepAndDrop => (self.quiesced, self.shut) = (false, true),
            Step::Park => (self.quiesced, self.parked) = (false, true),
            Step::Unpark => (self.parked, self.failed) = (false, false),
            Step::Shut => (self.shut, self.failed) = (true, false),
            Step::Unshut => self.shut = false,
            Step::Expect => {
                (self.incoming, self.unstarted, self.failed) = (true, false, false);
            }
            Step::TakeOver => self.incoming = false,
            Step::AwaitStart => self.unstarted = true,
            Step::Start => self.unstarted = false,
            Step::Reserve => self.reserved = true,
            Step::Unreserve => self.reserved = false,
            Step::Fail => self.failed = true,
            Step::Unfail => self.failed = false,
        }
        self.failed &= self.lasts();
    }

    /// Whether changes wait for a cause that may last.
    fn lasts(self) -> bool {
        self.reserved || self.lasts_for_all()
    }

    /// Whether changes of everybody do.
    fn lasts_for_all(self) -> bool {
        self.parked || self.incoming || self.unstarted || self.shut
    }

    /// Whether what waits for any of these waits, or fails.
    fn outcome(self, waits: bool, lasting: bool) -> Outcome {
        match (waits, lasting && self.failed) {
            (false, _) => Outcome::Passes,
            (true, false) => Outcome::Waits,
            (true, true) => Outcome::Fails,
        }
    }

    fn changes(self) -> Outcome {
        let lasting = self.lasts();
        self.outcome(lasting || self.quiesced, lasting)
    }

    /// Of the process for which the gate is reserved.
    fn changes_of_holder(self) -> Outcome {
        let lasting = self.lasts_for_all();
        self.outcome(lasting || self.quiesced, lasting)
    }

    fn reads(self) -> Outcome {
        let waits = self.parked || self.shut;
        self.outcome(waits, waits)
    }

    fn flushes(self) -> Outcome {
        self.outcome(self.shut, self.shut)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outcome {
    Passes,
    Waits,
    Fails,
}

/// Does one step; false when there is no guard for it.
fn take(gate: &Arc<Gate>, guard: &mut Option<Quiesced>, model: &mut Model, step: Step) -> bool {
    match step {
        Step::Quiesce => {
            let closed = model.quiesced || model.parked || model.incoming;
            let got = gate.quiesce(Duration::ZERO);
            assert_eq!(got.is_err(), closed, "{model:?}");
            let Ok(got) = got else { return true };
            *guard = Some(got);
        }
        Step::Drop | Step::KeepAndDrop | Step::Park => {
            let Some(mut held) = guard.take() else { return false };
            if step == Step::KeepAndDrop {
                held.keep();
            }
            if step == Step::Park { gate.park(held) } else { drop(held) }
        }
        Step::Unpark => gate.unpark(),
        Step::Shut => gate.shut(),
        Step::Unshut => gate.unshut(),
        Step::Expect => gate.expect(),
        Step::TakeOver => gate.take_over(),
        Step::AwaitStart => gate.await_start(Box::new(|| ())),
        Step::Start => gate.start(),
        Step::Reserve => gate.reserve(HOLDER),
        Step::Unreserve => gate.unreserve(),
        Step::Fail => {
            assert_eq!(gate.fail(), model.lasts(), "{model:?}");
        }
        Step::Unfail => gate.unfail(),
    }
    model.step(step);
    true
}

fn check(gate: &Gate, model: Model, steps: &[Step]) {
    let label = format!("{steps:?}: {model:?}");
    let (changes, reads, flushes) = (model.changes(), model.reads(), model.flushes());
    assert_eq!(gate.try_enter().is_some(), changes == Outcome::Passes, "{label}");
    assert_eq!(gate.reads_pass(), reads == Outcome::Passes && !model.incoming, "{label}");
    // What would wait is not asked.
    if changes != Outcome::Waits {
        assert_eq!(gate.enter(|| true).is_ok(), changes == Outcome::Passes, "{label}");
        let other = gate.enter_as(|| OTHER, || true);
        assert_eq!(other.is_ok(), changes == Outcome::Passes, "{label}");
    }
    let of_holder = model.changes_of_holder();
    if of_holder != Outcome::Waits {
        let entered = gate.enter_as(|| HOLDER, || true);
        assert_eq!(entered.is_ok(), of_holder == Outcome::Passes, "{label}");
    }
    assert_eq!(gate.takes_changes(), !model.lasts_for_all(), "{label}");
    if reads != Outcome::Waits {
        let elsewhere = gate.enter_read(|| true).ok();
        assert_eq!(elsewhere, (reads == Outcome::Passes).then_some(model.incoming), "{label}");
    }
    if flushes != Outcome::Waits {
        let answered = gate.enter_flush(|| true).ok();
        let expected = (flushes == Outcome::Passes).then_some(model.parked || model.incoming);
        assert_eq!(answered, expected, "{label}");
    }
    assert_eq!((gate.is_shut(), gate.is_parked()), (model.shut, model.parked), "{label}");
}

#[test]
fn whatever_begins_and_ends_only_what_no_cause_holds_back_passes() {
    let mut tried = 0_u64;
    for number in 0..ALL.len().pow(STEPS as u32) {
        let shut = number.is_multiple_of(2);
        let gate = if shut { Gate::new_shut() } else { Gate::new() };
        let mut model = Model { shut, ..Model::default() };
        let (mut guard, mut steps, mut rest) = (None, Vec::new(), number);
        check(&gate, model, &steps);
        for _ in 0..STEPS {
            let step = ALL[rest % ALL.len()];
            rest /= ALL.len();
            steps.push(step);
            if !take(&gate, &mut guard, &mut model, step) {
                break;
            }
            check(&gate, model, &steps);
            tried += 1;
        }
    }
    println!("{tried} states");
}

/// Both came while the gate was quiesced, and wait.
#[test]
fn of_two_who_wait_only_the_one_for_whom_the_gate_is_reserved_goes_on() {
    let gate = Gate::new();
    let quiet = gate.quiesce(Duration::ZERO).unwrap();
    let begins = |who| {
        let gate = Arc::clone(&gate);
        std::thread::spawn(move || gate.enter_as(|| who, || true).map(drop))
    };
    let (holder, others) = (begins(HOLDER), [OTHER, None].map(begins));
    std::thread::sleep(Duration::from_millis(50));
    gate.reserve(HOLDER);
    assert!(!holder.is_finished(), "it is quiesced");
    drop(quiet);
    holder.join().unwrap().unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert!(others.iter().all(|other| !other.is_finished()));
    gate.unreserve();
    others.into_iter().for_each(|other| other.join().unwrap().unwrap());
}

#[test]
fn a_gate_that_is_reserved_for_nobody_is_passed_by_nobody() {
    let gate = Gate::new();
    gate.reserve(None);
    assert!(gate.fail());
    assert!([HOLDER, None].iter().all(|who| gate.enter_as(|| *who, || true).is_err()));
}

#[test]
fn a_guard_that_is_kept_leaves_the_gate_shut_on_every_way_out() {
    fn fails(gate: &Arc<Gate>) -> Result<(), dray_image::Error> {
        let mut guard = gate.quiesce(Duration::ZERO)?;
        guard.keep();
        gate.quiesce(Duration::ZERO).map(drop)
    }
    let gate = Gate::new();
    fails(&gate).unwrap_err();
    assert!(gate.is_shut() && gate.try_enter().is_none());
    gate.unshut();
    assert!(gate.try_enter().is_some());
}

#[test]
fn a_quiesce_that_runs_out_of_time_opens_nothing_that_was_shut_meanwhile() {
    let gate = Gate::new();
    let pass = gate.try_enter().unwrap();
    gate.shut();
    gate.quiesce(Duration::ZERO).unwrap_err();
    drop(pass);
    assert!(gate.is_shut() && gate.try_enter().is_none());
    gate.unshut();
    assert!(gate.try_enter().is_some());
}

#[test]
fn the_first_change_that_waits_for_the_start_is_told_of_once_and_begins_after_it() {
    let gate = Gate::new();
    let (told, tells) = std::sync::mpsc::channel();
    gate.await_start(Box::new(move || told.send(()).unwrap()));
    assert!(gate.enter_read(|| true).is_ok_and(|elsewhere| !elsewhere), "reads pass");
    assert!(gate.enter_flush(|| true).is_ok_and(|answered| !answered), "a flush is done");
    assert!(gate.try_enter().is_none() && tells.try_recv().is_err(), "a look waits for nothing");
    std::thread::scope(|scope| {
        let changes = [0; 2].map(|_| scope.spawn(|| gate.enter(|| true).is_ok()));
        tells.recv_timeout(Duration::from_secs(10)).unwrap();
        assert!(changes.iter().all(|change| !change.is_finished()));
        gate.start();
        assert!(changes.into_iter().all(|change| change.join().unwrap()));
    });
    assert!(tells.try_recv().is_err(), "once");
}

/// As one of a guest whose user has let it go on before the images were handed over.
#[test]
fn a_change_that_came_before_is_told_of_as_well() {
    let gate = Gate::new();
    let (told, tells) = std::sync::mpsc::channel();
    gate.expect();
    std::thread::scope(|scope| {
        let change = scope.spawn(|| gate.enter(|| true).is_ok());
        std::thread::sleep(Duration::from_millis(50));
        gate.await_start(Box::new(move || told.send(()).unwrap()));
        gate.take_over();
        tells.recv_timeout(Duration::from_secs(10)).unwrap();
        gate.start();
        assert!(change.join().unwrap());
    });
}
