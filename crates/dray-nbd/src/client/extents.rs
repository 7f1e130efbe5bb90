//! Block status: what the server sent, cut to what was asked for.

use super::error::ClientError;

/// A stretch of the export of which a metadata context says the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Where it begins, in bytes.
    pub offset: u64,
    /// How long it is, in bytes; never zero.
    pub len: u64,
    /// The context's own flags: of `base:allocation` 1 is a hole and 2 reads as zeros; of a QEMU
    /// dirty bitmap 1 is dirty.
    pub flags: u32,
}

/// Appends extents of `(length, flags)` that begin at `at` and returns where they end, at most
/// `end`: servers may say more than they were asked, and less.
pub(super) fn append(
    all: &mut Vec<Extent>,
    sent: &[(u32, u32)],
    mut at: u64,
    end: u64,
) -> Result<u64, ClientError> {
    if sent.is_empty() {
        return Err(ClientError::Protocol("block status without an extent"));
    }
    for (len, flags) in sent {
        if *len == 0 {
            return Err(ClientError::Protocol("extent of no bytes"));
        }
        let len = u64::from(*len).min(end - at);
        if len == 0 {
            break;
        }
        match all.last_mut() {
            Some(last) if last.flags == *flags => last.len += len,
            _ => all.push(Extent { offset: at, len, flags: *flags }),
        }
        at += len;
    }
    Ok(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_are_joined_and_cut() {
        let mut all = Vec::new();
        let at = append(&mut all, &[(10, 0), (10, 0), (5, 1)], 100, 200).unwrap();
        assert_eq!(at, 125);
        let at = append(&mut all, &[(1000, 1), (7, 0)], at, 200).unwrap();
        assert_eq!(at, 200);
        let expected = [(100, 20, 0), (120, 80, 1)];
        assert_eq!(all, expected.map(|(offset, len, flags)| Extent { offset, len, flags }));
    }

    #[test]
    fn a_server_that_says_nothing_is_refused() {
        assert!(append(&mut Vec::new(), &[], 0, 10).is_err());
        assert!(append(&mut Vec::new(), &[(0, 1)], 0, 10).is_err());
    }
}
