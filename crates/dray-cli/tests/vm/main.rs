//! Running VMs move between two agents: real QEMUs with guests that write and verify all the time.
//! One scenario a file; [`stage`] is what they have in common.

mod backfill;
mod backups;
mod bases;
mod between;
mod disks;
mod exchanged;
mod failures;
mod flatten;
mod gone_on;
mod half_released;
mod hand_back;
mod home;
mod input;
mod iothread;
mod last_step;
mod losses;
mod onward;
mod others;
mod paused;
mod qcow2;
mod released;
mod replugged;
mod resize;
mod restart;
mod restarts;
mod settled;
mod several;
mod shrunk;
mod stage;
mod strategies;
mod unanswered;
mod unlocked;
mod unstarted;
mod unsure_swap;
mod user;
