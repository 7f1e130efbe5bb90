//! Answers requests of the target other than for blocks of the copy: reads of a QEMU that opens a
//! disk there before the handover, and hashes for verification.
//!
//! The owner loop waits for no disk: a thread for each of the two reads and answers, one question
//! after the other. It ends with the loop. How many questions wait is bounded (I7).

use super::content::Content;
use super::session::send;
use dray_net::{ControlSender, NetError, NetErrorKind};
use dray_types::{BlockRange, ImageIndex, Why};
use dray_wire::ToTarget;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

/// Peeks that wait. A QEMU asks one at a time while it opens its disks; a target asks again what
/// an earlier session has left unanswered.
const PEEKS: usize = 1024;
/// Questions for hashes that wait, up to 1 MiB each. A target asks the next one when it has been
/// answered, and once more after a lost session.
const HASHES: usize = 8;

/// What is asked for.
pub enum Wanted {
    /// Bytes of an image.
    Bytes {
        /// Where, in bytes.
        offset: u64,
        /// Number of bytes.
        len: u32,
    },
    /// A hash of each range.
    Hashes(Vec<BlockRange>),
}

/// One question, and the way of its answer.
pub struct Question {
    /// Its number at the target.
    pub tag: u64,
    /// The image.
    pub image: ImageIndex,
    /// What is asked for.
    pub wanted: Wanted,
    /// The session in which it was asked; an answer in a later one says nothing to the target.
    pub control: Option<ControlSender<ToTarget>>,
}

impl Question {
    fn answer(&self, content: &Content) {
        let tag = self.tag;
        let answer = match &self.wanted {
            Wanted::Bytes { offset, len } => {
                let data = content.peek(self.image, *offset, *len).map_err(Why::of);
                ToTarget::Peeked { tag, data }
            }
            // A disk error is answered by no hashes, which compare as different.
            Wanted::Hashes(ranges) => {
                let hashes = content.hash(self.image, ranges).unwrap_or_default();
                ToTarget::Hashed { tag, hashes }
            }
        };
        send(self.control.as_ref(), answer);
    }
}

/// The threads that answer, each once there was a question for it.
pub struct SideRequests {
    content: Arc<Content>,
    peeks: Option<SyncSender<Question>>,
    hashes: Option<SyncSender<Question>>,
}

impl SideRequests {
    /// Answers from `content`.
    pub fn new(content: Arc<Content>) -> Self {
        Self { content, peeks: None, hashes: None }
    }

    /// Has a question answered; does not wait.
    ///
    /// # Errors
    /// Why it is not: no honest target asks so much, and this one must not be listened to.
    pub fn ask(&mut self, question: Question) -> Result<(), NetError> {
        let (thread, name, limit) = match question.wanted {
            Wanted::Bytes { .. } => (&mut self.peeks, "dray-peeks", PEEKS),
            Wanted::Hashes(_) => (&mut self.hashes, "dray-hashes", HASHES),
        };
        let thread = match thread {
            Some(thread) => thread,
            None => thread.insert(begin(&self.content, name, limit)?),
        };
        thread.try_send(question).map_err(|why| match why {
            TrySendError::Full(_) => {
                let why = "the target has too many unanswered questions";
                NetError::new(NetErrorKind::Protocol, why)
            }
            TrySendError::Disconnected(_) => local(format!("{name} has ended")),
        })
    }
}

fn local(why: String) -> NetError {
    NetError::new(NetErrorKind::Local, why)
}

fn begin(
    content: &Arc<Content>,
    name: &str,
    limit: usize,
) -> Result<SyncSender<Question>, NetError> {
    let (thread, questions) = sync_channel::<Question>(limit);
    let content = Arc::clone(content);
    let work = move || questions.iter().for_each(|asked| asked.answer(&content));
    let begun = std::thread::Builder::new().name(name.to_owned()).spawn(work);
    begun.map_err(|why| local(format!("start a thread: {why}")))?;
    Ok(thread)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_image::layers::{Delay, Layered, Op};
    use dray_image::{FileImage, FileOptions};
    use std::time::Duration;

    fn hashes(tag: u64) -> Question {
        let wanted = Wanted::Hashes(vec![BlockRange::new(0, 1)]);
        Question { tag, image: ImageIndex(0), wanted, control: None }
    }

    #[test]
    fn a_target_that_asks_for_hashes_without_end_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        std::fs::write(&path, vec![1; 4096]).unwrap();
        let file = FileImage::open(&path, FileOptions::default()).unwrap();
        // As good as for ever: no question is answered while the test runs.
        let slow = Delay::new().with(Op::Read, Duration::from_secs(3600));
        let mut asides =
            SideRequests::new(Content::new(vec![Arc::new(Layered::new(Arc::new(file), slow))]));
        let taken = (0..1000).take_while(|&tag| asides.ask(hashes(tag)).is_ok()).count();
        // One may have been begun.
        assert!(taken == HASHES || taken == HASHES + 1, "{taken}");
        let peek = Wanted::Bytes { offset: 0, len: 512 };
        let peek = Question { wanted: peek, ..hashes(1) };
        assert_eq!(asides.ask(peek), Ok(()), "what a QEMU reads has a thread of its own");
    }
}
