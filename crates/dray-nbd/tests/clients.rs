//! The programs people use, against a file behind the server.

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;
use support::{Fixture, have, noise};

const MIB: u64 = 1 << 20;

/// Runs a program to its end, which must be a good one; returns what it said on stdout.
fn run(program: &str, args: &[&str]) -> String {
    let output = Command::new("timeout").arg("60").arg(program).args(args).output().unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {args:?}: {}\n{out}\n{err}", output.status);
    out.into_owned()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A fixture, and beside it a file with data, a hole and data.
fn with_sample(len: u64) -> (Fixture, std::path::PathBuf) {
    let fixture = Fixture::with_file(len);
    let sample = fixture.dir.path().join("sample.img");
    let file = fs::File::create(&sample).unwrap();
    file.set_len(len).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &noise(5 * MIB as usize, 1), 0).unwrap();
    let end = noise(3 * MIB as usize, 2);
    std::os::unix::fs::FileExt::write_all_at(&file, &end, len - 3 * MIB).unwrap();
    (fixture, sample)
}

fn same(a: &Path, b: &Path) -> bool {
    fs::read(a).unwrap() == fs::read(b).unwrap()
}

fn blocks(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&fs::metadata(path).unwrap())
}

#[test]
fn qemu_img_converts_in_and_out_and_compares() {
    if !have("qemu_img_converts_in_and_out_and_compares", "qemu-img") {
        return;
    }
    let (fixture, sample) = with_sample(32 * MIB);
    let uri = fixture.uri("");
    run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", text(&sample), &uri]);
    assert!(same(&sample, &fixture.file()));
    assert!(blocks(&fixture.file()) * 512 < 10 * MIB, "the hole must arrive as a hole");
    let copy = fixture.dir.path().join("copy.qcow2");
    run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &uri, text(&copy)]);
    run("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", text(&copy), &uri]);
}

#[test]
fn qemu_img_sees_size_and_holes() {
    if !have("qemu_img_sees_size_and_holes", "qemu-img") {
        return;
    }
    let (fixture, sample) = with_sample(32 * MIB);
    fs::copy(&sample, fixture.file()).unwrap();
    fixture_punch(&fixture, 5 * MIB, 24 * MIB);
    let uri = fixture.uri("");
    let info = run("qemu-img", &["info", "--output=json", "-f", "raw", &uri]);
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    assert_eq!(info["virtual-size"], 32 * MIB);
    let map = run("qemu-img", &["map", "--output=json", "-f", "raw", &uri]);
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let seen: Vec<_> = map.as_array().unwrap().iter().collect();
    let seen: Vec<_> = seen.iter().map(|e| (e["start"].as_u64(), e["zero"].as_bool())).collect();
    let expected = [(0, false), (5 * MIB, true), (29 * MIB, false)];
    assert_eq!(seen, expected.map(|(start, zero)| (Some(start), Some(zero))));
}

fn fixture_punch(fixture: &Fixture, offset: u64, len: u64) {
    support::open_file(&fixture.file()).discard(offset, len, false).unwrap();
}

#[test]
fn qemu_io_writes_zeroes_discards_and_flushes() {
    if !have("qemu_io_writes_zeroes_discards_and_flushes", "qemu-io") {
        return;
    }
    let fixture = Fixture::with_file(16 * MIB);
    let commands = [
        "write -P 1 0 4M",
        "write -f -P 2 1M 512k",
        "write -z 2M 512k",
        "write -z -u 3M 512k",
        "write -f -z 3584k 64k",
        "discard 512k 128k",
        "writev -P 7 8M 4k 64k 1M",
        "aio_write -P 9 10M 1M",
        "aio_flush",
        "flush",
        "read -P 1 0 512k",
        "read -P 0 512k 128k",
        "read -P 2 1M 512k",
        "read -P 0 2M 512k",
        "read -P 0 3M 576k",
        "read -P 1 3648k 448k",
        "read -P 9 10M 1M",
        "read -P 7 8M 1092k",
    ];
    let uri = fixture.uri("");
    let mut args = vec!["-f", "raw", "-d", "unmap"];
    commands.iter().for_each(|command| args.extend(["-c", command]));
    args.push(&uri);
    let out = run("qemu-io", &args);
    assert!(!out.contains("verification failed"), "{out}");
    let bytes = fs::read(fixture.file()).unwrap();
    assert!(bytes[..512 << 10].iter().all(|byte| *byte == 1));
    assert!(bytes[2 << 20..(2 << 20) + (512 << 10)].iter().all(|byte| *byte == 0));
}

#[test]
fn nbdinfo_shows_everything() {
    if !have("nbdinfo_shows_everything", "nbdinfo") {
        return;
    }
    let (fixture, sample) = with_sample(32 * MIB);
    fs::copy(&sample, fixture.file()).unwrap();
    fixture_punch(&fixture, 5 * MIB, 24 * MIB);
    let uri = fixture.uri("");
    let info: serde_json::Value = serde_json::from_str(&run("nbdinfo", &["--json", &uri])).unwrap();
    assert_eq!(info["protocol"], "newstyle-fixed");
    assert_eq!(info["structured"], true);
    let export = &info["exports"][0];
    assert_eq!(export["export-size"], 32 * MIB);
    assert_eq!(export["contexts"][0], "base:allocation");
    assert_eq!(export["description"], "image  of the test");
    for can in ["cache", "df", "fast_zero", "flush", "fua", "multi_conn", "trim", "zero"] {
        assert_eq!(export[format!("can_{can}")], true, "can_{can}");
    }
    assert_eq!(export["block_size_maximum"], 64 * MIB);
    let map = run("nbdinfo", &["--map", "--json", &uri]);
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let kinds: Vec<_> = map.as_array().unwrap().iter().map(|e| e["type"].as_u64()).collect();
    assert_eq!(kinds, [Some(0), Some(3), Some(0)]);
}

#[test]
fn nbdinfo_lists_exports() {
    if !have("nbdinfo_lists_exports", "nbdinfo") {
        return;
    }
    let image = |len| -> std::sync::Arc<dyn dray_image::Image> {
        std::sync::Arc::new(support::memory::Memory::new(len))
    };
    let fixture = Fixture::new(vec![("one", image(4096)), ("zwei/ü", image(8192))]);
    let list = run("nbdinfo", &["--list", "--json", &fixture.uri("")]);
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let exports = list["exports"].as_array().unwrap();
    let seen: Vec<_> = exports.iter().map(|e| (&e["export-name"], &e["export-size"])).collect();
    assert_eq!(seen, [(&"one".into(), &4096.into()), (&"zwei/ü".into(), &8192.into())]);
    let output = Command::new("nbdinfo").arg(fixture.uri("three")).output().unwrap();
    assert!(!output.status.success());
}

#[test]
fn nbdcopy_copies_both_ways_over_several_connections() {
    if !have("nbdcopy_copies_both_ways_over_several_connections", "nbdcopy") {
        return;
    }
    let (fixture, sample) = with_sample(64 * MIB);
    let uri = fixture.uri("");
    run("nbdcopy", &["--connections=4", "--flush", text(&sample), &uri]);
    assert!(same(&sample, &fixture.file()));
    let back = fixture.dir.path().join("back.img");
    run("nbdcopy", &["--connections=4", &uri, text(&back)]);
    assert!(same(&sample, &back));
    let visits = fixture.shelf.visits.lock().unwrap();
    assert!(visits.iter().any(|(what, _, count)| *what == "attached" && *count >= 2));
}

/// The longest requests that libnbd sends, and that other servers take.
#[test]
fn libnbd_sends_requests_of_64_mib() {
    let knows = |python: &&str| {
        let import = Command::new(python).args(["-c", "import nbd"]).output();
        import.is_ok_and(|output| output.status.success())
    };
    let Some(python) = ["python3", "/usr/bin/python3"].into_iter().find(knows) else {
        return support::skip("libnbd_sends_requests_of_64_mib", "python3-libnbd is not installed");
    };
    let fixture = Fixture::with_file(130 * MIB);
    let script = r#"
import nbd, os
LEN = 64 << 20
for structured in (True, False):
    h = nbd.NBD()
    h.set_request_structured_replies(structured)
    h.connect_uri(os.environ["uri"])
    assert h.get_structured_replies_negotiated() == structured
    assert h.get_block_size(nbd.SIZE_MAXIMUM) == LEN
    for flags in (0, nbd.CMD_FLAG_FUA):
        data = os.urandom(LEN)
        h.pwrite(data, 512, flags)
        assert h.pread(LEN, 512) == data
        if structured:
            assert h.pread_structured(LEN, 512, lambda *_: 0, nbd.CMD_FLAG_DF) == data
    # Several of them at a time, with short requests between.
    whole = [nbd.Buffer(LEN) for _ in range(4)]
    short = [nbd.Buffer(512) for _ in range(4)]
    cookies = []
    for n in range(4):
        cookies.append(h.aio_pread(whole[n], 512 + n))
        cookies.append(h.aio_pread(short[n], 512 + n))
    while cookies:
        h.poll(-1)
        cookies = [c for c in cookies if not h.aio_command_completed(c)]
    for n in range(4):
        assert whole[n].to_bytearray()[:LEN - n] == data[n:]
        assert short[n].to_bytearray() == data[n:n + 512]
    h.shutdown()
"#;
    let program = fixture.dir.path().join("long.py");
    fs::write(&program, script).unwrap();
    let uri = format!("uri={}", fixture.uri(""));
    run("env", &[&uri, python, text(&program)]);
}

#[test]
fn fio_verifies_random_writes() {
    if !have("fio_verifies_random_writes", "fio") {
        return;
    }
    if !run("fio", &["--enghelp"]).lines().any(|line| line.trim() == "nbd") {
        return support::skip("fio_verifies_random_writes", "this fio has no nbd engine");
    }
    let fixture = Fixture::with_file(16 * MIB);
    let uri = format!("--uri={}", fixture.uri(""));
    let out = run(
        "fio",
        &[
            "--name=verify",
            "--ioengine=nbd",
            &uri,
            "--rw=randrw",
            "--bsrange=4k-128k",
            "--bs_unaligned",
            "--iodepth=16",
            "--size=16M",
            "--io_size=64M",
            "--verify=crc32c",
            "--verify_state_save=0",
            "--verify_fatal=1",
            "--fsync=32",
            "--trim_percentage=0",
            "--output-format=json",
        ],
    );
    let report: serde_json::Value = serde_json::from_str(&out[out.find('{').unwrap()..]).unwrap();
    assert_eq!(report["jobs"][0]["error"], 0);
    assert!(report["jobs"][0]["write"]["total_ios"].as_u64().unwrap() > 100);
}

#[test]
fn nbdkit_passes_everything_on() {
    let test = "nbdkit_passes_everything_on";
    if !have(test, "nbdkit") || !have(test, "qemu-img") {
        return;
    }
    let (fixture, sample) = with_sample(32 * MIB);
    let socket = format!("socket={}", fixture.socket().display());
    // Captive nbdkit: it runs the command against itself and ends with it.
    let inner = format!(
        "qemu-img convert -n -f raw -O raw {0} $uri && qemu-img compare -f raw -F raw {0} $uri",
        sample.display()
    );
    run("nbdkit", &["--unix", "-", "nbd", &socket, "--run", &inner]);
    assert!(same(&sample, &fixture.file()));
}
