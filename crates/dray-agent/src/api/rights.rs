//! What somebody who came through a socket may have the agent do. Everything is decided here, before
//! a command is begun.

use dray_api::{AccessLevel, ApiResult, Command, ErrorKind, Refusal};
use dray_config::Config;
use dray_host::process::has_walls;
use dray_host::refusals::of_path;
use tokio::net::UnixStream;

/// The level of who is at the other end, where the socket is for `usual`. Root and the agent's own
/// user could do without dray whatever they can do with it.
pub fn level_of(stream: &UnixStream, usual: AccessLevel) -> AccessLevel {
    match stream.peer_cred() {
        Ok(peer) if !has_walls(peer.uid()) => AccessLevel::Admin,
        _ => usual,
    }
}

/// Checks that `level` may give this command.
///
/// # Errors
/// `Denied`, with who may.
pub fn check(command: &Command, level: AccessLevel, config: &Config) -> ApiResult<()> {
    const WHAT: &str = "cannot do this for you";
    if level < command.level() {
        let why = "members of the group agent.readers may only look";
        return Err(Refusal::new(ErrorKind::Denied, WHAT, why)
            .hint("run this as root or as a member of the group agent.group"));
    }
    if level == AccessLevel::Admin {
        return Ok(());
    }
    let named = command.named();
    if let Some(at) = named.repository
        && !config.backups.iter().any(|known| known.name == at)
    {
        let why = format!("'{at}' is no [[backup]] of {}", config.path.display());
        return Err(Refusal::new(ErrorKind::Denied, WHAT, why)
            .hint("only root may name other repositories; add this one to the configuration"));
    }
    if let Some(key) = named.key_file {
        let why = format!("only root may name a key file ({})", key.display());
        return Err(Refusal::new(ErrorKind::Denied, WHAT, why)
            .hint("set key_file in the [[backup]] of the repository"));
    }
    for socket in named.sockets {
        config.qmp_socket(socket).map_err(|why| Refusal { what: WHAT.into(), ..of_path(why) })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::path::Path;

    fn config(dir: &Path) -> Config {
        let text = format!(
            "qmp_dirs = ['{0}']\n[agent]\nname = 'hosta'\n[tls]\ndir = '/'\n\
             [[backup]]\nname = 'nas'\nurl = 'file:///srv/nas'\n",
            dir.display()
        );
        Config::parse(&text, "dray.toml".as_ref()).unwrap()
    }

    fn command(value: Value) -> Command {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_reader_changes_nothing_and_an_operator_reaches_what_is_configured() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        let socket = dir.path().join("vm.qmp");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let repository = |at: &str| json!({ "at": at });
        let with_key = json!({ "at": "nas", "key_file": "/etc/shadow" });
        let (reader, operator, admin) =
            (AccessLevel::Reader, AccessLevel::Operator, AccessLevel::Admin);
        for (least, asked) in [
            (reader, json!({ "status": {} })),
            (reader, json!({ "backups": {} })),
            (reader, json!({ "backups": { "repository": repository("nas") } })),
            (admin, json!({ "backups": { "repository": repository("file:///root") } })),
            (admin, json!({ "backups": { "repository": with_key.clone() } })),
            (reader, json!({ "backups": { "repository": {} } })),
            (admin, json!({ "backups": { "repository": { "key_file": "/etc/shadow" } } })),
            (operator, json!({ "cancel": {} })),
            (operator, json!({ "adopt": { "qmp": socket } })),
            (admin, json!({ "adopt": { "qmp": "/etc/passwd" } })),
            (operator, json!({ "backup": { "images": ["vm"], "to": "nas" } })),
            (admin, json!({ "backup": { "images": ["vm"], "to": "file:///etc" } })),
            (admin, json!({ "backup": { "images": ["vm"], "to": "nas", "fsfreeze": "/etc/x" } })),
            (admin, json!({ "backup-gc": with_key })),
            (
                admin,
                json!({ "batch": { "moves":
                    [{ "subject": { "vm": { "qmp": "/etc/x" } }, "to": "hostb" }] } }),
            ),
        ] {
            let asked = command(asked);
            for level in [reader, operator, admin] {
                let answer = check(&asked, level, &config);
                assert_eq!(answer.is_ok(), level >= least, "{level:?}: {asked:?}: {answer:?}");
            }
        }
    }

    #[test]
    fn who_may_not_is_told_who_may() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        let why =
            check(&command(json!({ "cancel": {} })), AccessLevel::Reader, &config).unwrap_err();
        assert_eq!(why.kind, ErrorKind::Denied);
        assert!(why.hint.unwrap().contains("agent.group"));
        let elsewhere = command(json!({ "adopt": { "qmp": "/etc/passwd" } }));
        let why = check(&elsewhere, AccessLevel::Operator, &config).unwrap_err();
        assert!(why.why.contains("it is not below"), "{why:?}");
    }
}
