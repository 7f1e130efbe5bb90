//! What was typed reaches the agent as it was meant.

use crate::fake::Fake;
use serde_json::{Value, json};

/// Checks the first request.
#[track_caller]
fn asks(args: &[&str], wanted: &Value) {
    let fake = Fake::start();
    let ran = fake.run(args);
    assert_eq!(ran.code, 0, "{args:?}: {}", ran.err);
    // Before a list comes what does not work.
    let seen = fake.seen();
    let is_before = |command: &Value| command.get("info").is_some() && wanted.get("info").is_none();
    let asked = seen.iter().find(|one| !is_before(one));
    assert_eq!(asked, Some(wanted), "{args:?}");
}

#[test]
fn migrate_with_defaults() {
    let args = ["migrate", "--qmp", "/q", "--to", "hostb", "--target-qmp", "/t"];
    let wanted = json!({ "migrate": {
        "subject": { "vm": { "qmp": "/q" } }, "to": "hostb", "target_qmp": "/t",
        "prepared": null, "pool": null, "names": {}, "strategy": "auto",
        "order": "workload-aware", "bandwidth": null,
        "max_downtime_ms": null, "verify": false, "detach": false, "drop_bitmaps": false,
        "remove_replica": false, "release": "as-before",
    }});
    asks(&args, &wanted);
}

#[test]
fn migrate_with_everything() {
    let args = "migrate --image a --image b --to hostb --pool fast --name a=x --strategy pre-copy --order sequential \
                --bandwidth 800Mbit --max-downtime 0.5s --verify --detach --drop-bitmaps \
                --remove-replica --release always";
    let wanted = json!({ "migrate": {
        "subject": { "images": { "names": ["a", "b"] } }, "to": "hostb", "target_qmp": null,
        "prepared": null, "pool": "fast", "names": { "a": "x" }, "strategy": "pre-copy",
        "order": "sequential",
        "bandwidth": { "bytes_per_second": 100_000_000 }, "max_downtime_ms": 500, "verify": true,
        "detach": true, "drop_bitmaps": true, "remove_replica": true, "release": "always",
    }});
    asks(&args.split_whitespace().collect::<Vec<_>>(), &wanted);
}

#[test]
fn what_only_some_strategies_use_is_left_out_unless_it_is_asked_for() {
    let args = "migrate --image a --to hostb --no-backups --strategy hot-set --throttle soft --observe 30s \
                --threshold 2.5 --segment 16MiB --handover-size 1MiB --max-added-latency 1.5ms";
    let wanted = json!({ "throttle": "soft", "max_added_latency_ms": 1.5, "hot_set": {
        "observe_ms": 30_000, "threshold": 2.5, "segment": 16 << 20, "read_weight": 0.5,
        "handover_size": 1 << 20,
    }});
    let fake = Fake::start();
    let ran = fake.run(&args.split_whitespace().collect::<Vec<_>>());
    assert_eq!(ran.code, 0, "{}", ran.err);
    let request = fake.seen()[0]["migrate"].clone();
    assert_eq!((&request["strategy"], &request["tuning"]), (&json!("hot-set"), &wanted));
}

/// The agent decides what a migration begins with, so that every client gets the same one.
#[test]
fn whether_backups_may_be_used_is_said_and_nothing_else_is_asked() {
    let no_backups = |args: &str| {
        let fake = Fake::start();
        let ran = fake.run(&args.split_whitespace().collect::<Vec<_>>());
        assert_eq!(ran.code, 0, "{args}: {}", ran.err);
        let [asked] = &fake.seen()[..] else { panic!("{args}: {:?}", fake.seen()) };
        let command = asked.as_object().unwrap().values().next().unwrap();
        command.get("no_backups").cloned()
    };
    for command in ["migrate", "migrate --detach", "prepare"] {
        let args = format!("{command} --image a --to hostb --pool fast --name a=x");
        assert_eq!(no_backups(&args), None, "{args}");
        assert_eq!(no_backups(&format!("{args} --no-backups")), Some(json!(true)), "{args}");
    }
}

#[test]
fn a_batch_is_watched_by_its_id() {
    let fake = Fake::start();
    assert_eq!(fake.run(&["batch", "watch", "7b"]).code, 16);
    assert_eq!(fake.seen(), [json!({ "batch-watch": { "batch": "7b" } })]);
}

/// What one migration of a batch of images and VMs looks like.
fn moved(subject: &Value, more: &Value) -> Value {
    let mut wanted = json!({
        "subject": subject, "to": "hostb", "target_qmp": null, "prepared": null, "pool": null,
        "names": {}, "strategy": "pre-copy", "order": "workload-aware", "bandwidth": null,
        "max_downtime_ms": null, "verify": true, "detach": false, "drop_bitmaps": false,
        "remove_replica": false, "release": "as-before",
    });
    for (field, value) in more.as_object().unwrap() {
        wanted[field] = value.clone();
    }
    wanted
}

#[test]
fn several_at_once() {
    let args = "migrate --vm /q1=/t1 --vm /q2 --each --image a --image b --to hostb --jobs 3 \
                --in-order --bandwidth 8Mbit --strategy pre-copy --verify";
    let vm = |qmp| json!({ "vm": { "qmp": qmp } });
    let image = |name| json!({ "images": { "names": [name] } });
    let wanted = json!({ "batch": {
        "moves": [
            moved(&vm("/q1"), &json!({ "target_qmp": "/t1" })),
            moved(&vm("/q2"), &json!({})),
            moved(&image("a"), &json!({})),
            moved(&image("b"), &json!({})),
        ],
        "jobs": 3, "budget": { "bytes_per_second": 1_000_000 }, "in_order": true, "detach": false,
    }});
    let fake = Fake::start();
    let ran = fake.run(&args.split_whitespace().collect::<Vec<_>>());
    // Of the canned batch not all came through.
    assert_eq!(ran.code, 16, "{}", ran.err);
    assert_eq!(fake.seen(), [wanted]);
}

#[test]
fn all_is_what_is_prepared_for_the_host() {
    let fake = Fake::start();
    let ran =
        fake.run(&["migrate", "--all", "--to", "hostb", "--strategy", "pre-copy", "--verify"]);
    assert_eq!(ran.code, 16, "{}", ran.err);
    let prepared = json!({ "prepared": "51000000000000000000000000000001" });
    let wanted = moved(&json!({ "vm": { "qmp": "/run/vm5.qmp" } }), &prepared);
    assert_eq!(fake.seen().last().unwrap()["batch"]["moves"], json!([wanted]));
}

#[test]
fn commands_with_their_options() {
    let here = std::env::current_dir().unwrap();
    let trace = tempfile::NamedTempFile::new().unwrap();
    let record = format!("trace record a --duration 3s -o {}", trace.path().display());
    let image = json!({ "images": { "names": ["a"] } });
    let cases = [
        (
            "migrate --image a --to b --strategy pre-copy --verify",
            json!({ "migrate": moved(&image, &json!({ "to": "b" })) }),
        ),
        (
            "plan --image a --to b --deadline 10m",
            json!({ "plan": { "subject": image, "to": "b", "bandwidth": null,
                "max_downtime_ms": null, "deadline_ms": 600_000, "max_added_latency_ms": null } }),
        ),
        (
            "seed --image a --to b --pool fast",
            json!({ "seed": { "subject": image, "to": "b", "pool": "fast", "prefix": null,
                "names": {} } }),
        ),
        ("images", json!({ "images": {} })),
        ("peers", json!({ "peers": {} })),
        ("reload", json!({ "reload": {} })),
        ("info", json!({ "info": {} })),
        (&record, json!({ "record": { "image": "a", "duration_ms": 3000 } })),
        ("batch", json!({ "batches": { "batch": null } })),
        ("batch 7b", json!({ "batches": { "batch": "7b" } })),
        (
            "prepare --qmp q.sock --to b --prefix new- --name disk0=root",
            json!({ "prepare": { "subject": { "vm": { "qmp": here.join("q.sock") } }, "to": "b",
                "pool": null, "prefix": "new-", "names": { "disk0": "root" } } }),
        ),
        (
            "prepare --qmp /q --to b --script",
            json!({ "prepare": { "subject": { "vm": { "qmp": "/q" } }, "to": "b",
                "pool": null, "prefix": null, "names": {}, "command_line": true } }),
        ),
        (
            "prepare --qmp /q --to b --chain flatten --target-format qcow2",
            json!({ "prepare": { "subject": { "vm": { "qmp": "/q" } }, "to": "b",
                "pool": null, "prefix": null, "names": {}, "chain": "flatten",
                "target_format": "qcow2" } }),
        ),
        ("status 4f", json!({ "status": { "migration": "4f" } })),
        ("watch", json!({ "watch": { "migration": null } })),
        ("cancel 4f --discard", json!({ "cancel": { "migration": "4f", "discard": true } })),
        ("resume --detach", json!({ "resume": { "migration": null } })),
        (
            "limit 8Mbit 4f",
            json!({ "limit": { "migration": "4f",
                "bandwidth": { "bytes_per_second": 1_000_000 } } }),
        ),
        ("limit none", json!({ "limit": { "migration": null, "bandwidth": null } })),
        (
            "images add a /p --format qcow2 --fixed",
            json!({ "image-add": { "name": "a", "path": "/p", "growable": false,
                "format": "qcow2", "read_only": false } }),
        ),
        ("images remove a", json!({ "image-remove": { "name": "a" } })),
        ("images remove a --delete", json!({ "image-remove": { "name": "a", "delete": true } })),
        ("lineage a", json!({ "lineage": { "image": "a" } })),
        (
            "backup a b --to nas --fsfreeze /g --bandwidth 800Mbit --key-file /k",
            json!({ "backup": { "images": ["a", "b"], "to": "nas", "key_file": "/k",
                "fsfreeze": "/g", "bandwidth": { "bytes_per_second": 100_000_000 },
                "full": false, "keep_last": null } }),
        ),
        ("backups", json!({ "backups": { "repository": null, "image": null } })),
        (
            "backups list nas a",
            json!({ "backups": { "repository": { "at": "nas", "key_file": null }, "image": "a" } }),
        ),
        ("backups init nas", json!({ "backup-init": { "at": "nas", "key_file": null } })),
        (
            "backups prune nas --keep-last 3 --keep-daily 7 --dry-run",
            json!({ "backup-prune": { "repository": { "at": "nas", "key_file": null },
                "image": null, "keep_last": 3, "keep_within_days": 0, "keep_daily": 7,
                "keep_weekly": 0, "keep_monthly": 0, "dry_run": true } }),
        ),
        ("backups gc nas", json!({ "backup-gc": { "at": "nas", "key_file": null } })),
        ("backups cancel a", json!({ "backup-cancel": { "image": "a" } })),
        (
            "verify nas a --read-data",
            json!({ "backup-verify": { "repository": { "at": "nas", "key_file": null },
                "image": "a", "read_data": true } }),
        ),
        (
            "restore a@12 --from nas --as b --pool ssd",
            json!({ "restore": { "repository": { "at": "nas", "key_file": null }, "image": "a",
                "generation": "12", "name": "b", "pool": "ssd", "bandwidth": null } }),
        ),
        (
            "adopt --qmp /q --disk d0 --drop-bitmaps",
            json!({ "adopt": { "qmp": "/q", "disks": ["d0"], "drop_bitmaps": true } }),
        ),
        ("release --qmp /q", json!({ "release": { "qmp": "/q", "disks": [] } })),
        (
            "resize a 40GiB --qmp /q",
            json!({ "resize": { "image": "a", "size": 42_949_672_960_u64, "qmp": "/q" } }),
        ),
        (
            "claim a --source-is-fenced",
            json!({ "claim": { "image": "a", "source_is_fenced": true, "accept_loss": false } }),
        ),
        (
            "backfill start 4f",
            json!({ "backfill": { "action": "start", "which": "4f", "qmp": null } }),
        ),
        (
            "backfill pause --qmp /q",
            json!({ "backfill": { "action": "pause", "which": null, "qmp": "/q" } }),
        ),
        (
            "backfill rate 8Mbit",
            json!({ "backfill": { "action": { "rate": { "bytes_per_second": 1_000_000 } },
                "which": null, "qmp": null } }),
        ),
        ("batch cancel", json!({ "batch-cancel": { "batch": null } })),
        (
            "batch limit 8Mbit",
            json!({ "batch-limit": { "batch": null, "budget": { "bytes_per_second": 1_000_000 } } }),
        ),
        ("quit --qmp /run/vm1.qmp", json!({ "quit": { "qmp": "/run/vm1.qmp" } })),
        ("unstall a --fail", json!({ "unstall": { "image": "a", "fail": true } })),
    ];
    for (args, wanted) in cases {
        asks(&args.split_whitespace().collect::<Vec<_>>(), &wanted);
    }
}
