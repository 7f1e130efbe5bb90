//! The agent's configuration: what was typed (a TOML file) and what was meant ([`Config`]).
//!
//! Reading finds everything that is wrong with the text; [`Config::check`] finds what is wrong
//! with the host: files, certificates, directories. [`pool`] keeps every path inside its pool (I7).
//! [`explain`] says who can reach what on such a host, and [`unit`](mod@unit) what systemd lets the agent reach.
//! [`start`] says with what an agent starts when the file is not good, or not there, and [`reload`] what of
//! the file changes in an agent that runs.
//!
//! ```
//! # use dray_config::Config;
//! let text = r#"
//! qmp_dirs = ["/run/qemu"]          # only QMP sockets below may be named; ["/run"] by default
//!
//! [agent]
//! name = "hosta"                    # the DNS name in this host's certificates
//! listen = "0.0.0.0:7421"           # state_dir, run_dir, group: see Config
//!
//! [tls]
//! dir = "/etc/pki/qemu"             # ca-cert.pem, server-cert.pem, server-key.pem, client-…
//!
//! [[pool]]
//! name = "ssd"
//! path = "/var/lib/libvirt/images"
//!
//! [[peer]]
//! name = "hostb"                    # the DNS name in its certificates
//! address = "10.0.0.2"
//! pools = ["ssd"]                   # pools here that hostb may put images into
//! rights = ["receive", "observe"]   # what it may do here; only "receive" by default
//!
//! [limits]
//! data_streams = 2                  # and link_timeout_seconds, stall_seconds, …: see Limits
//! "#;
//! let config = Config::parse(text, "dray.toml".as_ref()).unwrap();
//! assert!(config.peer("hostb").unwrap().may_use("ssd"));
//! ```

mod backup;
pub mod check;
pub mod explain;
mod last_good;
mod live;
mod nbd;
mod peers;
#[cfg(test)]
mod reference;
pub mod reload;
pub mod start;
mod typed;
pub mod unit;

pub use backup::{BackupPlace, BackupStore};
use dray_host::pool::{self, PathError, Pool, PoolIo};
use dray_host::retention::Retention;
use dray_net::dial::DEFAULT_PORT;
use dray_types::ErrorKind;
pub use live::Live;
pub use nbd::{NbdClient, may_read, may_write};
pub use peers::{Peer, Peers, Right};
use std::cmp::Reverse;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
pub use typed::MAX_STREAMS;

/// Where the configuration is unless the operator says otherwise.
pub const DEFAULT_PATH: &str = "/etc/dray/dray.toml";

/// One thing that is wrong, where, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Line in the file, when it is about one.
    pub line: Option<usize>,
    /// The field, for example `peer.hostb.pools`.
    pub field: String,
    /// What is wrong.
    pub what: String,
    /// How to correct it.
    pub hint: Option<String>,
}

impl Problem {
    pub(crate) fn new(field: impl Into<String>, what: impl Into<String>) -> Self {
        Self { line: None, field: field.into(), what: what.into(), hint: None }
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub(crate) fn line(mut self, line: usize) -> Self {
        self.line = Some(line);
        self
    }

    /// Whether nothing can be used without this: who the agent is and where its state lies. Anything else
    /// is one part, which can be left out.
    pub fn concerns_everything(&self) -> bool {
        self.field.starts_with("agent.") || self.field.starts_with("tls.") || self.field == "file"
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        write!(f, "{}: {}", self.field, self.what)?;
        self.hint.as_ref().map_or(Ok(()), |hint| write!(f, "; {hint}"))
    }
}

/// Everything that is wrong with a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// The file.
    pub path: PathBuf,
    /// At least one problem.
    pub problems: Vec<Problem>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "read configuration {}", self.path.display())?;
        let separator = if self.problems.len() == 1 { ": " } else { "\n  " };
        self.problems.iter().try_for_each(|problem| write!(f, "{separator}{problem}"))
    }
}

impl std::error::Error for ConfigError {}

/// Numbers an operator may change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Parallel data streams of a migration.
    pub data_streams: usize,
    /// How long a lost link is tried again before a migration that has not handed over fails.
    pub link_timeout: Duration,
    /// How long the guest may be stopped for one attempt of a handover.
    pub handover_timeout: Duration,
    /// How long a read of a missing block waits for a lost source before it fails; none waits for
    /// ever (until `dray unstall --fail`).
    pub stall: Option<Duration>,
    /// A control stream is dead when nothing arrives for this long.
    pub link_dead: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            data_streams: 2,
            link_timeout: Duration::from_secs(60),
            handover_timeout: Duration::from_secs(10),
            stall: None,
            link_dead: Duration::from_secs(5),
        }
    }
}

/// Reuse of content that a host has already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReuseConfig {
    /// Off: this host describes nothing, and looks nothing up for others.
    pub enabled: bool,
    /// The pools are read in the background for an index of their content.
    pub index: bool,
    /// Bytes a second that the background reads at most.
    pub index_rate: u64,
    /// Bytes that the index may have on disk.
    pub index_size: u64,
}

impl Default for ReuseConfig {
    fn default() -> Self {
        Self { enabled: true, index: true, index_rate: 64 << 20, index_size: 2 << 30 }
    }
}

/// The configuration as it was meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The file it came from.
    pub path: PathBuf,
    /// This agent's name: the DNS name in its certificates.
    pub name: String,
    /// Journals and everything that must survive.
    pub state_dir: PathBuf,
    /// Sockets and everything that need not.
    pub run_dir: PathBuf,
    /// Where peers connect.
    pub listen: SocketAddr,
    /// Members of this group may have the agent do things, besides root.
    pub group: Option<String>,
    /// Members of this group may look, and change nothing.
    pub readers: Option<String>,
    /// A QEMU that runs as a member of this group may have disks on dray, besides one that is root.
    pub guests: Option<String>,
    /// Directory of certificates and keys.
    pub tls_dir: PathBuf,
    /// Directories that images may be in.
    pub pools: Vec<Pool>,
    /// Agents that may connect and be connected to.
    pub peers: Peers,
    /// Only QMP sockets below these may be named.
    pub qmp_dirs: Vec<PathBuf>,
    /// See [`Limits`].
    pub limits: Limits,
    /// Whether and how content that a host has is used again.
    pub reuse: ReuseConfig,
    /// Which replicas go by themselves.
    pub replicas: Retention,
    /// Repositories of backups.
    pub backups: Vec<BackupPlace>,
    /// The store that peers may keep backups in.
    pub backup_store: Option<BackupStore>,
    /// Where images are exported over TCP with TLS, besides the unix socket.
    pub nbd_tcp: Option<SocketAddr>,
    /// What may be opened there, and by whom.
    pub nbd_clients: Live<Vec<NbdClient>>,
}

impl Config {
    /// Reads the file.
    ///
    /// # Errors
    /// Everything that is wrong with its text.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        Self::parse(&Self::read(path)?, path)
    }

    fn read(path: &Path) -> Result<String, ConfigError> {
        std::fs::read_to_string(path).map_err(|why| ConfigError {
            path: path.to_owned(),
            problems: vec![
                Problem::new("file", why.to_string())
                    .hint("name another file with --config, or write this one"),
            ],
        })
    }

    /// Understands a text; `path` is only named in errors.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        match Self::parse_parts(text, path)? {
            (config, problems) if problems.is_empty() => Ok(config),
            (_, problems) => Err(ConfigError { path: path.to_owned(), problems }),
        }
    }

    /// Understands what can be understood of a text: parts with a problem (a peer, a pool, a limit) are
    /// left out.
    ///
    /// # Errors
    /// Everything that is wrong with it, when nothing can be used.
    pub fn parse_parts(text: &str, path: &Path) -> Result<(Self, Vec<Problem>), ConfigError> {
        typed::understand(text, path)
            .map_err(|problems| ConfigError { path: path.to_owned(), problems })
    }

    /// Where the agent serves its images.
    pub fn nbd_socket(&self) -> PathBuf {
        self.run_dir.join("nbd.sock")
    }

    /// The peer of this name.
    pub fn peer(&self, name: &str) -> Option<Arc<Peer>> {
        self.peers.get(name)
    }

    /// The pool of this name.
    pub fn pool(&self, name: &str) -> Option<&Pool> {
        self.pools.iter().find(|pool| pool.name == name)
    }

    /// The pools in which `path` is, the innermost first where one lies in another. The file need not exist.
    pub fn pools_around(&self, path: &Path) -> Vec<&Pool> {
        let mut around: Vec<_> = self.pools.iter().filter(|pool| pool.holds(path)).collect();
        let depth = |path: PathBuf| path.components().count();
        around.sort_by_cached_key(|pool| Reverse(pool.path.canonicalize().map_or(0, depth)));
        around
    }

    /// The pool in which `path` is, the innermost.
    pub fn pool_of(&self, path: &Path) -> Option<&Pool> {
        self.pools_around(path).first().copied()
    }

    /// How an image at `path` is read and written: as its pool says.
    pub fn io(&self, path: &Path) -> PoolIo {
        self.pool_of(path).map_or(PoolIo::Buffered, |pool| pool.io)
    }

    /// The pool that `peer` gets when it names none: the first of its list.
    pub fn default_pool(&self, peer: &Peer) -> Option<&Pool> {
        peer.pools.first().and_then(|name| self.pool(name))
    }

    /// The pool that `peer` names, or its default one; an error in words otherwise.
    ///
    /// # Errors
    /// When the peer may not use it, or may use none.
    pub fn pool_for(&self, peer: &Peer, wanted: Option<&str>) -> Result<&Pool, PathError> {
        let Some(wanted) = wanted else {
            return self.default_pool(peer).ok_or_else(|| {
                let why = format!("'{}' may use no pool of '{}'", peer.name, self.name);
                PathError::new(ErrorKind::Denied, why).hint("list one in its [[peer]] there")
            });
        };
        self.pool(wanted).filter(|_| peer.may_use(wanted)).ok_or_else(|| {
            let why = format!("'{}' may not use a pool '{wanted}' of '{}'", peer.name, self.name);
            let pools =
                if peer.pools.is_empty() { "none".to_owned() } else { peer.pools.join(", ") };
            PathError::new(ErrorKind::Denied, why).hint(format!("it may use: {pools}"))
        })
    }

    /// Whether `peer` may use a pool in which this path is.
    pub fn is_open_to(&self, peer: &Peer, path: &Path) -> bool {
        self.pools.iter().any(|pool| peer.may_use(&pool.name) && pool.holds(path))
    }

    /// A QMP socket that may be used: an existing socket below one of `qmp_dirs`, links followed.
    ///
    /// # Errors
    /// When it is elsewhere, not there, or no socket.
    pub fn qmp_socket(&self, path: &Path) -> Result<PathBuf, PathError> {
        pool::socket_below(&self.qmp_dirs, path)
    }
}

/// The address peers connect to unless the file says otherwise.
fn default_listen() -> SocketAddr {
    SocketAddr::from(([0, 0, 0, 0], DEFAULT_PORT))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_backup::S3Access;

    #[test]
    fn a_backup_place_has_a_name_and_a_url() {
        let text = |url: &str| {
            format!(
                "[agent]\nname = 'a'\n[tls]\ndir = '/t'\n[[backup]]\nname = 'nas'\nurl = '{url}'\n\
                 key_file = '/k'\nevery = '24h'\nimages = ['vm1']\nkeep_last = 7\n[[backup]]\nname = 's3'\nurl = 's3://b/p'\n"
            )
        };
        let config = Config::parse(&text("file:///srv/b"), Path::new("dray.toml")).unwrap();
        let place = |name: &str, url: &str, key: Option<&str>| BackupPlace {
            name: name.to_owned(),
            url: url.to_owned(),
            access: S3Access::default(),
            key_file: key.map(PathBuf::from),
            every: key.map(|_| Duration::from_secs(86_400)),
            images: key.map(|_| "vm1".to_owned()).into_iter().collect(),
            keep_last: key.map(|_| 7),
        };
        let wanted = [place("nas", "file:///srv/b", Some("/k")), place("s3", "s3://b/p", None)];
        assert_eq!(config.backups, wanted);
        let why = Config::parse(&text("/srv/b"), Path::new("dray.toml")).unwrap_err();
        assert!(why.to_string().contains("backup.nas.url: '/srv/b' is not a URL"), "{why}");
        let wrong = text("file:///b").replace("'24h'", "'soon'");
        let why = Config::parse(&wrong, Path::new("dray.toml")).unwrap_err();
        assert!(why.to_string().contains("backup.nas.every: 'soon' is not an interval"), "{why}");
    }

    #[test]
    fn a_bucket_is_reached_as_it_is_configured() {
        let text = |url: &str, more: &str| {
            format!(
                "[agent]\nname = 'a'\n[tls]\ndir = '/t'\n[[backup]]\nname = 'off'\nurl = '{url}'\n{more}\n"
            )
        };
        let parse = |url: &str, more: &str| Config::parse(&text(url, more), Path::new("dray.toml"));
        let more = "endpoint = 'http://minio:9000'\nregion = 'eu'\ncredentials_file = '/k'\nallow_http = true";
        let access = S3Access {
            endpoint: Some("http://minio:9000".to_owned()),
            region: Some("eu".to_owned()),
            credentials_file: Some(PathBuf::from("/k")),
            allow_http: true,
        };
        assert_eq!(parse("s3://b/p", more).unwrap().backups[0].access, access);
        for (url, more, wanted) in [
            ("s3://", "", "line 7: backup.off.url: 's3://' is not a URL for backups"),
            (
                "s3://b",
                "endpoint = 'http://minio'",
                "line 8: backup.off.endpoint: 'http://minio' is without TLS",
            ),
            ("s3://b", "endpoint = 'minio:9000'", "is no https:// URL of a server"),
            ("s3://b", "credentials_file = 'keys'", "'keys' is not an absolute path"),
            ("file:///b", "region = 'eu'", "are for s3:// only"),
        ] {
            let why = parse(url, more).unwrap_err().to_string();
            assert!(why.contains(wanted), "{why}");
        }
    }

    #[test]
    fn the_innermost_pool_says_how_an_image_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        std::fs::create_dir(root.join("fast")).unwrap();
        let text = format!(
            "[agent]\nname = 'a'\n[tls]\ndir = '/t'\n\
             [[pool]]\nname = 'fast'\npath = '{root}/fast'\nio = 'direct'\n\
             [[pool]]\nname = 'all'\npath = '{root}'\n",
            root = root.display()
        );
        let config = Config::parse(&text, Path::new("dray.toml")).unwrap();
        assert_eq!(config.io(&root.join("fast/vm1")), PoolIo::Direct);
        assert_eq!(config.io(&root.join("vm1")), PoolIo::Buffered);
        assert_eq!(config.io(Path::new("/nowhere/fast/vm1")), PoolIo::Buffered);
    }
}
