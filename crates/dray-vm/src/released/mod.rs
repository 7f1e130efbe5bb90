//! Images that QEMU has taken back as plain files: what is known of them, so that the next migration
//! sends only what was changed.
//!
//! **Release.** (1) The note `released/ID.json` is durable, with the name of a dirty bitmap, or, where nobody has
//! use for one, the record says that the disk may be on its file; (2) QEMU
//! gets a node for the file, the bitmap on it, and then the pivot; (3) the image's line of generations
//! is written beside the note, with what was changed while dray served it; (4) the note says that the
//! file is QEMU's; (5) the image is forgotten here.
//!
//! **Adoption.** (1) The image is registered with the line of (3), and tracks; (2) the pivot; (3) the
//! bitmap is read ([`absorb`]) and what it names counts as changed in the open generation, durably;
//! (4) the note goes; (5) QEMU closes the old node, and with it the bitmap.
//!
//! **Who sees which write.** The node carries its bitmap before anything can be written to it. A
//! mirror's pivot writes to both nodes until it is complete, a reopen first drains what is under way:
//! so a write goes through dray, which tracks, or through the node, whose bitmap records, or both.
//! Dray tracks from before the second pivot, and the bitmap is read after it, when nobody writes to the
//! node. A write seen by both is named twice, which is harmless; there is none that is seen by nobody.
//!
//! **Whoever dies.** As long as there is a note of an image that is registered here, its line is
//! *suspect* ([`ImageLineage::suspect`](dray_host::lineage::ImageLineage::suspect)): everything counts as changed. So no crash between two steps can make
//! dray believe a line that lacks what QEMU wrote. The next command that looks at the VM sees where its
//! disk is and [settles](settle) it: on the file, the release is finished; on dray, the bitmap is read
//! or, after a release that never came to its pivot, the note goes.
//!
//! **A loss that the guest has not heard of** keeps the disk ([`crate::leaving`]). One that is found when
//! QEMU has the disk already, after (4) or at the next look, has it [taken back](taking): an adoption whose
//! image is registered already. Where QEMU refuses that, the image is not forgotten, and each look tries it
//! again.
//!
//! **Who else writes.** QEMU's lock on the file keeps others out as long as the device has the disk. The note has
//! the device's mark ([`dray_qemu::held`]): a device that was unplugged meanwhile has lost it. Where QEMU may drop
//! the lock unseen, there is neither a mark nor a bitmap.
//!
//! While the lock changes hands nobody holds it: the file is [watched](watch), and where another program opened it or wrote
//! to it, or dray died meanwhile, everything counts as changed.
//!
//! Other clients of the export write until the pivot, which dray tracks; then the disk is parked.
//!
//! **What is not believed.** A bitmap that is not there, or does not record, or in another QEMU, a device without
//! its mark, a file
//! that is shorter than it was, or [was meanwhile](dray_qemu::shrunk), a disk of another size: then the line goes on
//! and everything counts as changed. The last piece always does, and so do holes. Another file under the path is
//! another image.

pub mod absorb;
pub mod settle;
pub mod taking;
pub mod watch;

use self::watch::{Doubt, Watch};
use crate::leaving::{Leaving, Untold};
use crate::look::process_of;
use crate::own_files;
use dray_config::Config;
use dray_files::unix_ms;
use dray_host::abort;
use dray_host::lineage;
use dray_host::process::QemuProcess;
use dray_host::record::{Adopted, ImageRecord};
use dray_host::registry::{Entry, Registry};
use dray_host::released::{FileId, Released};
use dray_image::FileImage;
use dray_qemu::bitmap::PREFIX;
use dray_qemu::{ErrorKind as Kind, LayerPlan, NbdExport, NewBitmap, Qmp, held};
use serde::Deserialize;
use std::fmt;
use std::io;
use std::time::Duration;
use tokio::task::block_in_place;

/// The longest wait for requests of other clients that are in flight when QEMU has a disk back.
const IN_FLIGHT: Duration = Duration::from_secs(5);

/// How a released image got to its file.
///
/// # Errors
/// When the note does not tell.
pub fn plan_of(note: &Released) -> io::Result<LayerPlan> {
    LayerPlan::deserialize(&note.plan).map_err(io::Error::other)
}

/// How this process has had disks on their files: those that it has taken back, and those that are under dray
/// now. Their nodes were made while it ran, so that its command line does not tell of them.
pub fn plans_of(registry: &Registry, process: &QemuProcess) -> Vec<LayerPlan> {
    // What does not tell is as good as nothing.
    let notes = registry.released.begun_by(process);
    let released = notes.iter().flat_map(plan_of);
    let adopted = registry.all().into_iter().filter_map(|entry| entry.record().adopted);
    let own =
        |adopted: &Adopted| adopted.qemu.as_ref().is_some_and(|then| then.is_process(process));
    let under_dray =
        adopted.filter(own).flat_map(|adopted| LayerPlan::deserialize(&adopted.splice));
    released.chain(under_dray).collect()
}

fn value_of(plan: &LayerPlan) -> io::Result<serde_json::Value> {
    serde_json::to_value(plan).map_err(io::Error::other)
}

/// Why a disk was not released.
#[derive(Debug)]
pub enum NotReleased {
    /// QEMU could not.
    Qemu(dray_qemu::Error),
    /// What has to be durable is not.
    Store(io::Error),
    /// The guest is still to be told of a loss: the disk is on dray.
    Untold(Untold),
    /// The same, but the disk is on its file, and could not be taken back.
    Left(Untold, dray_qemu::Error),
    /// The file cannot be made as long as its export: the disk is on dray.
    TooShort(io::Error),
    /// What has to be durable before QEMU gets the disk is not: it is on dray.
    NotNoted(io::Error),
}

impl fmt::Display for NotReleased {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qemu(why) => why.fmt(f),
            Self::Store(why) => write!(f, "cannot note a released image: {why}"),
            Self::NotNoted(why) => write!(f, "cannot note that it is released: {why}"),
            Self::Untold(loss) => f.write_str(&loss.with_hint()),
            Self::Left(loss, why) => {
                write!(f, "{loss}; QEMU has the disk, and dray cannot take it back ({why})")
            }
            Self::TooShort(why) => {
                write!(
                    f,
                    "its file cannot be made as long as its export, so the disk stays on dray: \
                     {why}"
                )
            }
        }
    }
}

impl NotReleased {
    /// Whether the disk is on dray, and nothing is left of the release in QEMU.
    fn is_undone(&self) -> bool {
        match self {
            Self::Qemu(why) => !why.kind().is_unknown(),
            Self::Untold(_) | Self::TooShort(_) | Self::NotNoted(_) => true,
            Self::Store(_) | Self::Left(..) => false,
        }
    }
}

impl From<io::Error> for NotReleased {
    fn from(why: io::Error) -> Self {
        Self::Store(why)
    }
}

/// What a release has to note, durably: step 1. The note of an earlier try goes on. Nothing where
/// QEMU's command line tells how the disk was before, also by the names that it has then, and nobody has an
/// earlier generation of it.
async fn begin_release(
    registry: &Registry,
    qmp: &Qmp,
    plan: &LayerPlan,
    entry: &Entry,
) -> io::Result<Option<Released>> {
    let record = entry.record();
    let has_past = entry.line().is_some_and(|line| line.lineage().has_past());
    let qemu = process_of(qmp);
    let told = |adopted: &Adopted| !adopted.noted && adopted.is_of(qemu.as_ref());
    let told = record.adopted.as_ref().is_some_and(told) && !plan.is_named_by_dray();
    if told && !has_past {
        return Ok(None);
    }
    let qemu = qemu.ok_or_else(|| io::Error::other("qemu's process is unknown"))?;
    if let Some(known) =
        registry.released.of(record.id).filter(|known| known.qemu.is_process(&qemu))
    {
        // Of the try before this one nobody has watched the file to its end.
        let known = Released { bitmap: None, mark: None, ..known };
        registry.released.put(&known)?;
        return Ok(Some(known));
    }
    let mark = match has_past && !record.read_only && !record.device {
        true => mark_of(qmp, plan, &record.name).await?,
        false => None,
    };
    let named = |_| lineage::random_generation().map(|random| format!("{PREFIX}{random}"));
    let bitmap = mark.map(named).transpose()?;
    let path = record.current_path().map_err(io::Error::other)?;
    let note = Released {
        file: FileId::of(&path)?,
        len: std::fs::metadata(&path)?.len(),
        plan: value_of(plan)?,
        qemu,
        bitmap,
        mark,
        done: false,
        since_unix_ms: unix_ms(),
        made: false,
        image: ImageRecord { adopted: None, migration: None, ..record },
    };
    registry.released.put(&note)?;
    Ok(Some(note))
}

/// The mark of the disk's device; none where another program may write to the file unseen.
async fn mark_of(qmp: &Qmp, plan: &LayerPlan, image: &str) -> io::Result<Option<u64>> {
    match held::mark(qmp, plan, lineage::random_id()? as u64).await {
        Ok(mark) => Ok(Some(mark)),
        Err(why) => {
            tracing::info!(image, %why, "what is written to a released disk is not known");
            Ok(None)
        }
    }
}

/// Notes how QEMU has a disk whose file was made here, which its command line does not tell.
///
/// # Errors
/// What the file system or the store reports, or that QEMU's process is not known.
pub fn note_made(
    registry: &Registry,
    qmp: &Qmp,
    plan: &LayerPlan,
    image: ImageRecord,
) -> io::Result<()> {
    let qemu = process_of(qmp).ok_or_else(|| io::Error::other("qemu's process is unknown"))?;
    let (path, plan, since_unix_ms) = (plan.path(), value_of(plan)?, unix_ms());
    let (file, len) = (FileId::of(&path)?, std::fs::metadata(&path)?.len());
    let (bitmap, mark, made, done) = (None, None, true, true);
    let note = Released { image, file, len, plan, qemu, bitmap, mark, done, since_unix_ms, made };
    registry.released.put(&note)?;
    registry.released.remove_others(&path, note.image.id)
}

/// Gives a disk back to QEMU, up to where only the image's record is left to be forgotten: its locks are
/// dropped when QEMU is to take its own. Can be repeated. On failure the disk is on dray, unless the error is of the store: then it may be
/// either, its line is suspect, and the release wants to be repeated; or unless the error says that the
/// disk is on its file.
///
/// # Errors
/// What QEMU or the store reports, or that the guest is still to be told of a loss.
pub async fn release(
    registry: &Registry,
    config: &Config,
    qmp: &Qmp,
    plan: &LayerPlan,
    entry: &Entry,
) -> Result<dray_qemu::Released, NotReleased> {
    let leaving = match Leaving::begin(entry) {
        Ok(leaving) => leaving,
        Err(loss) => {
            take_back_if_left(registry, config, qmp, plan, entry).await?;
            return Err(NotReleased::Untold(loss));
        }
    };
    lengthen(entry).map_err(NotReleased::TooShort)?;
    abort::step("ReleaseNote");
    let note = begin_release(registry, qmp, plan, entry).await.map_err(NotReleased::NotNoted)?;
    if note.is_none() {
        registry.doubt_adoption(entry).map_err(NotReleased::NotNoted)?;
    }
    if let Some(line) = entry.line().filter(|_| note.is_some()) {
        line.suspect();
    }
    let named = note.as_ref().and_then(|note| Some((note.bitmap.clone()?, note.len)));
    let bitmap = named.map(|(name, len)| NewBitmap::new(name, len));
    let watch = note.as_ref().and_then(|note| Watch::begin(entry, note.qemu.pid));
    // No earlier: until QEMU takes its own, nothing keeps other programs away.
    entry.drop_locks();
    abort::step("ReleasePivot");
    let export = taking::export(config, entry.record().name);
    let released = pivot(qmp, (plan, &export), bitmap.as_ref(), entry, &leaving).await;
    if released.as_ref().is_err_and(NotReleased::is_undone) {
        stay(registry, entry, note.is_some(), watch.as_ref())?;
    }
    let released = released?;
    abort::step("ReleasePivoted");
    let quiet = close_to_others(entry);
    if let Some(note) = note {
        let alone = watch::look(watch.as_ref());
        let tracked = released.tracked && quiet && believed(&note, alone);
        registry.end_release(entry, note, tracked)?;
    }
    taking::unless_told(registry, config, qmp, plan, entry).await?;
    Ok(released)
}

/// An agent that died may have left a disk on its file whose guest is still to be told of a loss.
async fn take_back_if_left(
    registry: &Registry,
    config: &Config,
    qmp: &Qmp,
    plan: &LayerPlan,
    entry: &Entry,
) -> Result<(), NotReleased> {
    if dray_qemu::is_released(qmp, plan).await.is_ok_and(|on_file| on_file) {
        taking::unless_told(registry, config, qmp, plan, entry).await?;
    }
    Ok(())
}

/// The disk is on dray as before: its locks come back, and what was noted of its release goes.
fn stay(
    registry: &Registry,
    entry: &Entry,
    noted: bool,
    watch: Option<&Watch>,
) -> Result<(), NotReleased> {
    entry.regain_locks();
    if noted {
        settle::undo_release(registry, entry, watch::look(watch))?;
    }
    registry.end_adoption(entry)?;
    Ok(())
}

/// QEMU has the file: no other client changes it through dray any more. Whether dray knows of all that they have
/// changed.
fn close_to_others(entry: &Entry) -> bool {
    // By an earlier try, which the note of that try tells of.
    if entry.disk.is_parked() {
        return false;
    }
    let quiesced = block_in_place(|| entry.disk.quiesce(IN_FLIGHT));
    let why = match quiesced {
        Ok(quiesced) => {
            entry.disk.park(quiesced);
            return true;
        }
        Err(why) => why,
    };
    entry.disk.park_now();
    let image = entry.record().name;
    tracing::warn!(image, %why, "dray treats the whole disk as changed: a client may still write to it");
    false
}

/// Whether a released disk's bitmap tells of all that is written to its file.
fn believed(note: &Released, alone: Result<(), Doubt>) -> bool {
    let told = note.bitmap.is_none() || alone.is_ok();
    if let (false, Err(why)) = (told, alone) {
        tracing::warn!(image = note.image.name, %why, "dray treats the whole disk as changed");
    }
    told
}

/// Makes a file that is shorter than its export, as a qcow2 is, as long, with a hole. QEMU asks for the length
/// of a file once, when it opens it, and takes what lies behind that for zeros. Until the pivot the guest writes
/// through the export, and nothing can go behind its end. Nothing is cut off: a file is never longer than its
/// export.
fn lengthen(entry: &Entry) -> io::Result<()> {
    let (record, len) = (entry.record(), entry.file.geometry().len);
    if record.read_only || record.device {
        return Ok(());
    }
    if entry.file.file_len().map_err(io::Error::other)? < len {
        entry.file.set_len(len).map_err(io::Error::other)?;
    }
    Ok(())
}

/// Checks that QEMU has the very file open that dray serves, in a disk's node for its file: another one may lie at its
/// path by now, also another disk's.
async fn check_opened(
    what: &str,
    qmp: &Qmp,
    plan: &LayerPlan,
    entry: &Entry,
) -> dray_qemu::Result<()> {
    let served = entry.file.as_file().and_then(FileImage::id);
    let (Some(vm), Some(served)) = (process_of(qmp), served) else { return Ok(()) };
    let path = entry.record().path;
    let opened = own_files::check_node(what, &vm, qmp, plan.local_node(), (&path, served)).await;
    opened.map_err(|why| dray_qemu::Error::new(Kind::Refused, why.to_string()))
}

/// Puts a disk on its file, if it is on its `export`, and unless the guest has to be told of a loss before.
///
/// # Errors
/// What QEMU reports, or what the guest is still to be told; the disk is on dray.
pub async fn pivot(
    qmp: &Qmp,
    (plan, export): (&LayerPlan, &NbdExport),
    bitmap: Option<&NewBitmap>,
    entry: &Entry,
    leaving: &Leaving,
) -> Result<dray_qemu::Released, NotReleased> {
    let may_pivot = || {
        let refused = |loss| dray_qemu::Error::with_source(Kind::Refused, "it stays", loss);
        leaving.check().map_err(refused)
    };
    let opened = async || {
        check_opened("the disk stays on dray", qmp, plan, entry).await?;
        // Others can have changed it until now.
        export.check(qmp, plan).await
    };
    match dray_qemu::release_tracked(qmp, plan, bitmap, opened, &may_pivot).await {
        Ok(released) => Ok(released),
        Err(why) if why.kind().is_unknown() => Err(NotReleased::Qemu(why)),
        Err(why) => {
            // QEMU's own flush may have been told, and have ended the exchange.
            leaving.check().map_err(NotReleased::Untold)?;
            Err(NotReleased::Qemu(why))
        }
    }
}
