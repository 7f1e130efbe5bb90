//! The clock and the randomness that a repository uses, so that a simulation can give its own.

use crate::error::{Error, Result};
use std::time::{SystemTime, UNIX_EPOCH};

/// Where time and random numbers come from.
pub trait World: Send + Sync {
    /// Milliseconds since 1970. Nothing that must be safe depends on it.
    fn unix_ms(&self) -> u64;

    /// Fills `bytes` with random ones, fit for keys.
    ///
    /// # Errors
    /// The system has none to give.
    fn fill(&self, bytes: &mut [u8]) -> Result<()>;
}

/// The system's own.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemWorld;

impl World for SystemWorld {
    fn unix_ms(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }

    fn fill(&self, bytes: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            done +=
                rustix::rand::getrandom(&mut bytes[done..], rustix::rand::GetRandomFlags::empty())
                    .map_err(|e| Error::unavailable("no random numbers", e))?;
        }
        Ok(())
    }
}

/// A random 128-bit id.
pub(crate) fn random_id(world: &dyn World) -> Result<u128> {
    let mut bytes = [0; 16];
    world.fill(&mut bytes)?;
    Ok(u128::from_le_bytes(bytes))
}
