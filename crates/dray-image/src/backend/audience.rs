//! Who is to be told of an image's losses, and who has heard.
//!
//! A flush covers what everybody has written, and the system reports a loss to one sync. So a loss is told to
//! every client that was there when it happened, whoever's flush met it: to each by its next flush. An answer
//! may be lost with its connection. That a client has heard is sure only when it flushes again after the answer
//! was sent, or says goodbye after it was told.
//!
//! A client that has gone before may come back by another connection, and nobody can tell that this is the same
//! one. What such a client is owed is owed to those that come after it, until one of them has heard. A loss is
//! over when everybody has heard who was there before that.

use crate::client::{Client, Departure};
use std::sync::Arc;

/// What is owed to clients that have gone, and so to those that come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Gone {
    /// Nothing: what they wrote is durable, and they have heard of what is not.
    Quit,
    /// What they wrote may not be durable, or one that has come since was told of a loss and may not have heard.
    Unsure,
    /// They are to be told of a loss, and nobody who has come since was.
    Owed,
}

/// One client, and what it knows. Losses are numbered.
#[derive(Default)]
struct Listener {
    /// None for the flushes that are no client's.
    client: Option<Arc<Client>>,
    /// The last loss that it was told of.
    told: u64,
    /// Its flushes had been answered as often when it was told.
    told_at: u64,
    /// The last loss that it has surely heard of.
    heard: u64,
    /// When it came it may have been one that had gone.
    was_back: bool,
    /// It came after all those that have gone, and may be one of them.
    is_back: bool,
}

impl Listener {
    /// Whether something that it has written may be lost.
    fn may_lose(&self) -> bool {
        self.was_back || self.client.as_ref().is_some_and(|client| client.wrote())
    }

    fn is(&self, client: &Arc<Client>) -> bool {
        self.client.as_ref().is_some_and(|one| Arc::ptr_eq(one, client))
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
    /// Whoever flushes and is no client: always there, and owed what clients that have gone are.
    nobody: Listener,
    gone: Gone,
    /// How often clients have gone that may come back.
    departures: u64,
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
            nobody: Listener { is_back: true, ..Listener::default() },
            gone: Gone::Unsure,
            departures: 0,
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
        !self.is_open() && self.gone == Gone::Quit
    }

    /// How often clients have gone that may come back.
    pub(super) fn departures(&self) -> u64 {
        self.departures
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
        let back = self.gone != Gone::Quit;
        self.clients.push(Listener {
            client: Some(Arc::clone(client)),
            told: self.over,
            told_at: 0,
            heard: self.over,
            was_back: back,
            is_back: back,
        });
    }

    fn departs(&mut self, place: usize, how: Departure) {
        let one = self.clients.swap_remove(place);
        let goodbye = how == Departure::Goodbye;
        let mut deaf = one.heard < self.lost;
        if deaf && goodbye && one.told == self.lost {
            deaf = false;
            self.is_heard(one.is_back);
        }
        let wrote = one.client.as_ref().is_some_and(|client| client.wrote());
        if deaf && (wrote || one.was_back && !goodbye) {
            self.leaves(Gone::Owed);
        } else if wrote || deaf && !goodbye {
            self.leaves(Gone::Unsure);
        }
        if self.heard < self.lost && self.clients.is_empty() {
            self.leaves(Gone::Owed);
        }
    }

    /// Somebody has gone and leaves this to those that come.
    fn leaves(&mut self, what: Gone) {
        self.departures += 1;
        if self.gone != Gone::Owed {
            self.gone = what;
        }
        self.clients.iter_mut().for_each(|one| one.is_back = false);
    }

    /// Writes were lost. When nobody is there whose they may be, they are of somebody who will come.
    pub(super) fn lose(&mut self) {
        self.lost += 1;
        if !self.clients.iter().any(Listener::may_lose) {
            self.leaves(Gone::Owed);
        } else if self.gone == Gone::Unsure {
            self.gone = Gone::Owed;
        }
    }

    /// All is over: nobody need hear of it.
    pub(super) fn forget(&mut self) {
        let all = self.clients.iter_mut().chain([&mut self.nobody]);
        all.for_each(|one| (one.told, one.heard) = (self.lost, self.lost));
        (self.told, self.heard, self.over) = (self.lost, self.lost, self.lost);
        if self.gone == Gone::Owed {
            self.gone = Gone::Unsure;
        }
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
        let is_back = one.is_back;
        self.told = lost;
        if is_back && self.gone == Gone::Owed {
            self.gone = Gone::Unsure;
        }
    }

    /// A flush of `client` succeeds, which is owed nothing; `departures` is what
    /// [`departures`](Self::departures) was when it began.
    pub(super) fn succeeds(&mut self, client: Option<&Arc<Client>>, departures: u64) {
        if !self.is_open() {
            if self.departures == departures {
                self.gone = Gone::Quit;
            }
            return;
        }
        let lost = self.lost;
        let Some(one) = self.flusher(client) else { return };
        if one.client.as_ref().is_some_and(|client| client.asked() < one.told_at) {
            return;
        }
        one.heard = lost;
        let is_back = one.is_back;
        self.is_heard(is_back);
    }

    /// Somebody has heard of all that there is; whether it may be one that had gone.
    fn is_heard(&mut self, is_back: bool) {
        self.heard = self.lost;
        if is_back {
            self.gone = Gone::Quit;
        }
    }

    /// Whether nobody is left who has to hear of a loss. Then there is none any more.
    pub(super) fn have_all_heard(&self) -> bool {
        let all = self.clients.iter().all(|one| one.heard == self.lost);
        all && self.heard == self.lost && self.gone == Gone::Quit
    }

    /// The last loss is over.
    pub(super) fn close(&mut self) {
        self.over = self.lost;
    }

    /// Whether everybody was told whose writes the last loss may have taken.
    pub(super) fn are_all_told(&self) -> bool {
        let all = self.clients.iter().all(|one| one.told == self.lost || !one.may_lose());
        !self.is_open() || all && self.told == self.lost && self.gone != Gone::Owed
    }
}
