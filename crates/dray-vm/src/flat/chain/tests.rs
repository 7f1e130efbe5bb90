//! Chains of real images behind real daemons, which die, are held, and are left behind.

use super::*;
use crate::flat::confined::anything;
use dray_types::MAX_CHAIN;
use std::process::Command;

/// How often is looked whether another thread has come somewhere.
const POLL: Duration = Duration::from_millis(1);

/// Length of the fixture's disk: not a whole number of clusters.
pub const LEN: u64 = (4 << 20) + 1536;

fn qemu_img(args: &[&str]) {
    let done = Command::new("qemu-img").args(args).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// What a chain holds, as QEMU's own tool reads it.
pub fn contents(top: &Path) -> Vec<u8> {
    let raw = top.with_extension("seen");
    let paths = [top, &raw].map(|path| path.to_str().unwrap().to_owned());
    qemu_img(&["check", &paths[0]]);
    qemu_img(&["convert", "-O", "raw", &paths[0], &paths[1]]);
    std::fs::read(raw).unwrap()
}

/// Three images, the lower ones with what the upper ones overwrite; and what is seen.
pub fn fixture(dir: &Path) -> (Vec<ChainLayer>, Vec<u8>) {
    let mut seen = vec![0; LEN as usize];
    let mut layers: Vec<ChainLayer> = Vec::new();
    for (nth, name) in ["base", "middle", "top"].into_iter().enumerate() {
        let path = dir.join(name).with_extension("qcow2");
        let shown = path.to_str().unwrap().to_owned();
        let len = LEN.to_string();
        match layers.first() {
            Some(below) => {
                let below = below.path.to_str().unwrap();
                qemu_img(&["create", "-f", "qcow2", "-b", below, "-F", "qcow2", &shown]);
            }
            None => qemu_img(&["create", "-f", "qcow2", &shown, &len]),
        }
        let (from, bytes) = (nth << 20, 1 << 20);
        let write = format!("write -P {} {from} {}", nth + 1, bytes + (bytes >> 1));
        let done = Command::new("qemu-io").args(["-c", &write, &shown]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
        seen[from..from + bytes + (bytes >> 1)].fill(nth as u8 + 1);
        let (format, protocol) = ("qcow2".to_owned(), "file".to_owned());
        layers.insert(0, ChainLayer { path, format, protocol, seen: None });
    }
    (layers, seen)
}

impl Chain {
    /// Kills its daemon as somebody else would.
    pub fn kill_daemon(&self) {
        let state = self.state();
        let (_, server) = state.open.as_ref().unwrap();
        rustix::process::kill_process(server.pid(), rustix::process::Signal::KILL).unwrap();
    }
}

fn start(place: &Path, layers: &[ChainLayer], write: bool) -> Server {
    let (active, admits) = (layers[0].path.as_path(), anything());
    let chain = Chained { layers, active, len: LEN, write, admits: &*admits };
    Server::start(place, &chain).unwrap()
}

/// What is under a long chain of empty images is seen through all of them.
#[test]
fn a_chain_may_be_long_and_not_longer() {
    let dir = tempfile::tempdir().unwrap();
    let (mut layers, _) = fixture(dir.path());
    while layers.len() <= MAX_CHAIN {
        let path = dir.path().join(format!("more{}.qcow2", layers.len()));
        let below = layers[0].path.to_str().unwrap();
        qemu_img(&["create", "-f", "qcow2", "-F", "qcow2", "-b", below, path.to_str().unwrap()]);
        layers.insert(0, ChainLayer { path, ..layers[0].clone() });
    }
    let (place, admits) = (dir.path().join("chain"), anything());
    let start = |layers: &[ChainLayer]| {
        let (active, admits) = (layers[0].path.as_path(), &*admits);
        Server::start(&place, &Chained { layers, active, len: LEN, write: false, admits })
    };
    drop(start(&layers[1..]).unwrap());
    let why = start(&layers).err().unwrap().to_string();
    assert!(why.contains("more than 200 images"), "{why}");
}

#[test]
fn a_chain_is_read_through_a_daemon_that_may_die() {
    let dir = tempfile::tempdir().unwrap();
    let (layers, seen) = fixture(dir.path());
    let chain = Chain::new(dir.path().join("chain"), layers, LEN, None, anything());
    let mut buf = vec![0; LEN as usize];
    chain.read_at(&mut buf, 0).unwrap();
    assert!(buf == seen);
    let hole = |extent: &Extent| extent.kind == ExtentKind::Hole;
    let extents = chain.extents(0, LEN, 9).unwrap();
    let data: u64 = extents.iter().filter(|extent| !hole(extent)).map(|e| e.len).sum();
    assert_eq!(data, (3 << 20) + (1 << 19), "{extents:?}");
    for life in 2..5 {
        chain.kill_daemon();
        buf.fill(0);
        chain.read_at(&mut buf[100..9000], 1 << 20).unwrap();
        assert!(buf[100..9000] == seen[1 << 20..(1 << 20) + 8900]);
        assert_eq!(chain.life(), life);
    }
    chain.close();
    assert!(chain.read_at(&mut buf[..512], 0).is_err());
    assert!(!dir.path().join("chain.sock").exists());
}

/// While its disk is exchanged nobody may start a daemon; who reads waits for the new name.
#[test]
fn a_chain_that_is_held_is_read_when_it_has_its_new_name() {
    let dir = tempfile::tempdir().unwrap();
    let (layers, seen) = fixture(dir.path());
    let (top, hidden) = (layers[0].path.clone(), dir.path().join("hidden.qcow2"));
    let place = dir.path().join("chain");
    let chain = Chain::new(place, layers, LEN, Some(Duration::from_secs(20)), anything());
    let peeks = dray_host::flat::peeks::Peeks::default();
    peeks.add(&(Arc::clone(&chain) as _), || None);
    chain.open().unwrap();
    peeks.hold(&top);
    assert!(!dir.path().join("chain.sock").exists(), "its daemon has ended");
    let reader = std::thread::spawn({
        let chain = Arc::clone(&chain);
        move || {
            let mut buf = vec![0; LEN as usize];
            chain.read_at(&mut buf, 0).map(|()| buf)
        }
    });
    while chain.asked() < 2 {
        std::thread::sleep(POLL);
    }
    std::fs::rename(&top, &hidden).unwrap();
    peeks.go_on(&dir.path().join("other.qcow2"), &top);
    assert!(chain.open().is_err(), "another chain's exchange is none of its business");
    peeks.go_on(&top, &hidden);
    assert!(reader.join().unwrap().unwrap() == seen);
}

/// What is finished for QEMU to take back stays ended, whoever reads.
#[test]
fn a_chain_that_was_finished_is_not_opened_by_a_reader() {
    let dir = tempfile::tempdir().unwrap();
    let (layers, _) = fixture(dir.path());
    let chain = Chain::new(
        dir.path().join("chain"),
        layers,
        LEN,
        Some(Duration::from_secs(20)),
        anything(),
    );
    chain.set_writable(true).unwrap();
    chain.write_at(&[7; 512], 0, false).unwrap();
    chain.finish().unwrap();
    let before = chain.asked();
    let reader = std::thread::spawn({
        let chain = Arc::clone(&chain);
        move || {
            let mut buf = [0; 512];
            chain.read_at(&mut buf, 0).map(|()| buf)
        }
    });
    while chain.asked() < before + 2 {
        std::thread::sleep(POLL);
    }
    assert!(!dir.path().join("chain.sock").exists());
    chain.set_writable(false).unwrap();
    assert_eq!(reader.join().unwrap().unwrap(), [7; 512]);
    chain.close();
    chain.resume();
    assert!(chain.open().is_err(), "closed is for good");
}

#[test]
fn an_agent_ends_what_the_one_before_has_left_behind() {
    let dir = tempfile::tempdir().unwrap();
    let (layers, _) = fixture(dir.path());
    let start = |place: &Path| start(place, &layers, false);
    let mut left = ["chain-1", "peek-1"].map(|place| start(&dir.path().join(place)));
    let mut others = start(&dir.path().join("else"));
    crate::flat::end_leftovers(dir.path());
    assert!(left.iter_mut().all(|server| !server.is_alive()));
    assert!(others.is_alive(), "that one is not an agent's");
    let names = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let names: Vec<_> = names.map(|name| name.to_string_lossy().into_owned()).collect();
    assert!(!names.iter().any(|name| name.ends_with("-1.sock")), "{names:?}");
    assert!(!names.iter().any(|name| name.ends_with("-1.log")), "{names:?}");
}

#[test]
fn a_daemon_that_was_left_behind_is_ended() {
    let dir = tempfile::tempdir().unwrap();
    let (layers, _) = fixture(dir.path());
    let place = dir.path().join("chain");
    // One that writes would be locked out by its own agent, which is this process.
    let left = start(&place, &layers, false);
    let chain = Chain::new(place, layers, LEN, None, anything());
    chain.set_writable(true).unwrap();
    chain.write_at(&[7; 512], 0, true).unwrap();
    assert!(left.finish().is_err(), "it was ended before");
}

/// Reads wait for ever where nobody has set a limit; what only asks for holes does not.
#[test]
fn holes_of_a_chain_that_cannot_be_read_are_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let (mut layers, _) = fixture(dir.path());
    layers[2].path = dir.path().join("gone.qcow2");
    let chain = Chain::new(dir.path().join("chain"), layers, LEN, None, anything());
    let why = chain.extents(0, LEN, 9).unwrap_err();
    assert_eq!(why.kind, ErrorKind::Unavailable, "{why}");
}

#[test]
fn what_cannot_be_opened_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let (mut layers, _) = fixture(dir.path());
    layers[2].path = dir.path().join("gone.qcow2");
    let chain = Chain::new(dir.path().join("chain"), layers, LEN, Some(Duration::ZERO), anything());
    let why = chain.read_at(&mut [0; 512], 0).unwrap_err().to_string();
    assert!(why.contains("gone.qcow2"), "{why}");
}

/// What the agent does not see in a head, the wall keeps from being followed: an image of another format names
/// a file for its data.
#[test]
fn what_an_image_names_is_not_opened_whoever_admits_it() {
    use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init};
    let dir = tempfile::tempdir().unwrap();
    let secret = dir.path().join("secret.raw");
    std::fs::write(&secret, vec![7; 1 << 20]).unwrap();
    let path = dir.path().join("top.vmdk");
    let extent = format!("RW 2048 FLAT \"{}\" 0", secret.display());
    let head = "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\n\
                createType=\"monolithicFlat\"\n";
    std::fs::write(&path, format!("{head}{extent}\n")).unwrap();
    let (format, protocol) = ("vmdk".to_owned(), "file".to_owned());
    let layers = vec![ChainLayer { path, format, protocol, seen: None }];
    let watch = init(CreateFlags::NONBLOCK).unwrap();
    add_watch(&watch, &secret, WatchFlags::OPEN).unwrap();
    let chain = Chain::new(dir.path().join("chain"), layers, 1 << 20, None, anything());
    let why = chain.open().unwrap_err().to_string();
    assert!(rustix::io::read(&watch, &mut [0; 256]).is_err(), "it was opened");
    assert!(why.contains("qemu-storage-daemon ended"), "{why}");
}
