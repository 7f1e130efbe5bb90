//! Sessions, as the target sees them: the source makes them, a new one replaces the one before.

use super::{Input, TargetLoop, TargetSlot, ToTask};
use crate::lines;
use crate::messages::{self, ToSourceShell, ToTargetShell};
use dray_config::MAX_STREAMS;
use dray_engine::TargetEvent;
use dray_host::refusals::{conflict, denied, invalid};
use dray_net::{ControlSender, ControlSettings, DataReceiver, Incoming, NetError};
use dray_wire::control::FEATURE_REUSE;
use dray_wire::{Envelope, StreamKind, ToSource, ToTarget};
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;

/// Most requests of a source that the VM's task has not answered: it waits for one answer at a time, and begins anew with
/// each session.
const MAX_UNANSWERED: usize = 4;

/// The newest session of a migration; streams of older ones are refused, and end when it begins.
#[derive(Default)]
pub struct Newest(Mutex<Streams>);

/// The data streams of a session.
#[derive(Default)]
struct Streams {
    session: u64,
    open: Vec<DataReceiver>,
}

impl Streams {
    fn refuses(&self, session: u64) -> Option<&'static str> {
        if self.session != session {
            return Some("the session is not the newest of this migration");
        }
        (self.open.len() as u64 >= MAX_STREAMS).then_some("the session has too many streams")
    }
}

impl Newest {
    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.0.lock()
    }

    /// A session begins.
    ///
    /// # Errors
    /// The number of a newer one, or of the same one: each has one control stream.
    fn begin(&self, session: u64) -> Result<(), u64> {
        let mut streams = self.streams();
        if session > streams.session {
            // What they still bring is not taken any more.
            streams.open.drain(..).for_each(|stream| stream.close());
            streams.session = session;
            return Ok(());
        }
        Err(streams.session)
    }

    /// Why a session may have no further data stream, each of which has a thread and memory (I7).
    fn refuses(&self, session: u64) -> Option<&'static str> {
        self.streams().refuses(session)
    }

    /// A data stream has begun. It ends with its session.
    fn add(&self, session: u64, stream: DataReceiver) {
        let mut streams = self.streams();
        match streams.refuses(session) {
            Some(_) => stream.close(),
            None => streams.open.push(stream),
        }
    }
}

/// A session that stands.
pub struct Session {
    /// Its number.
    pub number: u64,
    /// The way to the source.
    pub control: ControlSender<ToSource>,
    /// Whether content may be told by its hash.
    reuses: bool,
    reader: Option<tokio::task::AbortHandle>,
}

impl Session {
    /// Whether both sides want what the message is for.
    pub fn may_say(&self, message: &ToSource) -> bool {
        self.reuses || !message.is_reuse()
    }
}

#[cfg(test)]
impl Session {
    /// A session whose messages are taken by who made it.
    pub fn simulated(number: u64, control: ControlSender<ToSource>, reuses: bool) -> Self {
        Self { number, control, reuses, reader: None }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.reader.iter().for_each(tokio::task::AbortHandle::abort);
    }
}

impl TargetSlot {
    /// Takes a stream that the source has opened for this migration.
    ///
    /// # Errors
    /// When the stream cannot be answered or its thread cannot be made.
    pub async fn attach(
        self: &Arc<Self>,
        incoming: Incoming,
        settings: ControlSettings,
    ) -> Result<(), NetError> {
        let number = incoming.hello.session;
        if self.intent().peer != incoming.peer {
            incoming.refuse(denied("the migration belongs to another peer")).await;
            return Ok(());
        }
        let offered = incoming.hello.features.iter();
        let features: Vec<_> = offered.filter(|word| self.agrees(word)).cloned().collect();
        match incoming.kind {
            StreamKind::Control => {
                if let Err(newest) = self.newest.begin(number) {
                    tracing::info!(migration = %self.board.migration, number, newest, "an old session");
                    incoming.overtaken(newest).await;
                    return Ok(());
                }
                self.control(incoming.welcome(features).await?, number, settings);
            }
            StreamKind::Data => {
                if let Some(why) = self.newest.refuses(number) {
                    incoming.refuse(conflict(why)).await;
                    return Ok(());
                }
                let stream = incoming.welcome(features).await?;
                let stats = Arc::clone(&self.stats);
                let sink = self.sink.of_session(number);
                self.newest.add(number, DataReceiver::spawn(stream, sink as _, stats)?);
            }
            StreamKind::Memory
            | StreamKind::Request
            | StreamKind::Store
            | StreamKind::Replica
            | StreamKind::Probe => {
                let why = "this stream does not belong to the disks of a migration";
                incoming.refuse(invalid(why)).await;
            }
        }
        Ok(())
    }

    /// Whether this host can do what the word says, and its operator wants it.
    fn agrees(&self, word: &str) -> bool {
        dray_net::FEATURES.contains(&word) && (word != FEATURE_REUSE || self.sink.finds())
    }

    fn control(self: &Arc<Self>, stream: dray_net::Stream, number: u64, settings: ControlSettings) {
        let reuses = stream.agreed(FEATURE_REUSE);
        let (control, mut incoming) =
            dray_net::control_stream::<ToSource, ToTarget>(stream, settings, &self.stats);
        let slot = Arc::clone(self);
        let reader = tokio::spawn(async move {
            while let Some(message) = incoming.next_held().await {
                match message {
                    Ok((message, held)) => slot.send(Input::FromPeer(number, message, held)),
                    Err(why) => slot.send(Input::SessionDown(number, why.to_string())),
                }
            }
        });
        let reader = Some(reader.abort_handle());
        self.send(Input::SessionUp(Session { number, control, reuses, reader }));
    }
}

impl TargetLoop {
    pub(super) fn session_up(&mut self, session: Session) {
        self.held.new_session();
        if self.session.take().is_some() {
            self.step(TargetEvent::LinkDown);
        }
        self.slot.sink.admit(session.number);
        self.session = Some(session);
        self.sessions += 1;
        self.ask_if_alone();
        self.show_met();
        if !self.engine.owns() {
            // No frame is being written now.
            self.images.lossy().into_iter().for_each(|image| self.engine.doubt(image));
        }
        self.step(TargetEvent::LinkUp);
        self.ask_peeks_again();
    }

    pub(super) fn session_down(&mut self, number: u64, why: &str) {
        if self.session.as_ref().is_some_and(|session| session.number == number) {
            tracing::warn!(migration = %self.slot.board.migration, why, "lost the session");
            self.session = None;
            self.held.new_session();
            self.step(TargetEvent::LinkDown);
            self.ask_if_alone();
            self.show_alone();
            self.restart_verification();
        }
    }

    pub(super) fn heard(&mut self, number: u64, message: Envelope<ToTarget>) {
        // A voice from an older session says nothing about this one.
        if self.session.as_ref().is_none_or(|session| session.number != number) {
            return;
        }
        match message.body {
            ToTarget::Peeked { tag, data } => self.peeked(tag, data),
            ToTarget::Hashed { tag, hashes } => self.hashed(tag, hashes),
            ToTarget::Vm(bytes) => {
                if let Some(message) = messages::decode::<ToTargetShell>(&bytes) {
                    self.heard_shell(message);
                }
            }
            _ => {
                let opening = matches!(message.body, ToTarget::Open(_));
                self.step(TargetEvent::Message(message));
                if opening {
                    self.opened_again();
                }
            }
        }
    }

    fn heard_shell(&mut self, message: ToTargetShell) {
        if let ToTargetShell::Settings(settings) = &message {
            if self.slot.intent().settings != *settings {
                self.slot.set_settings(settings.clone());
                self.write_settings();
            }
            return;
        }
        match message {
            ToTargetShell::Lines { attempt, closed } => {
                let images = lines::per_image(closed, self.slot.intent().images.len());
                // Durable before the promise that follows. A line is worth less than a handover.
                if let Err(why) = self.images.keep_lines(attempt, images) {
                    tracing::warn!(%why, "cannot keep the images' generations at the target: a \
                                          new line begins");
                }
                return;
            }
            ToTargetShell::Bye => return self.part(),
            ToTargetShell::Done => return self.opened_again(),
            ToTargetShell::Progress { mut images, rate, seconds_left } => {
                images.truncate(self.slot.intent().images.len());
                images.shrink_to_fit();
                self.copied = Some(super::Copied::new(images, rate, seconds_left));
                return;
            }
            ToTargetShell::Strategy(strategy) => {
                return self.slot.board.change(|shown| {
                    shown.progress.strategy = strategy;
                });
            }
            _ => {}
        }
        if Arc::strong_count(&self.unanswered) > MAX_UNANSWERED {
            let number = self.session.as_ref().map_or(0, |session| session.number);
            let why = "the source asks more of the vm's qemu before it was answered than it may";
            return self.session_down(number, why);
        }
        self.tell(ToTask::Shell(message, Arc::clone(&self.unanswered)));
    }

    pub(super) fn say(&mut self, message: &ToSourceShell) {
        self.send_aside(ToSource::Vm(messages::encode(message)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the clock of a source that restarted says: it learns from where it has to count.
    #[test]
    fn a_source_that_begins_again_is_told_the_newest_session() {
        let newest = Newest::default();
        assert_eq!(newest.begin(1), Ok(()));
        assert_eq!(newest.begin(9), Ok(()));
        for number in [1, 8, 9] {
            assert_eq!(newest.begin(number), Err(9), "{number}");
        }
        assert!(newest.refuses(1).is_some() && newest.refuses(9).is_none());
        assert_eq!(newest.begin(10), Ok(()));
    }
}
