//! Taking a VM in, at its target: one task per migration that does what the owner loop and the
//! source's shell ask of the waiting QEMU.

use crate::guest::behind::Behind;
use crate::guest::qcow2::Unreleased;
use crate::guest::start::{NotDone, Step};
use crate::messages::{Made, NotReleased, ToSourceShell, ToTargetShell};
use crate::receiver::{Input, TargetSlot, ToTask};
use dray_config::Config;
use dray_engine::TargetEvent;
use dray_host::folder::intent::{GuestFacts, TargetIntent};
use dray_host::process::QemuProcess;
use dray_host::registry::{Process, Registry};
use dray_net::tunnel;
use dray_net::{NetError, NetErrorKind, Stream};
use dray_qemu::LayerPlan;
use dray_types::Why;
use dray_vm::attached::Expected;
use dray_vm::hypervisor::{Arrival, Hypervisor, Vm};
use dray_vm::picture::on_local;
use dray_vm::released;
use dray_vm::socket::Meeting;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::mpsc::UnboundedReceiver;

/// After handover the guest's memory must be there: it was sent before.
const LOADED_TIMEOUT: Duration = Duration::from_secs(10);

/// What the task is made of.
pub struct TargetVmTask {
    /// The migration.
    pub slot: Arc<TargetSlot>,
    /// The disks have been released: who asks again is told so.
    pub released: bool,
    /// The images whose disks QEMU has back, by their numbers.
    pub given: BTreeSet<usize>,
    /// What was made of images, by their numbers.
    pub made: BTreeMap<usize, Made>,
    /// Images that became no qcow2, and of which it was not known at first where the disk is: why.
    pub unsure: BTreeMap<usize, String>,
    /// What its loop tells.
    pub told: UnboundedReceiver<ToTask>,
    /// The agent's configuration.
    pub config: Arc<Config>,
    /// What runs the VM.
    pub hypervisor: Arc<dyn Hypervisor>,
    /// The images of this host.
    pub registry: Arc<Registry>,
    /// Which clients of them are the QEMUs that have waited.
    pub behind: Behind,
    /// Breaks the connections of a process to them.
    pub cut_off: Arc<dyn Fn(Process) + Send + Sync>,
    /// The QEMU whose disks were looked at last, and are the migration's.
    pub checked: Option<QemuProcess>,
    /// The QEMU that was seen to have everything, and was asked for nothing since.
    pub reached: Option<Box<dyn Vm>>,
}

/// Where the waiting QEMU of a migration listens for memory.
fn meeting(config: &Config, slot: &TargetSlot) -> Meeting {
    Meeting::at(&config.run_dir, &format!("incoming-{}", slot.board.migration))
}

/// Carries a memory stream that the source has opened to the waiting QEMU.
///
/// # Errors
/// When QEMU does not listen or either side breaks.
pub async fn deliver(config: &Config, slot: &TargetSlot, stream: Stream) -> Result<(), NetError> {
    let meeting = meeting(config, slot);
    let qemu = meeting.connect(slot.intent().qemu.as_ref()).and_then(|qemu| {
        qemu.set_nonblocking(true)?;
        UnixStream::from_std(qemu)
    });
    let carried = tunnel::deliver(stream, qemu, &slot.stats).await;
    meeting.remove().map_err(|why| NetError::new(NetErrorKind::Local, why.to_string()))?;
    carried.map(drop)
}

/// Whether the QEMU that is to take a VM waits, and has the disks of a prepared migration. Nothing is noted of it: it is
/// looked at again when the migration begins.
///
/// Nothing is changed at it, and who asks learns nothing of a VM that its migration does not concern.
///
/// # Errors
/// Why it cannot take the VM.
pub async fn fits(
    config: &Config,
    hypervisor: &dyn Hypervisor,
    slot: &TargetSlot,
    facts: &GuestFacts,
) -> Result<(), Why> {
    let fits = async {
        let numbered = plans(facts)?;
        let vm = vm_behind(config, hypervisor, &facts.qmp, NotDone::Refused).await?;
        let plans: Vec<_> = numbered.iter().map(|(_, plan)| plan.clone()).collect();
        let (images, nbd_socket) = (&slot.intent().images, &config.nbd_socket());
        let expected = Expected { plans: &numbered, images, nbd_socket, arrived: false };
        let disks = vm.look().await?.disks;
        expected.concerns(&disks)?;
        vm.waits(&plans).await?;
        expected.check(&disks)?;
        Ok::<_, NotDone>(())
    };
    fits.await.map_err(Why::of)
}

impl TargetVmTask {
    /// Does what it is told until the loop ends.
    pub async fn run(mut self) {
        let mut waiting = None;
        while let Some(told) = self.told.recv().await {
            match told {
                ToTask::Shell(ToTargetShell::Check(facts), _unanswered) => {
                    // A source that was restarted asks again, and QEMU talks to one at a time.
                    drop(waiting.take());
                    let checked = self.check(facts).await;
                    let result = checked.map(|arrival| waiting = Some(arrival));
                    self.slot.send(Input::Say(ToSourceShell::Checked(result.map_err(Why::of))));
                }
                ToTask::Shell(ToTargetShell::Listen, _unanswered) => {
                    let result = self.listen(&mut waiting).await;
                    self.slot.send(Input::Say(ToSourceShell::Listening(result.map_err(Why::of))));
                }
                ToTask::Shell(ToTargetShell::Forget, _) => waiting = None,
                ToTask::Shell(ToTargetShell::Runs(running), _unanswered) => {
                    let result = self.note_running(running);
                    self.slot.send(Input::Say(ToSourceShell::Noted(result.map_err(Why::of))));
                }
                ToTask::Reach => {
                    let step = Step::Reach(waiting.take());
                    let Some(result) = self.until_answered(step).await else { continue };
                    self.slot.send(Input::Engine(TargetEvent::GuestReachable(result)));
                }
                ToTask::Start => {
                    let Some(result) = self.until_answered(Step::Start).await else { continue };
                    self.slot.send(Input::Engine(TargetEvent::GuestStarted(result)));
                }
                ToTask::Release => self.finish().await,
                ToTask::Shell(
                    ToTargetShell::Settings(_)
                    | ToTargetShell::Strategy(_)
                    | ToTargetShell::Progress { .. }
                    | ToTargetShell::Lines { .. }
                    | ToTargetShell::Bye
                    | ToTargetShell::Done,
                    _,
                )
                | ToTask::Notice(_) => {}
            }
        }
        if let Err(why) = meeting(&self.config, &self.slot).remove() {
            tracing::warn!(migration = %self.slot.board.migration, %why, "cannot remove a socket");
        }
    }

    /// Connects to the waiting QEMU and compares its disks with the source's.
    async fn check(&mut self, facts: GuestFacts) -> Result<Box<dyn Arrival>, NotDone> {
        let numbered = plans(&facts)?;
        let vm = self.vm_behind(&facts.qmp, NotDone::Refused).await?;
        let plans: Vec<_> = numbered.iter().map(|(_, plan)| plan.clone()).collect();
        // Nothing is asked of a QEMU that waits for something else.
        vm.waits(&plans).await?;
        self.look(&*vm, &numbered, false).await?;
        let arrival = vm.await_guest(&plans).await?;
        self.look(&*vm, &numbered, false).await?;
        let qemu = self.checked.clone();
        // Before the intent forgets the one that waited before.
        if let Some(qemu) = &qemu {
            self.waits_in(qemu);
        }
        self.slot.board.change(|shown| shown.vm.clone_from(&facts.name));
        self.note(|intent| (intent.guest, intent.qemu) = (Some(facts), qemu))?;
        Ok(arrival)
    }

    /// The VM is to come to this QEMU, and to none that waited before: that may have the memory of an attempt that
    /// came to nothing, and be let go on. What either gets of the images it gets anew.
    fn waits_in(&mut self, qemu: &QemuProcess) {
        let TargetIntent { images, qemu: before, .. } = self.slot.intent();
        let written = images.iter().filter(|image| !image.offer.read_only);
        let clients = written.flat_map(|it| self.registry.clients_that_run(it.name_here()));
        let clients: Vec<_> = clients.collect();
        let Some(now) = self.behind.find(qemu, &clients) else { return };
        if self.registry.vm_may_come(now) {
            (self.cut_off)(now);
        }
        for old in self.behind.replaced(now, qemu, before.as_ref(), &clients) {
            self.registry.is_replaced(old);
            (self.cut_off)(old);
        }
    }

    async fn listen(&mut self, waiting: &mut Option<Box<dyn Arrival>>) -> Result<(), NotDone> {
        let arrival = match waiting {
            Some(arrival) => arrival,
            None => {
                // It was checked by an agent that has been restarted since.
                let facts = self.slot.intent().guest.ok_or("the target's QEMU was not checked")?;
                waiting.insert(self.check(facts).await?)
            }
        };
        let meeting = meeting(&self.config, &self.slot);
        let socket = meeting.socket();
        // The source asks again when it has not heard the answer, in a session that was lost.
        if socket.exists() && arrival.listens(&socket).await? {
            return Ok(());
        }
        // The check was before the copy.
        let vm = arrival.vm();
        self.look_again(&*vm).await?;
        meeting.make(self.slot.intent().qemu.as_ref())?;
        Ok(arrival.listen(&socket).await?)
    }

    /// Checks that the disks of the QEMU that has not started the guest are still those of this migration.
    pub(super) async fn look_again(&mut self, vm: &dyn Vm) -> Result<(), NotDone> {
        let guest = self.slot.intent().guest.ok_or("the migration has no vm")?;
        self.look(vm, &plans(&guest)?, false).await
    }

    /// What the guest does when it is started here is what it did last at the source.
    fn note_running(&self, running: bool) -> io::Result<()> {
        self.note(|intent| intent.guest.iter_mut().for_each(|guest| guest.running = running))
    }

    fn note(&self, change: impl FnOnce(&mut TargetIntent)) -> io::Result<()> {
        self.slot.change_intent(change).map_err(|why| {
            io::Error::new(why.kind(), format!("cannot write the migration's intent: {why}"))
        })
    }

    /// Before the guest is started for good: is its QEMU there, with everything loaded?
    pub(super) async fn reach(&mut self, arrival: Option<Box<dyn Arrival>>) -> Result<(), NotDone> {
        if let Some(mut arrival) = arrival {
            arrival.loaded(LOADED_TIMEOUT).await?;
            let vm = arrival.vm();
            // Others can have changed its disks since it listens.
            self.look_again(&*vm).await?;
            self.reached = Some(vm);
            return Ok(());
        }
        let vm = self.connect(false).await?;
        let now = vm.look().await?;
        if now.status.state == "inmigrate" {
            return Err("the target's QEMU has not received the guest's memory".into());
        }
        self.look_again(&*vm).await?;
        self.reached = Some(vm);
        Ok(())
    }

    /// The guest's QEMU. One that is not the process that was checked is looked at before anything is asked
    /// of it: another VM may have come to its socket.
    pub(super) async fn connect(&mut self, arrived: bool) -> Result<Box<dyn Vm>, NotDone> {
        let guest = self.slot.intent().guest.ok_or("the migration has no vm")?;
        // It was there, and may come back.
        let vm = self.vm_behind(&guest.qmp, NotDone::Silent).await?;
        if self.checked.is_none() || vm.process() != self.checked {
            self.look(&*vm, &plans(&guest)?, arrived).await?;
        }
        Ok(vm)
    }

    async fn vm_behind(
        &self,
        qmp: &Path,
        unfit: fn(Why) -> NotDone,
    ) -> Result<Box<dyn Vm>, NotDone> {
        vm_behind(&self.config, &*self.hypervisor, qmp, unfit).await
    }

    /// Checks that the disks of a QEMU are on the exports of this migration.
    async fn look(
        &mut self,
        vm: &dyn Vm,
        plans: &[(usize, LayerPlan)],
        arrived: bool,
    ) -> Result<(), NotDone> {
        let disks = vm.look().await?.disks;
        let (images, nbd_socket) = (&self.slot.intent().images, &self.config.nbd_socket());
        Expected { plans, images, nbd_socket, arrived }.check(&disks)?;
        self.checked = vm.process();
        Ok(())
    }

    /// Every block is here: the disks go back to QEMU if that was asked for.
    async fn finish(&mut self) {
        let settings = self.slot.intent().settings;
        if settings.release && self.slot.intent().guest.is_some() {
            let result = match self.released {
                true => {
                    self.say_made();
                    Ok(())
                }
                false => match self.release_known().await {
                    Some(result) => result,
                    None => return,
                },
            };
            let result = result.map_err(|why| {
                let why = why.to_string();
                tracing::warn!(migration = %self.slot.board.migration, why, "cannot release disks");
                NotReleased { why, qemu_ended: self.has_ended() }
            });
            self.released = result.is_ok();
            self.slot.send(Input::Say(ToSourceShell::Released(result)));
        }
        self.name_raw();
        self.slot.send(Input::Finished { given: self.given.clone() });
    }

    /// Gives the disks back that QEMU does not have yet. Can be repeated.
    pub(super) async fn release(&mut self) -> Result<(), Unreleased> {
        let intent = self.slot.intent();
        let guest = intent.guest.ok_or("the migration has no vm")?;
        let mut left = Vec::new();
        for (number, plan) in plans(&guest)? {
            let image = intent.images.get(number).ok_or("the plan names no image")?;
            let entry = self.registry.get(image.name_here()).ok_or("the image is missing")?;
            if !self.is_made(number, &entry) {
                left.push((number, plan, image, entry));
            }
        }
        if left.is_empty() {
            // Also of a VM that has ended.
            return Ok(());
        }
        let vm = self.connect(true).await.map_err(|why| Unreleased::NotAsked(Why::of(why)))?;
        let qmp = vm.monitor();
        for (number, plan, image, entry) in left {
            if image.qcow2 && self.make_qcow2(qmp, number, &entry, &plan).await? {
                continue;
            }
            let plan = match image.qcow2 {
                true => plan.directly_on(&image.path),
                false => on_local(&plan, &image.path)?,
            };
            self.registry.check_in_place(&entry)?;
            let (registry, config) = (&self.registry, &self.config);
            let released = released::release(registry, config, qmp, &plan, &entry).await;
            if let Err(why) = released {
                return Err(Unreleased::of(entry.record().name, &why));
            }
            self.given.insert(number);
        }
        Ok(())
    }
}

/// The VM behind a socket, if that may be used; otherwise it is `unfit`. The socket that was looked at is connected to:
/// the name that the source gave may lead elsewhere by then.
async fn vm_behind(
    config: &Config,
    hypervisor: &dyn Hypervisor,
    qmp: &Path,
    unfit: fn(Why) -> NotDone,
) -> Result<Box<dyn Vm>, NotDone> {
    let socket = config.qmp_socket(qmp).map_err(|why| unfit(Why::of(why)))?;
    hypervisor.vm(&socket).await.map_err(|why| NotDone::unconnected(&why))
}

/// The layers of a VM with the number of the image each is in.
///
/// # Errors
/// When a plan is none.
pub(super) fn plans(facts: &GuestFacts) -> io::Result<Vec<(usize, LayerPlan)>> {
    let wrong = |why: serde_json::Error| {
        io::Error::new(io::ErrorKind::InvalidData, format!("a layer's plan: {why}"))
    };
    let parse = |(image, text): &(u16, String)| {
        Ok((usize::from(*image), serde_json::from_str(text).map_err(wrong)?))
    };
    facts.layers.iter().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_qemu::{Error, ErrorKind};
    use dray_vm::hypervisor::Asked;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    /// Says at which path a VM was looked for.
    struct Echo;

    impl Hypervisor for Echo {
        fn vm<'a>(&'a self, vm: &'a Path) -> Asked<'a, dray_qemu::Result<Box<dyn Vm>>> {
            let asked = Error::new(ErrorKind::Connect, format!("asked at {}", vm.display()));
            Box::pin(async move { Err(asked) })
        }
    }

    #[tokio::test]
    async fn the_socket_that_was_looked_at_is_connected_to() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let run = root.join("run");
        std::fs::create_dir(&run).unwrap();
        let text = format!(
            "qmp_dirs = ['{}']\n[agent]\nname = 'hostb'\n[tls]\ndir = '/'\n",
            run.display()
        );
        let config = Config::parse(&text, Path::new("dray.toml")).unwrap();
        let _sockets = ["run/vm", "other"].map(|name| UnixListener::bind(root.join(name)).unwrap());
        symlink("vm", run.join("link")).unwrap();
        symlink("../other", run.join("out")).unwrap();
        let at = async |name: &str, unfit| {
            vm_behind(&config, &Echo, &run.join(name), unfit).await.err().unwrap()
        };
        for name in ["vm", "link"] {
            let asked = format!("asked at {}", run.join("vm").display());
            let why = at(name, NotDone::Refused).await;
            assert!(matches!(&why, NotDone::Silent(_)) && why.to_string() == asked, "{why}");
        }
        for name in ["out", "none"] {
            for unfit in [NotDone::Refused, NotDone::Silent] {
                let why = at(name, unfit).await;
                assert!(!why.to_string().contains("asked"), "{why}");
                assert_eq!(why, unfit(why.to_string().as_str().into()));
            }
        }
    }
}
