//! What is made of migrations without their loops, by what is durable of them ([`folder`](crate::folder)).
//!
//! * [`revive`]: which migrations a restart brings back, and what stays closed; [`waiting`]: what they wait for.
//! * [`claim`]: taking an image without asking.
//! * [`fate`]: what a source says of a migration to a target that has no session with it.

pub mod claim;
pub mod fate;
pub mod revive;
pub mod waiting;
