//! The `dray` command from the outside: the real binary against a fake agent that speaks the real
//! API on a socket of its own.

mod arguments;
mod errors;
mod examples;
mod fake;
mod golden;
mod help;
mod links;
mod local;
mod migration;
mod requests;
mod results;
mod sim;
