//! How fast the link to a peer is: bytes that say nothing, counted where they arrive.
//!
//! The stream carries chunks of [`CHUNK`] bytes. The first byte of each says what it is: [`WARMS`], until the
//! link has found its speed, [`COUNTS`], or [`ENDS`]. The answer is four numbers of eight bytes, little endian:
//! bytes and nanoseconds of the chunks that count, then bytes and nanoseconds of writing to a disk there, zeros
//! when that was not measured.

use crate::AGENT;
use crate::dial::{DialSettings, dial};
use crate::error::{NetError, NetErrorKind};
use crate::stream::Stream;
use crate::tls::{self, Identity};
use dray_wire::{Hello, StreamKind};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

const CHUNK: usize = 64 * 1024;
const ENDS: u8 = 0;
const WARMS: u8 = 1;
const COUNTS: u8 = 2;

/// How long chunks are sent that count. Before that, others are, for half as long.
const COUNTED: Duration = Duration::from_millis(200);
/// The longest that all of it may take, at either end.
const LIMIT: Duration = Duration::from_secs(10);
/// More bytes are not taken: what 100 Gbit/s carry in a second.
const MAX_BYTES: u64 = 12 << 30;

/// Bytes, and how long they took.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Speed {
    /// Bytes.
    pub bytes: u64,
    /// Nanoseconds.
    pub nanos: u64,
}

impl Speed {
    /// Bytes a second; none when nothing was measured.
    pub fn rate(self) -> Option<u64> {
        let rate = u128::from(self.bytes) * 1_000_000_000 / u128::from(self.nanos.max(1));
        u64::try_from(rate).ok().filter(|&rate| rate > 0)
    }
}

/// What a probe has measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Probed {
    /// Of the link, from here to there.
    pub link: Speed,
    /// Of writing to a disk there.
    pub disk: Speed,
}

/// Measures the link to `name` at `address`, which takes about half a second.
///
/// # Errors
/// Those of [`dial`], and `Timeout` or `Broken` when the peer does not answer.
pub async fn measure(identity: &Identity, name: &str, address: &str) -> Result<Probed, NetError> {
    let hello = Hello {
        agent: AGENT.to_owned(),
        migration: None,
        session: 0,
        stream: 0,
        features: Vec::new(),
    };
    let settings = DialSettings::default();
    let mut stream = dial(identity, name, address, StreamKind::Probe, &hello, &settings).await?;
    within(async {
        send(&mut stream).await?;
        let mut numbers = [0; 4];
        for number in &mut numbers {
            *number = stream.tls.read_u64_le().await?;
        }
        let [bytes, nanos, disk_bytes, disk_nanos] = numbers;
        Ok(Probed {
            link: Speed { bytes, nanos },
            disk: Speed { bytes: disk_bytes, nanos: disk_nanos },
        })
    })
    .await
    .map_err(|why| why.doing(format!("measure the link to {name}")))
}

async fn send(stream: &mut Stream) -> std::io::Result<()> {
    let mut chunk = vec![0x5a; CHUNK];
    for (kind, how_long) in [(WARMS, COUNTED / 2), (COUNTS, COUNTED)] {
        chunk[0] = kind;
        let end = Instant::now() + how_long;
        while Instant::now() < end {
            stream.tls.write_all(&chunk).await?;
        }
    }
    chunk[0] = ENDS;
    stream.tls.write_all(&chunk).await?;
    stream.tls.flush().await
}

/// Counts what the peer sends, asks `disk` how fast a disk here is, and answers.
///
/// # Errors
/// `Timeout`, `Broken`, or `Protocol` when the peer sends too much or something else.
pub async fn serve(mut stream: Stream, disk: impl Future<Output = Speed>) -> Result<(), NetError> {
    let link = within_limit(count(&mut stream)).await?;
    let disk = disk.await;
    within(async {
        for number in [link.bytes, link.nanos, disk.bytes, disk.nanos] {
            stream.tls.write_u64_le(number).await?;
        }
        stream.tls.shutdown().await
    })
    .await
}

async fn count(stream: &mut Stream) -> Result<Speed, NetError> {
    let mut chunk = vec![0; CHUNK];
    let (mut all, mut speed, mut began) = (0, Speed::default(), None);
    loop {
        let read = stream.tls.read_exact(&mut chunk).await;
        read.map_err(|why| tls::translate(why, "the peer"))?;
        all += CHUNK as u64;
        match (chunk[0], began) {
            (ENDS, _) => return Ok(speed),
            (WARMS, None) => {}
            // It may have waited here for the one before it.
            (COUNTS, None) => began = Some(Instant::now()),
            (COUNTS, Some(began)) => {
                speed.bytes += CHUNK as u64;
                speed.nanos = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            }
            _ => return Err(wrong("a chunk of a probe says what none says")),
        }
        if all > MAX_BYTES {
            return Err(wrong("a probe sends too much"));
        }
    }
}

fn wrong(what: &str) -> NetError {
    NetError::new(NetErrorKind::Protocol, what)
}

async fn within<T>(work: impl Future<Output = std::io::Result<T>>) -> Result<T, NetError> {
    within_limit(async { work.await.map_err(|why| tls::translate(why, "the peer")) }).await
}

async fn within_limit<T>(work: impl Future<Output = Result<T, NetError>>) -> Result<T, NetError> {
    timeout(LIMIT, work).await.unwrap_or_else(|_| {
        let what = format!("a probe takes longer than {} s", LIMIT.as_secs());
        Err(NetError::new(NetErrorKind::Timeout, what))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speed_is_a_rate_when_something_was_measured() {
        assert_eq!(Speed { bytes: 500, nanos: 250_000_000 }.rate(), Some(2000));
        assert_eq!(Speed::default().rate(), None);
        assert_eq!(Speed { bytes: 5, nanos: 0 }.rate(), Some(5_000_000_000));
        assert_eq!(Speed { bytes: u64::MAX, nanos: 1 }.rate(), None);
    }
}
