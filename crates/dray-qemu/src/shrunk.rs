//! Whether a file was ever shorter than it was: QEMU does not note what it cuts off a file, and a file that has grown
//! again looks as before.
//!
//! A dirty bitmap is as long as its node. QEMU drops the bits behind the new end when a node gets shorter, and those
//! that come back are clean. So dray puts a second bitmap on the node, the *end mark*. It records nothing, and its last
//! bit is dirty, until the node gets shorter.
//!
//! Only a write makes a bit dirty, and dray does not write to a disk that a guest has. So the bit comes from a node of
//! dray's own, as long as the disk, which forgets what is written to it.

use crate::bitmap::NewBitmap;
use crate::error::{Error, ErrorKind, Result, not_undone};
use crate::graph::{Bitmap, Graph};
use crate::nodes::{add_node, delete_node};
use crate::options::Options;
use crate::qmp::Qmp;
use serde_json::{Value, json};

/// The node that lends its bit.
const LENDER: &str = "dray-end-mark";
/// The least that QEMU writes.
const SECTOR: u64 = 512;
/// The bits of an end mark are so much coarser than those of the bitmap beside it: for the little memory that it takes,
/// one more piece of the disk counts as changed.
const COARSER: u64 = 16;

/// The name of the end mark beside a bitmap.
fn name_beside(bitmap: &str) -> String {
    format!("{bitmap}-end")
}

fn granularity(bitmap: &NewBitmap) -> u64 {
    bitmap.granularity * COARSER
}

/// Where the last piece of a disk of `len` bytes begins, of which the end mark does not tell whether it was cut.
pub fn unmarked_from(bitmap: &NewBitmap, len: u64) -> u64 {
    let granularity = granularity(bitmap);
    len.saturating_sub(1) / granularity * granularity
}

/// Puts an end mark on a node, beside a bitmap.
///
/// # Errors
/// That QEMU does not make it.
pub(crate) async fn mark(qmp: &Qmp, node: &str, bitmap: &NewBitmap) -> Result<()> {
    let len = Graph::read(qmp).await?.node(node)?.size;
    let name = name_beside(&bitmap.name);
    add(qmp, node, &name, granularity(bitmap)).await?;
    let lent =
        json!({ "node": node, "target": name, "bitmaps": [{ "node": LENDER, "name": name }] });
    delete_node(qmp, LENDER).await?;
    add_node(qmp, &lender(len)).await?;
    let marked = async {
        add(qmp, LENDER, &name, granularity(bitmap)).await?;
        // It records what is written to it.
        qmp.execute("block-dirty-bitmap-enable", json!({ "node": LENDER, "name": name })).await?;
        let last = len.saturating_sub(SECTOR);
        let line = format!("qemu-io {LENDER} \"write -q {last} {SECTOR}\"");
        qmp.execute("human-monitor-command", json!({ "command-line": line })).await?;
        qmp.execute("block-dirty-bitmap-merge", lent).await.map(drop)
    };
    let marked = marked.await;
    match (marked, delete_node(qmp, LENDER).await) {
        (Ok(()), Ok(())) => {}
        (Err(why), Ok(())) | (Ok(()), Err(why)) => return Err(why),
        (Err(why), Err(undo)) => {
            return Err(not_undone(
                why,
                &format!("block node {LENDER} could not be removed"),
                undo,
            ));
        }
    }
    match never(qmp, node, &bitmap.name).await? {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Failed, "the end of the disk could not be marked")),
    }
}

/// Whether a node was never shorter since it got the end mark beside this bitmap.
///
/// # Errors
/// What QEMU reports, or that there is no such node.
pub async fn never(qmp: &Qmp, node: &str, bitmap: &str) -> Result<bool> {
    Ok(is_marked(&Graph::read(qmp).await?.node(node)?.bitmaps, bitmap))
}

fn is_marked(bitmaps: &[Bitmap], bitmap: &str) -> bool {
    let name = name_beside(bitmap);
    let mark = bitmaps.iter().find(|bitmap| bitmap.name == name);
    // One that records is nobody's mark: a write behind the end would make it dirty again.
    mark.is_some_and(|mark| !mark.recording && !mark.inconsistent && mark.count > 0)
}

/// A bitmap that records nothing.
async fn add(qmp: &Qmp, node: &str, name: &str, granularity: u64) -> Result<()> {
    let arguments = json!({
        "node": node, "name": name, "granularity": granularity, "persistent": false, "disabled": true,
    });
    qmp.execute("block-dirty-bitmap-add", arguments).await.map(drop)
}

fn lender(len: u64) -> Options {
    let mut options = Options::new();
    options.insert("driver".into(), "null-co".into());
    options.insert("node-name".into(), LENDER.into());
    options.insert("size".into(), Value::from(len));
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bitmap(name: &str, recording: bool, count: u64) -> Bitmap {
        Bitmap {
            name: name.into(),
            granularity: 65_536,
            persistent: false,
            recording,
            busy: false,
            inconsistent: false,
            count,
        }
    }

    #[test]
    fn only_a_dirty_mark_that_records_nothing_says_that_nothing_was_cut() {
        assert!(is_marked(&[bitmap("b", true, 0), bitmap("b-end", false, 65_536)], "b"));
        for other in
            [bitmap("b-end", false, 0), bitmap("b-end", true, 65_536), bitmap("c-end", false, 1)]
        {
            assert!(!is_marked(&[bitmap("b", true, 7), other], "b"));
        }
    }

    #[test]
    fn the_last_piece_is_one_bit_of_the_mark() {
        let from = |len| unmarked_from(&NewBitmap::new("b", len), len);
        assert_eq!([from(0), from(1), from(65_536), from(65_537)], [0, 0, 0, 65_536]);
        assert_eq!(from(8 << 20), (8 << 20) - 65_536);
        assert_eq!(from(4 << 40), (4 << 40) - 131_072);
    }
}
