//! A target that restarts in Backfill: with blocks that only a note names, with an image that has
//! grown, with notes that were torn. Nothing that was flushed is lost, nothing is invented.

use crate::case::{Case, FAR, IMAGE, SMALL};
use crate::faults::fill;
use crate::guest::{self, BLOCK, content, first_version};
use crate::lab::{Host, Lab, run, wait_for};
use crate::mounts::Mount;
use crate::moves::result;
use crate::nbd::{Client, FLUSH, Fault, READ, WRITE};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Blocks of the image: 8 MiB.
pub const BLOCKS: u64 = 2048;
pub const WAIT: Duration = Duration::from_secs(30);

/// A migration whose target owns the image and has none of it.
pub fn handed_over(mut lab: Lab) -> Lab {
    let file = File::create(lab.a.pool().join(IMAGE)).unwrap();
    for block in 0..BLOCKS {
        file.write_all_at(&content(block, 1), block * BLOCK).unwrap();
    }
    lab.start();
    let path = lab.a.pool().join(IMAGE);
    let add = ["images", "add", IMAGE, path.to_str().unwrap(), "--growable"];
    assert!(lab.a.dray(&add).status.success());
    let args = ["migrate", "--image", IMAGE, "--to", "hostb", "--detach", "--strategy", "deferred"];
    let output = lab.a.dray(&args);
    assert!(output.status.success(), "{output:?}");
    wait_for("the handover", WAIT, || missing(&lab.b) == Some(BLOCKS))
        .unwrap_or_else(|why| panic!("{why}\n{}\n{}", lab.a.log(), lab.b.log()));
    lab
}

pub fn missing(host: &Host) -> Option<u64> {
    host.image(IMAGE).filter(|image| image["state"] == "owner")?["missing_blocks"].as_u64()
}

pub fn client(host: &Host) -> Client {
    Client::connect(&host.nbd(), IMAGE).unwrap()
}

pub fn write(client: &mut Client, block: u64, version: u64) -> Result<(), Fault> {
    let (offset, data) = (block * BLOCK, content(block, version));
    client.request(WRITE, offset, BLOCK as u32, &data, &|| true).map(drop)
}

pub fn flush(client: &mut Client) {
    client.request(FLUSH, 0, 0, &[], &|| true).unwrap();
}

pub fn read(client: &mut Client, block: u64) -> Vec<u8> {
    client.request(READ, block * BLOCK, BLOCK as u32, &[], &|| true).unwrap()
}

fn restart(host: &mut Host, orderly: bool) {
    if orderly {
        host.stop();
    } else {
        host.kill();
    }
    host.start();
}

/// The files of the target's migration whose names end so.
fn of_migration(host: &Host, ending: &str) -> Vec<PathBuf> {
    let folders = std::fs::read_dir(host.dir.join("state/migrations")).unwrap();
    let files = folders.flat_map(|folder| std::fs::read_dir(folder.unwrap().path()).unwrap());
    let paths = files.map(|file| file.unwrap().path());
    paths.filter(|path| path.to_string_lossy().ends_with(ending)).collect()
}

/// What a reboot leaves of notes: nothing that counts.
fn forget_notes(host: &Host) {
    let notes = of_migration(host, ".notes");
    assert!(!notes.is_empty());
    notes.iter().for_each(|path| std::fs::remove_file(path).unwrap());
}

/// Lets Backfill go on, and both hosts forget the migration.
pub fn to_the_end(lab: &Lab) {
    let started = lab.b.dray(&["backfill", "start"]);
    assert!(started.status.success(), "{started:?}");
    wait_for("the end", WAIT, || {
        missing(&lab.b) == Some(0) && lab.a.open_migrations() + lab.b.open_migrations() == 0
    })
    .unwrap_or_else(|why| panic!("{why}\n{}\n{}", lab.a.log(), lab.b.log()));
}

/// A write is noted, the agent restarts, the guest flushes, the power fails.
fn noted_blocks_last(orderly: bool) {
    let mut lab = handed_over(Lab::new());
    for block in [5, 6, 700] {
        write(&mut client(&lab.b), block, 2).unwrap();
    }
    restart(&mut lab.b, orderly);
    assert_eq!(missing(&lab.b), Some(BLOCKS - 3), "written is written");
    flush(&mut client(&lab.b));
    lab.b.kill();
    forget_notes(&lab.b);
    lab.b.start();
    assert_eq!(missing(&lab.b), Some(BLOCKS - 3), "flushed is recorded");
    let mut client = client(&lab.b);
    for block in [5, 6, 700] {
        assert_eq!(read(&mut client, block), content(block, 2), "block {block}");
    }
    assert_eq!(read(&mut client, 7), content(7, 1));
    to_the_end(&lab);
    assert_eq!(read(&mut client, 5), content(5, 2));
}

#[test]
fn noted_blocks_are_durable_after_a_kill_and_a_flush() {
    noted_blocks_last(false);
}

#[test]
fn noted_blocks_are_durable_after_an_orderly_restart_and_a_flush() {
    noted_blocks_last(true);
}

/// Notes of which one is torn, as by a full disk or a kill, and what follows it.
#[test]
fn a_torn_note_makes_nothing_present_and_does_not_keep_the_agent_from_starting() {
    let mut lab = handed_over(Lab::new());
    for block in [5, 6, 700] {
        write(&mut client(&lab.b), block, 2).unwrap();
    }
    lab.b.kill();
    for notes in of_migration(&lab.b, ".notes") {
        let mut bytes = std::fs::read(&notes).unwrap();
        // The last one loses its end, and what follows it is shifted and foreign.
        let last = bytes[bytes.len() - 24..].to_vec();
        bytes.truncate(bytes.len() - 3);
        bytes.extend([last, vec![0xff; 40]].concat());
        std::fs::write(&notes, bytes).unwrap();
    }
    lab.b.start();
    assert_eq!(missing(&lab.b), Some(BLOCKS - 2));
    assert_eq!(read(&mut client(&lab.b), 9), content(9, 1));
    assert_eq!(read(&mut client(&lab.b), 5), content(5, 2));
    assert_eq!(read(&mut client(&lab.b), 700), content(700, 1), "its note is none");
    write(&mut client(&lab.b), 900, 2).unwrap();
    let left = missing(&lab.b);
    restart(&mut lab.b, false);
    assert_eq!(missing(&lab.b), left, "what came afterwards is noted");
    assert_eq!(read(&mut client(&lab.b), 900), content(900, 2));
    to_the_end(&lab);
}

/// The target's state directory is full while its guest writes into what is missing.
#[test]
fn a_full_state_directory_in_backfill_invents_nothing() {
    let lab = Lab::new();
    let Some(small) = Mount::tmpfs(&lab.b.dir.join("state"), "size=8m") else { return };
    let mut lab = handed_over(lab);
    let ballast = small.path.join("ballast");
    fill(&ballast);
    let mut written = Vec::new();
    for block in (100..1100).step_by(2) {
        match write(&mut client(&lab.b), block, 2) {
            Ok(()) => written.push(block),
            Err(Fault::Error(_)) => {}
            Err(Fault::Lost) => panic!("{}", lab.b.log()),
        }
    }
    assert_eq!(written.len(), 500, "what is noted has its place");
    std::fs::remove_file(&ballast).unwrap();
    for block in 1200..1210 {
        write(&mut client(&lab.b), block, 2).unwrap();
        written.push(block);
    }
    lab.b.kill();
    lab.b.start();
    assert_eq!(missing(&lab.b), Some(BLOCKS - written.len() as u64));
    let mut client = client(&lab.b);
    for block in [100, 101, 150, 1098, 1099, 1205, 2000] {
        let version = 1 + u64::from(written.contains(&block));
        assert_eq!(read(&mut client, block), content(block, version), "block {block}");
    }
    to_the_end(&lab);
}

/// A guest, a copy under way, and a file system that is full from here to the test's end or until
/// the file is removed.
fn full_during_copy(part: &str, size: &str, strategy: &str) -> Option<(Mount, Case)> {
    let lab = Lab::new();
    let mount = Mount::tmpfs(&lab.b.dir.join(part), size)?;
    let mut case = Case::begin_small(lab);
    case.migrate(strategy, Some(6 << 20)).unwrap();
    case.await_bytes(1 << 20).unwrap();
    fill(&mount.path.join("ballast"));
    Some((mount, case))
}

fn hint(host: &Host) -> String {
    host.migrations().first().map_or(String::new(), |migration| migration["error"].to_string())
}

/// The whole handover, and reads of what is missing, with a full state directory at the target: what
/// must be written then has its room, and what has none waits for it and says so.
#[test]
fn a_handover_into_a_full_state_directory_serves_its_guest() {
    for strategy in ["hybrid", "post-copy"] {
        let Some((small, mut case)) = full_during_copy("state", "size=8m", strategy) else {
            return;
        };
        let lab = &case.lab;
        wait_for("the owner", WAIT, || lab.b.log().contains("this host owns and serves"))
            .unwrap_or_else(|why| panic!("{strategy} {why}\n{}\n{}", lab.a.log(), lab.b.log()));
        // What the agent has replaced meanwhile has left room for another one of its files.
        let says_so = || {
            fill(&small.path.join("ballast"));
            hint(&lab.b).contains("make room")
        };
        wait_for("the reason", WAIT, says_so).unwrap();
        let mut client = client(&lab.b);
        for block in [SMALL + 1, 16384, 20000, FAR - 1] {
            let wanted = content(block, first_version(block, FAR));
            assert!(read(&mut client, block) == wanted, "{strategy}: block {block}");
        }
        assert_eq!(case.guest.complaint(), None);
        std::fs::remove_file(small.path.join("ballast")).unwrap();
        case.await_end().unwrap();
        case.end().unwrap();
    }
}

/// One that is full when the agent starts again is no reason not to serve.
#[test]
fn an_owner_restarts_with_a_full_state_directory() {
    let lab = Lab::new();
    let Some(small) = Mount::tmpfs(&lab.b.dir.join("state"), "size=8m") else { return };
    let mut lab = handed_over(lab);
    write(&mut client(&lab.b), 5, 2).unwrap();
    fill(&small.path.join("ballast"));
    lab.b.kill();
    lab.b.start();
    let mut client = client(&lab.b);
    assert_eq!(read(&mut client, 5), content(5, 2));
    assert_eq!(read(&mut client, 700), content(700, 1));
    write(&mut client, 900, 2).unwrap();
    flush(&mut client);
    std::fs::remove_file(small.path.join("ballast")).unwrap();
    to_the_end(&lab);
    assert_eq!(read(&mut client, 900), content(900, 2));
}

/// What does not fit into the pool is asked for again, what is written into it fails as on any full
/// disk, and all goes on when there is room.
#[test]
fn a_full_pool_in_backfill_stalls_reads_and_loses_nothing() {
    let lab = Lab::new();
    let Some(small) = Mount::tmpfs(&lab.b.pool(), "size=16m") else { return };
    let lab = handed_over(lab);
    let mut guest = client(&lab.b);
    write(&mut guest, 5, 2).unwrap();
    flush(&mut guest);
    fill(&small.path.join("ballast"));
    assert!(matches!(write(&mut guest, 700, 2), Err(Fault::Error(28))));
    flush(&mut guest);
    assert_eq!(missing(&lab.b), Some(BLOCKS - 1));
    let nbd = lab.b.nbd();
    let reader = std::thread::spawn(move || read(&mut Client::connect(&nbd, IMAGE).unwrap(), 900));
    wait_for("the demand", WAIT, || {
        lab.b.progress().is_some_and(|(_, progress)| progress["remote_reads"] == 0)
            && lab.b.log().contains("cannot fetch")
    })
    .unwrap_or_else(|why| panic!("{why}\n{}", lab.b.log()));
    assert!(!reader.is_finished(), "a read of what is missing waits");
    assert_eq!(read(&mut guest, 5), content(5, 2));
    std::fs::remove_file(small.path.join("ballast")).unwrap();
    assert_eq!(reader.join().unwrap(), content(900, 1));
    write(&mut guest, 700, 2).unwrap();
    flush(&mut guest);
    to_the_end(&lab);
    for (block, version) in [(5, 2), (700, 2), (701, 1), (900, 1)] {
        assert_eq!(read(&mut guest, block), content(block, version), "block {block}");
    }
}

/// What lies behind the length that was handed over is the guest's, however often the agent restarts.
#[test]
fn an_image_that_has_grown_is_never_cut_back() {
    for orderly in [false, true] {
        let mut lab = handed_over(Lab::new());
        let mut guest = client(&lab.b);
        for block in [BLOCKS, BLOCKS + 300] {
            write(&mut guest, block, 2).unwrap();
        }
        flush(&mut guest);
        for _ in 0..2 {
            restart(&mut lab.b, orderly);
            let mut guest = client(&lab.b);
            for block in [BLOCKS, BLOCKS + 300] {
                assert_eq!(read(&mut guest, block), content(block, 2), "block {block}");
            }
        }
        to_the_end(&lab);
        assert_eq!(lab.b.pool().join(IMAGE).metadata().unwrap().len(), (BLOCKS + 301) * BLOCK);
    }
}

/// What a guest could write behind it no migration would move and no backup would keep.
#[test]
fn an_image_is_as_long_as_dray_knows_it_when_somebody_makes_its_file_longer() {
    let mut lab = Lab::new();
    lab.a.start();
    let path = lab.a.pool().join(IMAGE);
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    lab.a.add(IMAGE);
    lab.a.kill();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(4 << 20).unwrap();
    lab.a.start();
    let size = |host: &Host| {
        let info = Command::new("nbdinfo").arg("--size").arg(export(host)).output().unwrap();
        String::from_utf8_lossy(&info.stdout).trim().to_owned()
    };
    assert_eq!(size(&lab.a), (1 << 20).to_string());
    result(&lab.a.dray(&["--json", "resize", IMAGE, "4MiB"]));
    assert_eq!(size(&lab.a), (4 << 20).to_string());
    let mut guest = client(&lab.a);
    write(&mut guest, 900, 2).unwrap();
    flush(&mut guest);
    restart(&mut lab.a, false);
    assert_eq!(size(&lab.a), (4 << 20).to_string());
    assert_eq!(read(&mut client(&lab.a), 900), content(900, 2));
}

fn qemu_io(export: &str, commands: &[&str]) {
    let mut tool = Command::new("qemu-io");
    tool.args(["-f", "qcow2", export]);
    for command in commands {
        tool.args(["-c", command]);
    }
    let output = tool.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && !said.contains("failed"), "{commands:?}: {output:?}");
}

fn export(host: &Host) -> String {
    format!("nbd+unix:///{IMAGE}?socket={}", host.nbd().display())
}

/// Writes what is there already, again and again, so that the block is missing at the handover.
fn rewrite_until_it_leaves(socket: &Path, offset: u64) {
    let Ok(mut client) = Client::connect(socket, IMAGE) else { return };
    let block = vec![1; BLOCK as usize];
    while client.request(WRITE, offset, BLOCK as u32, &block, &|| true).is_ok() {
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A qcow2 grows at its new owner while the source is away, and the target restarts.
#[test]
fn a_qcow2_that_grows_after_the_handover_keeps_its_clusters() {
    for orderly in [false, true] {
        let mut lab = Lab::new();
        let path = lab.a.pool().join(IMAGE);
        run(Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&path).arg("64M"));
        qemu_io(path.to_str().unwrap(), &["write -q -P 1 0 8M"]);
        // The source dies as soon as the target serves: what is missing stays so.
        lab.a.start_with(&[("DRAY_ABORT_BEFORE", "Notice-TargetServing")]);
        lab.b.start();
        let added =
            lab.a.dray(&["images", "add", IMAGE, path.to_str().unwrap(), "--format", "qcow2"]);
        assert!(added.status.success(), "{added:?}");
        let socket = lab.a.nbd();
        let writer = std::thread::spawn(move || rewrite_until_it_leaves(&socket, 4 << 20));
        let args = ["migrate", "--image", IMAGE, "--to", "hostb", "--detach", "--strategy"];
        let asked = lab.a.dray(&[&args[..], &["hybrid", "--bandwidth", "4MiB/s"]].concat());
        assert!(asked.status.success(), "{asked:?}");
        wait_for("the source's end", WAIT, || lab.a.has_died()).unwrap();
        writer.join().unwrap();
        wait_for("the owner", WAIT, || missing(&lab.b).is_some()).unwrap();
        assert!(missing(&lab.b) > Some(0), "nothing is missing: the test tests nothing");
        qemu_io(&export(&lab.b), &["write -q -P 7 32M 4M", "write -q -P 8 50M 64k", "flush"]);
        restart(&mut lab.b, orderly);
        let reads = ["read -P 7 32M 4M", "read -P 8 50M 64k", "read -P 1 0 1M"];
        qemu_io(&export(&lab.b), &reads);
        lab.a.start();
        wait_for("the end", WAIT, || {
            missing(&lab.b) == Some(0) && lab.a.open_migrations() + lab.b.open_migrations() == 0
        })
        .unwrap_or_else(|why| panic!("{why}\n{}\n{}", lab.a.log(), lab.b.log()));
        lab.a.kill();
        lab.b.kill();
        let file = lab.b.pool().join(IMAGE);
        run(Command::new("qemu-img").args(["check", "-q"]).arg(&file));
        qemu_io(file.to_str().unwrap(), &[&reads[..], &["read -P 1 0 8M"]].concat());
    }
}

/// An image of it was removed, and another one has its name: the migration cannot be resumed, and what is left of
/// it keeps nobody from the other image.
#[test]
fn an_abandoned_migration_that_cannot_be_resumed_closes_no_image() {
    const KEPT: &str = "kept.img";
    let mut lab = Lab::new();
    [IMAGE, KEPT].iter().for_each(|name| guest::make_image(&lab.a.pool().join(name), BLOCKS));
    lab.start();
    [IMAGE, KEPT].iter().for_each(|name| lab.a.add(name));
    let slow = ["--bandwidth", "1Mbit", "--strategy", "pre-copy", "--to", "hostb", "--detach"];
    let both = ["migrate", "--image", IMAGE, "--image", KEPT];
    let begun = lab.a.dray(&[&both[..], &slow].concat());
    assert!(begun.status.success(), "{begun:?}");
    wait_for("the copy", WAIT, || {
        lab.a.progress().is_some_and(|(_, shown)| shown["phase"] == "copy")
    })
    .unwrap();
    assert!(lab.a.dray(&["cancel"]).status.success());
    let free = || lab.a.image(KEPT).is_some_and(|image| image["migration"].is_null());
    wait_for("the end", WAIT, free).unwrap();
    assert!(lab.a.dray(&["images", "remove", IMAGE]).status.success());
    lab.a.add(IMAGE);
    for _ in 0..2 {
        restart(&mut lab.a, false);
        for name in [IMAGE, KEPT] {
            let mut guest = Client::connect(&lab.a.nbd(), name).unwrap();
            let data = content(1, 1);
            let block = BLOCK as u32;
            guest.request(WRITE, BLOCK, block, &data, &|| true).unwrap_or_else(|why| {
                panic!("{name}: {why:?}\n{:?}\n{}", lab.a.image(name), lab.a.log())
            });
        }
    }
}

/// What happens to a file of a migration while no agent runs.
#[derive(Clone, Copy, Debug)]
enum Damage {
    Removed,
    Emptied,
    /// One bit of its last byte.
    LastBit,
}

fn damage(path: &Path, how: Damage) {
    match how {
        Damage::Removed => std::fs::remove_file(path).unwrap(),
        Damage::Emptied => std::fs::write(path, "").unwrap(),
        Damage::LastBit => {
            let mut bytes = std::fs::read(path).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            std::fs::write(path, bytes).unwrap();
        }
    }
}

/// Why nobody is let in to the image, if so.
pub fn closed(host: &Host) -> Option<String> {
    Some(host.image(IMAGE)?["closed"]["why"].as_str()?.to_owned())
}

/// Without them nobody knows which blocks a guest has written: fetching those again would undo its writes, and
/// a claim would make zeros of them.
#[test]
fn a_target_whose_files_are_lost_serves_nothing_until_they_are_back() {
    let mut lab = handed_over(Lab::new());
    for block in [5, 6, 700] {
        write(&mut client(&lab.b), block, 2).unwrap();
    }
    flush(&mut client(&lab.b));
    let damages = [Damage::Removed, Damage::Emptied, Damage::LastBit];
    for (ending, how) in
        ["present-0", "target.journal"].into_iter().flat_map(|e| damages.map(|d| (e, d)))
    {
        lab.b.kill();
        let path = of_migration(&lab.b, ending).remove(0);
        let whole = std::fs::read(&path).unwrap();
        damage(&path, how);
        lab.b.start();
        assert!(closed(&lab.b).is_some(), "{ending} {how:?}");
        let claim = lab.b.dray(&["claim", IMAGE, "--accept-loss"]);
        let said = String::from_utf8_lossy(&claim.stderr).into_owned();
        assert!(
            !claim.status.success() && !said.contains("at the source"),
            "{ending} {how:?}: {said}"
        );
        std::fs::write(&path, whole).unwrap();
        lab.b.kill();
        lab.b.start();
        for (block, version) in [(5, 2), (6, 2), (700, 2), (7, 1)] {
            assert_eq!(
                read(&mut client(&lab.b), block),
                content(block, version),
                "{ending} {how:?}: {block}"
            );
        }
    }
    to_the_end(&lab);
}

/// The target still needs blocks of it.
#[test]
fn a_source_whose_file_is_another_one_after_the_handover_sends_nothing_of_it() {
    let mut lab = handed_over(Lab::new());
    wait_for("the new name", WAIT, || replica(&lab.a).is_some()).unwrap();
    let path = replica(&lab.a).unwrap();
    let (kept, other) = (lab.a.dir.join("kept"), lab.a.dir.join("other"));
    std::fs::write(&other, vec![0x77; (BLOCKS * BLOCK) as usize]).unwrap();
    for orderly in [false, true] {
        if orderly {
            lab.a.stop()
        } else {
            lab.a.kill()
        }
        std::fs::rename(&path, &kept).unwrap();
        std::fs::copy(&other, &path).unwrap();
        lab.a.start();
        assert!(closed(&lab.a).is_some_and(|why| why.contains("another file")));
        std::fs::rename(&kept, &path).unwrap();
        wait_for("its own file", WAIT, || closed(&lab.a).is_none()).unwrap();
    }
    // It lies under the name that the image had before.
    let before = lab.a.pool().join(IMAGE);
    lab.a.kill();
    std::fs::rename(&path, &kept).unwrap();
    std::fs::copy(&other, &before).unwrap();
    lab.a.start();
    assert!(closed(&lab.a).is_some_and(|why| why.contains("another file")));
    std::fs::remove_file(&before).unwrap();
    std::fs::rename(&kept, &path).unwrap();
    wait_for("its own file", WAIT, || closed(&lab.a).is_none()).unwrap();
    assert_eq!(read(&mut client(&lab.b), 9), content(9, 1));
    to_the_end(&lab);
    assert_eq!(read(&mut client(&lab.b), 2000), content(2000, 1));
}

/// The file that the source has left behind.
pub fn replica(host: &Host) -> Option<PathBuf> {
    let name = host.files().into_iter().find(|name| name.contains("dray-replica"))?;
    Some(host.pool().join(name))
}

/// Its pool is not mounted yet, and a file of the same name lies under it.
#[test]
fn an_image_whose_pool_is_not_mounted_is_not_the_file_below() {
    let mut lab = Lab::new();
    guest::make_image(&lab.a.pool().join(IMAGE), SMALL);
    let Some(pool) = Mount::tmpfs(&lab.a.pool(), "size=64m") else { return };
    guest::make_image(&lab.a.pool().join(IMAGE), SMALL);
    lab.start();
    lab.a.add(IMAGE);
    // By a program that has ended.
    let uri = format!("nbd+unix:///{IMAGE}?socket={}", lab.a.nbd().display());
    run(Command::new("qemu-io").args([
        "-f",
        "raw",
        "-c",
        "write -P 9 20480 4096",
        "-c",
        "flush",
        &uri,
    ]));
    lab.a.stop();
    let away = lab.a.dir.join("away");
    std::fs::create_dir(&away).unwrap();
    run(Command::new("mount").arg("--move").args([&pool.path, &away]));
    lab.a.start();
    let shown = closed(&lab.a);
    run(Command::new("mount").arg("--move").args([&away, &pool.path]));
    assert!(shown.as_ref().is_some_and(|why| why.contains("mounted")), "{shown:?}");
    wait_for("its own file", WAIT, || closed(&lab.a).is_none()).unwrap();
    assert_eq!(read(&mut client(&lab.a), 5), [9; BLOCK as usize]);
    // The pool moves to another disk for good: whoever looks after it says so.
    lab.a.stop();
    std::fs::remove_file(lab.a.dir.join("state/images").join(format!("{IMAGE}.clients"))).unwrap();
    run(Command::new("umount").arg(&pool.path));
    lab.a.start();
    assert!(closed(&lab.a).is_some_and(|why| why.contains("images remove")));
    assert!(lab.a.dray(&["images", "remove", IMAGE]).status.success());
    lab.a.add(IMAGE);
    assert_eq!(read(&mut client(&lab.a), 5), content(5, first_version(5, SMALL)));
}
