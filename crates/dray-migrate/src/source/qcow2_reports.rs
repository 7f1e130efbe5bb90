//! The target's reports on the qcow2 files that it makes of images.

use super::report::Report;
use crate::messages::Made;

impl Report {
    /// The target has told how far it is with the qcow2 of an image.
    pub(super) fn qcow2_told(&mut self, image: u16, made: &Made) {
        let intent = self.slot.intent();
        // Of nothing else a qcow2 was asked for.
        let Some(known) = intent.images.get(usize::from(image)).filter(|image| image.qcow2) else {
            return;
        };
        if let Made::Raw { why } = made {
            let (name, peer) = (&known.offer.name, &intent.peer);
            self.slot.board.notice(format!("{name} stays raw at {peer}: {why}"));
        }
        self.qcow2.insert(image, made.clone());
    }

    /// Whether one is being written.
    pub(super) fn is_making(&self) -> bool {
        self.qcow2.values().any(|made| matches!(made, Made::Copied { .. }))
    }

    /// The file name of the qcow2 on which the disk is.
    pub(super) fn qcow2_of(&self, ix: usize) -> Option<String> {
        match self.qcow2.get(&u16::try_from(ix).ok()?)? {
            Made::Done { name } => Some(name.clone()),
            _ => None,
        }
    }

    /// Why the disk of an image of which a qcow2 was asked for is raw.
    pub(super) fn stays_raw(&self, ix: usize) -> Option<String> {
        match self.qcow2.get(&u16::try_from(ix).ok()?)? {
            Made::Raw { why } => Some(why.clone()),
            _ => None,
        }
    }
}
