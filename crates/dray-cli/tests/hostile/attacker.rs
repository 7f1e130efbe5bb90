//! A host that was taken over: it has a certificate of the authority, and says whatever it likes.

use crate::lab::{ALL_RIGHTS, Host, Lab, wait_for};
use dray_net::tls::Identity;
use dray_net::{BlockingStream, DialSettings, NetError, Stream, dial, requests};
use dray_types::MigrationId;
use dray_wire::request::{Reply, Request};
use dray_wire::{Hello, StreamKind};
use std::time::Duration;
use tokio::runtime::Runtime;

/// Longest wait for an answer.
const ANSWER: Duration = Duration::from_secs(20);

/// Somebody with a host's certificate.
pub struct Attacker {
    /// Runs its connections.
    pub runtime: Runtime,
    /// Its certificate.
    pub identity: Identity,
}

/// A lab whose hosts give each other `rights`, a line of the configuration; hosta runs.
pub fn lab(rights: &str, more: &str) -> Lab {
    let mut lab = Lab::with(|_, text| text.replace(ALL_RIGHTS, rights) + more);
    start(&mut lab.a);
    lab
}

/// Starts the agent and waits until peers can connect.
pub fn start(host: &mut Host) {
    host.start();
    let listens = || std::net::TcpStream::connect(&host.address).is_ok();
    wait_for("the agent to listen", ANSWER, listens).unwrap();
}

impl Attacker {
    /// With the certificate of `name`.
    pub fn new(lab: &Lab, name: &str) -> Self {
        let identity = Identity::load(&lab.dir.path().join("pki").join(name)).unwrap();
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        Self { runtime: runtime.worker_threads(2).enable_all().build().unwrap(), identity }
    }

    /// Asks one thing.
    pub fn ask(&self, to: &Host, request: &Request) -> Result<Reply, NetError> {
        let asked = requests::ask(&self.identity, to.name, &to.address, request, ANSWER);
        self.runtime.block_on(asked)
    }

    /// Opens a stream.
    pub fn open(
        &self,
        to: &Host,
        kind: StreamKind,
        migration: Option<MigrationId>,
    ) -> Result<Stream, NetError> {
        let hello = Hello {
            agent: "attacker".into(),
            migration,
            session: 1,
            stream: 0,
            features: dray_net::FEATURES.map(str::to_owned).to_vec(),
        };
        let settings = DialSettings::default();
        let dialled = dial(&self.identity, to.name, &to.address, kind, &hello, &settings);
        self.runtime.block_on(dialled)
    }

    /// Opens a stream for questions one after the other.
    pub fn open_blocking(&self, to: &Host, kind: StreamKind) -> Result<BlockingStream, NetError> {
        let stream = self.open(to, kind, None)?;
        let _inside = self.runtime.enter();
        stream.into_blocking()
    }
}
