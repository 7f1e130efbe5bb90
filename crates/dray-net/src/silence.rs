//! Noticing that a peer no longer confirms what it is sent.
//!
//! Where somebody on the way drops the packets of one connection, no probe of the kernel's helps:
//! it sends what is not confirmed again and again, for a quarter of an hour, and the streams beside it
//! go on. So it is looked how long the peer has confirmed nothing. A peer that is merely slow to
//! read confirms what it gets and lets no more be sent; that may take as long as it likes, which
//! is why this is not `TCP_USER_TIMEOUT`.

use crate::sockopt::{self, Confirmed};
use parking_lot::Mutex;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use std::time::{Duration, Instant};

/// How often is looked.
pub(crate) const LOOK: Duration = Duration::from_secs(1);
/// How long a peer may confirm nothing, where nobody says otherwise: five packets that are lost one
/// after the other.
const LIMIT: Duration = Duration::from_secs(10);

/// How long a peer may confirm nothing for a control stream that is down after `dead`. That one
/// notices a host that is gone, and comes first.
pub fn limit_for(dead: Duration) -> Duration {
    dead * 2
}

/// What is known of one connection.
#[derive(Debug)]
pub(crate) struct Silence {
    limit: Duration,
    /// Since when something has waited and nothing was confirmed.
    since: Mutex<Option<Instant>>,
}

impl Default for Silence {
    fn default() -> Self {
        Self::new(LIMIT)
    }
}

impl Silence {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, since: Mutex::new(None) }
    }

    /// Looks at the connection.
    ///
    /// # Errors
    /// `TimedOut` when the peer has confirmed nothing for too long.
    pub(crate) fn look(&self, socket: impl AsFd) -> io::Result<()> {
        self.note(sockopt::confirmed(socket)?, Instant::now())
    }

    fn note(&self, told: Confirmed, now: Instant) -> io::Result<()> {
        let mut known = self.since.lock();
        let heard = now.checked_sub(told.heard);
        let since = known.map_or(now, |since| heard.map_or(since, |at| at.max(since)));
        *known = told.waits.then_some(since);
        if !told.waits || now.duration_since(since) < self.limit {
            return Ok(());
        }
        let seconds = self.limit.as_secs_f32();
        let what = format!("the peer has confirmed nothing for {seconds} s");
        Err(io::Error::new(io::ErrorKind::TimedOut, what))
    }
}

/// Looks at a connection that tasks use.
pub(crate) struct Watch {
    socket: OwnedFd,
    silence: Silence,
}

impl Watch {
    /// Looks at what `socket` leads to, with the limit of `silence`.
    pub(crate) fn new(socket: impl AsFd, silence: &Silence) -> io::Result<Self> {
        let socket = socket.as_fd().try_clone_to_owned()?;
        Ok(Self { socket, silence: Silence::new(silence.limit) })
    }

    /// Returns when the peer has confirmed nothing for too long.
    pub(crate) async fn broken(self) -> io::Error {
        loop {
            tokio::time::sleep(LOOK).await;
            if let Err(why) = self.silence.look(&self.socket) {
                return why;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn told(waits: bool, heard: u32) -> Confirmed {
        Confirmed { waits, heard: SECOND * heard }
    }

    #[test]
    fn only_what_waits_unconfirmed_counts() {
        let (silence, start) = (Silence::new(SECOND * 10), Instant::now());
        let note = |after: u32, told| silence.note(told, start + SECOND * after).is_ok();
        // A connection that has long been quiet begins to count when something is sent.
        assert!(note(0, told(false, 1000)) && note(1, told(true, 1001)));
        assert!(note(10, told(true, 1010)));
        assert!(!note(11, told(true, 1011)));
        // A confirmation in between, or nothing left to confirm, and it begins anew.
        assert!(note(12, told(true, 1)) && note(20, told(true, 9)));
        assert!(!note(21, told(true, 10)));
        assert!(note(22, told(false, 11)) && note(23, told(true, 12)) && note(32, told(true, 21)));
        assert!(!note(33, told(true, 22)));
    }
}
