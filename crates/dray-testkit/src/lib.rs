//! What dray's tests are made with, and dray itself never is.
//!
//! * [`guest`]: real QEMU guests that write and verify, and the bystander who knows what an image
//!   must hold.
//! * [`lab`]: hosts with real agents on loopback.
//! * [`numbered`]: blocks that say which write they hold.

pub mod guest;
pub mod lab;
pub mod numbered;
