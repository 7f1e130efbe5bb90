//! Clients of `nbd.tcp` that have a certificate of the authority, and want other images than theirs.

use crate::attacker::lab;
use crate::lab::{ALL_RIGHTS, run};
use crate::remote::Remote;
use std::process::Command;

#[test]
fn a_remote_client_sees_and_opens_only_what_is_written_of_it() {
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap().to_string();
    drop(tcp);
    let nbd = format!(
        "[nbd]\ntcp = \"{address}\"\n\
         [[nbd.client]]\nname = \"hostb\"\nread = [\"vm1-*\"]\nwrite = [\"vm2\"]\n"
    );
    let mut lab = lab(ALL_RIGHTS, "");
    lab.a.stop();
    let text = std::fs::read_to_string(lab.a.config()).unwrap();
    std::fs::write(lab.a.config(), text + &nbd).unwrap();
    lab.a.start();
    for name in ["vm1-root", "vm1-data", "vm2", "vm3"] {
        run(Command::new("truncate").args(["-s", "1M"]).arg(lab.a.pool().join(name)));
        lab.a.add(name);
    }
    let connect = |name: &str| Remote::connect(&lab, name, &address).unwrap();
    assert_eq!(connect("hostb").list().unwrap(), ["vm1-data", "vm1-root", "vm2"]);
    // Whether there is such an image is not for it to know.
    for name in ["vm3", "no-such-image"] {
        let why = connect("hostb").go(name).unwrap().unwrap_err();
        assert!(why.contains(&format!("this certificate may not open '{name}'")), "{why}");
    }
    let mut reader = connect("hostb");
    assert_eq!(reader.go("vm1-root").unwrap(), Ok(true));
    assert_eq!(reader.write().unwrap(), 1, "EPERM");
    let mut writer = connect("hostb");
    assert_eq!(writer.go("vm2").unwrap(), Ok(false));
    assert_eq!(writer.write().unwrap(), 0);
    // A good certificate of which nothing is written.
    assert!(connect("hosta").list().unwrap().is_empty());
    assert!(connect("hosta").go("vm2").unwrap().is_err());
}
