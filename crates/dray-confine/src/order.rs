//! What the agent tells the launcher: one message with all descriptors, then the order as JSON until
//! the end of the stream.

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

/// Most descriptors that a tool is handed, beside that of its output: the system takes 253 in one message. A chain has
/// one a layer.
pub(crate) const MAX_HANDED: usize = 252;
/// Longest order, in bytes: a chain of that many layers takes 100 KiB.
const MAX_ORDER: u64 = 1 << 20;

/// What is to run.
#[derive(Serialize, Deserialize, Debug, PartialEq, Eq)]
pub(crate) struct Order {
    /// The program's file.
    pub(crate) program: PathBuf,
    /// What it is called: the first word of its command line.
    pub(crate) name: String,
    pub(crate) arguments: Vec<String>,
    /// The process with which it ends.
    pub(crate) parent: i32,
}

/// Sends an order, with its descriptors.
pub(crate) fn send(mut to: UnixStream, order: &Order, descriptors: &[OwnedFd]) -> io::Result<()> {
    let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(OwnedFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_HANDED + 1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
        return Err(io::Error::other("too many descriptors for one tool"));
    }
    sendmsg(&to, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)?;
    to.write_all(&serde_json::to_vec(order)?)
}

/// Receives an order. The descriptors get the lowest free numbers, one after the other, and stay open
/// in the program that this process becomes.
pub(crate) fn receive(from: &mut UnixStream) -> io::Result<(Order, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_HANDED + 1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let came =
        recvmsg(&*from, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::empty())?;
    if came.bytes == 0 {
        return Err(io::Error::other("the agent has ended"));
    }
    let descriptors = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
        _ => Vec::new(),
    });
    let descriptors = descriptors.collect();
    let mut order = Vec::new();
    from.take(MAX_ORDER).read_to_end(&mut order)?;
    Ok((serde_json::from_slice(&order)?, descriptors))
}
