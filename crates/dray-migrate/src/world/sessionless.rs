//! What simulated hosts ask and tell each other without a session: a source tells its target of a cancel, and
//! a target that is alone asks what became of its migration.

use super::World;
use super::images::HOSTS;
use crate::receiver;
use dray_host::folder::log::{End, Folder};
use dray_host::migration::fate;
use dray_net::{NetError, NetErrorKind};
use std::sync::atomic::Ordering;
use tokio::sync::oneshot;

/// Steps between two questions: a source that is away for less is about to make a session.
const PAUSE: usize = 8;

impl World {
    /// Each host tells, and is asked.
    pub(super) fn ask_and_tell(&mut self) {
        for from in 0..2 {
            self.tell_cancelled(from);
            self.ask(from);
        }
    }

    /// What this host has cancelled its target forgets, and then it does as well. An agent tells it when it
    /// starts and when it has cancelled something.
    fn tell_cancelled(&mut self, from: usize) {
        if self.hosts[1 - from].agent.is_none() {
            return;
        }
        let folders = self.hosts[from].within(|agent| {
            let tells = agent.tells_cancelled.swap(false, Ordering::SeqCst);
            Folder::all_cancelled(&agent.store).ok().filter(|_| tells)
        });
        for folder in folders.flatten().into_iter().flatten() {
            self.hosts[1 - from].within(|agent| {
                let here = agent.here();
                let same = |id| folder.is_of(id);
                if let Some(here) = here.as_ref().filter(|here| same(here.slot.board.migration)) {
                    here.slot.send(receiver::Input::Forget);
                }
            });
            // What cannot be removed now is told again after a restart.
            self.hosts[from].within(|_| drop(folder.remove(End::Source)));
        }
    }

    /// The other host asks what became of its migration from here, if it is alone.
    fn ask(&mut self, from: usize) {
        if self.links[from].is_some() || !self.steps.is_multiple_of(PAUSE) {
            return;
        }
        let asks = self.hosts[1 - from].within(|agent| {
            let here = agent.here();
            let slot = &here.as_ref()?.slot;
            Some((slot.board.migration, slot.question()?))
        });
        let Some((migration, question)) = asks.flatten() else { return };
        let told = self.hosts[from].within(|agent| {
            let (peer, images) = (HOSTS[1 - from], &question.images);
            fate::of(&agent.store, &agent.registry, peer, migration, images)
        });
        let Some(told) = told else { return };
        self.hosts[1 - from].within(|agent| {
            let (heard, _) = oneshot::channel();
            let answer = told.map_err(|why| NetError::new(NetErrorKind::Local, why.to_string()));
            if let Some(here) = agent.here().as_ref() {
                let sessions = question.sessions;
                here.slot.send(receiver::Input::Fate { sessions, answer, heard });
            }
        });
    }
}
