//! The local API: the requests of the `dray` command (or another program) to the agent on its own
//! host, and the answers. This crate has only the types; the agent has the server, and `dray-cli`
//! the client.
//!
//! One request per connection over a unix socket, as lines of JSON: the client sends
//! `{"version":1,"command":{…}}`, the agent answers with any number of `{"event":…}` lines and ends
//! with exactly one `{"result":…}` or `{"error":…}` line. [`command`] lists the commands. The types are the
//! public interface, described in `docs/reference/api.md`; a change that old clients would misread raises [`API_VERSION`].

pub mod access_level;
pub mod backup;
pub mod batch;
pub mod command;
pub mod generation;
pub mod lineage;
pub mod options;
pub mod peers;
pub mod plan;
pub mod probe;
pub mod progress;
pub mod record;
pub mod reload;
pub mod report;
pub mod seed;
pub mod table;
pub mod text;
pub mod trouble;
pub mod tuning;
pub mod verified;

pub use access_level::AccessLevel;
pub use backup::*;
pub use batch::*;
pub use command::*;
pub use dray_types::{ErrorKind, Refusal, Strategy};
pub use generation::GenerationStatus;
pub use lineage::*;
pub use options::{HotSet, Order, Throttle, Tuning};
pub use peers::*;
pub use plan::*;
pub use probe::*;
pub use progress::*;
pub use record::*;
pub use reload::*;
pub use report::*;
pub use seed::*;
pub use table::*;
pub use trouble::Trouble;
pub use verified::{Compared, Verified};

/// Version of the JSON interface. The agent refuses requests of any other version.
pub const API_VERSION: u32 = 1;

/// Where the agent listens unless its configuration says otherwise.
pub const DEFAULT_SOCKET: &str = "/run/dray/api.sock";

/// Name of the socket beside it for those who may only look.
pub const READERS_SOCKET: &str = "api-read.sock";

/// Result of an API command.
pub type ApiResult<T> = std::result::Result<T, Refusal>;

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    /// The JSON examples of the interface's document.
    fn examples() -> Vec<Value> {
        let mut inside = false;
        let mut found = Vec::new();
        for line in include_str!("../../../docs/reference/api.md").lines() {
            if line.starts_with("```") {
                inside = line == "```json";
            } else if inside {
                found
                    .push(serde_json::from_str(line).unwrap_or_else(|why| panic!("{why}: {line}")));
            }
        }
        found
    }

    /// The example, read as a `T` and written again, is what it was: no field too many or too few.
    #[track_caller]
    fn round_trips<T: serde::Serialize + serde::de::DeserializeOwned>(example: &Value) {
        let read: T = serde_json::from_value(example.clone()).unwrap();
        assert_eq!(&serde_json::to_value(read).unwrap(), example);
    }

    /// Makes [`check_answer`] of the table of commands.
    macro_rules! answers {
        ($(
            $(#[$doc:meta])*
            $level:ident: $name:literal $command:ident -> $answer:ty $(, sends $($event:literal)+)?;
        )+) => {
            /// Checks an answer of the command that has this name.
            #[track_caller]
            fn check_answer(name: &str, example: &Value) {
                match name {
                    $($name => round_trips::<$answer>(example),)+
                    _ => panic!("there is no command {name}"),
                }
            }
        };
    }
    crate::commands!(answers);

    /// An answer follows its request: the fake agent of the command line's tests gives it.
    #[test]
    fn the_document_shows_what_the_types_are() {
        let mut kinds = std::collections::BTreeSet::new();
        let mut asked = String::new();
        for example in examples() {
            let kind = ["version", "event", "error", "result"]
                .into_iter()
                .find(|kind| example.get(kind).is_some())
                .unwrap();
            kinds.insert(kind);
            let content = &example[kind];
            match kind {
                // Requests leave defaults out, so that they are only read.
                "version" => {
                    asked = example["command"].as_object().unwrap().keys().next().unwrap().clone();
                    drop(serde_json::from_value::<Request>(example).unwrap());
                }
                "event" => round_trips::<Event>(&example),
                "error" => round_trips::<Refusal>(content),
                _ => check_answer(&asked, content),
            }
        }
        assert_eq!(kinds.len(), 4, "{kinds:?}");
    }

    #[test]
    fn the_document_names_every_command_and_who_sends_which_event() {
        let text = include_str!("../../../docs/reference/api.md");
        for (name, events) in Command::ALL {
            let row = format!("\n| `{name}`");
            let heading = format!("\n### {name}\n");
            assert!(text.contains(&row) || text.contains(&heading), "{name} is not in api.md");
            for event in *events {
                let row = format!("| `{event}` | ");
                // A command may have the name of its event, and a row of its own.
                let mut rows =
                    text.lines().filter_map(|line| line.strip_prefix(&*row)?.split('|').next());
                let is_sender = |senders: &str| senders.contains(&format!("`{name}`"));
                assert!(rows.any(is_sender), "{event} of {name}");
            }
        }
    }

    #[test]
    fn the_document_lists_every_kind_of_error() {
        let text = include_str!("../../../docs/reference/api.md");
        for kind in ErrorKind::ALL {
            let name = serde_json::to_value(kind).unwrap();
            let cell = format!("| `{}` |", name.as_str().unwrap());
            assert!(text.contains(&cell), "{cell}");
        }
    }
}
