//! Exit codes: stable, so that scripts can rely on them.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | internal error |
//! | 2 | wrong arguments |
//! | 3 | the agent cannot be reached |
//! | 4 | the request or the configuration is wrong |
//! | 5 | no such VM, image, migration or peer |
//! | 6 | in use, or in a state in which the request is impossible |
//! | 7 | not allowed |
//! | 8 | the other host cannot be reached |
//! | 9 | QEMU refused, failed or ended |
//! | 10 | no space left |
//! | 11 | a disk could not be read or written |
//! | 12 | cancelled |
//! | 13 | the target is not equal to the source |
//! | 14 | the software on the other side is too old or too new |
//! | 15 | the request would lose data, and the operator has not accepted that |
//! | 16 | some migrations of a batch did not complete; the table says which |
//! | 130 | Ctrl-C ended the display; the migration continues |

use dray_api::ErrorKind;
use std::process::ExitCode;

/// The table above, for `dray --help`.
pub const TABLE: &str = "\
Exit codes:
    0  done
    1  internal error
    2  wrong arguments
    3  the agent cannot be reached
    4  the request or the configuration is wrong
    5  no such VM, image, migration or peer
    6  in use, or in a state in which the request is impossible
    7  not allowed
    8  the other host cannot be reached
    9  QEMU refused, failed or ended
   10  no space left
   11  a disk could not be read or written
   12  cancelled
   13  the target is not equal to the source
   14  the software on the other side is too old or too new
   15  the request would lose data, and you have not accepted that
   16  some migrations of a batch did not complete; the table says which
  130  Ctrl-C ended the display; the migration continues";

/// Several were begun with one command, and not all came through.
pub const NOT_ALL: u8 = 16;

/// Ctrl-C while watching, as shells count signals: 128 + SIGINT.
pub const DETACHED: u8 = 130;

/// The exit code of an error.
pub const fn number(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::Internal => 1,
        ErrorKind::AgentUnreachable => 3,
        ErrorKind::Invalid => 4,
        ErrorKind::NotFound => 5,
        ErrorKind::Conflict => 6,
        ErrorKind::Denied => 7,
        ErrorKind::Peer => 8,
        ErrorKind::Hypervisor => 9,
        ErrorKind::NoSpace => 10,
        ErrorKind::Io => 11,
        ErrorKind::Cancelled => 12,
        ErrorKind::Verification => 13,
        ErrorKind::Unsupported => 14,
        ErrorKind::DataAtRisk => 15,
    }
}

/// The same as a process gives it back.
pub fn code(kind: ErrorKind) -> ExitCode {
    ExitCode::from(number(kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_a_code_of_its_own_in_the_table() {
        let mut seen = std::collections::BTreeSet::new();
        for kind in ErrorKind::ALL {
            assert!(seen.insert(number(kind)), "{kind:?} shares its code");
            let start = format!("{:>5}  ", number(kind));
            assert!(
                TABLE.lines().any(|line| line.starts_with(&start)),
                "{kind:?} not in the table"
            );
        }
    }
}
