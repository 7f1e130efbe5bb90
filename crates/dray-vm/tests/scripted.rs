//! A second hypervisor, which has no QEMU: a VM that a test moves by the clock. What follows when a
//! VM hangs, ends or is another one is asked of it, over the traits alone.

use dray_host::folder::intent::SourceVm;
use dray_host::process::QemuProcess;
use dray_qemu::{Error, ErrorKind, LayerPlan, Limits, Progress, Qmp, Result};
use dray_vm::hypervisor::{Arrival, Asked, Departure, Hypervisor, Vm};
use dray_vm::look::Look;
use dray_vm::own::{AGAIN, bring_back, connect_now, find, has_ended, wake};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::cell::RefCell;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::Instant;

/// How long a monitor that hangs is waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the scripted VM does: it hangs until some moment, and then its guest can be woken.
struct Script {
    answers_from: Instant,
    process: Option<QemuProcess>,
    /// When its guest ran again, and whether it was to.
    woken: Mutex<Vec<(Instant, bool)>>,
}

/// A hypervisor with one VM, which a test moves by the clock.
#[derive(Clone)]
struct Scripted(Arc<Script>);

impl Scripted {
    fn hangs_for(time: Duration, process: Option<QemuProcess>) -> Self {
        let answers_from = Instant::now() + time;
        Self(Arc::new(Script { answers_from, process, woken: Mutex::default() }))
    }

    async fn answer(&self) -> Result<()> {
        let left = self.0.answers_from.saturating_duration_since(Instant::now());
        tokio::time::sleep(left.min(PATIENCE)).await;
        match left > PATIENCE {
            true => Err(Error::new(ErrorKind::Timeout, "qemu did not answer")),
            false => Ok(()),
        }
    }

    fn woken(&self) -> Vec<bool> {
        self.0.woken.lock().unwrap().iter().map(|(_, running)| *running).collect()
    }
}

impl Hypervisor for Scripted {
    fn vm<'a>(&'a self, _: &'a Path) -> Asked<'a, Result<Box<dyn Vm>>> {
        Box::pin(async move {
            self.answer().await?;
            Ok(Box::new(self.clone()) as Box<dyn Vm>)
        })
    }
}

impl Vm for Scripted {
    fn process(&self) -> Option<QemuProcess> {
        self.0.process.clone()
    }

    fn monitor(&self) -> &Qmp {
        panic!("the script has no block nodes")
    }

    fn look(&self) -> Asked<'_, Result<Look>> {
        panic!("the script has no disks")
    }

    fn ended(&self) -> Asked<'static, ()> {
        Box::pin(std::future::pending())
    }

    fn send<'a>(&'a self, _: &'a Path, _: &'a Limits) -> Asked<'a, Result<Box<dyn Departure>>> {
        panic!("the script sends nothing")
    }

    fn departure(&self, was_running: bool) -> Box<dyn Departure> {
        Box::new(Stopped { vm: self.clone(), was_running })
    }

    fn waits<'a>(&'a self, _: &'a [LayerPlan]) -> Asked<'a, Result<()>> {
        panic!("the script takes nobody in")
    }

    fn await_guest<'a>(&'a self, _: &'a [LayerPlan]) -> Asked<'a, Result<Box<dyn Arrival>>> {
        panic!("the script takes nobody in")
    }

    fn start(&self, _: bool) -> Asked<'_, Result<()>> {
        panic!("the script starts nobody")
    }

    fn was_started(&self) -> Asked<'_, Result<bool>> {
        panic!("the script starts nobody")
    }
}

/// A guest that was stopped for a handover that came to nothing.
struct Stopped {
    vm: Scripted,
    was_running: bool,
}

impl Departure for Stopped {
    fn was_running(&self) -> bool {
        self.was_running
    }

    fn stopped_at(&self) -> Option<Duration> {
        None
    }

    fn stopped<'a>(
        &'a mut self,
        _: &'a mut (dyn FnMut(&Progress) + Send),
    ) -> Asked<'a, Result<Progress>> {
        panic!("it has stopped")
    }

    fn finish(&mut self) -> Asked<'_, Result<Progress>> {
        panic!("it came to nothing")
    }

    fn check_sent(&mut self) -> Asked<'_, Result<()>> {
        panic!("it was not sent")
    }

    fn undo(&mut self) -> Asked<'_, Result<()>> {
        Box::pin(async move {
            self.vm.answer().await?;
            self.vm.0.woken.lock().unwrap().push((Instant::now(), self.was_running));
            Ok(())
        })
    }
}

/// A process that stands for a QEMU, until it is ended.
struct Process(Child);

impl Process {
    fn start() -> (Self, QemuProcess) {
        let child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let known = QemuProcess::find(Path::new("/run/vm.qmp"), child.id() as i32).unwrap();
        (Self(child), known)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn source(qemu: Option<QemuProcess>) -> SourceVm {
    let qmp = "/run/vm.qmp".into();
    SourceVm { qmp, name: None, qemu, target_qmp: None, facts: None }
}

/// Nobody else would let it go on: however long its QEMU hangs, it runs within seconds after that has ended.
#[tokio::test(start_paused = true)]
async fn a_guest_whose_qemu_hangs_after_a_failed_handover_goes_on_when_it_answers() {
    for seconds in [0, 10, 60, 300, 3600] {
        for was_running in [true, false] {
            let (_process, known) = Process::start();
            let hang = Duration::from_secs(seconds);
            let hypervisor = Scripted::hangs_for(hang, Some(known.clone()));
            let begun = Stopped { vm: hypervisor.clone(), was_running };
            let said = RefCell::new(Vec::new());
            let tell = |why: &str| said.borrow_mut().push(why.to_owned());
            let began = Instant::now();
            let vm = source(Some(known));
            bring_back(&hypervisor, &vm, was_running, Some(Box::new(begun)), tell).await;
            assert_eq!(hypervisor.woken(), [was_running], "{seconds} s");
            let late = began.elapsed().saturating_sub(hang);
            assert!(late <= PATIENCE + AGAIN, "{seconds} s: {late:?} later");
            let told =
                if hang > PATIENCE { vec!["qemu did not answer".to_owned()] } else { vec![] };
            assert_eq!(said.into_inner(), told, "it is told once");
        }
    }
}

/// A VM that was started again on the same socket was stopped by nobody.
#[tokio::test(start_paused = true)]
async fn another_vm_on_the_socket_is_not_woken() {
    let (_old, known) = Process::start();
    let (_new, other) = Process::start();
    let hypervisor = Scripted::hangs_for(Duration::ZERO, Some(other));
    let why = wake(&hypervisor, &source(Some(known.clone())), true).await.unwrap_err();
    assert_eq!(why.kind(), ErrorKind::Mismatch);
    bring_back(&hypervisor, &source(Some(known)), true, None, |_| {}).await;
    assert!(hypervisor.woken().is_empty());
}

/// A QEMU that hangs has no room for more clients in the end: who asks whether it is there does not wait for room.
#[test]
fn a_socket_whose_queue_is_full_is_one_that_somebody_listens_on() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("vm.qmp");
    assert!(has_ended(&socket, None), "there is none");
    let flags = SocketFlags::CLOEXEC;
    let listener = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(&socket).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let full = (0..10).find(|_| connect_now(&socket).is_err_and(|why| why == Errno::AGAIN));
    assert!(full.is_some(), "its queue is not full");
    assert!(!has_ended(&socket, None));
    // Closing it would not do: a process that another test begins has a copy of it for a moment.
    rustix::net::shutdown(&listener, Shutdown::Both).unwrap();
    assert!(has_ended(&socket, None), "nobody listens");
}

/// What an agent died in is decided by its VM; by the names of files only once the VM can say nothing any more.
#[tokio::test(start_paused = true)]
async fn a_vm_that_does_not_answer_has_not_ended() {
    let socket = Path::new("/run/vm.qmp");
    let (process, known) = Process::start();
    let hypervisor = Scripted::hangs_for(PATIENCE * 2, Some(known.clone()));
    let why = find(&hypervisor, socket, Some(&known)).await.err().expect("it hangs");
    assert_eq!(why.kind(), ErrorKind::Timeout);
    tokio::time::sleep(PATIENCE).await;
    assert!(find(&hypervisor, socket, Some(&known)).await.unwrap().is_some());
    drop(process);
    assert!(find(&hypervisor, socket, Some(&known)).await.unwrap().is_none());
    let (_new, other) = Process::start();
    let other = Scripted::hangs_for(Duration::ZERO, Some(other));
    assert!(find(&other, socket, Some(&known)).await.unwrap().is_none(), "another came");
}
