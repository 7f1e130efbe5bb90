//! `dray peers`: who answers, who is not trusted, and who says nothing.

use crate::lab::{ALL_RIGHTS, DRAY, Host, Lab, run};
use serde_json::{Value, json};
use std::net::TcpListener;
use std::process::Command;
use std::time::{Duration, Instant};

/// What an agent waits for its peers, and some more for a slow machine.
const SOON: Duration = Duration::from_secs(5 + 5);

/// What `host` finds of its peer `name`.
fn found(host: &Host, name: &str) -> Value {
    let began = Instant::now();
    let all = host.ask(json!("peers")).unwrap();
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    all.as_array().unwrap().iter().find(|one| one["peer"] == name).unwrap().clone()
}

#[test]
fn a_peer_answers_says_nothing_or_is_not_there() {
    let mut lab = Lab::new();
    let third = lab.third();
    // Connections to it stand, and nobody speaks.
    let mute = TcpListener::bind(&third.address).unwrap();
    lab.start();
    let ready = found(&lab.a, "hostb");
    assert_eq!((&ready["state"], &ready["error"]), (&"ready".into(), &Value::Null), "{ready}");
    assert_eq!(
        (&ready["address"], ready["rtt_ms"].is_f64()),
        (&lab.b.address.clone().into(), true)
    );
    assert!(ready["agent"].as_str().unwrap().starts_with("dray/"), "{ready}");
    let silent = found(&lab.a, "hostc");
    assert_eq!((&silent["state"], &silent["agent"]), (&"silent".into(), &Value::Null), "{silent}");
    assert!(silent["rtt_ms"].is_f64(), "{silent}");
    drop(mute);
    let away = found(&lab.a, "hostc");
    assert_eq!((&away["state"], &away["rtt_ms"]), (&"silent".into(), &Value::Null), "{away}");
    assert_eq!(away["error"]["kind"], "peer", "{away}");
    let told = lab.a.dray(&["peers"]);
    assert!(told.status.success());
    let told = String::from_utf8(told.stdout).unwrap();
    assert!(told.contains("\nhostc: "), "{told}");
}

#[test]
fn a_peer_with_a_certificate_of_somebody_else_is_not_trusted() {
    let mut lab = Lab::with(|name, config| match name {
        "hostb" => config.replace("/pki/hostb", "/other/hostb"),
        _ => config,
    });
    let other = lab.dir.path().join("other");
    run(Command::new(DRAY).args(["pki", "init", "--dir"]).arg(&other));
    run(Command::new(DRAY).args(["pki", "issue", "hostb", "--dir"]).arg(&other));
    lab.start();
    let found = found(&lab.a, "hostb");
    assert_eq!((&found["state"], &found["error"]["kind"]), (&"untrusted".into(), &"denied".into()));
    assert!(found["error"]["why"].as_str().unwrap().contains("certificate"), "{found}");
}

/// What `--probe` has measured of hostb.
fn probed(lab: &Lab) -> Value {
    let found = lab.a.ask(json!({ "probe": { "peers": ["hostb"] } })).unwrap();
    assert_eq!(found.as_array().unwrap().len(), 1, "{found}");
    found[0].clone()
}

#[test]
fn a_link_is_measured_and_predictions_know_it() {
    let mut lab = Lab::new();
    lab.start();
    assert_eq!(found(&lab.a, "hostb")["rate"], Value::Null, "nothing was measured yet");
    let measured = probed(&lab);
    let (link, disk) = (measured["link"].as_u64().unwrap(), measured["disk"].as_u64().unwrap());
    assert!(link > 1 << 20 && disk > 1 << 20, "{measured}");
    assert_eq!(found(&lab.a, "hostb")["rate"], measured["link"]);
    assert_eq!(std::fs::read_dir(lab.b.pool()).unwrap().count(), 0);
    let unknown = lab.a.dray(&["peers", "hostx", "--probe"]);
    let said = String::from_utf8(unknown.stderr).unwrap();
    assert_eq!(unknown.status.code(), Some(5), "{said}");
    assert!(said.contains("its peers are hostb"), "{said}");
}

#[test]
fn who_may_only_observe_measures_the_link_and_writes_to_no_disk() {
    let mut lab = Lab::with(|name, config| match name {
        "hostb" => config.replace(ALL_RIGHTS, "rights = [\"observe\"]"),
        _ => config,
    });
    lab.start();
    let measured = probed(&lab);
    assert!(measured["link"].is_u64() && measured["disk"].is_null(), "{measured}");
}
