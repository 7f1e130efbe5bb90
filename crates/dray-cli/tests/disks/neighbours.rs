//! A host of the fleet that was taken over: it has a certificate, and says whatever it likes. What it may
//! cost the others, and what it learns of them.

use crate::case::IMAGE;
use crate::guest;
use crate::lab::{Host, Lab, wait_for};
use crate::promises::promised;
use dray_net::requests::{self, RequestHandler};
use dray_net::tls::Identity;
use dray_net::{DialSettings, ListenSettings, Listener, dial};
use dray_types::{ErrorKind, ImageId, MigrationId, Refusal};
use dray_wire::request::{ComingImage, Fate, Reply, Request, WantedImage};
use dray_wire::{Hello, StreamKind};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::Runtime;

/// Longest wait for an answer.
const ANSWER: Duration = Duration::from_secs(30);
/// Migrations that one host may have prepared.
const MOST: u128 = 128;

/// Somebody with a host's certificate.
struct Neighbour {
    runtime: Runtime,
    identity: Identity,
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn identity(lab: &Lab, name: &str) -> Identity {
    Identity::load(&lab.dir.path().join("pki").join(name)).unwrap()
}

impl Neighbour {
    fn new(lab: &Lab, name: &str) -> Self {
        Self { runtime: runtime(), identity: identity(lab, name) }
    }

    fn ask(&self, to: &Host, request: &Request) -> Result<Reply, String> {
        let asked = requests::ask(&self.identity, to.name, &to.address, request, ANSWER);
        self.runtime.block_on(asked).map_err(|why| why.to_string())
    }

    /// Why a control stream of this migration is refused.
    fn is_refused(&self, to: &Host, migration: MigrationId) -> String {
        let hello = Hello {
            agent: "neighbour".into(),
            migration: Some(migration),
            session: 1,
            stream: 0,
            features: Vec::new(),
        };
        let (kind, settings) = (StreamKind::Control, DialSettings::default());
        let dialled = dial(&self.identity, to.name, &to.address, kind, &hello, &settings);
        self.runtime.block_on(dialled).unwrap_err().to_string()
    }
}

fn wanted(name: &str, id: u128) -> WantedImage {
    let len = 1 << 20;
    WantedImage { id: ImageId(id), name: name.into(), len, allocated: 0, read_only: false }
}

fn coming(name: &str, id: u128) -> ComingImage {
    ComingImage {
        image: wanted(name, id),
        ancestors: Vec::new(),
        digest: None,
        qcow2: false,
        owner: None,
    }
}

fn prepare(migration: MigrationId, name: &str) -> Request {
    let images = vec![coming(name, migration.0 + 1000)];
    Request::Prepare { migration, pool: None, images }
}

/// Prepares the image at hosta for hostb.
fn prepared(lab: &Lab) -> MigrationId {
    let output = lab.a.dray(&["prepare", "--image", IMAGE, "--to", "hostb"]);
    assert!(output.status.success(), "{output:?}");
    lab.a.migrations()[0]["migration"].as_str().unwrap().parse().unwrap()
}

/// Answers what is asked at a host's address.
fn answer_as(lab: &Lab, host: &Host, runtime: &Runtime, desk: impl RequestHandler + 'static) {
    let (identity, desk) = (identity(lab, host.name), Arc::new(desk));
    let address = host.address.parse().unwrap();
    let listener = runtime.block_on(Listener::bind(address, ListenSettings::default())).unwrap();
    let handle = move |incoming| {
        let desk = Arc::clone(&desk);
        async move {
            let _ = requests::serve(incoming, &*desk).await;
        }
    };
    runtime.spawn(listener.run(identity, |name: &str| Some(name.to_owned()), handle));
}

#[test]
fn a_migration_away_is_not_prepared_to_here() {
    let mut lab = Lab::new();
    guest::make_image(&lab.a.pool().join(IMAGE), 64);
    lab.start();
    lab.a.add(IMAGE);
    let id = prepared(&lab);
    let neighbour = Neighbour::new(&lab, "hostb");
    for _ in 0..3 {
        let why = neighbour.ask(&lab.a, &prepare(id, "evil.img")).unwrap_err();
        assert!(why.contains("a migration away from that host"), "{why}");
        assert_eq!(lab.a.files(), [IMAGE]);
        let known = lab.a.migrations();
        assert_eq!((known.len(), &known[0]["role"]), (1, &"source".into()), "{known:?}");
        // What is not there is not forgotten either.
        neighbour.ask(&lab.a, &Request::Forget { migration: id }).unwrap();
        lab.a.kill();
        lab.a.start();
    }
    let moved = lab.a.dray(&["migrate", "--image", IMAGE, "--to", "hostb"]);
    assert!(moved.status.success(), "{moved:?}");
    assert_eq!(lab.b.image(IMAGE).unwrap()["state"], "owner");
}

/// A target that prepares a migration back under its own id before it answers.
struct Echo {
    identity: Identity,
    source: (&'static str, String),
    told: Arc<Mutex<Vec<Result<Reply, String>>>>,
}

impl RequestHandler for Echo {
    async fn answer(&self, _: &str, request: Request) -> Reply {
        if let Request::Prepare { migration, .. } = request {
            let (name, address) = &self.source;
            let back = prepare(migration, "evil.img");
            let told = requests::ask(&self.identity, name, address, &back, ANSWER).await;
            self.told.lock().unwrap().push(told.map_err(|why| why.to_string()));
        }
        Reply::Refused(Refusal::new(ErrorKind::Conflict, "cannot", "not here"))
    }
}

#[test]
fn what_is_being_prepared_is_not_prepared_back() {
    let lab = {
        let mut lab = Lab::new();
        guest::make_image(&lab.a.pool().join(IMAGE), 64);
        lab.a.start();
        lab.a.add(IMAGE);
        lab
    };
    let (runtime, told) = (runtime(), Arc::default());
    let source = (lab.a.name, lab.a.address.clone());
    let echo = Echo { identity: identity(&lab, "hostb"), source, told: Arc::clone(&told) };
    answer_as(&lab, &lab.b, &runtime, echo);
    assert!(!lab.a.dray(&["prepare", "--image", IMAGE, "--to", "hostb"]).status.success());
    let told = told.lock().unwrap().clone();
    let [Err(why)] = &told[..] else { panic!("{told:?}") };
    assert!(why.contains("a migration away from that host"), "{why}");
    assert_eq!((lab.a.files(), lab.a.open_migrations()), (vec![IMAGE.to_owned()], 0));
}

#[test]
fn what_one_host_prepares_is_bounded_and_takes_nothing_from_another() {
    let mut lab = Lab::new();
    let third = lab.third();
    lab.b.start();
    let greedy = Neighbour::new(&lab, "hosta");
    let name = |nth: u128| format!("n{nth}.img");
    let ask = |host: &Host, nth: u128| greedy.ask(host, &prepare(MigrationId(nth), &name(nth)));
    for nth in 1..=MOST {
        ask(&lab.b, nth).unwrap();
    }
    for _ in 0..2 {
        let why = ask(&lab.b, MOST + 1).unwrap_err();
        assert!(why.contains("may have 128") && why.contains("`dray cancel` on hosta"), "{why}");
        ask(&lab.b, MOST).unwrap();
        lab.b.kill();
        lab.b.start();
    }
    let modest = Neighbour::new(&lab, third.name);
    modest.ask(&lab.b, &prepare(MigrationId(9999), "other.img")).unwrap();
    greedy.ask(&lab.b, &Request::Forget { migration: MigrationId(1) }).unwrap();
    wait_for("room", ANSWER, || ask(&lab.b, MOST + 1).is_ok()).unwrap();
}

/// A source that takes its time, and counts.
#[derive(Default)]
struct Asked {
    now: AtomicUsize,
    most: AtomicUsize,
    all: AtomicUsize,
}

struct Slow(Arc<Asked>);

impl RequestHandler for Slow {
    async fn answer(&self, _: &str, request: Request) -> Reply {
        assert!(matches!(request, Request::Fate { .. }), "{request:?}");
        self.0.all.fetch_add(1, SeqCst);
        self.0.most.fetch_max(self.0.now.fetch_add(1, SeqCst) + 1, SeqCst);
        tokio::time::sleep(Duration::from_secs(1)).await;
        self.0.now.fetch_sub(1, SeqCst);
        Reply::Fate { fate: Fate::Live }
    }
}

#[test]
fn a_host_that_prepares_does_not_have_others_asked_as_it_likes() {
    let mut lab = Lab::new();
    let third = lab.third();
    guest::make_image(&lab.a.pool().join(IMAGE), 64);
    lab.start();
    lab.a.add(IMAGE);
    let id = prepared(&lab);
    lab.a.kill();
    let (runtime, asked) = (runtime(), Arc::<Asked>::default());
    answer_as(&lab, &lab.a, &runtime, Slow(Arc::clone(&asked)));
    let loud = Neighbour::new(&lab, third.name);
    wait_for("the agent's own question", ANSWER, || asked.all.load(SeqCst) > 0).unwrap();
    // What makes no sense, or is not allowed, has nobody asked. The agent asks by itself now and then.
    let before = asked.all.load(SeqCst);
    for _ in 0..5 {
        let images = vec![coming(IMAGE, 1), coming("../evil", 2)];
        let bad = Request::Prepare { migration: MigrationId(5), pool: None, images };
        assert!(loud.ask(&lab.b, &bad).unwrap_err().contains("is not a name"));
        let (pool, images) = (Some("other".to_owned()), vec![coming(IMAGE, 1)]);
        let bad = Request::Prepare { migration: MigrationId(5), pool, images };
        assert!(loud.ask(&lab.b, &bad).unwrap_err().contains("may not use a pool"));
    }
    let more = asked.all.load(SeqCst) - before;
    assert!(more <= 2, "{more} questions");
    // What may be asked is asked once at a time.
    std::thread::scope(|scope| {
        for nth in 0..16 {
            let (loud, lab) = (&loud, &lab);
            scope.spawn(move || {
                let why = loud.ask(&lab.b, &prepare(MigrationId(100 + nth), IMAGE)).unwrap_err();
                assert!(why.contains("exists here already"), "{why}");
                assert!(!why.contains(&id.to_string()) && !why.contains("hosta"), "{why}");
            });
        }
    });
    let (most, more) = (asked.most.load(SeqCst), asked.all.load(SeqCst) - before);
    assert!(most == 1 && more <= 8, "{most} at once, {more} in all");
}

#[test]
fn what_became_of_a_migration_is_for_its_other_end_alone() {
    let lab = Lab::new();
    let third = lab.third();
    let mut case = promised(lab);
    case.lab.a.kill();
    case.lab.b.start();
    let known = case.lab.b.migrations();
    let id: MigrationId = known[0]["migration"].as_str().unwrap().parse().unwrap();
    let claim = ["claim", IMAGE, "--source-is-fenced", "--accept-loss"];
    let claimed = case.lab.b.dray(&claim);
    assert!(claimed.status.success(), "{claimed:?}");
    for _ in 0..2 {
        let why = Neighbour::new(&case.lab, "hosta").is_refused(&case.lab.b, id);
        assert!(why.contains("was claimed here and has epoch"), "{why}");
        let why = Neighbour::new(&case.lab, third.name).is_refused(&case.lab.b, id);
        assert!(!why.contains("claimed") && !why.contains("epoch"), "{why}");
        assert!(!why.contains(IMAGE), "{why}");
        case.lab.b.kill();
        case.lab.b.start();
    }
}
