//! The measured rates of the links to peers, for the predictions of later migrations.
//!
//! A file of the state directory, one number a peer. Nothing depends on it; a damaged one is begun
//! anew.

use dray_files::StatePath;
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// Migrations end at the same time.
static WRITING: Mutex<()> = Mutex::new(());

fn read(path: &StatePath) -> BTreeMap<String, u64> {
    path.peek().unwrap_or_default()
}

/// Bytes a second that the link to `peer` has carried last; none when nothing was measured.
pub fn rate(path: &StatePath, peer: &str) -> Option<u64> {
    read(path).get(peer).copied().filter(|&rate| rate > 0)
}

/// The link to `peer` carried `rate` bytes a second. Of a migration that was `limited`, it carries
/// at least that.
pub fn note(path: &StatePath, peer: &str, rate: u64, limited: bool) {
    let _writing = WRITING.lock();
    let mut links = read(path);
    let known = links.get(peer).copied().unwrap_or(0);
    let rate = if limited { rate.max(known) } else { rate };
    // A limit says nothing of a link that nothing else is known of.
    if rate == 0 || rate == known || limited && known == 0 {
        return;
    }
    links.insert(peer.to_owned(), rate);
    if let Err(why) = path.put(&links) {
        tracing::debug!(%why, "cannot note the rate of a link");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_rate_counts_and_a_limit_is_no_rate() {
        let dir = tempfile::tempdir().unwrap();
        let path = StatePath::real(dir.path().join("links.json"));
        note(&path, "hostb", 50, true);
        assert_eq!(rate(&path, "hostb"), None, "nobody knows what it carries");
        note(&path, "hostb", 100, false);
        note(&path, "hostb", 80, true);
        assert_eq!(rate(&path, "hostb"), Some(100));
        note(&path, "hostb", 120, true);
        assert_eq!(rate(&path, "hostb"), Some(120));
        note(&path, "hostb", 90, false);
        note(&path, "hostc", 0, false);
        assert_eq!((rate(&path, "hostb"), rate(&path, "hostc")), (Some(90), None));
        std::fs::write(&path, "{").unwrap();
        assert_eq!(rate(&path, "hostb"), None);
        note(&path, "hostb", 7, false);
        assert_eq!(rate(&path, "hostb"), Some(7));
    }
}
