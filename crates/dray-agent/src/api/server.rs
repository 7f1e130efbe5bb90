//! The agent's end of the local API: listens, reads one bounded request a connection, dispatches.

use super::rights::level_of;
use super::{AnswersAll, dispatch};
use dray_api::{API_VERSION, AccessLevel, ApiResult, Command, ErrorKind, Refusal, Request};
use dray_serve::socket::listen_at;
use serde::Serialize;
use serde_json::{Value, json};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc};

/// Longest request line: the largest sensible one names a few hundred images.
pub const MAX_REQUEST: u64 = 1 << 20;
/// Clients at a time; more wait in the listen queue. Far above what one host's operators need.
const MAX_CLIENTS: usize = 256;
/// Events a slow client may be behind before its watch waits for it.
const EVENT_QUEUE: usize = 64;
/// A client sends its request at once; one that does not is not kept for ever.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after the kernel could not accept: guests' connections may give descriptors back.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Read and write for root and the group, nothing for others.
const SOCKET_MODE: u32 = 0o660;

/// The number of the group called `name`; none where there is none such.
pub fn group_named(name: &str) -> Option<u32> {
    let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
    group_id(&groups, name)
}

/// The number of a group in the text of a group file.
fn group_id(groups: &str, name: &str) -> Option<u32> {
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok()).flatten()
    })
}

/// A listening socket; its file goes when this is dropped.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    path: PathBuf,
    level: AccessLevel,
}

impl Server {
    /// Binds `path`, replacing the socket of an agent that is gone. Besides root it is for `group`,
    /// whose members have `level`.
    ///
    /// # Errors
    /// `AddrInUse` when another agent answers there; whatever binding or setting the rights says.
    pub fn bind(path: &Path, group: Option<u32>, level: AccessLevel) -> io::Result<Self> {
        let listener = listen_at(path, SOCKET_MODE, group)?;
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        Ok(Self { listener, path: path.to_owned(), level })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Serves until the future is dropped, each connection in a task of its own. `may` decides what
    /// somebody with a level may ask.
    pub async fn serve<A: AnswersAll>(&self, agent: A, may: impl May) {
        let places = Arc::new(Semaphore::new(MAX_CLIENTS));
        // It ends when the semaphore is closed, which nobody does.
        while let Ok(place) = places.clone().acquire_owned().await {
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(why) => {
                    tracing::warn!(%why, "cannot accept an API client");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let (agent, may) = (agent.clone(), may.clone());
            let level = level_of(&stream, self.level);
            tokio::spawn(async move {
                let may = |command: &Command| may(command, level);
                if let Err(why) = answer(stream, &agent, may).await {
                    tracing::debug!(%why, "an API client has disconnected");
                }
                drop(place);
            });
        }
    }
}

/// Decides what somebody with a level may ask.
pub trait May: Fn(&Command, AccessLevel) -> ApiResult<()> + Clone + Send + Sync + 'static {}

impl<F: Fn(&Command, AccessLevel) -> ApiResult<()> + Clone + Send + Sync + 'static> May for F {}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(why) = std::fs::remove_file(&self.path) {
            tracing::debug!(%why, path = %self.path.display(), "the API socket was gone already");
        }
    }
}

/// One connection, from its request to its final line. A client that hangs up is noticed when an
/// event cannot be written, which ends the watch and nothing else: every other command, once begun,
/// is carried through.
async fn answer<A: AnswersAll>(
    stream: UnixStream,
    agent: &A,
    may: impl Fn(&Command) -> ApiResult<()>,
) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut read = BufReader::new(read);
    let mut line = Vec::new();
    let mut bounded = (&mut read).take(MAX_REQUEST + 1);
    match tokio::time::timeout(REQUEST_TIMEOUT, bounded.read_until(b'\n', &mut line)).await {
        Ok(outcome) => outcome?,
        Err(_) => return Err(io::ErrorKind::TimedOut.into()),
    };
    if line.is_empty() {
        return Ok(());
    }
    let command = match parse(&line).and_then(|command| may(&command).map(|()| command)) {
        Ok(command) => command,
        Err(error) => return send(&mut write, &json!({ "error": error })).await,
    };
    let (events, mut queue) = mpsc::channel(EVENT_QUEUE);
    let work = dispatch(agent, command, events);
    tokio::pin!(work);
    let outcome = loop {
        tokio::select! {
            biased;
            Some(event) = queue.recv() => send(&mut write, &event).await?,
            outcome = &mut work => break outcome,
        }
    };
    while let Ok(event) = queue.try_recv() {
        send(&mut write, &event).await?;
    }
    match outcome {
        Ok(result) => send(&mut write, &json!({ "result": result })).await,
        Err(error) => send(&mut write, &json!({ "error": error })).await,
    }
}

async fn send(write: &mut (impl AsyncWriteExt + Unpin), line: &impl Serialize) -> io::Result<()> {
    let mut bytes = serde_json::to_vec(line)?;
    bytes.push(b'\n');
    write.write_all(&bytes).await
}

fn parse(line: &[u8]) -> ApiResult<Command> {
    let what = "cannot read the request";
    if line.len() as u64 > MAX_REQUEST {
        let why = format!("it is longer than {MAX_REQUEST} bytes");
        return Err(Refusal::new(ErrorKind::Invalid, what, why));
    }
    let mut value: Value =
        serde_json::from_slice(line).map_err(|why| Refusal::new(ErrorKind::Invalid, what, why))?;
    let version = value.get("version").and_then(Value::as_u64);
    if version != Some(API_VERSION.into()) {
        let found = version.map_or("none".to_owned(), |version| version.to_string());
        let why = format!("its version is {found}, this agent speaks version {API_VERSION}");
        return Err(Refusal::new(ErrorKind::Unsupported, what, why)
            .hint("use the dray command and the agent of the same release"));
    }
    if let Some(name) = value["command"].as_str() {
        value["command"] = json!({ name: {} });
    }
    let request: Request =
        serde_json::from_value(value).map_err(|why| Refusal::new(ErrorKind::Invalid, what, why))?;
    Ok(request.command)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[tokio::test]
    async fn the_socket_is_for_root_and_one_group_and_goes_with_the_server() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let server = Server::bind(&path, None, AccessLevel::Operator).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o660);
        let again = Server::bind(&path, None, AccessLevel::Operator).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AddrInUse);
        drop(server);
        assert!(!path.exists());
    }

    #[test]
    fn groups_are_found_by_name() {
        let text = "root:x:0:\ndray:x:997:alice,bob\nbroken\nempty:x::\n";
        assert_eq!(group_id(text, "dray"), Some(997));
        assert_eq!(group_id(text, "root"), Some(0));
        for none in ["dra", "alice", "broken", "empty", ""] {
            assert_eq!(group_id(text, none), None, "{none}");
        }
    }
}
