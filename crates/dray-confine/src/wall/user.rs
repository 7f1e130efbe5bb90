//! A user of the tool's own, without groups and capabilities.

use rustix::io::Errno;
use rustix::process::{Gid, Pid, Uid, geteuid, getpid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set, set_capabilities,
    set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};
use std::io;

/// Numbers that no account has (systemd, "Users, Groups, UIDs and GIDs": 1879048192 to 2147483647 are
/// unused). A tool's is this one and its process's, of which there are at most 2^22: so no two tools
/// are the same user, and nobody else is.
const FIRST_USER: u32 = 1_900_000_000;
/// The user of nobody: where the agent runs in a container that has no such high number.
const NOBODY: u32 = 65_534;

/// Gives up what the agent may. Whether this process is a user of its own now; an agent that is not
/// root can make it none.
pub(super) fn lower() -> io::Result<bool> {
    set_no_new_privs(true)?;
    let alone = geteuid().is_root() && change_user()?;
    clear_ambient_capability_set()?;
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    Ok(alone)
}

fn change_user() -> io::Result<bool> {
    set_thread_groups(&[])?;
    let own = FIRST_USER + Pid::as_raw(Some(getpid())) as u32;
    match become_user(own) {
        Err(Errno::INVAL) => become_user(NOBODY)?,
        other => other?,
    }
    Ok(geteuid().as_raw() == own)
}

fn become_user(number: u32) -> Result<(), Errno> {
    let (user, group) = (Uid::from_raw(number), Gid::from_raw(number));
    set_thread_res_gid(group, group, group)?;
    set_thread_res_uid(user, user, user)
}
