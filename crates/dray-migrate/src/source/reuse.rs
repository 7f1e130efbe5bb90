//! Tells the engine which content the target may have, and keeps described content until the target
//! has answered.

use super::SourceLoop;
use dray_engine::{SourceEvent, Tuning};
use dray_host::folder::intent::Options;
use dray_wire::ToSource;

impl SourceLoop {
    /// Whether Copy may describe what it sends, and what is known of the link.
    pub(super) fn with_reuse(&self, tuning: Tuning, options: &Options) -> Tuning {
        let peer = self.slot.intent().peer;
        let link_rate = crate::links::rate(&self.parts.links, &peer).unwrap_or(0);
        let limit = options.bandwidth.map_or(u64::MAX, |limit| limit.bytes_per_second);
        let reuse = self.parts.reuse.is_on() && !options.no_reuse;
        Tuning { reuse, link_rate: link_rate.min(limit), ..tuning }
    }

    /// Before a session is used: whether the target can answer descriptions.
    pub(super) fn say_reuse(&mut self) {
        let known = self.session.as_ref().is_some_and(|session| session.reuses);
        self.together = self.company.is_together();
        self.step(SourceEvent::Reuse { known, together: self.together });
    }

    /// Other migrations to the same target begin and end.
    pub(super) fn watch_company(&mut self) {
        if self.session.is_some() && self.company.is_together() != self.together {
            self.say_reuse();
        }
    }

    /// Content that was described is not kept for longer than the target needs to answer.
    pub(super) fn let_go_of(&self, answer: &ToSource) {
        let Some(session) = &self.session else { return };
        let kept = &session.queue.kept;
        match answer {
            ToSource::Received { tags } if kept.bytes() > 0 => {
                tags.iter().for_each(|&tag| kept.let_go(tag));
            }
            ToSource::Lack { tag, pieces } | ToSource::Near { tag, pieces, .. } => {
                kept.lack(*tag, *pieces);
            }
            ToSource::Mismatch { tag } => kept.let_go(*tag),
            _ => {}
        }
    }
}
