//! Running VMs' disks leave their chains and come home. [`freeze`] puts one on an overlay;
//! [`merge_back`] merges that back into the chain, when the guest stays here after all; [`recover`]
//! ends what an agent died in.

mod freeze;
mod merge_back;
mod recover;
