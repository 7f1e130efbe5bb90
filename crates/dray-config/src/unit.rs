//! What a systemd unit lets the agent of a configuration reach: `dray check-config --systemd`.

use crate::Config;
use dray_backup::Location;
use dray_host::pool::PoolKind;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const HEAD: &str = "# What the agent of this host may write, made by `dray check-config --systemd`. Make it again after a change of
# dray.toml: the agent could not write to a new pool.
";

/// The drop-in for `dray.service`: all of the host is read-only but what the configuration names. The agent does not
/// start without its state. It does without a pool: the guests on the others need it.
pub fn drop_in(config: &Config) -> String {
    let state = quoted(&config.state_dir);
    let mut text =
        format!("{HEAD}[Unit]\nRequiresMountsFor={state}\n\n[Service]\nProtectSystem=strict\n");
    for path in written(config) {
        text += &format!("ReadWritePaths=-{}\n", quoted(&path));
    }
    text += "DevicePolicy=closed\n";
    if config.pools.iter().any(|pool| pool.kind == PoolKind::Devices) {
        text += "# For the pools of devices.\nDeviceAllow=block-* rw\n";
    }
    text
}

/// The folders in which the agent makes or writes files.
fn written(config: &Config) -> BTreeSet<PathBuf> {
    let folder = |url: &str| match url.parse() {
        Ok(Location::Directory(folder)) => Some(folder),
        _ => None,
    };
    let mut all: BTreeSet<_> = config.pools.iter().map(|pool| pool.path.clone()).collect();
    all.extend([config.state_dir.clone(), config.run_dir.clone()]);
    all.extend(config.backups.iter().filter_map(|place| folder(&place.url)));
    all.extend(config.backup_store.iter().map(|store| store.path.clone()));
    all
}

/// A path as a word of a unit: what systemd would expand or split is escaped.
fn quoted(path: &Path) -> String {
    let plain = path.display().to_string().replace('%', "%%");
    if plain.chars().all(|c| c.is_ascii_alphanumeric() || "/._-@:+%".contains(c)) {
        return plain;
    }
    format!("\"{}\"", plain.replace('\\', "\\\\").replace('"', "\\\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_may_write_where_its_configuration_says_and_nowhere_else() {
        let text = "[agent]\nname = 'a'\nstate_dir = '/var/lib/dray'\n[tls]\ndir = '/etc/dray/pki'\n\
                    [[pool]]\nname = 'ssd'\npath = '/srv/vm disks'\n\
                    [[pool]]\nname = 'lv'\npath = '/dev/vg0'\nkind = 'devices'\n\
                    [[backup]]\nname = 'nas'\nurl = 'file:///mnt/nas%1'\n\
                    [[backup]]\nname = 's3'\nurl = 's3://bucket/x'\n";
        let config = Config::parse(text, Path::new("dray.toml")).unwrap();
        let text = drop_in(&config);
        let written: Vec<_> =
            text.lines().filter_map(|line| line.strip_prefix("ReadWritePaths=-")).collect();
        assert_eq!(
            written,
            ["/dev/vg0", "/mnt/nas%%1", "/run/dray", "\"/srv/vm disks\"", "/var/lib/dray"]
        );
        assert!(
            text.contains("ProtectSystem=strict\n") && text.contains("DeviceAllow=block-* rw\n")
        );
        assert!(!text.contains("pki"), "it is only read");
    }

    #[test]
    fn no_device_is_open_to_an_agent_without_a_pool_of_devices() {
        let text = "[agent]\nname = 'a'\n[tls]\ndir = '/t'\n[[pool]]\nname = 'p'\npath = '/p'\n";
        let text = drop_in(&Config::parse(text, Path::new("dray.toml")).unwrap());
        assert!(text.contains("DevicePolicy=closed\n") && !text.contains("DeviceAllow"));
    }
}
