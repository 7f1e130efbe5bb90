//! Writes that a sync has lost: each client that may have written them hears of it once, wherever the image
//! goes, and an image whose loss nobody has heard does not move.

use crate::guest;
use crate::lab::{Host, Lab, wait_for};
use crate::mounts::{Loop, Mount, break_behind};
use crate::nbd::{Client, FLUSH, Fault, LEAVE, WRITE};
use crate::refusals::failed;
use dray_testkit::losses::write_loss;
use serde_json::Value;
use std::fs::File;
use std::process::Command;
use std::time::Duration;

const IMAGE: &str = "disk.img";
const OTHER: &str = "other.img";
const BLOCKS: u64 = 256;
const END: Duration = Duration::from_secs(30);
/// Exit code of `data_at_risk`.
const AT_RISK: i32 = 15;

/// Two hosts; an earlier process of the first has written down that writes of one of its images are lost,
/// and the guest was not told.
fn with_a_loss() -> Lab {
    let mut lab = Lab::new();
    for name in [IMAGE, OTHER] {
        guest::make_image(&lab.a.pool().join(name), BLOCKS);
    }
    lab.start();
    [IMAGE, OTHER].iter().for_each(|name| lab.a.add(name));
    lab.a.kill();
    write_loss(&lab.a.dir.join("state"), IMAGE, "flushing: the cable was pulled");
    lab.a.start();
    lab
}

fn shown(host: &Host) -> Value {
    host.image(IMAGE).unwrap()["write_back_error"].clone()
}

fn flush(host: &Host) -> Result<(), Fault> {
    let before = host.image(IMAGE).unwrap()["clients"].clone();
    let mut client = Client::connect(&host.nbd(), IMAGE).unwrap();
    let flushed = client.flush();
    client.last(LEAVE);
    drop(client);
    wait_for("its end", END, || host.image(IMAGE).unwrap()["clients"] == before).unwrap();
    flushed
}

/// More than the device of `on_a_broken_device` has place for.
const MANY_MIB: u64 = 16;

/// A host that loses some of what is written to its image from now on.
fn on_a_broken_device() -> Option<(Lab, Mount)> {
    let mut lab = Lab::new();
    let (device, file) = Loop::in_memory(64 << 20)?;
    let pool = Mount::ext2(&lab.a.pool(), device)?;
    let image = pool.path.join(IMAGE);
    std::fs::write(&image, vec![1; (MANY_MIB << 20) as usize]).unwrap();
    File::open(&image).unwrap().sync_all().unwrap();
    lab.a.start();
    lab.a.add(IMAGE);
    break_behind(&file, 12 << 20);
    Some((lab, pool))
}

fn writer(host: &Host) -> Client {
    let mut client = Client::connect(&host.nbd(), IMAGE).unwrap();
    let data = vec![2; 1 << 20];
    for at in 0..MANY_MIB {
        client.request(WRITE, at << 20, 1 << 20, &data, &|| true).unwrap();
    }
    client
}

/// It is told now, which is enough, and nobody else is.
fn is_told(host: &Host, client: &mut Client) {
    assert_eq!(shown(host)["told"], false);
    let flushed = client.flush();
    assert!(matches!(flushed, Err(Fault::Error(_))), "{flushed:?}");
    let met = losses(host);
    hears(host, client);
    is_over(host, met, flush(host));
    assert!(losses(host) > met || shown(host)["told"] == true);
}

/// How many losses the image has met.
fn losses(host: &Host) -> u64 {
    shown(host)["count"].as_u64().unwrap()
}

/// It was told. Its next flush may be there before the server knows that the answer is out; the one after that says
/// that it has heard.
fn hears(host: &Host, client: &mut Client) {
    let met = losses(host);
    (0..2).for_each(|_| is_over(host, met, client.flush()));
}

/// The flush succeeds, unless another loss was met: the device goes on losing what the file system writes to it.
fn is_over(host: &Host, met: u64, flushed: Result<(), Fault>) {
    assert!(flushed.is_ok() || losses(host) > met, "{flushed:?}, {}", shown(host));
}

#[test]
fn a_client_that_looks_on_does_not_take_a_loss_away_from_the_one_that_wrote() {
    let Some((mut lab, _pool)) = on_a_broken_device() else { return };
    let mut guest = writer(&lab.a);
    assert!(flush(&lab.a).is_err(), "it meets the loss");
    is_told(&lab.a, &mut guest);
    lab.a.kill();
}

/// A generation that has ended says that its blocks are unchanged: what a backup reads of it has to be on the disk
/// before anybody hears of it.
#[test]
fn a_backup_of_what_the_disk_has_lost_ends_no_generation() {
    let Some((mut lab, _pool)) = on_a_broken_device() else { return };
    let mut guest = writer(&lab.a);
    let url = format!("file://{}", lab.a.dir.join("repository").display());
    assert!(lab.a.dray(&["backups", "init", &url]).status.success());
    let refused = lab.a.dray(&["backup", IMAGE, "--to", &url]);
    assert!(!refused.status.success(), "{refused:?}");
    let listed = lab.a.dray(&["--json", "backups", "list", &url]);
    assert!(listed.status.success(), "{listed:?}");
    assert!(!String::from_utf8_lossy(&listed.stdout).contains(IMAGE), "{listed:?}");
    let line = lab.a.image(IMAGE).unwrap()["generation"]["number"].clone();
    assert_eq!(line, 1, "the first generation continues");
    is_told(&lab.a, &mut guest);
    lab.a.kill();
}

#[test]
fn a_second_connection_does_not_take_a_loss_away_from_the_first() {
    let Some((mut lab, _pool)) = on_a_broken_device() else { return };
    let mut guest = writer(&lab.a);
    let mut second = Client::connect(&lab.a.nbd(), IMAGE).unwrap();
    second.flush().unwrap_err();
    hears(&lab.a, &mut second);
    is_told(&lab.a, &mut guest);
    lab.a.kill();
}

#[test]
fn a_guest_that_was_cut_off_while_it_flushed_is_told_when_it_comes_back() {
    let Some((mut lab, _pool)) = on_a_broken_device() else { return };
    let mut guest = writer(&lab.a);
    guest.last(FLUSH);
    wait_for("the loss", END, || !shown(&lab.a).is_null()).unwrap();
    drop(guest);
    are_gone(&lab.a);
    let mut guest = Client::connect(&lab.a.nbd(), IMAGE).unwrap();
    is_told(&lab.a, &mut guest);
    lab.a.kill();
}

#[test]
fn each_of_two_guests_that_were_cut_off_is_told_though_the_first_has_heard() {
    let Some((mut lab, _pool)) = on_a_broken_device() else { return };
    let guests = [writer(&lab.a), writer(&lab.a)];
    assert!(flush(&lab.a).is_err(), "it meets the loss");
    drop(guests);
    are_gone(&lab.a);
    let mut first = Client::connect(&lab.a.nbd(), IMAGE).unwrap();
    first.flush().unwrap_err();
    hears(&lab.a, &mut first);
    first.last(LEAVE);
    drop(first);
    are_gone(&lab.a);
    let mut second = Client::connect(&lab.a.nbd(), IMAGE).unwrap();
    is_told(&lab.a, &mut second);
    lab.a.kill();
}

fn are_gone(host: &Host) {
    wait_for("the end", END, || host.image(IMAGE).unwrap()["clients"] == 0).unwrap();
}

/// The image goes from one host to the other, and both are done with it.
fn go(from: &Host, to: &Host, name: &str) {
    let output = from.dray(&["migrate", "--image", IMAGE, "--to", name]);
    assert!(output.status.success(), "{output:?}");
    wait_for("the end", END, || {
        let whole = to.image(IMAGE).is_some_and(|image| image["missing_blocks"] == 0);
        whole && from.open_migrations() + to.open_migrations() == 0
    })
    .unwrap();
}

#[test]
fn a_loss_is_shown_until_its_guest_was_told_and_after_that() {
    let lab = with_a_loss();
    let text = || String::from_utf8_lossy(&lab.a.dray(&["images"]).stdout).into_owned();
    let before = shown(&lab.a);
    assert_eq!((&before["count"], &before["told"]), (&1.into(), &false.into()));
    assert!(
        text().contains("the cable was pulled") && text().contains("does not know yet"),
        "{}",
        text()
    );
    assert!(lab.a.image(OTHER).unwrap()["write_back_error"].is_null());
    let flushed = flush(&lab.a);
    assert!(matches!(flushed, Err(Fault::Error(_))), "{flushed:?}");
    assert_eq!(shown(&lab.a)["told"], true);
    assert!(text().contains("check the guest's data"), "{}", text());
}

/// Nobody flushes what has no guest: it does not try for ever.
#[test]
fn an_image_without_a_guest_whose_loss_nobody_heard_does_not_move_and_says_what_to_do() {
    let lab = with_a_loss();
    let args = ["migrate", "--image", IMAGE, "--to", "hostb"];
    let output = lab.a.dray(&args);
    failed(&args, &output, AT_RISK, &["the cable was pulled", "qemu-io -c flush", "dray resume"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let uri = said.split('\'').find(|part| part.starts_with("nbd+unix:")).unwrap();
    let noted = Command::new("qemu-io").args(["-f", "raw", "-c", "flush", uri]).output().unwrap();
    assert!(!noted.status.success(), "{noted:?}");
    assert_eq!(shown(&lab.a)["told"], true);
    go(&lab.a, &lab.b, "hostb");
}

/// A larger export would know nothing of the loss.
#[test]
fn an_image_whose_loss_nobody_heard_does_not_grow() {
    let lab = with_a_loss();
    let size = (2 * BLOCKS * guest::BLOCK).to_string();
    let args = ["resize", IMAGE, &size];
    failed(&args, &lab.a.dray(&args), AT_RISK, &["the cable was pulled", "`sync`"]);
    assert!(flush(&lab.a).is_err());
    let grown = lab.a.dray(&args);
    assert!(grown.status.success(), "{grown:?}");
}

/// It was told before the image left: what comes back is durable.
#[test]
fn a_loss_that_was_told_is_over_when_the_image_has_moved() {
    let mut lab = with_a_loss();
    assert!(flush(&lab.a).is_err());
    go(&lab.a, &lab.b, "hostb");
    lab.a.kill();
    lab.a.start();
    go(&lab.b, &lab.a, "hosta");
    assert!(shown(&lab.a).is_null(), "{}", shown(&lab.a));
    flush(&lab.a).unwrap();
}
