//! Tests with real QEMUs: disks come under an NBD server and go back, guests move, and monitors go wrong.

mod adopt;
mod asleep;
mod cancelled;
mod growing;
mod iothread;
mod migrate;
mod parked;
mod passed_through;
mod qmp;
mod refuse;
mod support;
mod unsure;
mod unsure_flatten;
mod unsure_resize;
mod unsure_source;
mod unsure_target;
