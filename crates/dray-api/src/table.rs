//! What is made of the table of commands, which is in [`command`]: [`Command`] and
//! [`Ask`] here, the dispatch in the agent (`dray-agent/api/mod.rs`), and the lists of the tests.

use super::*;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// A command: a type with its fields, its name, its answer and its events. Each row of the table
/// implements it.
pub trait Ask: Into<Command> + Serialize + Send + 'static {
    /// What it is called in the JSON.
    const NAME: &'static str;
    /// The events that come before the answer, by their names in the JSON.
    const EVENTS: &'static [&'static str];
    /// What it is answered with.
    type Answer: Serialize + DeserializeOwned + Send + 'static;
}

/// Makes [`Command`], a variant a row, and implements [`Ask`] for the type of each row.
macro_rules! define {
    ($(
        $(#[$doc:meta])*
        $level:ident: $name:literal $command:ident -> $answer:ty $(, sends $($event:literal)+)?;
    )+) => {
        /// Any command, as it is on the socket: `{"limit":{…}}`.
        #[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
        pub enum Command {
            $(
                $(#[$doc])*
                #[serde(rename = $name)]
                $command($command),
            )+
        }

        impl Command {
            /// Every command by its name, with its events.
            pub const ALL: &'static [(&'static str, &'static [&'static str])] =
                &[$(($name, <$command as Ask>::EVENTS)),+];

            /// The least level of access that may give it.
            pub fn level(&self) -> AccessLevel {
                match self {
                    $(Self::$command(_) => AccessLevel::$level,)+
                }
            }
        }

        $(
            impl Ask for $command {
                const NAME: &'static str = $name;
                const EVENTS: &'static [&'static str] = &[$($($event),+)?];
                type Answer = $answer;
            }

            impl From<$command> for Command {
                fn from(command: $command) -> Self {
                    Self::$command(command)
                }
            }
        )+
    };
}

crate::commands!(define);

/// One line from a client.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// [`API_VERSION`] of the client.
    pub version: u32,
    /// The command.
    pub command: Command,
}
