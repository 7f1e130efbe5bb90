//! Tab completion: options and commands, and the names that the agent on this host knows. The shell asks this program
//! each time, so that the names are those of the moment.

use crate::client::Client;
use crate::show::status::short;
use clap::{Arg, Command};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use dray_api::{Ask, Backups, DEFAULT_SOCKET, Images, Info, MigrationStatus, Status};
use std::ffi::OsStr;
use std::time::Duration;

/// Longest wait for the agent: somebody has pressed a key.
const PATIENCE: Duration = Duration::from_secs(1);

/// The names that fit what was typed so far.
type Names = fn(&OsStr) -> Vec<CompletionCandidate>;

/// The command with completers wherever an argument is a name that the agent knows.
pub fn with_names(command: Command) -> Command {
    let named = |arg: Arg| match names_for(&arg) {
        Some(names) => arg.add(ArgValueCompleter::new(names)),
        None => arg,
    };
    command.mut_args(named).mut_subcommands(with_names)
}

/// What an argument's placeholder in the help says that it is.
fn names_for(arg: &Arg) -> Option<Names> {
    let image_option = arg.get_long() == Some("image");
    match arg.get_value_names()?.first()?.as_str() {
        "HOST" => Some(peers),
        "IMAGE" | "IMAGE[@GENERATION]" => Some(images),
        "NAME" if image_option => Some(images),
        "MIGRATION" => Some(migrations),
        "URL|NAME" => Some(repositories),
        _ => None,
    }
}

fn peers(typed: &OsStr) -> Vec<CompletionCandidate> {
    let peers = ask(Info {}).map(|info| info.peers).unwrap_or_default();
    fitting(typed, peers.into_iter().map(|peer| (peer, String::new())))
}

fn images(typed: &OsStr) -> Vec<CompletionCandidate> {
    let images = ask(Images {}).unwrap_or_default();
    fitting(typed, images.into_iter().map(|image| (image.name, String::new())))
}

fn migrations(typed: &OsStr) -> Vec<CompletionCandidate> {
    let migrations = ask(Status::default()).unwrap_or_default();
    let shown = |one: MigrationStatus| {
        let moves = format!("{}, {}", one.moves(), one.peer);
        (short(one.migration), moves)
    };
    fitting(typed, migrations.into_iter().map(shown))
}

fn repositories(typed: &OsStr) -> Vec<CompletionCandidate> {
    let known = ask(Backups { repository: None, image: None });
    let places = known.map(|known| known.destinations).unwrap_or_default();
    fitting(typed, places.into_iter().map(|place| (place.name, place.url)))
}

/// Those names that begin with what was typed, with a word on each.
fn fitting(
    typed: &OsStr,
    names: impl Iterator<Item = (String, String)>,
) -> Vec<CompletionCandidate> {
    let typed = typed.to_string_lossy();
    let fitting = names.filter(|(name, _)| name.starts_with(&*typed));
    let shown = |(name, help): (String, String)| {
        CompletionCandidate::new(name).help((!help.is_empty()).then(|| help.into()))
    };
    fitting.map(shown).collect()
}

/// What the agent answers, if it does so at once.
fn ask<C: Ask>(command: C) -> Option<C::Answer> {
    let socket = std::env::var_os("DRAY_SOCKET").unwrap_or_else(|| DEFAULT_SOCKET.into());
    let client = Client::new(socket);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let answer = async { tokio::time::timeout(PATIENCE, client.call(command)).await };
    runtime.block_on(answer).ok()?.ok()
}
