//! Connections that have not proved who they are yet: how many there may be, and who goes when there are
//! more.
//!
//! One address has a share of them only. When all places are taken the one that has waited longest goes: an
//! honest peer is through in milliseconds, and one that says nothing is the oldest soon.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use tokio::sync::oneshot;

/// The places for them.
#[derive(Debug)]
pub(crate) struct Greetings {
    most: usize,
    most_of_address: usize,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    next: u64,
    /// The oldest first.
    all: VecDeque<Guest>,
}

#[derive(Debug)]
struct Guest {
    id: u64,
    address: IpAddr,
    /// Dropped when it has to go.
    _stays: oneshot::Sender<()>,
}

/// The place of one connection.
pub(crate) struct Place {
    greetings: Arc<Greetings>,
    id: u64,
    gone: oneshot::Receiver<()>,
}

impl Greetings {
    pub(crate) fn new(most: usize, most_of_address: usize) -> Arc<Self> {
        Arc::new(Self { most, most_of_address, waiting: Mutex::default() })
    }

    /// A place for a connection from `address`; none when that address has all that it may have.
    pub(crate) fn begin(self: &Arc<Self>, address: IpAddr) -> Option<Place> {
        let address = address.to_canonical();
        let mut waiting = self.waiting.lock();
        let of_address = waiting.all.iter().filter(|guest| guest.address == address).count();
        if of_address >= self.most_of_address {
            return None;
        }
        if waiting.all.len() >= self.most {
            waiting.all.pop_front();
        }
        let id = waiting.next;
        waiting.next += 1;
        let (stays, gone) = oneshot::channel();
        waiting.all.push_back(Guest { id, address, _stays: stays });
        Some(Place { greetings: Arc::clone(self), id, gone })
    }
}

impl Place {
    /// Waits until somebody newer has taken the place.
    pub(crate) async fn gone(&mut self) {
        // Nothing is ever sent: it ends when the sender is dropped.
        let _ = (&mut self.gone).await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.greetings.waiting.lock().all.retain(|guest| guest.id != self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_address_has_its_share_and_the_oldest_goes() {
        let greetings = Greetings::new(3, 2);
        let from = |last: u8| greetings.begin(IpAddr::from([10, 0, 0, last]));
        let mut first = from(1).unwrap();
        let second = from(1).unwrap();
        assert!(from(1).is_none(), "its share");
        let _third = from(2).unwrap();
        let mut fourth = from(3).unwrap();
        first.gone().await;
        assert!(from(1).is_some(), "the place of the one that went is free");
        drop(second);
        tokio::select! {
            biased;
            () = fourth.gone() => panic!("it is not the oldest"),
            () = std::future::ready(()) => {}
        }
        let mapped = "::ffff:10.0.0.3".parse().unwrap();
        let _fifth = greetings.begin(mapped).unwrap();
        assert!(from(3).is_none(), "the same address in other words");
    }
}
