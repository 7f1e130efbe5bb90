//! A host that was taken over wants to destroy the backups of the others, or its own, or to fill the disk.

use crate::attacker::{Attacker, lab, start};
use crate::lab::{ALL_RIGHTS, Host, Lab};
use dray_net::questions::Questions;
use dray_wire::StreamKind;
use dray_wire::store::{Answer, Ask, Refusal};
use std::path::PathBuf;

/// A lab in which hosta has a store with these keys, for hostb and hostc.
fn offered(keys: &str) -> (Lab, Host, PathBuf) {
    let mut lab = lab(ALL_RIGHTS, "");
    lab.a.stop();
    let c = lab.third();
    let root = lab.dir.path().join("store");
    let text = std::fs::read_to_string(lab.a.config()).unwrap();
    let store = format!("[backup_store]\npath = \"{}\"\n{keys}", root.display());
    std::fs::write(lab.a.config(), text + &store).unwrap();
    start(&mut lab.a);
    (lab, c, root)
}

/// The store as a host sees it.
fn store_of(lab: &Lab, name: &str) -> Questions {
    let identity = Attacker::new(lab, name).identity;
    Questions::new(identity, "hosta", &lab.a.address, StreamKind::Store)
}

fn ask(store: &Questions, ask: &Ask, body: &[u8]) -> Answer {
    store.ask::<Answer>(ask, body).unwrap().0
}

fn put(store: &Questions, name: &str, len: usize) -> Answer {
    ask(store, &Ask::PutNew { name: name.to_owned() }, &vec![7; len])
}

fn delete(store: &Questions, name: &str) -> Answer {
    ask(store, &Ask::Delete { name: name.to_owned() }, &[])
}

fn denied(answer: &Answer, words: &str) {
    let Answer::Failed { kind: Refusal::Denied, why } = answer else { panic!("{answer:?}") };
    assert!(why.contains(words), "{why}");
}

#[test]
fn a_host_neither_sees_nor_removes_the_backups_of_another() {
    let (lab, _c, root) = offered("");
    let (victim, attacker) = (store_of(&lab, "hostb"), store_of(&lab, "hostc"));
    assert_eq!(put(&victim, "vms/config", 10), Answer::Created);
    let list = |prefix: &str| ask(&attacker, &Ask::List { prefix: prefix.to_owned() }, &[]);
    assert_eq!(list(""), Answer::Objects(Vec::new()));
    let exists = Ask::Exists { name: "vms/config".to_owned() };
    assert_eq!(ask(&attacker, &exists, &[]), Answer::Exists(false));
    assert_eq!(delete(&attacker, "vms/config"), Answer::Done);
    for name in ["@hostb/vms/config", "@HOSTB/vms/config"] {
        let name = name.to_owned();
        denied(&ask(&attacker, &Ask::Get { name: name.clone(), limit: 99 }, &[]), "may not read");
        denied(&delete(&attacker, &name), "can only be read");
        denied(&put(&attacker, &name, 1), "can only be read");
    }
    denied(&list("@hostb/"), "may not read what 'hostb' has");
    for name in ["../hostb/vms/config", "@hostb/../hostb/vms/config", "@../x", "@"] {
        let asked = ask(&attacker, &Ask::Get { name: name.to_owned(), limit: 99 }, &[]);
        assert!(matches!(asked, Answer::Failed { .. }), "{name}: {asked:?}");
    }
    assert_eq!(std::fs::read(root.join("hostb/vms/config")).unwrap(), [7; 10]);
}

#[test]
fn what_a_host_deletes_of_its_own_stays_for_a_while() {
    let (lab, _c, root) = offered("");
    let attacker = store_of(&lab, "hostb");
    put(&attacker, "packs/1", 10);
    assert_eq!(delete(&attacker, "packs/1"), Answer::Done);
    assert_eq!(
        ask(&attacker, &Ask::Exists { name: "packs/1".to_owned() }, &[]),
        Answer::Exists(false)
    );
    let kept: Vec<_> = std::fs::read_dir(root.join("hostb/.deleted/packs")).unwrap().collect();
    assert_eq!(kept.len(), 1);
    assert_eq!(std::fs::read(kept[0].as_ref().unwrap().path()).unwrap(), [7; 10]);
    let name = ".deleted/packs/1".to_owned();
    assert!(matches!(ask(&attacker, &Ask::Delete { name }, &[]), Answer::Failed { .. }));
}

#[test]
fn an_append_only_store_deletes_nothing() {
    let (lab, _c, root) = offered("append_only = true\n");
    let attacker = store_of(&lab, "hostb");
    put(&attacker, "packs/1", 10);
    denied(&delete(&attacker, "packs/1"), "append-only");
    assert_eq!(put(&attacker, "packs/1", 11), Answer::Existed);
    assert_eq!(std::fs::read(root.join("hostb/packs/1")).unwrap(), [7; 10]);
}

#[test]
fn a_host_cannot_fill_the_disk_and_others_still_find_room() {
    let (mut lab, _c, root) = offered("quota = \"64KiB\"\nmax_objects = 4\n");
    let attacker = store_of(&lab, "hostb");
    assert_eq!(put(&attacker, "packs/1", 40 << 10), Answer::Created);
    denied(&put(&attacker, "packs/2", 30 << 10), "the store is full for this host");
    // Deleting gives no room before what was deleted is gone.
    delete(&attacker, "packs/1");
    denied(&put(&attacker, "packs/2", 30 << 10), "the store is full for this host");
    assert!(!root.join("hostb/packs/2").exists());
    // A restart forgets nothing.
    lab.a.stop();
    start(&mut lab.a);
    let attacker = store_of(&lab, "hostb");
    denied(&put(&attacker, "packs/2", 30 << 10), "the store is full for this host");
    for n in 3..6 {
        assert_eq!(put(&attacker, &format!("packs/{n}"), 1), Answer::Created);
    }
    denied(&put(&attacker, "packs/6", 1), "4 objects");
    assert_eq!(put(&store_of(&lab, "hostc"), "packs/1", 60 << 10), Answer::Created);
}
