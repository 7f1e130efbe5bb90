//! A whole provider without a protocol: an image is read from it as from a backup or a replica. Nothing
//! above its three traits knows of it.

use dray_api::HeldAs;
use dray_config::{Config, Peer};
use dray_host::registry::Registry;
use dray_host::store::Store;
use dray_provider::provider::{Failure, Parts as Content, Provider};
use dray_provider::seed::{self, Parts, Seeds};
use dray_provider::snapshots::{Catalogue, HeldCopy, Snapshot, Snapshots, Unheard, Wanted};
use dray_types::{Ancestor, Epoch, GenerationId, ImageId};
use dray_vm::flat::Pools;
use dray_wire::request::{Base, SeedImage, Seeding, WantedImage};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LEN: u64 = 9 << 20;
const IMAGE: ImageId = ImageId(7);
const GENERATION: Ancestor = Ancestor { id: GenerationId(5), number: 3 };

/// The content of the image at an offset; every other MiB is zero.
fn content(offset: u64) -> u8 {
    let mib = (offset >> 20) as u8;
    if mib.is_multiple_of(2) { mib + 1 } else { 0 }
}

/// A place that knows the one image, or does not answer.
struct Toy {
    name: &'static str,
    deaf: bool,
}

impl Catalogue for Toy {
    fn name(&self) -> &str {
        self.name
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(5)
    }

    fn is_host(&self) -> bool {
        false
    }

    fn snapshots(&self, image: ImageId) -> Result<Snapshots, Unheard> {
        if self.deaf {
            return Err(Unheard::Misfit);
        }
        let snapshot = Snapshot {
            place: self.name.to_owned(),
            generation: GENERATION,
            len: LEN,
            held: Box::new(ToyCopy(self.name)),
        };
        let held = (image == IMAGE).then_some(snapshot).into_iter().collect();
        Ok(Snapshots { held, ..Snapshots::default() })
    }
}

struct ToyCopy(&'static str);

impl HeldCopy for ToyCopy {
    fn held_as(&self) -> HeldAs {
        HeldAs::Backup
    }

    fn allocated(&self) -> u64 {
        LEN
    }

    fn provider(&self, _: Wanted) -> Option<Arc<dyn Provider>> {
        Some(Arc::new(ToyProvider(self.0)))
    }
}

struct ToyProvider(&'static str);

impl Provider for ToyProvider {
    fn name(&self) -> String {
        self.0.to_owned()
    }

    fn read(&self, offset: u64, len: u64) -> Result<Content, Failure> {
        let end = offset + len;
        let data = (offset..end).step_by(1 << 20).filter(|at| content(*at) != 0);
        Ok(data.map(|at| (at, vec![content(at); (end - at).min(1 << 20) as usize])).collect())
    }
}

/// A host that knows these places.
struct Host {
    dir: tempfile::TempDir,
    config: Arc<Config>,
    registry: Arc<Registry>,
    places: Vec<Arc<dyn Catalogue>>,
}

impl Host {
    fn new(places: Vec<Arc<dyn Catalogue>>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["state", "pool"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let text = format!(
            "[agent]\nname = 'b'\nstate_dir = '{0}'\n[tls]\ndir = '{0}'\n\
             [[pool]]\nname = 'fast'\npath = '{0}/pool'\n",
            dir.path().display()
        );
        let config = Arc::new(Config::parse(&text, Path::new("dray.toml")).unwrap());
        let around = Arc::new(Pools(Arc::clone(&config)));
        let registry = Registry::load(Self::store(dir.path()), around).unwrap();
        Self { dir, config, registry, places }
    }

    fn store(dir: &Path) -> Store {
        Store::open(&dir.join("state")).unwrap()
    }

    fn parts(&self) -> Parts {
        let pools = vec!["fast".to_owned()];
        let image = WantedImage {
            id: IMAGE,
            name: "vm1".to_owned(),
            len: LEN,
            allocated: LEN,
            read_only: false,
        };
        Parts {
            registry: Arc::clone(&self.registry),
            store: Self::store(self.dir.path()),
            pool: self.config.pools[0].clone(),
            peer: Peer {
                name: "a".to_owned(),
                address: "a".to_owned(),
                pools,
                rights: Vec::new(),
                reads_store_of: Vec::new(),
            },
            wanted: SeedImage { image, epoch: Epoch(1), ancestors: vec![GENERATION] },
            link: None,
            config: Arc::clone(&self.config),
            places: self.places.clone(),
        }
    }
}

#[test]
fn an_image_is_read_from_a_provider_that_nobody_knows() {
    let places: Vec<Arc<dyn Catalogue>> = vec![
        Arc::new(Toy { name: "toy", deaf: false }),
        Arc::new(Toy { name: "deaf", deaf: true }),
    ];
    let host = Host::new(places);
    let predicted = seed::survey(&host.parts(), true);
    assert_eq!(
        predicted.base,
        Base::Replica { generation: GENERATION, distrusted: vec![], unproved: true }
    );
    assert_eq!(predicted.given.len(), 1, "{:?}", predicted.given);
    assert_eq!(predicted.given[0].0, "toy");

    let (seeds, begun) = (Seeds::default(), Instant::now());
    let end = loop {
        match seeds.ask(1, host.parts()).unwrap() {
            Seeding::Running { .. } => std::thread::sleep(Duration::from_millis(10)),
            end => break end,
        }
        assert!(begun.elapsed() < Duration::from_secs(20));
    };
    let Seeding::Ready { generation, given, missing, notes } = end else { panic!("{end:?}") };
    assert_eq!((generation, missing), (GENERATION, 0));
    assert_eq!(given, [("toy".to_owned(), 5 << 20)]);
    assert_eq!(notes, ["deaf: its answer does not fit the question"]);
    let mut bytes = vec![0; LEN as usize];
    host.registry.get("vm1").unwrap().file.read_at(&mut bytes, 0).unwrap();
    assert!((0..).zip(&bytes).all(|(at, byte)| *byte == content(at)));
}
