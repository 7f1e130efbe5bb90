//! Landlock: which paths a tool may open, and that it reaches nobody by TCP, abstract socket or signal.

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use std::io;
use std::path::Path;

/// What a tool reads when it starts: itself, libraries, and modules of QEMU's. The last two are the
/// folders of Nix and Guix.
const SYSTEM: [&str; 7] =
    ["/usr", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/nix/store", "/gnu/store"];
/// The oldest version of landlock that closes the file system (Linux 5.13).
const LEAST: ABI = ABI::V1;
/// The newest that is known here: the system closes as much of it as it knows.
const MOST: ABI = ABI::V9;

/// Closes all paths but the system's and `program`.
pub(super) fn close(program: &Path) -> io::Result<()> {
    let status = restrict(program).map_err(|why| {
        let hint = "the system needs landlock: Linux 5.13 or newer, with `landlock` in lsm=";
        io::Error::other(format!("{why}; {hint}"))
    })?;
    match status {
        RulesetStatus::NotEnforced => Err(io::Error::other("landlock is not enforced")),
        RulesetStatus::PartiallyEnforced | RulesetStatus::FullyEnforced => Ok(()),
    }
}

fn restrict(program: &Path) -> Result<RulesetStatus, RulesetError> {
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(LEAST))?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(MOST))?
        .handle_access(AccessNet::from_all(MOST))?
        .scope(Scope::from_all(MOST))?
        .create()?;
    let paths = SYSTEM.iter().map(Path::new).chain([program]);
    // What is not there cannot be opened.
    for path in paths.filter_map(|path| PathFd::new(path).ok().map(|open| (path, open))) {
        let (path, open) = path;
        let all = AccessFs::from_read(MOST);
        let may = if path.is_dir() { all } else { all & AccessFs::from_file(MOST) };
        rules = rules.add_rule(PathBeneath::new(open, may))?;
    }
    Ok(rules.restrict_self()?.ruleset)
}
