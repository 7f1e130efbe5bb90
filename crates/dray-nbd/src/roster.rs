//! The live connections of a listener: so that they can be counted, closed and waited for.

use crate::channel::{Channel, Socket};
use crate::limits::MAX_STRANGERS;
use crate::tls::Leave;
use dray_serve::Access;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The live connections of one listener.
#[derive(Default)]
pub(crate) struct Roster {
    live: Mutex<Live>,
    ended: Condvar,
}

#[derive(Default)]
struct Live {
    next: u64,
    entries: HashMap<u64, Entry>,
    closed: bool,
}

struct Entry {
    socket: Arc<Socket>,
    closing: Arc<AtomicBool>,
    export: Option<String>,
    /// Where it comes from, over TCP.
    address: Option<IpAddr>,
    /// It has shown a certificate that was found good.
    proved: bool,
    /// What it may do, where not everybody may do everything.
    leave: Option<Leave>,
    /// What it does with its export.
    does: Access,
    /// Its grace was over once: nobody waits for it again.
    cut: bool,
}

impl Live {
    /// Strangers from an address.
    fn strangers_from(&self, address: IpAddr) -> usize {
        let is_one = |entry: &&Entry| entry.address == Some(address) && entry.is_stranger();
        self.entries.values().filter(is_one).count()
    }

    /// Gives up a place of the export that has most, if it has more than one: whoever takes all places takes them at
    /// exports of its own. The youngest connection of that export goes. Connections that use no export yet count as
    /// one, and of them the oldest goes. False when each export has one.
    fn drop_of_the_greediest(&mut self) -> bool {
        let mut held: HashMap<Option<&str>, usize> = HashMap::new();
        for entry in self.entries.values() {
            *held.entry(entry.export.as_deref()).or_default() += 1;
        }
        let most = held.into_iter().max_by_key(|(_, count)| *count);
        let Some((greediest, _)) = most.filter(|(_, count)| *count > 1) else { return false };
        let its = self.entries.iter().filter(|(_, entry)| entry.export.as_deref() == greediest);
        let ids = its.map(|(id, _)| *id);
        let place = if greediest.is_some() { ids.max() } else { ids.min() };
        let Some(place) = place else { return false };
        self.drop_place(place);
        true
    }

    fn drop_place(&mut self, id: u64) {
        if let Some(mut entry) = self.entries.remove(&id) {
            entry.close();
            entry.cut();
        }
    }

    /// Gives up the place of the stranger who has been here for longest. False when there is none.
    fn drop_a_stranger(&mut self) -> bool {
        let strangers = self.entries.iter().filter(|(_, entry)| entry.is_stranger());
        let Some(oldest) = strangers.map(|(id, _)| *id).min() else { return false };
        self.drop_place(oldest);
        true
    }
}

impl Entry {
    /// Whether it has come over TCP, and nobody knows yet who it is: it has no export and has shown no certificate.
    fn is_stranger(&self) -> bool {
        self.address.is_some() && self.export.is_none() && !self.proved
    }

    /// Whether it does more than it may now.
    fn has_lost_its_leave(&self) -> bool {
        let (Some(leave), Some(export)) = (&self.leave, &self.export) else { return false };
        leave(export) < self.does
    }

    fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.socket.stop_receiving();
    }

    fn cut(&mut self) {
        self.cut = true;
        self.socket.cut();
    }
}

/// A connection's place in the roster.
pub(crate) struct RosterEntry {
    roster: Arc<Roster>,
    id: u64,
    /// Set when the connection shall end.
    pub closing: Arc<AtomicBool>,
}

impl Roster {
    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock()
    }

    /// Enters a connection, unless there are `max` already or the roster is closed.
    pub(crate) fn enter(self: &Arc<Self>, socket: &Arc<Socket>, max: usize) -> Option<RosterEntry> {
        let mut live = self.live();
        if live.closed {
            return None;
        }
        let address = socket.address();
        if address.is_some_and(|address| live.strangers_from(address) >= MAX_STRANGERS) {
            tracing::warn!(
                address = address.map(display),
                "nbd client refused: too many negotiations from there"
            );
            return None;
        }
        if live.entries.len() >= max && !live.drop_a_stranger() && !live.drop_of_the_greediest() {
            tracing::warn!(
                address = address.map(display),
                limit = max,
                "nbd client refused: too many connections"
            );
            return None;
        }
        let id = live.next;
        live.next += 1;
        let closing = Arc::new(AtomicBool::new(false));
        let entry = Entry {
            socket: Arc::clone(socket),
            closing: Arc::clone(&closing),
            export: None,
            address,
            proved: false,
            leave: None,
            does: Access::Nothing,
            cut: false,
        };
        live.entries.insert(id, entry);
        Some(RosterEntry { roster: Arc::clone(self), id, closing })
    }

    /// Connections of any kind, also those still negotiating.
    pub(crate) fn len(&self) -> usize {
        self.live().entries.len()
    }

    /// Lets nobody in any more and ends all connections as [`end`](Self::end) does.
    pub(crate) fn close(&self, grace: Duration, wake: impl Fn()) -> usize {
        self.live().closed = true;
        self.end(|_| true, grace, wake)
    }

    /// Ends the connections to `export`.
    pub(crate) fn disconnect(&self, export: &str, grace: Duration, wake: impl Fn()) -> usize {
        self.end(|entry| entry.export.as_deref() == Some(export), grace, wake)
    }

    /// Ends the connections that do more than they may now.
    pub(crate) fn end_without_leave(&self, grace: Duration, wake: impl Fn()) -> usize {
        self.end(Entry::has_lost_its_leave, grace, wake)
    }

    /// Ends every connection that `which` chooses: requests under way are finished for at most
    /// `grace`, then the connection is cut. Returns how many had to be cut. `wake` is called when all
    /// have been told, for those that wait elsewhere than at their socket.
    fn end(&self, which: impl Fn(&Entry) -> bool, grace: Duration, wake: impl Fn()) -> usize {
        let deadline = Instant::now() + grace;
        let mut live = self.live();
        let chosen: Vec<u64> = {
            let entries = live.entries.iter().filter(|(_, entry)| !entry.cut && which(entry));
            entries.inspect(|(_, entry)| entry.close()).map(|(id, _)| *id).collect()
        };
        wake();
        loop {
            let left: Vec<u64> =
                chosen.iter().copied().filter(|id| live.entries.contains_key(id)).collect();
            let time = deadline.saturating_duration_since(Instant::now());
            if left.is_empty() {
                return 0;
            }
            if time.is_zero() {
                for id in &left {
                    live.entries.get_mut(id).into_iter().for_each(Entry::cut);
                }
                return left.len();
            }
            self.ended.wait_for(&mut live, time);
        }
    }
}

impl RosterEntry {
    /// Notes that the client has shown a certificate that was found good, and what that leaves to it.
    pub(crate) fn has_proved_itself(&self, leave: Option<Leave>) {
        if let Some(entry) = self.roster.live().entries.get_mut(&self.id) {
            entry.proved = true;
            entry.leave = leave;
        }
    }

    /// Notes which export the connection uses, and what it does with it. False when it may not any more.
    pub(crate) fn uses(&self, export: &str, does: Access) -> bool {
        let mut live = self.roster.live();
        let Some(entry) = live.entries.get_mut(&self.id) else { return true };
        entry.export = Some(export.to_owned());
        entry.does = does;
        !entry.has_lost_its_leave()
    }
}

impl Drop for RosterEntry {
    fn drop(&mut self) {
        self.roster.live().entries.remove(&self.id);
        self.roster.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    #[test]
    fn who_has_shown_a_certificate_is_no_stranger() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let roster = Arc::new(Roster::default());
        let mut clients = Vec::new();
        let mut come = |max| {
            clients.push(TcpStream::connect(address).unwrap());
            roster.enter(&Arc::new(Socket::Tcp(listener.accept().unwrap().0)), max)
        };
        let places: Vec<_> = (0..MAX_STRANGERS).map(|_| come(usize::MAX).unwrap()).collect();
        assert!(come(usize::MAX).is_none(), "that is the share of one address");
        places.iter().for_each(|place| place.has_proved_itself(None));
        let silent = come(usize::MAX).expect("those before it are known");
        // The stranger goes for somebody else, and nobody goes after that who uses an export.
        let max = MAX_STRANGERS + 1;
        let next = come(max).expect("there was a stranger");
        assert!(!roster.live().entries.contains_key(&silent.id));
        next.has_proved_itself(None);
        let all = places.iter().chain([&next]);
        all.enumerate().for_each(|(n, place)| assert!(place.uses(&n.to_string(), Access::Read)));
        assert!(come(max).is_none());
        assert_eq!(roster.len(), max);
    }

    #[test]
    fn whoever_takes_all_places_gives_way_to_each_that_comes() {
        const MAX: usize = 8;
        let roster = Arc::new(Roster::default());
        let mut clients = Vec::new();
        let mut come = |export: Option<&str>| {
            let (client, socket) = UnixStream::pair().unwrap();
            clients.push(client);
            let place = roster.enter(&Arc::new(Socket::Unix(socket)), MAX)?;
            export.into_iter().for_each(|export| assert!(place.uses(export, Access::Read)));
            Some(place)
        };
        let stays = |place: &RosterEntry| roster.live().entries.contains_key(&place.id);
        let greedy: Vec<_> = (0..MAX).map(|_| come(Some("its")).unwrap()).collect();
        let others: Vec<_> =
            (1..MAX).map(|n| come(Some(&n.to_string())).expect("a place")).collect();
        assert!(others.iter().all(stays) && stays(&greedy[0]) && !stays(&greedy[1]));
        assert!(greedy[1].closing.load(Ordering::Acquire));
        assert!(come(None).is_none(), "each has one");
        drop((greedy, others));
        let silent: Vec<_> = (0..MAX).map(|_| come(None).unwrap()).collect();
        let next = come(Some("its")).expect("a place");
        assert!(!stays(&silent[0]) && stays(&silent[1]) && stays(&next), "the oldest goes");
    }
}
