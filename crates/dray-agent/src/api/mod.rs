//! The agent's end of the local API: the agent implements [`Answers`] for each command of the
//! [table](dray_api::table), [`server`] listens and has them answered, [`rights`] says to whom. Nothing here knows how a
//! migration works.

pub mod rights;
pub mod server;

pub use server::{Server, group_named};

use dray_api::{ApiResult, Ask, Command, ErrorKind, Event, Refusal};
use serde::Serialize;
use serde_json::Value;
use std::future::Future;
use tokio::sync::mpsc;

/// Where a command sends its events. A send fails when the client has gone; what only tells the
/// client something should end then, a migration must not.
pub type Events = mpsc::Sender<Event>;

/// How the agent answers the command `C`.
pub trait Answers<C: Ask> {
    /// Does what is asked, or begins it. The future is dropped when an event cannot be sent because
    /// the client hung up; without events it runs to its end. What must go on all the same runs in
    /// a task of its own.
    fn answer(
        &self,
        command: C,
        events: Events,
    ) -> impl Future<Output = ApiResult<C::Answer>> + Send;
}

/// Makes of the table what all commands need together: [`AnswersAll`] and [`dispatch`].
macro_rules! dispatch {
    ($(
        $(#[$doc:meta])*
        $level:ident: $name:literal $command:ident -> $answer:ty $(, sends $($event:literal)+)?;
    )+) => {
        /// Answers every command of the table.
        pub trait AnswersAll:
            $(Answers<dray_api::$command> +)+ Clone + Send + Sync + 'static {}

        impl<A> AnswersAll for A where
            A: $(Answers<dray_api::$command> +)+ Clone + Send + Sync + 'static {}

        /// Has `agent` answer `command`, whichever it is.
        async fn dispatch<A: AnswersAll>(
            agent: &A,
            command: Command,
            events: Events,
        ) -> ApiResult<Value> {
            match command {
                $(Command::$command(command) => to_json(
                    Answers::<dray_api::$command>::answer(agent, command, events).await?,
                ),)+
            }
        }
    };
}

dray_api::commands!(dispatch);

fn to_json<T: Serialize>(answer: T) -> ApiResult<Value> {
    serde_json::to_value(answer)
        .map_err(|why| Refusal::new(ErrorKind::Internal, "cannot write the answer", why))
}
