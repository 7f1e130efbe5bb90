//! How many threads of this host ask one peer at the same time. Each has a runtime and descriptors of its own, and waits
//! for a peer that says nothing.

use crate::error::{NetError, NetErrorKind};
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Threads that ask one peer at the same time. Others wait.
const AT_ONCE: usize = 16;
/// Who has waited for a turn does not ask a peer that was silent so recently: it would only wait again.
const SILENT: Duration = Duration::from_secs(5);

#[derive(Default)]
struct Asked {
    under_way: usize,
    waiting: usize,
    silent: Option<Instant>,
}

static ASKED: Mutex<Option<HashMap<String, Asked>>> = Mutex::new(None);
static ENDED: Condvar = Condvar::new();

/// A thread's turn, until it is dropped.
pub struct Turn(String);

/// Waits for a turn to ask the peer at `address`.
///
/// # Errors
/// `Timeout` when it had to wait, and the peer is silent.
pub fn turn(address: &str) -> Result<Turn, NetError> {
    let mut all = ASKED.lock();
    let mut has_waited = false;
    loop {
        let asked = all.get_or_insert_default().entry(address.to_owned()).or_default();
        if has_waited {
            asked.waiting -= 1;
            if asked.silent.is_some_and(|since| since.elapsed() < SILENT) {
                let what = "it has not answered others that asked just before";
                return Err(NetError::new(NetErrorKind::Timeout, what));
            }
        }
        if asked.under_way < AT_ONCE {
            asked.under_way += 1;
            return Ok(Turn(address.to_owned()));
        }
        asked.waiting += 1;
        has_waited = true;
        ENDED.wait(&mut all);
    }
}

impl Turn {
    /// What came of it: whether the peer was silent.
    pub fn heard<T>(&self, answer: &Result<T, NetError>) {
        let silent =
            |why: &NetError| matches!(why.kind, NetErrorKind::Timeout | NetErrorKind::Unreachable);
        let mut all = ASKED.lock();
        if let Some(asked) = all.get_or_insert_default().get_mut(&self.0) {
            asked.silent = answer.as_ref().err().filter(|why| silent(why)).map(|_| Instant::now());
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut all = ASKED.lock();
        let peers = all.get_or_insert_default();
        if let Some(asked) = peers.get_mut(&self.0) {
            asked.under_way -= 1;
        }
        peers.retain(|_, asked| asked.under_way + asked.waiting > 0);
        drop(all);
        ENDED.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    #[test]
    fn few_ask_a_silent_peer_and_the_rest_is_told_so() {
        const ADDRESS: &str = "192.0.2.1:1";
        let (asked, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let waiting = || ASKED.lock().as_ref().and_then(|all| Some(all.get(ADDRESS)?.waiting));
        std::thread::scope(|scope| {
            for _ in 0..4 * AT_ONCE {
                scope.spawn(|| {
                    let Ok(turn) = turn(ADDRESS) else {
                        refused.fetch_add(1, SeqCst);
                        return;
                    };
                    asked.fetch_add(1, SeqCst);
                    while waiting() < Some(3 * AT_ONCE) && refused.load(SeqCst) == 0 {
                        std::thread::yield_now();
                    }
                    let silent = Err::<(), _>(NetError::new(NetErrorKind::Timeout, "nothing"));
                    turn.heard(&silent);
                });
            }
        });
        assert_eq!((asked.into_inner(), refused.into_inner()), (AT_ONCE, 3 * AT_ONCE));
        assert!(turn(ADDRESS).is_ok(), "who need not wait asks");
    }
}
