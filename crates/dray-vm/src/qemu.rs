//! QEMU as the [`Hypervisor`]: everything goes through its monitor.

use super::hypervisor::{Arrival, Asked, Departure, Hypervisor, Vm};
use super::look::{Look, process_of};
use dray_host::process::QemuProcess;
use dray_qemu::{
    Incoming, LayerPlan, Limits, Outgoing, Progress, Qmp, Result, activate, status, was_started,
};
use std::path::Path;
use std::time::Duration;

/// The QEMUs of this host.
pub struct Qemu;

impl Hypervisor for Qemu {
    fn vm<'a>(&'a self, vm: &'a Path) -> Asked<'a, Result<Box<dyn Vm>>> {
        Box::pin(async move { Ok(Box::new(Qmp::connect(vm).await?) as Box<dyn Vm>) })
    }
}

impl Vm for Qmp {
    fn process(&self) -> Option<QemuProcess> {
        process_of(self)
    }

    fn monitor(&self) -> &Qmp {
        self
    }

    fn look(&self) -> Asked<'_, Result<Look>> {
        Box::pin(Look::take(self))
    }

    fn ended(&self) -> Asked<'static, ()> {
        let mut events = self.events();
        Box::pin(async move { while events.next().await.is_ok() {} })
    }

    fn send<'a>(
        &'a self,
        socket: &'a Path,
        limits: &'a Limits,
    ) -> Asked<'a, Result<Box<dyn Departure>>> {
        Box::pin(async move {
            let outgoing = Outgoing::start(self, socket, limits).await?;
            Ok(Box::new(outgoing) as Box<dyn Departure>)
        })
    }

    fn departure(&self, was_running: bool) -> Box<dyn Departure> {
        Box::new(Outgoing::attach(self, was_running))
    }

    fn waits<'a>(&'a self, disks: &'a [LayerPlan]) -> Asked<'a, Result<()>> {
        Box::pin(Incoming::check(self, disks))
    }

    fn await_guest<'a>(&'a self, disks: &'a [LayerPlan]) -> Asked<'a, Result<Box<dyn Arrival>>> {
        Box::pin(
            async move { Ok(Box::new(Incoming::prepare(self, disks).await?) as Box<dyn Arrival>) },
        )
    }

    fn start(&self, running: bool) -> Asked<'_, Result<()>> {
        match running {
            true => Box::pin(status::cont(self)),
            false => Box::pin(activate(self)),
        }
    }

    fn was_started(&self) -> Asked<'_, Result<bool>> {
        Box::pin(was_started(self))
    }
}

impl Departure for Outgoing {
    fn was_running(&self) -> bool {
        self.was_running()
    }

    fn stopped_at(&self) -> Option<Duration> {
        self.stopped_at()
    }

    fn stopped<'a>(
        &'a mut self,
        report: &'a mut (dyn FnMut(&Progress) + Send),
    ) -> Asked<'a, Result<Progress>> {
        Box::pin(self.wait_pre_switchover(report))
    }

    fn finish(&mut self) -> Asked<'_, Result<Progress>> {
        Box::pin(self.complete())
    }

    fn check_sent(&mut self) -> Asked<'_, Result<()>> {
        Box::pin(Outgoing::check_sent(self))
    }

    fn undo(&mut self) -> Asked<'_, Result<()>> {
        Box::pin(self.abandon())
    }
}

impl Arrival for Incoming {
    fn listens<'a>(&'a self, socket: &'a Path) -> Asked<'a, Result<bool>> {
        Box::pin(self.listens(socket))
    }

    fn listen<'a>(&'a self, socket: &'a Path) -> Asked<'a, Result<()>> {
        Box::pin(self.listen(socket))
    }

    fn loaded(&mut self, within: Duration) -> Asked<'_, Result<()>> {
        Box::pin(async move { self.wait_loaded(within).await.map(drop) })
    }

    fn vm(&self) -> Box<dyn Vm> {
        Box::new(self.monitor().clone())
    }
}
