//! `dray images add`: a file or block device becomes an image of this host.

use super::images::LOCKED;
use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{ApiResult, ErrorKind, ImageAdd, ImageStatus, Refusal};
use dray_host::pool::check_name;
use dray_host::record::ImageRecord;
use dray_host::refusals::{io_error, path_error, random_id};
use dray_host::registry::{Used, is_device, real_path};
use dray_image::{growable_len, names};
use dray_qemu::plan::grows;
use dray_types::ImageId;
use dray_vm::flat::barred::is_elsewhere;
use std::path::Path;
use std::sync::Arc;
use tokio::task::block_in_place;

impl Answers<ImageAdd> for Arc<Agent> {
    async fn answer(&self, command: ImageAdd, _: Events) -> ApiResult<ImageStatus> {
        block_in_place(|| self.image_add(command))
    }
}

impl Agent {
    fn image_add(&self, command: ImageAdd) -> ApiResult<ImageStatus> {
        let what = format!("cannot add image '{}'", command.name);
        check_name(&command.name).map_err(|why| path_error(&what, why))?;
        let unused = self.registry.check_unused(&command.path, command.read_only);
        unused.map_err(|used| not_added(&what, &used.into()))?;
        self.check_file(&what, &command.path, !command.read_only)?;
        let path = real_path(&command.path).map_err(|why| io_error(&what, why))?;
        if !command.read_only {
            self.check_writable(&what, &path)?;
        }
        let format = command.format.as_deref();
        if format != Some("raw") {
            refuse_data_elsewhere(&what, &path)?;
        }
        let growable = command.growable.unwrap_or(format.is_some_and(grows));
        let meta = std::fs::metadata(&path).map_err(|why| io_error(&what, why))?;
        let len = match (growable, format) {
            (true, Some(format)) if grows(format) => {
                growable_len(meta.len(), self.virtual_size(&what, &path, format)?)
            }
            (true, _) => growable_len(meta.len(), meta.len()),
            (false, _) => 0,
        };
        let mut record = ImageRecord {
            mode: names::file_mode(&path).map_err(|why| io_error(&what, why))?,
            device: is_device(&path),
            growable,
            read_only: command.read_only,
            format: command.format,
            ..ImageRecord::owned(command.name, ImageId(random_id()?), path, len)
        };
        let file = self.registry.open_file(&record).map_err(|why| {
            if why.kind == dray_image::ErrorKind::ReadOnly {
                return Refusal::new(ErrorKind::Denied, what.clone(), why)
                    .hint("make it writable, or add it with --read-only as a backing image");
            }
            Refusal::new(ErrorKind::Io, what.clone(), why)
                .hint("check the disk: the host's kernel log may say why")
        })?;
        record.len = file.geometry().len;
        let added = self.registry.add(record, file);
        let entry = added.map_err(|why| not_added(&what, &why))?;
        Ok(self.image_status(&entry))
    }
}

/// Refuses a qcow2 whose data is in another file: dray would take the tables for the image.
fn refuse_data_elsewhere(what: &str, path: &Path) -> ApiResult<()> {
    let file = std::fs::File::open(path).map_err(|why| io_error(what, why))?;
    if !is_elsewhere(&file).map_err(|why| io_error(what, why))? {
        return Ok(());
    }
    let why = format!("{} is a qcow2 whose data is in another file", path.display());
    Err(Refusal::new(ErrorKind::Conflict, what, why).hint(
        "make one file of it with `qemu-img convert -O qcow2`; if it is a raw disk whose content \
         looks like this, add --format raw",
    ))
}

/// Why an image was not added, and what to do.
fn not_added(what: &str, why: &std::io::Error) -> Refusal {
    let conflict = |hint: String| Refusal::new(ErrorKind::Conflict, what, why).hint(hint);
    let inner = why.get_ref();
    if let Some(used) = inner.and_then(|inner| inner.downcast_ref::<Used>()) {
        return conflict(used.hint());
    }
    let locked = inner.and_then(|inner| inner.downcast_ref::<dray_image::Error>());
    if locked.is_some_and(|error| error.kind == dray_image::ErrorKind::InUse) {
        return conflict(LOCKED.to_owned());
    }
    match why.kind() {
        std::io::ErrorKind::AlreadyExists => {
            conflict("choose another name, or `dray images remove` that one".to_owned())
        }
        _ => io_error(what, why),
    }
}
