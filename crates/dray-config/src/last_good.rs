//! The last configuration with which an agent has started and with which nothing was wrong: a copy, for
//! the day on which the file cannot be read.
//!
//! It lies in the state directory. But the configuration says where that is, and must be found without
//! it: so this holds for the state directory that needs no configuration (the usual one, and those that
//! systemd names in `STATE_DIRECTORY`). For any other the copy lies beside the configuration, as
//! `dray.toml.last-good`. The first line of a copy names the file that it is a copy of, and a copy of
//! another file is never used.

use super::Config;
use dray_files::files::{self, RealFiles};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Its name in a state directory.
const NAME: &str = "last-good.toml";
/// What is put behind the configuration's name beside it.
const SUFFIX: &str = ".last-good";
/// The state directory where no configuration names one.
pub(super) const STATE_DIR: &str = "/var/lib/dray";

/// A copy.
pub(super) struct LastGood {
    /// What it says.
    pub(super) config: Config,
    /// Where it lies.
    pub(super) path: PathBuf,
    /// When it was kept.
    pub(super) since: SystemTime,
}

/// State directories that are known without a configuration.
fn known_dirs() -> Vec<PathBuf> {
    let named = std::env::var("STATE_DIRECTORY").unwrap_or_default();
    let named = named.split(':').filter(|dir| !dir.is_empty()).map(PathBuf::from);
    named.chain([PathBuf::from(STATE_DIR)]).collect()
}

fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(SUFFIX);
    name.into()
}

/// Where copies of the configuration at `path` may lie.
fn places(path: &Path) -> Vec<PathBuf> {
    let known = known_dirs().into_iter().map(|dir| dir.join(NAME));
    known.chain([beside(path)]).collect()
}

/// Where the copy of this one belongs.
fn place(config: &Config) -> PathBuf {
    match known_dirs().contains(&config.state_dir) {
        true => config.state_dir.join(NAME),
        false => beside(&config.path),
    }
}

fn head(path: &Path) -> String {
    format!("# the last good configuration of {}, kept by dray agent\n", path.display())
}

/// What was kept at `place` of the configuration at `path`.
fn kept_at(place: &Path, path: &Path) -> Option<String> {
    let text = fs::read_to_string(place).ok()?;
    text.strip_prefix(&head(path)).map(str::to_owned)
}

/// The newest copy of the configuration at `path`; none when there is none that reads well.
pub(super) fn find(path: &Path) -> Option<LastGood> {
    let path = std::path::absolute(path).ok()?;
    let read = |place: PathBuf| {
        let config = Config::parse(&kept_at(&place, &path)?, &path).ok()?;
        let since = place.metadata().and_then(|meta| meta.modified()).ok()?;
        Some(LastGood { config, path: place, since })
    };
    places(&path).into_iter().filter_map(read).max_by_key(|found| found.since)
}

/// Keeps `text`, with which an agent has started as `config`. Nothing is written when it is there already.
///
/// # Errors
/// What the file system reports; an older copy then stays.
pub(super) fn keep(config: &Config, text: &str) -> io::Result<()> {
    let path = std::path::absolute(&config.path)?;
    let place = place(&Config { path: path.clone(), ..config.clone() });
    if kept_at(&place, &path).as_deref() != Some(text) {
        files::replace(&RealFiles, &place, format!("{}{text}", head(&path)).as_bytes())?;
    }
    // One that was kept when the state directory was elsewhere is older, whatever the clock says.
    let others = places(&path).into_iter().filter(|other| *other != place);
    for other in others.filter(|other| kept_at(other, &path).is_some()) {
        fs::remove_file(other)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(dir: &Path, peer: &str) -> String {
        let (dir, peer) = (dir.display(), peer);
        format!(
            "[agent]\nname = 'a'\nstate_dir = '{dir}/state'\n[tls]\ndir = '/t'\n\
             [[peer]]\nname = '{peer}'\naddress = '{peer}'\n"
        )
    }

    #[test]
    fn the_last_one_is_found_without_reading_the_file_and_only_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dray.toml");
        assert!(find(&path).is_none());
        for peer in ["b", "c", "c"] {
            let text = text(dir.path(), peer);
            keep(&Config::parse(&text, &path).unwrap(), &text).unwrap();
            let found = find(&path).unwrap();
            assert_eq!(
                (found.config.peers.all()[0].name.as_str(), &found.config.path),
                (peer, &path)
            );
            assert_eq!(found.path, dir.path().join("dray.toml.last-good"));
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left there");
        let other = dir.path().join("other.toml");
        fs::rename(beside(&path), beside(&other)).unwrap();
        assert!(find(&other).is_none(), "a copy of another file");
    }

    #[test]
    fn a_copy_that_does_not_read_well_or_cannot_be_written_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dray.toml");
        fs::write(beside(&path), format!("{}[agent]\n", head(&path))).unwrap();
        assert!(find(&path).is_none());
        let text = text(dir.path(), "b");
        let elsewhere = dir.path().join("none/dray.toml");
        let config = Config::parse(&text, &elsewhere).unwrap();
        assert_eq!(keep(&config, &text).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
