//! Who waits for which reply.

use super::error::ClientError;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// What a request may be answered with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Asked {
    /// Nothing but its end.
    Done,
    /// Exactly `len` bytes from `offset`.
    Read { offset: u64, len: usize },
    /// Extents of the context with this number.
    Status { id: u32 },
}

/// What came.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Reply {
    /// Of a read, as long as asked for.
    pub(super) data: Vec<u8>,
    /// Of a status: length and flags.
    pub(super) extents: Vec<(u32, u32)>,
    /// How many bytes of `data` have come.
    pub(super) filled: usize,
    /// The server has said that it could not; the end of the reply may be still to come.
    pub(super) failed: Option<ClientError>,
}

#[derive(Debug)]
struct Request {
    asked: Asked,
    reply: Reply,
    result: Option<Result<(), ClientError>>,
}

#[derive(Default, Debug)]
struct State {
    requests: HashMap<u64, Request>,
    last_cookie: u64,
    broken: Option<ClientError>,
}

/// All requests under way.
#[derive(Default, Debug)]
pub(super) struct Waiting {
    state: Mutex<State>,
    news: Condvar,
}

impl Waiting {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(super) fn broken(&self) -> Option<ClientError> {
        self.state().broken.clone()
    }

    /// Registers a request before it is sent; returns its cookie.
    pub(super) fn expect(&self, asked: Asked) -> Result<u64, ClientError> {
        let mut state = self.state();
        if let Some(why) = &state.broken {
            return Err(why.clone());
        }
        state.last_cookie += 1;
        let data = match asked {
            Asked::Read { len, .. } => vec![0; len],
            _ => Vec::new(),
        };
        let reply = Reply { data, ..Reply::default() };
        let cookie = state.last_cookie;
        state.requests.insert(cookie, Request { asked, reply, result: None });
        Ok(cookie)
    }

    /// Waits for the reply to `cookie`, at most as long as `patience`.
    pub(super) fn wait(
        &self,
        cookie: u64,
        patience: Option<Duration>,
    ) -> Result<Reply, ClientError> {
        let until = patience.map(|patience| (Instant::now() + patience, patience));
        let mut state = self.state();
        loop {
            let broken = state.broken.clone();
            let request = state.requests.get_mut(&cookie).expect("a request waits once");
            if let Some(result) = request.result.take().or(broken.map(Err)) {
                let reply = std::mem::take(&mut request.reply);
                state.requests.remove(&cookie);
                return result.map(|()| reply);
            }
            match until {
                None => self.news.wait(&mut state),
                Some((until, patience)) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        state.requests.remove(&cookie);
                        return Err(ClientError::TooSlow(patience));
                    }
                    self.news.wait_for(&mut state, left);
                }
            }
        }
    }

    /// What was asked under `cookie`, if it has not been answered.
    pub(super) fn asked(&self, cookie: u64) -> Option<Asked> {
        let state = self.state();
        let request = state.requests.get(&cookie)?;
        request.result.is_none().then_some(request.asked)
    }

    /// Changes the reply to `cookie`; the caller has checked that somebody waits for it.
    pub(super) fn update(&self, cookie: u64, change: impl FnOnce(&mut Reply)) {
        if let Some(request) = self.state().requests.get_mut(&cookie) {
            change(&mut request.reply);
        }
    }

    /// The reply to `cookie` is complete.
    pub(super) fn done(&self, cookie: u64, result: Result<(), ClientError>) {
        let mut state = self.state();
        if let Some(request) = state.requests.get_mut(&cookie) {
            request.result = Some(result);
            self.news.notify_all();
        }
    }

    /// The connection has ended: everybody who waits, and who comes later, is told why. The first
    /// reason stays.
    pub(super) fn fail(&self, why: ClientError) {
        let mut state = self.state();
        state.broken.get_or_insert(why);
        self.news.notify_all();
    }
}
