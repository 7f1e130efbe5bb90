//! Starting the guest at its target. Its images were handed over and its memory is in the QEMU there: that is asked until
//! it has started the guest, has refused to, or has ended. Before the start, too: the disks serve by then, and whoever
//! has the monitor may have let the guest go on. Silence says nothing (I9), and the images do not go back.

use super::receiver::TargetVmTask;
use crate::messages::ToSourceShell;
use crate::receiver::Input;
use crate::shown::{WAITS, not_started};
use dray_api::Refusal;
use dray_qemu::{Error, ErrorKind as Qemu};
use dray_types::Why;
use dray_vm::hypervisor::Arrival;
use std::fmt;
use std::io;
use std::time::Duration;

/// Pause between two tries.
const AGAIN: Duration = Duration::from_secs(1);

/// Why the guest's QEMU has not done something.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum NotDone {
    /// It does not answer, or has not said what became of it. That may pass.
    Silent(Why),
    /// It has said no, or is not the one that is wanted, or this host cannot ask it.
    Refused(Why),
}

impl NotDone {
    /// What it has made of a question.
    pub(super) fn of(why: &Error) -> Self {
        match why.kind().is_unknown() {
            true => Self::Silent(Why::of(why)),
            false => Self::Refused(Why::of(why)),
        }
    }

    /// Why there is no connection to it. It may hang, or talk to somebody else.
    pub(super) fn unconnected(why: &Error) -> Self {
        match why.kind() {
            Qemu::TooOld => Self::Refused(Why::of(why)),
            _ => Self::Silent(Why::of(why)),
        }
    }
}

impl fmt::Display for NotDone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Silent(why) | Self::Refused(why)) = self;
        why.fmt(f)
    }
}

impl std::error::Error for NotDone {}

impl From<Error> for NotDone {
    fn from(why: Error) -> Self {
        Self::of(&why)
    }
}

impl From<io::Error> for NotDone {
    fn from(why: io::Error) -> Self {
        Self::Refused(Why::of(why))
    }
}

impl From<&str> for NotDone {
    fn from(why: &str) -> Self {
        Self::Refused(why.into())
    }
}

/// What QEMU is asked.
pub(super) enum Step {
    /// Whether it has everything; first where it was waited for.
    Reach(Option<Box<dyn Arrival>>),
    /// To start the guest.
    Start,
}

/// What follows from a try to start the guest.
#[derive(PartialEq, Eq, Debug)]
enum Next {
    /// This is told to the engine.
    Tell(Result<(), Why>),
    /// It is tried again; why it was not started.
    Again(Why),
}

/// What follows from a try, when it is known whether QEMU `has_ended` after it.
fn next(tried: Result<(), NotDone>, has_ended: impl FnOnce() -> bool) -> Next {
    match tried {
        Ok(()) => Next::Tell(Ok(())),
        Err(NotDone::Refused(why)) => Next::Tell(Err(why)),
        Err(NotDone::Silent(why)) if has_ended() => {
            Next::Tell(Err(format!("its QEMU has ended: {why}").into()))
        }
        Err(NotDone::Silent(why)) => Next::Again(why),
    }
}

impl TargetVmTask {
    /// Takes a step towards the guest's start, however long its QEMU does not answer. None when the migration's loop
    /// has ended before.
    pub(super) async fn until_answered(&mut self, mut step: Step) -> Option<Result<(), Why>> {
        let mut shown = None;
        let answered = loop {
            let tried = match &mut step {
                Step::Reach(waiting) => {
                    let waiting = waiting.take();
                    self.reach(waiting).await
                }
                Step::Start => self.try_start().await,
            };
            if self.told.is_closed() {
                return None;
            }
            match next(tried, || self.has_ended()) {
                Next::Tell(result) => break result,
                Next::Again(why) => self.show_not_started(&why.to_string(), &mut shown),
            }
            tokio::time::sleep(AGAIN).await;
        };
        self.show_no_longer(shown);
        Some(answered)
    }

    /// Starts the guest unless that was done before, of which QEMU may not have been heard to say so: its user may
    /// have stopped it since.
    async fn try_start(&mut self) -> Result<(), NotDone> {
        let running = self.slot.intent().guest.is_some_and(|guest| guest.running);
        let vm = match self.reached.take() {
            // It was asked for nothing yet.
            Some(vm) => vm,
            None => {
                let vm = self.connect(false).await?;
                if vm.was_started().await? {
                    return Ok(());
                }
                // Others were at its monitor meanwhile.
                self.look_again(&*vm).await?;
                vm
            }
        };
        if self.told.is_closed() {
            // Its images may have been claimed.
            return Err("the migration is over at this host".into());
        }
        Ok(vm.start(running).await?)
    }

    /// Says at both hosts what is waited for.
    fn show_not_started(&self, why: &str, shown: &mut Option<Refusal>) {
        let guest = self.slot.intent().guest;
        let qmp = guest.map(|guest| guest.qmp.display().to_string()).unwrap_or_default();
        // In each session anew: a source that was restarted knows nothing of it.
        self.slot.send(Input::Say(ToSourceShell::GuestWaits(why.to_owned())));
        let error = not_started(&qmp, why);
        if shown.as_ref() == Some(&error) {
            return;
        }
        tracing::warn!(migration = %self.slot.board.migration, why, "{WAITS}");
        self.slot.board.notice(error.to_string());
        self.slot.board.change(|board| board.error = Some(error.clone()));
        *shown = Some(error);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_qemu_is_asked_again_until_it_has_ended() {
        let silent = || Err(NotDone::Silent("no greeting".into()));
        assert_eq!(next(silent(), || false), Next::Again("no greeting".into()));
        let ended = "its QEMU has ended: no greeting".into();
        assert_eq!(next(silent(), || true), Next::Tell(Err(ended)));
    }

    #[test]
    fn what_qemu_has_answered_is_final() {
        for has_ended in [false, true] {
            assert_eq!(next(Ok(()), || has_ended), Next::Tell(Ok(())));
            let refused = Err(NotDone::Refused("no".into()));
            assert_eq!(next(refused, || has_ended), Next::Tell(Err("no".into())));
        }
    }

    #[test]
    fn an_answer_is_told_from_none() {
        let silent = |why: &NotDone| matches!(why, NotDone::Silent(_));
        let of = |kind| Error::new(kind, "why");
        for kind in [Qemu::Closed, Qemu::Timeout] {
            assert!(silent(&NotDone::of(&of(kind))) && silent(&NotDone::unconnected(&of(kind))));
        }
        for kind in [Qemu::Command, Qemu::Refused, Qemu::Mismatch, Qemu::Failed] {
            assert!(!silent(&NotDone::of(&of(kind))), "{kind:?}");
        }
        // Its queue is full, or somebody else is connected.
        for kind in [Qemu::Connect, Qemu::NotQmp] {
            assert!(silent(&NotDone::unconnected(&of(kind))), "{kind:?}");
        }
        assert!(!silent(&NotDone::unconnected(&of(Qemu::TooOld))));
    }
}
