//! Guests that go on from a saved state instead of booting: an emulated boot takes seconds of
//! processor time, its state is read in a tenth of one.
//!
//! The state is that of a guest that has booted and does not know its disks yet ([`Boot::disks_are_late`]),
//! so that the guest that goes on may have disks of another size on other nodes. It is made once in a
//! process for each [`Shape`], by a QEMU that boots, and moves its memory into a file.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::initramfs::{self, Boot};
use super::monitor::Monitor;
use super::vm::GuestVm;

/// How long a booted guest may take to be written into a file; half a second on an idle machine.
const SAVE_TIMEOUT: Duration = Duration::from_secs(60);
/// How often QEMU is asked whether it has.
const POLL: Duration = Duration::from_millis(20);
/// What QEMU is told before it moves its memory; by itself it writes 128 MiB/s.
const AS_FAST_AS_IT_CAN: &str =
    r#"{"execute":"migrate-set-parameters","arguments":{"max-bandwidth":10737418240}}"#;

/// What must be equal in the QEMU that saves and the one that goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub memory_mib: u32,
    pub disks: usize,
}

/// Where a state is, once it was made.
type Place = Arc<Mutex<Option<PathBuf>>>;

/// The state of a booted guest of this shape, open for reading; `None` when guests know their disks
/// as soon as they boot.
pub(super) fn state(shape: Shape) -> io::Result<Option<File>> {
    let boot = initramfs::boot().map_err(io::Error::other)?;
    if !boot.disks_are_late {
        return Ok(None);
    }
    let place = place_of(shape);
    let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
    if place.is_none() {
        *place = Some(save(shape, boot)?);
    }
    place.as_deref().map(File::open).transpose()
}

/// Where the state of a shape is, when it was made: those who want the same wait for each other.
fn place_of(shape: Shape) -> Place {
    static PLACES: OnceLock<Mutex<HashMap<Shape, Place>>> = OnceLock::new();
    let places = PLACES.get_or_init(Mutex::default);
    places.lock().unwrap_or_else(PoisonError::into_inner).entry(shape).or_default().clone()
}

/// Boots a guest of this shape and saves it.
fn save(shape: Shape, boot: &Boot) -> io::Result<PathBuf> {
    let dir = tempfile::tempdir()?;
    let mut builder = GuestVm::builder(dir.path(), "saved").memory_mib(shape.memory_mib);
    for nth in 0..shape.disks {
        let node = format!("none{nth}");
        let blockdev = format!("driver=null-co,node-name={node},size=1048576,read-zeroes=on");
        builder = builder.blockdev(blockdev).disk(&format!("disk{nth}"), &node);
    }
    let mut vm = builder.start()?;
    vm.wait_booted()?;
    let state = boot.initramfs.with_extension(format!("{}x{}", shape.memory_mib, shape.disks));
    let own = state.with_extension(format!("{}.{}", shape.disks, std::process::id()));
    write(&mut Monitor::connect(&vm.qmp_path(), SAVE_TIMEOUT)?, &own)?;
    // Several test processes save it at the same time; each sees a whole file.
    fs::rename(&own, &state)?;
    Ok(state)
}

/// QEMU writes its memory and its devices into a file.
fn write(monitor: &mut Monitor, state: &Path) -> io::Result<()> {
    let quoted = state.to_string_lossy().replace('\'', r"'\''");
    let migrate = serde_json::json!({
        "execute": "migrate", "arguments": { "uri": format!("exec:cat > '{quoted}'") },
    });
    // A guest that were stopped first would be stopped when it goes on.
    for command in [AS_FAST_AS_IT_CAN, &migrate.to_string()] {
        let answer = monitor.ask(command)?;
        if answer.get("return").is_none() {
            return Err(io::Error::other(format!("{command}: {answer}")));
        }
    }
    let deadline = Instant::now() + SAVE_TIMEOUT;
    loop {
        let answer = monitor.ask(r#"{"execute":"query-migrate"}"#)?;
        match answer["return"]["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed" | "cancelled") => return Err(not_saved(&answer)),
            _ if Instant::now() > deadline => return Err(not_saved(&answer)),
            _ => std::thread::sleep(POLL),
        }
    }
}

fn not_saved(answer: &Value) -> io::Error {
    io::Error::other(format!("a booted guest could not be saved: {answer}"))
}
