//! `dray images remove`: an image is forgotten, or a replica deleted.

use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{ApiResult, ErrorKind, ImageRemove, ImageStatus, Refusal};
use dray_host::record::{CopyState, ImageRecord};
use dray_host::refusals::io_error;
use dray_host::registry::Entry;
use dray_host::retention;
use dray_vm::leaving::{refuse_untold, take_note};
use std::fmt::Display;
use std::sync::Arc;
use tokio::task::block_in_place;

impl Answers<ImageRemove> for Arc<Agent> {
    async fn answer(&self, command: ImageRemove, _: Events) -> ApiResult<ImageStatus> {
        block_in_place(|| self.image_remove(&command))
    }
}

fn conflict(what: &str, why: impl Display) -> Refusal {
    Refusal::new(ErrorKind::Conflict, what, why)
}

impl Agent {
    fn image_remove(&self, command: &ImageRemove) -> ApiResult<ImageStatus> {
        let what = format!("cannot remove image '{}'", command.name);
        if self.registry.get(&command.name).is_none()
            && !command.delete
            && let Some(status) = self.forget_released(&what, &command.name)?
        {
            return Ok(status);
        }
        if self.registry.get(&command.name).is_none()
            && let Some(status) = self.forget_unfit(&what, command)?
        {
            return Ok(status);
        }
        let entry = self.image(&command.name)?;
        self.refuse_only_copy(&what, &entry.record())?;
        self.refuse_left(&what, &entry.record())?;
        let _operation = self.operate(&what, &command.name, "images remove")?;
        let entry = self.image(&command.name)?;
        let status = self.image_status(&entry);
        self.refuse_in_use(&what, &entry)?;
        if command.delete && entry.record().state != CopyState::Replica {
            let why = "it is not a replica";
            return Err(conflict(&what, why).hint("without --delete its file stays"));
        }
        self.refuse_needed(&what, &entry.record())?;
        if self.registry.owes_remote_client(&entry) {
            // It may come back to an image of this name, and nobody would tell it.
            let flush = take_note(&command.name, &self.nbd_socket());
            let hint =
                format!("its client's next flush reports the loss; if none comes back: {flush}");
            refuse_untold(&entry).map_err(|loss| loss.refused(&what).hint(hint))?;
        }
        let removed = match command.delete {
            true => self.registry.remove_replica(&entry),
            false => self.registry.forget(&command.name),
        };
        removed.map_err(|why| io_error(what, why))?;
        Ok(status)
    }

    /// Refuses a copy of which nobody knows whether there is another one.
    fn refuse_only_copy(&self, what: &str, record: &ImageRecord) -> ApiResult<()> {
        if !self.registry.is_void(record).map_err(|why| io_error(what, why))? {
            return Ok(());
        }
        let why = "it may be the only copy: its migration ended when another image was claimed";
        Err(conflict(what, why).hint("`dray claim` it first"))
    }

    /// Refuses an image of a migration in which its source takes no part any more.
    fn refuse_left(&self, what: &str, record: &ImageRecord) -> ApiResult<()> {
        let migration = record.migration.and_then(|migration| self.targets.get(migration));
        let left = migration.and_then(|slot| slot.left_by_source());
        let Some(Refusal { why, hint: Some(hint), .. }) = left else { return Ok(()) };
        Err(conflict(what, format!("it takes part in a migration; {why}")).hint(hint))
    }

    /// Refuses an image that a program, a migration, a backup or a chain has need of.
    fn refuse_in_use(&self, what: &str, entry: &Entry) -> ApiResult<()> {
        let record = entry.record();
        if let Some(user) = self.user_of_image(entry) {
            let hint = format!("shut the vm down or release its disk{}", user.or_end());
            return Err(conflict(what, user.to_string()).hint(hint));
        }
        if record.migration.is_some() {
            let why = "it takes part in a migration";
            return Err(conflict(what, why).hint("`dray cancel` the migration first"));
        }
        self.refuse_during_backup(what, &record.name)?;
        if entry.flat.is_some() && record.state == CopyState::Owner {
            let why = "newer writes of a guest are in an overlay over its chain";
            let hint = "`dray release` the disk, which merges them into the image";
            return Err(conflict(what, why).hint(hint));
        }
        Ok(())
    }

    /// Forgets an image that is closed because its file is lost or too short; none when it is no such image.
    fn forget_unfit(&self, what: &str, command: &ImageRemove) -> ApiResult<Option<ImageStatus>> {
        let ImageRemove { name, delete } = command;
        let _operation = self.operate(what, name, "images remove")?;
        let absent = self.registry.closed(name).and_then(|known| known.absent);
        if let Some(absent) = absent.filter(|absent| absent.record.has_left()) {
            self.refuse_needed(what, &absent.record)?;
        }
        let forgotten = self.registry.forget_unfit(name, *delete);
        let forgotten = forgotten.map_err(|why| io_error(what, why))?;
        Ok(forgotten.map(|closed| self.absent_status(name.to_owned(), closed)))
    }

    /// Refuses to remove a copy without which a restart could not tell a target that all is over.
    fn refuse_needed(&self, what: &str, record: &ImageRecord) -> ApiResult<()> {
        let needed = retention::needed_by(&self.registry, record.id);
        let needed = needed.map_err(|why| io_error(what, why))?;
        let Some(migration) = needed.filter(|_| record.state == CopyState::Replica) else {
            return Ok(());
        };
        let why = format!("the target of migration {migration} does not know yet that it is over");
        Err(Refusal::new(ErrorKind::Conflict, what, why)
            .hint("wait until `dray status` does not show the migration any more"))
    }
}
