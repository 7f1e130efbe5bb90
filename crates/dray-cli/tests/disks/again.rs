//! Files that are removed and made again while no agent runs. The file system gives a new
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
use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
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
fn with_a_guest() -> Lab {
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

/// dray does not take its own file for another one.
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
