//! The operations on migrations that need no owner loop, by their durable state ([`folder`](crate::folder)).
//!
//! * [`revive`]: which migrations a restart brings back, and what stays closed; [`waiting`]: what they wait for.
//! * [`claim`]: taking an image without asking; `case`: what that is, if it may be.
//! * [`fate`]: what a source says of a migration to a target that has no session with it.

mod case;
pub mod claim;
pub mod fate;
pub mod revive;
pub mod waiting;
