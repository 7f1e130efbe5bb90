//! Clients that are not the guest's QEMU, or not any more: what they leave behind reaches no image.

use crate::case::{BLOCKS, IMAGE};
use crate::guest::{self, BLOCK, content};
use crate::lab::{Host, Lab, wait_for};
use crate::nbd::{Client, FLUSH, Fault, READ, WRITE};
use crate::refusals::{CONFLICT, refused};
use serde_json::Value;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Longest wait for anything.
const END: Duration = Duration::from_secs(45);
/// A migration that stays in its copy for as long as a test looks at it.
const SLOW: [&str; 5] = ["--strategy", "pre-copy", "--bandwidth", "1Mbit", "--detach"];

fn lab() -> Lab {
    let mut lab = Lab::new();
    guest::make_image(&lab.a.pool().join(IMAGE), BLOCKS / 16);
    lab.start();
    lab.a.add(IMAGE);
    lab
}

fn migrate(lab: &Lab, how: &[&str]) {
    let args = [&["migrate", "--image", IMAGE, "--to", "hostb"], how].concat();
    let output = lab.a.dray(&args);
    assert!(output.status.success(), "{output:?}");
}

fn cancel(lab: &Lab, how: &[&str]) {
    let id = lab.a.migrations()[0]["migration"].as_str().unwrap().to_owned();
    let output = lab.a.dray(&[&["cancel", &id], how].concat());
    assert!(output.status.success(), "{output:?}");
}

fn clients(host: &Host) -> Option<u64> {
    host.image(IMAGE)?["clients"].as_u64()
}

fn write(client: &mut Client, block: u64, version: u64) -> bool {
    let data = content(block, version);
    client.request(WRITE, block * BLOCK, BLOCK as u32, &data, &|| true).is_ok()
}

fn read(host: &Host, block: u64) -> Vec<u8> {
    let mut client = Client::connect(&host.nbd(), IMAGE).unwrap();
    client.request(READ, block * BLOCK, BLOCK as u32, &[], &|| true).unwrap()
}

/// The guest writes at the source meanwhile, and is told that it is durable.
#[test]
fn a_write_at_the_target_that_waits_for_the_handover_ends_with_its_client() {
    for cancelled in [false, true] {
        let lab = lab();
        migrate(&lab, &SLOW);
        wait_for("the target", END, || clients(&lab.b) == Some(0)).unwrap();
        let socket = lab.b.nbd();
        let mut late = Client::connect(&socket, IMAGE).unwrap();
        let given_up = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let wait = || !given_up.load(std::sync::atomic::Ordering::SeqCst);
            let data = content(7, 1);
            let late = scope.spawn(move || {
                let answer = late.request(WRITE, 7 * BLOCK, BLOCK as u32, &data, &wait);
                assert!(answer.is_err(), "the target has answered a write");
            });
            std::thread::sleep(Duration::from_millis(500));
            given_up.store(true, std::sync::atomic::Ordering::SeqCst);
            late.join().unwrap();
        });
        let mut guest = Client::connect(&lab.a.nbd(), IMAGE).unwrap();
        assert!(write(&mut guest, 7, 2));
        guest.request(FLUSH, 0, 0, &[], &|| true).unwrap();
        drop(guest);
        wait_for("nobody at the target", END, || clients(&lab.b) == Some(0)).unwrap();
        cancel(&lab, if cancelled { &[] } else { &["--discard"] });
        let free = || lab.a.image(IMAGE).is_some_and(|image| image["migration"].is_null());
        wait_for("the end", END, free).unwrap();
        migrate(&lab, &[]);
        wait_for("the arrival", END, || {
            lab.b.image(IMAGE).is_some_and(|image| image["state"] == "owner")
        })
        .unwrap();
        assert_eq!(read(&lab.b, 7), content(7, 2), "what the guest has flushed");
    }
}

/// It would go on at a disk that nobody has.
#[test]
fn a_client_of_an_image_that_is_gone_is_cut_off_and_finds_the_next_one() {
    let lab = lab();
    migrate(&lab, &SLOW);
    wait_for("the target", END, || clients(&lab.b) == Some(0)).unwrap();
    let mut waits = Client::connect(&lab.b.nbd(), IMAGE).unwrap();
    wait_for("it is attached", END, || clients(&lab.b) == Some(1)).unwrap();
    cancel(&lab, &["--discard"]);
    wait_for("nothing there", END, || lab.b.image(IMAGE).is_none()).unwrap();
    assert!(waits.request(FLUSH, 0, 0, &[], &|| true).is_err(), "it was cut off");
    assert!(Client::connect(&lab.b.nbd(), IMAGE).is_err(), "there is nothing");
    migrate(&lab, &[]);
    let mut guest = Client::connect(&lab.b.nbd(), IMAGE).unwrap();
    assert!(write(&mut guest, 7, 3));
    guest.request(FLUSH, 0, 0, &[], &|| true).unwrap();
    assert_eq!(lab.b.image(IMAGE).map(|image| image["state"].clone()), Some(Value::from("owner")));
    assert_eq!(read(&lab.b, 7), content(7, 3));
}

/// What is said of an image whose client has yet to come back after a restart of the agent.
fn is_awaited(lab: &Lab, pid: u32) {
    let (says, pid) = ("has not reconnected yet", pid.to_string());
    let remove = ["images", "remove", IMAGE];
    refused(&lab.a, &remove, CONFLICT, &[says, &pid, "release its disk", "end it"]);
    refused(
        &lab.a,
        &["resize", IMAGE, "1GiB"],
        CONFLICT,
        &[says, &pid, "would not learn the new length"],
    );
}

/// Its guest would find no image, and another program could take the file that it goes on writing to.
#[test]
fn an_image_whose_client_has_yet_to_come_back_after_a_restart_is_not_removed() {
    let mut lab = lab();
    let guest = Client::connect(&lab.a.nbd(), IMAGE).unwrap();
    wait_for("it is attached", END, || clients(&lab.a) == Some(1)).unwrap();
    lab.a.kill();
    lab.a.start();
    drop(guest);
    is_awaited(&lab, std::process::id());
    let guest = Client::connect(&lab.a.nbd(), IMAGE).unwrap();
    wait_for("it is back", END, || clients(&lab.a) == Some(1)).unwrap();
    refused(&lab.a, &["images", "remove", IMAGE], CONFLICT, &["a client is attached"]);
    drop(guest);
    wait_for("it has left", END, || clients(&lab.a) == Some(0)).unwrap();
    let removed = lab.a.dray(&["images", "remove", IMAGE]);
    assert!(removed.status.success(), "who has left is not waited for: {removed:?}");
}

/// One that has left for good while no agent saw it has to be ended.
#[test]
fn an_image_is_removed_when_the_client_that_was_waited_for_has_ended() {
    let mut lab = lab();
    let uri = format!("nbd+unix:///{IMAGE}?socket={}", lab.a.nbd().display());
    let mut tool = Command::new("qemu-io");
    tool.args(["-f", "raw", &uri]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut tool = tool.spawn().unwrap();
    // It prompts when it has opened the image; one that has not would end with the agent.
    tool.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    // Before its first request is answered. It is counted a moment earlier.
    let (note, pid) = (lab.a.dir.join(format!("state/images/{IMAGE}.clients")), tool.id());
    let is_noted = || {
        std::fs::read(&note).is_ok_and(|all| all.windows(4).any(|part| part == pid.to_le_bytes()))
    };
    wait_for("it is noted", END, is_noted).unwrap();
    lab.a.kill();
    lab.a.start();
    is_awaited(&lab, tool.id());
    tool.kill().unwrap();
    tool.wait().unwrap();
    let removed = lab.a.dray(&["images", "remove", IMAGE]);
    assert!(removed.status.success(), "{removed:?}");
}

/// At the disk that it had when the image left it would wait for ever.
#[test]
fn a_client_that_was_idle_while_its_image_left_and_came_back_finds_it_again() {
    let lab = lab();
    let mut idle = Client::connect(&lab.a.nbd(), IMAGE).unwrap();
    migrate(&lab, &[]);
    let back = lab.b.dray(&["migrate", "--image", IMAGE, "--to", "hosta"]);
    assert!(back.status.success(), "{back:?}");
    let owned = || lab.a.image(IMAGE).is_some_and(|image| image["state"] == "owner");
    wait_for("the return", END, owned).unwrap();
    let answer = idle.request(READ, 7 * BLOCK, BLOCK as u32, &[], &|| true);
    assert!(
        matches!(answer, Err(Fault::Lost)),
        "it is cut off, and not told of an error: {answer:?}"
    );
    let mut again = Client::connect(&lab.a.nbd(), IMAGE).unwrap();
    assert!(write(&mut again, 7, 2));
    again.request(FLUSH, 0, 0, &[], &|| true).unwrap();
    assert_eq!(read(&lab.a, 7), content(7, 2));
}

/// Its name is not for the peer either.
#[test]
fn a_copy_in_a_pool_that_a_peer_may_not_use_is_left_alone() {
    let mut lab = Lab::new();
    let mut c = lab.third();
    let other = lab.dir.path().join("other");
    std::fs::create_dir(&other).unwrap();
    let text = std::fs::read_to_string(lab.b.config()).unwrap();
    let (before, hostc) = text.rsplit_once("[[peer]]").unwrap();
    let pool = format!("[[pool]]\nname = \"other\"\npath = \"{}\"\n", other.display());
    let hostc = hostc.replace("pools = [\"p\"]", "pools = [\"other\"]");
    std::fs::write(lab.b.config(), format!("{before}[[peer]]{hostc}{pool}")).unwrap();
    guest::make_image(&lab.b.pool().join(IMAGE), BLOCKS / 16);
    lab.start();
    c.start();
    lab.b.add(IMAGE);
    let go = |from: &Host, to: &str| {
        let output = from.dray(&["migrate", "--image", IMAGE, "--to", to]);
        assert!(output.status.success(), "{output:?}");
    };
    go(&lab.b, "hosta");
    go(&lab.a, "hostc");
    let args = ["migrate", "--image", IMAGE, "--to", "hostb", "--pool", "other"];
    refused(&c, &args, CONFLICT, &["exists"]);
    assert_eq!(lab.b.image(IMAGE).unwrap()["state"], "replica", "it has kept its name");
    assert_eq!(c.image(IMAGE).unwrap()["state"], "owner");
}

/// What an earlier image has left has the name that the copy here must get at the handover.
#[test]
fn an_image_whose_copy_could_not_get_its_name_stays() {
    let lab = lab();
    let orphan = lab.a.pool().join(format!(".{IMAGE}.dray-replica-2"));
    std::fs::write(&orphan, [9; 4096]).unwrap();
    let args = ["migrate", "--image", IMAGE, "--to", "hostb"];
    let said = lab.a.dray(&args);
    let text = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(!said.status.success() && text.contains("dray-replica-2"), "{text}");
    assert_eq!(lab.a.image(IMAGE).unwrap()["state"], "owner");
    assert_eq!(read(&lab.a, 7), content(7, guest::first_version(7, BLOCKS / 16)));
    std::fs::remove_file(&orphan).unwrap();
    migrate(&lab, &[]);
}
