//! The sending end of a connection, shared by the connection's thread and its workers.

use crate::channel::Channel;
use parking_lot::Mutex;
use std::io::{self, IoSlice};
use std::sync::Arc;

/// Sends whole messages, one at a time.
pub(crate) struct Writer {
    channel: Arc<dyn Channel>,
    /// Whether an earlier message was cut short; nothing sensible can follow it.
    broken: Mutex<bool>,
}

impl Writer {
    pub(crate) fn new(channel: Arc<dyn Channel>) -> Self {
        Self { channel, broken: Mutex::new(false) }
    }

    /// Sends all of `parts` as one message.
    pub(crate) fn send(&self, parts: &mut [IoSlice<'_>]) -> io::Result<()> {
        self.compose(|channel| channel.send(parts))
    }

    /// Sends what `message` sends as one message; other senders wait. If it fails the connection is
    /// of no more use, and the client is told so by its end.
    pub(crate) fn compose(
        &self,
        message: impl FnOnce(&dyn Channel) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut broken = self.broken.lock();
        if *broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        // Also for a message that panics half way.
        *broken = true;
        let sent = message(&*self.channel);
        *broken = sent.is_err();
        sent
    }

    /// Ends the connection.
    pub(crate) fn cut(&self) {
        self.channel.cut();
    }
}
