//! dray's side of QEMU: everything that is done to a VM through its QMP socket.
//!
//! * [`qmp`]: the client.
//! * [`error`]: the error type.
//!
//! Nothing here knows other agents or the data path: images come as paths, servers as socket paths
//! and export names. Nothing keeps state between calls except the VM itself and the values that
//! the functions return.

#![forbid(unsafe_code)]

pub mod error;
pub mod qmp;

pub use error::{Error, ErrorKind, Result};
pub use qmp::{Event, Events, Qmp, Version};
