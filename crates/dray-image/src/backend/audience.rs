//! The clients that must be told of an image's lost writes, and those that have heard of them.
//!
//! A flush covers what everybody has written, and the system reports a loss to one sync. So a loss is told to
//! every client that was there when it happened, whoever's flush met it: to each by its next flush. An answer
//! may be lost with its connection. That a client has heard is sure only when it flushes again after the answer
//! was sent, or says goodbye after it was told.
//!
//! A client that has gone before may come back by another connection. It is told then, as all are that come
//! while the loss is not over. It is over when everybody has heard who is there and may have written what was
//! lost, and one that came for each that [has gone](super::absent). A client that has written nothing is told and
//! not waited for.

use super::absent::{Absentees, Seeker};
use crate::client::{Client, Departure};
use std::sync::Arc;

/// One client, and what it knows. Losses are numbered.
#[derive(Default)]
struct Listener {
    /// None for the flushes that are no client's.
    client: Option<Arc<Client>>,
    /// How often clients had gone when it came.
    came: u64,
    /// The last loss that it was told of.
    told: u64,
    /// Its flushes had been answered as often when it was told.
    told_at: u64,
    /// The last loss that it has surely heard of.
    heard: u64,
    /// It may be one that had gone when it came, of which something may be lost.
    was_back: bool,
    /// It was told as one of those that had gone, who is not waited for any more.
    stands_in: bool,
}

impl Listener {
    fn wrote(&self) -> bool {
        self.client.as_ref().is_some_and(|client| client.wrote())
    }

    /// Whether something that it has written may be lost.
    fn may_lose(&self) -> bool {
        self.was_back || self.wrote()
    }

    fn is(&self, client: &Arc<Client>) -> bool {
        self.client.as_ref().is_some_and(|one| Arc::ptr_eq(one, client))
    }

    /// As one that may have been there before.
    fn seeker(&self) -> Seeker {
        let origin = self.client.as_ref().and_then(|client| client.origin());
        Seeker { origin: origin.cloned(), came: self.came }
    }
}

/// The clients of an image, and its losses.
pub(super) struct Audience {
    /// The number of the last loss; the first is 1.
    lost: u64,
    /// The last one that is over.
    over: u64,
    /// The last one that anybody was told of, and the last one that anybody has heard of.
    told: u64,
    heard: u64,
    clients: Vec<Listener>,
    /// Whoever flushes and is no client: always there, and perhaps any of those that have gone.
    nobody: Listener,
    gone: Absentees,
}

impl Default for Audience {
    /// Of an image that has just been opened: clients of an earlier process may have written to it.
    fn default() -> Self {
        Self {
            lost: 0,
            over: 0,
            told: 0,
            heard: 0,
            clients: Vec::new(),
            nobody: Listener { came: u64::MAX, ..Listener::default() },
            gone: Absentees::of_an_earlier_process(),
        }
    }
}

impl Audience {
    /// Whether there is a loss that is not over.
    pub(super) fn is_open(&self) -> bool {
        self.over < self.lost
    }

    /// Whether a flush that succeeds changes nothing here.
    pub(super) fn is_quiet(&self) -> bool {
        let are_told = || self.clients.iter().all(|one| one.told == self.lost);
        !self.is_open() && self.gone.are_none() && are_told()
    }

    /// How often clients have gone that may come back.
    pub(super) fn departures(&self) -> u64 {
        self.gone.departures()
    }

    /// Looks at a client, which has come or gone.
    pub(super) fn look_at(&mut self, client: &Arc<Client>) {
        let place = self.clients.iter().position(|one| one.is(client));
        match (client.departure(), place) {
            (None, None) => self.comes(client),
            (Some(how), Some(place)) => self.departs(place, how),
            _ => {}
        }
    }

    fn comes(&mut self, client: &Arc<Client>) {
        let mut one = Listener {
            client: Some(Arc::clone(client)),
            came: self.gone.departures(),
            told: self.over,
            heard: self.over,
            ..Listener::default()
        };
        one.was_back = self.gone.may_be(&one.seeker());
        self.clients.push(one);
    }

    fn departs(&mut self, place: usize, how: Departure) {
        let one = self.clients.swap_remove(place);
        let is_open = self.is_open();
        let has_heard =
            one.heard == self.lost || how == Departure::Goodbye && one.told == self.lost;
        if has_heard {
            self.heard = self.lost;
        }
        let is_owed = is_open && !has_heard && self.is_left_behind(&one, how);
        let is_counted = || has_heard || !self.gone.may_be(&one.seeker());
        if is_owed || one.wrote() || is_open && how == Departure::CutOff && is_counted() {
            self.gone.leaves(&one.seeker(), one.stands_in, is_owed);
        }
        if self.heard < self.lost && self.clients.is_empty() && !self.gone.are_owed() {
            self.gone.leaves_somebody();
        }
    }

    /// Whether a client that goes and has not heard leaves writes behind that may be lost. If it may be one that
    /// had gone before, and that one is still waited for, that is enough.
    fn is_left_behind(&self, one: &Listener, how: Departure) -> bool {
        let is_another = || how == Departure::CutOff && !self.gone.may_be(&one.seeker());
        one.wrote() || one.was_back && (one.stands_in || is_another())
    }

    /// Writes were lost. When nobody is there whose they may be, they are of somebody who will come.
    pub(super) fn lose(&mut self) {
        self.lost += 1;
        self.gone.lose();
        if self.gone.are_none() && !self.clients.iter().any(Listener::may_lose) {
            self.gone.leaves_somebody();
        }
    }

    /// All is over: nobody need hear of it.
    pub(super) fn forget(&mut self) {
        let all = self.clients.iter_mut().chain([&mut self.nobody]);
        all.for_each(|one| (one.told, one.heard) = (self.lost, self.lost));
        (self.told, self.heard, self.over) = (self.lost, self.lost, self.lost);
        self.gone.forget();
    }

    /// Who flushes: one that has gone is none.
    fn flusher(&mut self, client: Option<&Arc<Client>>) -> Option<&mut Listener> {
        let Some(client) = client else { return Some(&mut self.nobody) };
        if client.departure().is_some() {
            return None;
        }
        let found = self.clients.iter_mut().find(|one| one.is(client));
        Some(found.unwrap_or(&mut self.nobody))
    }

    /// Whether a flush of `client` is to fail because of a loss that it was not told of.
    pub(super) fn owes(&mut self, client: Option<&Arc<Client>>) -> bool {
        let (open, lost) = (self.is_open(), self.lost);
        self.flusher(client).map_or(open, |one| one.told < lost)
    }

    /// A flush of `client` fails, and tells it of the last loss.
    pub(super) fn tell(&mut self, client: Option<&Arc<Client>>) {
        let lost = self.lost;
        let Some(one) = self.flusher(client) else { return };
        one.told = lost;
        one.told_at = one.client.as_ref().map_or(0, |client| client.answered() + 1);
        let seeker = (!one.stands_in).then(|| one.seeker());
        self.told = lost;
        if seeker.is_some_and(|seeker| self.is_open() && self.gone.returns(&seeker)) {
            self.stands_in(client);
        }
    }

    /// A client was told as one that had gone. Whoever is no client may be another one the next time.
    fn stands_in(&mut self, client: Option<&Arc<Client>>) {
        if let Some(one) = self.flusher(client) {
            one.stands_in = one.client.is_some();
        }
    }

    /// A flush of `client` succeeds, which is owed nothing; `departures` is what
    /// [`departures`](Self::departures) was when it began.
    pub(super) fn succeeds(&mut self, client: Option<&Arc<Client>>, departures: u64) {
        if self.is_open() {
            self.hears(client);
        } else if self.departures() == departures {
            self.gone.clear();
            self.clients.iter_mut().for_each(|one| one.was_back = false);
        }
    }

    /// A flush of `client` succeeds after it was told of the loss.
    fn hears(&mut self, client: Option<&Arc<Client>>) {
        let lost = self.lost;
        let Some(one) = self.flusher(client) else { return };
        if one.client.as_ref().is_some_and(|client| client.asked() < one.told_at) {
            return;
        }
        (one.heard, one.was_back) = (lost, false);
        self.heard = lost;
    }

    /// Whether nobody is left who has to hear of a loss. Then there is none any more.
    pub(super) fn have_all_heard(&self) -> bool {
        let all = self.clients.iter().all(|one| one.heard == self.lost || !one.may_lose());
        all && self.heard == self.lost && !self.gone.are_owed()
    }

    /// The last loss is over.
    pub(super) fn close(&mut self) {
        self.over = self.lost;
    }

    /// Whether everybody was told whose writes the last loss may have taken.
    pub(super) fn are_all_told(&self) -> bool {
        let all = self.clients.iter().all(|one| one.told == self.lost || !one.may_lose());
        !self.is_open() || all && self.told == self.lost && !self.gone.are_owed()
    }
}
