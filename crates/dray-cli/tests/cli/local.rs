//! Commands that need no agent: `pki` and `check-config`.

use crate::fake::{Ran, dray, finish};
use serde_json::Value;
use std::path::Path;

fn run(args: &[&str]) -> Ran {
    finish(dray(args).output().unwrap())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A configuration for `hosta` whose directories are all below `root`.
fn write_config(root: &Path, tls: &Path) -> std::path::PathBuf {
    let file = root.join("dray.toml");
    let root = root.display();
    let tls = tls.display();
    let config = format!(
        "qmp_dirs = ['{root}']\n[agent]\nname = 'hosta'\nstate_dir = '{root}'\n\
         run_dir = '{root}'\n[tls]\ndir = '{tls}'\n[[pool]]\nname = 'ssd'\npath = '{root}'\n\
         [[peer]]\nname = 'hostb'\naddress = 'hostb'\npools = ['ssd']\n"
    );
    std::fs::write(&file, config).unwrap();
    file
}

#[test]
fn certificates_made_here_pass_the_check() {
    let dir = tempfile::TempDir::with_prefix("dray-cli-").unwrap();
    let ca = dir.path().join("ca");
    assert_eq!(run(&["pki", "init", "--dir", text(&ca)]).code, 0);
    let issued = run(&["--json", "pki", "issue", "hosta", "--dir", text(&ca)]);
    assert_eq!(issued.code, 0, "{}", issued.err);
    let made: Value = serde_json::from_str(&issued.out).unwrap();
    let config = write_config(dir.path(), Path::new(made["dir"].as_str().unwrap()));
    let checked = run(&["check-config", "--config", text(&config)]);
    assert_eq!(checked.code, 0, "{}", checked.err);
    let wanted = format!("✓ {} is good: hosta, pools ssd, peers hostb\n", config.display());
    let (first, left) = checked.out.split_at(wanted.len());
    assert_eq!(first, wanted);
    let days = left.strip_prefix("the certificates are valid for ").expect(left);
    let days = days.strip_suffix(" more days\n").expect(left).replace(',', "");
    assert!((300..5000).contains(&days.parse::<u32>().expect(left)), "{left}");
}

#[test]
fn an_authority_is_never_overwritten() {
    let dir = tempfile::TempDir::with_prefix("dray-cli-").unwrap();
    let path = text(dir.path());
    assert_eq!(run(&["pki", "init", "--dir", path]).code, 0);
    let again = run(&["pki", "init", "--dir", path]);
    assert_eq!(again.code, 4);
    assert!(again.err.starts_with("dray: cannot make a certificate authority: "), "{}", again.err);
}

#[test]
fn problems_of_a_configuration_are_all_listed() {
    let dir = tempfile::TempDir::with_prefix("dray-cli-").unwrap();
    let missing = run(&["check-config", "--config", text(&dir.path().join("none.toml"))]);
    assert_eq!(missing.code, 4);
    assert!(missing.err.contains("none.toml: file: No such file"), "{}", missing.err);
    assert!(missing.err.contains("\nhint: name another file with --config"), "{}", missing.err);
    let file = dir.path().join("dray.toml");
    std::fs::write(&file, "[agent]\nname = 'host a'\n[tls]\ndir = 'tls'\n").unwrap();
    let wrong = run(&["check-config", "--config", text(&file)]);
    assert_eq!(wrong.code, 4);
    let mut lines = wrong.err.lines();
    assert_eq!(lines.next(), Some(&*format!("dray: cannot use {}: 2 problems", file.display())));
    assert!(lines.next().unwrap().starts_with("  line 2: agent.name: "), "{}", wrong.err);
    assert!(lines.next().unwrap().starts_with("  line 4: tls.dir: "), "{}", wrong.err);
}

#[test]
fn an_agent_without_a_configuration_says_which() {
    let ran = run(&["agent", "--config", "/nonexistent/dray.toml"]);
    assert_eq!(ran.code, 4);
    assert!(ran.err.contains("/nonexistent/dray.toml"), "{}", ran.err);
}
