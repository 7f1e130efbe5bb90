//! One question to another agent and its answer, on a stream of its own.

use crate::AGENT;
use crate::dial::{DialSettings, dial};
use crate::error::{NetError, NetErrorKind};
use crate::listen::Incoming;
use crate::stream::Stream;
use crate::tls::{self, Identity};
use dray_wire::request::{self, Reply, Request};
use dray_wire::{Hello, StreamKind};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::future::Future;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

/// Longest wait for a question once the stream was welcomed.
const QUESTION_LIMIT: Duration = Duration::from_secs(10);
/// Longest wait until the peer took its answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Asks `name` at `address` one thing. A refusal is an error of kind `Refused`.
///
/// # Errors
/// Those of [`dial`], and `Timeout` when the answer takes longer than `limit`.
pub async fn ask(
    identity: &Identity,
    name: &str,
    address: &str,
    request: &Request,
    limit: Duration,
) -> Result<Reply, NetError> {
    let hello = Hello {
        agent: AGENT.to_owned(),
        migration: None,
        session: 0,
        stream: 0,
        features: Vec::new(),
    };
    let settings = DialSettings::default();
    let mut stream = dial(identity, name, address, StreamKind::Request, &hello, &settings).await?;
    let exchange = async {
        write(&mut stream, request).await?;
        read::<Reply>(&mut stream).await
    };
    let reply = timeout(limit, exchange).await.unwrap_or_else(|_| {
        let what = format!("no answer within {} s", limit.as_secs());
        Err(NetError::new(NetErrorKind::Timeout, what))
    });
    match reply.map_err(|why| why.doing(format!("ask {name}")))? {
        Reply::Refused(why) => Err(NetError::refused(why).doing(format!("{name} refuses"))),
        reply => Ok(reply),
    }
}

/// Answers requests.
pub trait RequestHandler: Send + Sync {
    /// The answer to what `peer` asks.
    fn answer(&self, peer: &str, request: Request) -> impl Future<Output = Reply> + Send;
}

/// Welcomes a request stream, reads its question and writes the handler's answer.
///
/// # Errors
/// `Timeout`, `Broken` or `Protocol` when there was no question or nobody took the answer.
pub async fn serve(incoming: Incoming, handler: &impl RequestHandler) -> Result<(), NetError> {
    let mut stream = incoming.welcome(Vec::new()).await?;
    let late = |_| NetError::new(NetErrorKind::Timeout, "the peer took too long");
    let request = timeout(QUESTION_LIMIT, read::<Request>(&mut stream)).await.map_err(late)??;
    let peer = stream.peer().to_owned();
    let reply = handler.answer(&peer, request).await;
    timeout(ANSWER_LIMIT, async {
        write(&mut stream, &reply).await?;
        stream.tls.shutdown().await.map_err(|why| tls::translate(why, &peer))
    })
    .await
    .map_err(late)?
}

async fn write<T: Serialize>(stream: &mut Stream, message: &T) -> Result<(), NetError> {
    let bytes = request::encode(message)?;
    let write = async {
        stream.tls.write_all(&bytes).await?;
        stream.tls.flush().await
    };
    write.await.map_err(|why| tls::translate(why, &stream.peer))
}

async fn read<T: DeserializeOwned>(stream: &mut Stream) -> Result<T, NetError> {
    let broken = |why| tls::translate(why, "the peer");
    let mut len = [0; 4];
    stream.tls.read_exact(&mut len).await.map_err(broken)?;
    let mut body = vec![0; request::check_len(u32::from_le_bytes(len))?];
    stream.tls.read_exact(&mut body).await.map_err(broken)?;
    Ok(request::decode(&body)?)
}
