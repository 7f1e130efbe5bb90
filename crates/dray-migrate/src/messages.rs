//! The messages between the loops of both sides that do not concern the engine: the move of the VM
//! itself, and values for the summary. They travel inside the control stream's `Vm` messages.

use crate::lines::{Closed, MAX_BYTES, MAX_GENERATIONS};
use dray_host::folder::intent::{GuestFacts, Settings};
use dray_net::NetTotals;
use dray_types::list;
use dray_types::{Attempt, Why, text};
use dray_wire::control::{MAX_IMAGES, MAX_PARTS};
use serde::{Deserialize, Serialize};

/// Source to target.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ToTargetShell {
    /// Sent at the start of every session before handover.
    Settings(Settings),
    /// Is the waiting QEMU there, and does it fit? Answered with `Checked`.
    Check(GuestFacts),
    /// Make it listen for the guest's memory. Answered with `Listening`.
    Listen,
    /// The VM's migration failed: the waiting QEMU is of no use any more.
    Forget,
    /// The source has heard everything; the target may forget the migration.
    Bye,
    /// The source has recorded that the target has everything: say `Finished` when that is so, or
    /// once more.
    Done,
    /// Which blocks move when, for those who watch at the target.
    Strategy(dray_types::Strategy),
    /// Right before the engine's `Prepare` of the same attempt: the closed generations of each image
    /// that the target will own then, the one that this handover closes last. None of an image that
    /// nobody writes.
    Lines {
        /// The attempt.
        attempt: Attempt,
        /// Of each image oldest first.
        #[serde(deserialize_with = "list::of_sets::<_, _, MAX_GENERATIONS, MAX_PARTS>")]
        closed: Vec<Closed>,
    },
    /// Whether the guest is to run at the target: somebody has paused it, or let it go on, since `Check`.
    /// Answered with `Noted`.
    Runs(bool),
    /// Once a second until the target has everything: how far it is, for those who watch there.
    Progress {
        /// Per image: bytes that are sent, and that have to be.
        #[serde(deserialize_with = "list::at_most::<_, _, MAX_IMAGES>")]
        images: Vec<(u64, u64)>,
        /// Sent in the last second, in bytes.
        rate: u64,
        /// Predicted seconds to the end.
        seconds_left: Option<u64>,
    },
}

/// What becomes of the qcow2 that the target makes of an image.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Made {
    /// It is being written.
    Copied {
        /// Bytes that are in it.
        done: u64,
        /// Bytes that have to be.
        total: u64,
    },
    /// The disk is on it.
    Done {
        /// Its file's name.
        #[serde(deserialize_with = "text::de_text")]
        name: String,
    },
    /// There is none: the disk stays raw.
    Raw {
        /// Why the image stays raw.
        #[serde(deserialize_with = "text::de_text")]
        why: String,
    },
}

/// What a target that was asked to give the disks to QEMU has not done.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NotReleased {
    /// Why QEMU does not have the disks back.
    #[serde(deserialize_with = "text::de_text")]
    pub why: String,
    /// The guest's QEMU has ended, and the guest with it.
    pub qemu_ended: bool,
}

/// Target to source.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ToSourceShell {
    /// Answer to `Check`.
    Checked(Result<(), Why>),
    /// Answer to `Listen`.
    Listening(Result<(), Why>),
    /// The guest runs at the target.
    GuestRunning,
    /// It was to be started and was not.
    GuestFailed(#[serde(deserialize_with = "text::de_text")] String),
    /// The disks were handed back to QEMU, or not all of them.
    Released(Result<(), NotReleased>),
    /// Once a second during Backfill, and at its end.
    Progress {
        /// Per image: blocks missing.
        #[serde(deserialize_with = "list::at_most::<_, _, MAX_IMAGES>")]
        missing: Vec<u64>,
        /// Reads that waited for a missing block.
        remote_reads: u64,
        /// The target's counters.
        net: NetTotals,
    },
    /// The target's part is over; nothing follows.
    Finished,
    /// Whether Backfill waits for the target's operator.
    Paused(bool),
    /// The target's operator wants this limit, in bytes a second.
    Bandwidth(Option<u64>),
    /// Of an image of which a qcow2 is made. Only a source hears it that has asked for one.
    Qcow2 {
        /// Its number in the migration.
        image: u16,
        /// What became of it.
        made: Made,
    },
    /// Per image: so many more missing blocks were found at the target, and not fetched. What is lost
    /// with a link is not told again.
    Found(#[serde(deserialize_with = "list::at_most::<_, _, MAX_IMAGES>")] Vec<u64>),
    /// Answer to `Runs`.
    Noted(Result<(), Why>),
    /// The guest is not started yet: its QEMU does not answer, and is asked again. Said at each try, until
    /// `GuestRunning` or `GuestFailed`.
    GuestWaits(#[serde(deserialize_with = "text::de_text")] String),
}

/// Encodes a shell message.
pub fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    postcard::to_allocvec(message).unwrap_or_default()
}

/// Longest shell message, but for one kind: the disks of a VM take a thousand bytes or so each.
const MAX_OTHER: usize = 1 << 20;

/// What bounds the length of a shell message (I7).
pub trait Bounded {
    /// The number of the kind that may be longer than a short control message, if there is one.
    const LONG: Option<u8>;
}

impl Bounded for ToTargetShell {
    /// `Lines`.
    const LONG: Option<u8> = Some(7);
}

impl Bounded for ToSourceShell {
    const LONG: Option<u8> = None;
}

/// Decodes a shell message; none when it is not one (a newer peer's), or too long.
pub fn decode<T: for<'a> Deserialize<'a> + Bounded>(bytes: &[u8]) -> Option<T> {
    let kind = *bytes.first()?;
    let most = if T::LONG == Some(kind) { MAX_BYTES + MAX_OTHER } else { MAX_OTHER };
    postcard::from_bytes(bytes).ok().filter(|_| bytes.len() <= most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_types::Strategy;

    /// A peer's message of some bytes must not take a multiple of them before it is refused.
    #[test]
    fn a_list_that_is_too_long_is_no_message() {
        let lines = |count| {
            let mut bytes =
                encode(&ToTargetShell::Lines { attempt: Attempt(1), closed: Vec::new() });
            assert_eq!(bytes[0], ToTargetShell::LONG.unwrap());
            bytes.pop();
            bytes.extend(postcard::to_allocvec(&vec![0u8; count]).unwrap());
            decode::<ToTargetShell>(&bytes)
        };
        assert!(lines(0).is_some() && lines(100 << 20).is_none());
        let progress = |count| {
            let images = vec![(1, 2); count];
            let message = ToTargetShell::Progress { images, rate: 1, seconds_left: None };
            decode::<ToTargetShell>(&encode(&message))
        };
        assert!(progress(MAX_IMAGES).is_some() && progress(MAX_IMAGES + 1).is_none());
        let found = |count| decode::<ToSourceShell>(&encode(&ToSourceShell::Found(vec![1; count])));
        assert!(found(MAX_IMAGES).is_some() && found(MAX_IMAGES + 1).is_none());
        let mut padded = encode(&ToTargetShell::Strategy(Strategy::Hybrid));
        padded.resize(MAX_OTHER + 1, 0);
        assert!(
            decode::<ToTargetShell>(&padded).is_none() && decode::<ToTargetShell>(&[]).is_none()
        );
    }
}
