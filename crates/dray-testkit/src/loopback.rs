//! Networks on loopback that no other lab of this machine uses.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::atomic::{AtomicU32, Ordering};

/// Networks of 256 addresses in 127/8 that are given to labs: 127.1.0 to 127.250.249.
const NETS: u32 = 250 * 250;

/// 256 addresses, so that agents keep their port over a restart. Nobody else has them until this is dropped.
#[derive(Debug)]
pub struct Loopback {
    net: u32,
    _held: UnixListener,
}

impl Loopback {
    /// A network that no lab has, and that none of this process has had: what a test has left listening would answer
    /// to another one.
    ///
    /// # Errors
    /// What the system reports, or that all networks are taken.
    pub fn reserve() -> io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let first = std::process::id().wrapping_mul(251);
        for _ in 0..NETS {
            let net = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % NETS;
            // A name that the kernel gives to one process, and takes back when that ends.
            let name = SocketAddr::from_abstract_name(format!("dray-lab-net-{net}"))?;
            match UnixListener::bind_addr(&name) {
                Ok(held) => return Ok(Self { net, _held: held }),
                Err(why) if why.kind() == io::ErrorKind::AddrInUse => {}
                Err(why) => return Err(why),
            }
        }
        Err(io::Error::other("all loopback networks are taken"))
    }

    /// An address of it.
    #[must_use]
    pub fn address(&self, host: u8) -> String {
        format!("127.{}.{}.{host}", 1 + self.net / 250, self.net % 250)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn nobody_gets_a_network_that_somebody_has_or_that_this_process_has_had() {
        let held: Vec<_> = (0..300).map(|_| Loopback::reserve().unwrap()).collect();
        let mut seen: BTreeSet<_> = held.iter().map(|net| net.address(1)).collect();
        assert_eq!(seen.len(), 300);
        drop(held);
        assert!((0..300).all(|_| seen.insert(Loopback::reserve().unwrap().address(1))));
    }
}
