//! Content that the target has already: it does not cross the wire, and it is never wrong.

use crate::case::{BLOCKS, Case, DATA, IMAGE as DISK, SMALL};
use crate::guest::{self, BLOCK, Guest};
use crate::lab::{Host, Lab, opens, wait_for};
use crate::mounts::Mount;
use crate::moves::result;
use serde_json::{Value, json};
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Bytes of a piece, the unit of described content.
const PIECE: usize = 65_536;
/// Bytes of an image.
const IMAGE: usize = 16 << 20;
/// Slower than two agents on one machine look for content, whoever built them.
const BANDWIDTH: &str = "40MiB/s";
const END: Duration = Duration::from_secs(60);

/// Bytes that no compressor makes fewer.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
    }
    bytes
}

/// A copy of `base` in which `percent` of its pieces are its own.
fn copy_of(base: &[u8], seed: u64, percent: usize) -> Vec<u8> {
    let mut copy = base.to_vec();
    let pieces = base.len() / PIECE;
    for nth in 0..pieces * percent / 100 {
        // Each has changes in other places, and in a part of a piece only.
        let piece = (nth * 100 / percent + seed as usize * 7) % pieces;
        let at = piece * PIECE + 8192;
        copy[at..at + 16384].copy_from_slice(&noise(seed * 1000 + nth as u64, 16384));
    }
    copy
}

/// A copy of `base` in which `percent` of its blocks are its own, scattered; and how many.
fn scattered_copy(base: &[u8], seed: u64, percent: usize) -> (Vec<u8>, usize) {
    let mut copy = base.to_vec();
    let blocks = base.len() / BLOCK as usize;
    let mut state = seed.wrapping_add(1);
    let mut own = std::collections::BTreeSet::new();
    while own.len() < blocks * percent / 100 {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        own.insert((state >> 33) as usize % blocks);
    }
    for block in &own {
        let at = block * BLOCK as usize;
        let content = noise(seed * 100_000 + *block as u64 + 7, BLOCK as usize);
        copy[at..at + BLOCK as usize].copy_from_slice(&content);
    }
    (copy, own.len())
}

fn put(host: &Host, name: &str, content: &[u8]) {
    std::fs::write(host.pool().join(name), content).unwrap();
}

/// Moves images in one migration; the summary.
fn go(lab: &Lab, names: &[String], more: &[&str]) -> Value {
    go_at(BANDWIDTH, lab, names, more)
}

fn go_at(bandwidth: &str, lab: &Lab, names: &[String], more: &[&str]) -> Value {
    let mut args = vec!["--json", "migrate", "--to", "hostb", "--bandwidth", bandwidth];
    names.iter().for_each(|name| args.extend(["--image", name]));
    args.extend(more);
    let output = lab.a.dray(&args);
    let summary = result(&output);
    assert_eq!(summary["result"], "completed", "{output:?}");
    wait_for("the end of the migration", END, || {
        lab.a.open_migrations() == 0 && lab.b.open_migrations() == 0
    })
    .unwrap();
    summary
}

/// A bystander compares a file at the target with what was moved.
fn check(host: &Host, name: &str, content: &[u8]) {
    let there = std::fs::read(host.pool().join(name)).unwrap();
    assert_eq!(there.len(), content.len());
    let differs = there.chunks(4096).zip(content.chunks(4096)).position(|(a, b)| a != b);
    assert_eq!(differs, None, "block of {name} that differs");
}

fn wire(summary: &Value) -> u64 {
    summary["wire_bytes"]["total"].as_u64().unwrap()
}

fn found(summary: &Value) -> u64 {
    summary["bytes_from_target"].as_u64().unwrap_or(0)
}

fn names(prefix: &str, count: u64) -> Vec<String> {
    (0..count).map(|nth| format!("{prefix}{nth}.img")).collect()
}

#[test]
fn ten_copies_of_one_image_cross_the_wire_once() {
    let mut lab = Lab::new();
    let base = noise(1, IMAGE);
    let names = names("vm", 10);
    let copies: Vec<_> = (0..10).map(|seed| copy_of(&base, seed, 5)).collect();
    names.iter().zip(&copies).for_each(|(name, copy)| put(&lab.a, name, copy));
    lab.start();
    names.iter().for_each(|name| lab.a.add(name));
    let summary = go(&lab, &names, &["--verify"]);
    names.iter().zip(&copies).for_each(|(name, copy)| check(&lab.b, name, copy));
    // A piece of which a part changed is another piece.
    let changed = 10 * (IMAGE / PIECE * 5 / 100) * PIECE;
    let least = (IMAGE + changed) as f64;
    let share = wire(&summary) as f64 / least;
    println!("{} on the wire for {least} that must cross: {share:.3}", wire(&summary));
    assert!(share <= 1.1, "{share}: {summary}");
    assert!(found(&summary) as usize > 8 * IMAGE, "{summary}");
    let images = summary["images"].as_array().unwrap();
    let each: u64 = images.iter().map(|i| i["bytes_from_target"].as_u64().unwrap_or(0)).sum();
    assert_eq!(each, found(&summary));
    assert!(summary["wire_bytes"]["hash"].as_u64().unwrap() > 0, "{summary}");
}

/// Half of the pieces of each copy have a block of their own in them.
#[test]
fn copies_with_scattered_changes_cross_the_wire_once_but_for_their_changes() {
    let mut lab = Lab::new();
    let base = noise(21, IMAGE);
    let names = names("vm", 10);
    let copies: Vec<_> = (0..10).map(|seed| scattered_copy(&base, seed, 5)).collect();
    names.iter().zip(&copies).for_each(|(name, (copy, _))| put(&lab.a, name, copy));
    lab.start();
    names.iter().for_each(|name| lab.a.add(name));
    // Another round trip for each piece, on a machine that may be busy with other tests.
    let summary = go_at("4MiB/s", &lab, &names, &["--verify"]);
    names.iter().zip(&copies).for_each(|(name, (copy, _))| check(&lab.b, name, copy));
    assert_eq!(summary["verified"], true, "{summary}");
    let own: usize = copies.iter().map(|(_, own)| own * BLOCK as usize).sum();
    let least = (IMAGE + own) as f64;
    let share = wire(&summary) as f64 / least;
    println!("{} on the wire for {least} that must cross: {share:.3}", wire(&summary));
    // The sample is sent before it is known where to look: of images as small as these it is a tenth
    // of what must cross. `bench/reuse.py copies` measures larger ones.
    assert!(share <= 1.3, "{share}: {summary}");
}

/// A basis that somebody goes on writing to while it is looked at.
#[test]
fn a_basis_that_changes_all_the_time_never_gives_a_wrong_block() {
    let mut lab = Lab::new();
    let base = noise(31, IMAGE);
    let (copy, own) = scattered_copy(&base, 1, 10);
    put(&lab.b, "base.img", &base);
    put(&lab.a, "vm.img", &copy);
    lab.start();
    indexed(&lab.b, IMAGE);
    lab.a.add("vm.img");
    let file = std::fs::File::options().write(true).open(lab.b.pool().join("base.img")).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let summary = std::thread::scope(|scope| {
        scope.spawn(|| {
            // Every eighth block is now this and now that.
            for round in (0..=u8::MAX).cycle() {
                for block in (0..IMAGE as u64 / BLOCK).step_by(8) {
                    if stop.load(std::sync::atomic::Ordering::Relaxed) {
                        return;
                    }
                    file.write_all_at(&[round; 64], block * BLOCK + 512).unwrap();
                }
            }
        });
        let summary = go(&lab, &["vm.img".into()], &["--verify"]);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        summary
    });
    check(&lab.b, "vm.img", &copy);
    assert_eq!(summary["verified"], true, "{summary}");
    let sent = summary["blocks_sent"].as_u64().unwrap() as usize;
    assert!(sent >= own, "{own} blocks are nowhere else: {summary}");
}

#[test]
fn a_target_whose_content_was_changed_behind_its_back_never_gives_a_wrong_block() {
    let mut lab = Lab::new();
    let base = noise(2, IMAGE);
    let first = names("first", 2);
    first.iter().for_each(|name| put(&lab.a, name, &base));
    put(&lab.a, "later.img", &base);
    lab.start();
    first.iter().for_each(|name| lab.a.add(name));
    go(&lab, &first, &[]);
    // A third of the pieces that the index knows hold something else by now, some by one byte.
    for name in &first {
        let file = std::fs::File::options().write(true).open(lab.b.pool().join(name)).unwrap();
        for piece in (0..IMAGE / PIECE).step_by(3) {
            file.write_all_at(&[0x5a], (piece * PIECE + piece) as u64).unwrap();
        }
    }
    lab.a.add("later.img");
    let summary = go(&lab, &["later.img".into()], &["--verify"]);
    check(&lab.b, "later.img", &base);
    assert_eq!(summary["verified"], true, "{summary}");
    // A block in each third piece, and nowhere as it was.
    let sent = summary["blocks_sent"].as_u64().unwrap() as usize;
    assert!(sent >= IMAGE / PIECE / 3, "what was changed cannot have been found: {summary}");
    assert!(found(&summary) as usize > IMAGE * 9 / 10, "{summary}");
}

#[test]
fn who_does_not_want_reuse_sends_everything() {
    let off = |name: &str, config: String| {
        if name == "hostb" { config + "[reuse]\nenabled = false\n" } else { config }
    };
    let late = ["--strategy", "post-copy", "--no-reuse"];
    for (lab, more) in [
        (Lab::new(), &["--no-reuse"][..]),
        (Lab::with(off), &[]),
        (Lab::new(), &late),
        (Lab::with(off), &late[..2]),
    ] {
        let mut lab = lab;
        let base = noise(3, IMAGE / 4);
        let names = names("same", 2);
        names.iter().for_each(|name| put(&lab.a, name, &base));
        lab.start();
        names.iter().for_each(|name| lab.a.add(name));
        let summary = go(&lab, &names, more);
        assert_eq!((found(&summary), summary["wire_bytes"]["hash"].as_u64()), (0, Some(0)));
        assert!(wire(&summary) as usize > 2 * base.len());
        names.iter().for_each(|name| check(&lab.b, name, &base));
    }
}

/// Waits until a host has read so much of what its pools hold.
fn indexed(host: &Host, bytes: usize) {
    wait_for("the index", END, || {
        let info = host.ask(json!("info")).unwrap();
        info["indexed_bytes"].as_u64().unwrap_or(0) >= bytes as u64
    })
    .unwrap_or_else(|why| panic!("{why}: {}", host.log()));
}

#[test]
fn a_base_image_in_a_pool_of_the_target_is_found_also_after_a_restart() {
    let mut lab = Lab::new();
    let base = noise(5, IMAGE);
    let copy = copy_of(&base, 1, 5);
    put(&lab.b, "base.img", &base);
    put(&lab.a, "vm.img", &copy);
    lab.start();
    indexed(&lab.b, IMAGE);
    lab.b.kill();
    lab.b.start();
    // It is opened in the background.
    indexed(&lab.b, IMAGE);
    lab.a.add("vm.img");
    let summary = go(&lab, &["vm.img".into()], &["--verify"]);
    check(&lab.b, "vm.img", &copy);
    assert!(found(&summary) as usize > IMAGE * 9 / 10, "{summary}");
    // The four blocks that differ in every twentieth piece, and what describes the others.
    let changed = IMAGE / PIECE * 5 / 100 * 4;
    assert_eq!(summary["blocks_sent"], changed, "{summary}");
    assert!(
        (wire(&summary) as usize) < changed * BLOCK as usize * 11 / 10 + (64 << 10),
        "{summary}"
    );
}

/// Changed, cut off, removed and replaced since the index was made: misses, and nothing else.
#[test]
fn files_that_changed_since_they_were_read_never_give_a_wrong_block() {
    let mut lab = Lab::new();
    let parts: Vec<_> = (10..14).map(|seed| noise(seed, IMAGE / 4)).collect();
    for (nth, part) in parts.iter().enumerate() {
        put(&lab.b, &format!("part{nth}.img"), part);
    }
    let all = parts.concat();
    put(&lab.a, "vm.img", &all);
    lab.start();
    indexed(&lab.b, IMAGE);
    let path = |nth| lab.b.pool().join(format!("part{nth}.img"));
    let edit = std::fs::File::options().write(true).open(path(0)).unwrap();
    for piece in 0..IMAGE / 4 / PIECE {
        let at = piece * PIECE + 65_535;
        edit.write_all_at(&[parts[0][at] ^ 1], at as u64).unwrap();
    }
    edit.set_len(IMAGE as u64 / 8).unwrap();
    std::fs::remove_file(path(1)).unwrap();
    std::fs::write(path(2), noise(99, IMAGE / 4)).unwrap();
    lab.a.add("vm.img");
    let summary = go(&lab, &["vm.img".into()], &["--verify"]);
    check(&lab.b, "vm.img", &all);
    assert_eq!(summary["verified"], true);
    let most = IMAGE as u64 / 4;
    assert!((most / 2..=most).contains(&found(&summary)), "only one of four is right: {summary}");
}

const POST_COPY: [&str; 3] = ["--strategy", "post-copy", "--verify"];

#[test]
fn backfill_fetches_nothing_that_the_target_has() {
    let mut lab = Lab::new();
    let base = noise(41, IMAGE);
    let copy = copy_of(&base, 1, 5);
    put(&lab.b, "base.img", &base);
    put(&lab.a, "vm.img", &copy);
    lab.start();
    indexed(&lab.b, IMAGE);
    lab.a.add("vm.img");
    let summary = go(&lab, &["vm.img".into()], &POST_COPY);
    check(&lab.b, "vm.img", &copy);
    assert_eq!((&summary["verified"], &summary["blocks_sent_twice"]), (&json!(true), &json!(0)));
    // The four blocks that differ in every twentieth piece, and what describes the others.
    let changed = IMAGE / PIECE * 5 / 100 * 4;
    assert_eq!(summary["blocks_sent"], changed, "{summary}");
    assert_eq!(found(&summary) as usize, IMAGE - changed * BLOCK as usize, "{summary}");
    let most = changed * BLOCK as usize * 11 / 10 + (64 << 10);
    assert!((wire(&summary) as usize) < most, "{summary}");
}

#[test]
fn a_deferred_backfill_asks_nothing_before_it_is_started() {
    let mut lab = Lab::new();
    let base = noise(43, IMAGE / 4);
    put(&lab.b, "base.img", &base);
    put(&lab.a, "vm.img", &base);
    lab.start();
    indexed(&lab.b, IMAGE / 4);
    lab.a.add("vm.img");
    let args =
        ["migrate", "--image", "vm.img", "--to", "hostb", "--detach", "--strategy", "deferred"];
    let output = lab.a.dray(&args);
    assert!(output.status.success(), "{output:?}");
    let waits = |(_, progress): (String, Value)| progress["paused"] == true;
    wait_for("the pause", END, || lab.a.progress().is_some_and(waits)).unwrap();
    let blocks = lab.b.image("vm.img").unwrap()["missing_blocks"].as_u64().unwrap();
    assert_eq!(blocks * BLOCK, base.len() as u64, "nobody has asked for anything");
    lab.b.ask(json!({"backfill": {"action": "start"}})).unwrap();
    let ended = |row: &Value| row["state"] == "completed";
    let row = || lab.a.ask(json!({"status": {}})).ok().and_then(|rows| rows.get(0).cloned());
    wait_for("the end", END, || row().is_some_and(|row| ended(&row))).unwrap();
    let summary = row().unwrap()["summary"].clone();
    assert_eq!((found(&summary), &summary["blocks_sent"]), (base.len() as u64, &json!(0)));
    check(&lab.b, "vm.img", &base);
}

#[test]
fn copies_of_one_image_that_nobody_has_cross_once_in_backfill() {
    let mut lab = Lab::new();
    let base = noise(42, IMAGE);
    let names = names("vm", 4);
    let copies: Vec<_> = (0..4).map(|seed| copy_of(&base, seed, 5)).collect();
    names.iter().zip(&copies).for_each(|(name, copy)| put(&lab.a, name, copy));
    lab.start();
    names.iter().for_each(|name| lab.a.add(name));
    let summary = go(&lab, &names, &POST_COPY);
    names.iter().zip(&copies).for_each(|(name, copy)| check(&lab.b, name, copy));
    let own = 4 * (IMAGE / PIECE * 5 / 100) * PIECE;
    let share = wire(&summary) as f64 / (IMAGE + own) as f64;
    println!("{} on the wire: {share:.3} of what must cross", wire(&summary));
    assert!(share <= 1.2, "{share}: {summary}");
    assert_eq!(summary["blocks_sent_twice"], 0, "{summary}");
}

/// A guest writes, a part of its image is at the target, and an agent dies while the rest crosses.
fn killed_while_describing(strategy: &str, source: bool, target: bool) {
    let mut lab = Lab::new();
    guest::make_image(&lab.a.pool().join(DISK), BLOCKS);
    let base = lab.b.pool().join("base.img");
    guest::make_image(&base, BLOCKS);
    let file = std::fs::File::options().write(true).open(&base).unwrap();
    // Every second megabyte is something else.
    for at in (0..BLOCKS * BLOCK).step_by(2 << 20) {
        file.write_all_at(&noise(at + 1, 1 << 20), at).unwrap();
    }
    lab.start();
    lab.a.add(DISK);
    indexed(&lab.b, DATA as usize);
    // The guest keeps to a part of the image: what it writes is another piece than the target has.
    let guest = Guest::start(&lab, DISK, BLOCKS, 16 * SMALL, 11);
    let mut case = Case { lab, guest };
    case.migrate(strategy, Some(3 << 20)).unwrap();
    case.await_found(DATA / 8).unwrap();
    for (host, dies) in [(&mut case.lab.a, source), (&mut case.lab.b, target)] {
        if dies {
            host.kill();
        }
    }
    for host in [&mut case.lab.a, &mut case.lab.b] {
        if !host.is_up() {
            host.start();
        }
    }
    case.await_end().unwrap();
    let Case { mut lab, guest } = case;
    let versions = guest.shut_down().unwrap();
    lab.a.kill();
    lab.b.kill();
    let there = lab.b.pool().join(DISK);
    guest::compare(&there, &versions).unwrap();
    assert!(!opens(&lab.a.pool().join(DISK)) && opens(&there));
}

#[test]
fn an_agent_that_dies_while_content_is_found_costs_no_block() {
    killed_while_describing("hybrid", true, false);
    killed_while_describing("hybrid", false, true);
    killed_while_describing("hybrid", true, true);
}

#[test]
fn agents_that_die_while_backfill_finds_content_cost_no_block() {
    killed_while_describing("post-copy", true, true);
}

#[test]
fn nothing_is_read_in_the_background_when_the_operator_says_so() {
    let off = |_: &str, config: String| config + "[reuse]\nindex = false\n";
    let mut lab = Lab::with(off);
    let base = noise(6, IMAGE / 4);
    put(&lab.b, "base.img", &base);
    put(&lab.a, "vm.img", &base);
    lab.start();
    std::thread::sleep(Duration::from_secs(4));
    let info = lab.b.ask(json!("info")).unwrap();
    assert_eq!(info["indexed_bytes"], 0, "{info}");
    assert!(!lab.b.dir.join("state/content.redb").exists());
    lab.a.add("vm.img");
    assert_eq!(found(&go(&lab, &["vm.img".into()], &[])), 0);
}

/// What a peer may not see it does not get, and cannot find out either.
#[test]
fn content_of_another_pool_is_not_given_to_a_peer_that_may_not_use_it() {
    let closed = tempfile::tempdir().unwrap();
    let dir = closed.path().display().to_string();
    let mut lab = Lab::with(|name, config| {
        let pool = format!("[[pool]]\nname = \"closed\"\npath = \"{dir}\"\n");
        if name == "hostb" { config + &pool } else { config }
    });
    let base = noise(4, IMAGE / 4);
    std::fs::write(closed.path().join("secret.img"), &base).unwrap();
    put(&lab.a, "vm.img", &base);
    lab.start();
    indexed(&lab.b, IMAGE / 4);
    lab.a.add("vm.img");
    let summary = go(&lab, &["vm.img".into()], &[]);
    assert_eq!(found(&summary), 0, "{summary}");
    check(&lab.b, "vm.img", &base);
}

/// A host that asks for a hash would learn what the disk of another tenant holds.
#[test]
fn content_of_other_images_is_given_within_a_domain_and_only_to_who_has_the_right() {
    let (same, right) = ("reuse_domain = \"lab\"\n", "\"reuse\", ");
    for (own, right_given, given) in [
        (same, right, IMAGE),
        (same, "", 0),
        ("reuse_domain = \"mine\"\n", right, 0),
        ("", right, 0),
    ] {
        let theirs = tempfile::tempdir().unwrap();
        let dir = theirs.path().display();
        let pool = format!("[[pool]]\nname = \"theirs\"\npath = \"{dir}\"\n{same}");
        let change = |config: String| {
            config
                .replace(same, own)
                .replace("[\"p\"]", "[\"p\", \"theirs\"]")
                .replace(right, right_given)
                + &pool
        };
        let mut lab =
            Lab::with(|name, config| if name == "hostb" { change(config) } else { config });
        let base = noise(5, IMAGE);
        std::fs::write(theirs.path().join("theirs.img"), &base).unwrap();
        put(&lab.a, "vm.img", &base);
        lab.start();
        indexed(&lab.b, IMAGE);
        lab.a.add("vm.img");
        let summary = go(&lab, &["vm.img".into()], &[]);
        assert_eq!(found(&summary), given as u64, "{own} {right_given}: {summary}");
        check(&lab.b, "vm.img", &base);
    }
}

/// A base image is nobody's secret.
#[test]
fn content_of_a_base_image_is_given_to_images_outside_its_domain() {
    let mut lab = Lab::with(|_, config| config.replace("reuse_domain = \"lab\"\n", ""));
    let base = noise(6, IMAGE);
    put(&lab.b, "base.img", &base);
    put(&lab.a, "vm.img", &base);
    lab.start();
    let add = json!({"image-add": {"name": "base.img", "path": lab.b.pool().join("base.img"), "read_only": true}});
    lab.b.ask(add).unwrap();
    indexed(&lab.b, IMAGE);
    lab.a.add("vm.img");
    let summary = go(&lab, &["vm.img".into()], &[]);
    assert_eq!(found(&summary), IMAGE as u64, "{summary}");
    check(&lab.b, "vm.img", &base);
}

#[test]
fn the_background_keeps_no_room_of_a_file_that_is_deleted() {
    // Eight seconds for each MiB: it waits nearly all the time.
    let slow = |_: &str, config: String| config + "[reuse]\nindex_rate = \"128KiB/s\"\n";
    let mut lab = Lab::with(slow);
    let Some(small) = Mount::tmpfs(&lab.a.pool(), "size=24m") else { return };
    put(&lab.a, "ballast", &noise(1, IMAGE));
    lab.a.start();
    // It begins two seconds after the start.
    std::thread::sleep(Duration::from_secs(4));
    std::fs::remove_file(small.path.join("ballast")).unwrap();
    let free = || rustix::fs::statvfs(&small.path).is_ok_and(|stat| stat.f_bfree * 4096 > 23 << 20);
    wait_for("the room", Duration::from_secs(2), free).unwrap();
    lab.a.kill();
}
