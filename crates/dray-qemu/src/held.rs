//! Whether QEMU has held the file of a disk without a break, so that no other program can have written to it.
//!
//! QEMU locks the file while a device has the disk. It drops the lock when the device is unplugged, and while the
//! VM's disks are inactive after a migration to a file. The nodes stay, and so do their bitmaps, which miss what
//! another program writes meanwhile. QEMU does not tell afterwards that this happened. So the device gets a mark
//! that ends with it:
//!
//! * **The mark** is a histogram of latencies with one random boundary that no request reaches. It belongs to the
//!   device's block backend. It outlives resets, and every exchange of the nodes below. A device that is plugged in
//!   again has none. The backend of a `-drive` has a name, and some devices leave it behind: they get no mark.
//! * **A migration** out of QEMU leaves a record in QEMU, which the next one replaces. Two may look the same, so
//!   that QEMU is believed only while it has no such record.
//!
//! A mark is never changed: QEMU frees the boundaries that it replaces, while the disk's iothread may count by them.
//! The first ones are safe, for QEMU sets the pointer by which the thread finds them last.

use serde_json::{Value, json};

use crate::activate::is_inactive;
use crate::error::{Error, ErrorKind, Result};
use crate::graph::{device_id, object_path};
use crate::plan::LayerPlan;
use crate::qmp::Qmp;

/// How the boundaries of dray's begin: the letters `dr`. It is the latency of a request that takes 229 years.
const MARK: u64 = 0x6472 << RANDOM_BITS;
const RANDOM_BITS: u32 = 48;
/// The histograms of a device: what sets one, and where it is shown. First the one that QEMU counts in least.
const HISTOGRAMS: [(&str, &str); 3] = [
    ("boundaries-flush", "flush_latency_histogram"),
    ("boundaries-write", "wr_latency_histogram"),
    ("boundaries-read", "rd_latency_histogram"),
];

/// The devices that take the backend of a `-drive` along when they are unplugged.
const WITH_THEIR_DRIVE: [&str; 2] = ["virtio-blk-device", "scsi-hd"];

/// A device with a disk.
struct Device {
    /// What QEMU calls it.
    name: String,
    /// Its medium can be changed.
    is_removable: bool,
    /// Its block backend is that of a `-drive`.
    is_drive: bool,
}

/// The device's mark, from when on QEMU holds the lock on the disk's file for as long as [`check`] finds the mark. A
/// device without a mark gets one, with `random` in it.
///
/// # Errors
/// Why QEMU may drop the lock, or what it reports.
pub async fn mark(qmp: &Qmp, plan: &LayerPlan, random: u64) -> Result<u64> {
    if plan.local.get("locking").is_some_and(|locking| locking == "off") {
        return Err(doubt("its node has locking=off"));
    }
    no_migration(qmp).await?;
    let device = locking_device(qmp, &plan.qdev).await?;
    if let Some(mark) = mark_of(qmp, &device).await? {
        return Ok(mark);
    }
    let stats = stats_of(qmp, &device).await?;
    let free = HISTOGRAMS.iter().find(|(_, shown)| stats.get(shown).is_none());
    let (set, _) = free.ok_or_else(|| doubt("all its latency histograms are in use"))?;
    let mark = MARK | (random & (u64::MAX >> (u64::BITS - RANDOM_BITS)));
    qmp.execute("block-latency-histogram-set", json!({ "id": device, *set: [mark] })).await?;
    Ok(mark)
}

/// Checks that QEMU has held the lock since the device was found to have this mark.
///
/// # Errors
/// That QEMU may have dropped the lock, or what it reports.
pub async fn check(qmp: &Qmp, qdev: &str, mark: u64) -> Result<()> {
    active(qmp).await?;
    let device = device(qmp, qdev).await?.name;
    if mark_of(qmp, &device).await? != Some(mark) {
        return Err(doubt(
            "its device was unplugged meanwhile, or its latency histograms were set",
        ));
    }
    no_migration(qmp).await
}

/// QEMU holds no lock while the disks of its VM are inactive.
async fn active(qmp: &Qmp) -> Result<()> {
    match is_inactive(qmp).await? {
        false => Ok(()),
        true => Err(doubt("the disks of the vm are not active")),
    }
}

/// The name of a device that keeps its disk, and does not share its file with writers.
async fn locking_device(qmp: &Qmp, qdev: &str) -> Result<String> {
    active(qmp).await?;
    let device = device(qmp, qdev).await?;
    if device.is_removable {
        return Err(doubt("its device can change its medium"));
    }
    if device.is_drive && !takes_drive(&property(qmp, &device, "type").await?) {
        return Err(doubt("its drive stays when its device is unplugged"));
    }
    match property(qmp, &device, "share-rw").await? {
        Value::Bool(false) => Ok(device.name),
        _ => Err(doubt("its device shares the file with writers (share-rw=on)")),
    }
}

fn takes_drive(device: &Value) -> bool {
    device.as_str().is_some_and(|device| WITH_THEIR_DRIVE.contains(&device))
}

async fn property(qmp: &Qmp, device: &Device, name: &str) -> Result<Value> {
    let path = object_path(&device.name);
    qmp.execute("qom-get", json!({ "path": path, "property": name })).await
}

async fn device(qmp: &Qmp, qdev: &str) -> Result<Device> {
    let blocks = qmp.execute("query-block", Value::Null).await?;
    let called =
        |block: &&Value| block["qdev"].as_str().is_some_and(|name| device_id(name) == qdev);
    let found = blocks.as_array().into_iter().flatten().find(called);
    let block = found.ok_or_else(|| doubt("its device is gone"))?;
    Ok(Device {
        name: block["qdev"].as_str().unwrap_or_default().to_owned(),
        is_removable: block["removable"] != false,
        is_drive: block["device"] != "",
    })
}

async fn mark_of(qmp: &Qmp, device: &str) -> Result<Option<u64>> {
    stats_of(qmp, device).await.map(|stats| mark_in(&stats))
}

async fn stats_of(qmp: &Qmp, device: &str) -> Result<Value> {
    let all = qmp.execute("query-blockstats", Value::Null).await?;
    let found = all.as_array().into_iter().flatten().find(|block| block["qdev"] == device);
    found.map(|block| block["stats"].clone()).ok_or_else(|| doubt("qemu has no statistics of it"))
}

/// The mark among a device's statistics.
fn mark_in(stats: &Value) -> Option<u64> {
    HISTOGRAMS.iter().find_map(|(_, shown)| {
        let boundaries = stats[*shown]["boundaries"].as_array()?;
        let [only] = boundaries.as_slice() else { return None };
        only.as_u64().filter(|boundary| boundary >> RANDOM_BITS == MARK >> RANDOM_BITS)
    })
}

async fn no_migration(qmp: &Qmp) -> Result<()> {
    match has_left(&qmp.execute("query-migrate", Value::Null).await?) {
        false => Ok(()),
        true => Err(doubt("a migration may have made the disks of the vm inactive")),
    }
}

/// Whether QEMU has a record of a migration that began there. Of the one by which the VM came it says only that it
/// is completed.
fn has_left(record: &Value) -> bool {
    let came = record["status"] == "completed" && record.get("ram").is_none();
    !came && record.get("status").is_some_and(|status| status != "none")
}

fn doubt(why: &str) -> Error {
    Error::new(ErrorKind::Refused, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_found_among_other_histograms() {
        let histogram = |boundaries: Value| json!({ "bins": [0, 0], "boundaries": boundaries });
        let others = json!({ "flush_latency_histogram": histogram(json!([1000])) });
        assert_eq!(mark_in(&others), None);
        assert_eq!(mark_in(&json!({})), None);
        let mark = MARK | 7;
        let ours = json!({
            "flush_latency_histogram": histogram(json!([1000, mark])),
            "wr_latency_histogram": histogram(json!([mark])),
        });
        assert_eq!(mark_in(&ours), Some(mark));
    }

    #[test]
    fn only_the_migration_that_brought_the_vm_is_none_that_left() {
        assert!(!has_left(&json!({})));
        assert!(!has_left(&json!({ "status": "none" })));
        assert!(!has_left(&json!({ "status": "completed" })));
        assert!(has_left(&json!({ "status": "completed", "total-time": 11, "ram": {} })));
        for status in ["setup", "active", "failed", "cancelled", "wait-unplug"] {
            assert!(has_left(&json!({ "status": status })), "{status}");
        }
    }
}
