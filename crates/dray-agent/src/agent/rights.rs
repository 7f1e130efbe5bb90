//! Who may ask for what (I7): [`need_of_stream`] and [`need_of_request`] are the table, with every kind of
//! stream and every request, and [`Agent::admit`] is the one place that compares it with the configuration.
//!
//! It decides before the stream is welcomed or the request is looked at any further. What a right lets a peer
//! do in *which* pools is decided where a pool is named.

use super::Agent;
use dray_config::Right;
use dray_host::refusals::{Answer, denied, unknown_peer};
use dray_types::MigrationId;
use dray_wire::StreamKind;
use dray_wire::request::Request;

/// What a peer must have for something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Need {
    /// A right in its `[[peer]]`.
    Right(Right),
    /// One of two. A refusal names the first.
    Either(Right, Right),
    /// To be the other end of this migration. That both hosts know the migration is enough: what is taken
    /// from the peer's `[[peer]]` while it runs does not stop it.
    Move(Option<MigrationId>),
    /// Nothing yet: what the stream carries needs something.
    Later,
}

/// What a peer must have to open a stream.
pub(super) fn need_of_stream(kind: StreamKind, migration: Option<MigrationId>) -> Need {
    match kind {
        StreamKind::Control | StreamKind::Data | StreamKind::Memory => Need::Move(migration),
        StreamKind::Request => Need::Later,
        StreamKind::Store => Need::Right(Right::Store),
        StreamKind::Replica => Need::Right(Right::ReadReplicas),
        StreamKind::Probe => Need::Either(Right::Observe, Right::Receive),
    }
}

/// What a peer must have to ask this.
pub(super) fn need_of_request(request: &Request) -> Need {
    match request {
        // Who may move images here learns of the pools anyway, when it tries.
        Request::Identify => Need::Either(Right::Observe, Right::Receive),
        // Each of these is about images that the peer is about to move to here.
        Request::Prepare { .. }
        | Request::Seed { .. }
        | Request::Survey { .. }
        | Request::Bases { .. } => Need::Right(Right::Receive),
        Request::Holdings { .. } => Need::Right(Right::ReadReplicas),
        Request::Forget { migration }
        | Request::Fate { migration, .. }
        | Request::Waits { migration, .. } => Need::Move(Some(*migration)),
    }
}

impl Agent {
    /// Whether the peer has what it needs.
    ///
    /// # Errors
    /// `Denied`, with the right that it lacks and the line that gives it the right.
    pub(super) fn admit(&self, peer: &str, need: Need) -> Answer<()> {
        // Also one with a migration: who is not in the configuration any more gets nothing.
        let known = self.config.peer(peer).ok_or_else(unknown_peer)?;
        match need {
            Need::Later => Ok(()),
            Need::Move(migration) => match migration.and_then(|id| self.other_end(id)) {
                Some(other) if !other.eq_ignore_ascii_case(peer) => {
                    Err(denied("the migration belongs to another peer"))
                }
                // What is not known here is answered as such.
                _ => Ok(()),
            },
            Need::Either(_, other) if known.may(other) => Ok(()),
            Need::Right(right) | Need::Either(right, _) if known.may(right) => Ok(()),
            Need::Right(right) | Need::Either(right, _) => {
                let here = &self.config.name;
                let why = format!("{peer} does not have the right '{right}' on {here}");
                Err(denied(why).hint(format!(
                    "in the dray.toml of {here}, write {} in the [[peer]] of {peer}",
                    known.line_with(right)
                )))
            }
        }
    }

    /// The peer at the other end of a migration from or to here.
    fn other_end(&self, migration: MigrationId) -> Option<String> {
        let target = self.targets.get(migration).map(|slot| slot.intent().peer);
        target.or_else(|| self.sources.get(migration).map(|slot| slot.intent().peer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_types::ImageId;

    #[test]
    fn every_request_and_stream_needs_what_the_documentation_says() {
        let (migration, id) = (MigrationId(1), Some(MigrationId(1)));
        let (pool, images) = (None, Vec::new());
        let receive = Need::Right(Right::Receive);
        for (request, need) in [
            (Request::Identify, Need::Either(Right::Observe, Right::Receive)),
            (Request::Prepare { migration, pool: None, images: Vec::new() }, receive),
            (Request::Forget { migration }, Need::Move(id)),
            (Request::Seed { number: 1, pool: None, images: Vec::new(), link: None }, receive),
            (Request::Holdings { image: ImageId(1) }, Need::Right(Right::ReadReplicas)),
            (Request::Survey { number: None, pool, images, backups: true }, receive),
            (Request::Bases { pool: None, images: Vec::new() }, receive),
            (Request::Fate { migration, images: Vec::new() }, Need::Move(id)),
            (Request::Waits { migration, qmp: String::new(), layers: Vec::new() }, Need::Move(id)),
        ] {
            assert_eq!(need_of_request(&request), need, "{request:?}");
        }
        for kind in [StreamKind::Control, StreamKind::Data, StreamKind::Memory] {
            assert_eq!(need_of_stream(kind, id), Need::Move(id));
        }
        assert_eq!(need_of_stream(StreamKind::Request, None), Need::Later);
        assert_eq!(need_of_stream(StreamKind::Store, None), Need::Right(Right::Store));
        assert_eq!(need_of_stream(StreamKind::Replica, id), Need::Right(Right::ReadReplicas));
        let either = Need::Either(Right::Observe, Right::Receive);
        assert_eq!(need_of_stream(StreamKind::Probe, None), either);
    }
}
