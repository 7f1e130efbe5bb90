//! Events as lines of JSON, as the agent sent them.

use super::{Display, End};
use crate::output::Output;
use dray_api::Event;

/// Prints every event.
pub struct Json {
    output: Output,
}

impl Json {
    /// On standard output.
    pub fn new(output: Output) -> Self {
        Self { output }
    }
}

impl Display for Json {
    fn event(&mut self, event: &Event) {
        self.output.json_line(event);
    }

    fn end(&mut self, _: End) {}
}
