//! The interface to the program that runs the VMs of this host. QEMU itself implements it, through
//! its monitor ([`Qemu`](super::qemu::Qemu)). A manager that stands between dray and QEMU would be
//! another implementation; one of the tests is `tests/scripted.rs`.

use super::look::Look;
use dray_host::process::QemuProcess;
use dray_qemu::{LayerPlan, Limits, Progress, Qmp, Result};
use std::path::Path;
use std::pin::Pin;
use std::time::Duration;

/// An answer that takes its time.
pub type Asked<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What runs the VMs of this host. A VM is named by the path of its QMP socket.
pub trait Hypervisor: Send + Sync {
    /// The way to a VM.
    ///
    /// # Errors
    /// What stands against a connection.
    fn vm<'a>(&'a self, vm: &'a Path) -> Asked<'a, Result<Box<dyn Vm>>>;
}

/// One VM.
pub trait Vm: Send + Sync {
    /// Its process; none where the system does not tell.
    fn process(&self) -> Option<QemuProcess>;

    /// Its monitor, for what is done with its block nodes.
    fn monitor(&self) -> &Qmp;

    /// What it looks like now.
    ///
    /// # Errors
    /// See [`Look::take`].
    fn look(&self) -> Asked<'_, Result<Look>>;

    /// Returns when it has ended, or does not speak to dray any more.
    fn ended(&self) -> Asked<'static, ()>;

    /// Begins to send its guest to a unix socket. The guest goes on as before; nothing has begun if this fails.
    ///
    /// # Errors
    /// What the hypervisor reports.
    fn send<'a>(
        &'a self,
        socket: &'a Path,
        limits: &'a Limits,
    ) -> Asked<'a, Result<Box<dyn Departure>>>;

    /// A departure that an agent before this one may have begun, to [`undo`](Departure::undo) it.
    fn departure(&self, was_running: bool) -> Box<dyn Departure>;

    /// Checks that it waits for a guest with these disks. Nothing is changed.
    ///
    /// # Errors
    /// What it does or has instead.
    fn waits<'a>(&'a self, disks: &'a [LayerPlan]) -> Asked<'a, Result<()>>;

    /// Checks that it waits for a guest with these disks, and makes sure that the guest does not run before
    /// [`start`](Self::start).
    ///
    /// # Errors
    /// What it has instead.
    fn await_guest<'a>(&'a self, disks: &'a [LayerPlan]) -> Asked<'a, Result<Box<dyn Arrival>>>;

    /// Starts a guest that has arrived. With `running` false it stays paused, and its disks become this host's.
    ///
    /// # Errors
    /// What the hypervisor reports.
    fn start(&self, running: bool) -> Asked<'_, Result<()>>;

    /// Whether a guest that has arrived was started, by whomever, and perhaps stopped again by its user.
    ///
    /// # Errors
    /// What the hypervisor reports, or that no guest has arrived.
    fn was_started(&self) -> Asked<'_, Result<bool>>;
}

/// A guest on its way to another host, seen from its source.
pub trait Departure: Send {
    /// Whether it ran when it was stopped for the move, as far as that is known.
    fn was_running(&self) -> bool;

    /// When it was stopped, by the source's clock.
    fn stopped_at(&self) -> Option<Duration>;

    /// Waits until it has stopped with little left to send. `report` hears of the progress. The hypervisor still
    /// has its disks then. The guest runs if this fails. May be dropped and called again.
    ///
    /// # Errors
    /// Why it cannot move.
    fn stopped<'a>(
        &'a mut self,
        report: &'a mut (dyn FnMut(&Progress) + Send),
    ) -> Asked<'a, Result<Progress>>;

    /// Sends the rest: everything is sent then, and the hypervisor has let go of the disks. The guest runs if
    /// this fails.
    ///
    /// # Errors
    /// Why it cannot move.
    fn finish(&mut self) -> Asked<'_, Result<Progress>>;

    /// Checks that the guest has not run since everything was sent: what it has written since, its memory at the
    /// target does not know of.
    ///
    /// # Errors
    /// That it has, or that the hypervisor does not say.
    fn check_sent(&mut self) -> Asked<'_, Result<()>>;

    /// Ends the move, before the disks are handed over: the guest does here what it did before.
    ///
    /// # Errors
    /// When that is not known to be so.
    fn undo(&mut self) -> Asked<'_, Result<()>>;
}

/// A guest on its way to this host.
pub trait Arrival: Send {
    /// Whether its VM listens on this unix socket, and nobody has connected.
    ///
    /// # Errors
    /// What the hypervisor reports.
    fn listens<'a>(&'a self, socket: &'a Path) -> Asked<'a, Result<bool>>;

    /// Has its VM listen on a unix socket.
    ///
    /// # Errors
    /// What the hypervisor reports.
    fn listen<'a>(&'a self, socket: &'a Path) -> Asked<'a, Result<()>>;

    /// Waits until everything of it is loaded. It is stopped then, and its disks belong to nobody here.
    ///
    /// # Errors
    /// Why it is not.
    fn loaded(&mut self, within: Duration) -> Asked<'_, Result<()>>;

    /// Its VM, over the same connection.
    fn vm(&self) -> Box<dyn Vm>;
}
