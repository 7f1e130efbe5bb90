//! A recording of the requests an image got.

use super::{Layer, Request};
use crate::Result;
use parking_lot::{Mutex, MutexGuard};

/// Requests remembered unless asked otherwise: an hour of a busy guest's writes, 32 MiB.
const DEFAULT_LIMIT: usize = 1 << 20;

/// A layer that remembers requests in the order in which they came.
#[derive(Debug)]
pub struct Recording {
    limit: usize,
    requests: Mutex<(Vec<Request>, u64)>,
}

impl Default for Recording {
    fn default() -> Self {
        Self::new(DEFAULT_LIMIT)
    }
}

impl Recording {
    /// Remembers the first `limit` requests and counts the others.
    pub fn new(limit: usize) -> Self {
        Self { limit, requests: Mutex::new((Vec::new(), 0)) }
    }

    fn lock(&self) -> MutexGuard<'_, (Vec<Request>, u64)> {
        self.requests.lock()
    }

    /// Hands out what was recorded and begins anew.
    pub fn take(&self) -> Vec<Request> {
        std::mem::take(&mut *self.lock()).0
    }

    /// Requests that came when the recording was full.
    pub fn dropped(&self) -> u64 {
        self.lock().1
    }
}

impl Layer for Recording {
    fn before(&self, request: Request) -> Result<()> {
        let mut requests = self.lock();
        if requests.0.len() < self.limit {
            requests.0.push(request);
        } else {
            requests.1 += 1;
        }
        Ok(())
    }
}
