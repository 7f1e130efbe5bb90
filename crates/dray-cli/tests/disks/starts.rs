//! Agents that start while something is wrong: every image that the fault does not concern is served, and the
//! fault is told. Each fault is there over a restart, and over a second one with another fault.

use crate::lab::{Host, Lab, run, wait_for};
use crate::mounts::Mount;
use crate::nbd::{Client, FLUSH, READ, WRITE};
use dray_net::pki::{Validity, issue_for};
use serde_json::{Value, json};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

const IMAGE: &str = "disk.img";
const LEN: usize = 1 << 20;
const BLOCK: u32 = 4096;
/// Longer than an agent takes to look again.
const LOOK: Duration = Duration::from_secs(20);

/// A host with an image whose guest writes something else after each start of the agent.
struct Served {
    lab: Lab,
    blocks: Vec<u8>,
    round: u8,
}

impl Served {
    fn new() -> Self {
        Self::with(|_, config| config)
    }

    fn with(change: impl Fn(&str, String) -> String) -> Self {
        let mut lab = Lab::with(change);
        std::fs::write(lab.a.pool().join(IMAGE), vec![1; LEN]).unwrap();
        lab.a.start();
        lab.a.add(IMAGE);
        let mut this = Self { lab, blocks: vec![1; LEN / BLOCK as usize], round: 1 };
        this.check();
        this
    }

    /// What was written is there, and more can be written.
    fn check(&mut self) {
        let mut client = Client::connect(&self.lab.a.nbd(), IMAGE).unwrap();
        for (nth, content) in self.blocks.iter().enumerate() {
            let at = nth as u64 * u64::from(BLOCK);
            let read = client.request(READ, at, BLOCK, &[], &|| true).unwrap();
            assert!(read.iter().all(|byte| byte == content), "block {nth}");
        }
        self.round += 1;
        let at = usize::from(self.round) % self.blocks.len();
        self.blocks[at] = self.round;
        let data = [self.round; BLOCK as usize];
        client.request(WRITE, at as u64 * u64::from(BLOCK), BLOCK, &data, &|| true).unwrap();
        client.request(FLUSH, 0, 0, &[], &|| true).unwrap();
    }

    /// Restarts the agent and looks at the image, twice: in order and after a kill.
    fn restart(&mut self) {
        self.lab.a.stop();
        self.lab.a.start();
        self.check();
        self.lab.a.kill();
        self.lab.a.start();
        self.check();
    }

    fn config(&self) -> String {
        std::fs::read_to_string(self.lab.a.config()).unwrap()
    }

    fn set_config(&self, text: &str) {
        std::fs::write(self.lab.a.config(), text).unwrap();
    }

    fn tls(&self) -> std::path::PathBuf {
        self.lab.dir.path().join("pki/hosta")
    }
}

fn troubles(host: &Host) -> Vec<Value> {
    host.ask(json!("info")).unwrap()["troubles"].as_array().cloned().unwrap_or_default()
}

fn trouble(host: &Host, key: &str) -> Option<Value> {
    troubles(host).into_iter().find(|one| one["key"].as_str().unwrap().starts_with(key))
}

/// Waits until the trouble is told, in `dray status` and `dray images` too.
fn told(host: &Host, key: &str, words: &str) {
    wait_for(key, LOOK, || trouble(host, key).is_some()).unwrap();
    let one = trouble(host, key).unwrap();
    assert!(one.to_string().contains(words), "{one}");
    for command in ["status", "images"] {
        let shown = host.dray(&[command]);
        let err = String::from_utf8_lossy(&shown.stderr).into_owned();
        let line = format!("trouble: {}: ", one["what"].as_str().unwrap());
        assert!(shown.status.success() && err.contains(&line), "{command}: {err}");
    }
    assert!(host.log().contains(one["what"].as_str().unwrap()), "{}", host.log());
}

fn gone(host: &Host, key: &str) {
    wait_for(key, LOOK, || trouble(host, key).is_none()).unwrap();
}

#[test]
fn certificates_that_are_bad_cost_the_peers_and_are_used_when_they_are_renewed() {
    let mut served = Served::new();
    let (pki, tls) = (served.lab.dir.path().join("pki"), served.tls());
    std::fs::remove_dir_all(&tls).unwrap();
    let (now, day) = (SystemTime::now(), Duration::from_secs(86_400));
    let old = Validity { from: now - 20 * day, until: now - 10 * day };
    issue_for(&pki, "hosta", &["127.0.0.1".to_owned()], old).unwrap();
    served.restart();
    told(&served.lab.a, "certificates", "it expired 10 days ago");
    served.lab.b.start();
    let migrate = ["migrate", "--image", IMAGE, "--to", "hostb"];
    let refused = served.lab.a.dray(&migrate);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && why.contains("own certificate cannot be used"), "{why}");
    // The second fault: there are none at all.
    std::fs::remove_dir_all(&tls).unwrap();
    served.restart();
    told(&served.lab.a, "certificates", "No such file");
    let mut issue = Command::new(crate::lab::DRAY);
    run(issue.args(["pki", "issue", "hosta", "--address", "127.0.0.1", "--dir"]).arg(&pki));
    gone(&served.lab.a, "certificates");
    served.check();
    let done = served.lab.a.dray(&migrate);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let mut client = Client::connect(&served.lab.b.nbd(), IMAGE).unwrap();
    assert_eq!(client.request(READ, 0, 1, &[], &|| true).unwrap(), [served.blocks[0]]);
}

#[test]
fn a_pool_that_is_not_there_costs_its_own_images() {
    let more = |name: &str, config: String| match name {
        "hosta" => config + "[[pool]]\nname = \"more\"\npath = \"/nonexistent/dray\"\n",
        _ => config,
    };
    let mut served = Served::with(more);
    told(&served.lab.a, "pool.more", "/nonexistent/dray");
    served.restart();
    let more = served.lab.dir.path().join("more");
    let text = served.config().replace("/nonexistent/dray", more.to_str().unwrap());
    served.set_config(&text);
    std::fs::write(&more, "").unwrap();
    served.restart();
    told(&served.lab.a, "pool.more", "not a directory");
    std::fs::remove_file(&more).unwrap();
    std::fs::create_dir(&more).unwrap();
    gone(&served.lab.a, "pool.more");
    // The configuration no longer names the pool that the image lies in.
    let pool = format!("path = \"{}\"", served.lab.a.pool().display());
    served.set_config(&text.replace(&pool, &format!("path = \"{}\"", more.display())));
    served.restart();
    assert_eq!(served.lab.a.image(IMAGE).unwrap()["state"], "owner");
}

#[test]
fn the_last_good_configuration_is_used_when_the_file_is_not_good() {
    let mut served = Served::new();
    let good = served.config();
    let check = |served: &Served| {
        let mut check = Command::new(crate::lab::DRAY);
        let ran = check.args(["check-config", "--config"]).arg(served.lab.a.config()).output();
        let ran = ran.unwrap();
        (ran.status.code(), String::from_utf8_lossy(&ran.stderr).into_owned())
    };
    assert_eq!(check(&served), (Some(0), String::new()));
    for wrong in ["[agent\n", "", "[agent]\nname = \"not a name\"\n[tls]\ndir = \"/t\"\n"] {
        served.set_config(wrong);
        served.restart();
        told(&served.lab.a, "configuration", "the last good configuration");
        let (code, err) = check(&served);
        assert!(code == Some(4) && err.contains("uses the last good configuration"), "{err}");
    }
    // The second fault: the file is gone.
    std::fs::remove_file(served.lab.a.config()).unwrap();
    served.restart();
    told(&served.lab.a, "configuration", "No such file");
    // A part that is wrong is left out, and such a file is not kept as a good one.
    served.set_config(&format!("{good}[[peer]]\nname = \"a b\"\naddress = \"\"\n"));
    served.restart();
    told(&served.lab.a, "configuration.peer.name", "'a b' is not a DNS name");
    assert!(check(&served).1.contains("runs without the parts that this concerns"));
    served.lab.b.start();
    let plan = served.lab.a.dray(&["plan", "--image", IMAGE, "--to", "hostb"]);
    assert!(plan.status.success(), "the other peer is there: {plan:?}");
    served.set_config("[");
    served.restart();
    // Good again, and then nothing is left of it.
    served.set_config(&good);
    served.restart();
    assert_eq!(troubles(&served.lab.a), Vec::<Value>::new());
    // Without a last good one there is nothing to start with.
    served.lab.a.stop();
    served.set_config("[");
    std::fs::remove_file(served.lab.a.dir.join("dray.toml.last-good")).unwrap();
    served.lab.a.spawn(&[]);
    wait_for("the end", LOOK, || served.lab.a.has_died()).unwrap();
}

#[test]
fn a_record_that_cannot_be_read_costs_what_it_is_of() {
    const RECORDS: [&str; 9] = [
        "batches/x.json",
        "seeds/x.json",
        "released/x.json",
        "backups/x.json",
        "backups/.schedule.json",
        "backups/x.restore",
        "digests.json",
        "links.json",
        "given.json",
    ];
    let mut served = Served::new();
    let state = served.lab.a.dir.join("state");
    std::fs::create_dir_all(state.join("backups")).unwrap();
    for record in RECORDS {
        std::fs::write(state.join(record), "{\"half").unwrap();
        served.lab.a.kill();
        served.lab.a.start();
        served.check();
        let at = state.join(record).display().to_string();
        let key = if record.ends_with("restore") { "restore" } else { "record" };
        told(&served.lab.a, &format!("{key}.{at}"), &at);
    }
    served.restart();
    assert_eq!(troubles(&served.lab.a).len(), RECORDS.len());
    for record in RECORDS {
        std::fs::remove_file(state.join(record)).unwrap();
        // No file at all, but something else under its name.
        std::fs::create_dir(state.join(record)).unwrap();
    }
    served.restart();
    for record in RECORDS {
        std::fs::remove_dir(state.join(record)).unwrap();
    }
    gone(&served.lab.a, "record");
    served.restart();
    assert_eq!(troubles(&served.lab.a), Vec::<Value>::new());
}

#[test]
fn a_damaged_index_of_content_costs_nothing() {
    let mut served = Served::new();
    let index = served.lab.a.dir.join("state/content.redb");
    let known = |host: &Host| {
        let info = host.ask(json!("info")).unwrap();
        info["indexed_bytes"].as_u64().unwrap()
    };
    wait_for("the index", LOOK, || known(&served.lab.a) > 0).unwrap();
    served.lab.a.stop();
    let good = std::fs::read(&index).unwrap();
    for nth in 0..12_usize {
        let mut bad = good.clone();
        match nth {
            0 => bad.clear(),
            1 => bad.truncate(good.len() / 2),
            _ => {
                // Everywhere: the head, the trees, the pages.
                let from = (nth - 2) * good.len() / 10;
                let to = (from + good.len() / 20).min(good.len());
                bad[from..to].iter_mut().enumerate().for_each(|(n, byte)| *byte ^= n as u8 | 1);
            }
        }
        std::fs::write(&index, bad).unwrap();
        served.lab.a.start();
        served.check();
        assert!(!served.lab.a.has_died(), "{nth}");
        if nth % 2 == 0 { served.lab.a.stop() } else { served.lab.a.kill() }
    }
    std::fs::remove_file(&index).unwrap();
    std::fs::create_dir(&index).unwrap();
    served.lab.a.start();
    served.restart();
}

#[test]
fn a_socket_that_cannot_be_had_is_tried_again() {
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap();
    let more = |name: &str, config: String| match name {
        "hosta" => format!("{config}[nbd]\ntcp = \"{address}\"\n"),
        _ => config,
    };
    let mut served = Served::with(more);
    told(&served.lab.a, "listener.remote-guests", "in use");
    served.lab.a.stop();
    let peers = std::net::TcpListener::bind(&served.lab.a.address).unwrap();
    served.restart();
    told(&served.lab.a, "listener.peers", "in use");
    drop(peers);
    gone(&served.lab.a, "listener.peers");
    drop(tcp);
    gone(&served.lab.a, "listener");
    served.check();
    // The socket of guests, which the others do not wait for.
    served.lab.a.stop();
    let nbd = served.lab.a.nbd();
    let _ = std::fs::remove_file(&nbd);
    let other = UnixListener::bind(&nbd).unwrap();
    served.lab.a.start();
    told(&served.lab.a, "listener.guests", "listen");
    drop(other);
    gone(&served.lab.a, "listener.guests");
    served.check();
    // That of operators: guests are served meanwhile.
    served.lab.a.stop();
    let _ = std::fs::remove_file(served.lab.a.api());
    std::fs::create_dir(served.lab.a.api()).unwrap();
    served.lab.a.spawn(&[]);
    wait_for("guests", LOOK, || Client::connect(&nbd, IMAGE).is_ok()).unwrap();
    served.check();
    std::fs::remove_dir(served.lab.a.api()).unwrap();
    wait_for("operators", LOOK, || served.lab.a.ask(json!("info")).is_ok()).unwrap();
}

/// What systemd would be told next.
fn notified(socket: &UnixDatagram) -> String {
    let mut text = [0; 1024];
    let len = socket.recv(&mut text).unwrap_or(0);
    String::from_utf8_lossy(&text[..len]).trim().to_owned()
}

#[test]
fn whoever_starts_the_agent_is_told_when_guests_can_come() {
    let mut served = Served::new();
    served.lab.a.stop();
    let path = served.lab.dir.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(LOOK)).unwrap();
    let notify = [("NOTIFY_SOCKET", path.to_str().unwrap())];
    served.lab.a.spawn(&notify);
    assert_eq!(notified(&socket), "READY=1");
    served.check();
    wait_for("operators", LOOK, || served.lab.a.ask(json!("info")).is_ok()).unwrap();
    served.lab.a.stop();
    assert_eq!(notified(&socket), "STOPPING=1");
    // Not before they can.
    let other = UnixListener::bind(served.lab.a.nbd()).unwrap();
    served.lab.a.start_with(&notify);
    told(&served.lab.a, "listener.guests", "listen");
    socket.set_nonblocking(true).unwrap();
    assert_eq!(notified(&socket), "");
    socket.set_nonblocking(false).unwrap();
    drop(other);
    assert_eq!(notified(&socket), "READY=1");
    served.check();
    // A socket that nobody has any more.
    drop(socket);
    served.lab.a.stop();
    served.lab.a.start_with(&notify);
    served.check();
}

#[test]
fn an_agent_that_is_told_to_end_ends_whatever_it_waits_for() {
    let mut served = Served::new();
    served.lab.a.stop();
    // Its certificates are never read.
    let ca = served.tls().join("ca-cert.pem");
    let kept = std::fs::read(&ca).unwrap();
    std::fs::remove_file(&ca).unwrap();
    run(Command::new("mkfifo").arg(&ca));
    served.lab.a.spawn(&[]);
    std::thread::sleep(Duration::from_secs(1));
    served.lab.a.stop();
    std::fs::remove_file(&ca).unwrap();
    std::fs::write(&ca, kept).unwrap();
    served.lab.a.start();
    served.check();
    // Twice in a row.
    served.lab.a.signal("TERM");
    served.lab.a.stop();
    served.lab.a.start();
    served.check();
}

#[test]
fn what_concerns_everything_ends_the_start() {
    let mut served = Served::new();
    // Another agent on the same state.
    let text = served.config().replace("/hosta/run\"", "/hosta/run2\"");
    let second = served.lab.dir.path().join("second.toml");
    std::fs::write(&second, text).unwrap();
    let start = |config: &Path| {
        let ran = Command::new(crate::lab::DRAY).args(["agent", "--config"]).arg(config).output();
        let ran = ran.unwrap();
        assert!(!ran.status.success());
        String::from_utf8_lossy(&ran.stderr).into_owned()
    };
    let why = start(&second);
    assert!(why.contains("another agent uses it") && why.contains("end that agent"), "{why}");
    served.check();
    // The state is not mounted: an empty one would not know whose images these are.
    served.lab.a.stop();
    let state = served.lab.a.dir.join("state");
    std::fs::rename(&state, served.lab.a.dir.join("away")).unwrap();
    let why = start(&served.lab.a.config());
    assert!(why.contains("mount the state directory"), "{why}");
    assert!(!state.exists());
    std::fs::rename(served.lab.a.dir.join("away"), &state).unwrap();
    served.lab.a.start();
    served.check();
}

#[test]
fn a_restart_needs_no_room_in_the_state_directory() {
    let mut served = Served::new();
    served.lab.a.stop();
    let state = served.lab.a.dir.join("state");
    let away = served.lab.a.dir.join("away");
    std::fs::rename(&state, &away).unwrap();
    let Some(small) = Mount::tmpfs(&state, "size=4m") else { return };
    run(Command::new("cp").arg("-a").arg(away.join(".")).arg(&small.path));
    served.lab.a.start();
    served.check();
    // Fills what is left; the error is wanted.
    let _ = std::fs::write(small.path.join("ballast"), vec![1; 4 << 20]);
    for _ in 0..2 {
        served.lab.a.kill();
        served.lab.a.start();
        let mut client = Client::connect(&served.lab.a.nbd(), IMAGE).unwrap();
        let read = client.request(READ, 0, 1, &[], &|| true).unwrap();
        assert_eq!(read, [served.blocks[0]]);
    }
    std::fs::remove_file(small.path.join("ballast")).unwrap();
    served.restart();
    served.lab.a.kill();
}
