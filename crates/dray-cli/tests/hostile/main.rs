//! Attacks on real agents. Each test is one: it fails where the attack succeeds.
//!
//! * [`lab`]: the hosts. [`attacker`]: a host of the fleet that was taken over: it has a good certificate.
//! * [`guests`]: clients of other hosts over NBD with TLS, [`remote`], who want images that are not theirs.
//! * [`dismissed`]: who was let in once, and may not any more.
//! * [`folders`]: who may write to the folder of a pool.
//! * [`greedy`]: connections without end.
//! * [`memory`]: messages and answers that are to fill the agent's memory.
//! * [`store`]: the backup store in its hands.
//! * [`peers`]: what such a peer asks for without having the right.
//! * [`local`]: users of this host.
//! * [`chains`], [`heads`], on a [`stage`]: a QEMU whose guest broke out writes what it likes into its images, and
//!   into their heads above all.

mod attacker;
mod chains;
mod dismissed;
mod folders;
mod greedy;
mod guests;
mod heads;
#[path = "../disks/lab.rs"]
#[allow(dead_code, reason = "these tests need less of the lab than those that it was made for")]
mod lab;
mod local;
mod memory;
mod peers;
mod remote;
mod stage;
mod store;
