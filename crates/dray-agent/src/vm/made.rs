//! The last step of an image of which the target makes a qcow2: its disk goes over to that, or stays on
//! the raw image, and the source hears which.

use super::target::TargetVmTask;
use crate::flat::fresh::{self, qcow2_name};
use crate::flat::swap;
use crate::migration::messages::{Made, ToSourceShell};
use crate::migration::target::Input;
use dray_host::registry::{Entry, Operation, Place};
use dray_qemu::{LayerPlan, Qmp};
use std::sync::Arc;
use std::time::Duration;

/// Pause between two looks whether somebody is at an image.
const AGAIN: Duration = Duration::from_millis(100);

impl TargetVmTask {
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
    ) -> Result<bool, String> {
        let record = entry.record();
        if record.swap.is_none() && record.place == Place::Named {
            // An agent before this one has tried.
            self.say(number, Made::Raw { why: "an earlier try failed".to_owned() });
            return Ok(false);
        }
        let _operation = self.alone_with(&record.name).await;
        let run_dir = &self.config.run_dir;
        let progress = self.progress(number);
        let made = swap::make_qcow2(&self.registry, qmp, entry, plan, run_dir, progress).await;
        let Err(why) = made else {
            self.say(number, Made::Done { name: qcow2_name(&record.name) });
            return Ok(true);
        };
        if entry.record().swap.is_some() {
            return Err(why.to_string());
        }
        tracing::warn!(image = record.name, %why, "no qcow2 is made of it: it stays raw");
        self.slot.board.notice(format!("{} stays raw: {why}", record.name));
        self.say(number, Made::Raw { why: why.to_string() });
        swap::keep_raw(&self.registry, entry).map_err(|why| why.to_string())?;
        Ok(false)
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
    pub(super) fn say_made(&self) -> Result<(), String> {
        for (&number, made) in &self.made {
            let (image, made) = (number as u16, made.clone());
            self.slot.send(Input::Say(ToSourceShell::Qcow2 { image, made }));
        }
        Ok(())
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
            if record.swap.is_some() || record.place == Place::Named {
                continue;
            }
            if let Err(why) = swap::keep_raw(&self.registry, &entry) {
                tracing::error!(image = record.name, %why, "cannot give an image its name");
            }
        }
    }
}
