//! [`FrontEnd`]: a way by which clients come.

use std::time::Duration;

/// A way by which clients come to the images. It is open until it is shut.
pub trait FrontEnd: Send + Sync {
    /// Lets nobody in any more, finishes requests under way, and ends every connection. Those whose
    /// requests do not end within `grace` are cut; returns their number.
    ///
    /// What has not begun is dropped without an answer, and so is what fails from now on: a client would
    /// pass an error on to its guest, but what is not answered it sends again to the next agent.
    fn shut(&self, grace: Duration) -> usize;
}
