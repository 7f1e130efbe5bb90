//! What is durable of an image whose chain was flattened.

use super::{ImageRecord, NameKind};
use crate::stamp::{FileStamp, check_unwritten};
use dray_types::ImageId;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;

/// One image of a chain.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ChainLayer {
    /// The file or block device.
    pub path: PathBuf,
    /// QEMU's driver for what is in it.
    pub format: String,
    /// QEMU's driver for the file.
    pub protocol: String,
    /// How the file looked, of one below the active image: it stays so as long as the disk is flattened. None of a block
    /// device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<FileStamp>,
}

impl ChainLayer {
    /// Refuses a file below the active image that is not as it was.
    ///
    /// # Errors
    /// Which, or what the file system reports.
    pub fn check_unwritten(&self) -> io::Result<()> {
        check_unwritten(&self.path, self.seen.as_ref())
    }
}

/// An exchange of a disk's nodes that is under way: the guest is stopped for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Turn {
    /// The overlay is merged and the disk goes back to its chain; once the chain has its name it may be
    /// there ([`ImageRecord::may_be_home`]). Otherwise it comes from there, and the overlay is still empty.
    pub home: bool,
    /// The guest ran before, and is to run again.
    pub running: bool,
    /// The disk is home: from now on its guest writes to the chain, and the overlay is of the past.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub done: bool,
}

/// What is durable about a flattened image.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FlatRecord {
    /// The chain, the active image first.
    pub layers: Vec<ChainLayer>,
    /// Set while the disk's nodes are exchanged.
    #[serde(default)]
    pub turn: Option<Turn>,
    /// The id in the overlay's name, where the image has another one by now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlay: Option<ImageId>,
}

impl ImageRecord {
    /// Whether its guest may be writing to the chain that was flattened. From the moment at which the chain has
    /// everything and gets its name, until it has lost that again, nothing is written to the overlay: merged once
    /// more it would undo what the guest has written since.
    pub fn may_be_home(&self) -> bool {
        let turn = self.flat.as_ref().and_then(|flat| flat.turn);
        turn.is_some_and(|turn| turn.home && (turn.done || self.place == NameKind::Named))
    }

    /// Whether its guest may be writing to the chain that is being flattened, alone or beside the overlay: until
    /// it is known where its disk is, nobody is let in but by the process that takes it from there.
    pub fn may_be_there_still(&self) -> bool {
        self.flat.as_ref().and_then(|flat| flat.turn).is_some_and(|turn| !turn.home)
    }

    /// Whether only QEMU can say on which side of an exchange its disk is.
    pub fn is_between_places(&self) -> bool {
        self.may_be_home() || self.may_be_there_still()
    }
}
