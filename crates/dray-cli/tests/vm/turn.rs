//! Tests with emulated guests use a processor all the time, so that fewer of them run at a time than of those
//! that mostly wait.

use std::sync::{Condvar, Mutex, PoisonError};

static RUNNING: Mutex<usize> = Mutex::new(0);
static ONE_LESS: Condvar = Condvar::new();

/// The right to run, until it is dropped.
pub struct Turn(());

impl Turn {
    /// Waits until fewer than five of them run for two processors.
    pub fn wait() -> Self {
        let most = std::thread::available_parallelism().map_or(2, std::num::NonZero::get) * 5 / 2;
        let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        let mut running = ONE_LESS
            .wait_while(running, |running| *running >= most)
            .unwrap_or_else(PoisonError::into_inner);
        *running += 1;
        Self(())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *RUNNING.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        ONE_LESS.notify_one();
    }
}
