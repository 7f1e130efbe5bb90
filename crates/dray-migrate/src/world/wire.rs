//! The sessions between two simulated hosts: what is said arrives in order, until the link breaks.

use super::host::SimAgent;
use super::{World, draw};
use crate::{receiver, source};
use dray_engine::SourceEvent;
use dray_host::migration::revive::may_come_back;
use dray_net::memory::Held;
use dray_net::{
    ControlSender, JobQueue, NetError, NetErrorKind, RunSink, RunSource, SendJob, SendKind,
};
use dray_types::ErrorKind;
use dray_wire::control::{self, Bounded};
use dray_wire::frame::run_hash;
use dray_wire::{Encoding, Envelope, FrameHeader, FrameKind, ToSource, ToTarget};
use serde::de::DeserializeOwned;
use std::sync::Arc;
use tokio::sync::mpsc::UnboundedReceiver;

/// A link that breaks does so in one step of so many, until this step.
const BREAKS: (u64, usize) = (6, 120);

/// The session that stands, from one host to the other.
pub struct Link {
    number: u64,
    to_target: UnboundedReceiver<Vec<u8>>,
    to_source: UnboundedReceiver<Vec<u8>>,
    queue: Arc<JobQueue>,
    stream: Arc<dyn RunSink>,
}

impl World {
    /// The link breaks, now and then: what is under way in either direction is lost.
    pub(super) fn break_link(&mut self) {
        let (one_in, until) = BREAKS;
        if self.steps < until && draw(&mut self.random).is_multiple_of(one_in) {
            self.disconnect();
        }
    }

    pub(super) fn disconnect(&mut self) {
        let why = || "it is gone".to_owned();
        for from in 0..2 {
            let Some(link) = self.links[from].take() else { continue };
            self.hosts[from].within(|agent| {
                if let Some(away) = agent.away().as_ref() {
                    away.slot.send(source::Input::SessionDown(
                        link.number,
                        NetError::new(NetErrorKind::Broken, why()),
                    ));
                }
            });
            self.hosts[1 - from].within(|agent| {
                if let Some(here) = agent.here().as_ref() {
                    here.slot.send(receiver::Input::SessionDown(link.number, why()));
                }
            });
        }
    }

    /// A source without a session gets one, or hears that the target knows nothing.
    pub(super) fn connect(&mut self) {
        for from in (0..2).filter(|_| self.steps.is_multiple_of(2)) {
            if self.links[from].is_none() {
                self.sessions += 1;
                self.links[from] = self.connected(from);
            }
        }
    }

    fn connected(&self, from: usize) -> Option<Link> {
        let (there, to) = (self.hosts[from].agent.as_ref()?, self.hosts[1 - from].agent.as_ref()?);
        let (away, here) = (there.away(), to.here());
        let away = away.as_ref().filter(|away| away.owner.is_some())?;
        let number = self.sessions;
        let same = |id| id == away.slot.board.migration;
        let known = here.as_ref().filter(|here| same(here.slot.board.migration));
        let Some(here) = known.filter(|here| here.owner.is_some()) else {
            if known.is_none() && may_come_back(&to.store, away.slot.board.migration) {
                return None;
            }
            let why = NetError::new(
                NetErrorKind::Refused(ErrorKind::Conflict),
                "there is no such migration",
            );
            away.slot.send(source::Input::SessionRefused(number, why));
            return None;
        };
        let ((control, to_target), (answers, to_source)) =
            (ControlSender::without_stream(), ControlSender::without_stream());
        let queue = JobQueue::new();
        let session = source::Session::simulated(number, control, &queue, false);
        away.slot.send(source::Input::SessionUp(session));
        here.slot.simulated_session(number, answers);
        let stream = here.slot.simulated_stream(number);
        Some(Link { number, to_target, to_source, queue, stream })
    }

    /// Every message that is under way arrives.
    pub(super) fn deliver(&mut self) {
        for (from, link) in self.links.iter_mut().enumerate() {
            let Some(link) = link else { continue };
            let (from, to) = (&self.hosts[from].agent, &self.hosts[1 - from].agent);
            let (Some(from), Some(to)) = (from, to) else { continue };
            while let Ok(bytes) = link.to_target.try_recv() {
                let message = decode::<ToTarget>(&bytes);
                if let Some(here) = to.here().as_ref() {
                    here.slot.send(receiver::Input::FromPeer(
                        link.number,
                        message,
                        Held::default(),
                    ));
                }
            }
            while let Ok(bytes) = link.to_source.try_recv() {
                let message = decode::<ToSource>(&bytes);
                if let Some(away) = from.away().as_ref() {
                    away.slot.send(source::Input::FromPeer(link.number, message, Held::default()));
                }
            }
        }
    }

    /// One job of each session goes over the data streams.
    pub(super) fn carry(&mut self) {
        for from in 0..2 {
            let Some(link) = &self.links[from] else { continue };
            let Some(job) = link.queue.next_now() else { continue };
            let stream = Arc::clone(&link.stream);
            let content = self.hosts[from].within(|agent| read(agent, &job));
            let Some(content) = content else { continue };
            self.hosts[1 - from].within(|_| match content {
                Ok(Some(payload)) => stream.run(&header(&job, FrameKind::Run, &payload), &payload),
                Ok(None) => stream.zero(&header(&job, FrameKind::Zero, &[])),
                Err(()) => {}
            });
        }
    }
}

/// What a job sends: none for zeros.
fn read(agent: &SimAgent, job: &SendJob) -> Result<Option<Vec<u8>>, ()> {
    let away = agent.away();
    let Some(away) = away.as_ref() else { return Err(()) };
    match job.kind {
        SendKind::Zero => Ok(None),
        SendKind::Run => {
            let mut bytes = vec![0; job.range.byte_len() as usize];
            match away.content.read(job.image, job.range, &mut bytes) {
                Ok(()) => Ok(Some(bytes)),
                Err(why) => {
                    let failed = SourceEvent::RunFailed { tag: job.tag, why: why.to_string() };
                    away.slot.send(source::Input::Engine(failed));
                    Err(())
                }
            }
        }
        other => panic!("{other:?} was not agreed"),
    }
}

fn header(job: &SendJob, kind: FrameKind, payload: &[u8]) -> FrameHeader {
    let zero_mask = [0; 4];
    FrameHeader {
        kind,
        encoding: Encoding::Raw,
        image: job.image,
        epoch: job.epoch,
        tag: job.tag,
        range: job.range,
        zero_mask,
        payload_len: payload.len() as u32,
        hash: run_hash(job.image, job.range, &zero_mask, payload),
    }
}

fn decode<T: DeserializeOwned + Bounded>(bytes: &[u8]) -> Envelope<T> {
    control::decode(&bytes[4..]).unwrap()
}
