//! Reading what QEMU has written to an image while it was released, from the bitmap on its node.

use super::plan_of;
use crate::look::process_of;
use crate::socket::Meeting;
use dray_host::registry::Entry;
use dray_host::released::Released;
use dray_image::{Image, runs};
use dray_nbd::client::{Client, Wish};
use dray_qemu::{LayerPlan, NewBitmap, Qmp, bitmap, held, shrunk};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// QEMU answers a question about a bitmap from memory.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes that are asked about at once: a bitmap of random writes then answers in a few megabytes.
const STEP: u64 = 1 << 30;
/// As block status says it of a dirty bitmap.
const DIRTY: u32 = 1;

/// What was changed while the image was released, as far as it can be told. Nobody writes to the node any
/// more.
///
/// # Errors
/// Why it cannot be told.
pub async fn changed(
    qmp: &Qmp,
    plan: &LayerPlan,
    note: &Released,
    entry: &Entry,
    run_dir: &Path,
) -> io::Result<BlockSet> {
    let unknown = |why: &str| io::Error::other(why);
    let now = process_of(qmp).ok_or_else(|| unknown("qemu's process is unknown"))?;
    if !note.qemu.is_process(&now) {
        return Err(unknown("qemu was started again meanwhile"));
    }
    let then = plan_of(note)?;
    let name = note.bitmap.as_deref().ok_or_else(|| unknown("no QEMU tracked its writes"))?;
    let mark = note.mark.ok_or_else(|| unknown("its device was not marked"))?;
    held::check(qmp, &plan.qdev, mark).await.map_err(io::Error::other)?;
    let len = std::fs::metadata(&note.image.path)?.len();
    if len < note.len || plan.size != then.size {
        return Err(unknown("its size has changed"));
    }
    let node = then.local_node();
    match bitmap::recorded(qmp, node, name).await.map_err(io::Error::other)? {
        Some(found) if !found.busy => {}
        Some(_) => return Err(unknown("its dirty bitmap is in use")),
        None => return Err(unknown("its dirty bitmap does not exist any more")),
    }
    if !shrunk::never(qmp, node, name).await.map_err(io::Error::other)? {
        return Err(unknown("it was shorter meanwhile, or was not marked to show that"));
    }
    let meeting = Meeting::at(run_dir, &format!("released-{}", note.image.id));
    let mut changed = read(qmp, node, name, meeting).await?;
    // Of what is past the old end nobody has another copy. What was cut off in the last piece before it nobody tells.
    let whole = BlockRange::whole(entry.disk.geometry().len);
    let end = shrunk::unmarked_from(&NewBitmap::new(name, note.len), note.len) / BLOCK_SIZE;
    if end < whole.end() {
        changed.insert(BlockRange::new(end, whole.end() - end));
    }
    let data = runs::data_blocks(&*entry.file, whole).map_err(io::Error::other)?;
    changed.union_with(&data.complement_in(whole));
    Ok(changed)
}

/// Reads a bitmap through QEMU's own NBD server, which is there only meanwhile.
async fn read(qmp: &Qmp, node: &str, name: &str, meeting: Meeting) -> io::Result<BlockSet> {
    let qemu = process_of(qmp);
    meeting.make(qemu.as_ref())?;
    bitmap::show(qmp, node, name, &meeting.socket()).await.map_err(io::Error::other)?;
    let context = format!("qemu:dirty-bitmap:{name}");
    let connected = meeting.connect(qemu.as_ref());
    let read = tokio::task::spawn_blocking(move || ask(connected?, &context)).await;
    let hidden = bitmap::hide(qmp).await;
    meeting.remove()?;
    hidden.map_err(io::Error::other)?;
    read.map_err(io::Error::other)?
}

fn ask(connection: UnixStream, context: &str) -> io::Result<BlockSet> {
    let wish = Wish {
        export: bitmap::EXPORT.to_owned(),
        contexts: vec![context.to_owned()],
        patience: Some(PATIENCE),
    };
    let client = Client::on(connection, &wish).map_err(io::Error::other)?;
    let mut changed = BlockSet::new();
    let mut at = 0;
    while at < client.len() {
        let step = STEP.min(client.len() - at);
        for extent in client.status(context, at, step).map_err(io::Error::other)? {
            if extent.flags & DIRTY != 0 {
                changed.insert(blocks(extent.offset, extent.len));
            }
        }
        at += step;
    }
    Ok(changed)
}

/// The blocks that a range of bytes touches.
fn blocks(offset: u64, len: u64) -> BlockRange {
    let start = offset / BLOCK_SIZE;
    BlockRange::new(start, (offset + len).div_ceil(BLOCK_SIZE) - start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_blocks_count_as_blocks() {
        assert_eq!(blocks(0, 1), BlockRange::new(0, 1));
        assert_eq!(blocks(4095, 2), BlockRange::new(0, 2));
        assert_eq!(blocks(8192, 4096), BlockRange::new(2, 1));
    }
}
