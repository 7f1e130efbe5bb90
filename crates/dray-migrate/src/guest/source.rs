//! Moving a VM away, from its source: one task from the first check to the guest's start elsewhere.
//!
//! Until the engine says that it has handed over, whatever fails leaves the guest running here on
//! its own disks (I4).

use crate::guest::receiver::plans;
use crate::messages::{ToSourceShell, ToTargetShell};
use crate::shown::once_more;
use crate::source::{Input, Memory, Reach, SessionSettings, SourceSlot, ToTask};
use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_config::Config;
use dray_engine::SourceEvent;
use dray_engine::source::SourceNotice;
use dray_host::abort;
use dray_host::folder::intent::{GuestFacts, SourceImage, SourceVm};
use dray_host::process::QemuProcess;
use dray_net::tunnel::TunnelEntry;
use dray_net::{DialSettings, NetError};
use dray_qemu::Limits;
use dray_types::Why;
use dray_types::text::harmless;
use dray_vm::hypervisor::{Departure, Hypervisor, Vm};
use dray_vm::last_look::{self, Expected};
use dray_vm::own;
use dray_vm::{qemu_error, socket};
use dray_wire::{Hello, StreamKind};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::block_in_place;

/// Why QEMU refuses a guest's state more often than for any other reason.
const OTHER_DEVICES: &str = "read the standard error of the waiting QEMU at the target: it must \
                             have the same devices as this QEMU, in the same places";

/// How long the target may take to look at its QEMU.
const CHECK_TIMEOUT: Duration = Duration::from_secs(30);

/// What the task is made of.
pub struct SourceVmTask {
    /// The migration.
    pub slot: Arc<SourceSlot>,
    /// What its loop tells.
    pub told: UnboundedReceiver<ToTask>,
    /// The agent's configuration.
    pub config: Arc<Config>,
    /// What runs the VM.
    pub hypervisor: Arc<dyn Hypervisor>,
    /// How to reach the target.
    pub reach: Reach,
    /// The engine has said that it is ready, perhaps while something else was waited for.
    pub ready: bool,
}

/// QEMU's numbers for the report.
fn memory(progress: &dray_qemu::Progress) -> Memory {
    let dray_qemu::Progress { transferred, remaining, dirty_rate, .. } = *progress;
    Memory { sent: transferred, left: remaining, dirty_rate }
}

/// What became of the guest. Only [`Stayed`](Self::Stayed) lets anybody touch it here (I5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It has moved.
    Gone,
    /// The engine has said that the migration is abandoned or that the images were taken back: the
    /// guest goes on here.
    Stayed,
    /// The loop has ended without a word. What is durable says more after a restart.
    Unknown,
}

/// Why the task stops early.
enum Stop {
    /// The engine has ended the migration; it has said why.
    Over,
    /// The loop has ended and has said nothing: the guest may be anywhere.
    Closed,
    /// QEMU or the target failed.
    Failed(Refusal),
}

impl From<Refusal> for Stop {
    fn from(error: Refusal) -> Self {
        Self::Failed(error)
    }
}

impl SourceVmTask {
    /// Moves the VM. A guest that stays here goes on when this returns.
    pub async fn run(mut self, facts: GuestFacts) -> Outcome {
        let Some(vm) = self.slot.intent().vm else { return Outcome::Unknown };
        let mut departure = None;
        let moved = self.try_move(&vm, facts, &mut departure).await;
        let error = match moved {
            Ok(()) => return Outcome::Gone,
            Err(Stop::Closed) => return Outcome::Unknown,
            Err(Stop::Over) => None,
            // Nothing was handed over: a handover that fails is void before it says so.
            Err(Stop::Failed(error)) => Some(error),
        };
        // Without it nobody has been stopped.
        if let Some(departure) = departure {
            let was_running = departure.was_running();
            self.bring_back(&vm, was_running, Some(departure)).await;
        }
        self.slot.send(Input::GuestStops(false));
        self.slot.send(Input::Say(ToTargetShell::Forget));
        match error {
            None => Outcome::Stayed,
            Some(error) => {
                self.slot.send(Input::Failed(error));
                self.wait_for_end().await
            }
        }
    }

    /// After a restart: the guest's memory has moved, or everything has ended. A guest that stays
    /// here goes on when this returns.
    pub async fn await_outcome(mut self) -> Outcome {
        match self.wait_for_guest().await {
            Ok(()) => Outcome::Gone,
            Err(Stop::Closed | Stop::Failed(_)) => Outcome::Unknown,
            Err(Stop::Over) => {
                if let Some(vm) = self.slot.intent().vm.filter(|_| !self.slot.is_home()) {
                    let running = vm.facts.as_ref().is_some_and(|facts| facts.running);
                    self.bring_back(&vm, running, None).await;
                }
                Outcome::Stayed
            }
        }
    }

    /// Waits until the engine has ended what has failed.
    async fn wait_for_end(&mut self) -> Outcome {
        match self.wait(|_| None::<()>).await {
            Err(Stop::Over) => Outcome::Stayed,
            _ => Outcome::Unknown,
        }
    }

    async fn wait_for_guest(&mut self) -> Result<(), Stop> {
        self.wait(|told| match told {
            ToTask::Notice(SourceNotice::Done)
            | ToTask::Shell(ToSourceShell::GuestRunning | ToSourceShell::GuestFailed(_), _) => {
                Some(())
            }
            _ => None,
        })
        .await
    }

    async fn try_move(
        &mut self,
        vm: &SourceVm,
        facts: GuestFacts,
        departure: &mut Option<Box<dyn Departure>>,
    ) -> Result<(), Stop> {
        let vm = own::connect(&*self.hypervisor, vm).await;
        let vm = vm.map_err(|why| qemu_error("cannot move the vm", &why))?;
        tokio::select! {
            moved = self.move_guest(&*vm, facts, departure) => moved?,
            () = vm.ended() => {
                let why = "its QEMU has ended, or has closed its monitor";
                let error = Refusal::new(ErrorKind::Hypervisor, "cannot move the vm", why)
                    .hint("when the vm runs again, prepare and migrate it");
                return Err(error.into());
            }
        }
        match departure {
            Some(departure) => self.hand_over(&mut **departure).await,
            None => Err(Stop::Closed),
        }
    }

    /// Everything up to where only the images are to be handed over.
    async fn move_guest(
        &mut self,
        vm: &dyn Vm,
        facts: GuestFacts,
        departure: &mut Option<Box<dyn Departure>>,
    ) -> Result<(), Stop> {
        self.wait_for_link().await?;
        let ran = facts.running;
        self.check(facts).await?;
        if !self.ready {
            self.wait(|told| matches!(told, ToTask::Notice(SourceNotice::Ready)).then_some(()))
                .await?;
        }
        // The target's answer comes when the loop has done this.
        self.slot.send(Input::GuestStops(true));
        self.listen().await?;
        let entry = self.open_tunnel(vm)?;
        let path = entry.path().to_owned();
        let carrier = self.carry(entry, vm.process(), (self.reach)()?);
        let limits = self.limits();
        // As long as QEMU has not said that it did not, it may have begun, and stop the guest later: also when
        // nobody waits for the answer any more.
        *departure = Some(vm.departure(ran));
        let departure = match vm.send(&path, &limits).await {
            Ok(begun) => departure.insert(begun),
            Err(why) => {
                carrier.abort_when(true);
                if !why.kind().is_unknown() {
                    *departure = None;
                }
                return Err(qemu_error("cannot move the vm's memory", &why).into());
            }
        };
        let memory = self.move_memory(vm, &mut **departure).await;
        carrier.abort_when(memory.is_err());
        memory?;
        let runs = departure.was_running();
        if runs == ran { Ok(()) } else { self.tell_whether_it_runs(runs).await }
    }

    /// Somebody has paused the guest on the way, or let it go on: so it is wherever it is next.
    async fn tell_whether_it_runs(&mut self, runs: bool) -> Result<(), Stop> {
        let what = "cannot tell the target whether the guest is to run";
        let io = |why: &dyn std::fmt::Display| Stop::from(Refusal::new(ErrorKind::Io, what, why));
        self.slot.set_running(runs).map_err(|why| io(&why))?;
        let answer = self.ask(ToTargetShell::Runs(runs), |message| match message {
            ToSourceShell::Noted(result) => Some(result.clone()),
            _ => None,
        });
        answer.await?.map_err(|why| io(&why))
    }

    /// The guest has stopped for the last time. Everything that it has written is in the images that are
    /// handed over, if its disks are still on them: others can have changed that at any time until now. Before
    /// QEMU is told to go on, which ends when a job writes to a disk that QEMU has let go.
    async fn look_again(&self, vm: &dyn Vm) -> Result<(), Stop> {
        let what = "cannot hand over the vm's disks";
        let intent = self.slot.intent();
        let facts = intent.vm.as_ref().and_then(|vm| vm.facts.as_ref());
        let plans = facts.map(plans).transpose();
        let plans = plans.map_err(|why| Refusal::new(ErrorKind::Internal, what, why))?;
        let look = vm.look().await.map_err(|why| qemu_error(what, &why))?;
        let (images, nbd_socket) = (&intent.images, &self.config.nbd_socket());
        let expected = Expected { plans: &plans.unwrap_or_default(), images, nbd_socket };
        expected.check(&look).map_err(|found| {
            // It names files and jobs as QEMU does.
            let error = Refusal::new(ErrorKind::Conflict, what, harmless(found.why));
            error.hint(harmless(found.hint))
        })?;
        // What lies below its disks was read once: QEMU can be told to write it.
        let unwritten = || images.iter().try_for_each(SourceImage::check_unwritten);
        block_in_place(unwritten).map_err(|why| {
            let error = Refusal::new(ErrorKind::Conflict, what, harmless(why.to_string()));
            error.hint(last_look::PREPARE).into()
        })
    }

    /// Asks the target whether its QEMU fits.
    async fn check(&mut self, facts: GuestFacts) -> Result<(), Stop> {
        let answer = self.ask(ToTargetShell::Check(facts), |message| match message {
            ToSourceShell::Checked(result) => Some(result.clone()),
            _ => None,
        });
        answer.await?.map_err(|why| {
            Refusal::new(ErrorKind::Hypervisor, "the target's QEMU cannot take the vm", why)
                .hint(
                    "give `dray prepare` again, start the waiting QEMU with the arguments that it \
                     prints, and give `dray migrate` again",
                )
                .into()
        })
    }

    async fn listen(&mut self) -> Result<(), Stop> {
        let answer = self.ask(ToTargetShell::Listen, |message| match message {
            ToSourceShell::Listening(result) => Some(result.clone()),
            _ => None,
        });
        answer.await?.map_err(|why| {
            Refusal::new(ErrorKind::Hypervisor, "the target's QEMU cannot listen", why)
                .hint(
                    "the waiting QEMU must have `-incoming defer`; start it again, then give \
                     `dray resume`",
                )
                .into()
        })
    }

    /// Waits until there is a session. What was told since the migration was prepared says no more
    /// than whether there is one now.
    async fn wait_for_link(&mut self) -> Result<(), Stop> {
        let mut up = false;
        while let Ok(told) = self.told.try_recv() {
            self.ready |= matches!(told, ToTask::Notice(SourceNotice::Ready));
            match told {
                ToTask::LinkUp => up = true,
                ToTask::LinkDown => up = false,
                told if ends(&told) => return Err(Stop::Over),
                _ => {}
            }
        }
        if up {
            return Ok(());
        }
        self.wait(|told| matches!(told, ToTask::LinkUp).then_some(())).await
    }

    /// Asks the target's shell, and again in every session that is made before it has answered: in
    /// one that broke it may not have been heard.
    async fn ask<T>(
        &mut self,
        question: ToTargetShell,
        mut pick: impl FnMut(&ToSourceShell) -> Option<T>,
    ) -> Result<T, Stop> {
        let slot = Arc::clone(&self.slot);
        let say = || slot.send(Input::Say(question.clone()));
        say();
        let wanted = self.wait(|told| match told {
            ToTask::Shell(message, _) => pick(message),
            ToTask::LinkUp => {
                say();
                None
            }
            _ => None,
        });
        tokio::time::timeout(CHECK_TIMEOUT, wanted).await.unwrap_or_else(|_| {
            let why = format!("no answer in {} s", CHECK_TIMEOUT.as_secs());
            Err(Refusal::new(ErrorKind::Peer, "cannot ask the target about its QEMU", why).into())
        })
    }

    /// Waits until the loop tells what `pick` wants; stops when the migration ends before.
    async fn wait<T>(&mut self, mut pick: impl FnMut(&ToTask) -> Option<T>) -> Result<T, Stop> {
        while let Some(told) = self.told.recv().await {
            self.ready |= matches!(told, ToTask::Notice(SourceNotice::Ready));
            if let Some(found) = pick(&told) {
                return Ok(found);
            }
            if ends(&told) {
                return Err(Stop::Over);
            }
        }
        Err(Stop::Closed)
    }

    fn open_tunnel(&self, vm: &dyn Vm) -> ApiResult<TunnelEntry> {
        let path = self.config.run_dir.join(format!("memory-{}.sock", self.slot.board.migration));
        let user = vm.process().and_then(|qemu| qemu.user());
        TunnelEntry::bind(&path, user).map_err(|why| {
            Refusal::new(ErrorKind::Io, "cannot make the socket for the guest's memory", why)
        })
    }

    fn carry(
        &self,
        entry: TunnelEntry,
        qemu: Option<QemuProcess>,
        settings: SessionSettings,
    ) -> Carrier {
        let slot = Arc::clone(&self.slot);
        let is_it = move |pid| socket::is_process(qemu.as_ref(), pid);
        Carrier(tokio::spawn(async move {
            let dial = dial_memory(&slot, &settings);
            if let Err(why) = entry.carry(is_it, dial, &slot.pacer, &slot.stats).await {
                // QEMU sees the end of its socket and fails its migration, which is then told.
                tracing::warn!(migration = %slot.board.migration, %why, "the memory stream broke");
            }
        }))
    }

    fn limits(&self) -> Limits {
        let options = self.slot.intent().options;
        let downtime = options.as_ref().map_or(300, |options| options.max_downtime_ms);
        // The budget paces the stream; QEMU's own limit would only hide it from its estimate. Half
        // of the downtime is left to what comes after the memory.
        Limits { max_bandwidth: 0, downtime_limit: Duration::from_millis((downtime / 2).max(1)) }
    }

    async fn move_memory(
        &mut self,
        vm: &dyn Vm,
        departure: &mut dyn Departure,
    ) -> Result<(), Stop> {
        let slot = Arc::clone(&self.slot);
        let mut report = |progress: &dray_qemu::Progress| {
            slot.send(Input::Memory(memory(progress)));
        };
        let failed = |why| {
            let error = qemu_error("the vm's memory could not be moved", &why);
            Stop::Failed(match error.hint {
                Some(_) => error,
                None => error.hint(OTHER_DEVICES),
            })
        };
        tokio::select! {
            done = departure.stopped(&mut report) => { done.map_err(failed)?; }
            stop = over(&mut self.told) => return Err(stop),
        }
        if departure.was_running() {
            self.slot.send(Input::Stopped(departure.stopped_at()));
        }
        // From here the guest is stopped: every wait below is downtime.
        self.look_again(vm).await?;
        let done = departure.finish().await.map_err(failed)?;
        self.slot.send(Input::Memory(Memory { left: 0, ..memory(&done) }));
        Ok(())
    }

    /// QEMU here has written its last byte: ownership may pass.
    async fn hand_over(&mut self, departure: &mut dyn Departure) -> Result<(), Stop> {
        self.slot.send(Input::Engine(SourceEvent::BeginHandover));
        loop {
            let turn = self.wait(|told| match told {
                ToTask::Quiet => Some(Turn::Quiet),
                ToTask::Notice(SourceNotice::HandedOver) => Some(Turn::HandedOver),
                ToTask::Notice(
                    SourceNotice::HandoverFailed { why } | SourceNotice::Refused { why },
                ) => Some(Turn::Failed(why.clone())),
                _ => None,
            });
            match turn.await? {
                Turn::Quiet => {
                    let still = departure.check_sent().await.map_err(Why::of);
                    self.slot.send(Input::StillStopped(still));
                }
                Turn::HandedOver => break,
                Turn::Failed(why) => {
                    let error = Refusal::new(ErrorKind::Peer, "handover failed", why);
                    return Err(error.hint(once_more(true)).into());
                }
            }
        }
        // Past the point of no return: only a hand-back brings the guest home.
        self.wait_for_guest().await
    }

    async fn bring_back(
        &self,
        vm: &SourceVm,
        was_running: bool,
        begun: Option<Box<dyn Departure>>,
    ) {
        abort::before(|| vec!["BringBack".to_owned()]);
        let board = &self.slot.board;
        let tell = |why: &str| {
            tracing::error!(migration = %board.migration, why, "cannot resume the guest");
            board.notice(format!(
                "the guest could not be resumed, and the agent tries again: {why}"
            ));
        };
        own::bring_back(&*self.hypervisor, vm, was_running, begun, tell).await;
    }
}

/// What the loop says during a handover.
enum Turn {
    /// The images are at rest.
    Quiet,
    /// They are the target's.
    HandedOver,
    /// They stay.
    Failed(String),
}

/// Messages after which there is nothing left to do for the VM.
fn ends(told: &ToTask) -> bool {
    matches!(told, ToTask::Notice(SourceNotice::Abandoned { .. } | SourceNotice::TakenBack))
}

/// Resolves when the engine ends the migration; other messages are passed over.
async fn over(told: &mut UnboundedReceiver<ToTask>) -> Stop {
    while let Some(message) = told.recv().await {
        if ends(&message) {
            return Stop::Over;
        }
    }
    Stop::Closed
}

/// The task that carries the memory.
struct Carrier(tokio::task::JoinHandle<()>);

impl Carrier {
    /// Breaks the stream off if `failed`; else it ends by itself.
    fn abort_when(&self, failed: bool) {
        if failed {
            self.0.abort();
        }
    }
}

async fn dial_memory(
    slot: &SourceSlot,
    settings: &SessionSettings,
) -> Result<dray_net::Stream, NetError> {
    let hello = Hello {
        agent: dray_net::AGENT.to_owned(),
        migration: Some(slot.board.migration),
        session: 0,
        stream: 0,
        features: Vec::new(),
    };
    let mut stream = dray_net::dial(
        &settings.identity,
        &settings.peer,
        &settings.address,
        StreamKind::Memory,
        &hello,
        &DialSettings::default(),
    )
    .await?;
    stream.limit_silence(dray_net::silence_limit(settings.control.dead));
    Ok(stream)
}
