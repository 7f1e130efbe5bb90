//! The store that this host offers to peers (`[backup_store]` in the configuration), over streams
//! of their own with a thread each. A faulty question gets an error as its answer, and the stream
//! continues.
//!
//! Each peer has a [`Shelf`] of its own, a folder with the name in its certificate, and sees no other, except
//! those of which its `[[peer]]` says that it may read them: their names begin with `@PEER/`.

mod listing;
mod shelf;
mod shelves;
#[cfg(test)]
mod tests;

use dray_backup::{Error, Kind, Put, Result, Store};
use dray_host::abort;
use dray_net::memory::Held;
use dray_net::questions::{Answering, Asked, IDLE};
use dray_net::{NetError, NetErrorKind, Stream};
use dray_wire::store::{Answer, Ask, MAX_OBJECT, Refusal};
use listing::Listing;
use parking_lot::Mutex;
pub use shelf::Shelf;
use shelves::Shelves;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// Longest head of a question: a name of 200 bytes and numbers.
const MAX_ASK: usize = 4096;
/// Pause between two looks for what was deleted long ago.
const SWEEP: Duration = Duration::from_secs(3600);
/// What stands before the name of another peer's object.
const OTHERS: char = '@';

/// What a peer may have in the store, and what becomes of what it deletes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreRules {
    /// Peers delete nothing but the empty marks of their own running backups.
    pub append_only: bool,
    /// How long what a peer has deleted stays.
    pub keep_deleted: Duration,
    /// Most bytes of one peer; any number when absent.
    pub max_bytes: Option<u64>,
    /// Most objects of one peer.
    pub max_objects: u64,
}

/// The store, with everything that peers have in it.
pub struct Offer {
    root: PathBuf,
    rules: StoreRules,
    shelves: Shelves,
    swept: Mutex<Option<Instant>>,
}

/// What a peer sees of the store.
struct View<'a> {
    offer: &'a Offer,
    own: Arc<Shelf>,
    /// Those whose objects it may read.
    others: Vec<String>,
}

impl Offer {
    /// The store in `root`.
    pub fn new(root: &Path, rules: StoreRules) -> Self {
        Self { root: root.to_owned(), rules, shelves: Shelves::default(), swept: Mutex::default() }
    }

    /// The shelf of a peer. All of its streams share one, and so what is counted.
    fn shelf(&self, peer: &str) -> Result<Arc<Shelf>> {
        let name = peer.to_ascii_lowercase();
        self.shelves.get(&name, || Shelf::open(&self.root.join(&name), self.rules.clone()))
    }

    /// Removes what peers have deleted long ago, also of peers that do not come any more. Does it once in a
    /// while, however often it is called.
    pub fn sweep(&self) {
        let mut swept = self.swept.lock();
        if swept.is_some_and(|at| at.elapsed() < SWEEP) {
            return;
        }
        *swept = Some(Instant::now());
        drop(swept);
        let folders = std::fs::read_dir(&self.root).into_iter().flatten().flatten();
        let names = folders.filter_map(|entry| entry.file_name().into_string().ok());
        for peer in names.filter(|name| self.root.join(name).join(shelf::DELETED).is_dir()) {
            if let Err(why) = self.shelf(&peer).and_then(|shelf| shelf.look()) {
                tracing::warn!(peer, %why, "cannot remove what a peer has deleted");
            }
        }
    }

    /// Serves the store until the peer has had enough. `counted` is dropped then. Must be called within a tokio
    /// runtime.
    ///
    /// # Errors
    /// When no thread can be made.
    pub fn serve(
        self: &Arc<Self>,
        stream: Stream,
        others: Vec<String>,
        counted: impl Send + 'static,
    ) -> std::result::Result<(), NetError> {
        let local =
            |why: String| NetError::new(NetErrorKind::Local, format!("offer a store: {why}"));
        let mut stream = stream.into_blocking()?;
        stream.limit_waits(IDLE)?;
        let (offer, runtime) = (Arc::clone(self), Handle::current());
        let work = move || {
            let _counted = counted;
            let peer = stream.peer().to_owned();
            let served = offer.shelf(&peer).map_err(io::Error::other).and_then(|own| {
                let view = View { offer: &offer, own, others };
                answer_all(
                    Answering::new(&mut stream, runtime, MAX_ASK, MAX_OBJECT as usize),
                    &view,
                )
            });
            if let Err(why) = served {
                tracing::debug!(peer, %why, "a stream to the backup store ended");
            }
        };
        let made = std::thread::Builder::new().name("dray-store".to_owned()).spawn(work);
        made.map(drop).map_err(|why| local(why.to_string()))
    }
}

fn answer_all(mut peer: Answering<'_>, view: &View<'_>) -> io::Result<()> {
    while let Some(question) = peer.question::<Ask>()? {
        abort::before(|| vec!["store-answer".to_owned()]);
        // A list may be long, and is in memory until the peer has taken it: one at a time for each peer.
        let _turn = matches!(question.ask, Ask::List { .. }).then(|| view.own.listing.lock());
        let (ask, body, held) = placed(&peer, question)?;
        let (answer, bytes) = view.answer(ask, &body);
        peer.answer(&answer, &bytes, held)?;
    }
    Ok(())
}

/// The question with a place for its answer. Nobody holds one for each: all could wait for the second.
fn placed(peer: &Answering<'_>, question: Asked<Ask>) -> io::Result<(Ask, Vec<u8>, Held)> {
    let Asked { ask, body, held } = question;
    let room = match &ask {
        Ask::PutNew { .. } => return Ok((ask, body, held)),
        Ask::Get { limit: len, .. } | Ask::GetRange { len, .. } => (*len).min(MAX_OBJECT) as usize,
        // What becomes an answer of 64 MiB takes several times that while it is made.
        Ask::List { .. } => peer.most(),
        Ask::Delete { .. } | Ask::Exists { .. } => 0,
    };
    // Only an object that is put has a body.
    drop((body, held));
    Ok((ask, Vec::new(), peer.place(room)?))
}

impl View<'_> {
    fn answer(&self, ask: Ask, body: &[u8]) -> (Answer, Vec<u8>) {
        match self.carry_out(ask, body) {
            Ok(answer) => answer,
            Err(why) => {
                (Answer::Failed { kind: refusal(why.kind()), why: why.to_string() }, Vec::new())
            }
        }
    }

    /// On whose shelf the object is, and its name there.
    fn find<'n>(&self, name: &'n str) -> Result<(Arc<Shelf>, &'n str)> {
        let Some(rest) = name.strip_prefix(OTHERS) else {
            return Ok((Arc::clone(&self.own), name));
        };
        let (peer, name) = rest.split_once('/').unwrap_or((rest, ""));
        if !self.others.iter().any(|other| other.eq_ignore_ascii_case(peer)) {
            let what = format!("this host may not read what '{peer}' has in the store");
            return Err(Error::new(Kind::Denied, what));
        }
        Ok((self.offer.shelf(peer)?, name))
    }

    /// The same for a change: everybody changes only what is on their own shelf.
    fn own(&self, name: &str) -> Result<&Shelf> {
        match name.starts_with(OTHERS) {
            true => {
                Err(Error::new(Kind::Denied, "another host's objects can only be read".to_owned()))
            }
            false => Ok(&self.own),
        }
    }

    fn carry_out(&self, ask: Ask, body: &[u8]) -> Result<(Answer, Vec<u8>)> {
        let bounded = |len: u32| len.min(MAX_OBJECT) as usize;
        Ok(match ask {
            Ask::PutNew { name } => match self.own(&name)?.put_new(&name, body)? {
                Put::Created => (Answer::Created, Vec::new()),
                Put::Existed => (Answer::Existed, Vec::new()),
            },
            Ask::Get { name, limit } => {
                let (shelf, name) = self.find(&name)?;
                (Answer::Bytes, shelf.objects.get(name, bounded(limit))?)
            }
            Ask::GetRange { name, offset, len } => {
                let (shelf, name) = self.find(&name)?;
                (Answer::Bytes, shelf.objects.get_range(name, offset, bounded(len))?)
            }
            Ask::List { prefix } => {
                let (shelf, rest) = self.find(&prefix)?;
                let before = &prefix[..prefix.len() - rest.len()];
                let mut listing = Listing::new(&prefix, before);
                shelf.objects.for_each(rest, &mut |object| listing.add(object))?;
                (Answer::Objects(listing.done()), Vec::new())
            }
            Ask::Delete { name } => {
                self.own(&name)?.delete(&name)?;
                (Answer::Done, Vec::new())
            }
            Ask::Exists { name } => {
                let (shelf, name) = self.find(&name)?;
                (Answer::Exists(shelf.objects.exists(name)?), Vec::new())
            }
        })
    }
}

fn refusal(kind: Kind) -> Refusal {
    match kind {
        Kind::NotFound => Refusal::NotFound,
        Kind::Damaged => Refusal::Damaged,
        Kind::Invalid => Refusal::Invalid,
        Kind::Denied => Refusal::Denied,
        _ => Refusal::Unavailable,
    }
}
