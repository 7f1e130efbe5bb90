//! A slow disk: every request of a kind takes at least so long.

use super::{Layer, Op, Request};
use crate::Result;
use std::collections::HashMap;
use std::thread;
use std::time::Duration;

/// A layer that holds requests up.
#[derive(Clone, Debug, Default)]
pub struct Delay {
    delays: HashMap<Op, Duration>,
}

impl Delay {
    /// No delays yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Holds requests of kind `op` up for `delay`.
    #[must_use]
    pub fn with(mut self, op: Op, delay: Duration) -> Self {
        self.delays.insert(op, delay);
        self
    }
}

impl Layer for Delay {
    fn before(&self, request: Request) -> Result<()> {
        if let Some(&delay) = self.delays.get(&request.op) {
            thread::sleep(delay);
        }
        Ok(())
    }
}
