//! Files that are removed and made again, or written to, while no agent runs. The file system gives a new
//! file the number of one that is gone, as ext4 does at once (`rm disk.img; cp backup disk.img`): dray must
//! not take the one for the other.

use crate::backups;
use crate::case::IMAGE;
use crate::claims::{CLAIM, claim};
use crate::guest::{BLOCK, content};
use crate::lab::{Host, Lab, wait_for};
use crate::restarts::{
    BLOCKS, WAIT, client, closed, flush, handed_over, missing, read, replica, to_the_end, write,
};
use serde_json::json;
use std::fs::{File, FileTimes, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often the file system is asked for a number.
const TRIES: u32 = 2000;

/// Removes the file at `path` and makes another one there that holds `bytes` and has the old one's number.
/// Whether the file system gives it that.
pub fn make_again(path: &Path, bytes: &[u8]) -> bool {
    let old = path.metadata().unwrap();
    std::fs::remove_file(path).unwrap();
    let mut others = Vec::new();
    let found = (0..TRIES).find_map(|nth| {
        let file = File::create_new(path).unwrap();
        if file.metadata().unwrap().ino() == old.ino() {
            return Some(file);
        }
        // It keeps the wrong number from being given out again.
        let other = path.with_extension(format!("other-{nth}"));
        std::fs::rename(path, &other).unwrap();
        others.push(other);
        None
    });
    others.iter().for_each(|path| std::fs::remove_file(path).unwrap());
    let Some(file) = found else {
        println!("SKIP: the file system gives no number out again");
        return false;
    };
    file.write_all_at(bytes, 0).unwrap();
    file.set_permissions(Permissions::from_mode(old.mode() & 0o7777)).unwrap();
    true
}

fn end(host: &mut Host, orderly: bool) {
    if orderly {
        host.stop();
    } else {
        host.kill();
    }
}

/// An older state of the image: other bytes, as many.
fn older() -> Vec<u8> {
    vec![0x77; (BLOCKS * BLOCK) as usize]
}

/// The target owns the image, has none of it, and its guest has written some.
pub fn with_a_guest() -> Lab {
    let lab = handed_over(Lab::new());
    for block in [5, 6, 700] {
        write(&mut client(&lab.b), block, 2).unwrap();
    }
    flush(&mut client(&lab.b));
    wait_for("the new name", WAIT, || replica(&lab.a).is_some()).unwrap();
    lab
}

fn is_another(host: &Host) {
    let why = closed(host);
    assert!(why.as_ref().is_some_and(|why| why.contains("another file")), "{why:?} {}", host.log());
}

/// The target asks for more, and nothing comes.
fn nothing_comes(lab: &Lab) {
    assert!(lab.b.dray(&["backfill", "start"]).status.success());
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(missing(&lab.b), Some(BLOCKS - 3));
}

#[test]
fn a_copy_that_was_made_again_after_the_handover_sends_nothing() {
    for orderly in [false, true] {
        let mut lab = with_a_guest();
        end(&mut lab.a, orderly);
        if !make_again(&replica(&lab.a).unwrap(), &older()) {
            return;
        }
        lab.a.start();
        is_another(&lab.a);
        nothing_comes(&lab);
        // The way out when it does not come back.
        claim(&lab.b, &CLAIM);
        for (block, expected) in [(5, content(5, 2)), (700, content(700, 2)), (7, vec![0; 4096])] {
            assert_eq!(read(&mut client(&lab.b), block), expected, "{block}");
        }
    }
}

#[test]
fn a_target_whose_file_was_made_again_does_not_serve_it() {
    for orderly in [false, true] {
        let mut lab = with_a_guest();
        end(&mut lab.b, orderly);
        let name = lab.b.files().into_iter().find(|name| name.contains("dray-partial")).unwrap();
        if !make_again(&lab.b.pool().join(name), &older()) {
            return;
        }
        lab.b.start();
        is_another(&lab.b);
        // The way out when it does not come back.
        claim(&lab.a, &CLAIM);
        assert_eq!(read(&mut client(&lab.a), 700), content(700, 1));
    }
}

/// The target is in Copy, has some of the image, and its agent has ended.
fn in_copy(orderly: bool) -> Lab {
    let mut lab = Lab::new();
    lab.start();
    let file = File::create(lab.a.pool().join(IMAGE)).unwrap();
    for block in 0..BLOCKS {
        file.write_all_at(&content(block, 1), block * BLOCK).unwrap();
    }
    lab.a.add(IMAGE);
    let more = ["--to", "hostb", "--strategy", "pre-copy", "--bandwidth", "1MiB/s", "--detach"];
    let begun = lab.a.dray(&[&["migrate", "--image", IMAGE], &more[..]].concat());
    assert!(begun.status.success(), "{begun:?}");
    let some =
        || lab.a.progress().is_some_and(|it| it.1["total"]["bytes_done"].as_u64() > Some(1 << 20));
    wait_for("some of it", WAIT, some).unwrap();
    end(&mut lab.b, orderly);
    lab
}

fn coming(host: &Host) -> PathBuf {
    let name = host.files().into_iter().find(|name| name.contains("dray-partial")).unwrap();
    host.pool().join(name)
}

/// Other bytes would be the image's where they lie, as blocks that have been received are not sent again.
#[test]
fn an_image_that_comes_goes_on_in_its_own_file_alone() {
    for orderly in [false, true] {
        let mut lab = in_copy(orderly);
        let (file, aside) = (coming(&lab.b), lab.b.pool().join("aside"));
        std::fs::rename(&file, &aside).unwrap();
        std::fs::write(&file, older()).unwrap();
        lab.b.start();
        is_another(&lab.b);
        let mut guest = client(&lab.a);
        write(&mut guest, 3, 2).unwrap();
        flush(&mut guest);
        std::fs::rename(&aside, &file).unwrap();
        assert!(lab.a.dray(&["limit", "none"]).status.success());
        wait_for("the image at the target", WAIT, || {
            let image = lab.b.image(IMAGE).unwrap_or_default();
            image["state"] == "owner" && image["migration"].is_null()
        })
        .unwrap();
        drop(guest);
        let arrived = std::fs::read(lab.b.pool().join(IMAGE)).unwrap();
        for block in 0..BLOCKS {
            let expected = content(block, if block == 3 { 2 } else { 1 });
            let at = (block * BLOCK) as usize;
            assert!(arrived[at..at + BLOCK as usize] == expected, "block {block}");
        }
    }
}

/// The ways out when its own file does not come back: at its source, and at the target when that is away.
#[test]
fn an_image_that_comes_and_whose_file_is_lost_is_given_up() {
    for (at_source, another) in [(true, false), (true, true), (false, true)] {
        let mut lab = in_copy(false);
        let file = coming(&lab.b);
        std::fs::remove_file(&file).unwrap();
        if another {
            std::fs::write(&file, older()).unwrap();
        }
        lab.b.start();
        assert!(closed(&lab.b).is_some());
        let migration = lab.a.migrations()[0]["progress"]["migration"].as_str().unwrap().to_owned();
        let refused = lab.b.dray(&["cancel", &migration]);
        assert_eq!(refused.status.code(), Some(6), "its source has it: {refused:?}");
        if at_source {
            assert!(lab.a.dray(&["cancel", "--discard"]).status.success());
        } else {
            lab.a.kill();
            let cancelled = lab.b.dray(&["cancel", &migration]);
            assert!(cancelled.status.success(), "{cancelled:?}");
        }
        let gone = || lab.b.image(IMAGE).is_none() && lab.b.open_migrations() == 0;
        wait_for("nothing of it", WAIT, gone).unwrap();
        assert_eq!(file.exists(), another, "what is not dray's stays");
        if !at_source {
            lab.a.start();
        }
        assert_eq!(read(&mut client(&lab.a), 5), content(5, 1));
    }
}

/// What another program does to the copy that is still needed.
type Change = fn(&File);

fn overwrite(copy: &File) {
    copy.write_all_at(&[9; 512], 900 * BLOCK).unwrap();
}

fn cut_off_and_make_as_long_as_before(copy: &File) {
    let len = copy.metadata().unwrap().len();
    copy.set_len(len / 2).unwrap();
    copy.set_len(len).unwrap();
}

/// The copy at the source is changed while its agent is off, and then it is as it was.
fn waits_for_its_copy(orderly: bool, change: Change) {
    let mut lab = with_a_guest();
    end(&mut lab.a, orderly);
    let copy = File::options().write(true).open(replica(&lab.a).unwrap()).unwrap();
    let time = copy.metadata().unwrap().modified().unwrap();
    change(&copy);
    lab.a.start();
    let why = closed(&lab.a);
    let told = "changed after the image was handed over";
    assert!(why.as_ref().is_some_and(|why| why.contains(told)), "{why:?}");
    nothing_comes(&lab);
    let held: Vec<u8> = (0..BLOCKS).flat_map(|block| content(block, 1)).collect();
    copy.write_all_at(&held, 0).unwrap();
    copy.set_times(FileTimes::new().set_modified(time)).unwrap();
    wait_for("the copy as it was", WAIT, || closed(&lab.a).is_none()).unwrap();
    to_the_end(&lab);
    let version = |block| if [5, 6, 700].contains(&block) { 2 } else { 1 };
    let mut client = client(&lab.b);
    for block in 0..BLOCKS {
        assert_eq!(read(&mut client, block), content(block, version(block)), "{block}");
    }
}

#[test]
fn a_copy_that_was_written_to_after_the_handover_sends_nothing_until_it_is_as_it_was() {
    waits_for_its_copy(false, overwrite);
    waits_for_its_copy(true, overwrite);
}

#[test]
fn a_copy_that_was_cut_off_after_the_handover_sends_nothing_until_it_is_as_it_was() {
    waits_for_its_copy(false, cut_off_and_make_as_long_as_before);
    waits_for_its_copy(true, cut_off_and_make_as_long_as_before);
}

/// dray does not take what it does itself for somebody else's writing.
#[test]
fn a_copy_that_nobody_has_changed_is_sent_whatever_restarts() {
    let mut lab = with_a_guest();
    for (orderly, block) in [false, true, false, true].into_iter().zip(100..) {
        end(&mut lab.a, orderly);
        lab.a.start();
        assert_eq!(read(&mut client(&lab.b), block), content(block, 1));
        assert_eq!(closed(&lab.a), None);
        assert!(!lab.a.log().contains("was touched"), "{}", lab.a.log());
    }
    to_the_end(&lab);
}

/// The agent was killed ten seconds ago.
pub fn killed_long_ago(host: &mut Host) {
    host.kill();
    let folders = ["images", "seeds"].map(|folder| host.state().join(folder));
    for file in folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap()) {
        let path = file.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "beat") {
            continue;
        }
        let beat = File::options().write(true).open(path).unwrap();
        let then = beat.metadata().unwrap().modified().unwrap() - Duration::from_secs(10);
        beat.set_times(FileTimes::new().set_modified(then)).unwrap();
    }
}

/// Somebody starts the VM without dray for a while.
pub fn write_in_place(path: &Path) {
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(&content(9, 5), 9 * BLOCK).unwrap();
}

#[test]
fn what_another_program_writes_after_the_agent_was_killed_is_moved() {
    for back in [false, true] {
        let mut lab = in_copy(true);
        lab.b.start();
        killed_long_ago(&mut lab.a);
        let path = lab.a.pool().join(IMAGE);
        if back {
            write_hidden(&path)
        } else {
            write_in_place(&path)
        }
        lab.a.start();
        assert!(lab.a.dray(&["limit", "none"]).status.success());
        wait_for("the image at the target", WAIT, || {
            let image = lab.b.image(IMAGE).unwrap_or_default();
            image["state"] == "owner" && image["migration"].is_null()
        })
        .unwrap();
        let arrived = std::fs::read(lab.b.pool().join(IMAGE)).unwrap();
        let at = |block: u64| &arrived[(block * BLOCK) as usize..][..BLOCK as usize];
        assert!(at(9) == content(9, 5), "the target has what was there before");
        assert!(at(8) == content(8, 1));
    }
}

/// The agent died after the journal said so, and before the file lost its name.
#[test]
fn what_was_just_handed_over_and_changed_meanwhile_sends_nothing() {
    let mut lab = Lab::new();
    lab.a.start_with(&[("DRAY_ABORT_BEFORE", "Retire")]);
    lab.b.start();
    let path = lab.a.pool().join(IMAGE);
    std::fs::write(&path, first()).unwrap();
    lab.a.add(IMAGE);
    lab.a.dray(&[
        "migrate",
        "--image",
        IMAGE,
        "--to",
        "hostb",
        "--strategy",
        "deferred",
        "--detach",
    ]);
    lab.a.await_death().unwrap();
    killed_long_ago(&mut lab.a);
    write_in_place(&path);
    lab.a.start();
    let why = closed(&lab.a);
    assert!(why.as_ref().is_some_and(|why| why.contains("while no agent had it open")), "{why:?}");
    claim(&lab.b, &CLAIM);
    assert_eq!(read(&mut client(&lab.b), 9), vec![0; 4096]);
}

/// What was received cannot be told from what somebody has put there: all of it is received anew.
#[test]
fn an_image_that_comes_and_was_changed_meanwhile_is_received_anew() {
    let changes: [Change; 3] = [
        |file| file.write_all_at(&[9; 4096], 9 * BLOCK).unwrap(),
        |file| file.set_len(BLOCKS / 2 * BLOCK).unwrap(),
        |file| file.set_permissions(Permissions::from_mode(0o640)).unwrap(),
    ];
    for change in changes {
        let mut lab = in_copy(false);
        lab.b.start();
        killed_long_ago(&mut lab.b);
        change(&File::options().write(true).open(coming(&lab.b)).unwrap());
        lab.b.start();
        assert!(lab.a.dray(&["limit", "none"]).status.success());
        owned(&lab.b);
        assert!(std::fs::read(lab.b.pool().join(IMAGE)).unwrap() == first());
    }
}

/// A disk is as long as it was, also where it ends with a hole, which nobody sends.
#[test]
fn an_image_that_is_received_anew_keeps_its_length() {
    let mut lab = Lab::new();
    lab.start();
    let file = File::create(lab.a.pool().join(IMAGE)).unwrap();
    for block in 0..BLOCKS / 2 {
        file.write_all_at(&content(block, 1), block * BLOCK).unwrap();
    }
    file.set_len(BLOCKS * BLOCK).unwrap();
    lab.a.add(IMAGE);
    let more = ["--to", "hostb", "--strategy", "pre-copy", "--bandwidth", "256KiB/s", "--detach"];
    assert!(lab.a.dray(&[&["migrate", "--image", IMAGE], &more[..]].concat()).status.success());
    let some =
        || lab.a.progress().is_some_and(|it| it.1["total"]["bytes_done"].as_u64() > Some(1 << 18));
    wait_for("some of it", WAIT, some).unwrap();
    killed_long_ago(&mut lab.b);
    let coming = File::options().write(true).open(coming(&lab.b)).unwrap();
    coming.write_all_at(&[9; 4096], (BLOCKS - 1) * BLOCK).unwrap();
    lab.b.start();
    assert!(lab.a.dray(&["limit", "none"]).status.success());
    owned(&lab.b);
    let moved = std::fs::read(lab.b.pool().join(IMAGE)).unwrap();
    assert_eq!(moved.len() as u64, BLOCKS * BLOCK);
    assert!(moved == std::fs::read(replica(&lab.a).unwrap()).unwrap());
}

/// It belongs to the host, and takes part in no migration any more.
fn owned(host: &Host) {
    wait_for("the image", WAIT, || {
        let image = host.image(IMAGE).unwrap_or_default();
        image["state"] == "owner" && image["migration"].is_null()
    })
    .unwrap();
}

/// A target that has promised to serve an image, and is dead before it has recorded that it owns it; its source has
/// handed over. Another program does this to the file.
fn promised(change: Change) -> Lab {
    let mut lab = Lab::new();
    lab.a.start();
    lab.b.start_with(&[("DRAY_ABORT_BEFORE", "Journal-Committed")]);
    std::fs::write(lab.a.pool().join(IMAGE), first()).unwrap();
    lab.a.add(IMAGE);
    let more = ["--to", "hostb", "--strategy", "pre-copy", "--detach"];
    assert!(lab.a.dray(&[&["migrate", "--image", IMAGE], &more[..]].concat()).status.success());
    lab.b.await_death().unwrap();
    killed_long_ago(&mut lab.b);
    change(&File::options().write(true).open(coming(&lab.b)).unwrap());
    lab
}

/// Everything was there, and counts for nothing: the source still has all of it.
#[test]
fn what_was_promised_and_changed_meanwhile_is_fetched_again() {
    let changes: [Change; 2] = [
        |file| file.write_all_at(&[9; 4096], 9 * BLOCK).unwrap(),
        |file| file.set_permissions(Permissions::from_mode(0o640)).unwrap(),
    ];
    for change in changes {
        let mut lab = promised(change);
        lab.b.start();
        owned(&lab.b);
        assert!(std::fs::read(lab.b.pool().join(IMAGE)).unwrap() == first());
    }
}

/// The source is lost: what lies there is better than zeros, and the operator is told.
#[test]
fn what_was_promised_and_changed_meanwhile_can_be_claimed() {
    let mut lab = promised(|file| file.set_permissions(Permissions::from_mode(0o640)).unwrap());
    lab.a.kill();
    lab.b.start();
    let refused = lab.b.dray(&["claim", IMAGE, "--source-is-fenced"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("another program has changed its file"), "{said}");
    claim(&lab.b, &CLAIM);
    assert!(std::fs::read(lab.b.pool().join(IMAGE)).unwrap() == first());
}

/// The file that was promised is lost, and the operator takes the image back at the source: nothing of it waits at the
/// target any more.
#[test]
fn a_promise_whose_file_is_lost_ends_with_a_claim_at_the_source() {
    let mut lab = promised(|_| {});
    std::fs::remove_file(coming(&lab.b)).unwrap();
    lab.b.start();
    let hint = format!("`dray claim {IMAGE} --source-is-fenced --accept-loss` at hosta");
    wait_for("the way out", WAIT, || {
        String::from_utf8_lossy(&lab.b.dray(&["status"]).stdout).contains(&hint)
    })
    .unwrap();
    claim(&lab.a, &CLAIM);
    wait_for("nothing of it", 3 * WAIT, || lab.b.image(IMAGE).is_none()).unwrap();
    assert_eq!(read(&mut client(&lab.a), 9), content(9, 1));
    let more = ["--to", "hostb", "--strategy", "pre-copy"];
    let moved = lab.a.dray(&[&["migrate", "--image", IMAGE], &more[..]].concat());
    assert!(moved.status.success(), "{moved:?}");
}

/// Nobody knows what it holds any more: nothing of it is used, and it goes with the rest.
#[test]
fn a_copy_that_comes_back_and_was_changed_meanwhile_is_not_used() {
    let mut lab = Lab::new();
    lab.start();
    std::fs::write(lab.a.pool().join(IMAGE), first()).unwrap();
    lab.a.add(IMAGE);
    let away =
        lab.a.dray(&["migrate", "--image", IMAGE, "--to", "hostb", "--strategy", "pre-copy"]);
    assert!(away.status.success(), "{away:?}");
    let free = |host: &Host| host.image(IMAGE).is_some_and(|image| image["migration"].is_null());
    wait_for("both to be done", WAIT, || free(&lab.a) && free(&lab.b)).unwrap();
    let mut guest = client(&lab.b);
    (0..100).for_each(|block| write(&mut guest, block, 2).unwrap());
    flush(&mut guest);
    drop(guest);
    let home = ["migrate", "--image", IMAGE, "--to", "hosta", "--strategy", "pre-copy"];
    let slowly = lab.b.dray(&[&home[..], &["--bandwidth", "32KiB/s", "--detach"]].concat());
    assert!(slowly.status.success(), "{slowly:?}");
    let comes = || lab.a.image(IMAGE).is_some_and(|image| image["state"] == "incoming");
    wait_for("its way back", WAIT, comes).unwrap();
    killed_long_ago(&mut lab.a);
    let file = File::options().write(true).open(coming(&lab.a)).unwrap();
    file.write_all_at(&[9; 4096], 900 * BLOCK).unwrap();
    lab.a.start();
    let why = closed(&lab.a);
    assert!(why.as_ref().is_some_and(|why| why.contains("while no agent had it open")), "{why:?}");
    assert!(lab.b.dray(&["cancel", "--discard"]).status.success());
    wait_for("nothing of it", WAIT, || lab.a.image(IMAGE).is_none()).unwrap();
    assert!(!lab.a.files().iter().any(|name| name.contains("dray-")), "{:?}", lab.a.files());
    assert!(lab.b.dray(&home).status.success());
    let held: Vec<u8> =
        (0..BLOCKS).flat_map(|block| content(block, if block < 100 { 2 } else { 1 })).collect();
    assert!(std::fs::read(lab.a.pool().join(IMAGE)).unwrap() == held);
}

/// What is in the image of these tests at first.
fn first() -> Vec<u8> {
    (0..BLOCKS).flat_map(|block| content(block, 1)).collect()
}

/// What `change` does to an image between two agents, of which the first ends by `end`, is in the next backup. Without
/// a change nothing is.
fn is_backed_up(end: fn(&mut Host), change: fn(&Path)) {
    let mut lab = Lab::new();
    lab.a.start();
    let url = backups::repository(&lab);
    let mut held = backups::image(&lab, IMAGE);
    let backup = json!({"backup": {"images": [IMAGE], "to": url}});
    lab.a.ask(backup.clone()).unwrap();
    lab.a.kill();
    lab.a.start();
    lab.a.stop();
    lab.a.start();
    let done = lab.a.ask(backup.clone()).unwrap();
    assert_eq!(done["images"][0]["changed_bytes"], 0, "{done}");
    end(&mut lab.a);
    change(&lab.a.pool().join(IMAGE));
    held[(9 * BLOCK) as usize..][..BLOCK as usize].copy_from_slice(&content(9, 5));
    lab.a.start();
    let done = lab.a.ask(backup).unwrap();
    let generation = done["images"][0]["generation"]["id"].as_str().unwrap();
    assert!(backups::restore(&lab, &url, IMAGE, generation, "restored") == held, "{done}");
}

/// Somebody writes to the file with its time kept, as `rsync --inplace --times` does.
fn write_hidden(path: &Path) {
    let time = path.metadata().unwrap().modified().unwrap();
    write_in_place(path);
    let file = File::options().write(true).open(path).unwrap();
    file.set_times(FileTimes::new().set_modified(time)).unwrap();
}

#[test]
fn what_another_program_hides_after_an_orderly_stop_is_backed_up() {
    is_backed_up(Host::stop, write_hidden);
}

#[test]
fn what_another_program_writes_after_the_agent_was_killed_is_backed_up() {
    is_backed_up(killed_long_ago, write_in_place);
}

#[test]
fn a_backup_of_a_file_that_was_made_again_holds_what_is_in_it() {
    let mut lab = Lab::new();
    lab.a.start();
    let url = backups::repository(&lab);
    let old = backups::image(&lab, IMAGE);
    let backup = json!({"backup": {"images": [IMAGE], "to": url}});
    lab.a.ask(backup.clone()).unwrap();
    lab.a.kill();
    let new: Vec<u8> = old.iter().map(|byte| !byte).collect();
    if !make_again(&lab.a.pool().join(IMAGE), &new) {
        return;
    }
    lab.a.start();
    let done = lab.a.ask(backup).unwrap();
    let generation = done["images"][0]["generation"]["id"].as_str().unwrap();
    assert!(backups::restore(&lab, &url, IMAGE, generation, "restored") == new, "{done}");
}
