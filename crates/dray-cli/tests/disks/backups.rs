//! Backups of images that clients are writing to, and what is restored of them.
//!
//! A client keeps to a part of an image and remembers each of its requests with the times at which it
//! was sent and answered. What a backup holds must be what some of its requests, from the first one
//! on, leave behind, for all clients at the same moment.

use crate::lab::{Lab, wait_for};
use crate::mounts::Mount;
use crate::nbd::{Client, TRIM, WRITE, ZERO};
use serde_json::{Value, json};
use std::fmt::Display;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Bytes of a client's part: not a whole number of pieces.
const PART: u64 = 2_600_960;
/// Clients of an image.
const CLIENTS: u64 = 2;
const SIZE: u64 = PART * CLIENTS;

/// One request of a client.
struct Done {
    kind: u16,
    /// In its part.
    offset: u64,
    data: Vec<u8>,
    sent: u64,
    answered: u64,
}

impl Done {
    fn apply(&self, part: &mut [u8]) {
        let place = self.offset as usize..self.offset as usize + self.data.len();
        part[place].copy_from_slice(&self.data);
    }
}

/// Random numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// The next request: mostly writes, of half a block to 64 KiB.
fn next_request(random: &mut Random) -> (u16, u64, Vec<u8>) {
    let len = (random.next() % 128 + 1) * 512;
    let offset = random.next() % ((PART - len) / 512 + 1) * 512;
    match random.next() % 8 {
        0 => (ZERO, offset, vec![0; len as usize]),
        1 => (TRIM, offset, vec![0; len as usize]),
        _ => {
            let words = (0..len / 8).flat_map(|_| random.next().to_le_bytes());
            (WRITE, offset, words.collect())
        }
    }
}

/// A client that goes on until it is stopped.
struct Writer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Done>>,
}

impl Writer {
    fn start(lab: &Lab, image: &str, part: u64, clock: &Arc<AtomicU64>) -> Self {
        let (socket, image) = (lab.a.nbd(), image.to_owned());
        let (stop, clock) = (Arc::new(AtomicBool::new(false)), Arc::clone(clock));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut client = Client::connect(&socket, &image).unwrap();
            let mut random = Random(part * 7919 + image.len() as u64 * 31 + 1);
            let mut done = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                let (kind, offset, data) = next_request(&mut random);
                let written = if kind == WRITE { &data[..] } else { &[] };
                let sent = clock.fetch_add(1, Ordering::SeqCst);
                let at = part * PART + offset;
                client.request(kind, at, data.len() as u32, written, &|| true).unwrap();
                let answered = clock.fetch_add(1, Ordering::SeqCst);
                done.push(Done { kind, offset, data, sent, answered });
            }
            done
        });
        Self { stop, thread }
    }

    fn end(self) -> Vec<Done> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// The moments, as `(after, before)` on the clients' clock, at which a client's part was `seen`.
fn moments(start: &[u8], requests: &[Done], seen: &[u8]) -> Vec<(u64, u64)> {
    let mut part = start.to_vec();
    let block = |part: &[u8], nth: usize| {
        let from = nth * 512;
        part[from..(from + 512).min(part.len())] == seen[from..(from + 512).min(seen.len())]
    };
    let mut differ: std::collections::BTreeSet<usize> =
        (0..part.len().div_ceil(512)).filter(|&nth| !block(&part, nth)).collect();
    let mut found = Vec::new();
    let mut after = 0;
    for request in requests {
        if differ.is_empty() {
            found.push((after, request.answered));
        }
        request.apply(&mut part);
        let first = request.offset as usize / 512;
        for nth in first..first + request.data.len() / 512 {
            if block(&part, nth) {
                differ.remove(&nth)
            } else {
                differ.insert(nth)
            };
        }
        after = request.sent;
    }
    if differ.is_empty() {
        found.push((after, u64::MAX));
    }
    found
}

/// A moment at which all of them were so.
fn common(all: &[Vec<(u64, u64)>]) -> Option<u64> {
    let mut candidates: Vec<u64> = all.iter().flatten().map(|&(after, _)| after).collect();
    candidates.sort_unstable();
    // Just after a request was sent; the clock counts in whole numbers.
    let holds = |&at: &u64| {
        all.iter().all(|one| one.iter().any(|&(after, before)| after <= at && at < before))
    };
    candidates.into_iter().find(holds)
}

fn read(path: &Path) -> Vec<u8> {
    let file = std::fs::File::open(path).unwrap();
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// An image with some content, served by the first host; what it holds.
pub fn image(lab: &Lab, name: &str) -> Vec<u8> {
    let mut bytes = vec![0; SIZE as usize];
    let mut random = Random(name.len() as u64 * 77 + 3);
    for (_, chunk) in bytes.chunks_mut(4096).enumerate().filter(|(nth, _)| nth % 3 > 0) {
        chunk.chunks_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
    }
    std::fs::write(lab.a.pool().join(name), &bytes).unwrap();
    lab.a.add(name);
    bytes
}

pub fn repository(lab: &Lab) -> String {
    let url = format!("file://{}", lab.dir.path().join("repository").display());
    lab.a.ask(json!({"backup-init": {"at": url}})).unwrap();
    url
}

pub fn restore(lab: &Lab, url: &str, image: &str, generation: impl Display, name: &str) -> Vec<u8> {
    let command = json!({"restore": {"repository": {"at": url}, "image": image,
        "generation": generation.to_string(), "name": name}});
    let done = lab.a.ask(command).unwrap();
    let path = Path::new(done["path"].as_str().unwrap());
    let bytes = read(path);
    lab.a.ask(json!({"image-remove": {"name": name}})).unwrap();
    std::fs::remove_file(path).unwrap();
    bytes
}

#[test]
fn every_generation_is_its_moment_over_two_images_that_are_being_written() {
    let mut lab = Lab::new();
    lab.a.start();
    let url = repository(&lab);
    let names = ["root.img", "data.img"];
    let starts = names.map(|name| image(&lab, name));
    let clock = Arc::new(AtomicU64::new(1));
    let writers: Vec<_> = names
        .iter()
        .flat_map(|name| {
            (0..CLIENTS).map(|part| Writer::start(&lab, name, part, &clock)).collect::<Vec<_>>()
        })
        .collect();
    let mut generations = Vec::new();
    for nth in 0..6_u64 {
        std::thread::sleep(Duration::from_millis(30));
        // Slowly enough that the clients overwrite what was not read yet.
        let rate = json!({"bytes_per_second": 20 << 20});
        let command = json!({"backup": {"images": names, "to": url, "bandwidth": rate}});
        let before = clock.load(Ordering::SeqCst);
        let done = lab.a.ask(command).unwrap();
        let after = clock.load(Ordering::SeqCst);
        for image in done["images"].as_array().unwrap() {
            assert_eq!(image["generation"]["number"], nth + 1);
            assert_eq!(image["parent"].is_null(), nth == 0, "{image}");
            assert_eq!(image["full_because"].is_null(), nth > 0, "{image}");
        }
        assert!(done["quiet_ms"].as_f64().unwrap() < 1000.0);
        generations.push((nth + 1, before, after, done));
    }
    let requests: Vec<_> = writers.into_iter().map(Writer::end).collect();
    let aside: u64 = generations
        .iter()
        .flat_map(|(.., done)| done["images"].as_array().unwrap())
        .map(|image| image["kept_aside_bytes"].as_u64().unwrap())
        .sum();
    let kinds = |kind| requests.iter().flatten().any(|done| done.kind == kind);
    assert!(kinds(WRITE) && kinds(ZERO) && kinds(TRIM));
    for (generation, before, after, _) in generations {
        let mut all = Vec::new();
        for (nth, name) in names.iter().enumerate() {
            let bytes = restore(&lab, &url, name, generation, "restored");
            for part in 0..CLIENTS {
                let place = (part * PART) as usize..((part + 1) * PART) as usize;
                let requests = &requests[nth * CLIENTS as usize + part as usize];
                let found = moments(&starts[nth][place.clone()], requests, &bytes[place]);
                assert!(!found.is_empty(), "generation {generation} of {name}: never was so");
                all.push(found);
            }
        }
        let moment =
            common(&all).unwrap_or_else(|| panic!("{generation}: not one moment: {all:?}"));
        assert!((before..=after).contains(&moment.max(before)), "{moment} {before} {after}");
        let during =
            all.iter().all(|one| one.iter().any(|&(from, to)| from <= after && to >= before));
        assert!(during, "generation {generation} is not of the time of its backup: {all:?}");
    }
    assert!(aside > 0, "no client ever overwrote what was not read yet");
    let verified = lab
        .a
        .ask(json!({"backup-verify": {"repository": {"at": url}, "read_data": true}}))
        .unwrap();
    assert_eq!((&verified["backups"], &verified["damaged"]), (&json!(12), &json!([])));
    // All but the newest two of each go, and with them nothing that these need.
    let prune = json!({"backup-prune": {"repository": {"at": url}, "keep_last": 2}});
    let pruned = lab.a.ask(prune).unwrap();
    assert_eq!((&pruned["kept"], pruned["removed"].as_array().map(Vec::len)), (&json!(4), Some(8)));
    lab.a.ask(json!({"backup-gc": {"at": url}})).unwrap();
    let verified = lab
        .a
        .ask(json!({"backup-verify": {"repository": {"at": url}, "read_data": true}}))
        .unwrap();
    assert_eq!((&verified["backups"], &verified["damaged"]), (&json!(4), &json!([])));
    let line = lab.a.ask(json!({"lineage": {"image": names[0]}})).unwrap();
    let past = line["past"].as_array().unwrap();
    assert!(past.iter().all(|one| one["reason"] == "backup" && one["backups"] == json!([url])));
}

/// Writes some blocks of an image of which nobody else writes anything.
fn scribble(lab: &Lab, name: &str, bytes: &mut [u8], seed: u64) {
    let mut client = Client::connect(&lab.a.nbd(), name).unwrap();
    let mut random = Random(seed * 977 + 5);
    for _ in 0..40 {
        let (kind, offset, data) = next_request(&mut random);
        let written = if kind == WRITE { &data[..] } else { &[] };
        client.request(kind, offset, data.len() as u32, written, &|| true).unwrap();
        bytes[offset as usize..offset as usize + data.len()].copy_from_slice(&data);
    }
}

#[test]
fn an_agent_may_die_at_any_step_of_a_backup() {
    const STEPS: [(&str, u64); 7] = [
        ("Backup-Moment", 0),
        ("Backup-Turned", 1),
        ("Backup-Committed", 1),
        ("Backup-Copy:0", 1),
        ("Backup-Copy:2", 1),
        ("Backup-Finish", 1),
        ("Backup-Finished", 1),
    ];
    let mut lab = Lab::new();
    lab.a.start();
    let url = repository(&lab);
    let mut bytes = image(&lab, "disk.img");
    let backup = json!({"backup": {"images": ["disk.img"], "to": url}});
    let first = lab.a.ask(backup.clone()).unwrap();
    let mut kept =
        vec![(first["images"][0]["generation"]["number"].as_u64().unwrap(), bytes.clone())];
    for (nth, (step, _)) in STEPS.iter().enumerate() {
        lab.a.stop();
        lab.a.start_with(&[("DRAY_ABORT_BEFORE", step)]);
        scribble(&lab, "disk.img", &mut bytes, nth as u64 + 1);
        assert!(lab.a.ask(backup.clone()).is_err(), "{step} never came");
        wait_for("the death", Duration::from_secs(10), || lab.a.has_died()).unwrap();
        lab.a.start();
        scribble(&lab, "disk.img", &mut bytes, nth as u64 + 101);
        assert_eq!(read(&lab.a.pool().join("disk.img")), bytes, "{step}: the image");
        let done = lab.a.ask(backup.clone()).unwrap();
        let image = &done["images"][0];
        assert!(!image["parent"].is_null(), "{step}: {image}");
        kept.push((image["generation"]["number"].as_u64().unwrap(), bytes.clone()));
    }
    for (number, bytes) in &kept {
        let restored = restore(&lab, &url, "disk.img", *number, "restored");
        assert!(restored == *bytes, "generation {number} is not what it was");
    }
    let verify = json!({"backup-verify": {"repository": {"at": url}, "read_data": true}});
    assert_eq!(lab.a.ask(verify).unwrap()["damaged"], json!([]));
    // The one that died after its end is there as well.
    let list = lab.a.ask(json!({"backups": {"repository": {"at": url}}})).unwrap();
    assert_eq!(list["backups"].as_array().unwrap().len(), kept.len() + 1);
}

/// The restore dies when its file has its name, and somebody writes to that before the agent is back.
fn a_file_that_somebody_uses_by_then_is_named(lab: &mut Lab, again: &Value) {
    lab.a.stop();
    lab.a.start_with(&[("DRAY_ABORT_BEFORE", "Restore-Register")]);
    assert!(lab.a.ask(again.clone()).is_err(), "it dies");
    wait_for("the death", Duration::from_secs(10), || lab.a.has_died()).unwrap();
    let file = lab.a.pool().join("new");
    std::fs::File::options().write(true).open(&file).unwrap().write_all_at(&[7; 512], 0).unwrap();
    lab.a.start();
    assert_eq!(&read(&file)[..512], [7; 512], "it is somebody's");
    let troubles = lab.a.ask(json!("info")).unwrap()["troubles"].clone();
    let hint = troubles[0]["hint"].as_str().unwrap_or_default();
    assert!(hint.contains("`dray images add new "), "{troubles}");
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn a_restore_that_dies_or_fails_leaves_nothing() {
    let mut lab = Lab::new();
    lab.a.start();
    let url = repository(&lab);
    let bytes = image(&lab, "disk.img");
    lab.a.ask(json!({"backup": {"images": ["disk.img"], "to": url}})).unwrap();
    let again = json!({"restore": {"repository": {"at": url}, "image": "disk.img", "name": "new"}});
    let mut unknown = again.clone();
    unknown["restore"]["generation"] = json!("77");
    let hint = lab.a.ask(unknown).unwrap_err()["hint"].to_string();
    assert!(hint.contains(&format!("dray backups list {url}")), "{hint}");
    let nowhere =
        json!({"backup-init": {"at": format!("file://{}/none/below", lab.dir.path().display())}});
    let hint = lab.a.ask(nowhere).unwrap_err()["hint"].to_string();
    assert!(
        hint.contains("mount its file system") && !lab.dir.path().join("none").exists(),
        "{hint}"
    );
    for step in ["Restore-Create", "Restore-Finish", "Restore-Register"] {
        lab.a.stop();
        lab.a.start_with(&[("DRAY_ABORT_BEFORE", step)]);
        assert!(lab.a.ask(again.clone()).is_err(), "{step} never came");
        wait_for("the death", Duration::from_secs(10), || lab.a.has_died()).unwrap();
        lab.a.start();
        if step == "Restore-Register" {
            // All of it was there under its name, and somebody may have begun to rely on that.
            assert_eq!(lab.a.image("new").unwrap()["state"], "owner");
            assert!(read(&lab.a.pool().join("new")) == bytes);
            lab.a.ask(json!({"image-remove": {"name": "new"}})).unwrap();
            std::fs::remove_file(lab.a.pool().join("new")).unwrap();
        }
        assert_eq!(lab.a.files(), ["disk.img"], "{step}");
        assert!(lab.a.image("new").is_none());
    }
    a_file_that_somebody_uses_by_then_is_named(&mut lab, &again);
    // A pack that is gone.
    let packs = lab.dir.path().join("repository/packs");
    let hidden = lab.dir.path().join("packs");
    std::fs::rename(&packs, &hidden).unwrap();
    let why = lab.a.ask(again.clone()).unwrap_err();
    assert!(why["what"].as_str().unwrap().contains("cannot restore"), "{why}");
    assert_eq!(why["kind"], "verification", "the backup is there, and a part of it is not: {why}");
    let said = (why["why"].to_string(), why["hint"].to_string());
    assert!(said.0.contains(": it does not exist") && said.1.contains("another backup"), "{why}");
    assert_eq!(lab.a.files(), ["disk.img"]);
    std::fs::rename(&hidden, &packs).unwrap();
    let done = lab.a.ask(again.clone()).unwrap();
    assert!(read(Path::new(done["path"].as_str().unwrap())) == bytes);
    let (old, new) = (lab.a.image("disk.img").unwrap(), lab.a.image("new").unwrap());
    assert_eq!(new["state"], "owner");
    assert_ne!(new["id"], old["id"], "an image of its own");
    let why = lab.a.ask(again).unwrap_err();
    assert_eq!(why["kind"], "conflict", "{why}");
}

#[test]
fn nothing_disturbs_a_backup_and_it_can_be_ended() {
    let mut lab = Lab::new();
    lab.start();
    let url = repository(&lab);
    let bytes = image(&lab, "disk.img");
    let (api, to) = (lab.a.api(), url.clone());
    let slow = std::thread::spawn(move || {
        let rate = json!({"bytes_per_second": 200_000});
        crate::lab::ask(
            &api,
            json!({"backup": {"images": ["disk.img"], "to": to, "bandwidth": rate}}),
        )
    });
    let running = || {
        let list = lab.a.ask(json!({"backups": {}})).unwrap();
        list["running"].as_array().is_some_and(|running| !running.is_empty())
    };
    wait_for("the backup", Duration::from_secs(10), running).unwrap();
    let refused = |command: Value| {
        let why = lab.a.ask(command).unwrap_err();
        assert_eq!(why["kind"], "conflict", "{why}");
        assert!(why["why"].as_str().unwrap().contains("is being backed up"), "{why}");
    };
    refused(json!({"backup": {"images": ["disk.img"], "to": url}}));
    refused(json!({"migrate": {"subject": {"images": {"names": ["disk.img"]}}, "to": "hostb"}}));
    refused(json!({"image-remove": {"name": "disk.img"}}));
    refused(json!({"resize": {"image": "disk.img", "size": 1_u64 << 30}}));
    assert_eq!(lab.a.image("disk.img").unwrap()["migration"], Value::Null);
    lab.a.ask(json!({"backup-cancel": {"image": "disk.img"}})).unwrap();
    assert_eq!(slow.join().unwrap().unwrap_err()["kind"], "cancelled");
    assert!(!running());
    let list = json!({"backups": {"repository": {"at": url}}});
    assert_eq!(lab.a.ask(list).unwrap()["backups"], json!([]));
    // A migration takes the line with its backups along.
    let done = lab.a.ask(json!({"backup": {"images": ["disk.img"], "to": url}})).unwrap();
    lab.a
        .ask(json!({"migrate": {"subject": {"images": {"names": ["disk.img"]}}, "to": "hostb"}}))
        .unwrap();
    let here = lab.b.ask(json!({"backup": {"images": ["disk.img"], "to": url}})).unwrap();
    let (first, second) = (&done["images"][0], &here["images"][0]);
    assert_eq!(second["parent"], first["generation"], "{second}");
    assert_eq!(second["changed_bytes"], 0);
    let restored =
        restore(&lab, &url, "disk.img", second["generation"]["number"].as_u64().unwrap(), "r");
    assert!(restored == bytes);
}

#[test]
fn a_full_pool_costs_the_backup_and_not_the_guest() {
    let mut lab = Lab::new();
    let Some(small) = Mount::tmpfs(&lab.a.pool(), "size=24m") else { return };
    lab.a.start();
    let url = repository(&lab);
    let mut bytes = image(&lab, "disk.img");
    // Every block has its place: what the guest overwrites needs no more room.
    let mut client = Client::connect(&lab.a.nbd(), "disk.img").unwrap();
    for (nth, data) in bytes.chunks(65_536).enumerate() {
        let at = nth as u64 * 65_536;
        client.request(WRITE, at, data.len() as u32, data, &|| true).unwrap();
    }
    drop(client);
    let ballast = small.path.join("ballast");
    // Fills what is left; the error is wanted.
    let _ = std::fs::write(&ballast, vec![1; 24 << 20]);
    let (api, to) = (lab.a.api(), url.clone());
    let slow = std::thread::spawn(move || {
        let rate = json!({"bytes_per_second": 500_000});
        let command = json!({"backup": {"images": ["disk.img"], "to": to, "bandwidth": rate}});
        crate::lab::ask(&api, command)
    });
    let total = || lab.a.ask(json!({"backups": {}})).unwrap()["running"][0]["images"][0].clone();
    wait_for("the backup", Duration::from_secs(10), || total()["bytes_total"].as_u64() > Some(0))
        .unwrap();
    let mut client = Client::connect(&lab.a.nbd(), "disk.img").unwrap();
    let data = [9; 4096];
    // The end is read last.
    for at in (SIZE / 2..SIZE - 4096).step_by(4096) {
        client.request(WRITE, at, 4096, &data, &|| true).unwrap();
        bytes[at as usize..at as usize + 4096].copy_from_slice(&data);
    }
    let why = slow.join().unwrap().unwrap_err();
    assert_eq!(why["kind"], "no-space", "{why}");
    assert_eq!(read(&lab.a.pool().join("disk.img")), bytes);
    let list = json!({"backups": {"repository": {"at": url}}});
    assert_eq!(lab.a.ask(list).unwrap()["backups"], json!([]));
    std::fs::remove_file(&ballast).unwrap();
    let done = lab.a.ask(json!({"backup": {"images": ["disk.img"], "to": url}})).unwrap();
    let number = done["images"][0]["generation"]["number"].as_u64().unwrap();
    assert!(restore(&lab, &url, "disk.img", number, "restored") == bytes);
    drop(client);
    lab.a.kill();
}

#[test]
fn a_schedule_is_kept_and_what_fails_is_shown_and_tried_again() {
    let mut lab = Lab::with(|_, config| config);
    let folder = lab.dir.path().join("repository");
    let text = std::fs::read_to_string(lab.a.config()).unwrap();
    let place = format!(
        "[[backup]]\nname = \"nas\"\nurl = \"file://{}\"\nevery = \"2s\"\nimages = [\"disk.img\"]\n",
        folder.display()
    );
    std::fs::write(lab.a.config(), text + &place).unwrap();
    lab.a.start();
    image(&lab, "disk.img");
    let shown = || lab.a.ask(json!({"backups": {}})).unwrap()["destinations"][0].clone();
    let failed = || shown()["error"].as_str().is_some_and(|why| why.contains("has none"));
    wait_for("the failure", Duration::from_secs(20), failed).unwrap();
    lab.a.ask(json!({"backup-init": {"at": "nas"}})).unwrap();
    let made = || {
        let list = json!({"backups": {"repository": {"at": "nas"}}});
        lab.a.ask(list).unwrap()["backups"].as_array().map_or(0, Vec::len)
    };
    wait_for("two backups", Duration::from_secs(30), || made() >= 2).unwrap();
    let now = shown();
    assert!(now["error"].is_null() && now["last_unix_ms"].is_u64(), "{now}");
}
