//! The session with the target: one control stream and several data streams, made again whenever
//! they break, until the migration no longer needs them.

use super::content::Content;
use super::side_requests::{Question, Wanted};
use super::{Input, SourceLoop, SourceSlot, ToTask};
use crate::messages::{self, ToSourceShell, ToTargetShell};
use dray_api::{ApiResult, ErrorKind, ImageProgress, Phase, Refusal};
use dray_engine::SourceEvent;
use dray_net::tls::Identity;
use dray_net::{
    self, Compression, ControlSender, ControlSettings, DataSender, DialSettings, JobQueue, Memory,
    NetError, NetErrorKind, SendEvents, SendJob, SendSetup,
};
use dray_types::{Attempt, BitRate, Epoch, ImageIndex};
use dray_wire::control::FEATURE_REUSE;
use dray_wire::{Envelope, Hello, StreamKind, ToSource, ToTarget};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// First pause before dialling again; doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause before dialling again: what a returned link costs at most.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Pause between two reports to the target of how far it is.
const SAY_PROGRESS: Duration = Duration::from_secs(1);
/// What is shown while the target refuses images that were handed over to it.
const REFUSED: &str = "the target refuses the migration";

/// Most messages of a target that wait for the VM's task.
const MAX_UNHEARD: usize = 64;

/// Highest number of a session that a target may tell: no source makes so many.
const MAX_NUMBER: u64 = u64::MAX / 2;

/// How sessions are made.
#[derive(Clone)]
pub struct SessionSettings {
    /// This host's certificate.
    pub identity: Arc<Identity>,
    /// The peer's name.
    pub peer: String,
    /// Its address.
    pub address: String,
    /// Data streams.
    pub streams: u16,
    /// Timeouts of control streams.
    pub control: ControlSettings,
    /// Memory for what peers send.
    pub memory: Memory,
}

/// Tells how the target is reached, whenever a session is to be made: a migration goes on here even
/// if its target is not known just now.
pub type Reach = Arc<dyn Fn() -> ApiResult<SessionSettings> + Send + Sync>;

/// A session that stands.
pub struct Session {
    /// Its number; each session of a migration has a higher one.
    pub number: u64,
    /// The way to the target.
    pub control: ControlSender<ToTarget>,
    /// Whether content may be told by its hash.
    pub reuses: bool,
    /// What the data streams send.
    pub queue: Arc<JobQueue>,
    senders: Vec<DataSender>,
    reader: Option<tokio::task::AbortHandle>,
    /// Set when both sides have said everything: what is queued is still sent.
    pub orderly: bool,
    down: Arc<Notify>,
}

impl Session {
    /// Whether both sides want what the message is for.
    pub fn may_say(&self, message: &ToTarget) -> bool {
        self.reuses || !message.is_reuse()
    }
}

#[cfg(test)]
impl Session {
    /// A session whose messages and jobs are taken by who made it.
    pub fn simulated(
        number: u64,
        control: ControlSender<ToTarget>,
        queue: &Arc<JobQueue>,
        reuses: bool,
    ) -> Self {
        Self {
            number,
            control,
            reuses,
            queue: Arc::clone(queue),
            senders: Vec::new(),
            reader: None,
            orderly: false,
            down: Arc::new(Notify::new()),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.queue.clear();
        self.queue.close();
        for sender in &self.senders {
            sender.close();
        }
        if let Some(reader) = self.reader.as_ref().filter(|_| !self.orderly) {
            reader.abort();
        }
        self.down.notify_one();
    }
}

/// Tells the loop what happens on data streams.
struct Events {
    slot: Arc<SourceSlot>,
    number: u64,
}

impl SendEvents for Events {
    fn unreadable(&self, job: &SendJob, why: io::Error) {
        let why = why.to_string();
        self.slot.send(Input::Engine(SourceEvent::RunFailed { tag: job.tag, why }));
    }

    fn link_down(&self, why: NetError) {
        self.slot.send(Input::SessionDown(self.number, why));
    }
}

/// Makes sessions one after the other until it is dropped. Numbers grow; an agent that restarted
/// begins again, and a target that has seen higher ones tells the last.
pub async fn keep(reach: Reach, slot: Arc<SourceSlot>, content: Arc<Content>) {
    let mut number = 0;
    let mut pause = FIRST_PAUSE;
    loop {
        number += 1;
        match connect(&reach, &slot, &content, number).await {
            Ok((session, down)) => {
                pause = FIRST_PAUSE;
                slot.send(Input::SessionUp(session));
                down.notified().await;
            }
            // Not of this migration's making, and not its end: the next number is a good one. One
            // that cannot be counted on from is no honest target's (I7).
            Err(NetError { kind: NetErrorKind::Overtaken(newest), .. })
                if newest >= number && newest < MAX_NUMBER =>
            {
                tracing::info!(migration = %slot.board.migration, newest, "sessions are numbered on");
                number = newest;
                tokio::time::sleep(FIRST_PAUSE).await;
            }
            Err(why) => {
                slot.board.change(|shown| shown.progress.link_up = false);
                let refused = matches!(why.kind, NetErrorKind::Refused(_));
                let down = if refused { Input::SessionRefused } else { Input::SessionDown };
                slot.send(down(number, why));
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}

async fn connect(
    reach: &Reach,
    slot: &Arc<SourceSlot>,
    content: &Arc<Content>,
    number: u64,
) -> Result<(Session, Arc<Notify>), NetError> {
    let unknown = |why: Refusal| NetError::new(NetErrorKind::Local, why.to_string());
    let settings = &reach().map_err(unknown)?;
    let dial = |kind, stream| dial(settings, slot, number, kind, stream);
    let control = dial(StreamKind::Control, 0).await?;
    let reuses = control.agreed(FEATURE_REUSE);
    let queue = JobQueue::new();
    let setup = SendSetup {
        queue: Arc::clone(&queue),
        source: Arc::clone(content) as _,
        events: Arc::new(Events { slot: Arc::clone(slot), number }),
        pacer: Arc::clone(&slot.pacer),
        stats: Arc::clone(&slot.stats),
        compression: Compression::measured(),
        streams: settings.streams.into(),
    };
    let mut senders = Vec::new();
    for stream in 0..settings.streams {
        let data = dial(StreamKind::Data, stream).await?;
        senders.push(DataSender::spawn(data, stream.into(), setup.clone())?);
    }
    let (control, mut incoming) =
        dray_net::control_stream::<ToTarget, ToSource>(control, settings.control, &slot.stats);
    let loop_of = Arc::clone(slot);
    let reader = tokio::spawn(async move {
        while let Some(message) = incoming.next_held().await {
            match message {
                Ok((message, held)) => loop_of.send(Input::FromPeer(number, message, held)),
                Err(why) => loop_of.send(Input::SessionDown(number, why)),
            }
        }
    })
    .abort_handle();
    let down = Arc::new(Notify::new());
    let session = Session {
        number,
        control,
        reuses,
        queue,
        senders,
        reader: Some(reader),
        orderly: false,
        down: Arc::clone(&down),
    };
    Ok((session, down))
}

async fn dial(
    settings: &SessionSettings,
    slot: &SourceSlot,
    session: u64,
    kind: StreamKind,
    stream: u16,
) -> Result<dray_net::Stream, NetError> {
    let hello = Hello {
        agent: dray_net::AGENT.to_owned(),
        migration: Some(slot.board.migration),
        session,
        stream,
        features: dray_net::FEATURES.map(str::to_owned).to_vec(),
    };
    let mut stream = dray_net::dial(
        &settings.identity,
        &settings.peer,
        &settings.address,
        kind,
        &hello,
        &DialSettings::default(),
    )
    .await?;
    stream.limit_silence(dray_net::silence_limit(settings.control.dead));
    stream.share(&settings.memory);
    Ok(stream)
}

impl SourceLoop {
    pub(super) fn session_up(&mut self, session: Session) {
        if self.session.is_some() {
            self.report.reconnected();
        }
        self.report.new_session();
        self.session = Some(session);
        self.link_lost = None;
        self.slot.refused.store(false, Ordering::SeqCst);
        self.slot.board.change(|shown| {
            shown.progress.link_up = true;
            shown.error.take_if(|error| error.what == REFUSED);
        });
        self.say_settings();
        self.tell(ToTask::LinkUp);
        if self.is_done() {
            // The target may not know: it, or its last words, were lost.
            return self.say(&ToTargetShell::Done);
        }
        self.say_reuse();
        self.step(SourceEvent::LinkUp);
    }

    /// How far it is: the target does not know what there is to send.
    pub(super) fn say_progress(&mut self) {
        if self.said_progress.elapsed() < SAY_PROGRESS {
            return;
        }
        self.said_progress = Instant::now();
        let progress = self.slot.board.read().progress;
        if !(Phase::Copy..=Phase::Backfill).contains(&progress.phase) || !progress.link_up {
            return;
        }
        let amounts = |row: &ImageProgress| (row.amounts.bytes_done, row.amounts.bytes_total);
        self.say(&ToTargetShell::Progress {
            images: progress.images.iter().map(amounts).collect(),
            rate: progress.rate,
            seconds_left: progress.seconds_left.map(|seconds| seconds as u64),
        });
    }

    /// What the target does at the end. A session that `prepare` made has none until it begins.
    pub(super) fn say_settings(&mut self) {
        if let Some(options) = self.slot.intent().options {
            self.say(&ToTargetShell::Settings(options.settings));
            self.say(&ToTargetShell::Strategy(options.strategy));
        }
    }

    /// Of the two hosts the source forgets last: a target that knows nothing of a migration that is
    /// done has forgotten it after `Bye`.
    pub(super) fn session_refused(&mut self, number: u64, why: NetError) {
        if self.is_done() && !self.is_unfinished() {
            self.tell_finished();
            return self.part();
        }
        if !self.owns() {
            self.refused_after_handover(&why.to_string());
        } else if self.link_why.as_ref() != Some(&why) {
            tracing::warn!(migration = %self.slot.board.migration, %why, "the target refuses a session");
            self.slot.board.notice(format!("the target refuses a session: {why}"));
        }
        self.session_down(number, why);
    }

    /// The target should serve what it was given, and does not know of it: an operator has to look.
    fn refused_after_handover(&self, why: &str) {
        self.slot.refused.store(true, Ordering::SeqCst);
        let hint = format!(
            "this host has changed nothing; check both hosts. If the target needs no more blocks, \
             `dray cancel {}` ends the migration at this host, and its copies stay as replicas. \
             To use these copies again, see `dray claim`",
            self.slot.board.migration
        );
        let error = Refusal::new(ErrorKind::DataAtRisk, REFUSED, why).hint(hint);
        if self.slot.board.read().error.as_ref() != Some(&error) {
            tracing::warn!(migration = %self.slot.board.migration, why, "{REFUSED}");
            self.slot.board.change(|shown| shown.error = Some(error));
        }
    }

    pub(super) fn session_down(&mut self, number: u64, why: NetError) {
        if let Some(session) = &self.session {
            if session.number != number {
                return;
            }
            self.session = None;
            self.tell(ToTask::LinkDown);
            if !self.is_done() {
                tracing::warn!(migration = %self.slot.board.migration, %why, "lost the session");
                self.link_lost = Some(self.clock.now());
                self.slot.board.notice(format!("the link to the target was lost: {why}"));
                self.step(SourceEvent::LinkDown);
            }
        }
        self.slot.board.change(|shown| shown.progress.link_up = false);
        self.link_why = Some(why);
    }

    pub(super) fn heard(&mut self, number: u64, message: Envelope<ToSource>) {
        // A voice from an older session says nothing about this one.
        if self.session.as_ref().is_none_or(|session| session.number != number) {
            return;
        }
        match message.body {
            ToSource::Peek { tag, image, offset, len } => {
                self.answer_aside(tag, image, Wanted::Bytes { offset, len });
            }
            ToSource::Hurry { tag } => {
                // It may have been sent by now, or not be known: then there is nothing to hurry.
                self.session.as_ref().map(|session| session.queue.hurry(tag));
            }
            ToSource::Hash { tag, image, ranges } => {
                self.report.verifying(image, &ranges);
                self.answer_aside(tag, image, Wanted::Hashes(ranges));
            }
            ToSource::Vm(bytes) => {
                if let Some(message) = messages::decode::<ToSourceShell>(&bytes) {
                    self.heard_shell(message);
                }
            }
            _ => {
                self.let_go_of(&message.body);
                self.step(SourceEvent::Message(message));
            }
        }
    }

    /// Has a question answered, or ends the session of a target that asks too much (I7).
    fn answer_aside(&mut self, tag: u64, image: ImageIndex, wanted: Wanted) {
        let control = self.control_copy();
        let asked = self.asides.ask(Question { tag, image, wanted, control });
        let number = self.session.as_ref().map(|session| session.number);
        if let (Err(why), Some(number)) = (asked, number) {
            self.session_down(number, why);
        }
    }

    fn heard_shell(&mut self, message: ToSourceShell) {
        if message == ToSourceShell::Finished {
            // Of what this host still owns its target cannot say that it has moved.
            if self.is_done() {
                self.begin_finish();
            }
            return;
        }
        if let Some(engine) = &self.engine {
            self.report.observe(&engine.status());
        }
        if let ToSourceShell::Bandwidth(bytes_per_second) = message {
            let limit = bytes_per_second.map(|bytes_per_second| BitRate { bytes_per_second });
            if let Err(why) = self.slot.set_limit(limit) {
                tracing::warn!(%why, "after a restart of the agent, the earlier limit applies \
                                      again");
            }
            return;
        }
        self.report.told(&message);
        if !is_for_task(&message) {
            return;
        }
        if Arc::strong_count(&self.unheard) > MAX_UNHEARD {
            let number = self.session.as_ref().map_or(0, |session| session.number);
            let why = "the target answers what it was not asked";
            return self.session_down(number, NetError::new(NetErrorKind::Protocol, why));
        }
        self.tell(ToTask::Shell(message, Arc::clone(&self.unheard)));
    }

    /// All is done here too: the target may forget the migration.
    pub(super) fn say_bye(&mut self) {
        self.tell_finished();
        self.say(&ToTargetShell::Bye);
    }

    /// Tells those who watch the migration that it is over.
    fn tell_finished(&mut self) {
        if let Some(engine) = &self.engine {
            self.report.observe(&engine.status());
        }
        self.report.told(&ToSourceShell::Finished);
        self.tell(ToTask::Shell(ToSourceShell::Finished, Arc::default()));
    }

    /// What the link has carried is what the next migration can reckon with.
    pub(super) fn note_link(&self) {
        let intent = self.slot.intent();
        let limited = intent.options.is_some_and(|options| {
            self.slot.pacer.is_shared()
                || options.bandwidth.is_some()
                || options.tuning.max_added_latency_ms.is_some()
        });
        crate::links::note(&self.parts.links, &intent.peer, self.report.steady_rate(), limited);
    }

    fn control_copy(&self) -> Option<ControlSender<ToTarget>> {
        self.session.as_ref().map(|session| session.control.clone())
    }

    pub(super) fn say(&self, message: &ToTargetShell) {
        let body = ToTarget::Vm(messages::encode(message));
        send(self.control_copy().as_ref(), body);
    }
}

/// Whether whoever moves the VM waits for such a message.
fn is_for_task(message: &ToSourceShell) -> bool {
    use ToSourceShell::{Checked, GuestFailed, GuestRunning, Listening, Noted, Released};
    matches!(
        message,
        Checked(_) | Listening(_) | Noted(_) | GuestRunning | GuestFailed(_) | Released(_)
    )
}

/// Shell messages change no ownership, so they need to name none: the engine's own do.
pub(super) fn send(control: Option<&ControlSender<ToTarget>>, body: ToTarget) {
    if let Some(control) = control {
        let epoch = Epoch::HIGHEST;
        // A link that is down reports itself; nothing is owed to it.
        let _ = control.send(&Envelope { epoch, attempt: Attempt(0), body });
    }
}
