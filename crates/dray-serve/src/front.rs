//! [`FrontEnd`]: a way by which clients come, and [`FrontEnds`]: all of them.

use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// A way by which clients come to the images. It is open until it is shut.
pub trait FrontEnd: Send + Sync {
    /// Lets nobody in any more, finishes requests under way, and ends every connection. Those whose
    /// requests do not end within `grace` are cut; returns their number.
    ///
    /// What has not begun is dropped without an answer, and so is what fails from now on: a client would
    /// pass an error on to its guest, but what is not answered it sends again to the next agent.
    fn shut(&self, grace: Duration) -> usize;

    /// Ends the connections of clients that may not do any more what they do, as [`shut`](Self::shut) does. To be called
    /// when somebody has lost a right.
    fn look_again(&self, _grace: Duration) -> usize {
        0
    }
}

/// All of them. Clones are the same ones.
#[derive(Clone, Default)]
pub struct FrontEnds(Arc<Mutex<Vec<Arc<dyn FrontEnd>>>>);

impl FrontEnds {
    /// Another one is open.
    pub fn open(&self, one: impl FrontEnd + 'static) {
        self.0.lock().push(Arc::new(one));
    }

    /// Ends every connection.
    pub fn end(&self, grace: Duration) {
        for one in std::mem::take(&mut *self.0.lock()) {
            one.shut(grace);
        }
    }

    /// Ends the connections of clients that may not do any more what they do.
    pub fn look_again(&self, grace: Duration) {
        let all = self.0.lock().clone();
        for one in all {
            one.look_again(grace);
        }
    }
}
