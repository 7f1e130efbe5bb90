//! Whether to look for the next request a little longer before going to sleep.
//!
//! A client that sends one request at a time sends the next within microseconds of a reply. Sleeping
//! until then costs a wake-up, which takes longer than the request itself (most of all in a virtual
//! machine, where an idle processor must be woken by the hypervisor). So the receiver looks on for
//! about as long as a wake-up would have cost it, yielding to any thread that has work; and when
//! that was for nothing it does so ever more rarely.

use crate::limits::{MAX_LOOKS_SKIPPED, PATIENCE};
use std::thread;
use std::time::Instant;

/// How patient to be with this client.
#[derive(Default)]
pub(crate) struct Patience {
    /// Times in a row that looking on was for nothing.
    in_vain: u32,
    /// Times to sleep at once before looking on again.
    skip: u32,
}

impl Patience {
    /// Calls `look` until it finds something or it is time to sleep.
    pub(crate) fn look_for<T, E>(
        &mut self,
        mut look: impl FnMut() -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        if self.skip > 0 {
            self.skip -= 1;
            return Ok(None);
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = look()? {
                self.in_vain = 0;
                return Ok(Some(found));
            }
            if Instant::now() >= deadline {
                self.in_vain += 1;
                self.skip = 1u32.checked_shl(self.in_vain).unwrap_or(u32::MAX);
                self.skip = self.skip.min(MAX_LOOKS_SKIPPED);
                return Ok(None);
            }
            thread::yield_now();
        }
    }
}
