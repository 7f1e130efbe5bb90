//! Two VMs on one base image, which is on both hosts: they move together, come back, and stay on dray,
//! and the base is where and what it was all the time.

use crate::stage::{qmp, quit};
use dray_testkit::guest::{GuestVm, tools};
use dray_testkit::lab::{Host, Lab};
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const BASE: &str = "base.qcow2";

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

fn image_tool(args: &[&str]) {
    tools::run("qemu-img", args).expect("qemu-img");
}

/// A VM without a system that runs, on a qcow2 of its own over the base image.
struct Vm {
    name: &'static str,
    qemu: GuestVm,
    /// What the disk shows, in a raw file.
    shows: PathBuf,
    moves: u32,
}

fn start(lab: &Lab, name: &'static str, pattern: &str) -> Vm {
    let pool = lab.host("a").pool();
    let (path, base) = (pool.join(format!("{name}.qcow2")), pool.join(BASE));
    let shows = lab.dir().join(format!("{name}.raw"));
    image_tool(&["create", "-f", "qcow2", "-b", text(&base), "-F", "qcow2", text(&path)]);
    let write = format!("write -P {pattern} 1M 3M");
    tools::run("qemu-io", &["-f", "qcow2", "-c", &write, text(&path)]).expect("qemu-io");
    image_tool(&["convert", "-O", "raw", text(&path), text(&shows)]);
    let path = path.display();
    let node = format!("driver=qcow2,node-name=root,file.driver=file,file.filename={path}");
    let builder = GuestVm::builder(&lab.dir(), name).memory_mib(16).bare();
    let qemu = builder.blockdev(node).disk("disk0", "root").start().expect("qemu");
    let running = qmp(&qemu.qmp_path(), "{\"execute\":\"cont\"}");
    assert!(running.get("return").is_some(), "{running}");
    Vm { name, qemu, shows, moves: 0 }
}

impl Vm {
    /// Prepares its way to another host, and starts the QEMU that waits there.
    fn prepare(&mut self, lab: &Lab, from: &str, to: &str) -> GuestVm {
        let here = self.qemu.qmp_path();
        let args = ["prepare", "--qmp", text(&here), "--to", to];
        let prepared = lab.host(from).json(&args);
        let prepared = prepared.unwrap_or_else(|why| panic!("{why}\n{}", lab.host(from).log()));
        self.moves += 1;
        let name = format!("{}-{}", self.name, self.moves);
        let mut waiting = GuestVm::builder(&lab.dir(), &name).memory_mib(16).bare().incoming();
        for image in prepared["images"].as_array().expect("images") {
            assert_eq!(image["in_place"] == true, image["image"] != self.image(), "{prepared}");
            for line in image["blockdev"].as_array().expect("lines") {
                waiting = waiting.blockdev(line.as_str().expect("text"));
            }
        }
        waiting.disk("disk0", "root").start().expect("the waiting qemu")
    }

    fn image(&self) -> String {
        format!("{}.qcow2", self.name)
    }

    /// Moves it to the QEMU that waits.
    fn go(&mut self, from: &Host, to: &str, waiting: GuestVm, more: &[&str]) {
        let (here, there) = (self.qemu.qmp_path(), waiting.qmp_path());
        let args = ["migrate", "--qmp", text(&here), "--to", to, "--target-qmp", text(&there)];
        let summary = from.json(&[&args[..], &["--verify"], more].concat());
        let summary = summary.unwrap_or_else(|why| panic!("{why}\n{}", from.log()));
        assert_eq!((&summary["result"], &summary["verified"]), (&"completed".into(), &true.into()));
        let images = summary["images"].as_array().expect("images");
        let base = |image: &&Value| image["name_at_target"] == BASE;
        let base = images.iter().find(base).unwrap_or_else(|| panic!("{summary:#}"));
        assert_eq!((&base["blocks_sent"], &base["bytes_in_place"]), (&0.into(), &base["bytes"]));
        quit(&here);
        self.qemu = waiting;
    }

    /// A bystander looks at the disk after its QEMU has ended.
    fn check(self, host: &Host) {
        quit(&self.qemu.qmp_path());
        drop(self.qemu);
        let path = host.pool().join(format!("{}.qcow2", self.name));
        image_tool(&["check", text(&path)]);
        let base = host.pool().join(BASE);
        image_tool(&["rebase", "-u", "-b", text(&base), "-F", "qcow2", text(&path)]);
        image_tool(&["compare", "-f", "qcow2", "-F", "raw", text(&path), text(&self.shows)]);
    }
}

#[test]
fn two_vms_share_a_base_image_wherever_they_are() {
    if !tools::available(&[tools::QEMU, "qemu-img", "qemu-io"]) {
        return;
    }
    let lab = Lab::with_settings("bases", Path::new(env!("CARGO_BIN_EXE_dray")), "").expect("lab");
    lab.start().expect("agents");
    let bases = ["a", "b"].map(|host| lab.host(host).pool().join(BASE));
    image_tool(&["create", "-f", "qcow2", text(&bases[0]), "32M"]);
    let write = ["-f", "qcow2", "-c", "write -P 0x5a 0 8M", text(&bases[0])];
    tools::run("qemu-io", &write).expect("qemu-io");
    // As those of compressed images: no whole number of sectors.
    let base = File::options().write(true).open(&bases[0]).expect("the base");
    base.set_len(base.metadata().expect("the base").len() + 100).expect("it ends anywhere");
    std::fs::copy(&bases[0], &bases[1]).expect("copy");
    let look = || {
        let meta = bases.each_ref().map(|path| path.metadata().expect("the base"));
        meta.map(|meta| (meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec(), meta.mode()))
    };
    let before = look();
    let (a, b) = (lab.host("a"), lab.host("b"));
    let (mut one, mut two) = (start(&lab, "one", "0x11"), start(&lab, "two", "0x22"));
    // Both wait on the same file, then one runs on it while the other comes.
    let (first, second) = (one.prepare(&lab, "a", "hostb"), two.prepare(&lab, "a", "hostb"));
    one.go(a, "hostb", first, &[]);
    two.go(a, "hostb", second, &[]);
    // What is known of the one's disk has outlived the other's arrival.
    let home = one.prepare(&lab, "b", "hosta");
    one.go(b, "hosta", home, &[]);
    // A disk that stays on dray has its base there, under a name of its own, and goes on from it.
    let home = two.prepare(&lab, "b", "hosta");
    two.go(b, "hosta", home, &["--release", "never"]);
    let images = a.json(&["images"]).expect("images").to_string();
    assert_eq!(images.matches(".in-place-").count(), 1, "{images}");
    let away = two.prepare(&lab, "a", "hostb");
    two.go(a, "hostb", away, &["--release", "always"]);
    for host in [a, b] {
        let images = host.json(&["images"]).expect("images").to_string();
        assert!(!images.contains(".in-place-"), "{images}\n{}", host.log());
    }
    one.check(a);
    two.check(b);
    assert_eq!(look(), before);
    assert_eq!(
        std::fs::read(&bases[0]).expect("a base"),
        std::fs::read(&bases[1]).expect("a base")
    );
}
