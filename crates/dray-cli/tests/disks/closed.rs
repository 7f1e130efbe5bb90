//! Exports that nobody vouches for: nothing is served of them, whoever was attached waits, whoever is
//! new hears why, every other image is served, and it heals by itself when the cause goes.

use crate::case::{Case, IMAGE};
use crate::guest::{self, BLOCK, first_hole};
use crate::lab::{Host, Lab, read_record, wait_for, write_record};
use crate::mounts::Mount;
use crate::moves::SLOW;
use crate::nbd::{Client, FLUSH, Fault, READ, WRITE};
use crate::refusals::{CONFLICT, refused};
use std::cell::Cell;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// What is to wait has not been answered after this.
const WAITS: Duration = Duration::from_millis(700);
/// What heals by itself is healed by then.
const HEALS: Duration = Duration::from_secs(15);
/// A new client is not kept waiting longer than this.
const HELD: Duration = Duration::from_secs(40);
/// A block with data that the guest of a migration leaves alone.
const ALONE: u64 = 16_400;
/// Blocks of the images of this file.
const BLOCKS: u64 = 256;

/// Waits for an answer until `limit` is over.
fn within(limit: Duration) -> impl Fn() -> bool {
    let began = Instant::now();
    move || began.elapsed() < limit
}

/// What a process that was never attached sees of an export.
fn stranger(host: &Host, image: &str) -> Output {
    let uri = format!("nbd+unix:///{image}?socket={}", host.nbd().display());
    Command::new("qemu-img").args(["info", &uri]).output().unwrap()
}

/// That a stranger is refused, and hears all of `words`.
fn is_refused(host: &Host, image: &str, words: &[&str]) {
    let began = Instant::now();
    let seen = stranger(host, image);
    let text = String::from_utf8_lossy(&seen.stderr).into_owned();
    assert!(!seen.status.success() && began.elapsed() < HELD, "{seen:?}");
    words.iter().for_each(|word| assert!(text.contains(word), "'{word}' is not in: {text}"));
}

/// Why the host shows the image as closed.
fn why_closed(host: &Host, image: &str) -> Option<String> {
    Some(host.image(image)?["closed"]["why"].as_str()?.to_owned())
}

fn await_open(host: &Host, image: &str) {
    let open = || host.image(image).is_some_and(|image| image["closed"].is_null());
    wait_for("the export", HEALS, open).unwrap();
}

/// A host that serves `disk.img` and `other.img`, and a client of the first that has read from it.
fn two_images() -> (Lab, Client) {
    let mut lab = Lab::new();
    for name in [IMAGE, "other.img"] {
        guest::make_image(&lab.a.pool().join(name), BLOCKS);
    }
    lab.a.start();
    [IMAGE, "other.img"].iter().for_each(|name| lab.a.add(name));
    let mut client = Client::connect(&lab.a.nbd(), IMAGE).unwrap();
    read(&mut client, 0, HEALS).unwrap();
    (lab, client)
}

fn read(client: &mut Client, block: u64, limit: Duration) -> Result<Vec<u8>, Fault> {
    client.request(READ, block * BLOCK, BLOCK as u32, &[], &within(limit))
}

/// That reads, writes and flushes of who was attached are neither answered nor refused.
fn everything_waits(host: &Host, image: &str) {
    // What is there already: a write that waits may be done when the export opens. It comes last,
    // because a client that comes again waits until its earlier writes are over.
    let data = guest::content(ALONE, 1);
    for (kind, len, data) in
        [(READ, BLOCK as u32, &[][..]), (FLUSH, 0, &[][..]), (WRITE, BLOCK as u32, &data[..])]
    {
        let mut client = Client::connect(&host.nbd(), image).unwrap();
        let answer = client.request(kind, ALONE * BLOCK, len, data, &within(WAITS));
        assert!(matches!(answer, Err(Fault::Lost)), "request {kind}: {answer:?}");
    }
}

/// Its guest would read zeros where its blocks were.
#[test]
fn a_file_that_has_become_shorter_is_not_served() {
    for orderly in [true, false] {
        let (mut lab, client) = two_images();
        let path = lab.a.pool().join(IMAGE);
        if orderly {
            lab.a.stop()
        } else {
            lab.a.kill()
        }
        drop(client);
        let held = std::fs::read(&path).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_len(BLOCKS / 2 * BLOCK).unwrap();
        lab.a.start();
        let why = format!(
            "its file has {} bytes, and the image has {}",
            BLOCKS / 2 * BLOCK,
            BLOCKS * BLOCK
        );
        assert_eq!(why_closed(&lab.a, IMAGE), Some(why));
        assert!(stranger(&lab.a, "other.img").status.success(), "the other image is served");
        let mut client = Client::connect(&lab.a.nbd(), IMAGE).unwrap();
        assert!(
            matches!(read(&mut client, 200, WAITS), Err(Fault::Lost)),
            "who was attached waits"
        );
        assert_eq!(file.metadata().unwrap().len(), BLOCKS / 2 * BLOCK, "nothing was written to it");
        // It is put back.
        std::fs::write(&path, &held).unwrap();
        await_open(&lab.a, IMAGE);
        let mut client = Client::connect(&lab.a.nbd(), IMAGE).unwrap();
        assert_eq!(
            read(&mut client, 200, HEALS).unwrap(),
            held[200 * BLOCK as usize..][..BLOCK as usize]
        );
        // Or it is the right one.
        drop(client);
        lab.a.stop();
        file.set_len(BLOCKS / 2 * BLOCK).unwrap();
        lab.a.start();
        let removed = lab.a.dray(&["images", "remove", IMAGE]);
        assert!(removed.status.success(), "{removed:?}");
        assert!(lab.a.image(IMAGE).is_none());
        lab.a.add(IMAGE);
        assert_eq!(lab.a.image(IMAGE).unwrap()["size"], BLOCKS / 2 * BLOCK);
        assert!(stranger(&lab.a, IMAGE).status.success());
    }
}

#[test]
fn a_file_that_is_not_there_yet_is_waited_for() {
    let (mut lab, _) = two_images();
    let (path, away) = (lab.a.pool().join(IMAGE), lab.dir.path().join("away"));
    lab.a.stop();
    std::fs::rename(&path, &away).unwrap();
    lab.a.start();
    assert!(why_closed(&lab.a, IMAGE).unwrap().contains("No such file"));
    assert!(stranger(&lab.a, "other.img").status.success(), "the other image is served");
    let mut client = Client::connect(&lab.a.nbd(), IMAGE).unwrap();
    let back = Cell::new(false);
    let began = Instant::now();
    let wait = || {
        if began.elapsed() > WAITS && !back.replace(true) {
            std::fs::rename(&away, &path).unwrap();
        }
        began.elapsed() < HEALS
    };
    let found = client.request(READ, 0, BLOCK as u32, &[], &wait).unwrap();
    assert!(back.get(), "it was answered before the file was there");
    assert_eq!(found, guest::content(0, 1));
    await_open(&lab.a, IMAGE);
    assert!(stranger(&lab.a, IMAGE).status.success());
    lab.a.kill();
}

#[test]
fn the_name_of_a_file_that_is_not_there_stays_taken() {
    let (mut lab, _) = two_images();
    let path = lab.a.pool().join(IMAGE);
    lab.a.stop();
    std::fs::rename(&path, lab.dir.path().join("away")).unwrap();
    guest::make_image(&lab.a.pool().join("third.img"), BLOCKS);
    lab.a.start();
    let third = lab.a.pool().join("third.img");
    let args = ["images", "add", IMAGE, third.to_str().unwrap()];
    refused(&lab.a, &args, CONFLICT, &["exists already"]);
    refused(&lab.a, &["resize", IMAGE, "8MiB"], CONFLICT, &["No such file"]);
    assert!(why_closed(&lab.a, IMAGE).is_some());
    lab.a.kill();
}

#[test]
fn a_damaged_record_closes_its_image_and_no_other() {
    let (mut lab, _) = two_images();
    lab.a.stop();
    let record = lab.a.dir.join(format!("state/images/{IMAGE}.json"));
    let whole = std::fs::read(&record).unwrap();
    std::fs::write(&record, &whole[..whole.len() / 2]).unwrap();
    lab.a.start();
    is_refused(&lab.a, IMAGE, &["is closed", "record cannot be read"]);
    assert_eq!(lab.a.image(IMAGE).unwrap()["state"], "unknown");
    assert!(stranger(&lab.a, "other.img").status.success());
    lab.a.stop();
    std::fs::write(&record, whole).unwrap();
    lab.a.start();
    assert!(stranger(&lab.a, IMAGE).status.success());
    lab.a.kill();
}

/// A migration whose target owns an image of which blocks are missing, with both agents running.
fn in_backfill() -> Case {
    let mut case = Case::begin_small(Lab::new());
    case.migrate("post-copy", Some(SLOW)).unwrap();
    case.await_shown("backfill").unwrap();
    let attached = || case.lab.b.image(IMAGE).is_some_and(|image| image["clients"] != 0);
    wait_for("the guest at the target", HEALS, attached).unwrap();
    case
}

/// The folder of the only migration of a host.
fn folder(host: &Host) -> std::path::PathBuf {
    let mut all = std::fs::read_dir(host.dir.join("state/migrations")).unwrap();
    all.next().unwrap().unwrap().path()
}

#[test]
fn a_target_with_a_damaged_journal_serves_no_zeros() {
    let mut case = in_backfill();
    guest::make_image(&case.lab.b.pool().join("other.img"), BLOCKS);
    case.lab.b.add("other.img");
    case.lab.b.kill();
    let journal = folder(&case.lab.b).join("target.journal");
    let whole = std::fs::read(&journal).unwrap();
    std::fs::write(&journal, b"not a journal at all, but long enough").unwrap();
    case.lab.b.start();
    everything_waits(&case.lab.b, IMAGE);
    let why = why_closed(&case.lab.b, IMAGE).unwrap();
    assert!(why.contains("cannot be brought back") && why.contains("journal"), "{why}");
    assert!(stranger(&case.lab.b, "other.img").status.success());
    // With the fault still there, once more.
    case.lab.b.kill();
    case.lab.b.start();
    everything_waits(&case.lab.b, IMAGE);
    std::fs::write(&journal, whole).unwrap();
    await_open(&case.lab.b, IMAGE);
    case.await_end().unwrap();
    case.lab.b.dray(&["images", "remove", "other.img"]);
    std::fs::remove_file(case.lab.b.pool().join("other.img")).unwrap();
    case.guest.shut_down().unwrap();
}

/// The file that names a migration is not there at a start: what is left of it stays, its images are closed, and it
/// goes on when the file is back. `host`: of which end.
fn waits_for_its_intent(host: impl Fn(&mut Lab) -> &mut Host, intent: &str) {
    let mut case = in_backfill();
    let folder = folder(host(&mut case.lab));
    let away = host(&mut case.lab).dir.join("away");
    host(&mut case.lab).kill();
    std::fs::rename(folder.join(intent), &away).unwrap();
    let before = std::fs::read_dir(&folder).unwrap().count();
    for _ in 0..2 {
        host(&mut case.lab).start();
        let host = host(&mut case.lab);
        everything_waits(host, IMAGE);
        assert_eq!(
            std::fs::read_dir(&folder).unwrap().count(),
            before,
            "nothing of it was removed"
        );
        let closed = host.image(IMAGE).unwrap()["closed"].to_string();
        assert!(closed.contains(intent) && closed.contains("put that file back"), "{closed}");
        host.kill();
    }
    host(&mut case.lab).start();
    std::fs::rename(&away, folder.join(intent)).unwrap();
    case.await_end().unwrap();
    assert_eq!(case.guest.complaint(), None);
    let versions = case.guest.shut_down().unwrap();
    guest::compare(&case.lab.b.pool().join(IMAGE), &versions).unwrap();
}

#[test]
fn a_target_whose_intent_is_lost_waits_for_it() {
    waits_for_its_intent(|lab| &mut lab.b, "target.json");
}

#[test]
fn a_source_whose_intent_is_lost_waits_for_it() {
    waits_for_its_intent(|lab| &mut lab.a, "source.json");
}

#[test]
fn a_source_that_has_handed_over_and_knows_its_peer_no_more_stays_parked() {
    let mut case = in_backfill();
    case.lab.a.stop();
    let config = case.lab.a.config();
    let named = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, named.replace("name = \"hostb\"", "name = \"hostx\"")).unwrap();
    case.lab.a.start();
    assert_eq!(case.lab.a.image(IMAGE).unwrap()["state"], "replica");
    is_refused(&case.lab.a, IMAGE, &["handed over"]);
    case.lab.a.stop();
    std::fs::write(&config, named).unwrap();
    case.lab.a.start();
    case.await_end().unwrap();
    let versions = case.guest.shut_down().unwrap();
    guest::compare(&case.lab.b.pool().join(IMAGE), &versions).unwrap();
}

#[test]
fn a_source_without_an_attempt_opens_with_its_disk_full_and_its_peer_gone() {
    let lab = Lab::new();
    let Some(state) = Mount::tmpfs(&lab.a.dir.join("state"), "size=4m") else { return };
    let mut case = Case::begin_small(lab);
    case.migrate("pre-copy", Some(SLOW)).unwrap();
    case.await_bytes(SLOW).unwrap();
    case.lab.b.kill();
    case.lab.a.kill();
    fill(&state.path.join("ballast"));
    case.lab.a.start();
    let before = case.guest.requests();
    wait_for("the guest", HEALS, || case.guest.requests() > before + 20).unwrap();
    assert_eq!(case.guest.complaint(), None);
    std::fs::remove_file(state.path.join("ballast")).unwrap();
    case.lab.b.start();
    case.await_end().unwrap();
    case.end().unwrap();
}

/// Fills a file system to the last byte.
fn fill(path: &Path) {
    let mut file = std::fs::File::create(path).unwrap();
    let mut piece = vec![1; 1 << 20];
    while !piece.is_empty() {
        // The error at the end is wanted.
        if std::io::Write::write_all(&mut file, &piece).is_err() {
            piece.truncate(piece.len() / 2);
        }
    }
}

#[test]
fn an_intent_of_another_migration_is_not_followed() {
    let mut case = in_backfill();
    case.lab.b.kill();
    let intent = folder(&case.lab.b).join("target.json");
    let text = read_record(&intent);
    let id = folder(&case.lab.b).file_name().unwrap().to_string_lossy().into_owned();
    let number = u128::from_str_radix(&id, 16).unwrap();
    let other = text.replace(&number.to_string(), &(number ^ 1).to_string());
    assert_ne!(other, text);
    write_record(&intent, &other);
    case.lab.b.start();
    assert!(why_closed(&case.lab.b, IMAGE).unwrap().contains("another migration"));
    everything_waits(&case.lab.b, IMAGE);
    write_record(&intent, &text);
    case.await_end().unwrap();
    let versions = case.guest.shut_down().unwrap();
    assert!(versions.contains_key(&first_hole(BLOCKS)));
    guest::compare(&case.lab.b.pool().join(IMAGE), &versions).unwrap();
}
