//! Agents on loopback with real certificates: what works, and what every wrong peer is told.

mod certificates;
mod control;
mod data;
mod hello;
mod lab;
mod memory;
mod requests;
mod tunnel;
