//! With what an agent starts: its configuration, as much of it as can be used, or the last good one.

use super::last_good;
use super::{Config, ConfigError, Problem};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The last good configuration, in the place of the one that cannot be used.
#[derive(Debug)]
pub struct Instead {
    /// Why the file cannot be used.
    pub because: ConfigError,
    /// Where the copy lies.
    pub copy: PathBuf,
    since: SystemTime,
}

impl fmt::Display for Instead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let age = self.since.elapsed().unwrap_or_default();
        write!(f, "the last good configuration, {} old, in {}", days(age), self.copy.display())
    }
}

fn days(age: Duration) -> String {
    match age.as_secs() {
        seconds if seconds < 120 => format!("{seconds} s"),
        seconds if seconds < 7200 => format!("{} min", seconds / 60),
        seconds if seconds < 2 * 86_400 => format!("{} h", seconds / 3600),
        seconds => format!("{} days", seconds / 86_400),
    }
}

/// With what an agent starts.
#[derive(Debug)]
pub struct Start {
    /// The configuration.
    pub config: Config,
    /// What is wrong with the parts that were left out of it.
    pub problems: Vec<Problem>,
    /// Set when it is not what the file says.
    pub instead: Option<Instead>,
    /// What the file says, where all of it is good.
    text: Option<String>,
}

impl Start {
    /// What there is to start with: the file without the parts that are wrong, or, when nothing of it can be
    /// used, the last good one.
    ///
    /// # Errors
    /// Why the file cannot be used, when there is no last good one.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let read = Config::read(path).and_then(|text| {
            let (config, problems) = Config::parse_parts(&text, path)?;
            let text = Some(text).filter(|_| problems.is_empty());
            Ok(Self { config, problems, instead: None, text })
        });
        read.or_else(|because| {
            let Some(found) = last_good::find(path) else { return Err(because) };
            let instead = Instead { because, copy: found.path, since: found.since };
            let config = Config { path: path.to_owned(), ..found.config };
            Ok(Self { config, problems: Vec::new(), instead: Some(instead), text: None })
        })
    }

    /// The agent has started with it: it becomes the last good one if nothing is wrong with it.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn has_worked(&self) -> std::io::Result<()> {
        self.text.as_ref().map_or(Ok(()), |text| last_good::keep(&self.config, text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_left_out_or_the_last_good_one_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dray.toml");
        let text = "[agent]\nname = 'a'\nstate_dir = '/s'\n[tls]\ndir = '/t'\n\
                    [[pool]]\nname = 'p'\npath = '/p'\n\
                    [[peer]]\nname = 'b'\naddress = 'b'\npools = ['p']\n";
        let load = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Start::load(&path)
        };
        assert!(load("[agent").is_err(), "there is no last good one");
        let start = load(text).unwrap();
        start.has_worked().unwrap();
        // A part that is wrong: the rest is used, and is not kept as a good one.
        for (wrong, problems, peers, pools) in [
            ("[[peer]]\nname = 'not a name'\naddress = 'c'\n", 1, 1, 1),
            ("[[peer]]\nname = 'c'\naddress = ''\n", 1, 1, 1),
            ("[[peer]]\nname = 'c'\naddress = 'c'\npools = ['x']\n", 1, 2, 1),
            ("[[peer]]\nname = 'B'\naddress = 'c'\n", 1, 1, 1),
            ("[[peer]]\nname = 'c'\naddress = 'c'\nrights = ['receive', 'root']\n", 1, 2, 1),
            ("[[peer]]\nname = 'A'\naddress = 'c'\n", 1, 1, 1),
            ("[[pool]]\nname = 'q'\npath = 'q'\n", 1, 1, 1),
            ("[limits]\ndata_streams = 99\nstall_seconds = 0\n", 2, 1, 1),
            ("[replicas]\nmax_age_hours = 0\nmin_free = 'x'\n", 2, 1, 1),
            ("[[backup]]\nname = 'n'\nurl = 'x'\n", 1, 1, 1),
            ("[nbd]\ntcp = 'x'\n", 1, 1, 1),
        ] {
            let start = load(&format!("{text}{wrong}")).unwrap();
            assert_eq!(start.problems.len(), problems, "{wrong}: {:?}", start.problems);
            let config = &start.config;
            assert_eq!((config.peers.all().len(), config.pools.len()), (peers, pools), "{wrong}");
            assert_eq!(config.limits, super::super::Limits::default());
            assert!(config.backups.is_empty() && start.instead.is_none());
            start.has_worked().unwrap();
        }
        // Nothing can be used of these.
        let name = text.replace("'a'", "'not a name'");
        for wrong in ["[agent", "", name.as_str(), &format!("{text}\nlisten = 1\n")] {
            let start = load(wrong).unwrap();
            assert_eq!(start.config, Config::parse(text, &path).unwrap(), "{wrong}");
            let instead = start.instead.as_ref().unwrap().to_string();
            assert!(instead.contains("dray.toml.last-good"), "{instead}");
            start.has_worked().unwrap();
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(Start::load(&path).unwrap().config.peers.all().len(), 1);
    }
}
