//! The snapshot index: which backup or replica holds which generation of an image, asked of all
//! places that may know.
//!
//! All places are asked at once, and none is waited for for long: one that says nothing must not keep a
//! migration from its work. What a place is nobody asks who uses the index: to whom images can be had
//! from, a place is a [`Catalogue`], and what it holds a [`HeldCopy`].

use crate::provider::Provider;
use dray_api::HeldAs;
use dray_backup::Reader;
use dray_image::ImageFile;
use dray_net::NetError;
use dray_net::tls::TlsError;
use dray_types::{Ancestor, GenerationId, ImageId, Refusal};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// A place that may hold generations of images.
pub trait Catalogue: Send + Sync {
    /// The place's name: a repository's or a peer's.
    fn name(&self) -> &str;

    /// The longest wait for its answer.
    fn patience(&self) -> Duration;

    /// Whether it is another host: of those, the silent ones are told apart.
    fn is_host(&self) -> bool;

    /// What it has of an image.
    ///
    /// # Errors
    /// Why it cannot say.
    fn snapshots(&self, image: ImageId) -> Result<Snapshots, Unheard>;
}

/// What holds a generation's content, at one place.
pub trait HeldCopy: Send + Sync {
    /// What the interface calls it.
    fn held_as(&self) -> HeldAs;

    /// Regions that do not hold the generation any more.
    fn distrusted(&self) -> &[u64] {
        &[]
    }

    /// Bytes allocated for it, where no recipe says how much data there is.
    fn allocated(&self) -> u64 {
        0
    }

    /// Whether it knows what each piece of it consists of. Of one of another generation, what is the
    /// same can be used then.
    fn has_recipe(&self) -> bool {
        false
    }

    /// The recipe, if it has one, which may take its time.
    ///
    /// # Errors
    /// Why it cannot be read.
    fn recipe(&self) -> Result<Option<Arc<Reader>>, Unheard> {
        Ok(None)
    }

    /// Who gives its content; none where it cannot be reached.
    fn provider(&self, wanted: Wanted) -> Option<Arc<dyn Provider>>;
}

/// What is wanted of a copy.
#[derive(Clone)]
pub struct Wanted {
    /// The image.
    pub image: ImageId,
    /// The generation that is read.
    pub generation: GenerationId,
    /// An old copy of the image on this host, of whatever state.
    pub old: Option<Arc<dyn ImageFile>>,
    /// The copy's own recipe; one of the wanted generation from elsewhere where it has none.
    pub recipe: Option<Arc<Reader>>,
}

/// The longest wait for a repository's list of what it has, or for one more part of a recipe. Some hundred
/// manifests are read one after the other, each a round trip to an object store.
pub const PATIENCE: Duration = Duration::from_secs(25);

/// One generation of an image, at one place.
pub struct Snapshot {
    /// The place's name: a repository's or a peer's.
    pub place: String,
    /// The generation.
    pub generation: Ancestor,
    /// The image's length then, in bytes.
    pub len: u64,
    /// What holds its content.
    pub held: Box<dyn HeldCopy>,
}

/// Why a place has told nothing.
#[derive(Debug, thiserror::Error)]
pub enum Unheard {
    /// A peer that the configuration does not name.
    #[error("no such peer is configured")]
    Unknown,
    /// A repository that cannot be opened.
    #[error(transparent)]
    Closed(#[from] Refusal),
    /// A repository that cannot be read.
    #[error(transparent)]
    Unread(#[from] dray_backup::Error),
    /// This host cannot show who it is.
    #[error(transparent)]
    Certificate(#[from] TlsError),
    /// A peer that cannot be asked, or has refused.
    #[error(transparent)]
    Peer(#[from] NetError),
    /// Something on this host.
    #[error(transparent)]
    Local(#[from] io::Error),
    /// A peer that has answered something else.
    #[error("its answer does not fit the question")]
    Misfit,
    /// It has been waited for long enough.
    #[error("it did not answer within {} s", .0.as_secs())]
    Late(Duration),
}

/// What all places have of an image.
#[derive(Default)]
pub struct Snapshots {
    /// By place, in the order in which they were asked.
    pub held: Vec<Snapshot>,
    /// What is damaged, and which repository cannot be asked and why, for people.
    pub notes: Vec<String>,
    /// Which peer cannot be asked and why.
    pub silent: Vec<String>,
}

impl Snapshots {
    /// Asks every place for what it has of `image`.
    pub fn of(places: &[Arc<dyn Catalogue>], image: ImageId) -> Self {
        let begun = Instant::now();
        let ask = |place: &Arc<dyn Catalogue>| {
            let place = Arc::clone(place);
            apart(move || place.snapshots(image))
        };
        let asked: Vec<_> = places.iter().map(|place| (place, ask(place))).collect();
        let mut all = Self::default();
        for (place, told) in asked {
            let left = (begun + place.patience()).saturating_duration_since(Instant::now());
            match told.recv_timeout(left).unwrap_or_else(|_| Err(Unheard::Late(place.patience()))) {
                Ok(found) => {
                    all.held.extend(found.held);
                    all.notes.extend(found.notes);
                }
                Err(why) if place.is_host() => all.silent.push(format!("{}: {why}", place.name())),
                Err(why) => all.notes.push(format!("{}: {why}", place.name())),
            }
        }
        all
    }
}

/// Does it on a thread of its own, which whoever waits may leave alone: it ends with its work. Where no
/// thread can be made nothing ever comes.
pub fn apart<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (send, told) = mpsc::sync_channel(1);
    // Nobody may be waiting any more.
    let work = move || drop(send.send(work()));
    drop(std::thread::Builder::new().name("dray-snapshots".to_owned()).spawn(work));
    told
}
