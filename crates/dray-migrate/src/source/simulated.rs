//! A source's loop in a simulated host: no thread takes its inputs, and no socket carries its session.

use super::{End, Input, SourceLoop};
use std::ops::ControlFlow;
use std::sync::mpsc::Receiver;

impl SourceLoop {
    /// Takes every input that is there; none when the loop has ended.
    pub fn pump(mut self, inputs: &Receiver<Input>) -> Option<Self> {
        while let Ok(input) = inputs.try_recv() {
            match self.accept(input) {
                ControlFlow::Continue(()) => {}
                ControlFlow::Break(End::Stopped) => return None,
                ControlFlow::Break(End::Void(answer)) => {
                    let epoch = self.epoch();
                    drop(self);
                    let _ = answer.send(Ok(epoch));
                    return None;
                }
            }
        }
        Some(self)
    }

    /// Time has passed.
    pub fn tick_now(&mut self) {
        self.tick();
    }
}
