//! What the engine's planner is told: the images' heat and data, the link, the guest's memory.

use crate::heat::ImageHeat;
use crate::net::NetError;
use dray_engine::plan::Load;
use dray_image::{FileImage, runs};
use dray_types::{BlockRange, BlockSet, ImageIndex};
use serde::{Deserialize, Serialize};
use std::time::Instant;
use tokio::net::TcpStream;

/// Bytes a second that a link is taken to carry when no limit was given: 1 Gbit/s. Nothing has been
/// sent over it yet that would tell.
pub const USUAL_LINK: f64 = 125e6;

/// What was measured of the way to the target before anything is sent.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Way {
    /// Round trip in seconds.
    pub rtt: f64,
    /// Bytes of guest memory to move.
    pub memory: u64,
}

impl Way {
    /// Measures the round trip to a target: the time that a connection takes.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn measure(address: &str, memory: u64) -> Result<Self, NetError> {
        let began = Instant::now();
        let connected = TcpStream::connect(address).await;
        connected
            .map_err(|why| NetError::new(crate::net::NetErrorKind::Broken, why.to_string()))?;
        Ok(Self { rtt: began.elapsed().as_secs_f64(), memory })
    }
}

/// An image that moves.
pub struct Moved<'a> {
    /// Its file.
    pub file: &'a FileImage,
    /// Its length in bytes.
    pub len: u64,
    /// What is known of its accesses, when a guest uses it here.
    pub heat: Option<&'a ImageHeat>,
}

/// Everything together. Looks for the images' holes, which takes a moment.
pub fn load(images: &[Moved], way: &Way) -> Load {
    let mut chunks = Vec::new();
    for (ix, image) in images.iter().enumerate() {
        let whole = BlockRange::whole(image.len);
        // An image whose holes cannot be seen is data all over.
        let data: BlockSet =
            runs::data_blocks(image.file, whole).unwrap_or_else(|_| [whole].into_iter().collect());
        let unused = ImageHeat::new(image.len);
        chunks.extend(image.heat.unwrap_or(&unused).chunks(ImageIndex(ix as u16), &data));
    }
    Load {
        chunks,
        images: images.len(),
        link: USUAL_LINK,
        rtt: way.rtt,
        memory: way.memory as f64,
        // How fast it is written only QEMU knows, once it moves.
        memory_dirty: 0.0,
    }
}
