//! A target's loop in a simulated host: no thread takes its inputs, and no socket carries its session.

use super::session::Session;
use super::{Input, TargetLoop, TargetSlot};
use dray_engine::TargetEvent;
use dray_net::{ControlSender, RunSink};
use dray_wire::ToSource;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

impl TargetSlot {
    /// A session has been made.
    pub fn simulated_session(&self, number: u64, control: ControlSender<ToSource>) {
        self.send(Input::SessionUp(Session::simulated(number, control, false)));
    }

    /// Where the data streams of a session deliver.
    pub fn simulated_stream(&self, number: u64) -> Arc<dyn RunSink> {
        self.sink.of_session(number)
    }
}

impl TargetLoop {
    /// Takes every input that is there; none when the loop has ended.
    pub fn pump(mut self, inputs: &Receiver<Input>) -> Option<Self> {
        while let Ok(input) = inputs.try_recv() {
            if matches!(input, Input::Stop) || !self.take(input) {
                self.end();
                return None;
            }
        }
        self.step(TargetEvent::Idle);
        Some(self)
    }

    /// Time has passed; none when the loop has ended.
    pub fn tick_now(mut self) -> Option<Self> {
        if self.tick() {
            return Some(self);
        }
        self.end();
        None
    }
}
