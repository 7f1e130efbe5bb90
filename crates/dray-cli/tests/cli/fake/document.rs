//! The answers that the interface's document shows: `docs/reference/api.md`.

use dray_api::Event;
use serde_json::Value;

/// The events and the answer that the document shows after a request of this command, in the same
/// block of JSON.
pub fn answer(command: &str) -> (Vec<Event>, Value) {
    let text = include_str!("../../../../../docs/reference/api.md");
    let (mut asked, mut events) = (false, Vec::new());
    for line in text.lines() {
        let Ok(mut line) = serde_json::from_str::<Value>(line) else {
            asked = false;
            continue;
        };
        if let Some(request) = line.get("command") {
            asked = request.get(command).is_some();
            events.clear();
        } else if asked && line.get("event").is_some() {
            events.push(serde_json::from_value(line).expect("an event"));
        } else if asked && line.get("result").is_some() {
            return (events, line["result"].take());
        }
    }
    panic!("docs/reference/api.md has no example of {command} with its answer: write one");
}
