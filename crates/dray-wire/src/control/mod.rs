//! Messages on the control stream of a migration.
//!
//! Each is an [`Envelope`]: the sender's epoch and current attempt, then the message. On the wire a
//! message is a little-endian length and its postcard encoding ([`encode`], [`decode`]).

mod coding;
#[cfg(test)]
mod tests;

pub use coding::{Bounded, KIND_LEN, check_kind, decode, decode_len, encode};
use dray_types::list;
use dray_types::refusal::de_refusal;
use dray_types::{
    Attempt, BlockRange, BlockSet, Epoch, ImageId, ImageIndex, MigrationId, Refusal, Why, text,
};
use serde::{Deserialize, Serialize};

/// Longest control message: the missing map of 8 TiB of scattered blocks, with room to spare.
pub const MAX_CONTROL: u32 = 256 << 20;
/// Longest message of a kind that holds no sets of blocks: twice the longest peek.
pub const MAX_SHORT: u32 = 4 << 20;
/// Most parts that all sets of a message have together: images of 128 TiB of which every leaf has something in
/// it, twice what a migration may have. A part that takes five bytes here takes a hundred in memory.
pub const MAX_PARTS: u64 = 1 << 20;
/// Most images one migration may have.
pub const MAX_IMAGES: usize = 256;
/// Most tags one acknowledgement may name.
pub const MAX_TAGS: usize = 65_536;
/// Most ranges an order of Backfill may have: half a megabyte, and 256 GiB in the smallest chunks.
pub const MAX_ORDER: usize = 65_536;
/// Feature word: the target tells content by its hash: it understands described runs
/// (`FrameKind::Described`) and what belongs to them, before and after the handover. A target whose operator
/// does not want that does not agree to it.
pub const FEATURE_REUSE: &str = "reuse";
/// Longest peek, in bytes: what a QEMU that opens a disk before handover reads.
pub const MAX_PEEK: u32 = 2 << 20;

/// Identifies the missing map of a handover: the first 16 bytes of a hash of its encoding.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MapHash(pub [u8; 16]);

impl MapHash {
    /// The hash of the handover's images: xxh3-128 over each length and encoded missing map.
    pub fn of(images: &[ImageHandover]) -> Self {
        let mut hasher = xxhash_rust::xxh3::Xxh3::new();
        for image in images {
            let missing = image.missing.encode();
            hasher.update(&image.len.to_le_bytes());
            hasher.update(&(missing.len() as u64).to_le_bytes());
            hasher.update(&missing);
        }
        Self(hasher.digest128().to_le_bytes())
    }
}

/// A message with the sender's epoch and attempt (I1).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Envelope<T> {
    /// The ownership epoch the sender knows of.
    pub epoch: Epoch,
    /// The sender's current attempt.
    pub attempt: Attempt,
    /// The message.
    pub body: T,
}

/// One image of the migration as the source describes it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ImageOffer {
    /// The image's id, the same on every host.
    pub id: ImageId,
    /// Its name at the target, under which it was prepared.
    #[serde(deserialize_with = "text::de_text")]
    pub name: String,
    /// Exported length in bytes.
    pub len: u64,
    /// A backing image: it is moved but never written.
    pub read_only: bool,
}

/// The outcome of an attempt that went past the point of no return.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HandedOver {
    /// The epoch that the target owns.
    pub epoch: Epoch,
    /// The attempt that succeeded.
    pub attempt: Attempt,
    /// The missing map that was agreed.
    pub map_hash: MapHash,
}

/// First message of every session: what is being moved and how far the source is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Open {
    /// The migration.
    pub migration: MigrationId,
    /// Its images; their order defines [`ImageIndex`].
    #[serde(deserialize_with = "list::at_most::<_, _, MAX_IMAGES>")]
    pub images: Vec<ImageOffer>,
    /// Set once the source has handed over. While it is not, every attempt that the target may
    /// have prepared is void.
    pub handed_over: Option<HandedOver>,
}

/// One image's part of a handover.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ImageHandover {
    /// Length of the source's file in bytes: the length the target's file will have.
    pub len: u64,
    /// Blocks that the target must still fetch.
    pub missing: BlockSet,
}

impl list::HasSet for ImageHandover {
    fn set(&self) -> &BlockSet {
        &self.missing
    }
}

/// Source to target.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ToTarget {
    /// See [`Open`].
    Open(Open),
    /// Handover: make everything received durable, record this, and answer `Prepared`.
    Prepare {
        /// Per image, in order.
        #[serde(deserialize_with = "list::of_sets::<_, _, MAX_IMAGES, MAX_PARTS>")]
        images: Vec<ImageHandover>,
        /// Hash of `images`.
        map_hash: MapHash,
    },
    /// The source has handed over: serve.
    Commit(HandedOver),
    /// The attempt named in the envelope is void; go on receiving.
    Void,
    /// The migration is over without a handover.
    Abandon {
        /// Remove what was received instead of keeping it for a next try.
        discard: bool,
    },
    /// The blocks of a fetch cannot be read at the source.
    Unreadable {
        /// Tag of the fetch.
        tag: u64,
        /// What the source's disk said.
        #[serde(deserialize_with = "text::de_text")]
        why: String,
    },
    /// Answer to a peek; no data when it failed.
    Peeked {
        /// Tag of the peek.
        tag: u64,
        /// The bytes, or why there are none.
        data: Result<Vec<u8>, Why>,
    },
    /// Answer to `Hash`: one BLAKE3 hash (first 16 bytes) per range asked for.
    Hashed {
        /// Tag of the question.
        tag: u64,
        /// The hashes in order.
        #[serde(deserialize_with = "list::at_most::<_, _, MAX_TAGS>")]
        hashes: Vec<[u8; 16]>,
    },
    /// Part of the VM's own migration (QEMU at the target), opaque to the engine.
    Vm(Vec<u8>),
    /// Nothing; shows that the link lives.
    Ping,
    /// In which order Backfill should fetch the blocks of an image; those it does not name follow
    /// in address order. A hint: ranges outside the image and repetitions mean nothing. Replaces
    /// the order named before.
    Order {
        /// The image, by its place in `Open`.
        image: ImageIndex,
        /// The ranges, first to be fetched first; at most [`MAX_ORDER`].
        #[serde(deserialize_with = "list::at_most::<_, _, MAX_ORDER>")]
        ranges: Vec<BlockRange>,
    },
    /// Comes right before `Prepare`: if that handover succeeds, Backfill fetches only what guests
    /// wait for until the operator starts it.
    Defer,
    /// In this session Backfill may ask for hashes (`ToSource::Describe`). Replaces what was said
    /// before.
    Describes {
        /// Other migrations go to the same target: what they have in common with this one may arrive
        /// there any moment.
        together: bool,
        /// What the link carried in earlier migrations, in bytes a second; zero when nobody knows.
        link_rate: u64,
        /// Images that the target's files held an older version of when the migration began, as far
        /// as the source remembers.
        #[serde(deserialize_with = "list::at_most::<_, _, MAX_IMAGES>")]
        in_place: Vec<ImageIndex>,
    },
    /// What it costs the source's disk that a run does not follow the one read before, as far as the
    /// source has measured. A hint for Backfill. Replaces what was said before.
    Jumps {
        /// Nanoseconds.
        nanos: u64,
    },
}

impl ToTarget {
    /// Whether it may be sent only where both sides have agreed on [`FEATURE_REUSE`].
    pub fn is_reuse(&self) -> bool {
        matches!(self, Self::Describes { .. })
    }
}

/// How far the target is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum TargetState {
    /// Before handover.
    Receiving,
    /// It has promised to serve, and waits to hear whether it shall.
    Prepared {
        /// The attempt it prepared.
        attempt: Attempt,
        /// The map it prepared with.
        map_hash: MapHash,
    },
    /// It owns the images; blocks may be missing.
    Owner,
    /// It owns the images and has every block.
    Complete,
    /// It was given the images and durably gave them back without serving.
    Fenced,
}

/// What the target has of an image.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TargetImage {
    /// Blocks received so far.
    pub have: BlockSet,
    /// What was never received reads as zeros (a new sparse file, not a used block device).
    pub zeroed: bool,
}

impl list::HasSet for TargetImage {
    fn set(&self) -> &BlockSet {
        &self.have
    }
}

/// Target to source.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ToSource {
    /// Answer to `Open`.
    Opened {
        /// How far the target is.
        state: TargetState,
        /// Per image, in the order of the offer; empty after handover.
        #[serde(deserialize_with = "list::of_sets::<_, _, MAX_IMAGES, MAX_PARTS>")]
        images: Vec<TargetImage>,
    },
    /// The migration cannot go on at the target; said once, then the link is closed.
    Failed(#[serde(deserialize_with = "de_refusal")] Refusal),
    /// Runs that arrived whole and were written.
    Received {
        /// Tags of their frames.
        #[serde(deserialize_with = "list::at_most::<_, _, MAX_TAGS>")]
        tags: Vec<u64>,
    },
    /// A run that did not match its hash; send it again.
    Mismatch {
        /// Tag of its frame.
        tag: u64,
    },
    /// The attempt is prepared, durably.
    Prepared {
        /// The map it was prepared with.
        map_hash: MapHash,
    },
    /// The target owns the images and can serve.
    Serving,
    /// A missing block is wanted; it comes as a frame with this tag.
    Fetch {
        /// Chosen by the target.
        tag: u64,
        /// The image, by its place in `Open`.
        image: ImageIndex,
        /// Which blocks, at most one run.
        range: BlockRange,
        /// A guest waits for it.
        urgent: bool,
    },
    /// Bytes that QEMU reads while it opens the disk before handover.
    Peek {
        /// Chosen by the target.
        tag: u64,
        /// The image, by its place in `Open`.
        image: ImageIndex,
        /// First byte.
        offset: u64,
        /// Number of bytes, at most [`MAX_PEEK`].
        len: u32,
    },
    /// Asks for hashes of the source's content as of handover.
    Hash {
        /// Chosen by the target.
        tag: u64,
        /// The image, by its place in `Open`.
        image: ImageIndex,
        /// Ranges, each at most one run.
        #[serde(deserialize_with = "list::at_most::<_, _, MAX_TAGS>")]
        ranges: Vec<BlockRange>,
    },
    /// Every block is durable at the target; the source is no longer needed.
    Complete,
    /// Verification at the target is over.
    Verified {
        /// Blocks re-read and compared.
        blocks: u64,
        /// Blocks that differed.
        different: u64,
    },
    /// Hand-back: the target has durably recorded that it never served and never will.
    HandBack,
    /// Part of the VM's own migration, opaque to the engine.
    Vm(Vec<u8>),
    /// Nothing; shows that the link lives.
    Ping,
    /// A guest waits for a block that was asked for without hurry: the answer goes before bulk if
    /// no stream has begun it.
    Hurry {
        /// Tag of the fetch.
        tag: u64,
    },
    /// Of a described run these pieces are not here, or not as described: send them as data. The
    /// others were written; this is their acknowledgement.
    Lack {
        /// Tag of the description.
        tag: u64,
        /// Bit `i` set: piece `i` of the run is wanted. Bits past its end mean nothing.
        pieces: u16,
    },
    /// As `Lack`, with pieces that the target may have most blocks of: describe these by their
    /// blocks, or send them as data.
    Near {
        /// Tag of the description.
        tag: u64,
        /// The pieces that lack, as in `Lack`.
        pieces: u16,
        /// Those of them whose blocks may be here.
        near: u16,
    },
    /// Of described blocks these are not here: send them as data. The others were written; they are
    /// acknowledged together with what comes.
    LackBlocks {
        /// Tag of the description.
        tag: u64,
        /// Bit `i` set: block `i` of the run is wanted. Bits past its end mean nothing.
        blocks: [u64; 4],
    },
    /// Of a missing run only the hashes are wanted for now: it comes as a described run with this
    /// tag, or as described blocks. Only after `Describes`.
    Describe {
        /// Chosen by the target, as that of a fetch.
        tag: u64,
        /// The image, by its place in `Open`.
        image: ImageIndex,
        /// Whole pieces, at most one run.
        range: BlockRange,
        /// The hash of each block, not of each piece.
        blocks: bool,
    },
}

impl ToSource {
    /// Whether it may be sent only where both sides have agreed on [`FEATURE_REUSE`].
    pub fn is_reuse(&self) -> bool {
        matches!(self, Self::Near { .. } | Self::LackBlocks { .. } | Self::Describe { .. })
    }
}
