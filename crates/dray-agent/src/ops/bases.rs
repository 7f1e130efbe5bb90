//! Base images that lie at the target already: their content is compared by digest before anything is
//! made there.

use super::ask_peer::net_error;
use super::selection::Plan;
use crate::agent::Agent;
use crate::api::Events;
use dray_api::{ApiResult, ErrorKind, Event, Refusal, SeedProgress};
use dray_host::folder::intent::SourceIntent;
use dray_host::registry::Entry;
use dray_net::{NetError, NetErrorKind};
use dray_provider::bases::Reading;
use dray_wire::request::{BaseThere, ContentDigest, Reply, Request, SoughtBase};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The first questions come soon after each other: small files are read by then.
const FIRST: Duration = Duration::from_millis(10);
/// And later ones this often.
const EVERY: Duration = Duration::from_millis(300);
/// A target that was there may be away for so long: its agent may be restarting.
const AWAY: Duration = Duration::from_secs(30);
/// Neither side has got on for so long: other files are being read, or a disk hangs.
const STALLED: Duration = Duration::from_secs(600);

impl Plan {
    /// Whether the image is the one that a disk's guest writes or reads, not one below it.
    fn is_active(&self, image: usize) -> bool {
        self.disks.iter().any(|layers| layers.first() == Some(&image))
    }
}

/// What an image of this host is called elsewhere unless the operator says otherwise.
pub(super) fn usual_name(entry: Option<Arc<Entry>>, name: &str) -> String {
    let record = entry.map(|entry| entry.record()).filter(|record| record.in_place.is_some());
    let file = record.as_ref().and_then(|record| record.path.file_name());
    // The name of one that is used in place is that of the migration which brought it.
    file.map_or_else(|| name.to_owned(), |file| file.to_string_lossy().into_owned())
}

/// What lies at the target of an image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum FileAtTarget {
    /// Nothing that could be used.
    Nothing,
    /// A file with this content, which is the image's.
    Same(ContentDigest),
    /// Another file under its name; why, and what to do.
    Other(String),
    /// That is not known in the time that there was.
    Unknown,
}

/// How patient the asking side is, and who is told how far it is.
#[derive(Clone, Copy, Default)]
pub(super) struct Asking<'a> {
    /// Until when an answer is of use.
    pub(super) limit: Option<Duration>,
    /// Who wants to know.
    pub(super) events: Option<&'a Events>,
}

/// An image that is looked for.
struct Sought {
    nth: usize,
    path: PathBuf,
    base: SoughtBase,
}

impl Agent {
    /// For each image the digest of its content if the target has that in a file which it will use in
    /// place.
    pub(super) async fn digests_there(
        self: &Arc<Self>,
        what: &str,
        intent: &SourceIntent,
        plan: &Plan,
        pool: Option<&str>,
    ) -> ApiResult<Vec<Option<ContentDigest>>> {
        let lying = self.lying_there(intent, plan, pool, Asking::default()).await;
        let digest = |(nth, lying): (usize, FileAtTarget)| match lying {
            FileAtTarget::Nothing => Ok(None),
            FileAtTarget::Same(digest) => Ok(Some(digest)),
            FileAtTarget::Other(why) => Err(in_the_way(what, &why)),
            FileAtTarget::Unknown => {
                let name = &intent.images[nth].offer.name;
                let why = format!(
                    "{name} could not be compared with the file of that name at the target"
                );
                let secs = STALLED.as_secs();
                Err(Refusal::new(ErrorKind::Peer, what, why).hint(format!(
                    "neither host has made progress for {secs} s; check their disks"
                )))
            }
        };
        let lying = lying.map_err(|why| net_error(what, &why))?;
        lying.into_iter().enumerate().map(digest).collect()
    }

    /// What lies at the target of each image. Reads files here and there as far as it has to.
    pub(super) async fn lying_there(
        self: &Arc<Self>,
        intent: &SourceIntent,
        plan: &Plan,
        pool: Option<&str>,
        asking: Asking<'_>,
    ) -> Result<Vec<FileAtTarget>, NetError> {
        let mut lying = vec![FileAtTarget::Nothing; intent.images.len()];
        let mut sought = sought(intent, plan);
        let (began, mut pause, mut got_on, mut before) =
            (Instant::now(), FIRST, Instant::now(), SeedProgress::default());
        let mut heard = None;
        while !sought.is_empty() {
            let images = sought.iter().map(|sought| sought.base.clone()).collect();
            let states = match self.bases_there(&intent.peer, pool, images).await {
                Ok(Some(states)) => states,
                Ok(None) => return Ok(lying),
                Err(why) if heard.is_none_or(|at: Instant| at.elapsed() > AWAY) => return Err(why),
                Err(_) => {
                    tokio::time::sleep(EVERY).await;
                    continue;
                }
            };
            heard = Some(Instant::now());
            let now = self.take_in(&mut sought, states, &mut lying);
            if now != before {
                (before, got_on) = (now, Instant::now());
            }
            let late = asking.limit.is_some_and(|limit| began.elapsed() >= limit);
            if late || got_on.elapsed() >= STALLED {
                sought.iter().for_each(|sought| lying[sought.nth] = FileAtTarget::Unknown);
                break;
            }
            if sought.is_empty() {
                break;
            }
            if let Some(events) = asking.events
                && events.send(Event::Comparing(now)).await.is_err()
            {
                return Err(NetError::new(NetErrorKind::Local, "the client has disconnected"));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(EVERY);
        }
        Ok(lying)
    }

    /// What the target says of these files; none when it refuses: it will say the same when it is asked for room.
    async fn bases_there(
        &self,
        peer: &str,
        pool: Option<&str>,
        images: Vec<SoughtBase>,
    ) -> Result<Option<Vec<BaseThere>>, NetError> {
        let count = images.len();
        let request = Request::Bases { pool: pool.map(str::to_owned), images };
        match self.ask(peer, &request).await {
            Ok(Reply::Bases { images }) if images.len() == count => Ok(Some(images)),
            Ok(_) => {
                let why = "the peer's answer does not fit the question";
                Err(NetError::new(NetErrorKind::Protocol, why))
            }
            Err(NetError { kind: NetErrorKind::Refused(_), .. }) => Ok(None),
            Err(why) => Err(why),
        }
    }

    /// Takes the target's answers in and looks how far the same files are here; what is decided is no
    /// longer sought. Returns how far both are.
    fn take_in(
        &self,
        sought: &mut Vec<Sought>,
        states: Vec<BaseThere>,
        lying: &mut [FileAtTarget],
    ) -> SeedProgress {
        let mut progress = SeedProgress::default();
        let mut add = |done: u64, total: u64| {
            progress.bytes_done = progress.bytes_done.saturating_add(done);
            progress.bytes_total = progress.bytes_total.saturating_add(total);
        };
        let mut states = states.into_iter();
        sought.retain_mut(|sought| {
            let len = sought.base.len;
            let decided = match states.next().unwrap_or(BaseThere::Absent) {
                BaseThere::Absent => Some(FileAtTarget::Nothing),
                BaseThere::Other { why } => Some(FileAtTarget::Other(why)),
                // It can only know it from here.
                BaseThere::Same => sought.base.digest.map(FileAtTarget::Same),
                BaseThere::Reading { done, .. } => {
                    add(done.min(len), len);
                    self.read_here(sought, &mut add)
                }
                BaseThere::Read => {
                    add(len, len);
                    self.read_here(sought, &mut add)
                }
            };
            if let Some(decided) = decided {
                lying[sought.nth] = decided;
                return false;
            }
            true
        });
        progress
    }

    /// Works out the digest here, now that it is of use.
    fn read_here(
        &self,
        sought: &mut Sought,
        add: &mut impl FnMut(u64, u64),
    ) -> Option<FileAtTarget> {
        match self.digests.ask(&sought.path) {
            Reading::Running { done, total } => add(done, total),
            Reading::Ready(stamp, digest) => {
                add(stamp.len, stamp.len);
                sought.base.digest = Some(digest);
            }
            Reading::Failed(why) => {
                let shown = sought.path.display();
                let why = format!("{shown} cannot be compared: {why}; try again");
                return Some(FileAtTarget::Other(why));
            }
        }
        None
    }
}

/// The images that many disks may be built on: what is below a disk's active image, and images that
/// nobody may write.
fn sought(intent: &SourceIntent, plan: &Plan) -> Vec<Sought> {
    let images = intent.images.iter().enumerate();
    let bases = images.filter(|(nth, image)| {
        // How a device looks does not tell whether it was written.
        let file = image.path.is_file();
        file && image.offer.read_only && image.chain.is_empty() && !plan.is_active(*nth)
    });
    let sought = |(nth, image): (usize, &dray_host::folder::intent::SourceImage)| Sought {
        nth,
        path: image.path.clone(),
        base: SoughtBase { name: image.offer.name.clone(), len: image.offer.len, digest: None },
    };
    bases.map(sought).collect()
}

/// Another file has the name of a base image at the target.
fn in_the_way(what: &str, why: &str) -> Refusal {
    match why.split_once("; ") {
        Some((why, hint)) => Refusal::new(ErrorKind::Conflict, what, why).hint(hint),
        None => Refusal::new(ErrorKind::Conflict, what, why),
    }
}
