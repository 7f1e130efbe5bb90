//! What a claim of an image is, by how the image stands in its migration.

use crate::folder::standing::{Part, Standing};
use crate::record::{CopyState, ImageRecord, NameKind};

/// What is claimed.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Case {
    /// What this host had before the handover.
    Replica,
    /// An image that this host was to serve: it does not know what became of that.
    Promised(Part),
    /// An image that this host was given and has handed back, before anybody changed it.
    HandedBack(Part),
    /// An image that this host serves without having all of it.
    Owned(Part),
    /// A complete image of this host's whose migration cannot be brought back, or waits for its source to
    /// compare.
    Kept,
}

impl Case {
    /// Whether the other host may have writes of its guest that nobody knows of here.
    pub(super) fn may_lose_writes(&self) -> bool {
        matches!(self, Self::Replica | Self::Promised(_) | Self::HandedBack(_))
    }

    /// What was agreed about it at the handover, if this host may lack blocks of it.
    pub(super) fn part(&self) -> Option<&Part> {
        match self {
            Self::Replica | Self::Kept => None,
            Self::Promised(part) | Self::HandedBack(part) | Self::Owned(part) => Some(part),
        }
    }
}

/// Why an image cannot be claimed here, and what to do instead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NoCase {
    pub(super) why: &'static str,
    pub(super) hint: &'static str,
}

/// Nobody else has it.
pub(super) const OWNED: NoCase = NoCase {
    why: "this host owns it already",
    hint: "`dray images` shows the images of this host",
};
const JOURNAL_LOST: NoCase = NoCase {
    why: "this host serves it, and the migration's journal is lost, which says which blocks this \
          host has",
    hint: "put target.journal back into the migration's folder; without what was written here, claim \
           it at the source, then `dray cancel` the migration here",
};
const FOLDER_LOST: NoCase = NoCase {
    why: "the folder of its migration is lost, and with it the record of its blocks",
    hint: "put the migration's folder back, or restore a backup",
};
const NEVER_OWNED: NoCase = NoCase {
    why: "this host never owned the image, and its copy is not complete",
    hint: "claim it at the source, or restore a backup",
};
const REMOVED: NoCase =
    NoCase { why: "this host is about to remove it", hint: "claim it at the source" };

/// What a claim of the image would be, or why there can be none. `standing`: in its migration, if that is known.
/// `closed`: it is not served.
pub(super) fn decide(
    standing: Option<Standing>,
    record: &ImageRecord,
    closed: bool,
) -> Result<Case, NoCase> {
    let partial = record.place == NameKind::Partial;
    match (standing, record.state) {
        // It says so when it was served, which the journal must have said before.
        (Some(Standing::Incoming | Standing::Promised(_)), CopyState::Owner) => Err(JOURNAL_LOST),
        (Some(Standing::HandedOver), _) | (Some(Standing::Kept) | None, CopyState::Replica) => {
            Ok(Case::Replica)
        }
        (Some(Standing::Promised(part)), _) => Ok(Case::Promised(part)),
        (Some(Standing::HandedBack(part)), _) => Ok(Case::HandedBack(part)),
        (Some(Standing::Owned(part)), _) => Ok(Case::Owned(part)),
        // Only its name is missing, which its loop would have given it.
        (Some(Standing::Complete(part)), _) if partial => Ok(Case::Owned(part)),
        (Some(Standing::Incoming), _) | (None, CopyState::Incoming) => Err(NEVER_OWNED),
        (Some(Standing::Gone), _) => Err(REMOVED),
        (None, CopyState::Owner) if partial => Err(FOLDER_LOST),
        (Some(Standing::Kept), _) | (None, CopyState::Owner) if closed => Ok(Case::Kept),
        (Some(Standing::Complete(_)), CopyState::Owner) if record.swap.is_none() => Ok(Case::Kept),
        (Some(Standing::Kept | Standing::Complete(_)), _) | (None, CopyState::Owner) => Err(OWNED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_types::ImageId;

    fn decided(
        standing: Option<Standing>,
        state: CopyState,
        place: NameKind,
        closed: bool,
    ) -> Result<Case, NoCase> {
        let owned = ImageRecord::owned("a".into(), ImageId(1), "/pool/a".into(), 4096);
        decide(standing, &ImageRecord { state, place, ..owned }, closed)
    }

    #[test]
    fn only_what_this_host_had_or_was_promised_can_be_claimed() {
        use CopyState::{Incoming, Owner, Replica};
        use NameKind::{Named, Partial};
        let handed_over = || Some(Standing::HandedOver);
        for state in [Owner, Replica] {
            assert_eq!(decided(handed_over(), state, Named, false), Ok(Case::Replica));
        }
        assert_eq!(decided(None, Replica, Named, false), Ok(Case::Replica));
        assert_eq!(decided(Some(Standing::Incoming), Incoming, Partial, false), Err(NEVER_OWNED));
        assert_eq!(decided(None, Incoming, Partial, false), Err(NEVER_OWNED));
        assert_eq!(decided(Some(Standing::Gone), Incoming, Partial, true), Err(REMOVED));
    }

    #[test]
    fn without_its_records_an_image_that_is_served_here_is_not_claimed() {
        use CopyState::Owner;
        use NameKind::{Named, Partial};
        assert_eq!(decided(Some(Standing::Incoming), Owner, Partial, true), Err(JOURNAL_LOST));
        assert_eq!(decided(None, Owner, Partial, true), Err(FOLDER_LOST));
        assert_eq!(decided(None, Owner, Named, true), Ok(Case::Kept));
        assert_eq!(decided(None, Owner, Named, false), Err(OWNED));
        assert_eq!(decided(Some(Standing::Kept), Owner, Named, true), Ok(Case::Kept));
        assert_eq!(decided(Some(Standing::Kept), Owner, Named, false), Err(OWNED));
    }
}
