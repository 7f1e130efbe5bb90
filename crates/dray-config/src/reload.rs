//! What a running agent takes from a configuration that was changed: who may come, and what each may do. The
//! rest is for the next start.

use super::{Config, ConfigError, NbdClient, Peer, last_good};
use std::collections::BTreeSet;
use std::sync::Arc;

/// What reading the configuration again has come to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reloaded {
    /// What is in force from now on, a line each.
    pub changes: Vec<String>,
    /// What is not in force before the agent is restarted: keys and tables as the file has them.
    pub needs_restart: Vec<&'static str>,
    /// Peers that are gone, or may do less than before.
    pub may_less: BTreeSet<String>,
    /// Why it is not kept as the last good configuration, if it cannot be.
    pub not_kept: Option<String>,
}

impl Config {
    /// Reads the file again, and takes from it what can change while the agent runs.
    ///
    /// # Errors
    /// Everything that is wrong with its text; nothing has changed then.
    pub fn reload(&self) -> Result<Reloaded, ConfigError> {
        let text = Self::read(&self.path)?;
        let new = Self::parse(&text, &self.path)?;
        let mut reloaded = self.take(&new);
        // If nothing of it waits for a restart it becomes the last good one: a peer that is gone does not come back
        // with an older one.
        if reloaded.needs_restart.is_empty() {
            reloaded.not_kept = last_good::keep(self, &text).err().map(|why| why.to_string());
        }
        Ok(reloaded)
    }

    fn take(&self, new: &Self) -> Reloaded {
        let (peers, may_less) = changed_peers(&self.peers.all(), &new.peers.all());
        let clients = changed_clients(&self.nbd_clients.now(), &new.nbd_clients.now());
        self.peers.take(&new.peers);
        self.nbd_clients.take(&new.nbd_clients);
        let changes = peers.into_iter().chain(clients).collect();
        Reloaded { changes, needs_restart: needs_restart(self, new), may_less, not_kept: None }
    }
}

fn changed_peers(old: &[Arc<Peer>], new: &[Arc<Peer>]) -> (Vec<String>, BTreeSet<String>) {
    let (mut changes, mut may_less) = (Vec::new(), BTreeSet::new());
    let named = |all: &[Arc<Peer>], name: &str| {
        all.iter().find(|peer| peer.name.eq_ignore_ascii_case(name)).cloned()
    };
    for peer in old {
        let now = named(new, &peer.name);
        if now.as_ref().is_none_or(|now| now.name != peer.name || !now.may_all_of(peer)) {
            may_less.insert(peer.name.clone());
        }
        match now {
            None => changes.push(format!("peer {} is gone", peer.name)),
            Some(now) if now != *peer => changes.push(format!("peer {} has changed", now.name)),
            Some(_) => {}
        }
    }
    let added = new.iter().filter(|peer| named(old, &peer.name).is_none());
    changes.extend(added.map(|peer| format!("peer {} is new", peer.name)));
    (changes, may_less)
}

fn changed_clients(old: &[NbdClient], new: &[NbdClient]) -> Vec<String> {
    // One name may have several tables.
    let of = |all: &[NbdClient], name: &str| -> Vec<NbdClient> {
        all.iter().filter(|client| client.name == name).cloned().collect()
    };
    let names: BTreeSet<&str> = old.iter().chain(new).map(|client| client.name.as_str()).collect();
    let changed = names.into_iter().filter_map(|name| match (of(old, name), of(new, name)) {
        (old, new) if old == new => None,
        (_, new) if new.is_empty() => Some(format!("nbd.client {name} is gone")),
        (old, _) if old.is_empty() => Some(format!("nbd.client {name} is new")),
        _ => Some(format!("nbd.client {name} has changed")),
    });
    changed.collect()
}

/// The parts that differ and are taken only when the agent starts.
fn needs_restart(old: &Config, new: &Config) -> Vec<&'static str> {
    // What is named here without a part of its own is taken now, or is the file itself.
    let Config {
        path: _,
        name,
        state_dir,
        run_dir,
        listen,
        group,
        readers,
        guests,
        tls_dir,
        pools,
        peers: _,
        qmp_dirs,
        limits,
        reuse,
        replicas,
        backups,
        backup_store,
        nbd_tcp,
        nbd_clients: _,
    } = old;
    let agent = (name, state_dir, run_dir, listen, group, readers, guests)
        != (
            &new.name,
            &new.state_dir,
            &new.run_dir,
            &new.listen,
            &new.group,
            &new.readers,
            &new.guests,
        );
    let parts = [
        ("[agent]", agent),
        ("[tls] dir", *tls_dir != new.tls_dir),
        ("[[pool]]", *pools != new.pools),
        ("qmp_dirs", *qmp_dirs != new.qmp_dirs),
        ("[limits]", *limits != new.limits),
        ("[reuse]", *reuse != new.reuse),
        ("[replicas]", *replicas != new.replicas),
        ("[[backup]]", *backups != new.backups),
        ("[backup_store]", *backup_store != new.backup_store),
        ("[nbd] tcp", *nbd_tcp != new.nbd_tcp),
    ];
    parts.into_iter().filter(|(_, differs)| *differs).map(|(part, _)| part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const BASE: &str = "[agent]\nname = 'a'\n[tls]\ndir = '/t'\n\
        [[pool]]\nname = 'p'\npath = '/p'\n[[pool]]\nname = 'q'\npath = '/q'\n";

    fn config(more: &str) -> Config {
        Config::parse(&format!("{BASE}{more}"), Path::new("/etc/dray/dray.toml")).unwrap()
    }

    fn peer(name: &str, more: &str) -> String {
        format!("[[peer]]\nname = '{name}'\naddress = '{name}'\n{more}\n")
    }

    #[test]
    fn peers_change_at_once_and_who_may_less_is_named() {
        let full =
            "pools = ['p', 'q']\nrights = ['receive', 'observe', 'store']\nreads_store_of = ['x']";
        for (old, new, changes, may_less) in [
            (peer("b", full), peer("b", full), "", ""),
            (peer("b", full), String::new(), "peer b is gone", "b"),
            (String::new(), peer("b", full), "peer b is new", ""),
            (peer("b", full), peer("b", &full.replace(", 'q'", "")), "peer b has changed", "b"),
            (peer("b", full), peer("b", &full.replace(", 'store'", "")), "peer b has changed", "b"),
            (peer("b", full), peer("b", &full.replace("['x']", "[]")), "peer b has changed", "b"),
            (peer("b", ""), peer("b", full), "peer b has changed", ""),
            (peer("b", full), peer("B", full), "peer B has changed", "b"),
            (
                peer("b", full),
                peer("b", full).replace("address = 'b'", "address = 'c'"),
                "peer b has changed",
                "",
            ),
            (
                peer("b", full) + &peer("c", full),
                peer("c", full) + &peer("d", ""),
                "peer b is gone, peer d is new",
                "b",
            ),
        ] {
            let running = config(&old);
            // Whoever has it from before sees the change as well.
            let shared = running.clone();
            let reloaded = running.take(&config(&new));
            assert_eq!(reloaded.changes.join(", "), changes, "{old} {new}");
            let names: Vec<_> = reloaded.may_less.into_iter().collect();
            assert_eq!(names.join(", "), may_less, "{old} {new}");
            assert_eq!(reloaded.needs_restart, Vec::<&str>::new());
            assert_eq!(shared, config(&new));
        }
    }

    #[test]
    fn clients_of_nbd_change_at_once() {
        let client = |name: &str, read: &str| {
            format!("[[nbd.client]]\nname = '{name}'\nread = ['{read}']\n")
        };
        let running = config(&(client("x", "vm1") + &client("y", "*")));
        let reloaded = running.take(&config(&(client("x", "vm2") + &client("z", "*"))));
        let wanted = ["nbd.client x has changed", "nbd.client y is gone", "nbd.client z is new"];
        assert_eq!(reloaded.changes, wanted);
        assert_eq!(running.nbd_clients.now().len(), 2);
    }

    #[test]
    fn what_is_for_the_next_start_is_named_and_not_taken() {
        let old = config("");
        for (change, part) in [
            (BASE.replace("name = 'a'", "name = 'c'"), "[agent]"),
            (BASE.replace("name = 'a'", "name = 'a'\nlisten = '127.0.0.1:1'"), "[agent]"),
            (BASE.replace("name = 'a'", "name = 'a'\nguests = 'kvm'"), "[agent]"),
            (BASE.replace("'/t'", "'/u'"), "[tls] dir"),
            (BASE.replace("'/q'", "'/r'"), "[[pool]]"),
            (format!("qmp_dirs = ['/x']\n{BASE}"), "qmp_dirs"),
            (format!("{BASE}[limits]\ndata_streams = 3\n"), "[limits]"),
            (format!("{BASE}[reuse]\nenabled = false\n"), "[reuse]"),
            (format!("{BASE}[replicas]\nmax_age_hours = 3\n"), "[replicas]"),
            (format!("{BASE}[[backup]]\nname = 'n'\nurl = 'file:///b'\n"), "[[backup]]"),
            (format!("{BASE}[backup_store]\npath = '/s'\n"), "[backup_store]"),
            (format!("{BASE}[nbd]\ntcp = '127.0.0.1:2'\n"), "[nbd] tcp"),
        ] {
            let new = Config::parse(&change, Path::new("/etc/dray/dray.toml")).unwrap();
            let reloaded = old.take(&new);
            assert_eq!(
                (reloaded.needs_restart, reloaded.changes),
                (vec![part], vec![]),
                "{change}"
            );
            assert_eq!(old, config(""));
        }
    }

    #[test]
    fn a_text_that_is_wrong_changes_nothing_and_a_good_one_is_the_last_good_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dray.toml");
        let base = BASE
            .replace("name = 'a'", &format!("name = 'a'\nstate_dir = '{}'", dir.path().display()));
        let write = |more: &str| std::fs::write(&path, format!("{base}{more}")).unwrap();
        let running = {
            write(&peer("b", ""));
            Config::load(&path).unwrap()
        };
        for wrong in ["[[peer]]\n".to_owned(), peer("b", "pools = ['none']"), "[".to_owned()] {
            write(&wrong);
            assert!(running.reload().unwrap_err().to_string().contains("dray.toml"));
            assert_eq!(running.peers.all().len(), 1, "{wrong}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(running.reload().is_err());
        write(&peer("c", ""));
        assert_eq!(running.reload().unwrap().changes, ["peer b is gone", "peer c is new"]);
        assert!(running.peer("b").is_none() && running.peer("c").is_some());
        let kept = last_good::find(&path).unwrap().config;
        assert!(kept.peer("b").is_none() && kept.peer("c").is_some());
    }
}
