//! Images that come onto block devices, and leave them. They need root and loop devices; a test that
//! cannot have them says why and counts as skipped.

use crate::case::{BLOCKS, Case, DATA, IMAGE};
use crate::guest::{self, BLOCK, Guest};
use crate::lab::{Host, Lab, opens, wait_for};
use crate::mounts::{Loop, Mount};
use crate::moves::{SLOW, result};
use crate::refusals::{CONFLICT, DENIED, MIGRATE, nothing_happened, refused};
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const NOT_FOUND: i32 = 5;
const NO_SPACE: i32 = 10;
/// What the devices hold before: no zeros, and nothing that a guest writes.
const GARBAGE: u8 = 0xA5;
/// Bytes that the target's device has more than the image.
const TAIL: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// A lab whose hosts have a pool of devices, `lv`, that the other may use.
fn lab() -> Lab {
    Lab::with(|name, config| {
        let pool = config.split("path = \"").nth(1).unwrap().split('"').next().unwrap();
        let devices = Path::new(pool).with_file_name("devices");
        std::fs::create_dir_all(&devices).unwrap();
        let io = if name == "hosta" { "direct" } else { "buffered" };
        let lv = format!(
            "[[pool]]\nname = \"lv\"\nkind = \"devices\"\nio = \"{io}\"\npath = \"{}\"\n[[peer]]",
            devices.display()
        );
        config.replace("[[peer]]", &lv).replace("[\"p\"]", "[\"p\", \"lv\"]")
    })
}

fn devices(host: &Host) -> PathBuf {
    host.dir.join("devices")
}

/// Where LVM would put the device of the image.
fn device(host: &Host) -> PathBuf {
    devices(host).join(IMAGE)
}

/// An old device of `size` bytes, called `name` in the host's pool of devices, as LVM does it.
fn old_device(host: &Host, name: &str, size: u64) -> Option<Loop> {
    let file = host.dir.join(format!("{name}.backing"));
    std::fs::write(&file, vec![GARBAGE; size as usize]).unwrap();
    let device = Loop::over(&file)?;
    std::os::unix::fs::symlink(&device.0, devices(host).join(name)).unwrap();
    Some(device)
}

/// The markers in the host's state directory, with what they say.
fn marks(host: &Host) -> Vec<String> {
    let images = std::fs::read_dir(host.dir.join("state/images")).unwrap();
    let marks = images.map(|entry| entry.unwrap().path());
    let marks = marks.filter(|path| path.extension().is_some_and(|suffix| suffix == "mark"));
    marks.map(|path| std::fs::read_to_string(path).unwrap()).collect()
}

fn is_read_only(device: &Path) -> bool {
    let shown = Command::new("blockdev").arg("--getro").arg(device).output().unwrap();
    String::from_utf8_lossy(&shown.stdout).trim() == "1"
}

/// Whether a QEMU could have it for a guest.
fn is_for_qemu(device: &Path) -> bool {
    let read = ["-f", "raw", "-c", "read 0 512"];
    Command::new("qemu-io").args(read).arg(device).output().unwrap().status.success()
}

/// Whether something could mount the device.
fn is_free(device: &Path) -> bool {
    use std::os::unix::fs::OpenOptionsExt;
    File::options()
        .read(true)
        .custom_flags(rustix::fs::OFlags::EXCL.bits() as i32)
        .open(device)
        .is_ok()
}

const TO_DEVICE: [&str; 7] = ["migrate", "--image", IMAGE, "--to", "hostb", "--pool", "lv"];

/// The guest's image goes to the device; nobody waits.
fn migrate(case: &Case, strategy: &str, rate: Option<u64>) {
    let bandwidth = rate.map(|rate| json!({"bytes_per_second": rate}));
    let command = json!({"migrate": {
        "subject": {"images": {"names": [IMAGE]}}, "to": "hostb", "strategy": strategy,
        "bandwidth": bandwidth, "detach": true, "pool": "lv",
    }});
    case.lab.a.ask(command).unwrap();
}

/// The bystander: shuts everything down and compares every byte of the device with what the guest
/// was told, and what lies behind the image with what was there before.
fn compare_all(case: Case) {
    let Case { mut lab, guest } = case;
    let versions = guest.shut_down().unwrap();
    lab.a.kill();
    lab.b.kill();
    let path = device(&lab.b);
    assert_eq!((marks(&lab.b), is_read_only(&path)), (vec![], false));
    guest::compare(&path, &versions).unwrap();
    assert_eq!(versions.len() as u64, BLOCKS);
    let mut tail = vec![0; TAIL as usize];
    File::open(&path).unwrap().read_exact_at(&mut tail, BLOCKS * BLOCK).unwrap();
    assert!(tail.iter().all(|&byte| byte == GARBAGE), "dray wrote behind the image");
    for host in [&lab.a, &lab.b] {
        let log = host.log();
        assert!(!log.contains("ERROR") && !log.contains("panicked"), "{log}");
    }
    assert!(lab.b.files().is_empty() && !opens(&lab.a.pool().join(IMAGE)));
}

#[test]
fn nothing_old_shines_through() {
    for (seed, strategy) in ["hybrid", "post-copy", "pre-copy", "hot-set"].into_iter().enumerate() {
        let lab = lab();
        let Some(_device) = old_device(&lab.b, IMAGE, BLOCKS * BLOCK + TAIL) else { return };
        let mut case = Case::begin(lab, seed as u64, &[], &[]);
        let more = ["--json", "--verify", "--strategy", strategy];
        let summary = result(&case.lab.a.dray(&[&TO_DEVICE[..], &more].concat()));
        assert_eq!(summary["result"], "completed", "{strategy}: {summary}");
        assert_eq!(summary["verified"], true, "{strategy}: {summary}");
        case.await_end().unwrap();
        let size = &case.lab.b.image(IMAGE).unwrap()["size"];
        assert_eq!(size, BLOCKS * BLOCK, "the guest sees a disk of the same size");
        compare_all(case);
    }
}

#[test]
fn a_device_that_receives_is_closed_to_others() {
    let lab = lab();
    let Some(_device) = old_device(&lab.b, IMAGE, BLOCKS * BLOCK + TAIL) else { return };
    let mut case = Case::begin(lab, 5, &[], &[]);
    let path = device(&case.lab.b);
    assert!(is_free(&path) && is_for_qemu(&path));
    migrate(&case, "hybrid", Some(SLOW));
    case.await_bytes(DATA / 4).unwrap();
    assert_eq!(marks(&case.lab.b), ["partial\n"]);
    assert!(!is_free(&path) && !is_for_qemu(&path), "neither mount nor QEMU may have it");
    // Cancelled, and what was sent is kept: it stays closed.
    assert!(case.lab.a.dray(&["cancel"]).status.success());
    case.await_shown("cancelled").unwrap();
    assert_eq!(marks(&case.lab.b), ["partial\n"]);
    assert!(!is_free(&path) && !is_for_qemu(&path));
    // The next try goes on from it, and nowhere else.
    refused(
        &case.lab.a,
        &[&MIGRATE[..], &["--pool", "p"]].concat(),
        CONFLICT,
        &["an earlier attempt"],
    );
    migrate(&case, "hybrid", Some(SLOW));
    case.await_bytes(DATA / 2).unwrap();
    assert!(case.lab.a.dray(&["cancel", "--discard"]).status.success());
    wait_for("the device", PATIENCE, || is_free(&path) && is_for_qemu(&path)).unwrap();
    assert!(!is_read_only(&path));
    assert_eq!(marks(&case.lab.b), Vec::<String>::new());
    assert_eq!(case.guest.complaint(), None);
    assert!(case.lab.b.image(IMAGE).is_none());
    assert_eq!(case.lab.a.image(IMAGE).unwrap()["state"], "owner");
    // And it can be had again.
    migrate(&case, "hybrid", None);
    case.await_end().unwrap();
    compare_all(case);
}

#[test]
fn devices_that_cannot_be_had_are_refused() {
    let lab = lab();
    let len = BLOCKS * BLOCK;
    let Some(_small) = old_device(&lab.b, "small", len - BLOCK) else { return };
    let Some(mounted) = old_device(&lab.b, "mounted", len) else { return };
    let Some(_used) = old_device(&lab.b, "used", len) else { return };
    let Some(closed) = old_device(&lab.b, "closed", len) else { return };
    assert!(Command::new("blockdev").arg("--setro").arg(&closed.0).status().unwrap().success());
    let at = lab.dir.path().join("mnt");
    let Some(_mount) = Mount::ext2(&at, mounted) else { return };
    let case = Case::begin(lab, 6, &[], &[]);
    let (a, b) = (&case.lab.a, &case.lab.b);
    let to = |name: &str| format!("{IMAGE}={name}");
    let check = |name: &str, code, words: &[&str]| {
        refused(a, &[&TO_DEVICE[..], &["--name", &to(name)]].concat(), code, words);
    };
    check("small", NO_SPACE, &["is too small", "33550336", "33554432"]);
    check("mounted", CONFLICT, &["in use"]);
    check("closed", CONFLICT, &["is read-only", "blockdev --setrw"]);
    check("none", NOT_FOUND, &["there is no device", "/devices/none"]);
    check("../pool/x", 4, &["not a name"]);
    let socket = b.dir.join("used.sock");
    let mut user = Command::new("qemu-nbd")
        .args(["--persistent", "-f", "raw", "-k"])
        .args([&socket, &devices(b).join("used")])
        .spawn()
        .unwrap();
    wait_for("qemu-nbd", PATIENCE, || socket.exists()).unwrap();
    check("used", CONFLICT, &["in use", "qemu-nbd (pid"]);
    user.kill().unwrap();
    user.wait().unwrap();
    // A file is no device, wherever it lies.
    std::fs::write(devices(b).join("file"), b"precious").unwrap();
    check("file", NOT_FOUND, &["there is no device"]);
    assert_eq!(std::fs::read(devices(b).join("file")).unwrap(), b"precious");
    let other = [&MIGRATE[..], &["--pool", "other"]].concat();
    refused(a, &other, DENIED, &["may not use a pool 'other'"]);
    assert_eq!(marks(b), Vec::<String>::new());
    nothing_happened(&case);
    for name in ["small", "used"] {
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut File::open(devices(b).join(name)).unwrap(), &mut bytes)
            .unwrap();
        assert!(bytes.iter().all(|&byte| byte == GARBAGE), "{name} was written to");
    }
    case.guest.stop();
}

#[test]
fn a_target_that_dies_finds_its_device_again() {
    let deaths = [
        ("Journal-Touched", "hybrid"),
        ("Send-Received:5", "hybrid"),
        ("Send-Prepared", "pre-copy"),
        ("Expose", "hybrid"),
        ("Send-Fetch:10", "post-copy"),
        ("Checkpoint", "post-copy"),
        ("Finish", "hybrid"),
        ("Notice-Complete", "hybrid"),
    ];
    for (seed, (effect, strategy)) in deaths.into_iter().enumerate() {
        let lab = lab();
        let Some(_device) = old_device(&lab.b, IMAGE, BLOCKS * BLOCK + TAIL) else { return };
        let mut case = Case::begin(lab, seed as u64, &[], &[("DRAY_ABORT_BEFORE", effect)]);
        migrate(&case, strategy, None);
        wait_for(effect, PATIENCE, || case.lab.b.has_died()).unwrap();
        // What a restart of the host would leave: the marker decides.
        let complete = effect == "Notice-Complete";
        assert_eq!(marks(&case.lab.b), if complete { vec![] } else { vec!["partial\n"] });
        case.lab.b.start();
        case.await_end().unwrap_or_else(|why| panic!("{effect}: {why}"));
        compare_all(case);
    }
}

/// An image on a device of the source.
fn add_on_device(mut lab: Lab, source: &[(&str, &str)]) -> Option<(Lab, Loop)> {
    let file = lab.a.dir.join("image.backing");
    guest::make_image(&file, BLOCKS);
    let device = Loop::over(&file)?;
    let path = devices(&lab.a).join(IMAGE);
    std::os::unix::fs::symlink(&device.0, &path).unwrap();
    lab.a.start_with(source);
    lab.b.start();
    lab.a.ask(json!({"image-add": {"name": IMAGE, "path": path}})).unwrap();
    assert_eq!(lab.a.image(IMAGE).unwrap()["path"], path.to_str().unwrap());
    Some((lab, device))
}

/// The same, with a guest.
fn begin_on_device(lab: Lab, source: &[(&str, &str)]) -> Option<(Case, Loop)> {
    let (lab, device) = add_on_device(lab, source)?;
    let guest = Guest::start(&lab, IMAGE, BLOCKS, BLOCKS, 9);
    Some((Case { lab, guest }, device))
}

#[test]
fn a_source_that_dies_after_handover_keeps_its_device_closed() {
    for effect in ["Retire", "Send-Commit", "SendRun:10"] {
        let lab = lab();
        let Some(_there) = old_device(&lab.b, IMAGE, BLOCKS * BLOCK + TAIL) else { return };
        let variables = [("DRAY_ABORT_BEFORE", effect)];
        let Some((mut case, _here)) = begin_on_device(lab, &variables) else { return };
        migrate(&case, "post-copy", None);
        wait_for(effect, PATIENCE, || case.lab.a.has_died()).unwrap();
        let here = device(&case.lab.a);
        assert_eq!(case.guest.complaint(), None, "{effect}: before the restart");
        // A reboot forgets the flag; the marker brings it back.
        let set = Command::new("blockdev").arg("--setrw").arg(&here).status().unwrap();
        assert!(set.success());
        case.lab.a.start();
        case.await_end().unwrap_or_else(|why| panic!("{effect}: {why}"));
        assert_eq!(marks(&case.lab.a), ["replica 2\n"]);
        assert!(is_read_only(&here), "{effect}");
        // Not even when the operator forgets what it is.
        assert!(case.lab.a.dray(&["images", "remove", IMAGE]).status.success());
        let add = ["images", "add", IMAGE, here.to_str().unwrap()];
        refused(&case.lab.a, &add, CONFLICT, &["epoch 2 began", "device-"]);
        compare_all(case);
    }
}

#[test]
fn a_device_that_was_left_behind_can_be_claimed_and_come_back() {
    let lab = lab();
    let Some(_there) = old_device(&lab.b, IMAGE, BLOCKS * BLOCK) else { return };
    let Some((mut case, _here)) = begin_on_device(lab, &[]) else { return };
    migrate(&case, "hybrid", None);
    case.await_end().unwrap();
    let here = device(&case.lab.a);
    assert!(is_read_only(&here));
    let Case { mut lab, guest } = case;
    guest.shut_down().unwrap();
    // Back onto the device it came from.
    assert!(lab.a.dray(&["images", "remove", IMAGE]).status.success());
    let args = ["--json", "migrate", "--image", IMAGE, "--to", "hosta", "--pool", "lv", "--verify"];
    let summary = result(&lab.b.dray(&args));
    assert_eq!((&summary["result"], &summary["verified"]), (&"completed".into(), &true.into()));
    let owned = || {
        lab.a
            .image(IMAGE)
            .is_some_and(|image| image["state"] == "owner" && image["migration"].is_null())
    };
    wait_for("the way back", PATIENCE, owned).unwrap();
    assert_eq!((marks(&lab.a), is_read_only(&here)), (vec![], false));
    let there = device(&lab.b);
    assert_eq!(marks(&lab.b), ["replica 3\n"]);
    assert!(is_read_only(&there));
    let read = |path: &Path| {
        let mut bytes = vec![0; (BLOCKS * BLOCK) as usize];
        File::open(path).unwrap().read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    assert!(read(&here) == read(&there), "both devices hold the same image");
    lab.a.kill();
    let claim = ["claim", IMAGE, "--source-is-fenced", "--accept-loss"];
    let claimed = lab.b.dray(&claim);
    assert!(claimed.status.success(), "{claimed:?}");
    assert_eq!((marks(&lab.b), is_read_only(&there)), (vec![], false));
    assert_eq!(lab.b.image(IMAGE).unwrap()["state"], "owner");
    lab.b.kill();
}

/// A node of its own for the device: what writes there leaves the other nodes as they are.
fn other_node(host: &Host) -> PathBuf {
    use std::os::unix::fs::MetadataExt;
    let number = std::fs::metadata(device(host)).unwrap().rdev();
    let path = host.dir.join("other-node");
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let numbers = [major.to_string(), minor.to_string()];
    assert!(Command::new("mknod").arg(&path).arg("b").args(numbers).status().unwrap().success());
    path
}

/// A backup, and the backup that it began with.
fn back_up(host: &Host, url: &str) -> (Value, Value) {
    let done = host.ask(json!({"backup": {"images": [IMAGE], "to": url}})).unwrap();
    (done["images"][0]["generation"].clone(), done["images"][0]["parent"].clone())
}

/// The device's node does not tell of it: the kernel's counts do.
#[test]
fn a_device_that_is_written_to_while_no_agent_runs_is_backed_up_in_full() {
    let Some((mut lab, _device)) = add_on_device(lab(), &[]) else { return };
    let url = format!("file://{}", lab.dir.path().join("repository").display());
    lab.a.ask(json!({"backup-init": {"at": url}})).unwrap();
    let (first, _) = back_up(&lab.a, &url);
    // Nobody but dray writes to it.
    lab.a.stop();
    lab.a.start();
    let (second, parent) = back_up(&lab.a, &url);
    assert_eq!(parent, first);
    lab.a.stop();
    let other = File::options().write(true).open(other_node(&lab.a)).unwrap();
    // It waits in the page cache: somebody else has the device open meanwhile.
    let _reader = File::open(device(&lab.a)).unwrap();
    other.write_all_at(&[7; BLOCK as usize], 3 * BLOCK).unwrap();
    drop(other);
    lab.a.start();
    let (third, parent) = back_up(&lab.a, &url);
    assert!(parent.is_null() && third != second, "{parent}");
    let restored = lab.a.dray(&["restore", IMAGE, "--from", &url, "--as", "r", "--pool", "p"]);
    assert!(restored.status.success(), "{restored:?}");
    let read = |path: &Path| {
        let mut bytes = vec![0; (BLOCKS * BLOCK) as usize];
        File::open(path).unwrap().read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    assert!(read(&lab.a.pool().join("r")) == read(&device(&lab.a)));
}

#[test]
fn a_device_that_has_become_shorter_waits_as_a_file_does() {
    let Some((mut lab, device)) = add_on_device(lab(), &[]) else { return };
    let backing = File::options().write(true).open(lab.a.dir.join("image.backing")).unwrap();
    let set_len = |len: u64| {
        backing.set_len(len).unwrap();
        assert!(Command::new("losetup").arg("-c").arg(&device.0).status().unwrap().success());
    };
    let closed = |host: &Host| host.image(IMAGE).unwrap()["closed"]["why"].clone();
    lab.a.stop();
    set_len(BLOCKS / 2 * BLOCK);
    lab.a.start();
    let why = format!(
        "its device has {} bytes, and the image has {}",
        BLOCKS / 2 * BLOCK,
        BLOCKS * BLOCK
    );
    assert_eq!(closed(&lab.a), json!(why));
    set_len(BLOCKS * BLOCK);
    wait_for("the device", PATIENCE, || closed(&lab.a).is_null()).unwrap();
}
