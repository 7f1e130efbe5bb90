//! Results as people see them, and as programs do. What the examples of the help show is checked in
//! `examples.rs`; here is the rest.

use crate::fake::{Fake, Ran};
use crate::golden;
use serde_json::Value;

fn run(args: &str) -> Ran {
    let ran = Fake::start().run(&args.split_whitespace().collect::<Vec<_>>());
    assert_eq!(ran.code, 0, "{args}: {}", ran.err);
    ran
}

/// The golden file of each result, and what is typed for it.
const RESULTS: &[(&str, &str)] = &[
    ("images", "images"),
    ("images-add", "images add a /srv/a.raw"),
    ("images-remove", "images remove a"),
    ("images-remove-delete", "images remove a --delete"),
    ("lineage", "lineage vm1-root"),
    ("backup", "backup vm1-root vm1-data --to nas"),
    ("backup-full", "backup vm1-root --to nas --full --keep-last 2"),
    ("backups", "backups"),
    ("backups-list", "backups list nas"),
    ("backups-prune", "backups prune nas --keep-last 9"),
    ("backups-gc", "backups gc nas"),
    ("backups-init", "backups init nas"),
    ("backups-cancel", "backups cancel vm1-root"),
    ("verify", "verify nas --read-data"),
    ("restore", "restore vm1-root@4 --from nas --as vm1-old"),
    ("status", "status"),
    ("status-running", "status 4f1c"),
    ("status-failed", "status 501c"),
    ("status-prepared", "status 5100"),
    ("status-waiting", "status 5200"),
    ("status-promised", "status 5300"),
    ("migrate-detached", "migrate --image a --to hostb --detach"),
    ("resume-detached", "resume --detach"),
    ("cancel", "cancel"),
    ("cancel-discard", "cancel --discard"),
    ("cancel-away", "cancel --discard away"),
    ("cancel-here", "cancel here"),
    ("limit", "limit 800Mbit"),
    ("limit-none", "limit none"),
    ("limit-not-kept", "limit none full"),
    ("peers", "peers"),
    ("peers-one", "peers hostb"),
    ("peers-probe", "peers --probe"),
    ("info", "info"),
    ("adopt", "adopt --qmp /q"),
    ("release", "release --qmp /q"),
    ("resize", "resize a 40GiB"),
    ("claim", "claim a --source-is-fenced --accept-loss"),
    ("plan", "plan --image a --to hostb --bandwidth 800Mbit"),
    ("plan-unknown", "plan --image a --to hostc"),
    ("plan-several", "plan --vm /q --image a --each --to hostb"),
    ("seed", "seed --image a --to hostc"),
    ("seed-nothing", "seed --image a --to hostb"),
    ("backfill-start", "backfill start"),
    ("backfill-pause", "backfill pause vm1-root"),
    ("backfill-rate", "backfill rate 200Mbit --qmp /q"),
    ("batch", "batch"),
    ("batch-one", "batch 6a"),
    ("batch-cancel", "batch cancel"),
    ("batch-limit", "batch limit none 7b"),
    ("batch-detached", "migrate --each --image a --to hostb --detach"),
    ("quit", "quit --qmp /run/vm1.qmp"),
    ("quit-slow", "quit --qmp /run/slow.qmp"),
    ("unstall", "unstall a"),
    ("unstall-fail", "unstall a --fail"),
];

#[test]
fn results_for_people() {
    for (name, args) in RESULTS {
        let ran = run(args);
        assert!(ran.err.is_empty(), "{args}: {}", ran.err);
        golden::check(name, &ran.out);
    }
}

#[test]
fn prepare_prints_only_what_is_pasted_on_standard_output() {
    let ran = run("prepare --qmp /q --to hostb");
    golden::check("prepare", &ran.out);
    golden::check("prepare-notes", &ran.err);
    assert!(run("-q prepare --qmp /q --to hostb").err.is_empty());
    let ran = run("prepare --qmp /q --to hostb --script");
    golden::check("prepare-script", &ran.out);
    golden::check("prepare-script-notes", &ran.err);
}

#[test]
fn results_for_programs_have_the_same_names_as_in_the_interface() {
    let status: Value = serde_json::from_str(&run("--json status 4f1c").out).unwrap();
    assert_eq!(status[0]["migration"], "4f1c0000000000000000000000000001");
    assert_eq!(status[0]["progress"]["phase"], "copy");
}
