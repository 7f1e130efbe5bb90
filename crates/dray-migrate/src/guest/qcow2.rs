//! The last step of an image of which the target makes a qcow2: its disk goes over to that, or stays on
//! the raw image, and the source hears which.

use super::receiver::TargetVmTask;
use crate::messages::{Made, ToSourceShell};
use crate::receiver::Input;
use dray_api::{ErrorKind, Refusal};
use dray_host::record::{NameKind, Swap};
use dray_host::registry::{Entry, Operation};
use dray_qemu::{LayerPlan, Qmp};
use dray_types::Why;
use dray_vm::flat::fresh::{self, qcow2_name};
use dray_vm::flat::swap;
use dray_vm::own;
use dray_vm::released::NotReleased;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Pause between two looks whether somebody is at an image.
const AGAIN: Duration = Duration::from_millis(100);
/// Pause between two questions to a QEMU that has not answered.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// Why disks were not released.
#[derive(Debug)]
pub(super) enum Unreleased {
    /// The disk is where it was.
    Stays(Why),
    /// QEMU has not said whether the disk of `image` is on its file.
    Unknown { image: String, why: Why },
    /// QEMU could not be asked.
    NotAsked(Why),
}

impl Unreleased {
    pub(super) fn of(image: String, why: &NotReleased) -> Self {
        match why {
            NotReleased::Qemu(error) if error.kind().is_unknown() => {
                Self::Unknown { image, why: Why::of(why) }
            }
            _ => Self::Stays(Why::of(why)),
        }
    }
}

impl fmt::Display for Unreleased {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stays(why) | Self::Unknown { why, .. } | Self::NotAsked(why) => why.fmt(f),
        }
    }
}

impl std::error::Error for Unreleased {}

impl From<io::Error> for Unreleased {
    fn from(why: io::Error) -> Self {
        Self::Stays(Why::of(why))
    }
}

impl From<&str> for Unreleased {
    fn from(why: &str) -> Self {
        Self::Stays(why.into())
    }
}

impl TargetVmTask {
    /// Releases the disks. Returns when it is known where each of them is. A swap that was broken off is not ended
    /// here: the agent does that (`Agent::end_exchanges`). A release of which QEMU has not
    /// said how it ended is asked of it again, until it says so or has ended. None when the migration's loop has
    /// ended before.
    pub(super) async fn release_known(&mut self) -> Option<Result<(), Unreleased>> {
        let mut shown = None;
        let released = loop {
            self.exchanges_end().await?;
            match self.release().await {
                Err(_) if self.between().is_some() => continue,
                Err(Unreleased::Unknown { image, why }) if !self.has_ended() => {
                    tracing::warn!(image, %why, "it is unknown whether QEMU has a disk back");
                    shown.get_or_insert_with(|| self.show_waiting(&image));
                }
                Err(Unreleased::NotAsked(why)) if let Some(image) = self.begun() => {
                    tracing::debug!(image, %why, "cannot ask QEMU whether it has a disk back");
                    shown.get_or_insert_with(|| self.show_waiting(&image));
                }
                known => break known,
            }
            if self.told.is_closed() {
                return None;
            }
            tokio::time::sleep(ASK_AGAIN).await;
        };
        self.show_no_longer(shown);
        if let Err(why) = &released {
            self.say_raw(&why.to_string());
        }
        Some(released)
    }

    /// An image whose release has begun, perhaps by an agent before this one, at a QEMU that still runs.
    fn begun(&self) -> Option<String> {
        let known = &self.registry.released;
        let left = |id| known.of(id).filter(|note| !note.done && note.qemu.runs());
        let images = self.slot.intent().images;
        let mut notes = images.iter().filter_map(|image| left(image.offer.id));
        notes.next().map(|note| note.image.name)
    }

    /// Whether the guest's QEMU has ended.
    pub(super) fn has_ended(&self) -> bool {
        let guest = self.slot.intent().guest;
        guest.is_none_or(|guest| own::has_ended(&guest.qmp, self.checked.as_ref()))
    }

    /// Waits until no image is between two places, and shows that.
    async fn exchanges_end(&self) -> Option<()> {
        let mut shown = None;
        while let Some(image) = self.between() {
            if self.told.is_closed() {
                return None;
            }
            shown.get_or_insert_with(|| self.show_waiting(&image));
            tokio::time::sleep(AGAIN).await;
        }
        self.show_no_longer(shown);
        Some(())
    }

    pub(super) fn show_no_longer(&self, shown: Option<Refusal>) {
        let Some(shown) = shown else { return };
        self.slot.board.change(|board| drop(board.error.take_if(|error| *error == shown)));
    }

    /// An image whose disk is between two places, as far as is known.
    fn between(&self) -> Option<String> {
        let made = |name: &str| self.registry.get(name).map(|entry| entry.record());
        let images = self.slot.intent().images;
        let mut records = images.iter().filter_map(|image| made(image.name_here()));
        let found = records.find(|record| record.swap.as_ref().is_some_and(Swap::is_under_way));
        found.map(|record| record.name)
    }

    fn show_waiting(&self, image: &str) -> Refusal {
        let why = format!("the exchange of the disk of image '{image}' has not ended");
        let hint = format!(
            "it ends when the vm's QEMU answers at its QMP socket or has ended; if that QEMU \
             itself waits for this disk, `dray unstall {image} --fail` lets it continue, and \
             fails the requests for which it waits"
        );
        let error = Refusal::new(ErrorKind::Hypervisor, "the last step waits for QEMU", why);
        let error = error.hint(hint);
        self.slot.board.notice(error.to_string());
        self.slot.board.change(|board| board.error = Some(error.clone()));
        error
    }

    /// Whether the disk is on the qcow2 that was made of image `number` already.
    pub(super) fn is_made(&mut self, number: usize, entry: &Entry) -> bool {
        let record = entry.record();
        let made = record.swap.is_some_and(|swap| swap.done);
        if made {
            self.say(number, Made::Done { name: qcow2_name(&record.name) });
        }
        made
    }

    /// No qcow2 is made any more of images of which none was made.
    fn say_raw(&mut self, why: &str) {
        for (number, image) in self.slot.intent().images.iter().enumerate() {
            let entry = self.registry.get(image.name_here());
            let made = entry.is_some_and(|entry| self.is_made(number, &entry));
            if image.qcow2 && !made && !self.made.contains_key(&number) {
                let why = self.unsure.get(&number).map_or(why, String::as_str).to_owned();
                self.say(number, Made::Raw { why });
            }
        }
    }

    /// Makes a qcow2 of image `number`; false when the disk stays on the raw image, which has its name
    /// then.
    ///
    /// # Errors
    /// When it is not known where the disk is.
    pub(super) async fn make_qcow2(
        &mut self,
        qmp: &Qmp,
        number: usize,
        entry: &Entry,
        plan: &LayerPlan,
    ) -> io::Result<bool> {
        let record = entry.record();
        if record.swap.is_none() && record.place == NameKind::Named {
            // An agent before this one has tried.
            self.say(number, Made::Raw { why: "an earlier attempt failed".to_owned() });
            return Ok(false);
        }
        if let Some(why) = self.unsure.get(&number).cloned() {
            // Its guest is not stopped once more for it.
            self.stays_raw(number, entry, why)?;
            return Ok(false);
        }
        let _operation = self.alone_with(&record.name).await;
        let progress = self.progress(number);
        let made = swap::make_qcow2(&self.registry, qmp, entry, plan, &self.config, progress).await;
        let Err(why) = made else {
            self.say(number, Made::Done { name: qcow2_name(&record.name) });
            return Ok(true);
        };
        if entry.record().swap.is_some() {
            self.unsure.insert(number, why.to_string());
            return Err(why);
        }
        self.stays_raw(number, entry, why.to_string())?;
        Ok(false)
    }

    fn stays_raw(&mut self, number: usize, entry: &Entry, why: String) -> io::Result<()> {
        let image = entry.record().name;
        tracing::warn!(image, why, "dray makes no qcow2 of it: it stays raw");
        self.slot.board.notice(format!("{image} stays raw: {why}"));
        self.say(number, Made::Raw { why });
        swap::keep_raw(&self.registry, entry)
    }

    /// Waits until an exchange that an agent before this one died in has been ended, where that is being tried.
    async fn alone_with(&self, image: &str) -> Operation {
        loop {
            match self.registry.operate_anyway(image, "release") {
                Ok(operation) => return operation,
                Err(_) => tokio::time::sleep(AGAIN).await,
            }
        }
    }

    fn say(&mut self, number: usize, made: Made) {
        self.made.insert(number, made.clone());
        self.slot.send(Input::Say(ToSourceShell::Qcow2 { image: number as u16, made }));
    }

    /// Says it again, to a source that may not have heard it.
    pub(super) fn say_made(&self) {
        for (&number, made) in &self.made {
            let (image, made) = (number as u16, made.clone());
            self.slot.send(Input::Say(ToSourceShell::Qcow2 { image, made }));
        }
    }

    fn progress(&self, number: usize) -> fresh::Progress {
        let (slot, image) = (Arc::clone(&self.slot), number as u16);
        Box::new(move |done, total| {
            let made = Made::Copied { done, total };
            slot.send(Input::Say(ToSourceShell::Qcow2 { image, made }));
        })
    }

    /// Images of which nothing was made have their names, whatever kept it from being made.
    pub(super) fn name_raw(&self) {
        for image in self.slot.intent().images.iter().filter(|image| image.qcow2) {
            let Some(entry) = self.registry.get(&image.offer.name) else { continue };
            let record = entry.record();
            if record.swap.is_some() || record.place == NameKind::Named {
                continue;
            }
            if let Err(why) = swap::keep_raw(&self.registry, &entry) {
                tracing::error!(image = record.name, %why, "cannot give an image its name");
            }
        }
    }
}
