//! What the engine's planner is told: the images' heat and data, the link, the guest's memory; and
//! how long a migration under way still takes.

use crate::api::{LinkFrom, Phase, Predicted};
use crate::heat::ImageHeat;
use crate::net::NetError;
use dray_engine::plan::Load;
use dray_image::{Image, runs};
use dray_types::{BitRate, BlockRange, BlockSet, ImageIndex};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

/// Bytes a second that a link is taken to carry when no limit was given and nothing was ever sent
/// over it: 1 Gbit/s.
pub const USUAL_LINK: f64 = 125e6;
/// A target that takes longer to answer is told of later, by who needs it.
const ANSWER: Duration = Duration::from_secs(2);

/// What was measured of the guest and the way to the target before anything is sent.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Way {
    /// Round trip in seconds.
    pub rtt: f64,
    /// Bytes of guest memory to move.
    pub memory: u64,
    /// Bytes of it that the guest writes in a second.
    pub memory_dirty: u64,
    /// Bytes a second that the link has carried last.
    pub link: Option<u64>,
}

impl Way {
    /// Measures the round trip to a target, in seconds: the time that a connection takes.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn round_trip(address: &str) -> Result<f64, NetError> {
        let broken = |why: String| NetError::new(crate::net::NetErrorKind::Broken, why);
        let began = Instant::now();
        let connected = tokio::time::timeout(ANSWER, TcpStream::connect(address)).await;
        connected
            .map_err(|_| broken(format!("it has not answered in {} s", ANSWER.as_secs())))?
            .map_err(|why| broken(why.to_string()))?;
        Ok(began.elapsed().as_secs_f64())
    }

    /// Bytes a second to reckon with, and where they are from.
    pub fn link(&self, limit: Option<BitRate>) -> (f64, LinkFrom) {
        let limit = limit.map(|limit| limit.bytes_per_second as f64);
        match (limit, self.link.map(|link| link as f64)) {
            (Some(limit), Some(link)) if link < limit => (link, LinkFrom::Measured),
            (Some(limit), _) => (limit, LinkFrom::Limit),
            (None, Some(link)) => (link, LinkFrom::Measured),
            (None, None) => (USUAL_LINK, LinkFrom::Assumed),
        }
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
}

/// What of each image holds data. Looks for the images' holes, which takes a moment.
pub fn data(images: &[Moved]) -> Vec<BlockSet> {
    let data = |image: &Moved| {
        let whole = BlockRange::whole(image.len);
        // An image whose holes cannot be seen is data all over.
        runs::data_blocks(image.image, whole).unwrap_or_else(|_| [whole].into_iter().collect())
    };
    images.iter().map(data).collect()
}

/// Everything together; `data` names what of each image holds some.
pub fn load(images: &[Moved], data: &[BlockSet], way: &Way, limit: Option<BitRate>) -> Load {
    let mut chunks = Vec::new();
    for (ix, (image, data)) in images.iter().zip(data).enumerate() {
        let unused = ImageHeat::new(image.len);
        chunks.extend(image.heat.unwrap_or(&unused).chunks(ImageIndex(ix as u16), data));
    }
    Load {
        chunks,
        images: images.len(),
        link: way.link(limit).0,
        rtt: way.rtt,
        memory: way.memory as f64,
        memory_dirty: way.memory_dirty as f64,
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

impl Now {
    /// Seconds to the end, by what is sent now, and whether the guest's memory gets there; none when
    /// nothing is sent or it never ends. `predicted` knows what follows after the handover.
    pub fn seconds_left(&self, predicted: Option<&Predicted>) -> Option<f64> {
        // Verification sends next to nothing: the rate says nothing about its end.
        if self.rate == 0 || self.phase >= Phase::Release {
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
    fn a_limit_goes_before_a_measured_rate_unless_the_link_is_slower() {
        let known = Way { link: Some(1000), ..Way::default() };
        assert_eq!(known.link(None), (1000.0, LinkFrom::Measured));
        assert_eq!(known.link(limit(500)), (500.0, LinkFrom::Limit));
        assert_eq!(known.link(limit(5000)), (1000.0, LinkFrom::Measured));
        assert_eq!(Way::default().link(limit(5000)), (5000.0, LinkFrom::Limit));
        assert_eq!(Way::default().link(None), (USUAL_LINK, LinkFrom::Assumed));
    }

    #[test]
    fn what_is_left_is_blocks_memory_and_what_follows() {
        let copy =
            Now { phase: Phase::Copy, left: 1000, rate: 100, memory_left: 500, memory_dirty: 50 };
        assert_eq!(copy.seconds_left(None), Some(20.0));
        let after = Predicted {
            total_seconds: 12.0,
            handover_seconds: 10.0,
            link: 200,
            ..Predicted::default()
        };
        assert_eq!(copy.seconds_left(Some(&after)), Some(24.0), "at half the rate, twice as long");
        let backfill = Now { phase: Phase::Backfill, ..copy };
        assert_eq!(backfill.seconds_left(Some(&after)), Some(10.0));
        let hopeless = Now { memory_dirty: 100, ..copy };
        assert!(!hopeless.converges() && hopeless.seconds_left(None).is_none());
        assert_eq!(Now { memory_left: 0, ..hopeless }.seconds_left(None), Some(10.0));
        assert_eq!(Now { rate: 0, ..copy }.seconds_left(None), None);
        assert_eq!(Now { phase: Phase::Release, ..copy }.seconds_left(None), None);
    }
}
