//! Guest memory: a unix socket at each end, one stream between the agents, bytes as they come.
//!
//! Each QEMU talks to its own agent. Both directions are carried, and the end of each is passed on
//! by itself: the target's QEMU takes the end of the stream for the end of the guest's memory.

use crate::error::{NetError, NetErrorKind};
use crate::pace::Pacer;
use crate::stats::NetStats;
use crate::stream::Stream;
use crate::tls;
use std::future::Future;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

/// Bytes carried at once: large enough for few TLS records, small enough that the budget is
/// shared evenly and little is under way when the guest stops.
const PIECE: usize = 64 * 1024;

/// What a tunnel carried, as QEMU wrote it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TunnelReport {
    /// From the local QEMU to the peer's.
    pub sent: u64,
    /// From the peer's QEMU to the local one.
    pub received: u64,
}

/// The source's end: a unix socket that waits for QEMU's outgoing migration.
#[derive(Debug)]
pub struct TunnelEntry {
    listener: UnixListener,
    path: PathBuf,
}

impl Drop for TunnelEntry {
    fn drop(&mut self) {
        // Gone already when the directory was cleaned up.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl TunnelEntry {
    /// Makes the socket, for `user` only, or for the agent's own; a left-over of an earlier run is
    /// replaced. Nobody else may write to its directory.
    ///
    /// # Errors
    /// `Local` when the path cannot be bound.
    pub fn bind(path: &Path, user: Option<u32>) -> Result<Self, NetError> {
        let local = |why: std::io::Error| {
            let what = format!("make the memory socket {}: {why}", path.display());
            NetError::new(NetErrorKind::Local, what)
        };
        match std::fs::remove_file(path) {
            Err(why) if why.kind() != std::io::ErrorKind::NotFound => return Err(local(why)),
            _ => {}
        }
        let listener = UnixListener::bind(path).map_err(local)?;
        let entry = Self { listener, path: path.to_owned() };
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(local)?;
        if let Some(user) = user.filter(|user| *user != rustix::process::geteuid().as_raw()) {
            std::os::unix::fs::lchown(path, Some(user), None).map_err(local)?;
        }
        Ok(entry)
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for QEMU, which `is_it` knows by its process, opens the stream to the peer with `dial`, and
    /// carries until both directions have ended. QEMU's bytes wait for the budget.
    ///
    /// # Errors
    /// Those of `dial`; `Broken` when either side broke; `Local` for QEMU's socket.
    pub async fn carry(
        self,
        is_it: impl Fn(i32) -> bool,
        dial: impl Future<Output = Result<Stream, NetError>>,
        pacer: &Pacer,
        stats: &Arc<NetStats>,
    ) -> Result<TunnelReport, NetError> {
        let local = |why| NetError::new(NetErrorKind::Local, format!("memory socket: {why}"));
        let qemu = loop {
            let (client, _) = self.listener.accept().await.map_err(local)?;
            let pid = client.peer_cred().ok().and_then(|peer| peer.pid()).unwrap_or_default();
            if is_it(pid) {
                break client;
            }
            tracing::warn!(pid, "another process came to a guest's memory socket");
        };
        drop(self);
        carry(qemu, dial.await?, Some(pacer), stats).await
    }
}

/// The target's end: carries between the stream and the incoming QEMU, whose connection is `qemu`, until
/// both directions have ended.
///
/// # Errors
/// `Local` when QEMU does not listen; `Broken` when either side broke.
pub async fn deliver(
    stream: Stream,
    qemu: io::Result<UnixStream>,
    stats: &Arc<NetStats>,
) -> Result<TunnelReport, NetError> {
    let qemu = qemu.map_err(|why| {
        let what = format!("connect to the incoming QEMU: {why}");
        NetError::new(NetErrorKind::Local, what).hint("start it with '-incoming unix:…' or 'defer'")
    })?;
    carry(qemu, stream, None, stats).await
}

/// Carries both directions between a connected QEMU and a stream.
///
/// # Errors
/// `Broken` when either side broke, or the peer no longer confirms what it is sent.
pub async fn carry(
    mut qemu: UnixStream,
    mut stream: Stream,
    pacer: Option<&Pacer>,
    stats: &Arc<NetStats>,
) -> Result<TunnelReport, NetError> {
    stream.count_into(stats);
    let watch = stream.watch()?;
    let peer = stream.peer;
    let (mut from_peer, mut to_peer) = tokio::io::split(stream.tls);
    let (mut from_qemu, mut to_qemu) = qemu.split();
    let broken_qemu = |why| NetError::new(NetErrorKind::Local, format!("QEMU's memory: {why}"));
    let broken_peer = |why| tls::translate(why, &peer);
    let both = async {
        tokio::try_join!(
            copy(&mut from_qemu, broken_qemu, &mut to_peer, broken_peer, pacer, stats),
            copy(&mut from_peer, broken_peer, &mut to_qemu, broken_qemu, None, stats),
        )
    };
    let carried = tokio::select! {
        carried = both => carried,
        why = watch.broken() => Err(broken_peer(why)),
    };
    let (sent, received) = carried.map_err(|why| why.doing("memory stream"))?;
    Ok(TunnelReport { sent, received })
}

/// Copies to the end, then ends the other side's direction.
async fn copy(
    from: &mut (impl AsyncRead + Unpin),
    read_failed: impl Fn(std::io::Error) -> NetError,
    to: &mut (impl AsyncWrite + Unpin),
    write_failed: impl Fn(std::io::Error) -> NetError,
    pacer: Option<&Pacer>,
    stats: &NetStats,
) -> Result<u64, NetError> {
    let mut piece = vec![0; PIECE];
    let mut total = 0;
    loop {
        let count = from.read(&mut piece).await.map_err(&read_failed)?;
        if count == 0 {
            break;
        }
        if let Some(pacer) = pacer {
            pacer.take_async(count as u64).await;
        }
        to.write_all(&piece[..count]).await.map_err(&write_failed)?;
        to.flush().await.map_err(&write_failed)?;
        total += count as u64;
        stats.memory_bytes.fetch_add(count as u64, Relaxed);
    }
    to.shutdown().await.map_err(&write_failed)?;
    Ok(total)
}
