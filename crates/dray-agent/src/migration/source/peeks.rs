//! What a QEMU reads that opens a disk at the target before the handover.
//!
//! The owner loop waits for no disk: a thread of its own reads and answers, one question after the
//! other. It ends with the loop.

use super::content::Content;
use super::session::send;
use crate::net::ControlSender;
use dray_types::ImageIndex;
use dray_wire::ToTarget;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

/// Questions that wait. A QEMU asks one at a time while it opens its disks; a target asks again what
/// an earlier session has left unanswered.
const WAITING: usize = 1024;

/// One question, and the way of its answer.
pub struct Question {
    /// Its number at the target.
    pub tag: u64,
    /// The image.
    pub image: ImageIndex,
    /// Where it is to be read, in bytes.
    pub offset: u64,
    /// How many bytes.
    pub len: u32,
    /// The session in which it was asked; an answer in a later one says nothing to the target.
    pub control: Option<ControlSender<ToTarget>>,
}

impl Question {
    fn answer(&self, data: Result<Vec<u8>, String>) {
        send(self.control.as_ref(), ToTarget::Peeked { tag: self.tag, data });
    }
}

/// The thread that answers, once there was a question.
pub struct Peeks {
    content: Arc<Content>,
    thread: Option<SyncSender<Question>>,
}

impl Peeks {
    /// Answers from `content`.
    pub fn new(content: Arc<Content>) -> Self {
        Self { content, thread: None }
    }

    /// Has a question answered; does not wait.
    pub fn ask(&mut self, question: Question) {
        let thread = match &self.thread {
            Some(thread) => thread,
            None => match self.begin() {
                Ok(thread) => self.thread.insert(thread),
                Err(why) => return question.answer(Err(why.to_string())),
            },
        };
        if let Err(TrySendError::Full(question) | TrySendError::Disconnected(question)) =
            thread.try_send(question)
        {
            question.answer(Err("the source has too many questions to answer".to_owned()));
        }
    }

    fn begin(&self) -> std::io::Result<SyncSender<Question>> {
        let (thread, questions) = sync_channel::<Question>(WAITING);
        let content = Arc::clone(&self.content);
        std::thread::Builder::new().name("dray-peeks".to_owned()).spawn(move || {
            for asked in questions {
                asked.answer(content.peek(asked.image, asked.offset, asked.len));
            }
        })?;
        Ok(thread)
    }
}
