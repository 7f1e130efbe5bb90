//! The images as exports of the NBD server.

use super::closed::Closed;
use super::{CopyState, Entry, Registry};
use dray_image::{Disk, Image};
use dray_nbd::{Client, ExportError, ExportInfo, Exports};
use std::sync::Arc;

impl Exports for Registry {
    fn list(&self) -> Vec<ExportInfo> {
        let shown = |entry: &Arc<Entry>| {
            let record = entry.record();
            (record.state != CopyState::Replica).then(|| ExportInfo {
                name: record.name,
                description: String::new(),
                fast_zero: true,
            })
        };
        self.all().iter().filter_map(shown).collect()
    }

    fn open(&self, name: &str, client: &Client) -> Result<Arc<dyn Image>, ExportError> {
        if let Some(closed) = self.closed(name) {
            return self.open_closed(name, client, closed).map(|disk| disk as Arc<dyn Image>);
        }
        let Some(entry) = self.get(name) else {
            return Err(ExportError::Unknown {
                name: name.to_owned(),
                hint: "; `dray images` lists the images of this host".to_owned(),
            });
        };
        let record = entry.record();
        let gone = record.state == CopyState::Replica && record.migration.is_none();
        // A guest that is told nothing more waits for an answer; one that begins here must not.
        let new = record.state == CopyState::Replica && !self.was_attached(name, client);
        if new || gone && !entry.has_just_departed() {
            let why = format!("image '{name}' was handed over to another host");
            return Err(ExportError::Refused(why));
        }
        if record.swap.is_some_and(|swap| swap.may_be_past()) {
            let why = format!("the disk of image '{name}' goes over to a qcow2");
            return Err(ExportError::Refused(why));
        }
        Ok(Arc::clone(&entry.disk) as Arc<dyn Image>)
    }

    fn attached(&self, name: &str, client: &Client, _connections: usize) {
        let Some(process) = client.process else { return };
        if let Some(known) = self.lock_clients().get_mut(name) {
            known.note(process);
        }
    }
}

impl Registry {
    /// A closed export: who was attached before waits with its requests, a new client is told why.
    fn open_closed(
        &self,
        name: &str,
        client: &Client,
        closed: Closed,
    ) -> Result<Arc<Disk>, ExportError> {
        let entry = self.get(name).map(|entry| Arc::clone(&entry.disk));
        let disk = entry.or_else(|| closed.absent.map(|absent| absent.disk));
        if let Some(disk) = disk.filter(|_| self.was_attached(name, client)) {
            return Ok(disk);
        }
        let why = format!("image '{name}' is closed: {}", closed.reason.why);
        Err(match closed.reason.passes {
            true => ExportError::NotYet(why),
            false => ExportError::Refused(why),
        })
    }

    /// Whether the client's process was attached to the image before. Of one that is not on this
    /// host that cannot be told: it may have been, and waiting loses nothing.
    fn was_attached(&self, name: &str, client: &Client) -> bool {
        let Some(process) = client.process else { return true };
        self.lock_clients().get(name).is_some_and(|known| known.knows(process))
    }
}
