//! The client's end of the local API: one call a connection.

use dray_api::{API_VERSION, ApiResult, Ask, ErrorKind, Event, READERS_SOCKET, Refusal, Request};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io;
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

/// Longest line of an answer: a list of every image and migration of a host.
const MAX_ANSWER: u64 = 64 << 20;

/// Where an agent is asked.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
}

/// A command under way, which will be answered with an `A`.
#[derive(Debug)]
pub struct Call<A> {
    stream: BufReader<UnixStream>,
    /// The line being read; kept here so that `next` can be dropped and called again.
    line: Vec<u8>,
    answer: PhantomData<A>,
}

/// One line of an answer: an event, after which more lines follow (`Continue`), or the last line
/// (`Break`).
pub type Reply<A> = ControlFlow<A, Event>;

/// The last line as it is on the socket.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Last<A> {
    Result(A),
    Error(Refusal),
}

impl Client {
    /// A client of the agent that listens on `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    /// Sends a command.
    ///
    /// # Errors
    /// `AgentUnreachable` (or `Denied`) when nobody takes it.
    pub async fn start<C: Ask>(&self, command: C) -> ApiResult<Call<C::Answer>> {
        let mut stream = self.connect().await.map_err(|why| self.unreachable(&why))?;
        let request = Request { version: API_VERSION, command: command.into() };
        let mut line = serde_json::to_vec(&request)
            .map_err(|why| Refusal::new(ErrorKind::Internal, "cannot write the request", why))?;
        line.push(b'\n');
        stream.write_all(&line).await.map_err(|why| lost(&why))?;
        Ok(Call { stream: BufReader::new(stream), line: Vec::new(), answer: PhantomData })
    }

    /// Who may not use the agent's socket may perhaps use the one beside it for those who only look.
    async fn connect(&self) -> io::Result<UnixStream> {
        let denied = |why: &io::Error| why.kind() == io::ErrorKind::PermissionDenied;
        match UnixStream::connect(&self.socket).await {
            Err(why) if denied(&why) => {
                let readers = self.socket.with_file_name(READERS_SOCKET);
                UnixStream::connect(readers).await.map_err(|_| why)
            }
            connected => connected,
        }
    }

    /// Sends a command and waits for its result; events are passed over.
    ///
    /// # Errors
    /// The command's own error, or one of the connection.
    pub async fn call<C: Ask>(&self, command: C) -> ApiResult<C::Answer> {
        let mut call = self.start(command).await?;
        loop {
            if let Reply::Break(answer) = call.next().await? {
                return Ok(answer);
            }
        }
    }

    /// Who may use the socket, as far as this user can see.
    fn who_may(&self) -> String {
        let group = std::fs::metadata(&self.socket).ok().map(|meta| meta.gid());
        match group {
            Some(0) => "run this as root; `group` in the [agent] of dray.toml lets other users in"
                .to_owned(),
            Some(group) => {
                format!("run this as root, or as a member of the socket's group ({group})")
            }
            None => "run this as root, or as a member of the group that `group` in dray.toml names"
                .to_owned(),
        }
    }

    fn unreachable(&self, why: &io::Error) -> Refusal {
        let what = format!("cannot reach the agent on {}", self.socket.display());
        let why = match why.kind() {
            io::ErrorKind::PermissionDenied => {
                return Refusal::new(ErrorKind::Denied, what, "this user may not use its socket")
                    .hint(self.who_may());
            }
            io::ErrorKind::NotFound => "there is no such socket".to_owned(),
            io::ErrorKind::ConnectionRefused => "no agent is listening on it".to_owned(),
            _ => why.to_string(),
        };
        Refusal::new(ErrorKind::AgentUnreachable, what, why)
            .hint("start the agent (`dray agent`), or name its socket with --socket")
    }
}

impl<A: DeserializeOwned> Call<A> {
    /// The next line of the answer.
    ///
    /// # Errors
    /// The command's error, which is its last line, or one of the connection.
    pub async fn next(&mut self) -> ApiResult<Reply<A>> {
        let mut bounded = (&mut self.stream).take(MAX_ANSWER - self.line.len() as u64);
        bounded.read_until(b'\n', &mut self.line).await.map_err(|why| lost(&why))?;
        let line = std::mem::take(&mut self.line);
        if line.last() != Some(&b'\n') {
            return Err(lost(&"the agent closed the connection before its answer was complete"));
        }
        let value: Value = serde_json::from_slice(&line).map_err(|why| unreadable(&why))?;
        if value.get("event").is_some() {
            return serde_json::from_value(value)
                .map(Reply::Continue)
                .map_err(|why| unreadable(&why));
        }
        match serde_json::from_value(value).map_err(|why| unreadable(&why))? {
            Last::Result(answer) => Ok(Reply::Break(answer)),
            Last::Error(error) => Err(error),
        }
    }
}

fn lost(why: &dyn std::fmt::Display) -> Refusal {
    Refusal::new(ErrorKind::AgentUnreachable, "lost the connection to the agent", why)
        .hint("the agent continues its migrations when it runs again; see `dray status`")
}

fn unreadable(why: &dyn std::fmt::Display) -> Refusal {
    Refusal::new(ErrorKind::Unsupported, "cannot read the agent's answer", why)
        .hint("use the dray command and the agent of the same release")
}
