//! `dray peers`: who answers, who is not trusted, and who says nothing.

use crate::lab::{DRAY, Host, Lab, run};
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
