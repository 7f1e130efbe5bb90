//! Checks the host against a configuration that has no errors itself, for `dray check-config`.

use super::{Config, Problem};
use dray_backup::{Credentials, Key};
use dray_files::folders::{self, Exchangeable};
use dray_host::pool::{Pool, PoolIo, PoolKind};
use dray_net::tls::{CLIENT_CERT, CLIENT_KEY, Identity, SERVER_CERT, SERVER_KEY, judge_own};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

impl Config {
    /// Everything of the host that would keep a part of the agent from working, or make it unsafe. What is
    /// wrong with repositories is not: see [`Config::check_backups`].
    pub fn check(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        problems.extend(self.pool_problems().into_iter().filter_map(|(_, problem)| problem));
        self.check_tls(&mut problems);
        problems.extend(directory("agent.state_dir", &self.state_dir).map(|problem| {
            problem.hint(format!("create it: install -d -m 0700 {}", self.state_dir.display()))
        }));
        // The agent makes it, with the mode that it needs.
        if self.run_dir.exists() {
            problems.extend(directory("agent.run_dir", &self.run_dir));
        }
        problems.extend(self.qmp_dir_problems().into_iter().filter_map(|(_, problem)| problem));
        // A QEMU may have to make its sockets in the run directory.
        for (field, dir) in [("agent.state_dir", &self.state_dir), ("tls.dir", &self.tls_dir)] {
            problems.extend(exchangeable(field, dir));
        }
        problems
    }

    /// Each pool, and what keeps it from being used.
    pub fn pool_problems(&self) -> Vec<(&Pool, Option<Problem>)> {
        let look = |pool: &Pool| {
            let field = format!("pool.{}.path", pool.name);
            let hint = "create the directory or correct the path";
            let missing = directory(&field, &pool.path).map(|problem| problem.hint(hint));
            missing.or_else(|| exchangeable(&field, &pool.path)).or_else(|| direct(pool))
        };
        self.pools.iter().map(|pool| (pool, look(pool))).collect()
    }

    /// Each directory of QMP sockets, and what keeps it from being used.
    pub fn qmp_dir_problems(&self) -> Vec<(&Path, Option<Problem>)> {
        let hint = "create it, or remove it from the list";
        let look = |dir: &Path| directory("qmp_dirs", dir).map(|problem| problem.hint(hint));
        self.qmp_dirs.iter().map(|dir| (dir.as_path(), look(dir))).collect()
    }

    /// What keeps repositories from being used: their keys, and those of object stores' accounts, must be
    /// there, and for nobody else to read.
    pub fn check_backups(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        for place in &self.backups {
            if let Some(path) = &place.access.credentials_file {
                let field = format!("backup.{}.credentials_file", place.name);
                let hint = "write aws_access_key_id = … and aws_secret_access_key = … into it";
                problems.extend(secret(&field, path, Credentials::from_file(path), hint));
            }
            if let Some(path) = &place.key_file {
                let field = format!("backup.{}.key_file", place.name);
                let hint = "make one: openssl rand -hex 32";
                problems.extend(secret(&field, path, Key::from_file(path), hint));
            }
        }
        problems
    }

    fn check_tls(&self, problems: &mut Vec<Problem>) {
        let before = problems.len();
        problems.extend(directory("tls.dir", &self.tls_dir).map(|problem| {
            problem.hint("make certificates with 'dray pki' and copy this host's directory there")
        }));
        if problems.len() > before {
            return;
        }
        for key in [SERVER_KEY, CLIENT_KEY] {
            problems.extend(private("tls.dir", &self.tls_dir.join(key)));
        }
        let mut broken = Vec::new();
        for cert in [SERVER_CERT, CLIENT_CERT] {
            broken.extend(judge_own(&self.tls_dir, cert, &self.name).err());
        }
        if broken.is_empty() {
            broken.extend(Identity::load(&self.tls_dir).err());
        }
        broken.dedup();
        problems.extend(broken.into_iter().map(|error| {
            let what = format!("{}: {}", error.path.display(), error.why);
            Problem::new("tls.dir", what).hint(error.hint)
        }));
    }
}

fn directory(field: &str, path: &Path) -> Option<Problem> {
    let what = match path.metadata() {
        Ok(meta) if meta.is_dir() => match path.read_dir() {
            Ok(_) => return None,
            Err(why) => why.to_string(),
        },
        Ok(_) => "it is not a directory".to_owned(),
        Err(why) => why.to_string(),
    };
    Some(Problem::new(field, format!("{}: {what}", path.display())))
}

/// A folder in which other users could exchange what the agent keeps there.
fn exchangeable(field: &str, path: &Path) -> Option<Problem> {
    let why = folders::check(path).err()?;
    let open = why.get_ref().and_then(|why| why.downcast_ref::<Exchangeable>());
    let problem = Problem::new(field, why.to_string());
    Some(match open {
        Some(open) => problem.hint(open.hint()),
        None => problem,
    })
}

/// A pool of direct I/O on a file system that has none. Asked with a file that never gets a name;
/// where that cannot be had, the first image will tell.
fn direct(pool: &Pool) -> Option<Problem> {
    if pool.io != PoolIo::Direct || pool.kind == PoolKind::Devices {
        return None;
    }
    let flags = OFlags::TMPFILE | OFlags::DIRECT | OFlags::RDWR | OFlags::CLOEXEC;
    let refused = rustix::fs::open(&pool.path, flags, Mode::empty()).err();
    let buffered = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let has_none = refused == Some(Errno::INVAL)
        && rustix::fs::open(&pool.path, buffered, Mode::empty()).is_ok();
    has_none.then(|| {
        let what = format!("{}: its file system has no direct I/O", pool.path.display());
        Problem::new(format!("pool.{}.io", pool.name), what).hint("write io = \"buffered\"")
    })
}

/// A file that should hold a secret.
fn secret<T>(
    field: &str,
    path: &Path,
    read: Result<T, dray_backup::Error>,
    hint: &str,
) -> Option<Problem> {
    match read {
        Err(why) => Some(Problem::new(field, why.to_string()).hint(hint)),
        Ok(_) => private(field, path),
    }
}

/// A key that others can read is no secret.
fn private(field: &str, key: &Path) -> Option<Problem> {
    let mode = key.metadata().ok()?.mode();
    (mode & 0o007 != 0).then(|| {
        Problem::new(field, format!("{}: every user may read this key", key.display()))
            .hint(format!("chmod 0600 {}", key.display()))
    })
}

#[cfg(test)]
mod tests {
    use super::super::*;
    use dray_net::pki::{self, Validity};
    use std::os::unix::fs::PermissionsExt;
    use std::time::SystemTime;

    const DAY: Duration = Duration::from_secs(86_400);

    fn example(root: &Path, tls: &Path) -> String {
        let root = root.display();
        format!(
            "qmp_dirs = ['{root}']\n[agent]\nname = 'hosta'\nstate_dir = '{root}'\n\
             run_dir = '{root}'\n[tls]\ndir = '{}'\n[[pool]]\nname = 'ssd'\npath = '{root}'\n\
             [[peer]]\nname = 'hostb'\naddress = 'hostb'\npools = ['ssd']\n",
            tls.display()
        )
    }

    fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::parse(text, Path::new("dray.toml"))
    }

    fn words(problems: &[Problem]) -> String {
        problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn a_good_configuration_has_no_problems() {
        let dir = tempfile::tempdir().unwrap();
        pki::create_ca(dir.path()).unwrap();
        let tls = pki::issue(dir.path(), "hosta", &[]).unwrap();
        let config = parse(&example(dir.path(), &tls)).unwrap();
        assert_eq!(config.check(), Vec::new());
        assert_eq!(config.listen.port(), 7421);
        assert_eq!(config.limits, Limits::default());
        let peer = config.peer("HOSTB").unwrap();
        assert_eq!(config.pool_for(&peer, None).unwrap().name, "ssd");
        let why = config.pool_for(&peer, Some("hdd")).unwrap_err().to_string();
        assert!(why.contains("may not use a pool 'hdd'") && why.contains("ssd"), "{why}");
    }

    #[test]
    fn every_problem_of_the_text_names_its_line() {
        let text = "[agent]\nname = 'host a'\nlisten = 'nowhere'\n[tls]\ndir = 'tls'\n\
                    [[pool]]\nname = 'ssd'\npath = '/x'\n[[pool]]\nname = 'ssd'\npath = '/y'\n\
                    [[peer]]\nname = 'hostb'\naddress = 'hostb'\npools = ['ssd', 'hdd']\n\
                    [limits]\ndata_streams = 0\n";
        let error = parse(text).unwrap_err();
        let lines: Vec<_> = error.problems.iter().map(|problem| problem.line).collect();
        assert_eq!(lines, [10, 15, 2, 3, 5, 17].map(Some), "{error}");
        let all = error.to_string();
        assert!(all.contains("line 15: peer.hostb.pools: there is no pool 'hdd'"), "{all}");
        let unknown = parse("[agent]\nname = 'a'\nlistne = 'x'\n[tls]\ndir = '/t'\n").unwrap_err();
        assert_eq!(unknown.problems[0].line, Some(3));
        assert!(unknown.to_string().contains("unknown field `listne`"), "{unknown}");
        let io = parse(
            "[agent]\nname = 'a'\n[tls]\ndir = '/t'\n[[pool]]\nname = 'p'\npath = '/p'\nio = 'fast'\n",
        );
        let io = io.unwrap_err().to_string();
        assert!(io.contains("line 8: pool.p.io: 'fast' is not a value of io"), "{io}");
        let itself =
            "[agent]\nname = 'a'\n[tls]\ndir = '/t'\n[[peer]]\nname = 'A'\naddress = 'a'\n";
        assert!(parse(itself).unwrap_err().to_string().contains("line 6: peer.name: it is this"));
        assert!(parse("").is_err());
    }

    #[test]
    fn problems_of_the_host_are_all_found() {
        let dir = tempfile::tempdir().unwrap();
        pki::create_ca(dir.path()).unwrap();
        let tls = pki::issue(dir.path(), "hostc", &[]).unwrap();
        let text = example(&dir.path().join("none"), &tls);
        std::fs::set_permissions(tls.join("server-key.pem"), PermissionsExt::from_mode(0o644))
            .unwrap();
        let all = words(&parse(&text).unwrap().check());
        for wanted in [
            "pool.ssd.path: ",
            "agent.state_dir: ",
            "qmp_dirs: ",
            "every user may read this key; chmod 0600",
            "server-cert.pem: it is for hostc, but this agent's name is 'hosta'",
            "client-cert.pem: it is for hostc",
        ] {
            assert!(all.contains(wanted), "{wanted} is not in:\n{all}");
        }
        let missing = words(&parse(&example(dir.path(), Path::new("/nope"))).unwrap().check());
        assert!(missing.contains("tls.dir: /nope: No such file"), "{missing}");
    }

    #[test]
    fn folders_in_which_others_could_exchange_files_are_problems() {
        let dir = tempfile::tempdir().unwrap();
        pki::create_ca(dir.path()).unwrap();
        let tls = pki::issue(dir.path(), "hosta", &[]).unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir(&root).unwrap();
        let config = parse(&example(&root, &tls)).unwrap();
        assert_eq!(config.check(), Vec::new());
        std::fs::set_permissions(&root, PermissionsExt::from_mode(0o777)).unwrap();
        let all = words(&config.check());
        for field in ["pool.ssd.path", "agent.state_dir"] {
            assert!(all.contains(&format!("{field}: every user may write to ")), "{all}");
        }
        assert!(!all.contains("tls.dir") && !all.contains("qmp_dirs"), "{all}");
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o772)).unwrap();
        std::fs::set_permissions(&root, PermissionsExt::from_mode(0o755)).unwrap();
        let all = words(&config.check());
        assert!(all.contains("tls.dir: every user may write to "), "{all}");
        assert!(all.contains(&format!("; chmod go-w {}", dir.path().display())), "{all}");
    }

    #[test]
    fn keys_of_repositories_are_there_and_private() {
        let dir = tempfile::tempdir().unwrap();
        pki::create_ca(dir.path()).unwrap();
        let tls = pki::issue(dir.path(), "hosta", &[]).unwrap();
        let (keys, key) = (dir.path().join("keys"), dir.path().join("key"));
        let text = example(dir.path(), &tls)
            + &format!(
                "[[backup]]\nname = 'off'\nurl = 's3://b'\ncredentials_file = '{}'\nkey_file = '{}'\n",
                keys.display(),
                key.display()
            );
        let config = parse(&text).unwrap();
        let all = words(&config.check_backups());
        assert!(
            all.contains("backup.off.credentials_file: ") && all.contains("backup.off.key_file: "),
            "{all}"
        );
        std::fs::write(&keys, "aws_access_key_id = a\n").unwrap();
        std::fs::write(&key, "07".repeat(32)).unwrap();
        for file in [&keys, &key] {
            std::fs::set_permissions(file, PermissionsExt::from_mode(0o644)).unwrap();
        }
        let all = words(&config.check_backups());
        assert!(all.contains("it has no aws_secret_access_key; write"), "{all}");
        assert!(
            all.contains("backup.off.key_file: ") && all.contains("every user may read this key"),
            "{all}"
        );
        std::fs::write(&keys, "aws_access_key_id = a\naws_secret_access_key = b\n").unwrap();
        for file in [&keys, &key] {
            std::fs::set_permissions(file, PermissionsExt::from_mode(0o600)).unwrap();
        }
        assert_eq!((config.check_backups(), config.check()), (Vec::new(), Vec::new()));
    }

    #[test]
    fn dates_and_authorities_are_judged() {
        let dir = tempfile::tempdir().unwrap();
        pki::create_ca(dir.path()).unwrap();
        let now = SystemTime::now();
        let old = Validity { from: now - 20 * DAY, until: now - 10 * DAY };
        let tls = pki::issue_for(dir.path(), "hosta", &[], old).unwrap();
        let all = words(&parse(&example(dir.path(), &tls)).unwrap().check());
        assert!(all.contains("server-cert.pem: it expired 10 days ago"), "{all}");
        std::fs::remove_dir_all(&tls).unwrap();
        let young = Validity { from: now + 10 * DAY, until: now + 20 * DAY };
        let tls = pki::issue_for(dir.path(), "hosta", &[], young).unwrap();
        let all = words(&parse(&example(dir.path(), &tls)).unwrap().check());
        assert!(all.contains("not valid yet; check the clocks"), "{all}");
        let other = tempfile::tempdir().unwrap();
        pki::create_ca(other.path()).unwrap();
        let tls = pki::issue(other.path(), "hosta", &[]).unwrap();
        std::fs::copy(dir.path().join("ca-cert.pem"), tls.join("ca-cert.pem")).unwrap();
        let all = words(&parse(&example(dir.path(), &tls)).unwrap().check());
        assert!(all.contains("signed by another authority"), "{all}");
        std::fs::copy(tls.join("client-key.pem"), tls.join("server-key.pem")).unwrap();
        std::fs::copy(other.path().join("ca-cert.pem"), tls.join("ca-cert.pem")).unwrap();
        let all = words(&parse(&example(dir.path(), &tls)).unwrap().check());
        assert!(all.contains("server-key.pem is not its key"), "{all}");
    }
}
