//! The configuration as it was typed, and how it is understood. Knows every field's place, so that
//! every problem names its line. A part with a problem is left out of what was understood.

mod backup;
mod peer;

use super::last_good;
use super::{Config, Limits, Live, NbdClient, Peers, Problem, ReuseConfig, default_listen};
use backup::{TypedBackup, TypedStore};
use dray_host::pool::{self, Pool, PoolIo, PoolKind};
use dray_host::retention::Retention;
use dray_types::{BitRate, ByteSize};
use peer::TypedPeer;
use serde::Deserialize;
use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use toml::Spanned;

/// Most data streams of a session: more only cost memory.
pub const MAX_STREAMS: u64 = 16;
/// Longest age of a replica, in hours: a hundred years.
const MAX_HOURS: u64 = 876_000;
/// Longest time a limit may be, in seconds: a week.
const MAX_SECONDS: u64 = 7 * 86_400;

type Text = Spanned<String>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Typed {
    agent: Agent,
    tls: Tls,
    #[serde(default)]
    pool: Vec<TypedPool>,
    #[serde(default)]
    peer: Vec<TypedPeer>,
    qmp_dirs: Option<Vec<Text>>,
    limits: Option<TypedLimits>,
    nbd: Option<Nbd>,
    replicas: Option<TypedReplicas>,
    reuse: Option<TypedReuse>,
    #[serde(default)]
    backup: Vec<TypedBackup>,
    backup_store: Option<TypedStore>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Agent {
    name: Text,
    state_dir: Option<Text>,
    run_dir: Option<Text>,
    listen: Option<Text>,
    group: Option<String>,
    readers: Option<String>,
    guests: Option<String>,
    /// May stand here as well as at the top, where a table above it would swallow it.
    qmp_dirs: Option<Vec<Text>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tls {
    dir: Text,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TypedPool {
    name: Text,
    path: Text,
    kind: Option<Text>,
    io: Option<Text>,
    reuse_domain: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TypedLimits {
    data_streams: Option<Spanned<u64>>,
    link_timeout_seconds: Option<Spanned<u64>>,
    handover_timeout_seconds: Option<Spanned<u64>>,
    stall_seconds: Option<Spanned<u64>>,
    link_dead_seconds: Option<Spanned<u64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TypedReplicas {
    keep: Option<u64>,
    max_age_hours: Option<Spanned<u64>>,
    min_free: Option<Text>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TypedReuse {
    enabled: Option<bool>,
    index: Option<bool>,
    index_rate: Option<Text>,
    index_size: Option<Text>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nbd {
    tcp: Option<Text>,
    #[serde(default)]
    client: Vec<TypedNbdClient>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TypedNbdClient {
    name: Text,
    #[serde(default)]
    read: Vec<String>,
    #[serde(default)]
    write: Vec<String>,
}

/// Collects problems while the rest is still understood.
struct Reader<'a> {
    text: &'a str,
    problems: Vec<Problem>,
}

/// What can be used of it, and what is wrong with the rest.
pub(super) fn understand(text: &str, path: &Path) -> Result<(Config, Vec<Problem>), Vec<Problem>> {
    let typed: Typed = toml::from_str(text).map_err(|why| vec![syntax(text, &why)])?;
    let mut reader = Reader { text, problems: Vec::new() };
    let pools = reader.pools(&typed.pool);
    let own = typed.agent.name.get_ref();
    let peers = Peers::new(reader.peers(own, &typed.peer, &typed.pool));
    let agent = &typed.agent;
    let config = Config {
        path: path.to_owned(),
        name: reader.name("agent.name", &agent.name),
        state_dir: reader.path_or(
            "agent.state_dir",
            agent.state_dir.as_ref(),
            last_good::STATE_DIR,
        ),
        run_dir: reader.path_or("agent.run_dir", agent.run_dir.as_ref(), "/run/dray"),
        listen: reader
            .address("agent.listen", agent.listen.as_ref())
            .unwrap_or_else(default_listen),
        group: agent.group.clone(),
        readers: agent.readers.clone(),
        guests: agent.guests.clone(),
        tls_dir: reader.path("tls.dir", &typed.tls.dir),
        pools,
        peers,
        qmp_dirs: reader.qmp_dirs(agent.qmp_dirs.as_ref().or(typed.qmp_dirs.as_ref())),
        limits: reader.limits(typed.limits.as_ref()),
        reuse: reader.reuse(typed.reuse.as_ref()),
        replicas: reader.replicas(typed.replicas.as_ref()),
        backups: reader.backups(&typed.backup),
        backup_store: reader.backup_store(typed.backup_store.as_ref()),
        nbd_clients: Live::new(reader.nbd_clients(typed.nbd.as_ref())),
        nbd_tcp: reader.address("nbd.tcp", typed.nbd.as_ref().and_then(|nbd| nbd.tcp.as_ref())),
    };
    match reader.problems.iter().any(Problem::concerns_everything) {
        false => Ok((config, reader.problems)),
        true => Err(reader.problems),
    }
}

fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()[..at.min(text.len())].iter().filter(|&&byte| byte == b'\n').count() + 1
}

fn syntax(text: &str, why: &toml::de::Error) -> Problem {
    let what = why.message().replace('\n', " ");
    let mut problem = Problem::new("file", what);
    if let Some(span) = why.span() {
        let line = line_of(text, span.start);
        problem.field = text.lines().nth(line - 1).unwrap_or_default().trim().to_owned();
        if problem.field.is_empty() {
            problem.field = "file".to_owned();
        }
        problem = problem.line(line);
    }
    problem.hint("see docs/reference/configuration.md for every field")
}

impl Reader<'_> {
    fn problem<T>(&mut self, at: &Spanned<T>, field: &str, what: impl Into<String>, hint: &str) {
        let line = line_of(self.text, at.span().start);
        self.problems.push(Problem::new(field, what).hint(hint).line(line));
    }

    /// The part that `read` makes, unless a problem is found in it.
    fn part<T>(&mut self, read: impl FnOnce(&mut Self) -> T) -> Option<T> {
        let before = self.problems.len();
        let part = read(self);
        (self.problems.len() == before).then_some(part)
    }

    fn name(&mut self, field: &str, name: &Text) -> String {
        let text = name.get_ref();
        if rustls::pki_types::DnsName::try_from(text.as_str()).is_err() {
            let what = format!("'{text}' is not a DNS name");
            self.problem(name, field, what, "use the DNS name in the host's certificate");
        }
        text.clone()
    }

    fn path(&mut self, field: &str, path: &Text) -> PathBuf {
        if !path.get_ref().starts_with('/') {
            let what = format!("'{}' is not an absolute path", path.get_ref());
            self.problem(path, field, what, "begin it with /");
        }
        PathBuf::from(path.get_ref())
    }

    fn path_or(&mut self, field: &str, path: Option<&Text>, default: &str) -> PathBuf {
        path.map_or_else(|| default.into(), |path| self.path(field, path))
    }

    fn address(&mut self, field: &str, address: Option<&Text>) -> Option<SocketAddr> {
        let address = address?;
        let parsed = address.get_ref().parse().ok();
        if parsed.is_none() {
            let what = format!("'{}' is not an address with a port", address.get_ref());
            self.problem(address, field, what, "write it as 0.0.0.0:7421 or [::]:7421");
        }
        parsed
    }

    fn unique(&mut self, seen: &mut HashSet<String>, field: &str, name: &Text) {
        if !seen.insert(name.get_ref().to_ascii_lowercase()) {
            let what = format!("'{}' appears twice", name.get_ref());
            self.problem(name, field, what, "give each another name");
        }
    }

    fn pools(&mut self, typed: &[TypedPool]) -> Vec<Pool> {
        let mut seen = HashSet::new();
        let pools = typed.iter().map(|pool| self.part(|reader| reader.pool(&mut seen, pool)));
        pools.collect::<Vec<_>>().into_iter().flatten().collect()
    }

    fn pool(&mut self, seen: &mut HashSet<String>, pool: &TypedPool) -> Pool {
        self.unique(seen, "pool.name", &pool.name);
        if let Err(why) = pool::check_name(pool.name.get_ref()) {
            self.problem(&pool.name, "pool.name", why.why, "use letters, digits, '-' and '_'");
        }
        let field = format!("pool.{}.path", pool.name.get_ref());
        Pool {
            name: pool.name.get_ref().clone(),
            path: self.path(&field, &pool.path),
            kind: self.kind(pool),
            io: self.io(pool),
            reuse_domain: pool.reuse_domain.clone(),
        }
    }

    fn kind(&mut self, pool: &TypedPool) -> PoolKind {
        let Some(kind) = &pool.kind else { return PoolKind::default() };
        match kind.get_ref().as_str() {
            "files" => PoolKind::Files,
            "devices" => PoolKind::Devices,
            other => {
                let field = format!("pool.{}.kind", pool.name.get_ref());
                let what = format!("'{other}' is not a kind of pool");
                self.problem(kind, &field, what, "write \"files\" or \"devices\"");
                PoolKind::default()
            }
        }
    }

    fn io(&mut self, pool: &TypedPool) -> PoolIo {
        let Some(io) = &pool.io else { return PoolIo::default() };
        match io.get_ref().as_str() {
            "buffered" => PoolIo::Buffered,
            "direct" => PoolIo::Direct,
            other => {
                let field = format!("pool.{}.io", pool.name.get_ref());
                let what = format!("'{other}' is not a value of io");
                self.problem(io, &field, what, "write \"buffered\" or \"direct\"");
                PoolIo::default()
            }
        }
    }

    fn nbd_clients(&mut self, typed: Option<&Nbd>) -> Vec<NbdClient> {
        let mut clients = Vec::new();
        for typed in typed.map_or(&[][..], |nbd| &nbd.client) {
            let name = self.part(|reader| reader.name("nbd.client.name", &typed.name));
            let (read, write) = (typed.read.clone(), typed.write.clone());
            clients.extend(name.map(|name| NbdClient { name, read, write }));
        }
        clients
    }

    fn qmp_dirs(&mut self, typed: Option<&Vec<Text>>) -> Vec<PathBuf> {
        let Some(typed) = typed else { return vec!["/run".into()] };
        let dirs = typed.iter().map(|dir| self.part(|reader| reader.path("qmp_dirs", dir)));
        dirs.collect::<Vec<_>>().into_iter().flatten().collect()
    }

    fn limits(&mut self, typed: Option<&TypedLimits>) -> Limits {
        let mut limits = Limits::default();
        let Some(typed) = typed else { return limits };
        if let Some(streams) = &typed.data_streams {
            let number = self.number("limits.data_streams", streams, MAX_STREAMS);
            limits.data_streams = number.map_or(limits.data_streams, |number| number as usize);
        }
        let times = [
            (&typed.link_timeout_seconds, "link_timeout_seconds", &mut limits.link_timeout),
            (
                &typed.handover_timeout_seconds,
                "handover_timeout_seconds",
                &mut limits.handover_timeout,
            ),
            (&typed.link_dead_seconds, "link_dead_seconds", &mut limits.link_dead),
        ];
        for (value, field, limit) in times {
            if let Some(value) = value {
                *limit = self.seconds(field, value).unwrap_or(*limit);
            }
        }
        let stall = typed.stall_seconds.as_ref();
        limits.stall = stall.and_then(|value| self.seconds("stall_seconds", value));
        limits
    }

    fn replicas(&mut self, typed: Option<&TypedReplicas>) -> Retention {
        let Some(typed) = typed else { return Retention::default() };
        let max_age = typed.max_age_hours.as_ref().and_then(|hours| {
            let hours = self.number("replicas.max_age_hours", hours, MAX_HOURS)?;
            Some(Duration::from_secs(hours * 3600))
        });
        let min_free = typed.min_free.as_ref();
        let min_free = min_free.and_then(|text| self.size("replicas.min_free", text));
        Retention { keep: typed.keep, max_age, min_free }
    }

    fn size(&mut self, field: &str, text: &Text) -> Option<ByteSize> {
        match text.get_ref().parse() {
            Ok(size) => Some(size),
            Err(why) => {
                let what = format!("'{}': {why}", text.get_ref());
                self.problem(text, field, what, "write it as 20GiB");
                None
            }
        }
    }

    fn reuse(&mut self, typed: Option<&TypedReuse>) -> ReuseConfig {
        let mut reuse = ReuseConfig::default();
        let Some(typed) = typed else { return reuse };
        reuse.enabled = typed.enabled.unwrap_or(reuse.enabled);
        reuse.index = typed.index.unwrap_or(reuse.index);
        if let Some(text) = &typed.index_rate {
            match text.get_ref().parse::<BitRate>() {
                Ok(rate) => reuse.index_rate = rate.bytes_per_second,
                Err(why) => {
                    let what = format!("'{}': {why}", text.get_ref());
                    self.problem(text, "reuse.index_rate", what, "write it as 64MiB/s");
                }
            }
        }
        let size = typed.index_size.as_ref();
        let size = size.and_then(|text| self.size("reuse.index_size", text));
        reuse.index_size = size.map_or(reuse.index_size, |size| size.0);
        reuse
    }

    fn seconds(&mut self, field: &str, value: &Spanned<u64>) -> Option<Duration> {
        self.number(&format!("limits.{field}"), value, MAX_SECONDS).map(Duration::from_secs)
    }

    fn number(&mut self, field: &str, value: &Spanned<u64>, most: u64) -> Option<u64> {
        let number = *value.get_ref();
        let fits = number > 0 && number <= most;
        if !fits {
            let hint = format!("use 1 to {most}");
            self.problem(value, field, format!("{number} is out of range"), &hint);
        }
        fits.then_some(number)
    }
}
