//! Bringing back the migrations of an agent that was restarted, and going on with them. What is brought
//! back, and what stays closed, is decided in [`revive`](dray_host::migration::revive).

use super::Agent;
use dray_api::{ErrorKind, Refusal};
use dray_host::folder::intent::{SourceImage, SourceIntent, SourceVm, TargetIntent};
use dray_host::migration::revive::{Launch, Revival};
use dray_migrate::source;
use dray_provider::seed;
use dray_vm::own;
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::block_in_place;

/// How often is tried again what could not be brought back.
const AGAIN: Duration = Duration::from_secs(2);

/// A migration away that a restart found, and whether there is still something to be moved.
pub struct Revived {
    slot: Arc<source::SourceSlot>,
    moves: bool,
}

/// Starts the loops of an agent.
struct Launcher<'a>(&'a Arc<Agent>);

impl Launch for Launcher<'_> {
    type Source = Revived;

    fn source(&self, intent: SourceIntent) -> io::Result<Revived> {
        self.0.launch_source(intent).map(|(slot, moves)| Revived { slot, moves })
    }

    fn target(&self, intent: TargetIntent) -> io::Result<()> {
        self.0.launch_target(intent)
    }

    fn seeds(&self) {
        seed::revive(&self.0.store.seeds(), &self.0.registry, seed::KEEP);
    }
}

/// Refuses to go on with other content than was begun with, below a disk: while no agent ran nobody saw to it.
fn check_unwritten(intent: &SourceIntent) -> Result<(), Refusal> {
    intent.images.iter().try_for_each(SourceImage::check_unwritten).map_err(|why| {
        Refusal::new(ErrorKind::Conflict, "the migration cannot go on", why)
            .hint("when nothing changes the vm's disks any more, prepare and migrate it again")
    })
}

impl Agent {
    fn revival<'a>(self: &'a Arc<Self>, launch: &'a Launcher<'a>) -> Revival<'a, Launcher<'a>> {
        let (store, registry, unrevived) = (&self.store, &self.registry, &self.unrevived);
        Revival { store, registry, unrevived, launch }
    }

    /// Brings back every migration of the state directory, before anyone can reach a disk.
    pub(crate) fn revive(self: &Arc<Self>) -> Vec<Revived> {
        self.revival(&Launcher(self)).begin()
    }

    /// Takes up the migrations that were begun before the restart.
    pub(crate) fn go_on(self: &Arc<Self>, revived: Vec<Revived>) {
        for Revived { slot, moves } in revived {
            if slot.intent().options.is_none() {
                continue;
            }
            let agent = Arc::clone(self);
            tokio::spawn(async move {
                let vm = slot.intent().vm;
                if let (true, Some(vm)) = (moves, &vm) {
                    agent.bring_back_from_before(&slot, vm).await;
                }
                let intent = slot.intent();
                if moves && let Err(error) = block_in_place(|| check_unwritten(&intent)) {
                    slot.send(source::Input::Failed(error));
                }
                agent.drive(slot, intent, moves).await;
            });
        }
    }

    /// An agent before this one may have stopped the guest, and QEMU may be hanging since: it goes on here before
    /// anything else is asked of it.
    async fn bring_back_from_before(&self, slot: &source::SourceSlot, vm: &SourceVm) {
        let running = vm.facts.as_ref().is_some_and(|facts| facts.running);
        let (board, shown) = (&slot.board, Mutex::new(None));
        let tell = |why: &str| {
            tracing::warn!(migration = %board.migration, why, "cannot let the guest continue");
            let what = "the migration waits until the guest's QEMU answers";
            let waits = Refusal::new(ErrorKind::Hypervisor, what, why);
            board.show_wait(&mut shown.lock(), Some(waits));
        };
        own::bring_back(&*self.hypervisor, vm, running, None, tell).await;
        board.show_wait(&mut shown.lock(), None);
    }

    /// Tries again, for as long as the agent runs, what could not be opened or brought back.
    pub(crate) async fn keep_reviving(self: Arc<Self>) {
        loop {
            tokio::time::sleep(AGAIN).await;
            let agent = Arc::clone(&self);
            let tried = tokio::task::spawn_blocking(move || {
                agent.registry.open_absent();
                let revived = agent.revival(&Launcher(&agent)).try_again();
                agent.go_on(revived);
                agent.tell_when_decided();
            });
            if let Err(why) = tried.await {
                tracing::error!(%why, "cannot try again to open closed images");
            }
        }
    }

    /// Tells whoever started the agent, once every image is served, or closed for a cause that does not
    /// pass by itself.
    pub(crate) fn tell_when_decided(&self) {
        if self.registry.all_closed().iter().all(|(_, closed)| !closed.reason.passes) {
            self.readiness.ready();
        }
    }
}
