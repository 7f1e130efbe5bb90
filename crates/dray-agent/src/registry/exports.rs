//! The images as exports of the NBD server.

use super::{CopyState, Entry, Registry};
use dray_image::Image;
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

    fn open(&self, name: &str, _client: &Client) -> Result<Arc<dyn Image>, ExportError> {
        let Some(entry) = self.get(name) else {
            return Err(ExportError::Unknown {
                name: name.to_owned(),
                hint: "; `dray images` lists the images of this host".to_owned(),
            });
        };
        let record = entry.record();
        let gone = record.state == CopyState::Replica && record.migration.is_none();
        if gone && !entry.has_just_departed() {
            let why = format!("image '{name}' was handed over to another host");
            return Err(ExportError::Refused(why));
        }
        if record.swap.is_some_and(|swap| swap.may_be_past()) {
            let why = format!("the disk of image '{name}' goes over to a qcow2");
            return Err(ExportError::Refused(why));
        }
        Ok(Arc::clone(&entry.disk) as Arc<dyn Image>)
    }
}
