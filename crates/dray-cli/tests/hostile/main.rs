//! Attacks on real agents. Each test is one: it fails where the attack succeeds.
//!
//! * [`local`]: users of this host.

mod local;
