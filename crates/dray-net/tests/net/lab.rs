//! Two agents on loopback, a peer that says whatever a test wants, and a link that counts.

use dray_net::pki;
use dray_net::tls::{CA_CERT, CLIENT_CERT, CLIENT_KEY, Identity};
use dray_net::{AGENT, DialSettings, Incoming, ListenSettings, Listener, NetError, Stream, dial};
use dray_types::MigrationId;
use dray_wire::{Hello, StreamKind};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// Hosts hosta and hostb with certificates of one authority.
pub struct Lab {
    pub dir: tempfile::TempDir,
    pub hosta: Identity,
    pub hostb: Identity,
}

pub fn hello() -> Hello {
    Hello {
        agent: AGENT.to_owned(),
        migration: Some(MigrationId(7)),
        session: 1,
        stream: 0,
        features: vec!["zstd".to_owned()],
    }
}

impl Lab {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        pki::create_ca(dir.path()).unwrap();
        let host = |name| Identity::load(&pki::issue(dir.path(), name, &[]).unwrap()).unwrap();
        let (hosta, hostb) = (host("hosta"), host("hostb"));
        Self { dir, hosta, hostb }
    }

    pub fn host_dir(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// hostb listens, knows hosta, and welcomes; what arrives comes out of the channel.
    pub async fn listen(&self) -> (SocketAddr, mpsc::Receiver<Stream>) {
        let (to, accepted) = mpsc::channel(8);
        let address = serve(&self.hostb, ListenSettings::default(), move |incoming: Incoming| {
            let to = to.clone();
            async move {
                let features = incoming.hello.features.clone();
                if let Ok(stream) = incoming.welcome(features).await {
                    let _ = to.send(stream).await;
                }
            }
        })
        .await;
        (address, accepted)
    }

    pub async fn dial(&self, address: SocketAddr, kind: StreamKind) -> Result<Stream, NetError> {
        let settings = DialSettings::default();
        dial(&self.hosta, "hostb", &address.to_string(), kind, &hello(), &settings).await
    }

    /// Both ends of one stream, hosta's first.
    pub async fn pair(&self, kind: StreamKind) -> (Stream, Stream) {
        let (address, mut accepted) = self.listen().await;
        let dialled = self.dial(address, kind).await.unwrap();
        (dialled, accepted.recv().await.unwrap())
    }

    /// A TLS connection of hosta that follows no protocol, and hostb's end of the listener.
    pub async fn raw(&self, address: SocketAddr) -> tokio_rustls::client::TlsStream<TcpStream> {
        raw_tls(&self.host_dir("hosta"), address).await.unwrap()
    }
}

/// Starts a listener that knows hosta.
pub async fn serve<H, F>(identity: &Identity, settings: ListenSettings, handle: H) -> SocketAddr
where
    H: Fn(Incoming) -> F + Send + Sync + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let listener = Listener::bind(([127, 0, 0, 1], 0).into(), settings).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(listener.run(
        identity.clone(),
        |name| (name == "hosta").then(|| name.to_owned()),
        handle,
    ));
    address
}

/// TLS to hostb with the client certificate in `dir`.
pub async fn raw_tls(
    dir: &Path,
    address: SocketAddr,
) -> std::io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(dir.join(CA_CERT)).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(
            vec![CertificateDer::from_pem_file(dir.join(CLIENT_CERT)).unwrap()],
            PrivateKeyDer::from_pem_file(dir.join(CLIENT_KEY)).unwrap(),
        )
        .unwrap();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let tcp = TcpStream::connect(address).await?;
    connector.connect(ServerName::try_from("hostb").unwrap(), tcp).await
}

/// A link between a dialler and `target` that counts, and slows down to `rate` bytes a second.
pub struct Link {
    pub address: SocketAddr,
    near: Arc<Mutex<Vec<RawFd>>>,
    pub to_target: Arc<AtomicU64>,
    pub to_source: Arc<AtomicU64>,
}

impl Link {
    pub async fn to(target: SocketAddr, rate: Option<f64>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (to_target, to_source) = <(Arc<AtomicU64>, Arc<AtomicU64>)>::default();
        let counts = (Arc::clone(&to_target), Arc::clone(&to_source));
        let free_at = Arc::new(tokio::sync::Mutex::new(tokio::time::Instant::now()));
        let all = Arc::<Mutex<Vec<RawFd>>>::default();
        let ends = Arc::clone(&all);
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                // Not a copy: that would keep the connection open when the tasks have closed it.
                ends.lock().unwrap().push(near.as_raw_fd());
                let far = TcpStream::connect(target).await.unwrap();
                far.set_nodelay(true).unwrap();
                near.set_nodelay(true).unwrap();
                let (near_read, near_write) = near.into_split();
                let (far_read, far_write) = far.into_split();
                let shape = rate.map(|rate| (rate, Arc::clone(&free_at)));
                tokio::spawn(carry(near_read, far_write, Arc::clone(&counts.0), shape));
                tokio::spawn(carry(far_read, near_write, Arc::clone(&counts.1), None));
            }
        });
        Self { address, near: all, to_target, to_source }
    }

    /// From now on nothing that is sent to the target gets here, and nobody says so: the kernel
    /// drops what arrives for the link's ends before TCP sees it. All of them must be open.
    #[allow(unsafe_code)]
    pub fn swallow(&self) {
        let mut nothing =
            libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 };
        let program = libc::sock_fprog { len: 1, filter: &raw mut nothing };
        for end in self.near.lock().unwrap().iter() {
            // SAFETY: the kernel refuses what is no socket, and copies the program, whose one instruction
            // outlives the call.
            let done = unsafe {
                libc::setsockopt(
                    *end,
                    libc::SOL_SOCKET,
                    libc::SO_ATTACH_FILTER,
                    (&raw const program).cast(),
                    size_of::<libc::sock_fprog>() as libc::socklen_t,
                )
            };
            assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        }
    }

    pub fn both_ways(&self) -> u64 {
        self.to_target.load(Relaxed) + self.to_source.load(Relaxed)
    }
}

type Shape = Option<(f64, Arc<tokio::sync::Mutex<tokio::time::Instant>>)>;

async fn carry(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    count: Arc<AtomicU64>,
    shape: Shape,
) {
    let mut piece = vec![0; 16 * 1024];
    while let Ok(bytes @ 1..) = from.read(&mut piece).await {
        count.fetch_add(bytes as u64, Relaxed);
        if let Some((rate, free_at)) = &shape {
            let mut free_at = free_at.lock().await;
            let now = tokio::time::Instant::now();
            *free_at = (*free_at).max(now) + Duration::from_secs_f64(bytes as f64 / rate);
            tokio::time::sleep_until(*free_at).await;
        }
        if to.write_all(&piece[..bytes]).await.is_err() {
            return;
        }
    }
    let _ = to.shutdown().await;
}
