//! A generation of an image: its place and its id.

use super::text;
use dray_types::{Ancestor, GenerationId};
use serde::{Deserialize, Serialize};

/// One generation, by its place and its id.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GenerationStatus {
    /// Its place in the image's line.
    pub number: u64,
    /// Its random id.
    #[serde(with = "text::id")]
    pub id: GenerationId,
}

impl From<Ancestor> for GenerationStatus {
    fn from(at: Ancestor) -> Self {
        Self { number: at.number, id: at.id }
    }
}
