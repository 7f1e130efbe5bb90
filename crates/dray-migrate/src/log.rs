//! A migration's steps in the log of its host, in words.

use crate::shown::shown_phase;
use crate::slots::Board;
use dray_engine::Phase;
use dray_engine::receiver::TargetNotice;
use dray_engine::source::SourceNotice;
use dray_types::ByteSize;
use std::fmt::Display;

/// A step, as the log names it.
pub(crate) struct Step {
    text: String,
    /// Somebody should look.
    is_trouble: bool,
}

impl Step {
    fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_trouble: false }
    }

    fn trouble(what: &str, why: impl Display) -> Self {
        Self { text: format!("{what}: {why}"), is_trouble: true }
    }

    /// Writes it to the log, after what the migration on this board moves.
    pub(crate) fn log(&self, board: &Board) {
        let (migration, title, text) = (board.migration, board.title(), &self.text);
        if self.is_trouble {
            tracing::warn!(%migration, "{title}: {text}");
        } else {
            tracing::info!(%migration, "{title}: {text}");
        }
    }
}

impl From<Phase> for Step {
    fn from(phase: Phase) -> Self {
        Self::new(format!("{} began", shown_phase(phase)))
    }
}

impl From<&SourceNotice> for Step {
    fn from(notice: &SourceNotice) -> Self {
        match notice {
            SourceNotice::Phase(phase) => (*phase).into(),
            SourceNotice::Ready => Self::new("ready for the handover"),
            SourceNotice::HandoverFailed { why } => Self::trouble("handover failed", why),
            SourceNotice::HandedOver => Self::new("handed over, the target owns the images"),
            SourceNotice::TargetServing => Self::new("the target serves the images"),
            SourceNotice::Verified { blocks, different: 0 } => {
                Self::new(format!("the target compared {blocks} blocks, none differs"))
            }
            SourceNotice::Verified { blocks, different } => Self::trouble(
                "verification failed",
                format!("{different} of {blocks} blocks differ"),
            ),
            SourceNotice::TakenBack => {
                Self::new("the images are back, the guest may continue on this host")
            }
            SourceNotice::Done => Self::new("the target has all blocks"),
            SourceNotice::Abandoned { why: None } => Self::new("it ended before the handover"),
            SourceNotice::Abandoned { why: Some(why) } => {
                Self::trouble("it ended before the handover", why.in_words())
            }
            SourceNotice::Refused { why } => Self::trouble("refused", why),
            SourceNotice::Broken { why } => Self::trouble("the target contradicts itself", why),
        }
    }
}

impl From<&TargetNotice> for Step {
    fn from(notice: &TargetNotice) -> Self {
        match notice {
            TargetNotice::Phase(phase) => (*phase).into(),
            TargetNotice::Serving => Self::new("this host owns and serves the images"),
            TargetNotice::GuestRunning => Self::new("the guest runs on this host"),
            TargetNotice::GuestFailed { why } => Self::trouble("cannot start the guest", why),
            TargetNotice::HandedBack { why } => Self::trouble("handed the images back", why),
            TargetNotice::Unreadable { image, range, why } => {
                let (image, bytes) = (image.0, ByteSize(range.byte_len()));
                let at = range.byte_offset();
                Self::trouble(&format!("cannot fetch {bytes} at byte {at} of image {image}"), why)
            }
            TargetNotice::Failed { why } => Self::trouble("it failed before the handover", why),
            TargetNotice::Abandoned { discarded: true } => {
                Self::new("the source ended it, what this host had received is removed")
            }
            TargetNotice::Abandoned { discarded: false } => {
                Self::new("the source ended it, what this host has received stays for the next try")
            }
            TargetNotice::Complete => Self::new("all blocks are on this host"),
            TargetNotice::Refused { why } => Self::trouble("refused", why),
        }
    }
}
