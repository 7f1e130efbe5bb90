//! One moment of one or several images: everybody's writes have ended and none begins, each image's
//! generation ends, and its snapshot begins. It takes milliseconds; what can be done before and after
//! is done before and after.

use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_backup::{Consistency, PIECE_BYTES};
use dray_files::unix_ms;
use dray_host::abort;
use dray_host::lineage::{ImageLineage, Turn, Turning};
use dray_host::registry::Entry;
use dray_image::snapshot::Prepared;
use dray_image::{Quiesced, Snapshot, SpillFile};
use dray_types::{Ancestor, BLOCK_SIZE, BlockRange, BlockSet, GenerationId};
use dray_vm::frozen::FrozenGuests;
use dray_vm::leaving::refuse_untold;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the guest's writes may take to end; a disk that needs longer is in trouble.
const QUIET: Duration = Duration::from_secs(5);
/// Blocks of a piece.
pub const PIECE_BLOCKS: u64 = PIECE_BYTES as u64 / BLOCK_SIZE;

/// An image whose moment comes.
pub struct Subject {
    /// The image.
    pub entry: Arc<Entry>,
    /// Its line.
    pub line: Arc<ImageLineage>,
    /// The generation of the backup that this one builds on.
    pub parent: Option<Ancestor>,
    /// The newest generation that each repository has of it, as far as this host has put them there.
    pub held: Vec<GenerationId>,
    /// Where the guest's old blocks are kept.
    pub spill: PathBuf,
}

/// What the moment was of one image.
pub struct Taken {
    /// What the image held.
    pub snapshot: Snapshot,
    /// The generation that ended; durable.
    pub generation: Ancestor,
    /// The closed generations before it.
    pub ancestors: Vec<Ancestor>,
    /// Whether what has changed since the parent is known: else everything is in the snapshot.
    pub incremental: bool,
    /// Blocks that have changed since the parent, or all.
    pub changed_blocks: u64,
}

/// The moment.
pub struct Moment {
    /// Of each image, in the order asked for.
    pub images: Vec<Taken>,
    /// When, in milliseconds since 1970.
    pub unix_ms: u64,
    /// How long writes were held back.
    pub quiet: Duration,
    /// What a guest would find in the images.
    pub consistency: Consistency,
}

/// The blocks of all pieces that `blocks` touch.
pub fn whole_pieces(blocks: &BlockSet) -> BlockSet {
    let whole = |run: BlockRange| {
        let start = run.start / PIECE_BLOCKS * PIECE_BLOCKS;
        BlockRange::new(start, run.end().next_multiple_of(PIECE_BLOCKS) - start)
    };
    blocks.runs().map(whole).collect()
}

fn whole(subject: &Subject) -> BlockSet {
    [BlockRange::whole(subject.entry.record().len)].into_iter().collect()
}

/// What the snapshot will want, as far as it is known by now.
fn expected(subject: &Subject) -> BlockSet {
    let changed = |parent: Ancestor| subject.line.changed_since(parent.id, &subject.entry.disk);
    subject.parent.and_then(changed).map_or_else(|| whole(subject), |set| whole_pieces(&set))
}

/// The generations that the line must go on to know: the parent, and the newest at each repository.
fn held(subject: &Subject) -> Vec<GenerationId> {
    subject.parent.iter().map(|parent| parent.id).chain(subject.held.iter().copied()).collect()
}

/// An image whose moment can come: what may take its time is done.
struct Ready<'a> {
    subject: &'a Subject,
    prepared: Prepared,
    turning: Turning<'a>,
}

impl<'a> Ready<'a> {
    /// While nobody writes its generation ends, at `unix_ms`, and its snapshot begins.
    fn turn(
        self,
        what: &str,
        quiet: &Quiesced,
        (host, unix_ms): (&str, u64),
    ) -> ApiResult<(Taken, Turn<'a>)> {
        let Self { subject, prepared, turning } = self;
        let disk = &subject.entry.disk;
        let turn = turning.turn(disk, quiet, host, unix_ms);
        let turn = turn.map_err(|why| Refusal::new(ErrorKind::Io, what, why))?;
        let changed = subject.parent.and_then(|parent| turn.changed_since(parent.id));
        let wanted = changed.as_ref().map_or_else(|| whole(subject), whole_pieces);
        let snapshot = disk.snapshot(prepared, quiet, &wanted);
        let taken = Taken {
            snapshot: snapshot.map_err(|why| disk_error(what, &why))?,
            generation: turn.closed(),
            ancestors: subject.line.ancestors(),
            incremental: changed.is_some(),
            changed_blocks: changed.as_ref().map_or_else(|| whole(subject).len(), BlockSet::len),
        };
        Ok((taken, turn))
    }
}

/// Takes the moment. With the socket of a guest agent the guest's file systems are frozen in it.
///
/// # Errors
/// Whatever keeps it from being taken. No guest is held up then, and every generation goes on whose
/// end was not durable.
pub fn take(
    what: &str,
    subjects: &[Subject],
    host: &str,
    (guests, freeze): (&FrozenGuests, Option<&Path>),
) -> ApiResult<Moment> {
    let failed_io = |why: io::Error| Refusal::new(ErrorKind::Io, what, why);
    let prepared = prepare(what, subjects)?;
    let frozen = freeze.map(|socket| guests.freeze(socket)).transpose().map_err(|why| {
        Refusal::new(ErrorKind::Hypervisor, what, format!("cannot freeze the guest: {why}"))
            .hint("without --fsfreeze, the backup is in the state after a power cut")
    })?;
    // After the freeze: a guest that is slow to freeze would keep the lines from being written down.
    let turnings =
        subjects.iter().map(turning).collect::<Result<Vec<_>, _>>().map_err(failed_io)?;
    let began = Instant::now();
    let quiet = quiesce(what, subjects)?;
    let unix_ms = unix_ms();
    let mut images = Vec::new();
    let mut turns = Vec::new();
    let parts = subjects.iter().zip(&quiet).zip(prepared.into_iter().zip(turnings));
    for ((subject, quiet), (prepared, turning)) in parts {
        let ready = Ready { subject, prepared, turning };
        let (taken, turn) = ready.turn(what, quiet, (host, unix_ms))?;
        images.push(taken);
        turns.push(turn);
    }
    drop(quiet);
    abort::step("Backup-Turned");
    let quiet = began.elapsed();
    let consistency = frozen.as_ref().map_or(Consistency::Crash, |_| Consistency::Filesystem);
    if let Some(frozen) = frozen {
        frozen.thaw().map_err(|why| Refusal::new(ErrorKind::Hypervisor, what, why))?;
    }
    subjects.iter().try_for_each(|subject| sync(what, subject))?;
    abort::step("Backup-Synced");
    turns.into_iter().try_for_each(|turn| turn.commit().map(drop)).map_err(failed_io)?;
    Ok(Moment { images, unix_ms, quiet, consistency })
}

/// What can be done for the snapshots before anybody is held up.
fn prepare(what: &str, subjects: &[Subject]) -> ApiResult<Vec<Prepared>> {
    let prepare = |subject: &Subject| {
        let len = subject.entry.record().len;
        let spill = Box::new(SpillFile::create(&subject.spill, len)?);
        subject.entry.disk.prepare_snapshot(&expected(subject), spill)
    };
    subjects.iter().map(prepare).collect::<Result<_, _>>().map_err(|why| disk_error(what, &why))
}

/// What the backup is going to read may be in memory only, and nobody would hear of its loss in a power cut: the blocks
/// count as unchanged since the generation that ends here. So they are durable before its end is.
fn sync(what: &str, subject: &Subject) -> ApiResult<()> {
    subject.entry.file.sync().map_err(|why| disk_error(what, &why))?;
    refuse_untold(&subject.entry).map_err(|loss| loss.refused(what))
}

fn turning(subject: &Subject) -> io::Result<Turning<'_>> {
    subject.line.turning(held(subject))
}

fn quiesce(what: &str, subjects: &[Subject]) -> ApiResult<Vec<Quiesced>> {
    let quiet = |subject: &Subject| subject.entry.disk.quiesce(QUIET);
    subjects.iter().map(quiet).collect::<Result<_, _>>().map_err(|why| disk_error(what, &why))
}

/// What a disk reports, as the API tells it.
pub fn disk_error(what: &str, why: &dray_image::Error) -> Refusal {
    let kind = match why.kind {
        dray_image::ErrorKind::NoSpace => ErrorKind::NoSpace,
        dray_image::ErrorKind::Unavailable | dray_image::ErrorKind::InUse => ErrorKind::Conflict,
        _ => ErrorKind::Io,
    };
    let error = Refusal::new(kind, what, why);
    match kind {
        ErrorKind::NoSpace => error.hint(
            "dray keeps the old content of blocks that guests overwrite during a backup in the \
             image's pool; make room there, or make the backup when the guests write less",
        ),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_whole() {
        let set = |runs: &[(u64, u64)]| -> BlockSet {
            runs.iter().map(|&(start, len)| BlockRange::new(start, len)).collect()
        };
        assert_eq!(whole_pieces(&set(&[(3, 1), (15, 2), (64, 16)])), set(&[(0, 32), (64, 16)]));
        assert!(whole_pieces(&BlockSet::new()).is_empty());
    }
}
