//! What dray's tests are made with, and dray itself never is.
//!
//! * [`guest`]: real QEMU guests that write and verify, and the bystander who knows what an image
//!   must hold.
//! * [`lab`]: hosts with real agents on [`loopback`].
//! * [`power`]: machines that lose their power, and what must be on their disks then.
//! * [`numbered`]: blocks that say which write they hold.
//! * [`random`], [`counts`], [`seeds`]: choices that a seed repeats, what came of them, one seed after the other.

pub mod counts;
pub mod guest;
pub mod lab;
pub mod loopback;
pub mod losses;
pub mod numbered;
pub mod power;
pub mod random;
pub mod seeds;
