//! The images as exports of the NBD server. [`walls`]: what one VM gets of another.

mod walls;

use crate::flat::swap::may_be_past;
use dray_host::flat::Flat;
use dray_host::process::QemuProcess;
use dray_host::record::CopyState;
use dray_host::registry::{Closed, Entry, Process, Registry};
use dray_image::{FileImage, Image, has_open};
use dray_serve::{Client, ExportError, ExportInfo, Exports};
use std::sync::Arc;

/// The images of this host as NBD clients see them.
pub struct ImageExports(pub Arc<Registry>);

impl Exports for ImageExports {
    fn list(&self) -> Vec<ExportInfo> {
        let shown = |entry: &Arc<Entry>| {
            let record = entry.record();
            (record.state != CopyState::Replica).then(|| ExportInfo {
                name: record.name,
                description: String::new(),
                fast_zero: true,
            })
        };
        self.0.all().iter().filter_map(shown).collect()
    }

    fn is_for(&self, name: &str, client: &Client) -> bool {
        self.may_see(name, client)
    }

    fn open(&self, name: &str, client: &Client) -> Result<Arc<dyn Image>, ExportError> {
        if let Some(past) = self.past_image(name, client) {
            return past;
        }
        self.admit(name, client)?;
        if let Some(closed) = self.0.closed(name) {
            return self.open_closed(name, client, closed);
        }
        let Some(entry) = self.0.get(name) else {
            return Err(ExportError::Unknown {
                name: name.to_owned(),
                hint: "; `dray images` lists the images of this host".to_owned(),
            });
        };
        let record = entry.record();
        // A QEMU that had the disk comes back: it waits for an answer, or it wants to quit. One that begins here is
        // refused. A client of another host cannot be told apart, and is refused once the image has left for good.
        let new = !self.was_attached(name, client) || record.has_left() && client.process.is_none();
        if record.state == CopyState::Replica && new {
            let why = format!("image '{name}' was handed over to another host");
            return Err(ExportError::Refused(why));
        }
        if !self.was_attached(name, client)
            && !self.comes_under_dray(&entry, client)
            && let Some(objection) = self.0.objection(&entry)
        {
            return Err(ExportError::Refused(objection.why));
        }
        if !self.0.rule_of(&entry).serves_attached()
            && let Some(objection) = self.0.objection(&entry)
        {
            return Err(ExportError::NotYet(objection.why));
        }
        if is_past(&entry) && !self.may_flush_what_is_past(&entry, client) {
            let why = format!("the disk of image '{name}' is being exchanged for a qcow2");
            return Err(ExportError::Refused(why));
        }
        if record.is_between_places() {
            self.refuse_between_places(&entry, client)?;
        }
        if client.process.is_none() && !record.read_only {
            self.0.make_room_for_remote(&entry).map_err(|why| {
                ExportError::NotYet(format!("what a power cut loses could not be noted: {why}"))
            })?;
        }
        Ok(self.0.served_to(&entry, process_of(client)))
    }

    fn attached(&self, name: &str, client: &Client, _connections: usize) {
        match (process_of(client), self.0.get(name)) {
            (Some(process), _) => self.0.attached(name, process),
            (None, Some(entry)) => self.0.attached_remotely(&entry),
            (None, None) => {}
        }
    }

    fn detached(&self, name: &str, client: &Client, _connections: usize) {
        match (process_of(client), self.0.get(name)) {
            (Some(process), _) => self.0.detached(name, process),
            (None, Some(entry)) => self.0.detached_remotely(&entry),
            (None, None) => {}
        }
    }
}

impl ImageExports {
    /// Whether it is the QEMU whose disk is just being put on dray. Its monitor may belong to another process, but the
    /// file is still open in its own.
    fn comes_under_dray(&self, entry: &Entry, client: &Client) -> bool {
        let record = entry.record();
        let (Some(process), true) = (client.process, self.0.operation(&record.name).is_some())
        else {
            return false;
        };
        let is_it = |qemu: &QemuProcess| {
            u32::try_from(qemu.pid) == Ok(process.pid) && qemu.started == process.started
        };
        let file = entry.file.as_file().and_then(FileImage::id);
        record.adopted.and_then(|adopted| adopted.qemu).is_some_and(|qemu| is_it(&qemu))
            || file.is_some_and(|file| has_open(process.pid, file).unwrap_or(false))
    }

    /// What a client gets that is a QEMU whose VM is elsewhere; none when it is no such client.
    fn past_image(
        &self,
        name: &str,
        client: &Client,
    ) -> Option<Result<Arc<dyn Image>, ExportError>> {
        let process = process_of(client)?;
        if let Some(entry) = self.0.get(name) {
            return self.0.is_of_past_vm(process, &entry.record()).then(|| Ok(entry.past()));
        }
        // It would be a client of the image when that is opened.
        let absent = self.0.closed(name)?.absent?;
        let why = format!("the vm of this qemu has left, and image '{name}' is closed");
        self.0.is_of_past_vm(process, &absent.record).then(|| Err(ExportError::Refused(why)))
    }

    /// A closed export: who was attached before waits with its requests, a new client is told why.
    fn open_closed(
        &self,
        name: &str,
        client: &Client,
        closed: Closed,
    ) -> Result<Arc<dyn Image>, ExportError> {
        // One that is just being claimed is open soon.
        let entry = self.0.get(name).map(|entry| self.0.served_to(&entry, process_of(client)));
        let disk = entry.or_else(|| closed.absent.map(|absent| absent.disk as Arc<dyn Image>));
        if let Some(disk) = disk.filter(|_| self.was_attached(name, client)) {
            return Ok(disk);
        }
        let why = format!("image '{name}' is closed: {}", closed.reason.why);
        Err(match closed.reason.passes {
            true => ExportError::NotYet(why),
            false => ExportError::Refused(why),
        })
    }

    /// A QEMU that has to flush the disk before it can say where the disk is waits for that, with all that it does: it
    /// is let in to a disk that is parked. Everybody else waits outside, or is told to stay there.
    fn refuse_between_places(&self, entry: &Entry, client: &Client) -> Result<(), ExportError> {
        let record = entry.record();
        let name = &record.name;
        if entry.flat.as_ref().is_some_and(Flat::is_being_taken)
            || self.was_attached(name, client) && answers_flushes_alone(entry)
        {
            return Ok(());
        }
        Err(match record.may_be_home() {
            true => {
                let why = format!("the disk of image '{name}' is going back to its chain");
                ExportError::Refused(why)
            }
            false => {
                let why = format!(
                    "the agent does not know yet whether the disk of image '{name}' has left its chain"
                );
                ExportError::NotYet(why)
            }
        })
    }

    /// The same of a raw image that may be of the past. Whoever finds out that it is not opens it, after the qcow2 has
    /// lost its name: that may come while it is parked here.
    fn may_flush_what_is_past(&self, entry: &Entry, client: &Client) -> bool {
        // Of a client of another host nobody can say that it is the QEMU.
        if client.process.is_none() || !self.was_attached(&entry.record().name, client) {
            return false;
        }
        let was_parked = entry.disk.is_parked();
        entry.disk.park_now();
        if is_past(entry) {
            return answers_flushes_alone(entry);
        }
        if !was_parked {
            entry.disk.unpark();
        }
        true
    }

    /// Whether the client's process was attached to the image before. Of one that is not on this
    /// host that cannot be told: it may have been, and waiting loses nothing.
    fn was_attached(&self, name: &str, client: &Client) -> bool {
        process_of(client).is_none_or(|process| self.0.was_attached(name, process))
    }
}

/// Whether the raw image may be of the past, because its disk may be on a qcow2 by now.
fn is_past(entry: &Entry) -> bool {
    entry.record().swap.as_ref().is_some_and(may_be_past)
}

/// Whether a disk answers nothing but flushes, and truly: everything that was written to it is durable.
fn answers_flushes_alone(entry: &Entry) -> bool {
    entry.disk.is_parked()
        && entry.disk.backing().sync().is_ok()
        && entry.file.untold_loss().is_none()
}

fn process_of(client: &Client) -> Option<Process> {
    client.process.map(|dray_serve::Process { pid, started }| Process { pid, started })
}
