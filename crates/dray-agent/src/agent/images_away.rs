//! Images that move without a VM: when they are handed over.
//!
//! Nobody's guest waits for that, so it waits for others: for a VM that somebody has started on their exports meanwhile,
//! which would have no disks any more, and for what went wrong to pass.

use super::Agent;
use dray_api::{ErrorKind, Refusal};
use dray_engine::SourceEvent;
use dray_engine::source::SourceNotice;
use dray_image::Image;
use dray_migrate::messages::ToSourceShell;
use dray_migrate::source::{Input, SourceSlot, ToTask};
use dray_vm::leaving::{take_note, untold};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::sleep;

/// Pause between two tries.
const AGAIN: Duration = Duration::from_millis(500);

impl Agent {
    /// Images without a VM are handed over as soon as they are ready and no VM uses them, and again if that fails.
    /// Whether that was given up.
    pub(super) async fn drive_images(
        &self,
        slot: &Arc<SourceSlot>,
        mut told: UnboundedReceiver<ToTask>,
    ) -> bool {
        let (mut is_due, mut shown) = (false, None);
        loop {
            if is_due && self.waits_for_no_vm(slot, &mut shown) {
                is_due = false;
                slot.send(Input::Engine(SourceEvent::BeginHandover));
            }
            let message = tokio::select! {
                message = told.recv() => message,
                () = sleep(AGAIN), if is_due => continue,
            };
            match message {
                Some(ToTask::Notice(SourceNotice::Ready)) => is_due = true,
                Some(ToTask::Notice(
                    SourceNotice::HandoverFailed { .. } | SourceNotice::Refused { .. },
                )) => {
                    sleep(AGAIN).await;
                    match self.unheard_loss(slot) {
                        Some(error) => slot.send(Input::Failed(error)),
                        None => is_due = true,
                    }
                }
                Some(ToTask::Notice(SourceNotice::Abandoned { .. })) => return true,
                Some(ToTask::Shell(ToSourceShell::Finished, _)) | None => return false,
                Some(_) => {}
            }
        }
    }

    /// Whether no VM uses an image of the migration. `shown`: what is said of one that does.
    fn waits_for_no_vm(&self, slot: &SourceSlot, shown: &mut Option<Refusal>) -> bool {
        let images = slot.intent().images;
        let used = images.iter().find_map(|image| self.refuse_under_vm(&image.name).err());
        let now = used.map(|used| {
            let why = format!("{}: a vm was started on it, and would lose its disk", used.why);
            Refusal::new(ErrorKind::Conflict, "the handover waits", why).hint(
                "shut that vm down; or cancel this migration, and move the vm with --qmp SOCKET",
            )
        });
        let is_free = now.is_none();
        slot.board.show_wait(shown, now);
        is_free
    }

    /// A loss that must be told to a guest before its image may move, when there is no guest: nobody will
    /// ever flush.
    fn unheard_loss(&self, slot: &SourceSlot) -> Option<Refusal> {
        let images = slot.intent().images;
        images.iter().filter(|image| self.attachments.count(&image.name) == 0).find_map(|image| {
            let disk = Arc::clone(&self.registry.get(&image.name)?.disk);
            let lost = disk.write_back_error().filter(|lost| !lost.told)?;
            let why = format!("image '{}': {}", image.name, untold(&lost));
            let hint = take_note(&image.name, &self.nbd_socket());
            let hint = format!("{hint}, and `dray resume`");
            Some(Refusal::new(ErrorKind::DataAtRisk, "migration failed", why).hint(hint))
        })
    }
}
