//! The inputs of the engine's planner (the images' heat and data, the link, the guest's memory),
//! and the remaining time of a running migration.

use dray_api::{LinkFrom, Phase, Predicted};
use dray_engine::plan::Load;
use dray_host::folder::intent::Conditions;
use dray_host::heat::ImageHeat;
use dray_image::{Image, runs};
use dray_net::NetError;
use dray_net::dial::with_default_port;
use dray_types::{BLOCK_SIZE, BitRate, BlockRange, BlockSet, ImageIndex};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

/// Bytes a second that a link is taken to carry when no limit was given and nothing was ever sent
/// over it: 1 Gbit/s.
pub const USUAL_LINK: f64 = 125e6;
/// A target that takes longer to answer is told of later, by who needs it.
const ANSWER: Duration = Duration::from_secs(2);

/// Measures the round trip to a target, in seconds: the time that a connection takes.
///
/// # Errors
/// When it does not answer.
pub async fn round_trip(address: &str) -> Result<f64, NetError> {
    let broken = |why: String| NetError::new(dray_net::NetErrorKind::Broken, why);
    let began = Instant::now();
    let connected =
        tokio::time::timeout(ANSWER, TcpStream::connect(with_default_port(address))).await;
    connected
        .map_err(|_| broken(format!("it has not answered in {} s", ANSWER.as_secs())))?
        .map_err(|why| broken(why.to_string()))?;
    Ok(began.elapsed().as_secs_f64())
}

/// Bytes a second to reckon with, and where they are from.
pub fn link(conditions: &Conditions, limit: Option<BitRate>) -> (f64, LinkFrom) {
    let limit = limit.map(|limit| limit.bytes_per_second as f64);
    match (limit, conditions.link.map(|link| link as f64)) {
        (Some(limit), Some(link)) if link < limit => (link, LinkFrom::Measured),
        (Some(limit), _) => (limit, LinkFrom::Limit),
        (None, Some(link)) => (link, LinkFrom::Measured),
        (None, None) => (USUAL_LINK, LinkFrom::Assumed),
    }
}

/// An image that moves.
pub struct Moved<'a> {
    /// What is in it.
    pub image: &'a dyn Image,
    /// Its length in bytes.
    pub len: u64,
    /// What is known of its accesses, when a guest uses it here.
    pub heat: Option<&'a ImageHeat>,
    /// Blocks that the target has as they are here, if it begins with a replica.
    pub shared: Option<BlockSet>,
}

/// Where an image holds data when its migration begins.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Content {
    /// Blocks with data that the source has to send.
    pub to_send: BlockSet,
    /// Blocks with data that the target has as they are here.
    pub at_target: BlockSet,
}

impl Content {
    fn of(image: &Moved) -> Self {
        let whole = BlockRange::whole(image.len);
        // An image whose holes cannot be seen is data all over.
        let data =
            runs::data_blocks(image.image, whole).unwrap_or_else(|_| [whole].into_iter().collect());
        Self::split(data, image.shared.as_ref())
    }

    /// Of the blocks with data, `shared` names those that the target has.
    fn split(data: BlockSet, shared: Option<&BlockSet>) -> Self {
        let Some(shared) = shared else {
            return Self { to_send: data, at_target: BlockSet::new() };
        };
        let mut to_send = data.clone();
        to_send.subtract(shared);
        let mut at_target = data;
        at_target.subtract(&to_send);
        Self { to_send, at_target }
    }

    /// So many blocks that the target has were written since, nobody knows yet which: for what comes
    /// of it the first ones are as good as any.
    pub fn rewritten(&mut self, mut blocks: u64) {
        let runs: Vec<_> = self.at_target.runs().collect();
        for run in runs {
            let part = BlockRange::new(run.start, run.len.min(blocks));
            self.at_target.remove(part);
            self.to_send.insert(part);
            blocks -= part.len;
        }
    }

    /// Bytes that the source has to send.
    pub fn bytes_to_send(&self) -> u64 {
        self.to_send.len() * BLOCK_SIZE
    }

    /// Bytes that lie at the target.
    pub fn bytes_at_target(&self) -> u64 {
        self.at_target.len() * BLOCK_SIZE
    }
}

/// Where each image holds data. Looks for the images' holes, which takes a moment.
pub fn contents(images: &[Moved]) -> Vec<Content> {
    images.iter().map(Content::of).collect()
}

/// What the source has to do, for `dray plan`, for what a migration is predicted to take, for the order
/// of a batch and for `auto` alike; `contents` names what of each image holds data.
pub fn load(
    images: &[Moved],
    contents: &[Content],
    conditions: &Conditions,
    limit: Option<BitRate>,
) -> Load {
    let (mut chunks, now) = (Vec::new(), Instant::now());
    for (ix, (image, content)) in images.iter().zip(contents).enumerate() {
        let unused = ImageHeat::new(image.len);
        let heat = image.heat.unwrap_or(&unused);
        let image = ImageIndex(ix as u16);
        chunks.extend(heat.chunks(image, &content.to_send, &content.at_target, now));
    }
    Load {
        chunks,
        images: images.len(),
        link: link(conditions, limit).0,
        rtt: conditions.rtt,
        memory: conditions.memory as f64,
        memory_dirty: conditions.memory_dirty as f64,
    }
}

/// How far a migration is.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Its phase.
    pub phase: Phase,
    /// Bytes of blocks that are left of the phase.
    pub left: u64,
    /// Bytes a second that are sent.
    pub rate: u64,
    /// Bytes of guest memory left to send; all of it while none was sent.
    pub memory_left: u64,
    /// Bytes of memory that the guest writes in a second.
    pub memory_dirty: u64,
}

/// Bytes a second. Whoever sends less waits for something else, which may end at any time.
const SLOWEST: u64 = 64 << 10;

impl Now {
    /// Seconds to the end, by what is sent now, and whether the guest's memory gets there; none when
    /// next to nothing is sent or it never ends. `predicted` knows what follows after the handover.
    pub fn seconds_left(&self, predicted: Option<&Predicted>) -> Option<f64> {
        // Verification sends next to nothing: the rate says nothing about its end.
        if self.rate < SLOWEST || self.phase >= Phase::Release {
            return None;
        }
        let rate = self.rate as f64;
        let blocks = self.left as f64 / rate;
        if self.phase >= Phase::Handover {
            return Some(blocks);
        }
        if !self.converges() {
            return None;
        }
        let memory = self.memory_left as f64 / (rate - self.memory_dirty as f64).max(1.0);
        let after = predicted.map_or(0.0, |predicted| {
            let seconds = (predicted.total_seconds - predicted.handover_seconds).max(0.0);
            // It was reckoned with another rate.
            seconds * predicted.link as f64 / rate
        });
        Some(blocks + if self.memory_left == 0 { 0.0 } else { memory } + after)
    }

    /// Whether the guest writes its memory more slowly than it is sent.
    pub fn converges(&self) -> bool {
        self.memory_left == 0 || self.memory_dirty < self.rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(bytes_per_second: u64) -> Option<BitRate> {
        Some(BitRate { bytes_per_second })
    }

    #[test]
    fn what_lies_at_the_target_is_not_sent_and_holes_are_nowhere() {
        let set = |ranges: &[(u64, u64)]| -> BlockSet {
            ranges.iter().map(|&(start, len)| BlockRange::new(start, len)).collect()
        };
        let data = set(&[(0, 10), (100, 20)]);
        let all = Content::split(data.clone(), None);
        assert_eq!((all.bytes_to_send(), all.bytes_at_target()), (30 * BLOCK_SIZE, 0));
        // Everything was the same but blocks 5 to 7 and 110 to 149, half of which are a hole.
        let shared = set(&[(0, 5), (8, 102), (150, 1000)]);
        let some = Content::split(data, Some(&shared));
        assert_eq!(some.to_send, set(&[(5, 3), (110, 10)]));
        assert_eq!(some.at_target, set(&[(0, 5), (8, 2), (100, 10)]));
        let mut more = some.clone();
        more.rewritten(6);
        assert_eq!((more.to_send.len(), more.at_target), (19, set(&[(9, 1), (100, 10)])));
        more = some;
        more.rewritten(1000);
        assert_eq!((more.to_send.len(), more.at_target.len()), (30, 0));
    }

    #[test]
    fn a_limit_goes_before_a_measured_rate_unless_the_link_is_slower() {
        let known = Conditions { link: Some(1000), ..Conditions::default() };
        assert_eq!(link(&known, None), (1000.0, LinkFrom::Measured));
        assert_eq!(link(&known, limit(500)), (500.0, LinkFrom::Limit));
        assert_eq!(link(&known, limit(5000)), (1000.0, LinkFrom::Measured));
        assert_eq!(link(&Conditions::default(), limit(5000)), (5000.0, LinkFrom::Limit));
        assert_eq!(link(&Conditions::default(), None), (USUAL_LINK, LinkFrom::Assumed));
    }

    #[test]
    fn what_is_left_is_blocks_memory_and_what_follows() {
        const MIB: u64 = 1 << 20;
        let (left, rate) = (1000 * MIB, 100 * MIB);
        let (memory_left, memory_dirty) = (500 * MIB, 50 * MIB);
        let copy = Now { phase: Phase::Copy, left, rate, memory_left, memory_dirty };
        assert_eq!(copy.seconds_left(None), Some(20.0));
        let after = Predicted {
            total_seconds: 12.0,
            handover_seconds: 10.0,
            link: 200 * MIB,
            ..Predicted::default()
        };
        assert_eq!(copy.seconds_left(Some(&after)), Some(24.0), "at half the rate, twice as long");
        let backfill = Now { phase: Phase::Backfill, ..copy };
        assert_eq!(backfill.seconds_left(Some(&after)), Some(10.0));
        let hopeless = Now { memory_dirty: rate, ..copy };
        assert!(!hopeless.converges() && hopeless.seconds_left(None).is_none());
        assert_eq!(Now { memory_left: 0, ..hopeless }.seconds_left(None), Some(10.0));
        for waits in [0, SLOWEST - 1] {
            assert_eq!(Now { rate: waits, ..copy }.seconds_left(None), None);
        }
        assert_eq!(Now { phase: Phase::Release, ..copy }.seconds_left(None), None);
    }
}
