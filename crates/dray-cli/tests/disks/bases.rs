//! Base images that the target has already: they are used where they lie, whatever becomes of the
//! migration, and never taken for what they are not.

use crate::guest::{self, BLOCK};
use crate::lab::{Host, Lab, read_record, wait_for, write_record};
use crate::moves::result;
use crate::nbd::{Client, Fault, READ, WRITE};
use crate::refusals::{CONFLICT, refused};
use serde_json::{Value, json};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

/// The image that both hosts have.
const BASE: &str = "base.img";
/// Blocks of it, and of each disk: 8 MiB, three quarters of it data.
const BLOCKS: u64 = 2048;
/// Longest time that anything here takes.
const END: Duration = Duration::from_secs(45);

/// Two hosts, a base image and disks at hosta, and the same base image, without holes, at hostb.
fn begin(disks: &[&str]) -> Lab {
    // What the disks have in common with the base is sent, so that there is time for things to happen.
    let mut lab = Lab::with(|_, config| config + "[reuse]\nenabled = false\n");
    guest::make_image(&lab.a.pool().join(BASE), BLOCKS);
    disks.iter().for_each(|disk| guest::make_image(&lab.a.pool().join(disk), BLOCKS));
    let bytes = std::fs::read(lab.a.pool().join(BASE)).unwrap();
    std::fs::write(lab.b.pool().join(BASE), bytes).unwrap();
    lab.start();
    add_base(&lab.a);
    disks.iter().for_each(|disk| lab.a.add(disk));
    lab
}

fn add_base(host: &Host) {
    let path = host.pool().join(BASE);
    let command = json!({"image-add": {"name": BASE, "path": path, "read_only": true}});
    host.ask(command).unwrap();
}

/// What nobody may change of a file: number, length, times, mode.
fn look(host: &Host) -> (u64, u64, [i64; 4], u32) {
    let meta = host.pool().join(BASE).metadata().unwrap();
    let times = [meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()];
    (meta.ino(), meta.len(), times, meta.mode())
}

/// Migrates a disk with its base; the summary.
fn go(from: &Host, to: &str, images: [&str; 2], more: &[&str]) -> Value {
    let [disk, base] = images;
    let args = ["--json", "migrate", "--image", disk, "--image", base, "--to", to, "--verify"];
    let output = from.dray(&[&args[..], more].concat());
    let summary = result(&output);
    assert_eq!(summary["result"], "completed", "{output:?}");
    assert_eq!(summary["verified"], true, "{summary}");
    summary
}

fn settled(lab: &Lab) {
    wait_for("the end", END, || lab.a.open_migrations() + lab.b.open_migrations() == 0).unwrap();
}

/// Names of the images that are files which lay there before.
fn in_place(host: &Host) -> Vec<String> {
    let images = host.ask(json!("images")).unwrap();
    let images = images.as_array().unwrap().iter().filter(|image| image["in_place"] == true);
    images.map(|image| image["name"].as_str().unwrap().to_owned()).collect()
}

/// What an export holds is what a file holds, and nothing can be written to it.
fn served(host: &Host, export: &str, file: &Path) {
    let mut client = Client::connect(&host.nbd(), export).unwrap();
    let wanted = std::fs::read(file).unwrap();
    for (offset, bytes) in (0..).step_by(1 << 20).zip(wanted.chunks(1 << 20)) {
        let read = client.request(READ, offset, bytes.len() as u32, &[], &|| true).unwrap();
        assert!(read == bytes, "at {offset}");
    }
    let written = client.request(WRITE, 0, 4096, &[7; 4096], &|| true);
    assert!(matches!(written, Err(Fault::Error(_))), "{written:?}");
}

/// What a command tells people.
fn said(host: &Host, args: &[&str], words: &str) {
    let output = host.dray(args);
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains(words), "{text}");
}

/// Whatever has become of it, the file at hostb is what it was.
fn untouched(lab: &Lab, before: (u64, u64, [i64; 4], u32)) {
    assert_eq!(look(&lab.b), before);
    guest::compare(&lab.b.pool().join(BASE), &guest::first_versions(BLOCKS)).unwrap();
}

#[test]
fn a_base_that_both_hosts_have_is_used_where_it_lies_by_all_who_come() {
    let lab = begin(&["vm1.img", "vm2.img"]);
    let before = look(&lab.b);
    let args = ["--json", "plan", "--image", "vm1.img", "--image", BASE, "--to", "hostb"];
    let planned = result(&lab.a.dray(&args));
    let base = planned["images"].as_array().unwrap().iter().find(|i| i["image"] == BASE).unwrap();
    assert_eq!((&base["in_place"], &base["source"]), (&true.into(), &0.into()), "{planned}");
    assert!(base["at_target"].as_u64() > Some(BLOCKS * BLOCK / 2), "{planned}");
    said(&lab.a, &args[1..], "base image at hostb");
    let ways: [(&str, &[&str]); 2] =
        [("vm1.img", &[]), ("vm2.img", &["--strategy", "post-copy", "--no-reuse"])];
    for (disk, way) in ways {
        let summary = go(&lab.a, "hostb", [disk, BASE], way);
        let base = &summary["images"][1];
        assert_eq!(base["bytes_in_place"], BLOCKS * BLOCK, "{summary}");
        assert_eq!((&base["blocks_sent"], &base["name_at_target"]), (&0.into(), &BASE.into()));
        let from = summary["providers"].as_array().unwrap();
        assert!(from.iter().any(|one| one["provider"] == "base image at hostb"), "{summary}");
    }
    settled(&lab);
    untouched(&lab, before);
    let names = in_place(&lab.b);
    assert_eq!(names.len(), 2, "{names:?}");
    said(&lab.b, &["images"], "owner (read-only, in place)");
    names.iter().for_each(|name| served(&lab.b, name, &lab.a.pool().join(BASE)));
    assert_eq!(lab.b.files(), [BASE, "vm1.img", "vm2.img"]);
    // And back to where the base never left, with the name that it always had.
    let at_home = look(&lab.a);
    let summary = go(&lab.b, "hosta", ["vm1.img", &names[0]], &["--strategy", "mirror"]);
    assert_eq!(summary["images"][1]["name_at_target"], BASE, "{summary}");
    assert_eq!(summary["images"][1]["bytes_in_place"], BLOCKS * BLOCK, "{summary}");
    settled(&lab);
    assert_eq!(look(&lab.a), at_home);
    assert_eq!(in_place(&lab.a).len(), 1);
    assert_eq!(in_place(&lab.b), &names[1..], "the name was that migration's alone");
    untouched(&lab, before);
    // What is forgotten by hand stays as well.
    assert!(lab.b.dray(&["images", "remove", &names[1]]).status.success());
    untouched(&lab, before);
}

#[test]
fn another_file_of_the_name_is_not_taken_for_the_base() {
    let lab = begin(&["vm1.img"]);
    let path = lab.b.pool().join(BASE);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[9], 3_000_000).unwrap();
    let args = ["migrate", "--image", "vm1.img", "--image", BASE, "--to", "hostb"];
    let words = ["base.img exists and is another file", "content", "--name HERE=THERE", "qemu-img"];
    refused(&lab.a, &args, CONFLICT, &words);
    let planned = result(&lab.a.dray(&[&["--json", "plan"], &args[1..]].concat()));
    assert!(planned["images"][1]["notes"][0].as_str().unwrap().contains("another file"));
    file.set_len(BLOCKS * BLOCK - 512).unwrap();
    refused(&lab.a, &args, CONFLICT, &["is another file", "bytes", "--name HERE=THERE"]);
    // Nothing of it happened, and the disk goes its way with another name for the base.
    assert_eq!(lab.b.files(), [BASE]);
    assert_eq!(lab.b.ask(json!("images")).unwrap(), json!([]));
    assert_eq!(lab.a.open_migrations() + lab.b.open_migrations(), 0);
    let renamed = [&args[..], &["--name", "base.img=base2.img"]].concat();
    assert!(lab.a.dray(&renamed).status.success());
    settled(&lab);
    guest::compare(&lab.b.pool().join("base2.img"), &guest::first_versions(BLOCKS)).unwrap();
}

#[test]
fn an_image_that_somebody_may_write_is_no_base() {
    let lab = begin(&["vm1.img"]);
    lab.b.add(BASE);
    let args = ["migrate", "--image", "vm1.img", "--image", BASE, "--to", "hostb"];
    refused(&lab.a, &args, CONFLICT, &["exists already"]);
    // One that nobody may write is one, whoever has registered it.
    assert!(lab.b.dray(&["images", "remove", BASE]).status.success());
    add_base(&lab.b);
    go(&lab.a, "hostb", ["vm1.img", BASE], &["--strategy", "hot-set"]);
    settled(&lab);
    assert_eq!(in_place(&lab.b).len(), 1);
}

/// The promise is the last moment at which another file can be told from the one that was compared.
#[test]
fn a_base_that_is_changed_after_it_was_compared_ends_the_migration() {
    let lab = begin(&["vm1.img"]);
    let args = ["prepare", "--image", "vm1.img", "--image", BASE, "--to", "hostb"];
    said(&lab.a, &args, "nbd.sock, a file that it has already");
    let path = lab.b.pool().join(BASE);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[9], 5).unwrap();
    let args = ["--json", "migrate", "--image", "vm1.img", "--image", BASE, "--to", "hostb"];
    let output = lab.a.dray(&args);
    assert!(!output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("was changed since it was compared"), "{text}");
    assert_eq!(lab.a.image("vm1.img").unwrap()["state"], "owner");
    let mut byte = [0];
    std::fs::File::open(&path).unwrap().read_exact_at(&mut byte, 5).unwrap();
    assert_eq!(byte, [9]);
}

/// Cancelled, and then done again by a target that dies on the way.
#[test]
fn a_target_that_dies_or_gives_up_leaves_the_base_alone() {
    let mut lab = begin(&["vm1.img"]);
    let before = look(&lab.b);
    let migrate = |lab: &Lab, rate: Option<u64>| {
        let bandwidth = rate.map(|rate| json!({"bytes_per_second": rate}));
        let subject = json!({"images": {"names": ["vm1.img", BASE]}});
        lab.a.ask(json!({"migrate": {"subject": subject, "to": "hostb", "strategy": "hybrid",
            "bandwidth": bandwidth, "detach": true}}))
    };
    migrate(&lab, Some(50_000)).unwrap();
    wait_for("the copy", END, || lab.a.progress().is_some_and(|(_, p)| p["phase"] == "copy"))
        .unwrap();
    assert!(lab.a.dray(&["cancel", "--discard"]).status.success());
    wait_for("nothing left", END, || lab.b.open_migrations() == 0 && lab.b.files() == [BASE])
        .unwrap();
    assert_eq!(in_place(&lab.b), [""; 0]);
    untouched(&lab, before);
    for effect in ["Send-Opened", "Journal-Prepared", "Journal-Committed", "Finish"] {
        lab.b.kill();
        lab.b.start_with(&[("DRAY_ABORT_BEFORE", effect)]);
        if effect == "Send-Opened" {
            migrate(&lab, None).unwrap();
        }
        wait_for(effect, END, || lab.b.has_died()).unwrap();
        untouched(&lab, before);
    }
    lab.b.start();
    wait_for("the end", END, || {
        let owner = lab.b.image("vm1.img").is_some_and(|image| image["state"] == "owner");
        owner && lab.a.open_migrations() + lab.b.open_migrations() == 0
    })
    .unwrap();
    untouched(&lab, before);
    let names = in_place(&lab.b);
    let [name] = &names[..] else { panic!("{names:?} are in place") };
    served(&lab.b, name, &lab.a.pool().join(BASE));
    guest::compare(&lab.b.pool().join("vm1.img"), &guest::first_versions(BLOCKS)).unwrap();
    // A migration that never began because the agent died leaves nothing but the file, either.
    lab.b.stop();
    let images = lab.b.dir.join("state/images");
    let mut record = read_record(&images.join(format!("{name}.json")));
    for (is, was) in [
        (format!("\"name\": \"{name}\""), "\"name\": \"unbegun\""),
        ("\"state\": \"owner\"".to_owned(), "\"state\": \"incoming\""),
        ("\"migration\": null".to_owned(), "\"migration\": 5"),
    ] {
        assert!(record.contains(&is), "{record}");
        record = record.replace(&is, was);
    }
    write_record(&images.join("unbegun.json"), &record);
    lab.b.start();
    assert!(!images.join("unbegun.json").exists());
    assert_eq!(in_place(&lab.b), [name.as_str()]);
    untouched(&lab, before);
    // A restart opens it only while it is the same file.
    lab.b.stop();
    let file = std::fs::File::options().write(true).open(lab.b.pool().join(BASE)).unwrap();
    file.write_all_at(&[9], 5).unwrap();
    lab.b.start();
    let why = lab.b.image(name).unwrap()["closed"]["why"].as_str().unwrap().to_owned();
    assert!(why.contains("was changed since it was compared"), "{why}");
}
