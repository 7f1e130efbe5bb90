//! Who can reach what on a host with this configuration: `dray check-config --explain`.

use crate::{BackupStore, Config, Peer, Right};
use dray_host::pool::Pool;
use std::fmt::{self, Display};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A way to this host, and everybody who may use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WayIn {
    /// What it is, and where.
    pub what: String,
    /// Who may use it, and for what; what nobody may is not in it.
    pub who: Vec<(String, String)>,
    /// What holds everybody else.
    pub others: &'static str,
}

impl Display for WayIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.what)?;
        let who = self.who.iter().map(|(who, _)| who.chars().count()).max().unwrap_or_default();
        for (name, may) in &self.who {
            writeln!(f, "  {name:who$}  {may}")?;
        }
        writeln!(f, "  {}", self.others)
    }
}

/// Every way to this host, those of its own processes first.
pub fn ways_in(config: &Config) -> Vec<WayIn> {
    let mut all = vec![api(config), guests(config), peers(config)];
    all.extend(clients(config));
    all.extend(config.backup_store.as_ref().map(|store| backups(config, store)));
    all.push(pools(config));
    all
}

fn members(group: Option<&String>, may: &str) -> Option<(String, String)> {
    group.map(|group| (format!("group {group}"), may.to_owned()))
}

fn root(may: &str) -> Option<(String, String)> {
    Some(("root".to_owned(), may.to_owned()))
}

fn api(config: &Config) -> WayIn {
    let rows = [
        root("everything"),
        members(
            config.group.as_ref(),
            "move, back up, adopt and remove images; only configured backup repositories",
        ),
        members(config.readers.as_ref(), "look at images and migrations; change nothing"),
    ];
    WayIn {
        what: format!("Commands, at {}", config.run_dir.join("api.sock").display()),
        who: rows.into_iter().flatten().collect(),
        others: "nobody else of this host, and nobody from outside",
    }
}

fn guests(config: &Config) -> WayIn {
    let own = "each QEMU its own images: those that it had before dray, or opened first";
    let rows = [root("every image"), members(config.guests.as_ref(), own)];
    WayIn {
        what: format!("Disks of VMs, at {}", config.nbd_socket().display()),
        who: rows.into_iter().flatten().collect(),
        others: "nobody else of this host, and nobody from outside",
    }
}

fn peers(config: &Config) -> WayIn {
    let peers = config.peers.all();
    let rows = peers.iter().flat_map(|peer| {
        let named = std::iter::once(peer.name.clone()).chain(std::iter::repeat(String::new()));
        named.zip(Right::ALL.into_iter().filter(|&right| peer.may(right)).map(|it| may(peer, it)))
    });
    WayIn {
        what: format!("Other hosts, at {} with a certificate of the authority", config.listen),
        who: rows.collect(),
        others: "a host without [[peer]] learns that it has none; one without a certificate nothing",
    }
}

/// What a right of a peer comes to here.
fn may(peer: &Peer, right: Right) -> String {
    let pools = list(&peer.pools);
    let may = match right {
        Right::Receive => format!("bring new images into {pools}"),
        Right::Observe => format!("learn this agent's version and the room in {pools}"),
        Right::ReadReplicas => format!("read the replicas in {pools}: old content of images"),
        Right::Reuse => {
            format!(
                "find out whether base images in {pools}, or its reuse domains, have content that it knows"
            )
        }
        Right::Store if peer.reads_store_of.is_empty() => "keep its backups here".to_owned(),
        Right::Store => {
            format!("keep its backups here, and read those of {}", list(&peer.reads_store_of))
        }
    };
    format!("{right}: {may}")
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "no pool".to_owned() } else { names.join(", ") }
}

fn clients(config: &Config) -> Option<WayIn> {
    let at = config.nbd_tcp?;
    let clients = config.nbd_clients.now();
    let rows = clients.iter().flat_map(|client| {
        let read = (!client.read.is_empty()).then(|| format!("read {}", client.read.join(", ")));
        let write = (!client.write.is_empty())
            .then(|| format!("read and write {}", client.write.join(", ")));
        let named = std::iter::once(client.name.clone()).chain(std::iter::repeat(String::new()));
        named.zip([read, write].into_iter().flatten())
    });
    Some(WayIn {
        what: format!("Images over the network, at {at} with a certificate of the authority"),
        who: rows.collect(),
        others: "nobody else, other hosts included, and nobody learns which other images there are",
    })
}

fn backups(config: &Config, store: &BackupStore) -> WayIn {
    let peers = config.peers.all();
    let rows = peers.iter().filter(|peer| peer.may(Right::Store)).map(|peer| {
        let deletes = match store.append_only {
            true => "delete nothing",
            false => "delete what is its own",
        };
        (peer.name.clone(), format!("write, read and {deletes}, in a folder of its own"))
    });
    WayIn {
        what: format!("Backups of other hosts, in {}", store.path.display()),
        who: rows.collect(),
        others: "nobody else through the agent",
    }
}

fn pools(config: &Config) -> WayIn {
    let row = |pool: &Pool| {
        let domain = pool.reuse_domain.as_ref().map(|domain| format!("; reuse domain {domain}"));
        let folder = pool.path.display();
        (
            pool.name.clone(),
            format!("{folder}, {}{}", access(&pool.path), domain.unwrap_or_default()),
        )
    };
    WayIn {
        what: "Files of images, past dray".to_owned(),
        who: config.pools.iter().map(row).collect(),
        others: "an image that has arrived belongs to the user that it had at its source, unless --owner says \
                 otherwise",
    }
}

/// Whose a folder is: who else may write to it, the agent does not use it.
fn access(folder: &Path) -> String {
    match folder.metadata() {
        Ok(meta) => {
            let mode = meta.mode() & 0o7777;
            format!("of user {} and group {}, mode {mode:04o}", meta.uid(), meta.gid())
        }
        Err(why) => format!("which cannot be looked at: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explained(more: &str) -> String {
        let text = format!(
            "[agent]\nname = 'a'\n{more}\n[tls]\ndir = '/t'\n[[pool]]\nname = 'ssd'\npath = '/'\n"
        );
        let config = Config::parse(&text, Path::new("dray.toml")).unwrap();
        ways_in(&config).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_plain_configuration_lets_only_root_in() {
        let text = explained("");
        assert_eq!(text.lines().filter(|line| line.starts_with("  root ")).count(), 2, "{text}");
        assert!(!text.contains("  group ") && !text.contains("over the network"), "{text}");
        assert!(!text.contains("bring new images"), "{text}");
    }

    #[test]
    fn everybody_who_may_do_something_is_there_with_it() {
        let text = explained(
            "group = 'ops'\nreaders = 'mon'\nguests = 'kvm'\n[nbd]\ntcp = '0.0.0.0:10809'\n\
             [[nbd.client]]\nname = 'backup1'\nread = ['vm*']\nwrite = ['x']\n\
             [[peer]]\nname = 'hostb'\naddress = 'b'\npools = ['ssd']\n\
             rights = ['receive', 'reuse', 'store']\nreads_store_of = ['hostc']\n\
             [[peer]]\nname = 'hostc'\naddress = 'c'\nrights = ['observe']\n\
             [backup_store]\npath = '/b'\nappend_only = true",
        );
        let rows = [
            "  group ops  move, back up",
            "  group mon  look at",
            "  group kvm  each QEMU its own images",
            "  hostb  receive: bring new images into ssd",
            "         reuse: find out whether base images in ssd",
            "         store: keep its backups here, and read those of hostc",
            "  hostc  observe: learn this agent's version and the room in no pool",
            "  backup1  read vm*",
            "           read and write x",
            "  hostb  write, read and delete nothing",
            "  ssd  /, of user 0 and group 0, mode ",
        ];
        for row in rows {
            assert!(text.lines().any(|line| line.starts_with(row)), "{row} in\n{text}");
        }
        assert!(!text.contains("hostc  receive") && !text.contains("hostc  write"), "{text}");
    }
}
